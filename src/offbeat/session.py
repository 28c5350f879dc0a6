"""One run: wait for what happens, tell the coordinator, do what it says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from offbeat.checkpoint import LoadedCheckpoint
from offbeat.config.models import (
    AsyncTrainingConfig,
    CheckpointConfig,
    EvalConfig,
    ObserveConfig,
    RuntimeConfig,
)
from offbeat.errors import CollectError, OffbeatError, StallError
from offbeat.observe.callbacks import MetricValue, RunControl
from offbeat.pacing import Coordinator, Counts, PaceConfig
from offbeat.pacing.messages import (
    Action,
    Checkpoint,
    Clock,
    EvalDone,
    Evaluate,
    Event,
    Finish,
    Issue,
    LaneLost,
    LaneReady,
    Publish,
    Published,
    PublishFailed,
    RoundTrained,
    SegmentArrived,
    StopRequested,
    Train,
)
from offbeat.recording import Recorder, RecordingOptions, learner_digest
from offbeat.replay import StreamStore
from offbeat.roles import Learner
from offbeat.runtime.base import (
    Broken,
    CollectorDown,
    CollectorUp,
    EvalEnded,
    Happening,
    LaneStart,
    Plan,
    RoundDone,
    Runtime,
    SegmentReady,
    WeightsFailed,
    WeightsOut,
)
from offbeat.runtime.inline import InlineRuntime
from offbeat.runtime.processes import ProcessRuntime
from offbeat.runtime.threads import ThreadRuntime
from offbeat.seeding import derive_seed
from offbeat.types import Batch, Metrics, Ticket

_POLL_S = 0.25
_STOP_LIMIT_S = 8.0
_RUNTIMES: dict[str, Callable[[], Runtime]] = {
    "inline": InlineRuntime,
    "threads": ThreadRuntime,
    "processes": ProcessRuntime,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The sections of a configuration that are not about one algorithm or environment."""

    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    runtime: RuntimeConfig = field(default_factory=lambda: RuntimeConfig(kind="threads", num_workers=1))
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=lambda: ObserveConfig(console="none", tensorboard=False))


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended. ``metrics`` are the last round's, ``eval_metrics`` the last evaluation's."""

    version: int
    reason: str
    counts: Counts
    metrics: dict[str, MetricValue]
    eval_metrics: Metrics
    wall_s: float
    max_staleness: int
    weights: Any
    digest: str


@dataclass(frozen=True, slots=True)
class Job:
    """What one run consists of; ``requests`` are events from outside, from any thread."""

    plan: Plan
    pace: PaceConfig
    settings: Settings
    recording: RecordingOptions
    control: RunControl
    requests: deque[Event]


class Session:
    """One run of a pipeline: the coordinator, the runtime, and the books."""

    def __init__(self, job: Job, saved: LoadedCheckpoint | None, resumed: bool) -> None:
        self._job = job
        self._saved = saved
        self._resumed = resumed
        self._settings = job.settings
        self._coordinator = Coordinator(job.pace)
        self._runtime = _RUNTIMES[self._settings.runtime.kind]()
        self._store = StreamStore()
        self._lanes = [LaneStart() for _ in range(self._settings.runtime.num_workers)]
        self._recorder = Recorder(job.recording, self._coordinator)
        self._learner: Learner
        self._started_at_s: dict[int, float] = {}  # lane -> since when its first ticket runs
        self._tickets: dict[int, list[int]] = {}  # lane -> tickets it has, in order
        self._batch: Batch | None = None
        self._train_by_s = math.inf
        self._evaluating: tuple[int, float] | None = None  # version, and when patience ends
        self._restarts = 0
        self._progress_s = self._begun_s = perf_counter()
        self._wake_s: float | None = None
        self._stop_by_s = math.inf
        self._finish: Finish | None = None

    # ------------------------------------------------------------ life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runtime.close()
        finally:
            self._recorder.close(error)

    @property
    def finished(self) -> bool:
        """Whether the coordinator has said so."""
        return self._finish is not None

    def begin(self) -> None:
        """Start the roles, restore them when resuming, and take the first actions."""
        if self._job.plan.log_dir is not None:
            self._job.plan.log_dir.mkdir(parents=True, exist_ok=True)
        if self._saved is not None:
            self._restore(self._saved)
        self._learner = self._runtime.start(self._job.plan, self._lanes)
        if self._saved is not None:
            self._learner.load_state_dict(self._saved.parts["learner"])
        self._recorder.begin(self._saved, self._resumed, self._job.control)
        self._perform(self._coordinator.start(perf_counter()))

    def _restore(self, saved: LoadedCheckpoint) -> None:
        self._store.load_state_dict(saved.parts["store"])
        self._coordinator.load_state_dict(saved.parts["coordinator"], self._store.ready())
        for lane, state in enumerate(saved.parts["collectors"][: len(self._lanes)]):
            self._lanes[lane] = _revived(LaneStart(state["incarnation"], state["state"]))

    def step(self) -> None:
        """Wait for something to happen, or for a time the coordinator asked for, and deal with it."""
        for happening in self._runtime.wait(self._patience_s()):
            self._progress_s = perf_counter()
            self._take(happening)
        while self._job.requests:
            request = self._job.requests.popleft()
            self._recorder.requested(request)
            if isinstance(request, StopRequested):
                self._stop_by_s = min(self._stop_by_s, perf_counter() + _STOP_LIMIT_S)
            self._tell(request)
        if self._wake_s is not None and perf_counter() >= self._wake_s:
            self._tell(Clock())
        self._check_deadlines()

    def report(self) -> Report:
        """Sum the run up."""
        assert self._finish is not None
        if self._finish.failed:
            raise OffbeatError(self._finish.reason)
        return Report(
            version=self._coordinator.version,
            reason=self._finish.reason,
            counts=self._coordinator.counts(),
            metrics=self._recorder.last_metrics,
            eval_metrics=self._recorder.last_eval,
            wall_s=perf_counter() - self._begun_s,
            max_staleness=self._recorder.max_staleness,
            weights=self._learner.weights(),
            digest=learner_digest(self._learner.state_dict()),
        )

    # ------------------------------------------------------------ what happened

    def _tell(self, event: Event) -> None:
        now_s = perf_counter()
        actions = self._coordinator.handle(event, now_s)
        self._wake_s = self._coordinator.wake_at_s(now_s)
        self._perform(actions)

    def _take(self, happening: Happening) -> None:
        match happening:
            case CollectorUp(lane):
                self._tell(LaneReady(lane))
            case CollectorDown(lane, reason):
                self._replace(lane, reason)
            case SegmentReady():
                self._segment_ready(happening)
            case RoundDone():
                self._round_done(happening)
            case WeightsOut(version, seconds):
                self._recorder.published(version, seconds)
                self._tell(Published(version))
            case WeightsFailed(version, reason):
                self._recorder.publish_failed(version, reason)
                self._tell(PublishFailed(version, reason))
            case EvalEnded(version):
                self._evaluating = None
                self._recorder.evaluated(happening)
                self._tell(EvalDone(version))
            case Broken(error):
                self._recorder.broken(error)
                raise error

    def _segment_ready(self, happening: SegmentReady) -> None:
        segment, lane = happening.segment, happening.segment.ticket.lane
        self._tickets[lane].remove(segment.ticket.number)
        self._started_at_s[lane] = perf_counter()
        self._lanes[lane] = LaneStart(self._lanes[lane].incarnation, happening.state)
        self._store.add(segment)
        self._recorder.segment(segment, happening.num_bytes, self._lanes[lane])
        self._tell(SegmentArrived(segment.ticket.number, segment.oldest_version))

    def _round_done(self, happening: RoundDone) -> None:
        assert self._batch is not None
        self._runtime.release([segment.ticket.number for segment in self._batch.segments])
        self._recorder.trained(self._batch, happening)
        self._batch = None
        self._tell(RoundTrained(happening.version, self._recorder.signals()))
        self._recorder.round(self._runtime.pids())

    def _replace(self, lane: int, reason: str) -> None:
        self._restarts += 1
        self._lanes[lane] = _revived(before := self._lanes[lane])
        restored = before.incarnation == self._lanes[lane].incarnation
        self._recorder.worker_lost(lane, reason, self._restarts, restored)
        if self._restarts > self._settings.runtime.max_worker_restarts:
            raise CollectError(
                f"{self._restarts} collectors were lost, more than runtime.max_worker_restarts allows; "
                f"the last one: {reason}"
            )
        self._tickets[lane] = []
        self._tell(LaneLost(lane))
        self._runtime.start_lane(lane, self._lanes[lane])

    # ------------------------------------------------------------ what is to be done

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Issue(ticket):
                    self._issue(ticket)
                case Train(version, tickets, degree):
                    self._train_by_s = perf_counter() + self._settings.runtime.train_timeout_s
                    self._batch = Batch(version, self._store.next(tickets), degree)
                    self._recorder.train_started(self._batch)
                    self._runtime.train(self._batch)
                case Publish(version):
                    self._runtime.publish(version)
                case Evaluate(version, blocking):
                    seed = derive_seed(self._job.plan.seed, "evaluate", version)
                    self._evaluating = (version, perf_counter() + self._settings.eval.timeout_s)
                    self._runtime.evaluate(version, seed, blocking)
                case Checkpoint(version):
                    self._checkpoint(version)
                case Finish():
                    self._finish = action
                    self._recorder.finished(action)

    def _issue(self, ticket: Ticket) -> None:
        waiting = self._tickets.setdefault(ticket.lane, [])
        if not waiting:
            self._started_at_s[ticket.lane] = perf_counter()
        waiting.append(ticket.number)
        self._recorder.issued(ticket)
        self._runtime.collect(ticket)

    def _checkpoint(self, version: int) -> None:
        collectors = [{"incarnation": lane.incarnation, "state": lane.state} for lane in self._lanes]
        parts = {
            "learner": self._learner.state_dict(),
            "coordinator": self._coordinator.state_dict(),
            "collectors": collectors,
            "store": self._store.state_dict(),
        }
        self._recorder.checkpoint(version, parts, self._learner.weights())

    # ------------------------------------------------------------ deadlines

    def _patience_s(self) -> float:
        if self._wake_s is None:
            return _POLL_S
        return min(_POLL_S, max(0.0, self._wake_s - perf_counter()))

    def _check_deadlines(self) -> None:
        """No wait without an end: what can be replaced is replaced, a run that stands still ends."""
        now_s, dial = perf_counter(), self._settings.async_training
        for lane, tickets in self._tickets.items():
            if tickets and now_s - self._started_at_s[lane] > dial.generation_timeout:
                waited = f"hung: ticket {tickets[0]} took more than {dial.generation_timeout:g} s"
                self._started_at_s[lane] = now_s
                self._runtime.kill_lane(lane, waited)
        if self._evaluating is not None and now_s > self._evaluating[1]:
            self._give_up_evaluation(self._evaluating[0])
        if self._finish is None and (stall := self._stall(now_s)):
            raise StallError(f"{stall}: {self._coordinator.waiting_for()}")

    def _give_up_evaluation(self, version: int) -> None:
        limit = f"took more than {self._settings.eval.timeout_s:g} s (eval.timeout_s)"
        if not self._settings.async_training.enable_async_eval:
            raise StallError(f"the evaluation of version {version} {limit}")
        self._evaluating = None
        self._runtime.give_up_evaluation(version, f"the evaluation of version {version} {limit}")

    def _stall(self, now_s: float) -> str | None:
        """Which deadline of the whole run is over, in words."""
        if now_s > self._stop_by_s:
            return f"asked to stop, it did not within {_STOP_LIMIT_S:g} s and ends without a last checkpoint"
        if self._batch is not None:
            limit_s = self._settings.runtime.train_timeout_s
            return (
                f"a round took more than {limit_s:g} s (runtime.train_timeout_s)"
                if now_s > self._train_by_s
                else None
            )
        limit_s = self._settings.async_training.batch_timeout
        if self._evaluating is None and now_s - self._progress_s > limit_s:
            return f"nothing happened for {limit_s:g} s (async_training.batch_timeout)"
        return None


def _revived(lane: LaneStart) -> LaneStart:
    """How a lane goes on after its process ended: where it was, or anew if it cannot."""
    return lane if lane.state is not None else LaneStart(lane.incarnation + 1)
