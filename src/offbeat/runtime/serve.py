"""Makes one collector and serves it, wherever it lives: in a thread, a process, an actor, or the driver.

Functions, and objects that collect one segment per call, are adapted to the one contract of collectors.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from offbeat.errors import CollectError, ConfigError, OffbeatError
from offbeat.pacing.events import CollectorDown, CollectorUp, SegmentArrived
from offbeat.roles import Collector, InPlaceCollector, check_methods, has_state
from offbeat.runtime.spec import Assignment
from offbeat.types import Array, ArraySpec, Progress, Segment, StateTree, Ticket

Post = Callable[[CollectorUp | CollectorDown | SegmentArrived], None]
Newest = Callable[[int], tuple[int, Any]]
"""Returns the newest weights and their version, which is the given one at least; may raise `SyncTimeout`."""

AllocateFor = Callable[[dict[str, ArraySpec]], Callable[[], dict[str, Array]]]
_SHORT_S, _LONG_S = 0.001, 0.02


class SyncTimeout(Exception):
    """Weights of the wanted version did not come in time."""


class Inbox(Protocol):
    """Tickets on their way to a collector."""

    def receive(self, timeout_s: float | None) -> Sequence[Ticket] | None:
        """Return the tickets that have come since the last call; None: stop.

        Waits for a ticket or the stop for this long; None: without a limit.
        """
        ...


class CollectorServer:
    """A collector between its tickets and its weights; posts segments, with the state after them.

    ``patience_s`` is the time until the next step has to be, unless a ticket comes: 0 while there is work;
    a little, and more from step to step, for a collector that waits for something outside of it; None while
    it holds no ticket. The first exception is posted as the collector's end: all of its other tickets are
    lost with it.
    """

    def __init__(self, index: int, collector: Collector, newest: Newest, post: Post) -> None:
        self.is_over = False
        self.patience_s: float | None = None
        self._index = index
        self._collector = collector
        self._newest = newest
        self._post = post
        self._open: dict[int, None] = {}  # numbers of tickets whose segments are not posted, in order
        self._at_least = -1
        self._loaded: int | None = None

    def accept(self, ticket: Ticket) -> None:
        """Hand a ticket to the collector."""
        if self.is_over:
            return
        self._open[ticket.number] = None
        self._at_least = max(self._at_least, ticket.version)
        self.patience_s = 0.0
        try:
            self._collector.accept(ticket)
        except Exception as error:
            self._fail(error, ticket.number)

    def step(self) -> None:
        """Do one piece of the work that there is, with the newest weights."""
        if self.is_over or not self._open:
            return
        oldest = next(iter(self._open))
        try:
            self._advance()
        except Exception as error:
            self._fail(error, oldest)

    def _advance(self) -> None:
        version, weights = self._newest(self._at_least)
        if version != self._loaded:
            self._collector.load(version, weights)
            self._loaded = version
        progress = self._collector.advance()
        began_s = perf_counter()
        state = self._collector.state_dict() if progress.segments else None
        state_s = perf_counter() - began_s  # once for all segments of this piece
        for segment in progress.segments:
            number = segment.ticket.number
            if number not in self._open:
                raise CollectError(
                    f"it made a segment for ticket {number}, which it does not hold: "
                    "each ticket that it accepts is worth one segment"
                )
            self._post(SegmentArrived(segment, 0, state, state_s))
            state_s = 0.0
            del self._open[number]
        if not self._open:
            self.patience_s = None
        elif progress.idle:
            self.patience_s = min(max(_SHORT_S, 2.0 * (self.patience_s or 0.0)), _LONG_S)
        else:
            self.patience_s = 0.0

    def _fail(self, error: Exception, ticket: int) -> None:
        self.is_over, self.patience_s = True, None
        if isinstance(error, SyncTimeout):
            self._post(CollectorDown(self._index, str(error)))
        else:
            text = f"collector {self._index} raised in ticket {ticket}:\n{describe(error)}"
            self._post(CollectorDown(self._index, text, raised=True))


def start(
    assignment: Assignment[Any], newest: Newest, post: Post, allocate_for: AllocateFor | None = None
) -> CollectorServer | None:
    """Make a collector and its server; post that it is up, or what it raised (None)."""
    index = assignment.context.collector
    try:
        collector = make_collector(assignment, allocate_for)
        up = CollectorUp(index, collector.capacity)
    except Exception as error:
        text = f"collector {index} raised while starting:\n{describe(error)}"
        post(CollectorDown(index, text, raised=True))
        return None
    post(up)
    return CollectorServer(index, collector, newest, post)


def serve(server: CollectorServer, inbox: Inbox) -> None:
    """Run a collector until its inbox says stop or it raises."""
    while not server.is_over:
        tickets = inbox.receive(server.patience_s)
        if tickets is None:
            return
        for ticket in tickets:
            server.accept(ticket)
        server.step()


def describe(error: Exception) -> str:
    """Return the message of an error that has one for users, or else its traceback."""
    if isinstance(error, OffbeatError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


# ---------------------------------------------------------------- collectors out of what users give


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
            segment = _as_segment(ticket, self._collect(ticket, self._weights))
        busy_s = perf_counter() - started_s
        return Progress((segment.timed(busy_s),), busy_s, segment.units, idle=not self._tickets)

    def state_dict(self) -> StateTree | None:
        """Return the state after the last segment; None when the target cannot give one."""
        return self._target.state_dict() if self._has_state else None

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from a state taken after some segment."""
        self._target.load_state_dict(state)


def _as_segment(ticket: Ticket, result: Any) -> Segment:
    if isinstance(result, Segment):
        return result
    return Segment(ticket, result, np.array([ticket.version], np.int64), {"segments": 1})


def check_collector(made: Any) -> None:
    """Raise ConfigError that says what ``made`` lacks to collect."""
    if hasattr(made, "advance") or hasattr(made, "accept"):
        wanted = ("capacity", "accept", "load", "advance", "state_dict", "load_state_dict")
        check_methods(made, wanted, "the collector with advance")
    elif not callable(getattr(made, "collect", made)):
        check_methods(made, ("collect",), "the collector")
        raise ConfigError(f"collect of {type(made).__qualname__} is {made.collect!r}, which cannot be called")
    else:
        has_state(made, "the collector")


def as_collector(made: Any) -> Collector:
    """Return ``made`` as a `Collector`: one already, or an object or a function that collects."""
    check_collector(made)
    return made if isinstance(made, Collector) else OneByOne(made)


def make_collector(assignment: Assignment[Any], allocate_for: AllocateFor | None = None) -> Collector:
    """Make a collector as its assignment says, from its saved state if there is one.

    ``allocate_for`` returns what makes the arrays of a segment, for a collector that writes in place.
    """
    collector = as_collector(assignment.role.make(assignment.context))
    if allocate_for is not None and isinstance(collector, OneByOne) and collector.specs is not None:
        collector.allocate = allocate_for(collector.specs)
    if assignment.state is not None:
        collector.load_state_dict(assignment.state)
    return collector
