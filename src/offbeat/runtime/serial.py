"""Makes collectors out of what users give: functions, and objects that collect one segment per call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from offbeat.roles import Collector, InPlaceCollector, SerialCollector
from offbeat.runtime.spec import Assignment
from offbeat.types import Array, ArraySpec, Progress, Segment, StateTree, Ticket


class PlainCollector:
    """A function ``collect(ticket, weights) -> anything``, or an object that has such a method."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._collect: Callable[[Ticket, Any], Any] = getattr(target, "collect", target)

    def collect(self, ticket: Ticket, weights: Any) -> Segment:
        """Call the function and wrap what it returns."""
        result = self._collect(ticket, weights)
        if isinstance(result, Segment):
            return result
        return Segment(ticket, result, np.array([ticket.version], np.int64), {"segments": 1})

    def state_dict(self) -> StateTree | None:
        """Return the object's own state, where it can give one."""
        return self._target.state_dict() if hasattr(self._target, "state_dict") else None

    def load_state_dict(self, state: StateTree) -> None:
        """Hand the state back to the object."""
        self._target.load_state_dict(state)


class OneByOne:
    """A `SerialCollector` as a `Collector`: works on its tickets in order, one segment per advance.

    ``specs`` are the arrays of a segment when it writes in place, else None; ``allocate`` then makes them.
    """

    capacity = 1

    def __init__(self, target: SerialCollector) -> None:
        self._target = target
        self._in_place = target if isinstance(target, InPlaceCollector) else None
        self.specs: dict[str, ArraySpec] | None = self._in_place.segment_spec() if self._in_place else None
        self.allocate: Callable[[], dict[str, Array]] = self._new_arrays
        self._tickets: deque[Ticket] = deque()
        self._version = -1
        self._weights: Any = None

    def _new_arrays(self) -> dict[str, Array]:
        return {name: spec.empty() for name, spec in (self.specs or {}).items()}

    def accept(self, ticket: Ticket, begun: StateTree | None = None, script: Sequence[int] = ()) -> None:
        """Queue a ticket; its work is never half done."""
        assert begun is None, "a segment that is made in one piece cannot have been begun"
        assert not script, "a segment that is made in one piece has one version"
        self._tickets.append(ticket)

    def load(self, version: int, weights: Any) -> None:
        """Use these weights for the next segments."""
        self._version, self._weights = version, weights

    def advance(self) -> Progress:
        """Collect the next segment."""
        if not self._tickets:
            return Progress(idle=True)
        ticket = self._tickets.popleft()
        if ticket.version != self._version:
            ticket = replace(ticket, version=self._version)
        started_s = perf_counter()
        if self._in_place is not None:
            segment = self._in_place.collect_into(ticket, self._weights, self.allocate())
        else:
            segment = self._target.collect(ticket, self._weights)
        busy_s = perf_counter() - started_s
        return Progress((segment.timed(busy_s),), busy_s, segment.units, idle=not self._tickets)

    def state_dict(self) -> StateTree | None:
        """Return the state after the last segment."""
        return self._target.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from a state taken after some segment."""
        self._target.load_state_dict(state)


def as_collector(made: Any) -> Collector:
    """Return ``made`` as a `Collector`: one already, or an object or a function that collects."""
    if isinstance(made, Collector):
        return made
    return OneByOne(made if isinstance(made, SerialCollector) else PlainCollector(made))


def make_collector(assignment: Assignment[Any]) -> Collector:
    """Make a collector as its assignment says, from its saved state if there is one."""
    collector = as_collector(assignment.role.make(assignment.context))
    if assignment.state is not None:
        collector.load_state_dict(assignment.state)
    return collector
