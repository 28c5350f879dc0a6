"""The files of a run as an observer: ``events.jsonl``, ``logs/`` and sinks such as TensorBoard."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from offbeat.config.settings import Settings
from offbeat.observe.events import EventLog
from offbeat.observe.logs import close_log, debug_ticket, open_log
from offbeat.observe.meter import Meter
from offbeat.observe.sinks import make_sinks
from offbeat.observe.text import fill
from offbeat.pacing.actions import Pace
from offbeat.pacing.config import AUTO
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    DialTurned,
    EvalDone,
    Event,
    Finished,
    Handlers,
    Health,
    HealthChanged,
    Issued,
    LearnerDown,
    Notice,
    Published,
    Restarting,
    RoundTrained,
    Saved,
    SaveFailed,
    SaveSkipped,
    SegmentArrived,
    Stalled,
    Started,
    TrainStarted,
)
from offbeat.types import Ticket

_BLOCK = """\
Component Statistics
  learner     {learn/global_steps:k} steps, {learn/processed_samples:k} samples ({learn/samples_per_s:k}/s), \
train {time/train_s:3} s, wait {time/wait_s:3} s, idle {pace/train_idle_ratio:%}
  collectors  {rollout/total_generated_samples:k} samples ({rollout/steps_per_s:k}/s), \
collect {time/collect_s:3} s, idle {pace/collect_idle_ratio:%}, {system/workers_alive:0} alive, \
{system/worker_restarts:0} restarts, {rollout/generation_errors:0} errors
  queue       {queue/size:0} waiting ({queue/bytes:B}), {queue/total_produced:k} in, \
{queue/total_consumed:k} out, {pace/dropped_samples:k} samples dropped
  weights     version {weights/current_param_version:0}, published {weights/published_version:0} \
(lag {weights/publish_lag:0}), {weights/param_sync_count:0} of {weights/param_sync_requests:0} syncs worked, \
last took {weights/sync_time_s:3} s
  pace        k {pace/off_policy_degree:0}, age {pace/avg_sample_age:2} mean {pace/max_sample_age:0} max, \
lag {pace/lag:2} rounds, bottleneck BOTTLENECK, \
rounds take {pace/overlap_efficiency:2} times the pipeline limit, left {time/eta_s:t}"""

_ROUND = (
    "samples {pace/avg_sample_age:2} versions old on average,"
    " {pace/max_sample_age:0} at most; return {rollout/return_mean_100:1}; {learn/samples_per_s:k} samples/s"
)


def component_statistics(metrics: Mapping[str, float], bottleneck: str) -> str:
    """Format what each component has done and is waiting for, as a few lines of text."""
    return fill(_BLOCK.replace("BOTTLENECK", bottleneck), metrics)


class Journal:
    """Writes what happens in a run for people and tools; only changes of health are written.

    ``on_fault`` is called, from any thread, with what a file or sink could not take; OSError when a file
    cannot be opened. ``close`` closes all files.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        settings: Settings,
        meter: Meter,
        pace: Pace,
        resumed_from: int | None,
        on_fault: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._meter = meter
        self._pace = pace
        self._degree = pace.degree
        self._health: dict[str, Health] = {}
        self._statistics_due_s = -math.inf
        self._issued_at_s: dict[int, float] = {}
        observe = settings.observe
        level = getattr(logging, observe.log_level.upper())
        with contextlib.ExitStack() as files:
            events = EventLog(directory / "events.jsonl", on_fault=on_fault)
            files.callback(events.close)
            self._event = events.append
            self._run_log = open_log(directory / "logs", "run", level=level, on_fault=on_fault)
            files.callback(close_log, self._run_log)
            self._learner_log = open_log(directory / "logs", "learner", level=level, on_fault=on_fault)
            files.callback(close_log, self._learner_log)
            self._sinks = make_sinks(
                directory,
                tensorboard=observe.tensorboard.enabled,
                use_wandb=observe.use_wandb,
                wandb_project=observe.wandb_project,
                name=name,
                resumed_from=resumed_from,
                on_fault=on_fault,
            )
            files.callback(self._sinks.close)
            self.close = files.pop_all().close

    def handlers(self) -> Handlers:
        """Return the handlers of a run's events; those of single tickets only for a debug log."""
        often = () if self._settings.async_training.enable_async_debug_log else (Issued, SegmentArrived)
        return {kind: self._write for kind in get_args(Event) if kind not in often}

    def _write(self, event: Event, now_s: float) -> None:
        match event:
            case TrainStarted(batch):
                samples = sum([segment.num_steps for segment in batch.segments])
                self._run_log.info("round %d: began with %d new samples", batch.version, samples)
            case RoundTrained():
                self._round_trained(event, now_s)
            case Published(version, seconds):
                self._run_log.info("version %d published in %.3f s", version, seconds)
            case Issued(ticket):
                self._issued_at_s[ticket.number] = now_s
                self._ticket("issued", ticket, None)
            case SegmentArrived(segment):
                issued_at_s = self._issued_at_s.get(segment.ticket.number, now_s)
                self._ticket("arrived", segment.ticket, now_s - issued_at_s)
            case EvalDone(version, metrics) if metrics is not None:
                metrics = self._meter.eval_metrics
                self._event("eval", {"version": version, "metrics": metrics})
                self._sinks.write(version, dict(metrics))
            case EvalDone(version, _, _, error):
                self._event("eval_failed", {"version": version, "reason": error})
            case SaveFailed(version, reason):
                self._event("checkpoint_failed", {"version": version, "reason": reason})
            case SaveSkipped(version):
                reason = "the one before was not written yet"
                self._event("checkpoint_skipped", {"version": version, "reason": reason})
            case Saved(version, path, seconds):
                self._event("checkpoint", {"version": version, "path": path.name, "seconds": seconds})
            case HealthChanged(component, state, detail):
                self._component(component, state, detail)
            case CollectorUp(collector, _, pid):
                self._component(f"collector_{collector}", "up", "" if pid is None else f"pid {pid}")
            case CollectorDown():
                self._collector_down(event)
            case LearnerDown(reason):
                self._component("learner", "down", reason)
            case DialTurned(degree):
                self._event("dial", {"off_policy_degree": degree})
                self._run_log.info("off_policy_degree turned to %d", degree)
                self._degree = self._pace.degree
            case Notice(text, is_warning):
                self._event("notice", {"text": text})
                self._run_log.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
            case Started(version, resumed):
                self._event("resume" if resumed else "start", {"version": version})
                self._degree = self._pace.degree
                if self._settings.async_training.off_policy_degree == AUTO:
                    self._tuned("tuned while running")
            case Stalled(waits, stacks):
                self._event("stall", {"waits": waits, "stacks": stacks})
            case Restarting(kind, version, reason, attempt):
                self._components_stopped()
                self._event(kind, {"version": version, "reason": reason, "attempt": attempt})
                self._run_log.error("%s", event)
                self._end(event.error)
            case Finished(version, reason, error, stopped):
                self._components_stopped()
                how = {"failed": error is not None, "stopped": stopped}
                self._event("finish", {"version": version, "reason": reason, **how})
                self._end(error)

    def _components_stopped(self) -> None:
        for component, state in list(self._health.items()):
            if state != "down":
                self._component(component, "stopped")

    def _end(self, error: BaseException | None) -> None:
        if self._meter.metrics:
            self._write_statistics(math.inf)
        if error is not None:
            self._run_log.error("%s", error)

    def _component(self, component: str, state: Health, detail: str = "") -> None:
        if self._health.get(component) == state:
            return
        self._health[component] = state
        fields = {"component": component, "state": state, **({"detail": detail} if detail else {})}
        self._event("health", fields)
        self._run_log.info("%s", f"{component} is {state}" + (f": {detail}" if detail else ""))

    def _collector_down(self, event: CollectorDown) -> None:
        self._component(f"collector_{event.collector}", "down", event.reason)
        fields = {"lane": event.collector, "reason": event.reason, "restored": event.restorable}
        self._event("worker_lost", fields)
        self._run_log.error("collector %d lost: %s", event.collector, event.reason)
        if not event.restorable:
            self._run_log.warning(
                "collector %d has no saved state: its running episodes restart", event.collector
            )

    def _tuned(self, reason: str) -> None:
        fields = {"off_policy_degree": self._degree, "version": self._pace.version, "reason": reason}
        self._event("dial", fields)
        self._run_log.info("k = %d: %s", self._degree, reason)

    def _ticket(self, what: Any, ticket: Ticket, seconds: float | None) -> None:
        debug_ticket(self._run_log, what, ticket, self._pace.version, seconds)

    def _round_trained(self, event: RoundTrained, now_s: float) -> None:
        batch, metrics = event.batch, self._meter.metrics
        seconds = event.ended_s - event.started_s
        if self._run_log.isEnabledFor(logging.INFO):
            made = f"round {batch.version}: trained in {seconds:.4f} s, version {event.version} made"
            self._run_log.info("%s; %s", made, fill(_ROUND, metrics))
        self._learner_log.info("round %d trained in %.4f s %s", batch.version, seconds, event.metrics)
        if self._settings.async_training.enable_async_debug_log:
            for segment in batch.segments:
                issued_at_s = self._issued_at_s.pop(segment.ticket.number, event.ended_s)
                self._ticket("trained", segment.ticket, event.ended_s - issued_at_s)
        fields: dict[str, Any] = {"version": event.version, "metrics": metrics}
        fields |= {"counts": asdict(self._pace.counts()), "bottleneck": self._meter.bottleneck}
        if by_env := self._meter.round_by_env:
            fields["samples_by_env"] = by_env
            self._learner_log.info("round %d had samples by environment %s", batch.version, by_env)
        self._event("round", fields)
        self._sinks.write(event.version, metrics)
        if self._degree != self._pace.degree:
            self._degree = self._pace.degree
            if reason := self._pace.dial_reason:
                self._tuned(reason)
        self._write_statistics(now_s)

    def _write_statistics(self, now_s: float) -> None:
        """Write the block of statistics when it is due."""
        if now_s >= self._statistics_due_s:
            self._statistics_due_s = now_s + self._settings.observe.stats_interval_s
            self._run_log.info("%s", component_statistics(self._meter.metrics, self._meter.bottleneck))
