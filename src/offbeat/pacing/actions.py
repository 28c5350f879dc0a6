"""Actions that a pace asks for, and the protocol of a pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offbeat.pacing.events import Event
from offbeat.types import Ticket


@dataclass(frozen=True, slots=True)
class Issue:
    """Collect this ticket on its collector."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Train:
    """Train round ``version`` on these tickets' segments, in this order."""

    version: int
    tickets: tuple[int, ...]
    off_policy_degree: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Make ``version`` available to collectors."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate a frozen snapshot of ``version``; training waits for it when ``blocking``."""

    version: int
    blocking: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Save the run as it stands at ``version``; the learner is idle."""

    version: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run; ``failed`` when it could not continue."""

    reason: str
    failed: bool = False


Action = Issue | Train | Publish | Evaluate | Checkpoint | Finish


class Pace(Protocol):
    """Events in, actions out: no I/O, no clock, no threads.

    The driver applies all events of a step, then asks for decisions once; every wake-up is followed by a
    decision, too.
    """

    def start(self, now_s: float) -> Sequence[Action]:
        """Begin, or continue after a saved state was loaded."""
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
