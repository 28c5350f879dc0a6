"""Collect, train and evaluate side by side: the class that users make runs with."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from offbeat.adapters import as_collect, as_evaluate, as_learn
from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint
from offbeat.config.models import AsyncTrainingConfig, RuntimeConfig, RuntimeKind
from offbeat.errors import ConfigError, ReplayError
from offbeat.observe.callbacks import Callback, RunControl, RunSummary
from offbeat.observe.events import read_schedule
from offbeat.pacing import PaceConfig
from offbeat.pacing.events import DialTurned, Event, GoalReached, StopRequested
from offbeat.recording import RecordingOptions, learner_digest
from offbeat.recovery import Recovery
from offbeat.replaying import Replayer, ReplayReport, Schedule
from offbeat.roles import Learner, PerWorker
from offbeat.running import OpenRun
from offbeat.runtime.base import Machines, Plan
from offbeat.session import Beginning, Job, Report, Settings

__all__ = ["Pipeline", "Report", "Settings"]


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
        runtime: RuntimeKind | None = None,
        num_workers: int | None = None,
        segments_per_round: int | None = None,
        seed: int = 0,
        run_dir: str | Path | None = None,
        mode: Literal["stream", "replay"] = "stream",
        replay_ratio: float | None = None,
        min_segments: int = 0,
        warmup_s: float = 0.0,
        settings: Settings | None = None,
        callbacks: Sequence[Callback] = (),
        notices: Sequence[str] = (),
        summary: RunSummary | None = None,
    ) -> None:
        self._collect = as_collect(collect)
        self._learn = as_learn(train, weights)
        self._learner: Learner | None = train if isinstance(train, Learner) else None
        self._initial_state = copy.deepcopy(train.state_dict()) if self._learner is not None else None
        self._evaluate = as_evaluate(evaluate)
        self.settings = _with_overrides(settings or Settings(), off_policy_degree, runtime, num_workers)
        if self.settings.learner.num_ranks > 1 and not isinstance(train, PerWorker):
            raise ConfigError(
                "learner.num_ranks above 1 needs a learner that each rank can make for itself: "
                "give train=PerWorker(make), where make(context) uses context.ranks"
            )
        self._segments_per_round = segments_per_round or self.settings.runtime.num_workers
        self._seed = seed
        self._mode: Literal["stream", "replay"] = mode
        self._replay_ratio = replay_ratio
        self._min_segments = min_segments
        self._warmup_s = warmup_s
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._callbacks = tuple(callbacks)
        self._notices = tuple(notices)
        self._summary = summary
        self._requests: deque[Event] = deque()
        self._pace = self._pace_config(rounds=0)

    def run(self, rounds: int) -> Report:
        """Train ``rounds`` rounds and report."""
        return _to_the_end(self.open(rounds))

    def resume(self, rounds: int) -> Report:
        """Go on with the run in ``run_dir`` until ``rounds`` rounds are done, counted from its first.

        It goes on from the newest good checkpoint, or from the beginning if there is none yet.
        """
        return _to_the_end(self.open(rounds, resumed=True))

    def open(self, rounds: int, *, resumed: bool = False, stepwise: bool = False) -> OpenRun:
        """The same run, or one that is ``resumed``, to be driven by the caller in a with-block.

        ``stepwise``: it collects and trains only when it is asked to (see `GatesSet`), which needs k = 0.
        """
        beginning = Beginning(self._newest(), resumed=True) if resumed else Beginning()
        if not resumed and self._run_dir is not None and (self._run_dir / "schedule.jsonl").exists():
            raise ConfigError(f"run_dir {self._run_dir} already holds a run: resume it, or choose another")
        self._pace = self._pace_config(rounds, stepwise)
        return OpenRun(self.job, beginning, Recovery(self.settings.run, self._run_dir))

    def _newest(self) -> LoadedCheckpoint | None:
        manager = self._checkpoints()
        return manager.load() if manager.versions() else None

    def replay(
        self, later: Sequence[tuple[int, Plan]] = (), tell: Callable[[int, int], None] | None = None
    ) -> ReplayReport:
        """Repeat the run in ``run_dir`` serially and compare the weights with its newest checkpoint's.

        ``later`` are the plans of a run that was resumed with other settings, by the version they began at.
        ``tell(version, rounds)`` is called after each round.
        """
        saved = self._checkpoints().load()
        if saved.version == 0:
            raise ReplayError(f"{self._run_dir} has not trained a round yet: there is nothing to repeat")
        records = read_schedule(saved.path.parents[1] / "schedule.jsonl")
        told = None if tell is None else partial(_told, tell, saved.version)
        replayer = Replayer(Schedule.from_records(records), self.plan(), self._pristine_learner(), told)
        with contextlib.closing(replayer):
            for version, plan in later:
                replayer.run(min(version, saved.version))
                replayer.switch(plan)
            learner = replayer.run(saved.version)
        recorded, repeated = learner_digest(saved.parts["learner"]), learner_digest(learner.state_dict())
        return ReplayReport(recorded == repeated, repeated, recorded, saved.version, saved.warnings)

    def _pristine_learner(self) -> Learner | None:
        """A copy of a learner object as it was when the pipeline was made; None for one made anew anyhow."""
        if self._learner is None:
            return None
        try:
            learner = copy.deepcopy(self._learner)
        except Exception as error:
            raise ReplayError(
                f"the learner cannot be copied for a replay ({error}): give train=PerWorker(make) instead"
            ) from error
        learner.load_state_dict(copy.deepcopy(self._initial_state))
        return learner

    def _checkpoints(self) -> CheckpointManager:
        if self._run_dir is None:
            raise ConfigError("without run_dir nothing is saved: give the pipeline a run_dir")
        return CheckpointManager(self._run_dir / "checkpoints")

    def set_off_policy_degree(self, degree: int) -> None:
        """Turn the dial while running, from any thread or callback (-1: hand it to the tuner)."""
        self._pace.check_degree(degree)
        self._requests.append(DialTurned(degree))

    def stop(self, reason: str = "stopped", within_s: float | None = None) -> None:
        """Finish cleanly after the round at hand, from any thread, callback or signal handler.

        A run that does not end ``within_s`` seconds ends without a last checkpoint.
        """
        self._requests.append(StopRequested(reason, within_s))

    def control(self) -> RunControl:
        """What a callback can do to the run."""
        return RunControl(self.stop, self.finish, self.set_off_policy_degree)

    def finish(self, reason: str) -> None:
        """The goal is reached: end after the round at hand, and evaluate as at the end of all rounds."""
        self._requests.append(GoalReached(reason))

    def job(self) -> Job:
        """Everything one run needs."""
        return Job(self.plan(), self._pace, self.settings, self.recording(), self.control(), self._requests)

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
            sync_retries=dial.max_sync_retries,
            sync_retry_delay_s=dial.sync_retry_delay,
            log_dir=self._run_dir / "logs" if self._run_dir is not None else None,
            machines=Machines(runtime, self.settings.learner, self.settings.trainer, self.settings.rollout),
            mode=self._mode,
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
        return RecordingOptions(
            summary, settings.observe, settings.checkpoint, dial, self._callbacks, self._notices
        )

    def _pace_config(self, rounds: int, stepwise: bool = False) -> PaceConfig:
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
            num_collectors=self.settings.runtime.num_workers,
            off_policy_degree=dial.off_policy_degree,
            auto_max=dial.auto_max,
            max_staleness=dial.max_staleness_allowed,
            mode=self._mode,
            replay_ratio=self._replay_ratio,
            min_segments=max(dial.min_batch_count or 0, self._min_segments),
            warmup_s=self._warmup_s,
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
            stepwise=stepwise,
        )


def _to_the_end(run: OpenRun) -> Report:
    with run:
        while not run.finished:
            run.step()
        return run.report()


def _told(tell: Callable[[int, int], None], rounds: int, version: int) -> None:
    tell(version, rounds)


def _with_overrides(
    settings: Settings, degree: int | None, kind: str | None, num_workers: int | None
) -> Settings:
    dial = {} if degree is None else {"off_policy_degree": degree}
    runtime: dict[str, Any] = {} if kind is None else {"kind": kind}
    runtime |= {} if num_workers is None else {"num_workers": num_workers}
    try:
        return replace(
            settings,
            async_training=AsyncTrainingConfig(**{**settings.async_training.model_dump(), **dial}),
            runtime=RuntimeConfig(**{**settings.runtime.model_dump(), **runtime}),
        )
    except ValidationError as error:
        lines = [f"{found['loc'][-1]}: {found['msg']}, not {found['input']!r}" for found in error.errors()]
        raise ConfigError("; ".join(lines)) from None
