"""A model of engines and a learner that only wait, driven by the real coordinator: for predictions.

`Engine` knows when each token of each response would be there: a step makes a token in every live row and
takes ``step_s + row_s * rows``. `advance` catches up with any clock, wall or simulated, in absolute times,
so that nothing drifts. `simulate` drives engines and a learner with a `Coordinator` in simulated time; what
deciding and handing over cost is zero there. Used by llm_twin.py (as collectors in real processes, too) and
by llm_async.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing.actions import Action, Issue, Publish, Train
from offbeat.pacing.events import CollectorUp, Event, Published, RoundTrained, SegmentArrived
from offbeat.types import Batch, Segment, Ticket


class Leg(NamedTuple):
    """A stretch of a response: tokens, then a wait for a tool, or for the reward after the last one.

    ``given`` are tokens that stand before it: the prompt, or what a tool has answered.
    """

    tokens: int
    wait_s: float = 0.0
    given: int = 0


_SAME_STEPS = 16
Response = tuple[Leg, ...]
Plan = Callable[[int], Sequence[Response]]
"""Returns the responses of a ticket, from its seed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things take: a step of an engine, a round of the learner, a publication.

    ``place_s`` is for each position that a live row looks back at: nothing on a large machine.
    """

    step_s: float
    row_s: float
    token_s: float
    round_s: float = 0.0
    publish_s: float = 0.0
    place_s: float = 0.0

    def of_step(self, rows: int, places: int = 0) -> float:
        """Time of a step with so many live rows."""
        return self.step_s + self.row_s * rows + self.place_s * places

    def of_round(self, tokens: int) -> float:
        """Time in which the learner trains so many tokens."""
        return self.round_s + self.token_s * tokens


@dataclass(slots=True, eq=False)
class Open:
    """A ticket under way. ``made`` counts its tokens by version."""

    ticket: Ticket
    left: int  # responses
    tokens: int
    made: dict[int, int] = field(default_factory=dict)
    finished_s: float = 0.0


@dataclass(slots=True, eq=False)
class Row:
    """A response with a slot; ``begun`` is the step with which its leg began, ``length`` what it had then."""

    owner: Open
    legs: Response
    leg: int = 0
    begun: int = 0
    length: int = 0


class Engine:
    """Makes the tokens of its tickets' responses, one in each live row per step, as time goes by.

    A response has a slot from its first token to its last one; while it waits for a tool it is no row, and
    while it waits for its reward it has no slot. Slots are given in the order of tickets.
    """

    def __init__(self, timing: Timing, slots: int) -> None:
        self._timing, self._free = timing, slots
        self.time_s, self.busy_s, self.row_steps, self.steps = 0.0, 0.0, 0, 0
        self._ends: list[tuple[int, int, Row]] = []  # by step
        self._waits: list[tuple[float, int, Row]] = []  # for tools, by time
        self._rewards: list[tuple[float, int, Open]] = []
        self._queue: list[tuple[int, int, Row]] = []
        self._order = 0
        self._places = 0  # lengths of live rows, less the steps before they began
        self._versions: list[tuple[int, int]] = []  # step, version from there on

    def load(self, version: int) -> None:
        """Make the tokens of all further steps with this version; catch up with the clock before."""
        self._versions.append((self.steps + (1 if self._ends else 0), version))

    def accept(self, ticket: Ticket, responses: Sequence[Response], now_s: float) -> None:
        """Queue a ticket; catch up with the clock before."""
        owner = Open(ticket, len(responses), sum(leg.tokens for one in responses for leg in one))
        for place, legs in enumerate(responses):
            heappush(self._queue, (ticket.number, place, Row(owner, legs)))
        if not self._ends:
            self.time_s = max(self.time_s, now_s)

    def next_s(self) -> float:
        """Time of the next thing that happens; infinity when nothing will."""
        times = [heap[0][0] for heap in (self._waits, self._rewards) if heap]
        if self._ends:
            times.append(self.time_s + self._each_s() * self._next_count())
        elif self._queue and self._free:
            times.append(self.time_s)
        return min(times, default=math.inf)

    def advance(self, now_s: float) -> list[Open]:
        """Do all steps that end by now; return the tickets that are finished."""
        finished: list[Open] = []
        while True:
            if self._ends:
                if not self._leap(now_s, finished):
                    break
            elif self._waits and not (self._queue and self._free):
                if self._waits[0][0] > now_s:
                    break
                self.time_s = max(self.time_s, self._waits[0][0])
            elif not (self._queue and self._free):
                break
            self._resume()  # between two steps, and only there
            self._admit()
        while self._rewards and self._rewards[0][0] <= now_s:
            due_s, _, owner = heappop(self._rewards)
            self._close(owner, due_s, finished)
        return finished

    # ------------------------------------------------------------ steps

    def _leap(self, now_s: float, finished: list[Open]) -> bool:
        """Go on to the next step that changes something, or as far as the clock is; return if it was."""
        each_s, rows, count = self._each_s(), len(self._ends), self._next_count()
        if self._waits:
            count = min(count, max(1, math.ceil((self._waits[0][0] - self.time_s) / each_s)))
        reached = self.time_s + count * each_s <= now_s + 1e-12
        if not reached:
            count = max(0, int((now_s - self.time_s) / each_s))
        self.steps += count
        self.time_s += count * each_s
        self.busy_s += count * each_s
        self.row_steps += count * rows
        while self._ends and self._ends[0][0] <= self.steps:
            self._end_leg(heappop(self._ends)[2], finished)
        return reached

    def _each_s(self) -> float:
        """Time of the next step."""
        rows = len(self._ends)
        return self._timing.of_step(rows, self._places + rows * self.steps)

    def _next_count(self) -> int:
        """Steps that take the same time and change nothing before the last one ends."""
        if self._queue and self._free:
            return 1
        count = self._ends[0][0] - self.steps
        return min(count, _SAME_STEPS) if self._timing.place_s else count

    def _end_leg(self, row: Row, finished: list[Open]) -> None:
        leg = row.legs[row.leg]
        self._count(row, leg.tokens)
        self._places -= row.length - row.begun
        row.length += leg.tokens
        row.leg += 1
        self._order += 1
        if row.leg < len(row.legs):
            heappush(self._waits, (self.time_s + leg.wait_s, self._order, row))
            return
        self._free += 1
        if leg.wait_s > 0.0:
            heappush(self._rewards, (self.time_s + leg.wait_s, self._order, row.owner))
        else:
            self._close(row.owner, self.time_s, finished)

    def _close(self, owner: Open, now_s: float, finished: list[Open]) -> None:
        owner.left -= 1
        owner.finished_s = max(owner.finished_s, now_s)
        if not owner.left:
            finished.append(owner)

    def _count(self, row: Row, tokens: int) -> None:
        """Count the tokens of a leg by the versions that were loaded when they were made."""
        end = row.begun + tokens
        for step, version in reversed(self._versions):
            first = max(step, row.begun)
            if first < end:
                row.owner.made[version] = row.owner.made.get(version, 0) + end - first
                end = first
            if end <= row.begun:
                return

    def _resume(self) -> None:
        while self._waits and self._waits[0][0] <= self.time_s + 1e-12:
            self._begin(heappop(self._waits)[2])

    def _admit(self) -> None:
        while self._queue and self._free:
            self._free -= 1
            self._begin(heappop(self._queue)[2])

    def _begin(self, row: Row) -> None:
        row.begun = self.steps
        row.length += row.legs[row.leg].given
        self._places += row.length - row.begun
        self._order += 1
        heappush(self._ends, (self.steps + row.legs[row.leg].tokens, self._order, row))


# ---------------------------------------------------------------- the model


class RoundEnd(NamedTuple):
    """End of a round: when, its tokens, ages, and what engines and learner had done until then.

    ``late`` is the share of its segments that were older than k.
    """

    time_s: float
    tokens: int
    oldest_age: int
    late: float
    busy_s: float
    row_steps: int
    steps: int
    train_s: float


@dataclass(frozen=True, slots=True)
class Shop:
    """What there is: engines, their slots, the tickets that each wants to hold."""

    engines: int
    slots: int
    capacity: int


def segment_of(done: Open) -> Segment:
    """Return the segment of a finished ticket, with its versions and tokens."""
    return Segment(done.ticket, None, np.array(sorted(done.made)), {"tokens": done.tokens})


def simulate(config: PaceConfig, shop: Shop, timing: Timing, plan: Plan) -> list[RoundEnd]:
    """Drive engines and a learner with the real coordinator, in simulated time."""
    coordinator = Coordinator(config)
    engines = [Engine(timing, shop.slots) for _ in range(shop.engines)]
    coming: list[tuple[float, int, Event]] = []
    segments: dict[int, Segment] = {}
    ends: list[RoundEnd] = []
    now_s, order, trained_s = 0.0, 0, 0.0
    actions: Sequence[Action] = coordinator.start(now_s)
    for index in range(shop.engines):
        actions = [*actions, *coordinator.apply(CollectorUp(index, shop.capacity), now_s)]
    while not coordinator.finished:
        for action in actions:
            order += 1
            match action:
                case Issue(ticket):
                    engines[ticket.collector].accept(ticket, plan(ticket.seed), now_s)
                case Train(version, tickets, degree):
                    batch = Batch(version, tuple(segments.pop(number) for number in tickets), degree)
                    last_s = timing.of_round(sum(one.num_steps for one in batch.segments))
                    trained_s += last_s
                    heappush(coming, (now_s + last_s, order, RoundTrained(version + 1, batch)))
                case Publish(version):
                    heappush(coming, (now_s + timing.publish_s, order, Published(version)))
        now_s = min([one.next_s() for one in engines])
        if coming and coming[0][0] <= now_s:
            now_s = coming[0][0]
        if now_s == math.inf:
            raise AssertionError(f"the model stands still: {coordinator.waiting_for()}")
        arrived = [done for one in engines for done in one.advance(now_s)]
        actions = []
        for done in arrived:
            segments[done.ticket.number] = segment = segment_of(done)
            actions += coordinator.apply(SegmentArrived(segment), now_s)
        while coming and coming[0][0] <= now_s:
            event = heappop(coming)[2]
            if isinstance(event, Published):
                for one in engines:
                    one.load(event.version)
            if isinstance(event, RoundTrained):
                ends.append(_end_of(event, now_s, engines, trained_s))
            actions += coordinator.apply(event, now_s)
        actions += coordinator.decide(now_s)
    return ends


def _end_of(event: RoundTrained, now_s: float, engines: Sequence[Engine], trained_s: float) -> RoundEnd:
    batch, ages = event.batch, event.batch.staleness()
    return RoundEnd(
        now_s,
        sum(one.num_steps for one in batch.segments),
        max(ages),
        sum(age > batch.off_policy_degree for age in ages) / len(ages),
        sum(one.busy_s for one in engines),
        sum(one.row_steps for one in engines),
        sum(one.steps for one in engines),
        trained_s,
    )


def lognormal_lengths(seed: int, count: int, sigma: float, mean: float, limit: int) -> list[int]:
    """Draw lengths of responses: log-normal with this mean before the limit, at least 1."""
    drawn = np.random.default_rng(seed).lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return [min(limit, max(1, round(one))) for one in drawn]
