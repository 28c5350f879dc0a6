"""Repeat a recorded run serially: the same tickets with the same versions, the same order of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ReplayError
from offbeat.roles import Learner, published
from offbeat.runtime.base import CollectorRunner, LaneStart, Plan, close_learner, make_runner
from offbeat.seeding import derive_seed, reseed
from offbeat.types import Batch, Segment, Ticket


@dataclass(frozen=True, slots=True)
class Arrival:
    """A segment as the schedule records it: which collector made it, and with which weights."""

    ticket: int
    lane: int
    version: int
    deadline: int
    incarnation: int
    rollbacks: int = 0

    def to_record(self) -> dict[str, Any]:
        """A line of ``schedule.jsonl``."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {"kind": "segment", **fields}


@dataclass(frozen=True, slots=True)
class Round:
    """A round as the schedule records it: what it trained, in order."""

    version: int
    tickets: tuple[int, ...]
    degree: int

    def to_record(self) -> dict[str, Any]:
        """A line of ``schedule.jsonl``."""
        return {"kind": "round", "version": self.version, "tickets": self.tickets, "degree": self.degree}


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run without its data: arrivals by version, rounds by version."""

    arrivals: Mapping[int, tuple[Arrival, ...]]
    rounds: Mapping[int, Round]

    @staticmethod
    def from_records(records: Iterable[Mapping[str, Any]]) -> Schedule:
        """Read the lines of ``schedule.jsonl``; ReplayError when they are not those of a schedule."""
        try:
            return Schedule._from_records(records)
        except (KeyError, TypeError) as error:
            raise ReplayError(
                f"schedule.jsonl was damaged or edited, the run cannot be repeated ({error!r})"
            ) from error

    @staticmethod
    def _from_records(records: Iterable[Mapping[str, Any]]) -> Schedule:
        arrivals: dict[int, list[Arrival]] = {}
        rounds = {}
        for record in records:
            fields = {name: value for name, value in record.items() if name != "kind"}
            if record["kind"] == "gap":
                raise ReplayError("the schedule has a gap: the disk was full while the run went on")
            if record["kind"] == "segment":
                arrival = Arrival(**fields)
                arrivals.setdefault(arrival.version, []).append(arrival)
            else:
                rounds[record["version"]] = Round(
                    record["version"], tuple(record["tickets"]), record["degree"]
                )
        return Schedule({version: tuple(group) for version, group in arrivals.items()}, rounds)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Whether a serial repetition reached the recorded weights, bit for bit."""

    identical: bool
    digest: str
    recorded_digest: str
    rounds: int
    warnings: tuple[str, ...] = ()


class Replayer:
    """Repeats a schedule. Each version's tickets are collected when that version is reached.

    A collector's tickets have versions that never go down, so collecting version by version keeps each
    collector's own order; and order across collectors does not matter, since they share nothing.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        learner: Learner | None = None,
        tell: Callable[[int], None] | None = None,
    ) -> None:
        self._schedule = schedule
        self._tell = tell
        self._plan = plan
        self._learner = learner or plan.make_learner()
        self._version = 0
        self._runners: dict[int, tuple[int, CollectorRunner]] = {}
        self._segments: dict[int, Segment] = {}

    def run(self, until_version: int) -> Learner:
        """Train again, up to and without round ``until_version``; return the learner as it then is."""
        for version in range(self._version, until_version):
            weights = published(self._learner)
            for arrival in self._schedule.arrivals.get(version, ()):
                self._segments[arrival.ticket] = self._collect(arrival, weights)
            self._train(version)
            self._version = version + 1
            if self._tell is not None:
                self._tell(self._version)
        return self._learner

    def switch(self, plan: Plan) -> None:
        """Go on with a learner of other settings, as a run that was resumed with them did."""
        self._plan = plan
        state = self._learner.state_dict()
        close_learner(self._learner)
        self._learner = plan.make_learner(state)

    def close(self) -> None:
        """End the processes of a learner of several ranks."""
        close_learner(self._learner)

    def _collect(self, arrival: Arrival, weights: Any) -> Segment:
        incarnation, runner = self._runners.get(arrival.lane, (-1, None))
        if runner is None or incarnation != arrival.incarnation:
            runner = make_runner(self._plan.lane(arrival.lane, LaneStart(arrival.incarnation)))
            self._runners[arrival.lane] = (arrival.incarnation, runner)
        seed = reseed(derive_seed(self._plan.seed, "collect", arrival.ticket), arrival.rollbacks)
        ticket = Ticket(arrival.ticket, arrival.lane, arrival.version, arrival.deadline, seed)
        return runner.run(ticket, weights, None)

    def _train(self, version: int) -> None:
        recorded = self._schedule.rounds.get(version)
        if recorded is None:
            raise ReplayError(f"the schedule has no round {version}: schedule.jsonl was cut or edited")
        missing = [number for number in recorded.tickets if number not in self._segments]
        if missing:
            raise ReplayError(f"round {version} trained tickets {missing}, which the schedule does not have")
        segments = tuple(self._segments.pop(number) for number in recorded.tickets)
        self._learner.train(Batch(version, segments, recorded.degree))
