"""Makes one collector and serves it, wherever it lives: in a thread, a process, an actor, or the driver."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from typing import Any

from offbeat.errors import CollectError, TaskError
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    CollectorWaits,
    CollectorWorked,
    OpenWork,
    SegmentArrived,
)
from offbeat.roles import Collector, WideCollector
from offbeat.runtime.adapting import AllocateFor, capacity_of, make_collector
from offbeat.runtime.base import describe
from offbeat.runtime.messages import Accept, CutTickets, GiveWork, Inbox, Message
from offbeat.runtime.spec import Assignment
from offbeat.types import Progress

Report = CollectorUp | CollectorDown | CollectorWaits | CollectorWorked | OpenWork | SegmentArrived
Post = Callable[[Report], None]
Stamp = MutableSequence[int] | memoryview
Newest = Callable[[int], tuple[int, Any]]
"""Returns the newest weights and their version, which is the given one at least; may raise `SyncTimeout`."""

_SHORT_S, _LONG_S = 0.001, 0.02
_REPORT_S = 1.0


class SyncTimeout(Exception):
    """Weights of the wanted version did not come in time."""


class CollectorServer:
    """A collector with its tickets and weights; posts segments, with the state after them.

    ``poll_timeout_s`` is the time until the next step is due, unless a message comes or somebody wakes it: 0
    while there is work, None while the collector holds no ticket. ``since`` is one number: when the piece of
    work at hand began, in nanoseconds of the monotonic clock, 0 between two pieces. ``wide`` is the collector
    if its tickets can be cut, ``holds_many`` is true when it may hold several.
    The first exception is posted as the collector's end: all of its other tickets are lost with it.
    """

    def __init__(
        self,
        index: int,
        collector: Collector,
        newest: Newest,
        post: Post,
        since: Stamp | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_over = False
        self.poll_timeout_s: float | None = None
        self.since: Stamp = [0] if since is None else since
        self.wide = collector if isinstance(collector, WideCollector) else None
        self._index, self._collector = index, collector
        self._newest, self._post, self._clock = newest, post, clock
        self._open: dict[int, None] = {}  # numbers of tickets whose segments are not posted, in order
        self._queue: list[Accept] = []
        self._at_least = -1
        self._loaded: int | None = None
        self._capacity = collector.capacity
        self.holds_many = self._capacity > 1 or self.wide is not None
        self._busy_s = 0.0  # since the last report
        self._units: Counter[str] = Counter()
        self._reported_s = clock()
        self._waits: CollectorWaits | None = None

    @property
    def up(self) -> CollectorUp:
        """The report that it is up, or that its capacity has changed."""
        return CollectorUp(self._index, self._capacity, is_wide=self.wide is not None)

    def take(self, message: Message) -> None:
        """Take a message; tickets reach the collector with the next step, after new weights."""
        if self.is_over:
            return
        match message:
            case Accept(ticket):
                self._open[ticket.number] = None
                self._queue.append(message)
                self._at_least = max(self._at_least, ticket.version)
                self.poll_timeout_s = 0.0
            case CutTickets(tickets):
                held = [number for number in tickets if number in self._open]
                if held and self.wide is not None:
                    self._attempt(partial(self._cut, self.wide, held), held[0])
                    self.poll_timeout_s = None if self.is_over else 0.0
            case GiveWork():
                self._attempt(self._give_work, next(iter(self._open), -1))

    def step(self) -> None:
        """Do one piece of the work that there is, with the newest weights."""
        if self._open and not self.is_over:
            self._attempt(self._advance, next(iter(self._open)))

    def _attempt(self, work: Callable[[], None], ticket: int) -> None:
        """Do work for a ticket; post the end of the collector when it raises."""
        self.since[0] = int(1e9 * self._clock())
        try:
            work()
            self.since[0] = 0
        except Exception as error:
            self.is_over, self.poll_timeout_s, self.since[0] = True, None, 0
            is_late, is_final = isinstance(error, SyncTimeout), isinstance(error, TaskError)
            text = f"collector {self._index} raised in ticket {ticket}:\n{describe(error)}"
            reason = str(error) if is_late or is_final else text
            self._post(CollectorDown(self._index, reason, raised=not is_late, is_final=is_final))

    def _hand_over(self) -> None:
        """Load new weights, then hand over the tickets that have come."""
        version, weights = self._newest(self._at_least)
        if version != self._loaded:
            self._collector.load(version, weights)
            self._loaded = version
        for ticket, begun, script in self._queue:
            self._collector.accept(ticket, None if begun is None else begun.under(version), script)
        self._queue.clear()

    def _cut(self, wide: WideCollector, tickets: Sequence[int]) -> None:
        self._hand_over()
        wide.cut(tickets)

    def _give_work(self) -> None:
        if self._open:
            self._hand_over()
        work = self.wide.open_work() if self._open and self.wide else {}
        self._post(OpenWork(self._index, work, -1 if self._loaded is None else self._loaded))

    def _advance(self) -> None:
        began_s = self._clock()
        self._hand_over()
        progress = self._collector.advance()
        now_s = self._clock()
        self._busy_s += progress.busy_s or (0.0 if progress.idle else now_s - began_s)
        is_due = now_s - self._reported_s >= _REPORT_S
        if progress.segments:
            self._post_segments(progress)
        else:
            self._units.update(progress.units)
            if is_due:
                self._post(CollectorWorked(self._index, self._busy_s, dict(self._units)))
        if progress.segments or is_due:
            self._busy_s, self._reported_s = 0.0, now_s
            self._units.clear()
        if self._collector.capacity != self._capacity:
            self._capacity = capacity_of(self._collector)
            self.holds_many = self._capacity > 1 or self.wide is not None
            self._post(self.up)
        self._plan_next(progress)

    def _post_segments(self, progress: Progress) -> None:
        began_s = self._clock()
        state = self._collector.state_dict()
        state_s = self._clock() - began_s  # once for all segments of this piece
        busy_s = self._busy_s
        for segment in progress.segments:
            if (number := segment.ticket.number) not in self._open:
                fix = "which it does not hold: return one segment for each ticket"
                raise CollectError(f"it made a segment for ticket {number}, {fix}")
            self._post(SegmentArrived(segment, 0, state, state_s, busy_s))
            state_s = busy_s = 0.0
            del self._open[number]

    def _plan_next(self, progress: Progress) -> None:
        if not (progress.idle and self._open):
            self.poll_timeout_s = 0.0 if self._open else None
        elif progress.needs is None:
            self.poll_timeout_s = _REPORT_S
        else:  # weights come without a message
            self.poll_timeout_s = min(max(_SHORT_S, 2.0 * (self.poll_timeout_s or 0.0)), _LONG_S)
            waits = CollectorWaits(self._index, progress.needs, tuple(self._open))
            if waits != self._waits:
                self._waits = waits
                self._post(waits)


def start(
    assignment: Assignment[Any],
    newest: Newest,
    post: Post,
    allocate_for: AllocateFor | None = None,
    *,
    wake: Callable[[], None] | None = None,
    since: Stamp | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> CollectorServer | None:
    """Make a collector and its server; post that it is up, or what it raised (None)."""
    index = assignment.context.collector
    try:
        collector = make_collector(assignment, allocate_for, wake)
        server = CollectorServer(index, collector, newest, post, since, clock)
    except Exception as error:
        text = f"collector {index} raised while starting:\n{describe(error)}"
        post(CollectorDown(index, text, raised=True))
        return None
    post(server.up)
    return server


def serve(server: CollectorServer, inbox: Inbox) -> None:
    """Run a collector until its inbox says stop or it raises."""
    while not server.is_over and (messages := inbox.receive(server.poll_timeout_s)) is not None:
        for message in messages:
            server.take(message)
        server.step()
