"""Actions that a pace asks for, and the protocol of a pace."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from offbeat.pacing.events import Event
from offbeat.pacing.ledger import Counts
from offbeat.types import Piece, Ticket


class Issue(NamedTuple):
    """Collect this ticket on its collector; ``script``: the pieces of a recorded segment, to be repeated."""

    ticket: Ticket
    script: tuple[Piece, ...] = ()


class Cut(NamedTuple):
    """Ask collectors to end these running tickets with what they have: they hold a round up."""

    tickets: tuple[Ticket, ...]


class Retire(NamedTuple):
    """End a collector that was asked to leave and holds no ticket any more."""

    collector: int


class Train(NamedTuple):
    """Train round ``version`` on these tickets' segments, in this order."""

    version: int
    tickets: tuple[int, ...]
    off_policy_degree: int


class Publish(NamedTuple):
    """Make ``version`` available to collectors."""

    version: int


class Evaluate(NamedTuple):
    """Evaluate a frozen snapshot of ``version``; training waits for it when ``blocking``."""

    version: int
    blocking: bool


class Checkpoint(NamedTuple):
    """Save the run as it stands at ``version``; the learner is idle."""

    version: int


class Renew(NamedTuple):
    """Restart a collector as this incarnation, as a recorded run did."""

    collector: int
    incarnation: int


class Finish(NamedTuple):
    """End the run; ``failed`` when it could not continue."""

    reason: str
    failed: bool = False


Action = Issue | Cut | Retire | Train | Publish | Evaluate | Checkpoint | Renew | Finish


class Pace(Protocol):
    """Events in, actions out: no I/O, no clock, no threads.

    The driver applies all events of a step, then asks for decisions once; every wake-up is followed by a
    decision, too.
    """

    rollbacks: int
    """Times the run went back to collect other samples: seeds of tickets depend on it."""
    version: int
    """Rounds trained so far."""
    rounds: int
    """Rounds that the run is to train."""
    degree: int
    """k now in force."""
    published: int
    """Newest version collectors can get; -1 before the first publish."""
    eval_skipped: int
    """Evaluations that a slow evaluator passed over."""
    warm_at_s: float
    """Earliest time of the first round; minus infinity once it has started."""

    @property
    def dial_reason(self) -> str:
        """Reason of the tuner's last move of k; empty before the first, and where k is chosen."""
        ...

    @property
    def num_up(self) -> int:
        """Collectors that are up."""
        ...

    @property
    def is_ending(self) -> bool:
        """True when no further round starts."""
        ...

    @property
    def is_paused(self) -> bool:
        """True when nothing happens before a gate is opened."""
        ...

    @property
    def present(self) -> Sequence[int]:
        """Collectors that may get tickets."""
        ...

    def check_members(self, leaving: int | None = None) -> None:
        """Raise ConfigError with the reason if no collector may join, or this one not leave."""
        ...

    def counts(self) -> Counts:
        """Tickets by fate."""
        ...

    def lag(self) -> float:
        """Outstanding segments, in rounds."""
        ...

    def warm_up(self) -> tuple[int, int] | None:
        """Segments that arrived, and those that the first round waits for; None when it waits for its own."""
        ...

    def waiting_for(self) -> str:
        """Return who waits for whom, in words: for the report of a stall."""
        ...

    def start(self, now_s: float) -> Sequence[Action]:
        """Start, or continue after a saved state was loaded."""
        ...

    def apply(self, event: Event, now_s: float) -> Sequence[Action]:
        """Enter one event; return the actions that follow at once, such as publishing a new version."""
        ...

    def decide(self, now_s: float) -> Sequence[Action]:
        """Return the actions that the events so far allow, in order."""
        ...

    def wake_at_s(self, now_s: float) -> float | None:
        """Time after ``now_s`` at which to decide again although no event came; None: not needed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything but the clock, as plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any], arrived: Collection[int] | None = None) -> None:
        """Continue from a saved state; ``arrived`` are the tickets whose segments were saved, None: all."""
        ...
