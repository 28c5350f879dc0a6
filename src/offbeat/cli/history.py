"""History of a run, from its events: read in one pass, with a memory that does not grow with the run."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.reading import parse_json, read_lines

Record = Mapping[str, Any]
"""One event."""

_KEPT = 20
_ROUND = re.compile(rb'\{"kind":"round","time":(\d{1,11}(?:\.\d+)?),"version":(\d{1,15}),.*\}\n', re.DOTALL)
_AGE = re.compile(rb'"pace/max_(?:sample|replayed)_age":(\d{1,15}(?:\.\d+)?)')
_LAST_TIME_S = 1e11
"""A later time than any calendar here can show."""
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "start": {"version": int},
    "resume": {"version": int},
    "health": {"component": str, "state": str, "detail": str},
    "worker_lost": {"lane": int, "reason": str},
    "eval": {"version": int, "metrics": dict},
    "stall": {"waits": list, "stacks": dict},
    "finish": {"reason": str},
    "restart": {"version": int, "reason": str, "attempt": int},
    "rollback": {"version": int, "reason": str, "attempt": int},
}
"""Fields of events that are relied on, and what they are."""
_REQUIRED = {"health": {"component", "state"}, "worker_lost": {"lane"}}

REPLAY_METRIC = "learn/replay_size"
"""As in ``observe.text``, whose imports would take longer than all of a command."""


@dataclass(slots=True)
class Component:
    """A part of the run, such as ``collector_0``; ``reason`` is why it was last lost."""

    name: str
    state: str = "unknown"
    since_s: float | None = None
    detail: str = ""
    restarts: int = 0
    reason: str = ""


@dataclass(slots=True)
class Loss:
    """A part of the run that was lost, and how long it took until its successor was up, if it ever was."""

    time_s: float
    component: str
    reason: str = ""
    seconds: float | None = None
    sources: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Restart:
    """An automatic restart of the whole run from a checkpoint; ``kind`` is ``restart`` or ``rollback``."""

    time_s: float
    kind: str
    version: int
    reason: str
    attempt: int


@dataclass(slots=True)
class RunHistory:
    """History of a run. Times are unix seconds; lists hold the newest and have a count beside.

    ``dial`` is the newest record of its kind, ``num_moves`` how often the tuner has moved k since it began.
    """

    began_s: float | None = None
    last_s: float | None = None
    last_kind: str = ""
    version: int = 0
    num_starts: int = 0
    last_round: dict[str, Any] = field(default_factory=dict)
    round_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    worst_staleness: float | None = None
    evaluation: Record | None = None
    failed_evaluation: Record | None = None
    num_failed_evaluations: int = 0
    failed_checkpoint: Record | None = None
    num_failed_checkpoints: int = 0
    skipped_checkpoint: Record | None = None
    num_skipped_checkpoints: int = 0
    dial: Record | None = None
    num_moves: int = 0
    finish: Record | None = None
    stall: Record | None = None
    components: dict[str, Component] = field(default_factory=dict)
    losses: deque[Loss] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num_losses: int = 0
    restarts: deque[Restart] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num_restarts: int = 0
    num_unreadable: int = 0

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the last round."""
        return dict(self.last_round.get("metrics", {}))

    @property
    def rounds_per_s(self) -> float | None:
        """Speed over the last rounds since the run was last started."""
        if len(self.round_times) < 2:
            return None
        (first_s, first), (last_s, last) = self.round_times[0], self.round_times[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s and last > first else None


def gist(reason: str) -> str:
    """Return the line of a reason that says most: the last one of a traceback, else the first."""
    lines = [line for line in reason.strip().splitlines() if line.strip()] or [""]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def failures(history: RunHistory) -> dict[str, str]:
    """Return what a run did not save or evaluate, a row each; empty when nothing is missing."""
    kinds = {
        "failed checkpoints": (history.num_failed_checkpoints, history.failed_checkpoint),
        "skipped checkpoints": (history.num_skipped_checkpoints, history.skipped_checkpoint),
        "failed evaluations": (history.num_failed_evaluations, history.failed_evaluation),
    }
    return {
        name: f"{count}, the last one of version {last.get('version')}: {gist(str(last.get('reason', '')))}"
        for name, (count, last) in kinds.items()
        if last is not None
    }


def read_history(path: Path) -> RunHistory:
    """Read a run's ``events.jsonl``. A line that is not whole is passed over and counted."""
    reader = _Reader()
    try:
        for line in read_lines(path):
            reader.take(line)
    except FileNotFoundError as error:
        raise OffbeatError(
            f"there is no {path.name} in {path.parent}: give the directory of a run"
        ) from error
    except OSError as error:
        raise OffbeatError(f"{path} cannot be read: {error.strerror}") from error
    return reader.end()


def _checked(event: Any) -> dict[str, Any]:
    """Return the event with its time as a float; an error if it has not the form of its kind."""
    kind, time_s = event["kind"], float(event["time"])
    if not isinstance(kind, str) or not 0 <= time_s < _LAST_TIME_S:
        raise ValueError("no event")
    if _REQUIRED.get(kind, set()) - event.keys():
        raise KeyError(kind)
    if not all(isinstance(wait, dict) for wait in event.get("waits", ())):
        raise TypeError("waits")
    return {**_with_types(event, _FIELDS.get(kind, {})), "time": time_s}


def _with_types(event: Any, types: Mapping[str, type]) -> dict[str, Any]:
    """Return the event if its fields are of these types or missing."""
    if not isinstance(event, dict) or not all(
        isinstance(event.get(name, kind()), kind) for name, kind in types.items()
    ):
        raise TypeError("a field of another type")
    return event


class _Reader:
    """Reads events one by one."""

    def __init__(self) -> None:
        self._history = RunHistory()
        self._round = b""
        self._open: dict[str, Loss] = {}  # component -> its loss, until it is up again

    def take(self, line: bytes) -> None:
        """Take one line. Rounds, by far the most, are not parsed but for three numbers."""
        if match := _ROUND.fullmatch(line):
            self._round = line
            self._trained(float(match[1]), int(match[2]), _AGE.findall(line))
            return
        try:
            event = _checked(parse_json(line))
        except (ValueError, KeyError, TypeError, OverflowError):
            self._history.num_unreadable += 1
            return
        self._history.last_s, self._history.last_kind = event["time"], event["kind"]
        match event["kind"]:
            case "start" | "resume":
                self._began(event)
            case "health":
                self._health(event)
            case "worker_lost":
                name, reason = f"collector_{event['lane']}", str(event.get("reason", ""))
                self._lost(name, event["time"], reason, "worker_lost")
            case "eval":
                self._history.evaluation = event
            case "eval_failed":
                self._history.failed_evaluation = event
                self._history.num_failed_evaluations += 1
            case "checkpoint_failed":
                self._history.failed_checkpoint = event
                self._history.num_failed_checkpoints += 1
            case "checkpoint_skipped":
                self._history.skipped_checkpoint = event
                self._history.num_skipped_checkpoints += 1
            case "dial":
                self._dial(event)
            case "stall":
                self._history.stall = event
            case "finish":
                self._history.finish = event
            case "restart" | "rollback":
                self._restarted(event)

    def end(self) -> RunHistory:
        """Return the history."""
        try:
            last = parse_json(self._round) if self._round else {}
            self._history.last_round = _with_types(last, {"metrics": dict})
        except (ValueError, TypeError):
            self._history.num_unreadable += 1
        return self._history

    def _trained(self, time_s: float, version: int, ages: Sequence[bytes]) -> None:
        history = self._history
        history.last_s, history.last_kind, history.version = time_s, "round", version
        history.round_times.append((time_s, version))
        if ages:
            history.worst_staleness = max(history.worst_staleness or 0.0, *map(float, ages))

    def _began(self, event: Record) -> None:
        history = self._history
        history.began_s = event["time"] if history.began_s is None else history.began_s
        history.num_starts += 1
        history.version = event.get("version", 0)
        history.round_times.clear()
        history.finish = None

    def _dial(self, event: Record) -> None:
        """Take a record of k; those of the tuner have a reason."""
        history, name = self._history, "off_policy_degree"
        if "reason" not in event:
            history.num_moves = 0
        elif history.dial is not None:
            history.num_moves += event.get(name) != history.dial.get(name)
        history.dial = event

    def _restarted(self, event: Record) -> None:
        history = self._history
        history.num_restarts += 1
        version, reason = event.get("version", 0), str(event.get("reason", ""))
        restart = Restart(event["time"], event["kind"], version, reason, event.get("attempt", 1))
        history.restarts.append(restart)
        history.finish = None

    # ------------------------------------------------------------ health

    def _health(self, event: Record) -> None:
        name, state, detail = event["component"], event["state"], str(event.get("detail", ""))
        component = self._component(name)
        if state == "down":
            self._lost(name, event["time"], detail, "health")
        elif state == "up" and name in self._open:
            loss = self._open.pop(name)
            loss.seconds = event["time"] - loss.time_s
            component.restarts += 1
        component.state, component.since_s, component.detail = state, event["time"], detail

    def _component(self, name: str) -> Component:
        return self._history.components.setdefault(name, Component(name))

    def _lost(self, name: str, time_s: float, reason: str, source: str) -> None:
        """A loss is recorded up to twice, by ``health`` and by ``worker_lost``, in either order."""
        loss = self._open.get(name)
        if loss is None or source in loss.sources:
            loss = self._open[name] = Loss(time_s, name)
            self._history.losses.append(loss)
            self._history.num_losses += 1
        loss.sources.add(source)
        loss.reason = loss.reason or reason
        self._component(name).reason = loss.reason
