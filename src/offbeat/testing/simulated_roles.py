"""Roles of a simulated run: collectors that work one by one or on many tickets, and a learner.

What they make are numbers, each folded out of all that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np

from offbeat.types import Batch, End, Metrics, Piece, Progress, Segment, Span, StateTree, Ticket


class Weights(NamedTuple):
    """Weights that collectors act with."""

    version: int
    digest: int

    def as_tree(self) -> StateTree:
        """Return them as a checkpoint holds them."""
        return {"weights": np.array([self.version, self.digest])}


def fold(*numbers: int) -> int:
    """Return a number that depends on these, and on their order."""
    return hash(numbers)


class Habits(Protocol):
    """Timing of a collector. It never changes what it makes."""

    rng: Random

    def spread(self, typical_s: float) -> float:
        """Draw a time."""
        ...

    def plan(self, after_s: float, do: Any, *arguments: Any) -> None:
        """Call a function later."""
        ...


def make_segment(
    ticket: Ticket, spans: Sequence[Span], marks: Sequence[int], digest: int, end: End
) -> Segment:
    """Return a segment of one piece; ``marks`` are the digests of the weights behind each span."""
    data = {"x": np.array([digest]), "marks": np.array(marks)}
    versions = np.array([span.version for span in spans])
    units = {"tokens": sum([span.size for span in spans])}
    return Segment(ticket, data, versions, units, pieces=(Piece(tuple(spans), end),))


def size_of(ticket: Ticket) -> int:
    """Return the number of tokens that a ticket takes."""
    return 1 + ticket.seed % 40


class Serial:
    """Works on one ticket after the other, each in one piece. What it makes depends on what it made before.

    ``saves``: its state can be saved. ``collect_s`` is the typical time for a segment.
    """

    def __init__(self, habits: Habits, collect_s: float, saves: bool = True, seed: int = 0) -> None:
        self.capacity = 1
        self._habits, self._collect_s, self._saves = habits, collect_s, saves
        self._digest = fold(seed)
        self._weights = Weights(-1, 0)
        self._line: list[Ticket] = []
        self._piece_s = 0.0

    def take_piece_s(self) -> float:
        """Return how long the piece of work at hand takes."""
        piece_s, self._piece_s = self._piece_s, 0.0
        return piece_s

    def accept(self, ticket: Ticket, begun: StateTree | None = None, script: Sequence[Piece] = ()) -> None:
        """Queue a ticket; what another collector has begun of it is of no use here."""
        assert not script
        self._line.append(ticket)

    def load(self, version: int, weights: Weights) -> None:
        """Take new weights."""
        assert weights.version == version
        self._weights = weights

    def advance(self) -> Progress:
        """Collect a segment."""
        if not self._line:
            return Progress(idle=True)
        weights, first = self._weights, self._line.pop(0)
        ticket = first if first.version == weights.version else replace(first, version=weights.version)
        self._piece_s = self._habits.spread(self._collect_s)
        self._digest = fold(self._digest, ticket.seed, weights.digest)
        data = {"x": np.array([self._digest]), "marks": np.array([weights.digest])}
        versions, units = np.array([weights.version]), {"tokens": size_of(ticket)}
        segment = Segment(ticket, data, versions, units, collect_s=self._piece_s)
        return Progress((segment,), self._piece_s, units, idle=not self._line)

    def state_dict(self) -> StateTree | None:
        """Return what the next segment depends on."""
        return {"digest": self._digest} if self._saves else None

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from such a state."""
        self._digest = state["digest"]


@dataclass(slots=True)
class _Work:
    """A ticket at work: ``done`` tokens of ``size`` stand in spans; it goes on since ``since_s``."""

    ticket: Ticket
    size: int
    token_s: float
    since_s: float
    ends_s: float
    script: Sequence[Span] = ()
    end: End = "eos"
    done: int = 0
    spans: list[Span] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    def add(self, size: int, weights: Weights) -> None:
        """Add tokens that these weights made."""
        if size <= 0:
            return
        self.done += size
        if self.spans and self.spans[-1].version == weights.version:
            size += self.spans.pop().size
        else:
            self.marks.append(weights.digest)
        self.spans.append(Span(weights.version, size))

    @property
    def digest(self) -> int:
        """The result, as a number."""
        parts = zip(self.spans, self.marks, strict=True)
        return fold(self.ticket.seed, *[number for span, mark in parts for number in (span.size, mark)])

    def made_by(self, clock_s: float) -> int:
        """Return the number of tokens that are there at a time of its collector's work."""
        return min(self.size, max(self.done, int((clock_s - self.since_s) / self.token_s)))


class Wide(Serial):
    """Works on many tickets at once, with weights that change in the middle, and finishes them in any order.

    ``capacity`` changes now and then where ``changes`` is above 0. ``piece_s`` is the longest piece of work,
    ``sleeps`` the share of tickets that wait for something outside, ``drops`` that of segments not worth
    training.
    """

    def __init__(
        self,
        habits: Habits,
        collect_s: float,
        wake: Callable[[], None],
        capacity: int,
        piece_s: float,
        changes: float = 0.0,
        sleeps: float = 0.0,
        drops: float = 0.0,
    ) -> None:
        super().__init__(habits, collect_s)
        self._wake = wake
        self.capacity = self._most = capacity
        self._longest_piece_s, self._changes, self._sleeps, self._drops = piece_s, changes, sleeps, drops
        self._open: dict[int, _Work] = {}
        self._clock_s = 0.0  # of its own work

    def accept(self, ticket: Ticket, begun: StateTree | None = None, script: Sequence[Piece] = ()) -> None:
        """Begin a ticket, or go on with what another collector has begun."""
        size = size_of(ticket)
        takes_s = max(1e-6, self._habits.spread(self._collect_s))
        since_s = self._clock_s
        work = _Work(ticket, size, takes_s / size, since_s, since_s + takes_s)
        self._open[ticket.number] = work
        if script:
            work.script, work.end, work.ends_s = script[0].spans, script[0].end, float("inf")
            work.size = sum([span.size for span in work.script])
            return
        if begun is not None:
            self._take_over(work, begun)
        if self._sleeps and self._habits.rng.random() < self._sleeps:
            work.ends_s = float("inf")
            self._habits.plan(takes_s, self._awake, work)

    def _take_over(self, work: _Work, begun: StateTree) -> None:
        """Keep what was begun with weights that this run has had."""
        for (version, size), mark in zip(begun["spans"], begun["marks"], strict=True):
            if version > self._weights.version:
                break
            work.add(size, Weights(version, mark))
        work.since_s -= work.done * work.token_s
        work.ends_s -= work.done * work.token_s

    def _awake(self, work: _Work) -> None:
        """Note that the answer a ticket waited for is there."""
        work.ends_s = self._clock_s
        self._wake()

    def load(self, version: int, weights: Weights) -> None:
        """Take new weights in the middle of all tickets."""
        for work in self._open.values():
            if not work.script:
                work.add(work.made_by(self._clock_s) - work.done, self._weights)
        super().load(version, weights)

    def advance(self) -> Progress:
        """Work until the next ticket is finished, but no longer than a piece of work may take."""
        if not self._open:
            return Progress(idle=True)
        if self._changes and self._habits.rng.random() < self._changes:
            self.capacity = self._habits.rng.randint(1, 2 * self._most)
        repeated = [work for work in self._open.values() if work.script and self._repeat(work)]
        ends_s = min([work.ends_s for work in self._open.values()])
        if ends_s == float("inf") and not repeated:
            needs = [self._next_version(work) for work in self._open.values() if work.script]
            return Progress(idle=True, needs=min(needs, default=None))
        piece_s = max(1e-6, min(ends_s - self._clock_s, self._longest_piece_s))
        self._clock_s += piece_s
        self._piece_s = piece_s
        finished = [work for work in self._open.values() if work.ends_s <= self._clock_s or _is_over(work)]
        segments = [self._finish(work) for work in finished]
        return Progress(segments, piece_s, {"tokens": len(self._open)})

    def _repeat(self, work: _Work) -> bool:
        """Make a recorded span again, if its version is there; return True if it was."""
        span = work.script[len(work.spans)]
        if span.version > self._weights.version:
            return False
        assert span.version == self._weights.version, f"{work.ticket} missed version {span.version}"
        work.add(span.size, self._weights)
        return True

    def _next_version(self, work: _Work) -> int:
        return work.script[len(work.spans)].version

    def _finish(self, work: _Work) -> Segment:
        """Return the segment of a ticket that is done."""
        del self._open[work.ticket.number]
        if not work.script:
            work.add(work.size - work.done, self._weights)
        segment = make_segment(work.ticket, work.spans, work.marks, work.digest, work.end)
        if self._drops and fold(work.ticket.seed) % 1000 < 1000 * self._drops:
            return replace(segment, drop="not worth it")
        return segment

    def cut(self, tickets: Sequence[int]) -> None:
        """End tickets with what there is, which is one token at least."""
        for number in tickets:
            work = self._open[number]
            work.size, work.end, work.ends_s = max(1, work.made_by(self._clock_s)), "cut", self._clock_s

    def open_work(self) -> Mapping[int, StateTree]:
        """Return what is begun."""
        found: dict[int, StateTree] = {}
        for number, work in self._open.items():
            spans, marks = [list(span[:2]) for span in work.spans], list(work.marks)
            if (more := work.made_by(self._clock_s) - work.done) > 0:
                spans.append([self._weights.version, more])
                marks.append(self._weights.digest)
            if spans:
                found[number] = {"spans": spans, "marks": marks}
        return found

    def state_dict(self) -> StateTree:
        """Return nothing: tickets are all there is."""
        return {}

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from nothing."""


def _is_over(work: _Work) -> bool:
    return bool(work.script) and len(work.spans) == len(work.script)


class SimulatedLearner:
    """Folds what it trains into one number, and remembers which tickets that were."""

    def __init__(self) -> None:
        self.version = 0
        self.digest = 1
        self.trained: list[int] = []

    def train(self, batch: Batch) -> Metrics:
        """Train a round."""
        digest = self.digest
        for segment in batch.segments:
            digest = fold(digest, segment.ticket.number, int(segment.data["x"][0]))
            self.trained.append(segment.ticket.number)
        self.version, self.digest = batch.version + 1, fold(digest, batch.version)
        return {}

    def weights(self) -> Weights:
        """Return what collectors act with."""
        return Weights(self.version, self.digest)

    def state_dict(self) -> StateTree:
        """Return everything that the next round depends on."""
        return {"version": self.version, "digest": self.digest, "trained": list(self.trained)}

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from such a state."""
        self.version, self.digest, self.trained = state["version"], state["digest"], list(state["trained"])
