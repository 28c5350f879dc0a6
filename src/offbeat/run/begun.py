"""Begun work of tickets: what collectors gave of it last, for whoever continues a ticket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.checkpoint import check_state
from offbeat.pacing.events import Handlers, LearnerStateless, OpenWork, SegmentArrived
from offbeat.run.collectors import Collector
from offbeat.runtime.messages import Begun
from offbeat.types import StateTree


class BegunWork:
    """The newest answers to `OpenWork` by ticket, for tickets that are running or lost.

    It is a cache: a ticket that has none begins anew. ``trees`` has it by ticket, for reading; ``rows`` are
    the collectors' of a run.

    A checkpoint may hold work that was made with versions newer than its own, which a resumed run makes anew.
    Only a collector can cut it back, and only while the checkpoint's version is the newest one.
    """

    def __init__(self, rows: Sequence[Collector], saves: bool) -> None:
        self._rows = rows
        self._saves = saves
        self.trees: dict[int, StateTree] = {}
        self._versions: dict[int, int] = {}  # ticket -> newest version in its work
        self._newest: dict[int, int] = {}  # ticket -> version that the run went back to behind some of it

    def handlers(self) -> Handlers:
        """Return the handlers of a run's events."""
        return {SegmentArrived: self._arrived, LearnerStateless: self._learner_stateless}

    def take(self, event: OpenWork) -> None:
        """Take the answer of a collector."""
        row = self._rows[event.collector]
        if self._saves and event.work and not row.has_given_work:
            row.has_given_work = True
            check_state(dict(event.work), f"{row.name}.open_work()")
        for number in row.tickets:
            self._forget(number)
            if number in event.work:
                self.trees[number], self._versions[number] = event.work[number], event.version

    def of(self, ticket: int) -> Begun | None:
        """Return the begun work of a ticket."""
        return Begun(self.trees[ticket], self._newest.get(ticket)) if ticket in self.trees else None

    def parts(self, version: int, num_issued: int) -> dict[str, StateTree]:
        """Return what the checkpoint of a version holds: begun work of the first tickets, if there is any.

        The part ``work_ahead`` names those with work of newer versions.
        """
        work = {
            number: tree
            for number, tree in self.trees.items()
            if number < num_issued and self._newest.get(number, version) == version
        }
        ahead = [number for number in work if number in self._newest or self._versions[number] > version]
        return ({"work": work} if work else {}) | ({"work_ahead": ahead} if ahead else {})

    def load(self, parts: Mapping[str, StateTree], version: int) -> None:
        """Continue with what the checkpoint of a version holds."""
        self.trees = dict(parts.get("work", {}))
        self._versions = dict.fromkeys(self.trees, version)
        self._newest = dict.fromkeys(parts.get("work_ahead", ()), version)

    def _learner_stateless(self, event: LearnerStateless, now_s: float) -> None:
        self._saves = False

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        if self.trees:
            self._forget(event.segment.ticket.number)

    def _forget(self, ticket: int) -> None:
        if self.trees.pop(ticket, None) is not None:
            del self._versions[ticket]
            self._newest.pop(ticket, None)
