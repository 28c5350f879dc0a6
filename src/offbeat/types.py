"""The messages that travel between roles: frozen, slotted, small."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Metrics = dict[str, float]
"""Metric names (``family/name``) to values of one round."""
StateTree = Any
"""Nested dicts, lists and tuples of numbers, strings, None and numpy arrays: what a checkpoint can hold."""


_UNITS = ("env_steps", "tokens", "agent_steps")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to collect one segment with a named published version.

    Example: ``Ticket(number=7, collector=1, version=3, deadline=4, seed=812, attempt=0)`` is the eighth
    ticket of the run; collector 1 collects it with version 3 and round 4 is the last that may train it.

    ``steps_trained`` counts the steps in the segments that all collectors made and rounds have taken, when
    the ticket was issued, in the unit of `Segment.num_steps`. ``steps_collected`` adds those of segments
    issued since, each taken for as long as the mean of the others; 0 before the first round. They say how far
    the run has come, for schedules of exploration, and are the same when the run is repeated or resumed.
    """

    number: int
    collector: int
    version: int
    deadline: int
    seed: int
    attempt: int = 0
    steps_collected: int = 0
    steps_trained: int = 0

    @property
    def lane(self) -> int:
        """Older name of ``collector``."""
        return self.collector

    def __reduce__(self) -> tuple[type[Ticket], tuple[int, ...]]:
        # Sent with every segment: this is several times cheaper than what dataclasses do by themselves.
        return Ticket, self.as_row()

    def as_row(self) -> tuple[int, ...]:
        """Return the fields in order, as ``Ticket(*row)`` takes them."""
        place = (self.number, self.collector, self.version, self.deadline)
        return (*place, self.seed, self.attempt, self.steps_collected, self.steps_trained)


@dataclass(frozen=True, slots=True)
class Episodes:
    """Episodes that ended inside a segment, in the order in which they ended.

    Example: ``Episodes(returns=(21.0, 9.0), lengths=(21, 9))``.
    """

    returns: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[type[Episodes], tuple[tuple[float, ...], tuple[int, ...]]]:
        return Episodes, (self.returns, self.lengths)


End = Literal["", "eos", "stop", "length", "cut", "timeout", "error"]
"""Why a piece of a segment ended; empty where there is nothing to say."""


class Span(NamedTuple):
    """``size`` steps or tokens that one version made. ``rebuilt``: with a cache that was made anew there."""

    version: int
    size: int
    rebuilt: bool = False


TIMEOUT = "timeout"
"""The ``error`` of an `Answer` that did not come in time."""


class Answer(NamedTuple):
    """Input of a piece from outside: the answer of a tool or an environment, or its reward.

    ``turn`` counts the answers of a piece from 0. ``value`` is a text or a number; it is None where there is
    none, and ``error`` then says why: `TIMEOUT`, or what went wrong. A replay takes it as it was recorded.
    """

    turn: int
    value: str | float | None
    error: str = ""


class Piece(NamedTuple):
    """One piece of a segment, such as a response: the versions that made it, in order, and why it ended.

    ``answers`` are those that it got while it was made, in order.
    Example: ``Piece((Span(7, 91), Span(8, 140)), "eos", (Answer(0, 1.0),))``.
    """

    spans: tuple[Span, ...]
    end: End = ""
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One of the named parts of what a learner publishes, and the version in which it was changed last.

    A part travels to collectors only when its version is another than before: a large model that does not
    change beside an adapter that does. Collectors get the dict of all parts, evaluators and checkpoints the
    data alone. Example: ``{"base": Part(0, base), "adapter": Part(7, adapter)}``.
    """

    version: int
    data: Any


def parts_of(weights: Any) -> dict[str, Part] | None:
    """Return weights that are a dict of parts; None for any others."""
    is_parted = type(weights) is dict and weights and all(isinstance(one, Part) for one in weights.values())
    return weights if is_parted else None


class RemoteData(ABC):
    """Data of a segment that lies on another machine: what a runtime may put into ``Segment.data``."""

    @abstractmethod
    def fetch(self) -> Any:
        """Bring the data here."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Result of one ticket.

    ``data`` is a mapping of arrays for offbeat's own algorithms and any object for a user's function.
    ``versions`` holds the version behind each step or token (one entry when all are the same);
    staleness counts from the oldest. ``units`` counts what is in it, by named unit; ``steps_by_env`` the
    steps of each environment of its collector, where it says so. ``pieces`` say which version made how much
    of it, where weights may change in the middle: a replay repeats it from them. ``drop`` is the reason why
    it is not worth training; it is then counted and thrown away.
    Arrays in ``data`` may be views of shared memory that is reused once the segment was trained:
    copy what must live longer.

    Example: ``Segment(ticket, {"obs": obs}, np.array([3]), {"env_steps": 2048})``.
    """

    ticket: Ticket
    data: Any
    versions: NDArray[np.int64]
    units: Mapping[str, int] = field(default_factory=dict)
    episodes: Episodes = Episodes()
    collect_s: float = 0.0
    steps_by_env: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    drop: str = ""

    def __reduce__(self) -> tuple[type[Segment], tuple[Any, ...]]:
        parts = (self.ticket, self.data, self.versions, self.units, self.episodes)
        return Segment, (*parts, self.collect_s, self.steps_by_env, self.pieces, self.drop)

    def timed(self, collect_s: float) -> Segment:
        """Return this segment with the seconds that it took."""
        parts = (self.ticket, self.data, self.versions, self.units, self.episodes)
        return Segment(*parts, collect_s, self.steps_by_env, self.pieces, self.drop)

    @property
    def num_steps(self) -> int:
        """Samples in it: its ``env_steps``, else its ``tokens`` or ``agent_steps``; 1 where it names none."""
        for unit in _UNITS:
            if unit in self.units:
                return self.units[unit]
        return 1

    @property
    def unit(self) -> str:
        """The unit of `num_steps`; empty where the segment names none."""
        return next((unit for unit in _UNITS if unit in self.units), "")

    @property
    def oldest_version(self) -> int:
        """The version that staleness counts from."""
        return int(self.versions.item() if self.versions.size == 1 else self.versions.min())


@dataclass(frozen=True, slots=True)
class Progress:
    """Result of one piece of a collector's work.

    ``idle``: there is nothing to compute until a ticket comes, or ``context.wake()`` is called; while it
    holds tickets, ``advance`` is called again within a second all the same. ``units`` counts what was
    collected in this piece, such as ``tokens``. ``needs`` is for tickets with a script: the version without
    which none of its tickets can continue.
    """

    segments: Sequence[Segment] = ()
    busy_s: float = 0.0
    units: Mapping[str, int] = field(default_factory=dict)
    idle: bool = False
    needs: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one round: its segments in training order.

    ``version`` is the learner's version before the round; ``off_policy_degree`` the dial in force.
    """

    version: int
    segments: tuple[Segment, ...]
    off_policy_degree: int

    def staleness(self) -> tuple[int, ...]:
        """Age of each segment in versions."""
        return tuple([self.version - segment.oldest_version for segment in self.segments])


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of one array of a segment. Example: ``ArraySpec((33, 64, 4), "float32")``."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def empty(self) -> Array:
        """Allocate such an array."""
        return np.empty(self.shape, np.dtype(self.dtype))
