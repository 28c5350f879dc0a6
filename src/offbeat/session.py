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
from offbeat.checkpoint.lock import RunLock
from offbeat.config.models import (
    AsyncTrainingConfig,
    CheckpointConfig,
    EvalConfig,
    LearnerConfig,
    ObserveConfig,
    RolloutConfig,
    RunSection,
    RuntimeConfig,
    TensorBoardConfig,
    TrainerConfig,
)
from offbeat.errors import (
    CheckpointError,
    CollectError,
    DivergedError,
    LearnerLost,
    OffbeatError,
    StallError,
)
from offbeat.lanes import Lanes, Loss, collector_name, revived
from offbeat.observe.callbacks import MetricValue, RunControl
from offbeat.pacing import Coordinator, Counts, PaceConfig
from offbeat.pacing import events as facts
from offbeat.pacing.actions import Action, Checkpoint, Evaluate, Finish, Issue, Publish, Train
from offbeat.pacing.events import (
    EvalDone,
    Event,
    GatesSet,
    Published,
    PublishFailed,
    RoundTrained,
    StopRequested,
)
from offbeat.recording import Recorder, RecordingOptions, Restart, learner_digest
from offbeat.replay import StreamStore
from offbeat.runtime.base import (
    Broken,
    CollectorDown,
    CollectorUp,
    EvalEnded,
    Happening,
    HealthChanged,
    LearnerDown,
    Plan,
    RoundDone,
    Runtime,
    SegmentReady,
    SnapshotTaken,
    WeightsFailed,
    WeightsOut,
)
from offbeat.runtime.inline import InlineRuntime
from offbeat.runtime.processes import ProcessRuntime
from offbeat.runtime.supervision import LossWatch, Wait, describe_stall
from offbeat.runtime.threads import ThreadRuntime
from offbeat.seeding import derive_seed
from offbeat.types import Batch, Metrics, StateTree, Ticket

_POLL_S = 0.25
_AWAY_S = 2.0


def _make_ray() -> Runtime:
    from offbeat.runtime.ray import RayRuntime

    return RayRuntime()


_RUNTIMES: dict[str, Callable[[], Runtime]] = {
    "inline": InlineRuntime,
    "threads": ThreadRuntime,
    "processes": ProcessRuntime,
    "ray": _make_ray,
}


_QUIET = ObserveConfig(console="none", tensorboard=TensorBoardConfig(enabled=False))


@dataclass(frozen=True, slots=True)
class Settings:
    """The sections of a configuration that are not about one algorithm or environment."""

    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    runtime: RuntimeConfig = field(default_factory=lambda: RuntimeConfig(kind="threads", num_workers=1))
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=lambda: _QUIET)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    run: RunSection = field(default_factory=RunSection)


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended. ``metrics`` are the last round's, ``eval_metrics`` the last evaluation's.

    ``env_steps`` counts from the run's first round, ``steps_per_s`` what this start of it trained, from its
    first ticket to the end of its last round.
    """

    version: int
    reason: str
    counts: Counts
    metrics: dict[str, MetricValue]
    eval_metrics: Metrics
    wall_s: float
    env_steps: int
    steps_per_s: float
    max_staleness: int
    weights: Any
    digest: str | None
    losses: tuple[Loss, ...] = ()
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """What one run consists of; ``requests`` are events from outside, from any thread."""

    plan: Plan
    pace: PaceConfig
    settings: Settings
    recording: RecordingOptions
    control: RunControl
    requests: deque[Event]


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a session begins: anew, or from a checkpoint (None: the run was killed before its first one).

    ``rollback`` is its number when the run goes back because it diverged: what was collected and not trained
    is then thrown away, and collectors start anew with other seeds.
    """

    saved: LoadedCheckpoint | None = None
    resumed: bool = False
    rollback: int = 0


class Session:
    """One run of a pipeline: the coordinator, the runtime, and the books."""

    def __init__(self, job: Job, beginning: Beginning) -> None:
        self._job = job
        self._beginning: Beginning | None = beginning  # until it has begun: checkpoints can be large
        self._settings = job.settings
        self._coordinator = Coordinator(job.pace)
        self._runtime = _RUNTIMES[self._settings.runtime.kind]()
        self._store = StreamStore()
        self._lanes = Lanes(self._settings.runtime, self._settings.async_training)
        self._recorder = Recorder(job.recording, self._coordinator)
        self._snapshots: deque[tuple[int, dict[str, StateTree] | None]] = deque()  # asked for: version, rest
        self._snapshot: SnapshotTaken | None = None
        self._snapshot_version = -1
        self._batch: Batch | None = None
        self._train_by_s = self._publish_by_s = math.inf
        self._evaluating: tuple[int, float] | None = None  # version, and when patience ends
        self._watch = LossWatch(self._settings.run.explosion_factor)
        self._progress_s = self._begun_s = self._left_s = perf_counter()
        self._wake_s: float | None = None
        self._stop_by_s = math.inf
        self._finish: Finish | None = None
        self._lock: RunLock | None = None
        self._going_on: Restart | None = None
        self.is_to_stop = False
        self.standing_requests: list[Event] = []
        self._gates: GatesSet | None = None

    # ------------------------------------------------------------ life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runtime.close()
        finally:
            self._recorder.close(error, self._going_on)
            if self._lock is not None:
                self._lock.release()

    @property
    def finished(self) -> bool:
        """Whether the coordinator has said so, and the learner has handed over what is left of it."""
        return self._finish is not None and not self._snapshots

    @property
    def version(self) -> int:
        """Rounds trained so far."""
        return self._coordinator.version

    @property
    def coordinator(self) -> Coordinator:
        """What decides, to look at."""
        return self._coordinator

    @property
    def metrics(self) -> dict[str, MetricValue]:
        """What the newest round of this session measured; empty before the first."""
        return self._recorder.last_metrics

    @property
    def losses(self) -> Sequence[Loss]:
        """What was lost so far."""
        return self._lanes.losses

    def begin(self) -> None:
        """Start the roles, restore them when resuming, and take the first actions."""
        if self._job.plan.log_dir is not None:
            self._job.plan.log_dir.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self._job.plan.log_dir.parent)
        assert self._beginning is not None
        beginning, self._beginning = self._beginning, None
        saved = beginning.saved
        if saved is not None:
            self._restore(saved, beginning.rollback)
        try:
            learner_state = saved.parts["learner"] if saved is not None else None
            self._runtime.start(self._job.plan, self._lanes.starts, learner_state)
        finally:  # after the processes were started, which takes time; also when that failed
            self._recorder.begin(saved, beginning.resumed, self._job.control)
        for lane in range(len(self._lanes.starts)):
            self._recorder.health(collector_name(lane), "starting")
        if saved is not None and any(start.state is None for start in self._lanes.starts):
            self._recorder.notice(
                "collectors without a saved state start anew: their running episodes restart"
            )
        self._perform(self._coordinator.start(perf_counter()))
        self._left_s = perf_counter()

    def _restore(self, saved: LoadedCheckpoint, rollback: int) -> None:
        if not rollback:
            self._store.load_state_dict(saved.parts["store"])
        self._coordinator.load_state_dict(saved.parts["coordinator"], self._store.ready())
        self._lanes.load_state_dict(saved.parts["collectors"], rollback)
        self._coordinator.rollbacks = self._lanes.rollbacks

    def step(self, at_most_s: float = _POLL_S) -> None:
        """Wait for something to happen, or for a time the coordinator asked for, and deal with it."""
        asked_s, patience_s = perf_counter(), self._patience_s(min(at_most_s, _POLL_S))
        if (held_s := asked_s - self._left_s) > _AWAY_S:  # whoever drives this session did something else
            self._shift_deadlines(held_s)
        happened = self._runtime.wait(patience_s)
        if (away_s := perf_counter() - asked_s - patience_s) > _AWAY_S:  # the whole machine slept, say
            self._shift_deadlines(away_s)
        for happening in happened:
            self._progress_s = perf_counter()
            if self._finish is None or isinstance(happening, SnapshotTaken | LearnerDown | Broken):
                self._take(happening)
        while self._job.requests:
            request = self._job.requests.popleft()
            self._recorder.requested(request)
            self._keep_request(request)
            if isinstance(request, StopRequested) and request.within_s is not None:
                self._stop_by_s = min(self._stop_by_s, perf_counter() + request.within_s)
            if isinstance(request, GatesSet):
                self._progress_s = perf_counter()
            if self._finish is None:
                self._tell(request)
        if self._wake_s is not None and perf_counter() >= self._wake_s:
            self._decide()
        self._start_lanes()
        self._check_deadlines(asked_s)
        self._left_s = perf_counter()

    def _keep_request(self, request: Event) -> None:
        """What was asked for holds for the whole run, also when it is begun again."""
        if isinstance(request, StopRequested):
            self.is_to_stop = True
            return
        if isinstance(request, GatesSet):  # only the last one counts, and there is one in every step
            self.standing_requests = [kept for kept in self.standing_requests if kept is not self._gates]
            self._gates = request
        self.standing_requests.append(request)

    def report(self) -> Report:
        """Sum the run up."""
        assert self._finish is not None
        if self._finish.failed:
            raise OffbeatError(self._finish.reason)
        assert self._snapshot is not None
        return Report(
            version=self._coordinator.version,
            reason=self._finish.reason,
            counts=self._coordinator.counts(),
            metrics=self._recorder.last_metrics,
            eval_metrics=self._recorder.last_eval,
            wall_s=perf_counter() - self._begun_s,
            env_steps=self._recorder.env_steps,
            steps_per_s=self._recorder.steps_per_s,
            max_staleness=self._recorder.max_staleness,
            weights=self._snapshot.weights,
            digest=_digest(self._snapshot.state),
            losses=tuple(self._lanes.losses),
        )

    def notice(self, text: str) -> None:
        """Tell the user something that is worth a line."""
        self._recorder.notice(text)

    def go_on(self, restart: Restart) -> None:
        """This session ends with an error that the run survives: it is begun again from a checkpoint."""
        self._going_on = restart

    # ------------------------------------------------------------ what happened

    def _tell(self, event: Event) -> None:
        self._perform(self._coordinator.apply(event, perf_counter()))
        self._decide()

    def _decide(self) -> None:
        now_s = perf_counter()
        actions = self._coordinator.decide(now_s)
        self._wake_s = self._coordinator.wake_at_s(now_s)
        self._perform(actions)

    def _take(self, happening: Happening) -> None:
        match happening:
            case CollectorUp(lane):
                self._collector_up(lane)
            case CollectorDown(lane, reason, raised):
                self._collector_down(lane, reason, raised)
            case SegmentReady():
                self._segment_ready(happening)
            case RoundDone():
                self._round_done(happening)
            case WeightsOut(version, seconds):
                self._publish_by_s = math.inf
                self._recorder.published(version, seconds)
                self._tell(Published(version))
            case WeightsFailed(version, reason):
                self._publish_by_s = math.inf
                self._recorder.publish_failed(version, reason)
                self._tell(PublishFailed(version, reason))
            case SnapshotTaken():
                self._snapshot_taken(happening)
            case EvalEnded(version):
                if self._evaluating is None or self._evaluating[0] != version:
                    return  # given up before it ended
                self._evaluating = None
                self._recorder.evaluated(happening)
                self._tell(EvalDone(version))
            case HealthChanged(component, state, detail):
                self._recorder.health(component, state, detail)
            case LearnerDown(reason):
                self._recorder.health("learner", "down", reason)
                raise LearnerLost(reason)
            case Broken(error):
                raise error

    def _segment_ready(self, happening: SegmentReady) -> None:
        segment, lane = happening.segment, happening.segment.ticket.collector
        start = self._lanes.arrived(lane, segment.ticket.number, happening.state, perf_counter())
        self._store.add(segment)
        self._recorder.segment(segment, happening.num_bytes, start.incarnation, self._lanes.rollbacks)
        self._tell(facts.SegmentArrived(segment))

    def _round_done(self, happening: RoundDone) -> None:
        assert self._batch is not None
        if wrong := self._watch.verdict(happening.metrics):
            raise DivergedError(
                f"round {self._batch.version} diverged: {wrong}. Lower the learning rate; with "
                "run.on_nan=rollback a run goes back to its newest checkpoint by itself"
            )
        self._runtime.release([segment.ticket.number for segment in self._batch.segments])
        self._recorder.trained(self._batch, happening)
        self._batch = None
        self._tell(RoundTrained(happening.version, signals=self._recorder.signals()))
        self._recorder.round(self._runtime.pids())

    def _collector_up(self, lane: int) -> None:
        self._lanes.up(lane, perf_counter())
        pid = self._runtime.pids().get(f"worker_{lane}")
        self._recorder.health(collector_name(lane), "up", "" if pid is None else f"pid {pid}")
        self._tell(facts.CollectorUp(lane))

    def _collector_down(self, lane: int, reason: str, raised: bool) -> None:
        """A collector is gone: give its tickets back, and start another one once its pause is over.

        One that raised before it ever made a segment has a bug that is to be seen at once.
        """
        if raised:
            self._recorder.generation_error()
            if not self._lanes.has_worked(lane):
                raise CollectError(reason)
        self._recorder.health(collector_name(lane), "down", reason)
        before = self._lanes.starts[lane]
        is_restored = revived(before) == before
        self._recorder.worker_lost(lane, reason, len(self._lanes.losses) + 1, is_restored)
        pause_s = self._lanes.lost(lane, reason, self._coordinator.version, perf_counter())
        self._tell(facts.CollectorDown(lane))
        if pause_s > 0:
            self._recorder.health(collector_name(lane), "waiting", f"started again in {pause_s:g} s")
        self._start_lanes()

    def _start_lanes(self) -> None:
        if self._finish is None:
            for lane in self._lanes.due(perf_counter()):
                self._recorder.health(collector_name(lane), "starting")
                self._runtime.start_lane(lane, self._lanes.starts[lane])

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
                    self._publish_by_s = perf_counter() + self._settings.async_training.sync_timeout
                    self._runtime.publish(version)
                case Evaluate(version):
                    seed = derive_seed(self._job.plan.seed, "evaluate", version)
                    self._evaluating = (version, perf_counter() + self._settings.eval.timeout_s)
                    self._runtime.evaluate(version, seed)
                case Checkpoint(version):
                    self._checkpoint(version)
                case Finish():
                    self._finish = action
                    self._recorder.finished(action)
                    if not action.failed and self._snapshot_version != self._coordinator.version:
                        self._ask_for_snapshot(self._coordinator.version, None)

    def _issue(self, ticket: Ticket) -> None:
        self._lanes.issued(ticket.collector, ticket.number, perf_counter())
        self._recorder.issued(ticket)
        self._runtime.collect(ticket)

    def _checkpoint(self, version: int) -> None:
        """Keep everything but the learner as it is now, until the learner's snapshot is there."""
        try:
            parts = {
                "coordinator": self._coordinator.state_dict(),
                "collectors": self._lanes.state_dict(),
                "store": self._store.state_dict(),
                **self._recorder.state_dict(),
            }
        except CheckpointError as error:
            self._recorder.notice(f"checkpoint of version {version} failed: {error}")
            return
        self._ask_for_snapshot(version, parts)

    def _ask_for_snapshot(self, version: int, parts: dict[str, StateTree] | None) -> None:
        self._train_by_s = perf_counter() + self._settings.runtime.train_timeout_s
        self._snapshots.append((version, parts))
        self._runtime.snapshot()

    def _snapshot_taken(self, snapshot: SnapshotTaken) -> None:
        version, parts = self._snapshots.popleft()
        self._snapshot, self._snapshot_version = snapshot, version
        if parts is not None:
            self._recorder.checkpoint(version, {"learner": snapshot.state, **parts}, snapshot.weights)

    # ------------------------------------------------------------ deadlines

    def _patience_s(self, most_s: float) -> float:
        if self._job.requests:
            return 0.0
        times_s = [time_s for time_s in (self._wake_s, self._lanes.next_due_s()) if time_s is not None]
        return min(most_s, max(0.0, min(times_s, default=math.inf) - perf_counter()))

    def _shift_deadlines(self, by_s: float) -> None:
        """Nobody is to blame for time in which this process did not run either."""
        self._lanes.shift(by_s)
        self._progress_s += by_s
        self._train_by_s += by_s
        self._publish_by_s += by_s
        if self._evaluating is not None:
            self._evaluating = (self._evaluating[0], self._evaluating[1] + by_s)

    def _check_deadlines(self, asked_s: float) -> None:
        """No wait without an end: what can be replaced is replaced, a run that stands still ends.

        A collector is judged by the time at which it was last asked: what had arrived by then has been
        taken, however long the driver itself was busy since.
        """
        for lane, why in self._lanes.hung(asked_s, perf_counter()):
            self._runtime.kill_lane(lane, why)
        if self._evaluating is not None and asked_s > self._evaluating[1]:
            self._give_up_evaluation(self._evaluating[0])
        if not self.finished and (stall := self._stall(asked_s)):
            raise self._stalled(stall)

    def _give_up_evaluation(self, version: int) -> None:
        limit = f"took more than {self._settings.eval.timeout_s:g} s (eval.timeout_s)"
        self._runtime.give_up_evaluation(version, f"the evaluation of version {version} {limit}")

    def _stalled(self, headline: str) -> StallError:
        """The report of a run that stands still, also as an event."""
        waits, stacks = self._waits(perf_counter()), self._runtime.stacks()
        self._recorder.stalled(waits, stacks)
        return StallError(describe_stall(headline, waits, stacks))

    def _waits(self, now_s: float) -> list[Wait]:
        """Who waits for whom, since when, and until when at most."""
        dial, limits = self._settings.async_training, self._settings.runtime
        this_round = f"round {self._coordinator.version}"
        waits = []
        if self._batch is not None or self._snapshots:
            since_s = now_s - (self._train_by_s - limits.train_timeout_s)
            who = this_round if self._batch is not None else f"checkpoint {self._snapshots[0][0]}"
            waits.append(Wait(who, "learner", since_s, limits.train_timeout_s, "runtime.train_timeout_s"))
        if self._publish_by_s < math.inf:
            since_s = now_s - (self._publish_by_s - dial.sync_timeout)
            waits.append(Wait("collectors", "learner (weights)", since_s, dial.sync_timeout, "sync_timeout"))
        if self._evaluating is not None:
            (version, until_s), limit_s = self._evaluating, self._settings.eval.timeout_s
            since_s = now_s - (until_s - limit_s)
            waits.append(Wait(f"evaluation of {version}", "evaluator", since_s, limit_s, "eval.timeout_s"))
        return [*waits, *self._lanes.waits(this_round, now_s)]

    def _stall(self, now_s: float) -> str | None:
        """Which deadline of the whole run is over, and who waits for whom, in words."""
        dial = self._settings.async_training
        waiting = self._coordinator.waiting_for()
        if now_s > self._stop_by_s:
            return f"asked to stop, the run did not end in time and has no last checkpoint: {waiting}"
        if now_s > self._publish_by_s:
            return f"the learner did not publish its weights in {dial.sync_timeout:g} s (sync_timeout)"
        if self._batch is not None or self._snapshots:
            limit_s = self._settings.runtime.train_timeout_s
            is_over = now_s > self._train_by_s
            return f"a round took more than {limit_s:g} s (train_timeout_s): {waiting}" if is_over else None
        waits_since_s = max(self._progress_s, self._coordinator.warm_at_s)
        is_over = self._evaluating is None and now_s - waits_since_s > dial.batch_timeout
        if is_over and not self._coordinator.is_held:
            return f"nothing happened for {dial.batch_timeout:g} s (batch_timeout): {waiting}"
        return None


def _digest(state: StateTree) -> str | None:
    """The digest of a learner's state, None when it has none or one that cannot be saved."""
    if state is None:
        return None
    try:
        return learner_digest(state)
    except CheckpointError:
        return None
