"""Judgements about parts of a run: is it alive, may it be started again, does it diverge, who waits for whom.

Nothing here touches a process or a clock: times come in, verdicts go out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from offbeat.config.models import RuntimeConfig

_AWAY_S = 2.0
_BUSY_SHARE = 0.1
_STOPPED_SHARE = 0.125
_ROUNDS_REMEMBERED = 20
_ROUNDS_BEFORE_JUDGING = 5


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
        self._seen_s = self._asked_s = now_s

    def is_dead(self, count: int, cpu_s: float, now_s: float, is_stopped: bool = False) -> bool:
        """Judge by the counter and the processor time used so far; to be asked about once a second."""
        if (away_s := now_s - self._asked_s) > _AWAY_S:  # the asker itself did not run: blame nobody
            self._seen_s += away_s
        self._asked_s = now_s
        is_busy = cpu_s - self._cpu_s > _BUSY_SHARE * self._timeout_s
        if count != self._count or is_busy or math.isinf(self._cpu_s):
            self._count, self._cpu_s, self._seen_s = count, cpu_s, now_s
        return now_s - self._seen_s >= self._timeout_s * (_STOPPED_SHARE if is_stopped else 1.0)


@dataclass(slots=True)
class RestartBudget:
    """How often collectors may be replaced, and how soon.

    The first replacement comes at once. A collector that is lost again before it made a segment waits, longer
    each time.
    """

    config: RuntimeConfig
    _lost_at_s: deque[float] = field(default_factory=deque)
    _in_a_row: dict[int, int] = field(default_factory=dict)

    def lost(self, collector: int, now_s: float) -> float:
        """A collector was lost; return how many seconds to wait before it is replaced."""
        self._lost_at_s.append(now_s)
        while self._lost_at_s[0] < now_s - self.config.restart_window_s:
            self._lost_at_s.popleft()
        before = self._in_a_row.get(collector, 0)
        self._in_a_row[collector] = before + 1
        if before == 0:
            return 0.0
        return min(self.config.restart_backoff_s * 2.0 ** (before - 1), self.config.restart_backoff_max_s)

    def worked(self, collector: int) -> None:
        """A collector made a segment."""
        self._in_a_row.pop(collector, None)

    @property
    def is_spent(self) -> bool:
        """Whether more collectors were lost within the window than the configuration allows."""
        return len(self._lost_at_s) > self.config.max_worker_restarts


class LossWatch:
    """Notices a learner that diverges: NaN, infinity, or a loss far above what it was."""

    def __init__(self, explosion_factor: float | None) -> None:
        self._factor = explosion_factor
        self._recent: dict[str, deque[float]] = {}

    def verdict(self, metrics: Mapping[str, float]) -> str | None:
        """What is wrong with a round's metrics, None when nothing is."""
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


@dataclass(frozen=True, slots=True)
class Wait:
    """One edge of the wait graph: who waits for whom, for how long, and how long it may, by which setting.

    Example: ``Wait("round 7", "collector_1 (ticket 14)", 12.5, 120.0, "async_training.generation_timeout")``.
    """

    who: str
    whom: str
    since_s: float
    limit_s: float
    limit_key: str

    def to_record(self) -> dict[str, Any]:
        """As an event holds it."""
        record = {"who": self.who, "for": self.whom, "since_s": round(self.since_s, 3)}
        return {**record, "limit_s": self.limit_s, "limit_key": self.limit_key}


def describe_stall(headline: str, waits: Sequence[Wait], stacks: Mapping[str, str]) -> str:
    """The report of a run that stands still: what, who waits for whom, where the processes are."""
    lines = [headline]
    if waits:
        lines.append("who waits for whom:")
        lines += [
            f"  {wait.who} waits for {wait.whom} since {wait.since_s:.1f} s"
            f" (limit {wait.limit_s:g} s, {wait.limit_key})"
            for wait in waits
        ]
    for name, stack in stacks.items():
        lines += [f"{name} was here:", *(f"  {line}" for line in stack.splitlines())]
    return "\n".join(lines)
