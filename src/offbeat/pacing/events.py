"""Events: one frozen record per fact of a run.

A runtime or the driver makes each record once; the pace applies it, and observers see it. Journals,
callbacks, metrics and the display are views of this one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from offbeat.types import Batch, Metrics, Segment, StateTree, Ticket

Health = Literal["starting", "up", "unresponsive", "down", "waiting", "stopped"]
"""States of a component; ``waiting`` is the pause before a restart."""

# ---------------------------------------------------------------- collecting


class CollectorUp(NamedTuple):
    """A collector is up (first start or replacement) and wants to hold ``capacity`` tickets.

    The capacity is an absolute number; the record may be sent again with another one.
    ``pid`` is its process, where it has one of its own on this machine. ``is_wide``: its tickets can be cut,
    and it gives its begun work.
    """

    collector: int
    capacity: int = 1
    pid: int | None = None
    is_wide: bool = False


class CollectorDown(NamedTuple):
    """A collector died or was killed; its running tickets are lost and wait to be issued again.

    ``raised``: its own code raised, and ``reason`` has the traceback. The driver adds ``restorable``: its
    environments continue where a saved state left them. ``is_final``: it raised `TaskError`, and another one
    would do so, too.
    """

    collector: int
    reason: str = ""
    raised: bool = False
    restorable: bool = True
    is_final: bool = False


class CollectorLeft(NamedTuple):
    """A collector that was asked to leave holds no ticket any more and has ended."""

    collector: int


@dataclass(frozen=True, slots=True)
class CollectorWorked:
    """A collector was at work for ``busy_s`` since its last report; at most one report a second.

    ``units`` counts what it made meanwhile, such as ``tokens``.
    """

    collector: int
    busy_s: float
    units: Mapping[str, int] = field(default_factory=dict)


class CollectorWaits(NamedTuple):
    """All open tickets of a collector have scripts that continue with ``version`` or a newer one."""

    collector: int
    version: int
    tickets: tuple[int, ...]


class OpenWork(NamedTuple):
    """A collector's answer to the question for its begun work, by ticket.

    ``version`` is that of its weights: nothing in the work was made with newer ones.
    """

    collector: int
    work: Mapping[int, StateTree]
    version: int = -1


class Issued(NamedTuple):
    """A ticket was issued to its collector, with begun work if there is any.

    ``keeps_all``: nothing of that is cut back; None: there is none.
    """

    ticket: Ticket
    keeps_all: bool | None = None


class SegmentArrived(NamedTuple):
    """A ticket's segment is in the store.

    ``num_bytes`` is the memory it takes there; ``state`` is the collector's state after it, None when it
    cannot be saved, and ``state_s`` the seconds that taking and sending it took. ``busy_s`` is the time that
    the collector was at work since its last report.
    """

    segment: Segment
    num_bytes: int = 0
    state: StateTree | None = None
    state_s: float = 0.0
    busy_s: float = 0.0


class SegmentDropped(NamedTuple):
    """A named policy dropped a segment that had arrived."""

    ticket: int
    reason: str = ""


# ---------------------------------------------------------------- learning


class Signals(NamedTuple):
    """Measurements of a round for the tuner: times in seconds, idle shares in [0, 1], cost of staleness.

    ``collect_s`` is the time the collectors together needed for a round's segments;
    ``ess``, ``behaviour_kl``, ``search_kl`` are None where the algorithm does not report them.
    """

    round_s: float = 0.0
    collect_s: float = 0.0
    train_s: float = 0.0
    collect_idle: float = 0.0
    train_idle: float = 0.0
    ess: float | None = None
    behaviour_kl: float | None = None
    search_kl: float | None = None


class TrainStarted(NamedTuple):
    """The learner was given a round."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class RoundTrained:
    """The learner finished its round; ``version`` is the new version.

    Times are of the driver's clock. The driver adds ``signals``.
    """

    version: int
    batch: Batch = field(default_factory=lambda: Batch(0, (), 0))
    metrics: Metrics = field(default_factory=dict)
    started_s: float = 0.0
    ended_s: float = 0.0
    signals: Signals = field(default_factory=Signals)


class Checksum(Future[int | None]):
    """A checksum of weights, which their learner computes when they are on their way to collectors.

    The result is None for weights that are not trees of arrays.
    """

    @staticmethod
    def of(value: int | None) -> Checksum:
        """Return a checksum that is known."""
        checksum = Checksum()
        checksum.set_result(value)
        return checksum

    def __reduce__(self) -> Any:
        return Checksum.of, (self.result(),)


class Published(NamedTuple):
    """Collectors can get ``version``; publishing took ``seconds``. ``checksum`` identifies the weights.

    ``num_bytes`` were copied for collectors, none where these get the very objects that the learner made.
    """

    version: int
    seconds: float = 0.0
    checksum: Checksum | None = None
    num_bytes: int = 0


class PublishFailed(NamedTuple):
    """Publishing ``version`` failed; it is tried again after a delay."""

    version: int
    reason: str = ""


class SnapshotTaken(NamedTuple):
    """A copy of the learner at this point of the training, which later rounds do not touch.

    Taking it took ``seconds``, for which rounds stood still. The next one may be in the same memory.
    """

    state: StateTree
    weights: Any
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LearnerStateless:
    """The learner has no state that could be saved, so no checkpoint is; told before its first round."""


class LearnerDown(NamedTuple):
    """The learner, or one of its ranks, died: the run can only continue from a checkpoint."""

    reason: str


# ---------------------------------------------------------------- evaluating, saving


class EvalDone(NamedTuple):
    """The evaluation of ``version`` ended; ``metrics`` is None when it failed, and ``error`` says why."""

    version: int
    metrics: Metrics | None = None
    seconds: float = 0.0
    error: str = ""


class Saved(NamedTuple):
    """A checkpoint of ``version`` is on the disk; writing took ``seconds``.

    Rounds stood still for ``paused_s`` of them, where nothing is written beside training.
    """

    version: int
    path: Path
    seconds: float
    score: float | None = None
    paused_s: float = 0.0


class SaveFailed(NamedTuple):
    """A checkpoint of ``version`` could not be written; older ones are as they were."""

    version: int
    reason: str


class SaveSkipped(NamedTuple):
    """A checkpoint of ``version`` came due while the one before was being taken or written."""

    version: int


# ---------------------------------------------------------------- requests


class DialTurned(NamedTuple):
    """A request for another ``off_policy_degree`` (-1: hand it to the tuner)."""

    off_policy_degree: int


class GatesSet(NamedTuple):
    """Manual gates on issuing and training, for step-by-step runs.

    ``collect``: new tickets may be issued. ``until``: rounds below this version may be trained, and tickets
    that they still need be issued; None: all. Work that has started continues, whatever is closed.
    """

    collect: bool = True
    until: int | None = None


class StopRequested(NamedTuple):
    """A request to finish cleanly: no new ticket, no new round.

    ``within_s`` limits the time that may take; None: no limit.
    """

    reason: str
    within_s: float | None = None


class GoalReached(NamedTuple):
    """The goal is reached: finish the current round, then evaluate and checkpoint as at the end."""

    reason: str


@dataclass(frozen=True, slots=True)
class CollectorsAdded:
    """A request for more collectors."""

    count: int = 1


class CollectorRemoved(NamedTuple):
    """A request that a collector leaves, once it has finished the tickets that it holds; None: the newest."""

    collector: int | None = None


Request = DialTurned | GatesSet | StopRequested | GoalReached | CollectorsAdded | CollectorRemoved

# ---------------------------------------------------------------- the run


class Started(NamedTuple):
    """The run starts at ``version``, or continues there when it was ``resumed``."""

    version: int = 0
    resumed: bool = False


class HealthChanged(NamedTuple):
    """A component is in another state than before.

    ``component`` is ``collector_0``, ``learner``, ``learner_rank_1``, ``evaluator`` or ``store``.
    """

    component: str
    state: Health
    detail: str = ""


class Notice(NamedTuple):
    """A line for the user; a warning when something went wrong."""

    text: str
    is_warning: bool = False


class Stalled(NamedTuple):
    """The run stands still and ends: who waits for whom, and the stack of each component."""

    waits: Sequence[Mapping[str, Any]]
    stacks: Mapping[str, str]


class Broken(NamedTuple):
    """An error that ends the run."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Restarting:
    """The run continues by itself from a checkpoint: its learner crashed, or it diverged.

    Example: ``Restarting("restart", version=40, reason="killed by SIGKILL", attempt=1, limit=3)``.
    """

    kind: Literal["restart", "rollback"]
    version: int
    reason: str
    attempt: int
    limit: int
    error: BaseException | None = None

    def __str__(self) -> str:
        """One line for people."""
        what = "the run goes on" if self.kind == "restart" else "the run goes back and collects other samples"
        reason = self.reason.splitlines()[0] if self.reason else "unknown"
        return f"{reason}: {what} from version {self.version} ({self.kind} {self.attempt} of {self.limit})"


class Finished(NamedTuple):
    """The run is over at ``version``: ``error`` is None when it ended well.

    ``stopped``: it ended early because that was asked for, by a signal or by ``stop``.
    """

    version: int
    reason: str
    error: BaseException | None = None
    stopped: bool = False


Event = (
    Started
    | CollectorUp
    | CollectorDown
    | CollectorLeft
    | CollectorWorked
    | CollectorWaits
    | OpenWork
    | Issued
    | SegmentArrived
    | SegmentDropped
    | TrainStarted
    | RoundTrained
    | Published
    | PublishFailed
    | SnapshotTaken
    | LearnerStateless
    | LearnerDown
    | EvalDone
    | Saved
    | SaveFailed
    | SaveSkipped
    | DialTurned
    | GatesSet
    | StopRequested
    | GoalReached
    | CollectorsAdded
    | CollectorRemoved
    | HealthChanged
    | Notice
    | Stalled
    | Broken
    | Restarting
    | Finished
)

Handlers = Mapping[type, Callable[[Any, float], None]]
"""Handlers of an observer by kind of event: ``handle(event, now_s)``."""
