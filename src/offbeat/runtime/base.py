"""What a runtime is told to run, what it reports, and the protocol that all runtimes keep."""

from __future__ import annotations

import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from offbeat.config.models import LearnerConfig, RolloutConfig, RuntimeConfig, TrainerConfig
from offbeat.errors import OffbeatError
from offbeat.roles import Collector, Evaluator, InPlaceCollector, Learner, PerWorker, WorkerContext
from offbeat.seeding import derive_seed
from offbeat.types import Array, Batch, Metrics, Segment, StateTree, Ticket

if TYPE_CHECKING:
    from offbeat.runtime.ranks import Crew

RoleT = TypeVar("RoleT")
Health = Literal["starting", "up", "unresponsive", "down", "waiting", "stopped"]
"""States of a part of the run; ``waiting`` is for the pause before it is started again."""


@dataclass(frozen=True, slots=True)
class Assignment(Generic[RoleT]):
    """What a worker has to make, and where it is to go on."""

    role: PerWorker[RoleT]
    context: WorkerContext
    state: StateTree | None = None
    sync_timeout_s: float = 30.0
    sync_retries: int = 3
    sync_retry_delay_s: float = 0.1


@dataclass(frozen=True, slots=True)
class LaneStart:
    """How a collector begins: anew (``state`` None), or where a segment left it."""

    incarnation: int = 0
    state: StateTree | None = None


@dataclass(frozen=True, slots=True)
class Machines:
    """Where the roles of a run are to live and how patient a runtime is with them."""

    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True, slots=True)
class Plan:
    """The roles of a run and where their logs go. ``log_dir`` None: workers write to the terminal."""

    collect: PerWorker[Collector]
    learn: PerWorker[Learner]
    evaluate: PerWorker[Evaluator] | None
    num_lanes: int
    seed: int
    worker_threads: int = 1
    start_timeout_s: float = 60.0
    sync_timeout_s: float = 30.0
    sync_retries: int = 3
    sync_retry_delay_s: float = 0.1
    log_dir: Path | None = None
    machines: Machines = field(default_factory=Machines)
    mode: Literal["stream", "replay"] = "stream"

    def lane(self, lane: int, start: LaneStart) -> Assignment[Collector]:
        """What the worker of a lane has to make."""
        seed = derive_seed(self.seed, "lane", lane, start.incarnation)
        context = WorkerContext(lane, self.num_lanes, seed, start.incarnation)
        return Assignment(self.collect, context, start.state, *self._sync_limits())

    def evaluator(self) -> Assignment[Evaluator]:
        """What the evaluator's worker has to make."""
        assert self.evaluate is not None, "an evaluation was asked for, but there is no evaluator"
        context = WorkerContext(collector=0, num_collectors=1, seed=derive_seed(self.seed, "evaluator"))
        return Assignment(self.evaluate, context, None, *self._sync_limits())

    def _sync_limits(self) -> tuple[float, int, float]:
        return self.sync_timeout_s, self.sync_retries, self.sync_retry_delay_s

    def make_learner(
        self, state: StateTree | None = None, *, crew: Crew | None = None, host: str = "127.0.0.1"
    ) -> Learner:
        """Make the learner, in the process where it is to live, and put it where ``state`` says.

        A learner of several ranks is a `ManyRanks`, to be closed. Its other ranks are child processes, or
        what ``crew`` starts elsewhere; ``host`` is then this machine's address, as those can reach it.
        """
        context = WorkerContext(0, 1, derive_seed(self.seed, "learner"))
        if self.machines.learner.num_ranks == 1:
            learner = self.learn.make(context)
        else:
            from offbeat.runtime.ranks import make_ranked

            learner = make_ranked(self, context, host, crew)
        if state is not None:
            try:
                learner.load_state_dict(state)
            except BaseException:
                close_learner(learner)
                raise
        return learner


# ---------------------------------------------------------------- what happens


@dataclass(frozen=True, slots=True)
class CollectorUp:
    """A collector can take tickets."""

    lane: int


@dataclass(frozen=True, slots=True)
class CollectorDown:
    """A collector is gone and its tickets with it; another can be started.

    ``raised``: its own code raised, and ``reason`` has the traceback.
    """

    lane: int
    reason: str
    raised: bool = False


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """A segment came back. ``state`` is the collector's state after it, None when it cannot give one."""

    segment: Segment
    state: StateTree | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A round was trained; times are of the runtime's clock."""

    version: int
    metrics: Metrics
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class WeightsOut:
    """Weights of this version can be had by collectors."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightsFailed:
    """Publishing did not work this time."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvalEnded:
    """An evaluation ended; ``metrics`` is None when it failed, and ``error`` then says why."""

    version: int
    metrics: Metrics | None
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class LearnerDown:
    """The learner, or one of its ranks, is gone: the run can only go on from a checkpoint."""

    reason: str


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """A part of the run is in another state than before.

    ``component`` is ``collector_0``, ``learner``, ``learner_rank_1``, ``evaluator`` or ``store``.
    """

    component: str
    state: Health
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Broken:
    """Something raised that the run cannot survive."""

    error: OffbeatError


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The learner as it was at this point of the training: copies that later rounds do not touch."""

    state: StateTree
    weights: Any


Happening = (
    CollectorUp
    | CollectorDown
    | SegmentReady
    | RoundDone
    | WeightsOut
    | WeightsFailed
    | EvalEnded
    | SnapshotTaken
    | LearnerDown
    | HealthChanged
    | Broken
)
Post = Callable[[Happening], None]


class Runtime(Protocol):
    """Carries out actions somewhere and reports what happened. Nothing here decides anything."""

    def start(self, plan: Plan, lanes: Sequence[LaneStart], learner_state: StateTree | None) -> None:
        """Bring the collectors up (each reports `CollectorUp`) and make the learner, where it left off."""
        ...

    def start_lane(self, lane: int, start: LaneStart) -> None:
        """Bring one collector up in the place of a lost one."""
        ...

    def kill_lane(self, lane: int, reason: str) -> None:
        """End a collector that hangs; it is reported as `CollectorDown` with where it hung."""
        ...

    def collect(self, ticket: Ticket) -> None:
        """Begin a ticket on its lane, behind those already there."""
        ...

    def train(self, batch: Batch) -> None:
        """Begin a round."""
        ...

    def release(self, tickets: Sequence[int]) -> None:
        """The segments of these tickets are no longer needed: their memory may be written again."""
        ...

    def publish(self, version: int) -> None:
        """Make the learner's weights available to collectors."""
        ...

    def snapshot(self) -> None:
        """Copy the learner's state and weights, between rounds; reported as `SnapshotTaken`."""
        ...

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate a snapshot of the learner's weights, where a crash cannot hurt the learner if possible."""
        ...

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """An evaluation takes too long: end it where that is possible, and report that it failed."""
        ...

    def wait(self, timeout_s: float) -> list[Happening]:
        """Return what happened, waiting at most ``timeout_s`` for something to happen."""
        ...

    def stacks(self) -> dict[str, str]:
        """Where each part of the run is right now, by component: for the report of a stall."""
        ...

    def pids(self) -> dict[str, int]:
        """Processes this runtime keeps, by role, beside the calling one."""
        ...

    def close(self) -> None:
        """End everything that was started. Safe to call twice."""
        ...


# ---------------------------------------------------------------- shared by runtimes


class ManyRanks(ABC):
    """A learner of several processes, of which this one leads."""

    lost: dict[str, str]
    """Other ranks that are gone, by name, and how they ended."""

    @abstractmethod
    def pids(self) -> dict[str, int | None]:
        """The other ranks by name, with their process where it is one of this machine."""

    @abstractmethod
    def stacks(self) -> dict[str, str]:
        """Where the other ranks are right now."""

    @abstractmethod
    def close(self) -> None:
        """End the other ranks. The learner keeps its weights and its state, but trains no longer."""


def close_learner(learner: Learner) -> None:
    """End the processes of a learner that has any of its own."""
    if isinstance(learner, ManyRanks):
        learner.close()


def thread_stacks() -> dict[str, str]:
    """The stack of every thread of this process but the calling one, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {
        ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()
    }
    stacks = {ident: "".join(traceback.format_stack(frame)).rstrip() for ident, frame in frames.items()}
    return {names.get(ident, f"thread {ident}"): stack for ident, stack in stacks.items()}


@dataclass(slots=True)
class CollectorRunner:
    """Runs tickets on one collector, wherever that lives."""

    collector: Collector
    _specs: dict[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        if isinstance(self.collector, InPlaceCollector):
            self._specs = self.collector.segment_spec()

    @property
    def specs(self) -> dict[str, Any] | None:
        """Arrays of a segment, for collectors that write in place."""
        return self._specs

    def run(self, ticket: Ticket, weights: Any, out: dict[str, Array] | None) -> Segment:
        """Collect one segment, into ``out`` where the collector can; stamp its time and version."""
        started_s = perf_counter()
        if self._specs is not None and isinstance(self.collector, InPlaceCollector):
            if out is None:
                out = {name: spec.empty() for name, spec in self._specs.items()}
            segment = self.collector.collect_into(ticket, weights, out)
        else:
            segment = self.collector.collect(ticket, weights)
        return replace(segment, collect_s=perf_counter() - started_s)


def make_runner(assignment: Assignment[Collector]) -> CollectorRunner:
    """Make a collector and put it where its assignment says."""
    collector = assignment.role.make(assignment.context)
    if assignment.state is not None:
        collector.load_state_dict(assignment.state)
    return CollectorRunner(collector)


class LazyEvaluator:
    """Makes its evaluator when it is first needed; one that cannot be made costs evaluations, not the run."""

    def __init__(self, assignment: Assignment[Evaluator]) -> None:
        self._assignment = assignment
        self._evaluator: Evaluator | None = None

    def run(self, weights: Any, version: int, seed: int) -> EvalEnded:
        """Evaluate; whatever goes wrong is reported and never stops training."""
        started_s = perf_counter()
        try:
            if self._evaluator is None:
                self._evaluator = self._assignment.role.make(self._assignment.context)
            metrics = self._evaluator.evaluate(weights, seed)
        except Exception:
            return EvalEnded(version, None, perf_counter() - started_s, traceback.format_exc())
        return EvalEnded(version, dict(metrics), perf_counter() - started_s)
