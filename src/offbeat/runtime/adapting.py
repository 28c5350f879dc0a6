"""Adapts functions, and objects that collect one segment per call, to the contract of collectors."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from offbeat.errors import CollectError, ConfigError
from offbeat.roles import Collector, InPlaceCollector, check_methods, has_state
from offbeat.runtime.spec import Assignment, load_state
from offbeat.types import Array, ArraySpec, Piece, Progress, Segment, StateTree, Ticket

AllocateFor = Callable[[dict[str, ArraySpec]], Callable[[], dict[str, Array]]]


class OneByOne:
    """A function ``collect(ticket, weights)``, or an object that has such a method, as a `Collector`.

    Works on its tickets in order, one segment per advance; what is returned and is no Segment becomes one.
    ``specs`` are the arrays of a segment when it writes in place, else None; ``allocate`` then makes them.
    """

    capacity = 1

    def __init__(self, target: Any) -> None:
        self._target = target
        self._collect: Callable[[Ticket, Any], Any] = getattr(target, "collect", target)
        self._has_state = has_state(target, "the collector")
        self._in_place = target if isinstance(target, InPlaceCollector) else None
        self.specs: dict[str, ArraySpec] | None = self._in_place.segment_spec() if self._in_place else None
        self.allocate: Callable[[], dict[str, Array]] = self._new_arrays
        self._tickets: deque[Ticket] = deque()
        self._version = -1
        self._weights: Any = None

    def _new_arrays(self) -> dict[str, Array]:
        return {name: spec.empty() for name, spec in (self.specs or {}).items()}

    def accept(self, ticket: Ticket, begun: StateTree | None = None, script: Sequence[Piece] = ()) -> None:
        """Queue a ticket, to be made in one piece: what a wide collector has begun of it is of no use."""
        versions = {span.version for piece in script for span in piece.spans}
        if len(versions) > 1:
            raise CollectError(
                f"ticket {ticket.number} was made with versions {sorted(versions)} when it was recorded, and "
                "this collector makes a segment with one: repeat the run with the collector that made it"
            )
        self._tickets.append(ticket)

    def load(self, version: int, weights: Any) -> None:
        """Use these weights for the next segments."""
        self._version, self._weights = version, weights

    def advance(self) -> Progress:
        """Collect the next segment."""
        if not self._tickets:
            return Progress(idle=True)
        ticket = self._tickets.popleft()
        version = self._version
        if ticket.version != version:
            number, collector, _, *others = ticket.as_row()
            ticket = Ticket(number, collector, version, *others)
        started_s = perf_counter()
        if self._in_place is not None:
            result = self._in_place.collect_into(ticket, self._weights, self.allocate())
        else:
            result = self._collect(ticket, self._weights)
        busy_s = perf_counter() - started_s
        if self._in_place is not None or isinstance(result, Segment):
            segment = result.timed(busy_s)
        else:
            versions = np.array([version], np.int64)
            segment = Segment(ticket, result, versions, {"segments": 1}, collect_s=busy_s)
        return Progress((segment,), busy_s, segment.units, idle=not self._tickets)

    def state_dict(self) -> StateTree | None:
        """Return the state after the last segment; None when the target cannot give one."""
        return self._target.state_dict() if self._has_state else None

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from a state taken after some segment."""
        self._target.load_state_dict(state)


def check_collector(made: Any) -> None:
    """Raise ConfigError that says what ``made`` lacks to collect."""
    if hasattr(made, "advance") or hasattr(made, "accept"):
        _check_with_advance(made)
    elif not callable(getattr(made, "collect", made)):
        check_methods(made, ("collect",), "the collector")
        raise ConfigError(f"collect of {type(made).__qualname__} is {made.collect!r}, which cannot be called")
    else:
        has_state(made, "the collector")


def _check_with_advance(made: Any) -> None:
    wanted = ("capacity", "accept", "load", "advance", "state_dict", "load_state_dict")
    check_methods(made, wanted, "the collector with advance")
    if hasattr(made, "cut") or hasattr(made, "open_work"):
        check_methods(made, ("cut", "open_work"), "the wide collector")
    capacity_of(made)
    try:
        inspect.signature(made.accept).bind(None, None, ())
    except TypeError:
        name = type(made).__qualname__
        raise ConfigError(f"accept of {name} cannot be called as accept(ticket, begun, script)") from None


def capacity_of(collector: Collector) -> int:
    """Return the capacity of a collector; ConfigError when it is none, such as 0: it would get no ticket."""
    capacity = collector.capacity
    if not isinstance(capacity, int) or capacity < 1:
        name = type(collector).__qualname__
        raise ConfigError(f"capacity of {name} is {capacity!r}: it is a number of tickets, 1 at least")
    return capacity


def as_collector(made: Any) -> Collector:
    """Return ``made`` as a `Collector`: one already, or an object or a function that collects."""
    check_collector(made)
    return made if isinstance(made, Collector) else OneByOne(made)


def make_collector(
    assignment: Assignment[Any],
    allocate_for: AllocateFor | None = None,
    wake: Callable[[], None] | None = None,
) -> Collector:
    """Make a collector as its assignment says, from its saved state if there is one.

    ``allocate_for`` returns what makes the arrays of a segment, for a collector that writes in place;
    ``wake`` has it advance again.
    """
    context = assignment.context if wake is None else replace(assignment.context, wake=wake)
    collector = as_collector(assignment.role.make(context))
    if allocate_for is not None and isinstance(collector, OneByOne) and collector.specs is not None:
        collector.allocate = allocate_for(collector.specs)
    if assignment.state is not None:
        load_state(collector, assignment.state, "the collector")
    return collector
