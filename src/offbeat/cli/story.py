"""What became of a run, from its events: read in one pass, with a memory that does not grow with the run."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError

Record = Mapping[str, Any]
"""One event."""

_KEPT = 20
_ROUND = re.compile(rb'\{"kind":"round","time":([\d.]+),"version":(\d+),.*\}\n', re.DOTALL)
_AGE = re.compile(rb'"pace/max_sample_age":([\d.]+)')

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
    """The whole run went on from a checkpoint by itself; ``kind`` is ``restart`` or ``rollback``."""

    time_s: float
    kind: str
    version: int
    reason: str
    attempt: int


@dataclass(slots=True)
class Story:
    """Everything the events tell. Times are unix seconds; lists hold the newest and have a count beside."""

    began_s: float | None = None
    last_s: float | None = None
    last_kind: str = ""
    version: int = 0
    num_starts: int = 0
    last_round: dict[str, Any] = field(default_factory=dict)
    round_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    worst_staleness: float | None = None
    evaluation: Record | None = None
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
        """What the last round measured."""
        return dict(self.last_round.get("metrics", {}))

    @property
    def rounds_per_s(self) -> float | None:
        """Speed over the last rounds since the run was last started."""
        if len(self.round_times) < 2:
            return None
        (first_s, first), (last_s, last) = self.round_times[0], self.round_times[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s and last > first else None


def read_story(path: Path) -> Story:
    """Read a run's ``events.jsonl``. A line that is not whole is passed over and counted."""
    teller = _Teller()
    try:
        with path.open("rb") as file:
            for line in file:
                teller.take(line)
    except FileNotFoundError as error:
        raise OffbeatError(
            f"there is no {path.name} in {path.parent}: give the directory of a run"
        ) from error
    return teller.end()


class _Teller:
    """Takes events one by one."""

    def __init__(self) -> None:
        self._story = Story()
        self._round = b""
        self._open: dict[str, Loss] = {}  # component -> its loss, until it is up again
        self._takers: dict[str, Callable[[Record], None]] = {
            "start": self._began,
            "resume": self._began,
            "health": self._health,
            "worker_lost": self._worker_lost,
            "eval": self._evaluated,
            "stall": self._stalled,
            "finish": self._finished,
            "restart": self._restarted,
            "rollback": self._restarted,
        }

    def take(self, line: bytes) -> None:
        """Take one line. Rounds, by far the most, are not parsed but for three numbers."""
        if match := _ROUND.fullmatch(line):
            self._round = line
            self._trained(float(match[1]), int(match[2]), _AGE.search(line))
            return
        try:
            event = json.loads(line)
            time_s, kind = float(event["time"]), str(event["kind"])
        except (ValueError, KeyError, TypeError):
            self._story.num_unreadable += 1
            return
        self._story.last_s, self._story.last_kind = time_s, kind
        if kind in self._takers:
            self._takers[kind](event)

    def end(self) -> Story:
        """Return the story."""
        if self._round:
            self._story.last_round = json.loads(self._round)
        return self._story

    def _trained(self, time_s: float, version: int, age: re.Match[bytes] | None) -> None:
        story = self._story
        story.last_s, story.last_kind, story.version = time_s, "round", version
        story.round_times.append((time_s, version))
        if age is not None:
            story.worst_staleness = max(story.worst_staleness or 0.0, float(age[1]))

    def _began(self, event: Record) -> None:
        story = self._story
        story.began_s = event["time"] if story.began_s is None else story.began_s
        story.num_starts += 1
        story.version = event.get("version", 0)
        story.round_times.clear()
        story.finish = None

    def _evaluated(self, event: Record) -> None:
        self._story.evaluation = event

    def _stalled(self, event: Record) -> None:
        self._story.stall = event

    def _finished(self, event: Record) -> None:
        self._story.finish = event

    def _restarted(self, event: Record) -> None:
        story = self._story
        story.num_restarts += 1
        story.restarts.append(
            Restart(
                event["time"],
                event["kind"],
                event.get("version", 0),
                str(event.get("reason", "")),
                event.get("attempt", 1),
            )
        )
        story.finish = None

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

    def _worker_lost(self, event: Record) -> None:
        self._lost(f"collector_{event['lane']}", event["time"], str(event.get("reason", "")), "worker_lost")

    def _component(self, name: str) -> Component:
        return self._story.components.setdefault(name, Component(name))

    def _lost(self, name: str, time_s: float, reason: str, source: str) -> None:
        """A loss is told up to twice, by ``health`` and by ``worker_lost``, in either order."""
        loss = self._open.get(name)
        if loss is None or source in loss.sources:
            loss = self._open[name] = Loss(time_s, name)
            self._story.losses.append(loss)
            self._story.num_losses += 1
        loss.sources.add(source)
        loss.reason = loss.reason or reason
        self._component(name).reason = loss.reason
