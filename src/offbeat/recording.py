"""The books of a run: everything it writes (metrics, journals, checkpoints) goes through here."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np

from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint, digest, pack
from offbeat.config.models import AsyncTrainingConfig, CheckpointConfig, ObserveConfig
from offbeat.errors import CheckpointError, OffbeatError
from offbeat.observe.callbacks import (
    Callback,
    CallbackList,
    CheckpointInfo,
    EvalInfo,
    FinishInfo,
    MetricValue,
    RoundInfo,
    RunControl,
    RunInfo,
    RunSummary,
    WorkerLostInfo,
)
from offbeat.observe.console import make_console
from offbeat.observe.events import EventLog, ScheduleLog
from offbeat.observe.logs import close_log, debug_ticket, open_log
from offbeat.observe.meter import PaceMeter, PaceView
from offbeat.observe.sinks import SinkList, make_sinks
from offbeat.observe.stats import StatsLog
from offbeat.observe.system import SystemMonitor
from offbeat.pacing import Coordinator
from offbeat.pacing.actions import Finish
from offbeat.pacing.events import DialTurned, Event, Signals, StopRequested
from offbeat.replaying import Arrival, Round
from offbeat.runtime.base import EvalEnded, Health, RoundDone
from offbeat.runtime.supervision import Wait
from offbeat.types import Array, Batch, Metrics, Segment, StateTree, Ticket

_log = logging.getLogger(__name__)


def learner_digest(state: StateTree) -> str:
    """A sha256 over everything a learner is: parameters, optimizer, statistics."""
    return digest(pack(state)[1])


@dataclass(frozen=True, slots=True)
class Restart:
    """A run goes on by itself from a checkpoint: after the learner crashed, or because it diverged.

    Example: ``Restart("restart", version=40, reason="killed by SIGKILL", attempt=1, limit=3)``.
    """

    kind: Literal["restart", "rollback"]
    version: int
    reason: str
    attempt: int
    limit: int

    def __str__(self) -> str:
        """In a line for people."""
        what = "the run goes on" if self.kind == "restart" else "the run goes back and collects other samples"
        reason = self.reason.splitlines()[0] if self.reason else "unknown"
        return f"{reason}: {what} from version {self.version} ({self.kind} {self.attempt} of {self.limit})"


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """What to write and where. ``directory`` None: nothing, but metrics and callbacks work all the same.

    ``notices`` are told when a run starts.
    """

    summary: RunSummary
    observe: ObserveConfig
    checkpoint: CheckpointConfig
    dial: AsyncTrainingConfig
    callbacks: tuple[Callback, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def directory(self) -> Path | None:
        """The run directory."""
        return self.summary.directory


class _Files:
    """The open files of a run directory."""

    def __init__(
        self,
        directory: Path,
        options: RecordingOptions,
        resumed_from: int | None,
        on_fault: Callable[[str], None],
    ) -> None:
        self.events = EventLog(directory / "events.jsonl", on_fault=on_fault)
        self.schedule = ScheduleLog(directory / "schedule.jsonl", on_fault)
        self.log = open_log(directory / "logs", "run", on_fault=on_fault)
        self.learner_log = open_log(directory / "logs", "learner", on_fault=on_fault)
        self.stats = StatsLog(self.log, options.observe.stats_interval_s)
        self.sinks: SinkList = make_sinks(
            directory,
            tensorboard=options.observe.tensorboard.enabled,
            use_wandb=options.observe.use_wandb,
            wandb_project=options.observe.wandb_project,
            name=options.summary.name,
            resumed_from=resumed_from,
            on_fault=on_fault,
        )
        keep = options.checkpoint
        self.checkpoints = CheckpointManager(directory / "checkpoints", keep.keep, keep.keep_best)

    def close(self) -> None:
        self.events.close()
        self.schedule.close()
        self.sinks.close()
        close_log(self.log)
        close_log(self.learner_log)


class Recorder:
    """Told of everything that happens in a run, in the run's main thread."""

    def __init__(self, options: RecordingOptions, coordinator: Coordinator) -> None:
        self._options = options
        self._coordinator = coordinator
        observe = options.observe
        console = make_console(observe.console, options.summary, observe.log_interval_s)
        self._callbacks = CallbackList((*options.callbacks, console))
        self._meter = PaceMeter(options.summary.num_workers, options.dial.staleness_threshold)
        self._system = SystemMonitor()
        self._files: _Files | None = None
        self._faults: deque[str] = deque()  # of files, from any thread: told by the main thread when it can
        self._begun_s = perf_counter()
        self._scores: dict[int, float] = {}
        self._eval_skipped = 0
        self._health: dict[str, Health] = {}
        self._has_begun = False
        self._finish: Finish | None = None
        self._saves_nothing = False
        self._issued_at_s: dict[int, float] = {}
        self._first_ticket_s: float | None = None
        self._last_round_s: float | None = None
        self._steps_before = 0
        self.max_staleness = 0
        self.last_metrics: dict[str, MetricValue] = {}
        self.last_eval: Metrics = {}

    # ------------------------------------------------------------ beginning and end

    def begin(self, saved: LoadedCheckpoint | None, resumed: bool, control: RunControl) -> None:
        """Open the files; go back to where the checkpoint was taken."""
        self._has_begun = True
        version = saved.version if saved is not None else 0
        if saved is not None:
            self._meter.load_state_dict(saved.parts["meter"])
            self._steps_before = self._meter.env_steps
            self.max_staleness = saved.parts["recorder"]["max_staleness"]
            self._eval_skipped = self._coordinator.eval_skipped
        if self._options.directory is not None:
            self._files = self._open(self._options.directory, saved, resumed)
        self._event("resume" if resumed else "start", {"version": version})
        self._callbacks.on_start(RunInfo(self._options.summary, control, version if resumed else None))
        for text in saved.warnings if saved is not None else self._options.notices:
            self.notice(text)
        if resumed and saved is None:
            self.notice("the run has no checkpoint yet: it starts again from round 0")

    def _open(self, directory: Path, saved: LoadedCheckpoint | None, resumed: bool) -> _Files:
        own = saved.parts["recorder"] if saved is not None else {}
        version = saved.version if saved is not None else 0
        try:
            files = _Files(directory, self._options, version if resumed else None, self._faults.append)
            if resumed:
                files.schedule.truncate(own.get("schedule_offset", 0), own.get("schedule_gap", False))
        except OSError as error:
            raise OffbeatError(
                f"the run directory {directory} cannot be written: {error}. "
                "Free disk space, make it writable or choose another run.dir"
            ) from error
        return files

    def finished(self, finish: Finish) -> None:
        """The coordinator said that the run is over."""
        self._finish = finish
        if self.last_metrics:
            self.last_metrics = {**self.last_metrics, **self._nothing_left()}

    def close(self, error: BaseException | None, going_on: Restart | None = None) -> None:
        """Say how it ended and close the files, however it ended; ``going_on``: it is begun again."""
        reason = self._finish.reason if self._finish is not None else str(error)
        reason = reason if going_on is None else going_on.reason
        version, seconds = self._coordinator.version, perf_counter() - self._begun_s
        if not self._has_begun:
            return  # nobody was told of a beginning
        try:
            self._tell_faults()
            for component, state in list(self._health.items()):
                if state != "down":
                    self.health(component, "stopped")
            if going_on is None:
                self._event("finish", {"version": version, "reason": reason, "failed": error is not None})
            else:
                self._restarting(going_on)
            info = FinishInfo(
                version,
                reason.splitlines()[0] if reason else "",
                seconds,
                self.last_metrics,
                error,
                None if going_on is None else str(going_on),
            )
            self._callbacks.on_finish(info)
        finally:
            if self._files is not None:
                if self.last_metrics:
                    self._files.stats.write_if_due(self.last_metrics, float("inf"))
                if error is not None:
                    self._files.log.error("%s", error)
                self._files.close()
                self._files = None
            while self._faults:  # of the last lines: the console is closed by now
                _log.warning(self._faults.popleft())

    def _restarting(self, restart: Restart) -> None:
        fields = {"version": restart.version, "reason": restart.reason, "attempt": restart.attempt}
        self._event(restart.kind, fields)
        self._log(logging.WARNING, str(restart))

    def health(self, component: str, state: Health, detail: str = "") -> None:
        """A part of the run is in this state now; only changes are written."""
        if self._health.get(component) == state:
            return
        self._health[component] = state
        fields = {"component": component, "state": state, **({"detail": detail} if detail else {})}
        self._event("health", fields)
        self._log(logging.INFO, f"{component} is {state}" + (f": {detail}" if detail else ""))

    def stalled(self, waits: Sequence[Wait], stacks: Mapping[str, str]) -> None:
        """The run stands still and ends."""
        self._event("stall", {"waits": [wait.to_record() for wait in waits], "stacks": dict(stacks)})

    def notice(self, text: str) -> None:
        """Tell the user something that is worth a line."""
        self._event("notice", {"text": text})
        self._log(logging.WARNING, text)
        self._callbacks.on_notice(text)

    def _tell_faults(self) -> None:
        while self._faults:
            self.notice(self._faults.popleft())

    def _event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._files is not None:
            self._files.events.append(kind, fields)

    def _log(self, level: int, text: str) -> None:
        if self._files is not None:
            self._files.log.log(level, "%s", text)

    # ------------------------------------------------------------ collecting

    def issued(self, ticket: Ticket) -> None:
        """A ticket goes to its collector."""
        now_s = perf_counter()
        self._first_ticket_s = self._first_ticket_s or now_s
        self._meter.issued(ticket, now_s)
        if self._options.dial.enable_async_debug_log:
            self._issued_at_s[ticket.number] = now_s
            self._ticket("issued", ticket, None)

    def segment(self, segment: Segment, num_bytes: int, incarnation: int, rollbacks: int) -> None:
        """A segment arrived, from a collector of this incarnation."""
        self._meter.arrived(segment, num_bytes, perf_counter())
        ticket = segment.ticket
        if self._files is not None:
            made = (ticket.number, ticket.collector, ticket.version, ticket.deadline)
            self._files.schedule.append(Arrival(*made, incarnation, rollbacks).to_record())
        if self._options.dial.enable_async_debug_log:
            issued_at_s = self._issued_at_s.get(ticket.number, perf_counter())
            self._ticket("arrived", ticket, perf_counter() - issued_at_s)

    def worker_lost(self, lane: int, reason: str, restarts: int, restored: bool) -> None:
        """A collector died or was killed."""
        self._meter.worker_lost(lane, perf_counter())
        self._event("worker_lost", {"lane": lane, "reason": reason, "restored": restored})
        self._log(logging.WARNING, f"collector {lane} lost: {reason}")
        if not restored:
            self._log(logging.WARNING, f"collector {lane} has no saved state: its running episodes restart")
        self._callbacks.on_worker_lost(WorkerLostInfo(lane, reason, restarts))

    def _ticket(self, happening: Any, ticket: Ticket, seconds: float | None) -> None:
        if self._files is not None:
            debug_ticket(self._files.log, happening, ticket, self._coordinator.version, seconds)

    # ------------------------------------------------------------ training

    def train_started(self, batch: Batch) -> None:
        """A round is handed to the learner."""
        self._meter.train_started(batch, perf_counter())

    def generation_error(self) -> None:
        """A collector raised."""
        self._meter.generation_error()

    def trained(self, batch: Batch, done: RoundDone) -> None:
        """A round was trained."""
        oldest = int(done.metrics.get("pace/max_sample_age", 0))
        self.max_staleness = max(self.max_staleness, oldest, *batch.staleness(), 0)
        self._meter.train_ended(done.ended_s, done.metrics)
        self._last_round_s = done.ended_s
        tickets = tuple(segment.ticket.number for segment in batch.segments)
        if self._files is None:
            return
        self._files.schedule.append(Round(batch.version, tickets, batch.off_policy_degree).to_record())
        seconds = done.ended_s - done.started_s
        self._files.learner_log.info("round %d trained in %.4f s %s", batch.version, seconds, done.metrics)
        if self._options.dial.enable_async_debug_log:
            for segment in batch.segments:
                issued_at_s = self._issued_at_s.pop(segment.ticket.number, done.ended_s)
                self._ticket("trained", segment.ticket, done.ended_s - issued_at_s)

    @property
    def env_steps(self) -> int:
        """Environment steps since the run's first round."""
        return self._meter.env_steps

    @property
    def steps_per_s(self) -> float:
        """Environment steps per second of this start of the run, from its first ticket to its last round."""
        if self._first_ticket_s is None or self._last_round_s is None:
            return 0.0
        return (self.env_steps - self._steps_before) / (self._last_round_s - self._first_ticket_s)

    def signals(self) -> Signals:
        """What the last round measured, for the tuner."""
        return self._meter.signals()

    def round(self, pids: Mapping[str, int]) -> None:
        """Write the metrics of the round that was trained."""
        now_s, version = perf_counter(), self._coordinator.version
        self._count_skipped()
        system = self._system.read(now_s, tuple(pids.values()))
        metrics = self._meter.round_metrics(now_s, self._view(), system) | self._nothing_left()
        metrics.update(self._callbacks.on_round(RoundInfo(version, metrics)))
        self.last_metrics = metrics
        if self._files is not None:
            counts = asdict(self._coordinator.counts())
            self._event("round", {"version": version, "metrics": metrics, "counts": counts})
            self._files.sinks.write(version, metrics)
            self._files.stats.write_if_due(metrics, now_s)
        self._tell_faults()

    def _nothing_left(self) -> dict[str, MetricValue]:
        """What is true of a run that is over, also of one that ended before its last round."""
        return {} if self._finish is None else {"time/eta_s": 0.0}

    def _view(self) -> PaceView:
        coordinator, counts = self._coordinator, self._coordinator.counts()
        return PaceView(
            off_policy_degree=coordinator.degree,
            version=coordinator.version,
            published_version=coordinator.published,
            running=counts.running,
            ready=counts.ready,
            trained=counts.trained,
            dropped=counts.dropped,
            lost=counts.lost,
            issued=counts.issued,
            segments_per_round=coordinator.config.segments_per_round,
            rounds=coordinator.config.rounds,
            lag=coordinator.lag(),
            workers_alive=coordinator.num_up,
        )

    def requested(self, event: Event) -> None:
        """Somebody turned the dial or asked the run to stop."""
        if isinstance(event, DialTurned):
            self._event("dial", {"off_policy_degree": event.off_policy_degree})
            self._log(logging.INFO, f"off_policy_degree turned to {event.off_policy_degree}")
        elif isinstance(event, StopRequested) and event.within_s is not None:
            self.notice(f"{event.reason}: ends after the round at hand; a second signal ends it at once")

    # ------------------------------------------------------------ weights, evaluation

    def published(self, version: int, seconds: float) -> None:
        """Collectors can get a version."""
        self._meter.published(version, seconds, perf_counter())

    def publish_failed(self, version: int, reason: str) -> None:
        """Publishing failed and is tried again."""
        self._meter.publish_failed()
        self.notice(f"publishing version {version} failed: {reason}")

    def evaluated(self, ended: EvalEnded) -> None:
        """An evaluation ended; its result belongs to the version it judged."""
        if ended.metrics is None:
            self.notice(f"the evaluation of version {ended.version} failed: {ended.error}")
            return
        self._count_skipped()
        metrics = self._meter.evaluated(ended.version, ended.metrics, ended.seconds)
        if not self._options.dial.enable_async_eval:
            self._meter.paused(ended.seconds)
        self.last_eval = metrics
        self._event("eval", {"version": ended.version, "metrics": metrics})
        if self._files is not None:
            self._files.sinks.write(ended.version, metrics)
        self._score(ended.version, metrics.get("eval/return_mean"))
        self._callbacks.on_eval(EvalInfo(ended.version, metrics))

    def _count_skipped(self) -> None:
        skipped = self._coordinator.eval_skipped
        if skipped > self._eval_skipped:
            self._meter.eval_skipped(skipped - self._eval_skipped)
            self._eval_skipped = skipped

    def _score(self, version: int, score: float | None) -> None:
        if score is None or self._files is None:
            return
        self._scores[version] = score
        try:
            if version in self._files.checkpoints.versions():
                self._files.checkpoints.set_score(version, score)
        except CheckpointError as error:
            self.notice(f"the score of version {version} was not saved: {error}")

    # ------------------------------------------------------------ checkpoints

    def checkpoint(self, version: int, parts: Mapping[str, StateTree], weights: Any) -> None:
        """Save the run. When that fails training goes on, and the older checkpoints are intact."""
        if self._files is None:
            return
        if parts["learner"] is None:
            self._say_once_that_nothing_is_saved()
            return
        started_s = perf_counter()
        try:
            score = self._scores.get(version)
            path = self._files.checkpoints.save(version, parts, _as_arrays(weights), score)
        except CheckpointError as error:
            self.notice(f"checkpoint of version {version} failed: {error}")
            return
        seconds = perf_counter() - started_s
        self._meter.paused(seconds)
        self._event("checkpoint", {"version": version, "path": path.name, "seconds": seconds})
        self._callbacks.on_checkpoint(CheckpointInfo(version, path, seconds, score))

    def state_dict(self) -> dict[str, StateTree]:
        """The recorder's parts of a checkpoint, as of now."""
        own: dict[str, StateTree] = {"max_staleness": self.max_staleness}
        if self._files is not None:
            schedule = self._files.schedule
            own |= {"schedule_offset": schedule.offset(), "schedule_gap": schedule.gap}
        return {"meter": self._meter.state_dict(), "recorder": own}

    def _say_once_that_nothing_is_saved(self) -> None:
        if not self._saves_nothing:
            self._saves_nothing = True
            self.notice("no checkpoints: the learner has no state_dict() that could be saved")


def _as_arrays(weights: Any) -> dict[str, Array]:
    if isinstance(weights, Mapping) and all(isinstance(value, np.ndarray) for value in weights.values()):
        return dict(weights)
    return {}
