"""Makes one collector and serves it, wherever it lives: in a thread, a process, an actor, or the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from offbeat.errors import CollectError
from offbeat.pacing.events import CollectorDown, CollectorUp, SegmentArrived
from offbeat.roles import Collector
from offbeat.runtime.adapting import AllocateFor, make_collector
from offbeat.runtime.base import describe
from offbeat.runtime.spec import Assignment
from offbeat.types import Ticket

Post = Callable[[CollectorUp | CollectorDown | SegmentArrived], None]
Newest = Callable[[int], tuple[int, Any]]
"""Returns the newest weights and their version, which is the given one at least; may raise `SyncTimeout`."""

_SHORT_S, _LONG_S = 0.001, 0.02


class SyncTimeout(Exception):
    """Weights of the wanted version did not come in time."""


class Inbox(Protocol):
    """Tickets on their way to a collector."""

    def receive(self, timeout_s: float | None) -> Sequence[Ticket] | None:
        """Return the tickets that have come, after waiting this long for one (None: no limit); None: stop."""
        ...


class CollectorServer:
    """A collector with its tickets and weights; posts segments, with the state after them.

    ``poll_timeout_s`` is the time until the next step is due, unless a ticket comes: 0 while there is work; a
    little longer each time while the collector waits for something outside; None while it holds no ticket.
    The first exception is posted as the collector's end: all of its other tickets are lost with it.
    """

    def __init__(self, index: int, collector: Collector, newest: Newest, post: Post) -> None:
        self.is_over = False
        self.poll_timeout_s: float | None = None
        self._index, self._collector = index, collector
        self._newest, self._post = newest, post
        self._open: dict[int, None] = {}  # numbers of tickets whose segments are not posted, in order
        self._at_least = -1
        self._loaded: int | None = None

    def accept(self, ticket: Ticket) -> None:
        """Hand a ticket to the collector."""
        if not self.is_over:
            self._open[ticket.number] = None
            self._at_least = max(self._at_least, ticket.version)
            self.poll_timeout_s = 0.0
            self._attempt(partial(self._collector.accept, ticket), ticket.number)

    def step(self) -> None:
        """Do one piece of the work that there is, with the newest weights."""
        if self._open and not self.is_over:
            self._attempt(self._advance, next(iter(self._open)))

    def _attempt(self, work: Callable[[], None], ticket: int) -> None:
        """Do work for a ticket; post the end of the collector when it raises."""
        try:
            work()
        except Exception as error:
            self.is_over, self.poll_timeout_s = True, None
            is_late = isinstance(error, SyncTimeout)
            text = f"collector {self._index} raised in ticket {ticket}:\n{describe(error)}"
            self._post(CollectorDown(self._index, str(error) if is_late else text, raised=not is_late))

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
            if (number := segment.ticket.number) not in self._open:
                fix = "which it does not hold: return one segment for each ticket"
                raise CollectError(f"it made a segment for ticket {number}, {fix}")
            self._post(SegmentArrived(segment, 0, state, state_s))
            state_s = 0.0
            del self._open[number]
        if progress.idle and self._open:
            self.poll_timeout_s = min(max(_SHORT_S, 2.0 * (self.poll_timeout_s or 0.0)), _LONG_S)
        else:
            self.poll_timeout_s = 0.0 if self._open else None


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
    while not server.is_over and (tickets := inbox.receive(server.poll_timeout_s)) is not None:
        for ticket in tickets:
            server.accept(ticket)
        server.step()
