"""The one loop of a run: wait, apply, emit, decide, perform, check waits.

Training, resuming, replaying and going step by step are ways to call it. It has no clock of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from offbeat.checkpoint import CheckpointManager, fitting
from offbeat.errors import (
    CheckpointError,
    CollectError,
    ConfigError,
    DivergedError,
    LearnerLost,
    StallError,
    TaskError,
)
from offbeat.observe.meter import Meter
from offbeat.observe.system import SystemMonitor
from offbeat.pacing.actions import (
    Action,
    Checkpoint,
    Cut,
    Evaluate,
    Finish,
    Issue,
    Pace,
    Publish,
    Renew,
    Retire,
    Train,
)
from offbeat.pacing.events import (
    Broken,
    CollectorDown,
    CollectorLeft,
    CollectorRemoved,
    CollectorsAdded,
    CollectorWorked,
    DialTurned,
    EvalDone,
    Event,
    Finished,
    GatesSet,
    GoalReached,
    Handlers,
    HealthChanged,
    Issued,
    LearnerDown,
    LearnerStateless,
    Notice,
    OpenWork,
    Published,
    PublishFailed,
    Request,
    Restarting,
    RoundTrained,
    SegmentArrived,
    SegmentDropped,
    SnapshotTaken,
    Stalled,
    Started,
    StopRequested,
    TrainStarted,
)
from offbeat.replay import StreamStore
from offbeat.run.begun import BegunWork
from offbeat.run.collectors import Collectors
from offbeat.run.parts import RunParts, StartPoint
from offbeat.run.saving import Saving
from offbeat.run.waits import STARTING, Wait, Waits, describe_stall
from offbeat.run.writing import Writer
from offbeat.runtime.base import Runtime
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.runtime.supervision import LossWatch
from offbeat.seeding import derive_seed
from offbeat.types import Batch, Metrics, StateTree

_log = logging.getLogger(__name__)
_POLL_S = 0.25
_WRITING_SHARE = 0.04  # of a pause, when the end of the run waits for nothing but the disk
_AT_ONCE_S = 0.5
_UNSAVED = (GatesSet, GoalReached)
"""Requests that no checkpoint knows of: they hold for the whole run, also when it is restarted."""
_AFTER_FINISH = (SnapshotTaken, OpenWork, LearnerDown, Broken)


class Driver:
    """Drives one start of a run: a pace, a runtime, and observers around one loop.

    Two tables are its only books beside the pace's ledger: `Collectors` and `Waits`. ``requests`` are events
    from any thread. The meter is its first observer; others are added with `observe`. ``poll_s`` is the
    longest pause between two looks at requests: more where each of them ends the wait. ``writer`` and
    ``system`` (figures of the machine) are given in simulations.
    """

    def __init__(
        self,
        spec: RunSpec,
        pace: Pace,
        runtime: Runtime,
        clock: Callable[[], float],
        requests: deque[Request],
        *,
        writer: Writer | None = None,
        system: Callable[[float], Metrics] | None = None,
    ) -> None:
        settings, monitor = spec.settings, SystemMonitor()
        self.spec, self.pace, self.clock = spec, pace, clock
        self.waits = Waits()
        self.collectors = Collectors(
            settings,
            self.waits,
            self._start_collector,
            runtime.kill_collector,
            lambda: pace.version,
            settings.runtime.start_timeout_s if runtime.replaces_collectors else math.inf,
            spec.saves,
            working_s=runtime.working_s,
            clock=clock,
        )
        self.meter = Meter(
            spec.num_collectors,
            pace,
            self.collectors.busy_s,
            staleness_threshold=settings.async_training.staleness_threshold,
            pauses_for_eval=not settings.async_training.enable_async_eval,
            dial=settings.async_training.off_policy_degree,
            system=system or (lambda now_s: monitor.read(now_s, lambda: runtime.pids().values())),
        )
        self.begun = BegunWork(self.collectors.rows, spec.saves)
        self._store = StreamStore()
        self._parts = RunParts(pace, self.collectors, self._store, self.meter, self.begun, clock)
        self.saving = Saving(
            writer or Writer(_manager_of(spec), clock, beside=not runtime.takes_turns),
            self.begun,
            self.collectors.rows,
            pace,
            self.waits,
            clock,
            capture=self._parts.capture,
            take_snapshot=self._take_snapshot,
            ask_work=runtime.ask_work,
            tell=self.emit,
        )
        self.poll_s = _POLL_S
        self.faults: deque[str] = deque()  # of files, from any thread
        self._taken: list[tuple[int, Request]] = []  # with the version of the checkpoint before each
        self.resumed_at = -1
        self._restored: set[int] = set()  # tickets that a checkpoint held, until their round was trained
        self._is_on_trial = False  # until a round was trained, and all of those tickets
        self.is_to_stop = False
        self.loss_watch: LossWatch | None = LossWatch(settings.run.explosion_factor)
        self._stop_reason: str | None = None
        self.finish: Finish | None = None
        self._runtime = runtime
        self._requests = requests
        self._handlers: dict[type, list[Callable[[Any, float], None]]] = {}
        self._closing = contextlib.ExitStack()
        self._flushes: list[Callable[[], None]] = []
        self._has_started = False
        self._evaluating: int | None = None
        limit_s, setting = settings.async_training.batch_timeout, "async_training.batch_timeout"
        self._progress = Wait(
            "progress", lambda: f"round {pace.version}", "any event", limit_s, setting, self._no_progress
        )
        self._wake_s = math.inf
        self.started_s = self._left_s = clock()
        self.observe(self.begun.handlers())
        self.observe(self.collectors.handlers())
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
            self._parts.states.append(state)

    def emit(self, event: Event) -> None:
        """Pass a fact to the tables and all observers: each fact passes here once."""
        now_s = self.clock()
        for handle in self._handlers.get(type(event), ()):
            handle(event, now_s)

    def notice(self, text: str, *, is_warning: bool = False) -> None:
        """Emit a notice for the user."""
        self.emit(Notice(text, is_warning))

    # ------------------------------------------------------------ start and end

    @property
    def finished(self) -> bool:
        """True when the pace has finished and the last checkpoint, or the last snapshot, is there."""
        return self.finish is not None and not self.saving.is_pending

    @property
    def reason(self) -> str:
        """The reason for which the run finished; with what went wrong when it could save nothing."""
        assert self.finish is not None, "the run has not finished"
        loss = self.saving.writer.loss
        return f"{self.finish.reason}, but nothing could be saved: {loss}" if loss else self.finish.reason

    @property
    def is_stopped(self) -> bool:
        """True when the run finished because it was asked to stop."""
        return self.finish is not None and self.finish.reason == self._stop_reason

    @property
    def seconds(self) -> float:
        """Time since this start of the run."""
        return self.clock() - self.started_s

    def phase(self) -> str:
        """Return the phase of the run for the display, with the progress of what it waits for."""
        progress = self._runtime.progress
        if phase := self.waits.phase(progress):
            return phase
        reports = (text for name, text in progress.items() if text and name.startswith("collector_"))
        warm_up = self.pace.warm_up()
        phase = "collecting" if warm_up is None else "warm-up: {} of {} segments".format(*warm_up)
        return ": ".join([phase, *sorted(set(reports))])

    def start_phase(self) -> str:
        """Return the phase until the roles have started, from any thread."""
        report = self._runtime.progress.get("learner", "")
        return f"{STARTING}: {report}" if report else STARTING

    def start(self, point: StartPoint) -> None:
        """Start the roles, restore them when resuming, and perform the first actions."""
        if point.parts:
            with fitting(f"this run at version {point.version}"):
                self._parts.restore(point)
            self.resumed_at, self._is_on_trial = point.version, True
            self._restored.update(self._store.ready())
        try:
            self._runtime.start(self.spec, self.collectors.starts, point.parts.get("learner"))
        except BaseException:
            with contextlib.suppress(Exception):  # the error of the start is the one to see
                self._emit_start(point)
            raise
        self._emit_start(point)  # after the processes were started, which takes time
        for index in self.collectors.starts:
            self._collector_starting(index)
        if point.parts and any(start.state is None for start in self.collectors.starts.values()):
            text = "collectors without a saved state start anew: their running episodes restart"
            self.notice(text, is_warning=True)
        self._await_progress()
        self._perform(self.pace.start(self.clock()))
        self._left_s = self.clock()

    def is_on_trial(self, error: Exception) -> bool:
        """Return True if an error may come from the checkpoint, of which not everything has worked yet.

        The learner's part has worked after a round, a segment once it was trained, a collector's state once
        the collector has made a segment.
        """
        if isinstance(error, CollectError):
            rows = self.collectors.rows
            return any(row.start.state is not None and not row.has_worked for row in rows)
        return self._is_on_trial

    def _emit_start(self, point: StartPoint) -> None:
        self._has_started = True
        self.emit(Started(point.version, point.resumed))
        for text in point.warnings:
            self.notice(text, is_warning=point.resumed)

    def close(self, error: BaseException | None, restarting: Restarting | None = None) -> None:
        """End everything that was started, and emit how the run ended or that it is restarted."""
        try:
            with self._closing:
                self._close_runtime(error, restarting)
        finally:
            while self.faults:  # of the last writes, when no observer is left to tell
                _log.warning("%s", self.faults.popleft())

    def _close_runtime(self, error: BaseException | None, restarting: Restarting | None) -> None:
        if isinstance(error, KeyboardInterrupt) and self._has_started:
            self._emit_end(error, restarting)  # first: nobody waits long for the rest
            self._has_started = False
            self._runtime.close(at_once=True)
            self.saving.writer.settle(_AT_ONCE_S)
            return
        try:
            self._runtime.close()
        finally:
            if self._has_started:
                self.settle()
                self._emit_end(error, restarting)

    def settle(self) -> None:
        """Wait until the newest checkpoint is on the disk: the run ends, or goes back to it."""
        self.saving.settle(self.spec.settings.runtime.train_timeout_s)

    def _emit_end(self, error: BaseException | None, restarting: Restarting | None) -> None:
        try:
            self._emit_faults()
        finally:
            if restarting is not None:
                self.emit(replace(restarting, error=error))
            else:
                self.emit(self._finished(error))

    def _finished(self, error: BaseException | None) -> Finished:
        version = self.pace.version
        if isinstance(error, KeyboardInterrupt):
            return Finished(version, "stopped at once, as asked", stopped=True)
        if self.finish is None:
            return Finished(version, str(error), error)
        if error is None and self.saving.writer.loss:
            error = CheckpointError(self.reason)
        return Finished(version, self.reason, error, self.is_stopped)

    # ------------------------------------------------------------ the loop

    def step(self, at_most_s: float = _POLL_S) -> None:
        """Wait for events, apply and emit each, decide once, perform, and check the waits."""
        polled_s = self._extend_if_suspended(self._left_s)
        poll_s = self.poll_s * (_WRITING_SHARE if "write" in self.waits else 1.0)
        until_s = min(polled_s + min(at_most_s, poll_s), self._wake_s, self.waits.next_s())
        timeout_s = 0.0 if self._requests else max(0.0, until_s - polled_s)
        events = self._runtime.wait(timeout_s)
        self._left_s = self._extend_if_suspended(polled_s + timeout_s)  # what this step takes counts, too
        for event in events:
            if self.finish is None or isinstance(event, _AFTER_FINISH):
                self._take(event)
            elif isinstance(event, Published | PublishFailed):
                self.waits.end(("publish", event.version))
            elif isinstance(event, CollectorDown):
                self.saving.collector_lost(event.collector)
        if any(map(_is_progress, events)):
            self._await_progress()
        while self._requests:
            self._take_request(self._requests.popleft())
        if self.finish is None:
            now_s = self.clock()
            actions = self.pace.decide(now_s)
            wake_s = self.pace.wake_at_s(now_s)
            self._wake_s = math.inf if wake_s is None else wake_s
            self._perform(actions)
        self.saving.poll()
        if self.finish is not None:
            self._await_writer()
        if not self.finished:
            for wait in self.waits.expired(polled_s):
                wait.expire()
        for flush in self._flushes:
            flush()
        self._emit_faults()
        if self._is_on_trial:
            self._is_on_trial = bool(self._restored) or self.pace.version <= self.resumed_at

    def _take(self, event: Event) -> None:
        """Check an event, apply it, emit it, and react to it."""
        match event:
            case SegmentArrived(segment) if not segment.drop:
                self._store.add(segment)
            case RoundTrained():
                event = self._check_round(event)
            case CollectorDown(collector, reason):
                row = self.collectors.rows[collector]
                if event.is_final:
                    raise TaskError(reason)
                if event.raised and not row.has_worked:
                    raise CollectError(reason)  # a bug: it is to be seen at once
                event = event._replace(restorable=row.is_restorable)
            case EvalDone(version) if version != self._evaluating:
                return  # it was given up before it ended
            case Broken(error):
                raise error
        if actions := self.pace.apply(event, self.clock()):
            self._perform(actions)
        self.emit(event)
        if not isinstance(event, SegmentArrived):
            self._react(event, self.clock())
        elif event.segment.drop:
            number = event.segment.ticket.number
            self._runtime.release([number])
            self._take(SegmentDropped(number, event.segment.drop))

    def _take_request(self, request: Request) -> None:
        """Take a request, and keep it for restarts from checkpoints that do not know of it.

        Once the run has finished, no collector joins or leaves and no dial is turned.
        """
        if self.finish is not None and isinstance(request, DialTurned | CollectorsAdded | CollectorRemoved):
            return
        if isinstance(request, StopRequested):
            self.is_to_stop, self._stop_reason = True, self._stop_reason or request.reason
        else:
            if isinstance(request, CollectorsAdded | CollectorRemoved):
                if (allowed := self._allowed(request)) is None:
                    return
                request = allowed
            elif isinstance(request, _UNSAVED):  # only the last one of its kind holds
                self._taken = [one for one in self._taken if type(one[1]) is not type(request)]
            self._taken.append((max(self.saving.requested, self.resumed_at), request))
            if isinstance(request, GatesSet):
                self._await_progress()
        if self.finish is None:
            self._take(request)
        else:
            self.emit(request)
            self._react(request, self.clock())

    def _allowed(
        self, request: CollectorsAdded | CollectorRemoved
    ) -> CollectorsAdded | CollectorRemoved | None:
        """Return the request with the collector that it means; None with a notice if it is refused."""
        leaving = None
        if isinstance(request, CollectorRemoved):
            leaving = request.collector
            leaving = max(self.pace.present) if leaving is None else leaving
            request = CollectorRemoved(leaving)
        try:
            self.pace.check_members(leaving)
        except ConfigError as error:
            self.notice(str(error), is_warning=True)
            return None
        return request

    def requests_since(self, version: int) -> list[Request]:
        """Return the requests that a start from the checkpoint of a version does not know of, in order."""
        return [
            request for saved, request in self._taken if saved >= version or isinstance(request, _UNSAVED)
        ]

    def _emit_faults(self) -> None:
        while self.faults:
            self.notice(self.faults.popleft(), is_warning=True)

    # ------------------------------------------------------------ checks and reactions

    def _check_round(self, event: RoundTrained) -> RoundTrained:
        batch = event.batch
        if self.loss_watch is not None and (wrong := self.loss_watch.verdict(event.metrics)):
            raise DivergedError(
                f"round {batch.version} diverged: {wrong}. Lower the learning rate; with "
                "run.on_nan=rollback a run goes back to its newest checkpoint by itself"
            )
        self._runtime.release([segment.ticket.number for segment in batch.segments])
        if self._restored:
            self._restored.intersection_update(self._store.ready())
        return replace(event, signals=self.meter.measure(event))

    def _react(self, event: Event, now_s: float) -> None:
        match event:
            case RoundTrained():
                self.waits.end("train")
            case Published(version):
                self.waits.end(("publish", version))
            case PublishFailed(version, reason):
                self.waits.end(("publish", version))
                self.notice(f"publishing version {version} failed: {reason}", is_warning=True)
            case EvalDone(version):
                self._evaluating = None
                self.waits.end("evaluation")
                if event.metrics is None:
                    text = f"the evaluation of version {version} failed: {event.error}"
                    self.notice(text, is_warning=True)
                for one in self.saving.writer.score(event):
                    self.emit(one)
            case LearnerStateless():
                self.saving.give_up()
            case SnapshotTaken():
                self.saving.snapshot_taken(event)
            case OpenWork():
                self.saving.answered(event)
            case CollectorsAdded(count):
                for index in self.collectors.extend(len(self.collectors.rows) + count):
                    self._start_collector(index)
            case CollectorLeft(collector):
                self.saving.collector_lost(collector)
                name = self.collectors.rows[collector].name
                self.emit(HealthChanged(name, "stopped", "it left the run"))
            case CollectorDown(collector) if self.collectors.rows[collector].is_leaving:
                self.saving.collector_lost(collector)  # it holds nothing any more: the pace retires it
            case CollectorDown(collector, reason):
                self.saving.collector_lost(collector)
                pause_s = self.collectors.schedule_restart(collector, reason, now_s)
                if pause_s > 0:
                    name, text = self.collectors.rows[collector].name, f"started again in {pause_s:g} s"
                    self.emit(HealthChanged(name, "waiting", text))
                else:
                    self._start_collector(collector)
            case LearnerDown(reason):
                raise LearnerLost(reason)
            case StopRequested(reason, within_s) if within_s is not None:
                self.notice(f"{reason}: ends after the round at hand; a second signal ends it at once")
                headline = "asked to stop, the run did not end in time and has no last checkpoint"
                row = ("stop", "the end of the run", f"round {self.pace.version}", within_s)
                if now_s + within_s < self.waits.deadline_s("stop"):
                    expire = partial(self._stall, headline)
                    self.waits.begin(Wait(*row, "run.stop_timeout_s", expire), now_s)

    def _start_collector(self, index: int) -> None:
        if self.finish is None:
            self._collector_starting(index)
            self._runtime.start_collector(index, self.collectors.rows[index].start)

    def _collector_starting(self, index: int) -> None:
        self.collectors.starting(index, self.clock())
        self.emit(HealthChanged(self.collectors.rows[index].name, "starting"))

    # ------------------------------------------------------------ actions

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Issue(ticket, script):
                    begun = self.begun.of(ticket.number) if self.begun.trees else None
                    self.emit(Issued(ticket, None if begun is None else begun.newest is None))
                    self._runtime.collect(ticket, begun, script)
                case Cut(tickets):
                    self._runtime.cut(tickets)
                case Retire(collector):
                    self._runtime.end_collector(collector)
                    self._take(CollectorLeft(collector))
                case Train(version, tickets, degree):
                    batch = Batch(version, self._store.next(tickets), degree)
                    self._await_learner("train", f"round {version}", f"training round {version}")
                    self.emit(TrainStarted(batch))
                    self._runtime.train(batch)
                case Publish(version):
                    self._publish(version)
                case Evaluate(version):
                    self._evaluate(version)
                case Checkpoint(version):
                    self.meter.pause(self.saving.writer.await_soon())
                    self.saving.begin(version)
                case Renew(collector, incarnation):
                    self.collectors.extend(collector + 1)
                    row = self.collectors.rows[collector]
                    row.start, row.is_used, row.is_up = CollectorState(incarnation), False, False
                    self._start_collector(collector)
                case Finish():
                    self._end(action)

    def _await_learner(self, key: str, owner: str, phase: str) -> None:
        limit_s = self.spec.settings.runtime.train_timeout_s
        expire = partial(self._stall, f"a round took more than {limit_s:g} s (train_timeout_s)")
        row = Wait(key, owner, "learner", limit_s, "runtime.train_timeout_s", expire, phase)
        self.waits.begin(row, self.clock())

    def _publish(self, version: int) -> None:
        limit_s = self.spec.settings.async_training.sync_timeout
        headline = f"the learner did not publish its weights in {limit_s:g} s (sync_timeout)"
        row = (
            ("publish", version),
            "collectors",
            "learner (weights)",
            limit_s,
            "async_training.sync_timeout",
        )
        expire = partial(self._stall, headline, explain=False)
        phase = STARTING if self.pace.published < 0 else ""
        self.waits.begin(Wait(*row, expire, phase), self.clock())
        self._runtime.publish(version)

    def _evaluate(self, version: int) -> None:
        limit_s = self.spec.settings.eval.timeout_s
        self._evaluating = version
        why = f"the evaluation of version {version} took more than {limit_s:g} s (eval.timeout_s)"
        row = ("evaluation", f"evaluation of {version}", "evaluator", limit_s, "eval.timeout_s")
        give_up = partial(self._runtime.give_up_evaluation, version, why)
        self.waits.begin(Wait(*row, give_up, f"evaluating version {version}"), self.clock())
        self._runtime.evaluate(version, derive_seed(self.spec.seed, "evaluate", version))

    def _take_snapshot(self, version: int) -> None:
        self._await_learner("snapshot", f"checkpoint {version}", "saving")
        self._runtime.snapshot()

    def _await_writer(self) -> None:
        """Limit the time that the end of the run waits for the disk; nothing else does."""
        if not self.saving.writer.is_busy:
            self.waits.end("write")
        elif "write" not in self.waits:
            limit_s = self.spec.settings.runtime.train_timeout_s
            headline = f"the last checkpoint was not written in {limit_s:g} s (train_timeout_s)"
            row = ("write", "the end of the run", "the disk", limit_s, "runtime.train_timeout_s")
            expire = partial(self._stall, headline, explain=False)
            self.waits.begin(Wait(*row, expire, "saving"), self.clock())

    def _end(self, action: Finish) -> None:
        self.finish = action
        self.meter.finish()
        if not action.failed:
            self.saving.finish()

    # ------------------------------------------------------------ waits

    def _extend_if_suspended(self, expected_s: float) -> float:
        """Extend every deadline by the time this process was suspended; return the time now."""
        now_s = self.clock()
        self.waits.extend_if_suspended(expected_s, now_s)
        return now_s

    def _await_progress(self) -> None:
        self.waits.begin(self._progress, self.clock())

    def _no_progress(self) -> None:
        """Stall, unless something with a deadline of its own is under way or nothing was asked for."""
        limit_s, now_s = self.spec.settings.async_training.batch_timeout, self.clock()
        is_busy = any(key in self.waits for key in ("train", "snapshot", "work", "evaluation"))
        warm_limit_s = self.pace.warm_at_s + limit_s - now_s
        if is_busy or self.finish is not None or self.pace.is_paused:
            self._await_progress()
        elif warm_limit_s > 0:  # to warm up is to wait for time
            self.waits.begin(self._progress._replace(limit_s=warm_limit_s), now_s)
        else:
            self._stall(f"nothing happened for {limit_s:g} s (batch_timeout)")

    def _stall(self, headline: str, explain: bool = True) -> None:
        """End a run that stands still, with the report of who waits for whom."""
        headline = f"{headline}: {self.pace.waiting_for()}" if explain else headline
        rows, stacks = self.waits.rows(self.clock()), self._runtime.stacks()
        self.emit(Stalled([row.to_record() for row in rows], stacks))
        raise StallError(describe_stall(headline, rows, stacks))


def _manager_of(spec: RunSpec) -> CheckpointManager | None:
    """Return what keeps the checkpoints of a run; None: nothing is saved."""
    if spec.directory is None:
        return None
    config = spec.settings.checkpoint
    return CheckpointManager(spec.directory / "checkpoints", config.keep, config.keep_best)


def _is_progress(event: Event) -> bool:
    """Return False for a report of a collector that has only waited, for tools or environments of its own."""
    return not isinstance(event, CollectorWorked) or event.busy_s > 0.0 or any(event.units.values())
