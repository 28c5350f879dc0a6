"""Begun work of tickets: what collectors gave of it last, for whoever continues a ticket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.checkpoint import check_state
from offbeat.pacing.events import Handlers, LearnerStateless, OpenWork, SegmentArrived
from offbeat.run.collectors import Collector
from offbeat.types import StateTree


class BegunWork:
    """The newest answers to `OpenWork` by ticket, for tickets that are running or lost.

    It is a cache: a ticket that has none begins anew. ``trees`` has it by ticket, for reading; ``rows`` are
    the collectors' of a run.
    """

    def __init__(self, rows: Sequence[Collector], saves: bool) -> None:
        self._rows = rows
        self._saves = saves
        self.trees: dict[int, StateTree] = {}

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
            self.trees.pop(number, None)
        self.trees.update({number: tree for number, tree in event.work.items() if number in row.tickets})

    def issued_before(self, ticket: int) -> dict[int, StateTree]:
        """Return the begun work of all tickets with smaller numbers."""
        return {number: tree for number, tree in self.trees.items() if number < ticket}

    def load(self, saved: Mapping[int, StateTree]) -> None:
        """Continue with what a checkpoint holds."""
        self.trees = dict(saved)

    def _learner_stateless(self, event: LearnerStateless, now_s: float) -> None:
        self._saves = False

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        self.trees.pop(event.segment.ticket.number, None)
