"""Serves one collector, in whatever runs it: a thread, a worker process, an actor, or the driver itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from offbeat.errors import CollectError, OffbeatError
from offbeat.pacing.events import CollectorDown, CollectorUp, SegmentArrived
from offbeat.roles import Collector
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
        state = self._collector.state_dict() if progress.segments else None
        for segment in progress.segments:
            number = segment.ticket.number
            if number not in self._open:
                raise CollectError(
                    f"it made a segment for ticket {number}, which it does not hold: "
                    "each ticket that it accepts is worth one segment"
                )
            self._post(SegmentArrived(segment, 0, state))
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


def start(index: int, make: Callable[[], Collector], newest: Newest, post: Post) -> CollectorServer | None:
    """Make a collector and its server; post that it is up, or what it raised (None)."""
    try:
        collector = make()
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
