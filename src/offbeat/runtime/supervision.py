"""Health checks: is a worker alive, does a learner diverge."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from statistics import median

import psutil

_SUSPENDED_S = 2.0
_BUSY_SHARE = 0.1
_STOPPED_SHARE = 0.125
_ROUNDS_REMEMBERED = 20
_ROUNDS_BEFORE_JUDGING = 5


def process_state(pid: int) -> tuple[float, str] | None:
    """Processor time that a process has used, and its state in psutil's words; None when it is gone."""
    try:
        process = psutil.Process(pid)
        used = process.cpu_times()
        return used.user + used.system, str(process.status())
    except psutil.Error:
        return None


def seconds_since(began_ns: int) -> float | None:
    """Return the seconds since a piece of work began (see ``CollectorServer.since``); None between two."""
    return None if began_ns == 0 else max(0.0, time.monotonic() - began_ns / 1e9)


class Pulse:
    """Tells a part that has died from one that is busy, by a counter that it moves while it lives.

    A process that is deep in native code cannot move its counter, but uses the processor: it counts as
    busy, and the time limit of its ticket judges it. A blocked one does neither. One that the system shows as
    stopped is given an eighth of the time.
    """

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._count = -1
        self._cpu_s = math.inf
        self._seen_s = self._polled_at_s = now_s

    def is_dead(self, count: int, cpu_s: float, now_s: float, is_stopped: bool = False) -> bool:
        """Judge by the counter and the processor time used so far; to be asked about once a second."""
        if (suspended_s := now_s - self._polled_at_s) > _SUSPENDED_S:
            self._seen_s += suspended_s  # extend the deadline by the time this process was suspended
        self._polled_at_s = now_s
        is_busy = cpu_s - self._cpu_s > _BUSY_SHARE * self._timeout_s
        if count != self._count or is_busy or math.isinf(self._cpu_s):
            self._count, self._cpu_s, self._seen_s = count, cpu_s, now_s
        return now_s - self._seen_s >= self._timeout_s * (_STOPPED_SHARE if is_stopped else 1.0)


class LossWatch:
    """Notices a learner that diverges: NaN, infinity, or a loss far above what it was."""

    def __init__(self, explosion_factor: float | None) -> None:
        self._factor = explosion_factor
        self._recent: dict[str, deque[float]] = {}

    def verdict(self, metrics: Mapping[str, float]) -> str | None:
        """Return what is wrong with a round's metrics, None when nothing is."""
        watched = {name: abs(value) for name, value in metrics.items() if _is_watched(name)}
        if wrong := [name for name, value in watched.items() if not math.isfinite(value)]:
            return ", ".join(f"{name} is {metrics[name]:g}" for name in wrong)
        if self._factor is not None:
            for name, value in watched.items():
                recent = self._recent.setdefault(name, deque(maxlen=_ROUNDS_REMEMBERED))
                usual = median(recent) if len(recent) >= _ROUNDS_BEFORE_JUDGING else math.inf
                if value > self._factor * max(usual, 1e-8):
                    return (
                        f"{name} is {metrics[name]:g}, more than {self._factor:g} times "
                        f"(run.explosion_factor) its median of the last rounds, {usual:g}"
                    )
                recent.append(value)
        return None


def _is_watched(name: str) -> bool:
    return name.startswith("learn/") and ("loss" in name or "grad_norm" in name)
