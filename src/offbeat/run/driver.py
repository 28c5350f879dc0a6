"""The one loop of a run: wait, apply, emit, decide, perform, check waits.

Training, resuming, replaying and going step by step are ways to call it. It has no clock of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from offbeat.errors import CollectError, DivergedError, LearnerLost, StallError
from offbeat.observe.meter import Meter
from offbeat.observe.system import SystemMonitor
from offbeat.pacing.actions import (
    Action,
    Checkpoint,
    Evaluate,
    Finish,
    Issue,
    Pace,
    Publish,
    Renew,
    Train,
)
from offbeat.pacing.events import (
    Broken,
    CollectorDown,
    EvalDone,
    Event,
    Finished,
    GatesSet,
    Handlers,
    HealthChanged,
    Issued,
    LearnerDown,
    Notice,
    Published,
    PublishFailed,
    Request,
    Restarting,
    RoundTrained,
    SegmentArrived,
    SnapshotTaken,
    Stalled,
    Started,
    StopRequested,
    TrainStarted,
)
from offbeat.replay import StreamStore
from offbeat.run.collectors import Collectors
from offbeat.run.saving import Parts, Saving
from offbeat.run.waits import Wait, Waits, describe_stall
from offbeat.runtime.base import Runtime
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.runtime.supervision import LossWatch
from offbeat.seeding import derive_seed
from offbeat.types import Batch, StateTree

_POLL_S = 0.25
_SUSPENDED_S = 2.0
_AFTER_FINISH = (SnapshotTaken, LearnerDown, Broken)


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The start of a run, or the saved parts that it continues from.

    ``warnings`` become notices when the run starts. ``rollback`` is its number when the run goes back
    because it diverged: what was collected and not trained is then thrown away, and collectors start again
    with other seeds.
    """

    version: int = 0
    parts: Mapping[str, StateTree] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    resumed: bool = False
    rollback: int = 0


class Driver:
    """Drives one start of a run: a pace, a runtime, and observers around one loop.

    Two tables are its only books beside the pace's ledger: `Collectors` and `Waits`. ``requests`` are events
    from any thread. The meter is its first observer; others are added with `observe`.
    """

    def __init__(
        self,
        spec: RunSpec,
        pace: Pace,
        runtime: Runtime,
        clock: Callable[[], float],
        requests: deque[Request],
    ) -> None:
        settings, monitor = spec.settings, SystemMonitor()
        self.spec, self.pace, self.clock = spec, pace, clock
        self.waits = Waits()
        self.collectors = Collectors(
            settings, self.waits, self._start_collector, runtime.kill_collector, lambda: pace.version
        )
        self.meter = Meter(
            spec.num_collectors,
            pace,
            self.collectors.busy_s,
            staleness_threshold=settings.async_training.staleness_threshold,
            pauses_for_eval=not settings.async_training.enable_async_eval,
            system=lambda now_s: monitor.read(now_s, lambda: runtime.pids().values()),
        )
        self.saving = Saving(spec.directory, settings.checkpoint, self._capture, clock)
        self.faults: deque[str] = deque()  # of files, from any thread
        self.persistent_requests: list[Request] = []  # hold for the whole run, also when it is restarted
        self.is_to_stop = False
        self.finish: Finish | None = None
        self._runtime = runtime
        self._requests = requests
        self._store = StreamStore()
        self._loss_watch = LossWatch(settings.run.explosion_factor)
        self._handlers: dict[type, list[Callable[[Any, float], None]]] = {}
        self._closing = contextlib.ExitStack()
        self._flushes: list[Callable[[], None]] = []
        self._states: list[Callable[[], dict[str, StateTree]]] = []
        self._has_started = False
        self._evaluating: int | None = None
        limit_s, setting = settings.async_training.batch_timeout, "async_training.batch_timeout"
        self._progress = Wait("progress", self._round, "any event", limit_s, setting, self._no_progress)
        self._wake_s: float | None = None
        self._begun_s = self._left_s = clock()
        self._checks: dict[type, Callable[[Any], Event | None]] = {
            Broken: self._check_broken,
            RoundTrained: self._check_round,
            CollectorDown: self._check_down,
            EvalDone: self._check_evaluation,
        }
        self._reactions: dict[type, Callable[[Any, float], None]] = {
            CollectorDown: self._after_down,
            RoundTrained: lambda event, now_s: self.waits.end("train"),
            Published: lambda event, now_s: self.waits.end("publish"),
            PublishFailed: self._after_failed_publish,
            EvalDone: self._after_evaluation,
            SnapshotTaken: self._after_snapshot,
            LearnerDown: self._after_learner_down,
            StopRequested: self._after_stop_request,
        }
        self._performers: dict[type[Action], Callable[[Any], None]] = {
            Issue: self._issue,
            Train: self._train,
            Publish: self._publish,
            Evaluate: self._evaluate,
            Checkpoint: self._checkpoint,
            Renew: self._renew,
            Finish: self._end,
        }
        self.observe(self.collectors.handlers())
        self.observe({SegmentArrived: lambda event, now_s: self._store.add(event.segment)})
        self.observe(self.meter.handlers())

    # ------------------------------------------------------------ observers

    def observe(
        self,
        handlers: Handlers,
        *,
        close: Callable[[], None] | None = None,
        flush: Callable[[], None] | None = None,
        state: Callable[[], dict[str, StateTree]] | None = None,
    ) -> None:
        """Add an observer; ``flush`` is called once per step, ``state`` goes into checkpoints."""
        for kind, handle in handlers.items():
            self._handlers.setdefault(kind, []).append(handle)
        if close is not None:
            self._closing.callback(close)
        if flush is not None:
            self._flushes.append(flush)
        if state is not None:
            self._states.append(state)

    def emit(self, event: Event) -> None:
        """Pass a fact to the tables and all observers: each fact passes here once."""
        now_s = self.clock()
        for handle in self._handlers.get(type(event), ()):
            handle(event, now_s)

    def notice(self, text: str) -> None:
        """Emit a notice for the user."""
        self.emit(Notice(text))

    # ------------------------------------------------------------ start and end

    @property
    def finished(self) -> bool:
        """True when the pace has finished and the learner's last snapshot is there."""
        return self.finish is not None and not self.saving.is_pending

    @property
    def seconds(self) -> float:
        """Time since this start of the run."""
        return self.clock() - self._begun_s

    def phase(self) -> str:
        """Return the phase of the run for the display, with the progress of what it waits for."""
        return self.waits.phase(self._runtime.progress)

    def start(self, point: StartPoint) -> None:
        """Start the roles, restore them when resuming, and perform the first actions."""
        if point.parts:
            self._restore(point)
        try:
            self._runtime.start(self.spec, self.collectors.starts, point.parts.get("learner"))
        except BaseException:
            with contextlib.suppress(Exception):  # the error of the start is the one to see
                self._tell_start(point)
            raise
        self._tell_start(point)  # after the processes were started, which takes time
        for index in range(len(self.collectors.rows)):
            self._collector_starting(index)
        if point.parts and any(start.state is None for start in self.collectors.starts):
            self.notice("collectors without a saved state start anew: their running episodes restart")
        self._await_progress()
        for action in self.pace.start(self.clock()):
            self._performers[type(action)](action)
        self._left_s = self.clock()

    def _tell_start(self, point: StartPoint) -> None:
        self._has_started = True
        self.emit(Started(point.version, point.resumed))
        for text in point.warnings:
            self.notice(text)
        if point.resumed and not point.parts:
            self.notice("the run has no checkpoint yet: it starts again from round 0")

    def _restore(self, point: StartPoint) -> None:
        parts = point.parts
        if not point.rollback:
            self._store.load_state_dict(parts["store"])
        ready = self._store.ready()
        self.pace.load_state_dict(parts["coordinator"], ready)
        self.collectors.load_state_dict(parts["collectors"], point.rollback)
        self.pace.rollbacks = self.collectors.rollbacks
        self.meter.load_state_dict(parts["meter"], ready)
        self.meter.max_staleness = parts["recorder"]["max_staleness"]

    def _capture(self) -> Parts:
        """Return all parts of a checkpoint but the learner, as they are now."""
        recorder: dict[str, StateTree] = {"max_staleness": self.meter.max_staleness}
        for state in self._states:
            recorder |= state()
        return {
            "coordinator": self.pace.state_dict(),
            "collectors": self.collectors.state_dict(),
            "store": self._store.state_dict(),
            "meter": self.meter.state_dict(),
            "recorder": recorder,
        }

    def close(self, error: BaseException | None, restarting: Restarting | None = None) -> None:
        """End everything that was started, and emit how the run ended or that it is restarted."""
        with self._closing:
            try:
                self._runtime.close()
            finally:
                if self._has_started:
                    self._tell_end(error, restarting)

    def _tell_end(self, error: BaseException | None, restarting: Restarting | None) -> None:
        try:
            self._tell_faults()
        finally:
            if restarting is not None:
                self.emit(replace(restarting, error=error))
            else:
                reason = self.finish.reason if self.finish is not None else str(error)
                self.emit(Finished(self.pace.version, reason, error))

    # ------------------------------------------------------------ the loop

    def step(self, at_most_s: float = _POLL_S) -> None:
        """Wait for events, apply and emit each, decide once, perform, and check the waits."""
        polled_s = self._extend_if_suspended(self._left_s)
        timeout_s = self._timeout_s(min(at_most_s, _POLL_S), polled_s)
        events = self._runtime.wait(timeout_s)
        self._extend_if_suspended(polled_s + timeout_s)
        for event in events:
            if self.finish is None or isinstance(event, _AFTER_FINISH):
                self._take(event)
            elif isinstance(event, Published | PublishFailed):
                self.waits.end("publish")
        if events:
            self._await_progress()
        self._take_requests()
        self.decide()
        if not self.finished:
            for wait in self.waits.expired(polled_s):
                wait.expire()
        for flush in self._flushes:
            flush()
        self._tell_faults()
        self._left_s = self.clock()

    def _take(self, event: Event) -> None:
        """Check an event, apply it, emit it, and react to it."""
        kind = type(event)
        if kind in self._checks:
            checked = self._checks[kind](event)
            if checked is None:
                return
            event = checked
        for action in self.pace.apply(event, self.clock()):
            self._performers[type(action)](action)
        self.emit(event)
        if kind in self._reactions:
            self._reactions[kind](event, self.clock())

    def decide(self) -> None:
        """Let the pace decide, once for all events so far, and perform its actions."""
        if self.finish is None:
            now_s = self.clock()
            actions = self.pace.decide(now_s)
            self._wake_s = self.pace.wake_at_s(now_s)
            for action in actions:
                self._performers[type(action)](action)

    def _take_requests(self) -> None:
        while self._requests:
            request = self._requests.popleft()
            self._keep(request)
            if self.finish is None:
                self._take(request)
            else:
                self.emit(request)

    def _keep(self, request: Request) -> None:
        """Keep the last request of each kind for restarts."""
        if isinstance(request, StopRequested):
            self.is_to_stop = True
            return
        if isinstance(request, GatesSet):
            self._await_progress()
        self.persistent_requests = [one for one in self.persistent_requests if type(one) is not type(request)]
        self.persistent_requests.append(request)

    def _tell_faults(self) -> None:
        while self.faults:
            self.notice(self.faults.popleft())

    # ------------------------------------------------------------ checks and reactions

    def _check_broken(self, event: Broken) -> None:
        raise event.error

    def _check_round(self, event: RoundTrained) -> RoundTrained:
        batch = event.batch
        if wrong := self._loss_watch.verdict(event.metrics):
            raise DivergedError(
                f"round {batch.version} diverged: {wrong}. Lower the learning rate; with "
                "run.on_nan=rollback a run goes back to its newest checkpoint by itself"
            )
        self._runtime.release([segment.ticket.number for segment in batch.segments])
        return replace(event, signals=self.meter.measure(event))

    def _check_down(self, event: CollectorDown) -> CollectorDown:
        """End the run when a collector raises before its first segment: a bug that is to be seen at once."""
        row = self.collectors.rows[event.collector]
        if event.raised and not row.has_worked:
            raise CollectError(event.reason)
        return replace(event, restorable=row.start.state is not None)

    def _after_down(self, event: CollectorDown, now_s: float) -> None:
        pause_s = self.collectors.schedule_restart(event.collector, event.reason, now_s)
        if pause_s > 0:
            name, text = self.collectors.rows[event.collector].name, f"started again in {pause_s:g} s"
            self.emit(HealthChanged(name, "waiting", text))
        else:
            self._start_collector(event.collector)

    def _start_collector(self, index: int) -> None:
        if self.finish is None:
            self._collector_starting(index)
            self._runtime.start_collector(index, self.collectors.rows[index].start)

    def _collector_starting(self, index: int) -> None:
        self.collectors.starting(index, self.clock())
        self.emit(HealthChanged(self.collectors.rows[index].name, "starting"))

    def _check_evaluation(self, event: EvalDone) -> EvalDone | None:
        return event if event.version == self._evaluating else None  # else it was given up before it ended

    def _after_evaluation(self, event: EvalDone, now_s: float) -> None:
        self._evaluating = None
        self.waits.end("evaluation")
        if event.metrics is None:
            self.notice(f"the evaluation of version {event.version} failed: {event.error}")
        elif notice := self.saving.score(event):
            self.emit(notice)

    def _after_failed_publish(self, event: PublishFailed, now_s: float) -> None:
        self.waits.end("publish")
        self.notice(f"publishing version {event.version} failed: {event.reason}")

    def _after_snapshot(self, event: SnapshotTaken, now_s: float) -> None:
        result = self.saving.complete(event)
        if not self.saving.is_pending:
            self.waits.end("snapshot")
        if result:
            self.emit(result)

    def _after_learner_down(self, event: LearnerDown, now_s: float) -> None:
        raise LearnerLost(event.reason)

    def _after_stop_request(self, event: StopRequested, now_s: float) -> None:
        if event.within_s is None:
            return
        self.notice(f"{event.reason}: ends after the round at hand; a second signal ends it at once")
        headline = "asked to stop, the run did not end in time and has no last checkpoint"
        row = ("stop", "the end of the run", f"round {self.pace.version}", event.within_s, "the stop request")
        if now_s + event.within_s < self.waits.deadline_s("stop"):
            self.waits.begin(Wait(*row, partial(self._stall, headline)), now_s)

    # ------------------------------------------------------------ actions

    def _issue(self, action: Issue) -> None:
        self.emit(Issued(action.ticket))
        self._runtime.collect(action.ticket)

    def _train(self, action: Train) -> None:
        batch = Batch(action.version, self._store.next(action.tickets), action.off_policy_degree)
        self._await_learner("train", f"round {action.version}", f"training round {action.version}")
        self.emit(TrainStarted(batch))
        self._runtime.train(batch)

    def _await_learner(self, key: str, owner: str, phase: str) -> None:
        limit_s = self.spec.settings.runtime.train_timeout_s
        expire = partial(self._stall, f"a round took more than {limit_s:g} s (train_timeout_s)")
        row = Wait(key, owner, "learner", limit_s, "runtime.train_timeout_s", expire, phase)
        self.waits.begin(row, self.clock())

    def _publish(self, action: Publish) -> None:
        limit_s = self.spec.settings.async_training.sync_timeout
        headline = f"the learner did not publish its weights in {limit_s:g} s (sync_timeout)"
        row = ("publish", "collectors", "learner (weights)", limit_s, "async_training.sync_timeout")
        self.waits.begin(Wait(*row, partial(self._stall, headline, explain=False)), self.clock())
        self._runtime.publish(action.version)

    def _evaluate(self, action: Evaluate) -> None:
        version, limit_s = action.version, self.spec.settings.eval.timeout_s
        self._evaluating = version
        why = f"the evaluation of version {version} took more than {limit_s:g} s (eval.timeout_s)"
        row = ("evaluation", f"evaluation of {version}", "evaluator", limit_s, "eval.timeout_s")
        give_up = partial(self._runtime.give_up_evaluation, version, why)
        self.waits.begin(Wait(*row, give_up, f"evaluating version {version}"), self.clock())
        self._runtime.evaluate(version, derive_seed(self.spec.seed, "evaluate", version))

    def _checkpoint(self, action: Checkpoint) -> None:
        if notice := self.saving.begin(action.version):
            self.emit(notice)
        else:
            self._take_snapshot(action.version)

    def _take_snapshot(self, version: int) -> None:
        self._await_learner("snapshot", f"checkpoint {version}", "saving")
        self._runtime.snapshot()

    def _renew(self, action: Renew) -> None:
        """Start a collector as another incarnation, as the recorded run did."""
        row = self.collectors.rows[action.collector]
        row.start, row.is_up = CollectorState(action.incarnation), False
        self._start_collector(action.collector)

    def _end(self, action: Finish) -> None:
        self.finish = action
        self.meter.finish()
        if not action.failed and self.saving.requested_version != self.pace.version:
            self.saving.begin(self.pace.version, whole=False)
            self._take_snapshot(self.pace.version)

    # ------------------------------------------------------------ waits

    def _round(self) -> str:
        return f"round {self.pace.version}"

    def _timeout_s(self, most_s: float, now_s: float) -> float:
        if self._requests:
            return 0.0
        wake_s = math.inf if self._wake_s is None else self._wake_s
        return min(most_s, max(0.0, min(wake_s, self.waits.next_s()) - now_s))

    def _extend_if_suspended(self, expected_s: float) -> float:
        """Extend every deadline by the time this process was suspended; return the time now."""
        now_s = self.clock()
        if (away_s := now_s - expected_s) > _SUSPENDED_S:
            self.waits.shift(away_s)
        return now_s

    def _await_progress(self) -> None:
        self.waits.begin(self._progress, self.clock())

    def _no_progress(self) -> None:
        """Stall, unless something with a deadline of its own is under way or nothing was asked for."""
        limit_s, now_s = self.spec.settings.async_training.batch_timeout, self.clock()
        is_busy = any(key in self.waits for key in ("train", "snapshot", "evaluation"))
        if is_busy or now_s < self.pace.warm_at_s + limit_s or self.finish is not None or self.pace.is_held:
            self._await_progress()
        else:
            self._stall(f"nothing happened for {limit_s:g} s (batch_timeout)")

    def _stall(self, headline: str, explain: bool = True) -> None:
        """End a run that stands still, with the report of who waits for whom."""
        headline = f"{headline}: {self.pace.waiting_for()}" if explain else headline
        rows, stacks = self.waits.rows(self.clock()), self._runtime.stacks()
        self.emit(Stalled([row.to_record() for row in rows], stacks))
        raise StallError(describe_stall(headline, rows, stacks))
