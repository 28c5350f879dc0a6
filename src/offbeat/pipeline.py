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

from offbeat.checkpoint import CheckpointManager
from offbeat.config.models import AsyncTrainingConfig, PresetConfig, RuntimeConfig, RuntimeKind
from offbeat.config.settings import Settings
from offbeat.errors import ConfigError, ReplayError
from offbeat.observe.callbacks import Callback, RunControl, RunSummary, check_hooks
from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing.events import (
    CollectorRemoved,
    CollectorsAdded,
    DialTurned,
    GoalReached,
    Handlers,
    Request,
    StopRequested,
)
from offbeat.pacing.members import FIXED_MEMBERS
from offbeat.pacing.presets import Preset
from offbeat.roles import Learner, PerWorker
from offbeat.run.adapters import as_collect, as_evaluate, as_learn, with_tried_state
from offbeat.run.driver import Driver
from offbeat.run.observers import attach
from offbeat.run.parts import StartPoint
from offbeat.run.replay import ReplayReport, Stage, replay
from offbeat.run.restarts import OpenRun, Report, RestartPolicy, start_point
from offbeat.run.saving import check_algorithm, notice_of_lost_rounds
from offbeat.runtime import make_runtime
from offbeat.runtime.clock import SYSTEM_CLOCK, Clock
from offbeat.runtime.spec import RunSpec
from offbeat.types import StateTree

__all__ = ["Pipeline", "ReplayReport", "Report", "Settings"]


class Pipeline:
    """Collect, train and evaluate side by side, as far apart as ``off_policy_degree`` allows.

    ``collect(ticket, weights)``, ``train(list of what collect returned)``, ``weights()`` and
    ``evaluate(weights)`` may be plain functions; or role objects (see `offbeat.roles`); or, for roles that
    must be born in their worker, `PerWorker` factories. ``collect`` should draw its randomness from
    ``ticket.seed``: that is what makes a run repeatable. ``clock`` drives the run; tests bring their own.

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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_hooks(callbacks)
        chosen = _with_overrides(settings or Settings(), off_policy_degree, runtime, num_workers)
        if chosen.learner.num_ranks > 1 and not isinstance(train, PerWorker):
            raise ConfigError(
                "learner.num_ranks above 1 needs a learner that each rank can make for itself: "
                "give train=PerWorker(make), where make(context) uses context.ranks"
            )
        self._learner: Learner | None = train if isinstance(train, Learner) else None
        self._initial_state: StateTree | None = None
        if self._learner is not None and run_dir is not None:
            with contextlib.suppress(Exception):  # then it is refused when the run starts or is replayed
                self._initial_state = copy.deepcopy(self._learner.state_dict())
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._clock = clock
        self._spec = RunSpec(
            collect=as_collect(collect),
            learn=as_learn(train, weights),
            evaluate=as_evaluate(evaluate),
            settings=chosen,
            seed=seed,
            log_dir=self._run_dir / "logs" if self._run_dir is not None else None,
            mode=mode,
        )
        if self._spec.saves:
            self._spec = replace(self._spec, learn=with_tried_state(self._spec.learn))
        size = segments_per_round or chosen.runtime.num_workers
        self._pace = _pace_config(self._spec, size, replay_ratio, min_segments, warmup_s)
        self._callbacks = tuple(callbacks)
        self._notices = tuple(notices)
        self._summary = summary or RunSummary("pipeline")
        self._requests: deque[Request] = deque()

    @property
    def settings(self) -> Settings:
        """The settings with the arguments of the pipeline laid over them."""
        return self._spec.settings

    def run(self, rounds: int) -> Report:
        """Train ``rounds`` rounds and report."""
        with self.open(rounds) as run:
            return run.complete()

    def resume(self, rounds: int) -> Report:
        """Continue the run in ``run_dir`` until ``rounds`` rounds are done, counted from its first.

        It continues from the newest good checkpoint, or starts from the beginning if there is none yet.
        """
        with self.open(rounds, resumed=True) as run:
            return run.complete()

    def open(
        self,
        rounds: int,
        *,
        resumed: bool = False,
        stepwise: bool = False,
        handlers: Callable[[Driver], Handlers] | None = None,
    ) -> OpenRun:
        """Return the same run, or one that is ``resumed``, to be driven by the caller in a with-block.

        ``stepwise``: it collects and trains only when it is asked to (see `GatesSet`), which needs k = 0.
        ``handlers`` returns functions that each driver of the run calls with its events, by type.
        """
        if not resumed and self._run_dir is not None and (self._run_dir / "schedule.jsonl").exists():
            raise ConfigError(f"run_dir {self._run_dir} already holds a run: resume it, or choose another")
        self._pace = replace(self._pace, rounds=rounds, stepwise=stepwise)
        point = self._resume_point() if resumed else StartPoint(warnings=self._notices)
        checkpoints = None if self._run_dir is None else self._checkpoints()
        policy = RestartPolicy(self.settings.run, checkpoints, self._clock)
        make_driver = partial(self._make_driver, handlers)
        return OpenRun(make_driver, point, policy, self._requests, self._run_dir)

    def _resume_point(self) -> StartPoint:
        """Return the newest good checkpoint, or the beginning with a notice of what is lost."""
        manager = self._checkpoints()
        if not manager.versions():
            lost = notice_of_lost_rounds(manager.directory.with_name("events.jsonl"))
            return StartPoint(warnings=(lost,), resumed=True)
        saved = manager.load()
        check_algorithm(saved, self._about().algorithm)
        return start_point(saved)

    def _make_driver(self, handlers: Callable[[Driver], Handlers] | None, point: StartPoint) -> Driver:
        """Make the driver of one start of the run."""
        runtime = make_runtime(self.settings.runtime.kind)
        driver = Driver(self._spec, Coordinator(self._pace), runtime, self._clock.now_s, self._requests)
        attach(driver, point, self._about(), self._callbacks, self.control())
        if handlers is not None:
            driver.observe(handlers(driver))
        return driver

    # ------------------------------------------------------------ replay

    def replay(
        self,
        later: Sequence[Stage] = (),
        on_round: Callable[[int, int], None] | None = None,
        *,
        runtime: RuntimeKind = "inline",
        until: int | None = None,
        directory: Path | None = None,
        call: bool = False,
    ) -> ReplayReport:
        """Repeat the run in ``run_dir`` and compare the weights with the recorded ones.

        It ends at the first round whose published weights differ. ``later`` are the specs of a run that was
        resumed with other settings, by the version they started at. ``on_round(version, rounds)`` is called
        after each round. ``until``: stop at this version, and with ``directory`` leave a run there that can
        be resumed. ``call``: ask tools and rewards again, and end at the first answer that is another one.
        """
        first = replace(self._spec, learn=self._pristine_learn())
        return replay(
            [(0, first), *later],
            self._checkpoints(),
            self._about(),
            self._clock,
            runtime=runtime,
            until=until,
            directory=directory,
            on_round=on_round,
            calls=call,
        )

    def _pristine_learn(self) -> PerWorker[Learner]:
        """Return what makes the learner as it was when the pipeline was made."""
        if self._learner is None:
            return self._spec.learn
        try:
            learner = copy.deepcopy(self._learner)
        except Exception as error:
            raise ReplayError(
                f"the learner cannot be copied for a replay ({error}): give train=PerWorker(make) instead"
            ) from error
        if self._initial_state is None:
            raise ReplayError(
                "the learner's first state could not be copied for a replay: "
                "give train=PerWorker(make) instead"
            )
        learner.load_state_dict(copy.deepcopy(self._initial_state))
        return PerWorker(lambda context: learner)

    def _checkpoints(self) -> CheckpointManager:
        if self._run_dir is None:
            raise ConfigError("without run_dir nothing is saved: give the pipeline a run_dir")
        return CheckpointManager(self._run_dir / "checkpoints")

    def set_off_policy_degree(self, degree: int) -> None:
        """Turn the dial while running, from any thread or callback (-1: hand it to the tuner)."""
        self._pace.check_degree(degree)
        self._requests.append(DialTurned(degree))

    def add_collector(self, count: int = 1) -> None:
        """Have more collectors join the run, from any thread or callback; not at k = 0.

        They are made as the others are, with numbers of their own. The bound stays as it is.
        """
        self._check_members()
        if count < 1:
            raise ConfigError(f"add_collector takes a number of collectors above 0, not {count}")
        self._requests.append(CollectorsAdded(count))

    def remove_collector(self, collector: int | None = None) -> None:
        """Have a collector leave once it has finished the tickets that it holds; None: the newest.

        Its process ends then. The last collector stays.
        """
        self._check_members()
        self._requests.append(CollectorRemoved(collector))

    def _check_members(self) -> None:
        if self.settings.async_training.off_policy_degree == 0:
            raise ConfigError(FIXED_MEMBERS)

    def stop(self, reason: str = "stopped", within_s: float | None = None) -> None:
        """Finish cleanly after the current round, from any thread, callback or signal handler.

        A run that does not end ``within_s`` seconds ends without a last checkpoint.
        """
        self._requests.append(StopRequested(reason, within_s))

    def control(self) -> RunControl:
        """Return the operations on the run that callbacks get."""
        return RunControl(self.stop, self.finish, self.set_off_policy_degree)

    def finish(self, reason: str) -> None:
        """Finish because the goal is reached: after the current round, evaluate as at the end."""
        self._requests.append(GoalReached(reason))

    def spec(self) -> RunSpec:
        """Return the roles, settings and seed, from which a runtime makes the roles."""
        return self._spec

    def _about(self) -> RunSummary:
        """Return the summary that callbacks and the console get."""
        settings = self.settings
        return replace(
            self._summary,
            runtime=settings.runtime.kind,
            num_workers=settings.runtime.num_workers,
            rounds=self._pace.rounds,
            off_policy_degree=settings.async_training.off_policy_degree,
            directory=self._run_dir,
        )


def _pace_config(
    spec: RunSpec, segments_per_round: int, replay_ratio: float | None, min_segments: int, warmup_s: float
) -> PaceConfig:
    """Return the configuration of a coordinator; `Pipeline.open` gives it the number of rounds."""
    settings, dial = spec.settings, spec.settings.async_training
    saves = spec.saves
    judges = spec.evaluate is not None
    return PaceConfig(
        rounds=0,
        segments_per_round=segments_per_round,
        num_collectors=spec.num_collectors,
        off_policy_degree=dial.off_policy_degree,
        open_rounds=dial.open_rounds,
        auto_max=dial.auto_max,
        max_staleness=dial.max_staleness_allowed,
        mode=spec.mode,
        replay_ratio=replay_ratio,
        min_segments=max(dial.min_batch_count or 0, min_segments),
        warmup_s=warmup_s,
        max_outstanding=dial.max_queue_size,
        max_drops_per_round=dial.max_drops_per_round,
        straggler_policy=dial.straggler_policy,
        publish_interval=dial.weight_sync_interval,
        eval_interval=settings.eval.interval_rounds if judges else None,
        eval_at_start=settings.eval.at_start and judges,
        eval_at_end=settings.eval.at_end and judges,
        async_eval=dial.enable_async_eval,
        checkpoint_interval=settings.checkpoint.interval_rounds if saves else None,
        checkpoint_interval_s=settings.checkpoint.interval_s if saves else None,
        checkpoint_at_end=saves,
        issue_interval_s=dial.batch_generation_interval,
        max_publish_retries=dial.max_sync_retries,
        publish_retry_delay_s=dial.sync_retry_delay,
        seed=spec.seed,
        preset=None if dial.preset is None else preset_of(dial.preset),
    )


def preset_of(chosen: PresetConfig) -> Preset:
    """Return the rule of a preset."""
    return Preset(
        chosen.name,
        chosen.rounds_ahead,
        chosen.batches,
        by_arrival=chosen.name == "verl_fully_async",
        in_step=chosen.name == "one_step_off",
    )


def _with_overrides(
    settings: Settings, degree: int | None, kind: str | None, num_workers: int | None
) -> Settings:
    dial = {} if degree is None else {"off_policy_degree": degree}
    runtime: dict[str, Any] = {} if kind is None else {"kind": kind}
    runtime |= {} if num_workers is None else {"num_workers": num_workers}
    try:
        changed = replace(
            settings,
            async_training=AsyncTrainingConfig(**{**settings.async_training.model_dump(), **dial}),
            runtime=RuntimeConfig(**{**settings.runtime.model_dump(), **runtime}),
        )
    except ValidationError as error:
        lines = [f"{found['loc'][-1]}: {found['msg']}, not {found['input']!r}" for found in error.errors()]
        raise ConfigError("; ".join(lines)) from None
    if problems := changed.async_training.preset_problems():
        raise ConfigError("; ".join(f"{key}: {text}" for key, text in problems))
    return changed
