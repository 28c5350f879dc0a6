"""The loop: wait for what happens, tell the coordinator, do what it says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

from offbeat.adapters import as_collect, as_evaluate, as_learn
from offbeat.checkpoint import LoadedCheckpoint
from offbeat.config.models import (
    AsyncTrainingConfig,
    CheckpointConfig,
    EvalConfig,
    ObserveConfig,
    RuntimeConfig,
)
from offbeat.errors import CollectError, OffbeatError, StallError
from offbeat.observe.callbacks import Callback, MetricValue, RunControl, RunSummary
from offbeat.pacing import Coordinator, Counts, PaceConfig
from offbeat.pacing.messages import (
    Action,
    Checkpoint,
    Clock,
    DialTurned,
    EvalDone,
    Evaluate,
    Event,
    Finish,
    GoalReached,
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


class Pipeline:
    """Collect, train and evaluate side by side, as far apart as ``off_policy_degree`` allows.

    ``collect(ticket, weights)``, ``train(list of what collect returned)``, ``weights()`` and
    ``evaluate(weights)`` may be plain functions; or role objects (see `offbeat.roles`); or, for roles that
    must be born in their worker, `PerWorker` factories. ``collect`` should draw its randomness from
    ``ticket.seed``: that is what makes a run repeatable.

    Example::

        report = Pipeline(collect=collect, train=train, weights=weights, off_policy_degree=2).run(rounds=100)
    """

    def __init__(
        self,
        *,
        collect: Any,
        train: Any,
        weights: Callable[[], Any] | None = None,
        evaluate: Any = None,
        off_policy_degree: int | None = None,
        runtime: Literal["inline", "threads", "processes"] | None = None,
        num_workers: int | None = None,
        segments_per_round: int | None = None,
        seed: int = 0,
        run_dir: str | Path | None = None,
        mode: Literal["stream", "replay"] = "stream",
        replay_ratio: float | None = None,
        settings: Settings | None = None,
        callbacks: Sequence[Callback] = (),
        summary: RunSummary | None = None,
    ) -> None:
        self._collect = as_collect(collect)
        self._learn = as_learn(train, weights)
        self._evaluate = as_evaluate(evaluate)
        self.settings = _with_overrides(settings or Settings(), off_policy_degree, runtime, num_workers)
        self._segments_per_round = segments_per_round or self.settings.runtime.num_workers
        self._seed = seed
        self._mode: Literal["stream", "replay"] = mode
        self._replay_ratio = replay_ratio
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._callbacks = tuple(callbacks)
        self._summary = summary
        self._requests: deque[Event] = deque()
        self._pace = self._pace_config(rounds=0)

    def run(self, rounds: int, *, saved: LoadedCheckpoint | None = None, resumed: bool = False) -> Report:
        """Train until ``rounds`` rounds are done (counted from the run's first), and report.

        ``resumed`` goes on with what is in the run directory: from ``saved``, or from the beginning.
        """
        self._pace = self._pace_config(rounds)
        with _Session(self, saved, resumed or saved is not None) as session:
            session.begin()
            while not session.finished:
                session.step()
            return session.report()

    def set_off_policy_degree(self, degree: int) -> None:
        """Turn the dial while running, from any thread or callback (-1: hand it to the tuner)."""
        self._pace.check_degree(degree)
        self._requests.append(DialTurned(degree))

    def stop(self, reason: str = "stopped") -> None:
        """Finish cleanly after the round at hand, from any thread, callback or signal handler."""
        self._requests.append(StopRequested(reason))

    def control(self) -> RunControl:
        """What a callback can do to the run."""
        return RunControl(self.stop, self.finish, self.set_off_policy_degree)

    def finish(self, reason: str) -> None:
        """The goal is reached: end after the round at hand, and evaluate as at the end of all rounds."""
        self._requests.append(GoalReached(reason))

    def plan(self) -> Plan:
        """The roles and limits, as a runtime needs them."""
        runtime, dial = self.settings.runtime, self.settings.async_training
        return Plan(
            collect=self._collect,
            learn=self._learn,
            evaluate=self._evaluate,
            num_lanes=runtime.num_workers,
            seed=self._seed,
            worker_threads=runtime.worker_torch_threads,
            start_timeout_s=runtime.start_timeout_s,
            sync_timeout_s=dial.sync_timeout,
            log_dir=self._run_dir / "logs" if self._run_dir is not None else None,
        )

    def recording(self) -> RecordingOptions:
        """What the run writes and shows."""
        settings, dial = self.settings, self.settings.async_training
        about = self._summary or RunSummary("pipeline", "", "", "", 0, 0, 0)
        summary = replace(
            about,
            runtime=settings.runtime.kind,
            num_workers=settings.runtime.num_workers,
            rounds=self._pace.rounds,
            off_policy_degree=dial.off_policy_degree,
            directory=self._run_dir,
        )
        return RecordingOptions(summary, settings.observe, settings.checkpoint, dial, self._callbacks)

    def _pace_config(self, rounds: int) -> PaceConfig:
        dial, checkpoint, evaluation = (
            self.settings.async_training,
            self.settings.checkpoint,
            self.settings.eval,
        )
        saves = self._run_dir is not None and checkpoint.enabled
        judges = self._evaluate is not None
        return PaceConfig(
            rounds=rounds,
            segments_per_round=self._segments_per_round,
            num_lanes=self.settings.runtime.num_workers,
            off_policy_degree=dial.off_policy_degree,
            auto_max=dial.auto_max,
            max_staleness=dial.max_staleness_allowed,
            mode=self._mode,
            replay_ratio=self._replay_ratio,
            min_segments=dial.min_batch_count or 0,
            max_outstanding=dial.max_queue_size,
            publish_interval=dial.weight_sync_interval,
            eval_interval=evaluation.interval_rounds if judges else None,
            eval_at_end=evaluation.at_end and judges,
            async_eval=dial.enable_async_eval,
            checkpoint_interval=checkpoint.interval_rounds if saves else None,
            checkpoint_interval_s=checkpoint.interval_s if saves else None,
            checkpoint_at_end=saves,
            issue_interval_s=dial.batch_generation_interval,
            max_publish_retries=dial.max_sync_retries,
            publish_retry_delay_s=dial.sync_retry_delay,
            seed=self._seed,
        )


def _with_overrides(
    settings: Settings, degree: int | None, kind: str | None, num_workers: int | None
) -> Settings:
    dial = {} if degree is None else {"off_policy_degree": degree}
    runtime: dict[str, Any] = {} if kind is None else {"kind": kind}
    runtime |= {} if num_workers is None else {"num_workers": num_workers}
    return replace(
        settings,
        async_training=AsyncTrainingConfig(**{**settings.async_training.model_dump(), **dial}),
        runtime=RuntimeConfig(**{**settings.runtime.model_dump(), **runtime}),
    )


class _Session:
    """One run of a pipeline: the coordinator, the runtime, and the books."""

    def __init__(self, pipeline: Pipeline, saved: LoadedCheckpoint | None, resumed: bool) -> None:
        self._pipeline = pipeline
        self._saved = saved
        self._resumed = resumed
        self._settings = pipeline.settings
        self._coordinator = Coordinator(pipeline._pace)
        self._runtime = _RUNTIMES[self._settings.runtime.kind]()
        self._store = StreamStore()
        self._lanes = [LaneStart() for _ in range(self._settings.runtime.num_workers)]
        self._recorder = Recorder(pipeline.recording(), self._coordinator)
        self._learner: Learner
        self._started_at_s: dict[int, float] = {}  # lane -> since when its first ticket runs
        self._tickets: dict[int, list[int]] = {}  # lane -> tickets it has, in order
        self._batch: Batch | None = None
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
        if self._saved is not None:
            self._restore(self._saved)
        self._learner = self._runtime.start(self._pipeline.plan(), self._lanes)
        if self._saved is not None:
            self._learner.load_state_dict(self._saved.parts["learner"])
        self._recorder.begin(self._saved, self._resumed, self._pipeline.control())
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
        while self._pipeline._requests:
            request = self._pipeline._requests.popleft()
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
                    self._batch = Batch(version, self._store.next(tickets), degree)
                    self._recorder.train_started(self._batch)
                    self._runtime.train(self._batch)
                case Publish(version):
                    self._runtime.publish(version)
                case Evaluate(version, blocking):
                    seed = derive_seed(self._pipeline._seed, "evaluate", version)
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
        """No wait without an end: a hanging collector is replaced, a run that stands still ends."""
        now_s, dial = perf_counter(), self._settings.async_training
        if now_s > self._stop_by_s and not self.finished:
            raise StallError(
                f"asked to stop, but after {_STOP_LIMIT_S:g} s {self._coordinator.waiting_for()}: "
                "ended without a last checkpoint"
            )
        for lane, tickets in self._tickets.items():
            if tickets and now_s - self._started_at_s[lane] > dial.generation_timeout:
                waited = f"hung: ticket {tickets[0]} took more than {dial.generation_timeout} s"
                self._started_at_s[lane] = now_s
                self._runtime.kill_lane(lane, waited)
        if self._batch is None and now_s - self._progress_s > dial.batch_timeout:
            raise StallError(
                f"nothing happened for {dial.batch_timeout} s (async_training.batch_timeout): "
                f"{self._coordinator.waiting_for()}"
            )


def _revived(lane: LaneStart) -> LaneStart:
    """How a lane goes on after its process ended: where it was, or anew if it cannot."""
    return lane if lane.state is not None else LaneStart(lane.incarnation + 1)
