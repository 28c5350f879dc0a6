"""Events and actions of the coordinator that serves as an oracle."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.pacing.events import Signals
from offbeat.types import Ticket

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LaneReady:
    """A collector is up (first start or replacement) and can take tickets."""

    lane: int


@dataclass(frozen=True, slots=True)
class LaneLost:
    """A collector died or was killed; its running tickets wait for a replacement."""

    lane: int


@dataclass(frozen=True, slots=True)
class SegmentArrived:
    """A ticket's segment is in the store. ``version`` is the oldest version that really produced it."""

    ticket: int
    version: int


@dataclass(frozen=True, slots=True)
class SegmentDropped:
    """A named policy threw away a segment that had arrived."""

    ticket: int


@dataclass(frozen=True, slots=True)
class RoundTrained:
    """The learner finished the round it was given; ``version`` is the new version."""

    version: int
    signals: Signals = field(default_factory=Signals)


@dataclass(frozen=True, slots=True)
class Published:
    """Collectors can now get ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """Publishing ``version`` did not work; it is tried again after a delay."""

    version: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EvalDone:
    """The evaluation of ``version`` ended, well or badly."""

    version: int


@dataclass(frozen=True, slots=True)
class DialTurned:
    """Somebody turned ``off_policy_degree`` (-1: hand it to the tuner)."""

    off_policy_degree: int


@dataclass(frozen=True, slots=True)
class GatesSet:
    """Somebody opened or closed what the coordinator otherwise decides alone.

    ``collect``: new tickets may be issued. ``until``: rounds below this version may be trained, and tickets
    that they still need be issued; None: all. What is under way goes on, whatever is closed.
    """

    collect: bool = True
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Clock:
    """Time has passed; ``now_s`` comes with every event."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Finish cleanly: no new ticket, no new round. ``within_s``: how long that may take, None: any time."""

    reason: str
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class GoalReached:
    """The run has got what it was for: end after the round at hand, with everything due at the end."""

    reason: str


Event = (
    LaneReady
    | LaneLost
    | SegmentArrived
    | SegmentDropped
    | RoundTrained
    | Published
    | PublishFailed
    | EvalDone
    | DialTurned
    | GatesSet
    | Clock
    | StopRequested
    | GoalReached
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Issue:
    """Collect this ticket on its lane."""

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
    """The run is over; ``failed`` when it could not go on."""

    reason: str
    failed: bool = False


Action = Issue | Train | Publish | Evaluate | Checkpoint | Finish
