"""Starting runs of a configuration: checked, described in a directory, made into a pipeline, opened."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat import algorithms
from offbeat.checkpoint import CheckpointManager, fitting
from offbeat.config import loader, short
from offbeat.config.code import announce_env
from offbeat.config.loader import ConfigSource
from offbeat.config.models import RunConfig
from offbeat.config.plan import size_remarks
from offbeat.errors import ConfigError, EnvError
from offbeat.observe.callbacks import Callback, RunSummary
from offbeat.observe.logs import make_logs_dir
from offbeat.observe.sinks import check_sinks
from offbeat.pacing.events import EvalDone, Handlers, RoundTrained, Started
from offbeat.pipeline import Pipeline, Report, Settings
from offbeat.reading import numbers
from offbeat.roles import Learner, PerWorker, WorkerContext, check_methods
from offbeat.run.directory import (
    Overrides,
    change_config,
    cut_until,
    existing,
    make_run_dir,
    other_files,
    recorded_name,
    settings_of,
    write_description,
)
from offbeat.run.driver import Driver
from offbeat.run.restarts import OpenRun
from offbeat.run.signals import stopping_on_signals
from offbeat.runtime.clock import Clock

if TYPE_CHECKING:
    from offbeat.algorithms.base import Algorithm, Policy, Roles

_RESUMABLE = (
    "run.rounds",
    "run.total_timesteps",
    "run.stop_return",
    "run.stop_timeout_s",
    "run.stop_eval_return",
    "run.max_restarts",
    "run.restart_delay_s",
    "run.on_nan",
    "run.explosion_factor",
    "async_training.",
    "runtime.",
    "learner.",
    "trainer.",
    "rollout.",
    "eval.",
    "checkpoint.",
    "observe.",
)
_NOT_RESUMABLE = ("runtime.num_workers",)
_FIX_OF_RESUME = "when a run is resumed; start a new run with `offbeat train`"
FIX_OF_EVAL = "when a run is evaluated: leave it out; settings of the section eval may change"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Report):
    """Outcome of a run and its policy: ``result.policy.act(obs)``. `Report` describes the rest.

    ``digest`` is empty for a learner without a state that can be saved; ``interrupted``: by a signal;
    ``has_evaluator``: its algorithm can be evaluated; ``has_envs``: there are episodes to watch.
    """

    digest: str
    run_dir: Path
    policy: Policy
    interrupted: bool
    has_evaluator: bool = True
    has_envs: bool = True

    @property
    def rounds(self) -> int:
        """Rounds trained."""
        return self.version

    @property
    def eval_return(self) -> float | None:
        """Mean return of the last evaluation; None without one."""
        return self.eval_metrics.get("eval/return_mean")


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that can start: its settings, its directory, and whether it continues what is there.

    ``is_new``: the directory was made for it, and is removed should the run be refused. ``notes`` are told
    when it starts.
    """

    config: RunConfig
    run_dir: Path
    name: str
    resumed: bool = False
    is_new: bool = False
    notes: tuple[str, ...] = ()


def prepare_run(recipe: ConfigSource, overrides: Overrides, config: RunConfig, clock: Clock) -> PreparedRun:
    """Run the checks that need the environment, and make the run's directory from the loaded ``config``."""
    changes = _try_out(config)
    is_named = isinstance(recipe, str | Path)
    name = config.run.name or (Path(recipe).stem if is_named else config.algorithm.name)  # type: ignore[arg-type]
    is_new = config.run.dir is None or not Path(config.run.dir).exists()
    notes = (*changes, *size_remarks(config), *other_files(config.run.dir))
    run_dir = make_run_dir(config, name, clock)
    source = str(recipe) if is_named else f"a {type(recipe).__name__}"
    write_description(run_dir, config, name, source, overrides, clock)
    return PreparedRun(config, run_dir, name, is_new=is_new, notes=notes)


def prepare_resume(run_dir: str | Path, overrides: Overrides, config: RunConfig) -> PreparedRun:
    """Check a run that is to continue; ``config`` are its settings with the overrides, which stay with it."""
    directory = existing(run_dir)
    make_logs_dir(directory)
    check_devices(config)
    check_ranks(config)
    check_sinks(config.observe)
    if overrides:
        _check_eval_env(config)
        change_config(directory, config, overrides)
    return PreparedRun(config, directory, recorded_name(directory, config), resumed=True)


def load(source: ConfigSource, overrides: Overrides = ()) -> RunConfig:
    """Load and check a configuration, as ``offbeat.load_config``."""
    config = loader.load_config(
        source, overrides, algorithm_model=algorithms.config_model, algorithms=algorithms.BUILTIN
    )
    announce_env(config)
    return config


def load_for_resume(run_dir: str | Path, overrides: Overrides, *, fix: str = _FIX_OF_RESUME) -> RunConfig:
    """Load the settings of a run that is to continue, with overrides that may change on the way.

    ``fix`` says of other overrides why they are refused, and what to do.
    """
    path = settings_of(run_dir)
    if overrides:
        _check_resumable(overrides, load(path), fix)
    return load(path, overrides)


def _check_resumable(overrides: Overrides, config: RunConfig, fix: str) -> None:
    keys = short.full_keys((str(item).partition("=")[0].strip() for item in overrides), config)
    refused = [key for key in keys if not key.startswith(_RESUMABLE) or key.startswith(_NOT_RESUMABLE)]
    if refused:
        raise ConfigError(f"{', '.join(refused)} cannot change {fix}")


# ---------------------------------------------------------------- checks


def _try_out(config: RunConfig) -> tuple[str, ...]:
    """Run the checks that need the environment, before the run leaves any trace; return what is changed."""
    check_devices(config)
    check_ranks(config)
    check_sinks(config.observe)
    algorithm = algorithms.find(config.algorithm.name)
    try:
        if algorithm.check is not None:
            algorithm.check(config)
        notes = () if algorithm.probe_env is None else algorithm.probe_env(config.env).notes
    except EnvError as error:
        raise ConfigError(str(error)) from error
    _check_eval_env(config)
    return notes


def check_devices(config: RunConfig) -> None:
    """Refuse a GPU that this machine does not have; on Ray the machines of the actors count."""
    asked = {"trainer.device": config.trainer.device, "rollout.device": config.rollout.device}
    for key, device in asked.items():
        if device == "cuda" and config.runtime.kind != "ray":
            from offbeat.models.ranks import choose_device

            choose_device(device, key=key)


def _check_eval_env(config: RunConfig) -> None:
    from offbeat.envs.judged import check_eval_env

    probe = algorithms.find(config.algorithm.name).probe_env
    try:
        if probe is not None:
            check_eval_env(config, probe)
    except EnvError as error:
        raise ConfigError(str(error)) from error


def check_ranks(config: RunConfig) -> None:
    """Refuse several ranks where the algorithm cannot share its work among them."""
    if config.learner.num_ranks > 1 and not make_roles(config).data_parallel:
        raise ConfigError(
            f"learner.num_ranks is {config.learner.num_ranks}, but the algorithm {config.algorithm.name!r} "
            "does not train in several processes (Roles.data_parallel): set learner.num_ranks to 1"
        )


@contextlib.contextmanager
def remove_dir_if_refused(prepared: PreparedRun) -> Iterator[None]:
    """Remove the directory of a new run that is refused in the block, before it has saved anything."""
    try:
        yield
    except ConfigError:
        if prepared.is_new and not (prepared.run_dir / "checkpoints").exists():
            shutil.rmtree(prepared.run_dir, ignore_errors=True)
        raise


# ---------------------------------------------------------------- running


@contextlib.contextmanager
def open_run(
    prepared: PreparedRun, callbacks: Sequence[Callback], clock: Clock, *, stepwise: bool = False
) -> Iterator[OpenRun]:
    """Start a prepared run; leaving the block ends it."""
    config = prepared.config
    startup_notes = None if prepared.resumed else algorithms.find(config.algorithm.name).startup_notes
    notes = {} if startup_notes is None else startup_notes(config)
    notices = [*prepared.notes, *(f"{name}: {text}" for name, text in notes.items())]
    pipeline = make_pipeline(config, prepared.run_dir, prepared.name, callbacks, clock, notices)
    handlers = partial(_own_handlers, prepared, _reached_before(prepared), pipeline.finish)
    run = pipeline.open(config.run.rounds, resumed=prepared.resumed, stepwise=stepwise, handlers=handlers)
    signals_stop = stopping_on_signals(pipeline.stop, clock, _stop_within_s(config))
    with few_threads(config), signals_stop as run.signals, run:
        yield run


def run_to_completion(prepared: PreparedRun, callbacks: Sequence[Callback], clock: Clock) -> Result:
    """Run a prepared run to its end."""
    with open_run(prepared, callbacks, clock) as run:
        report = run.complete()
    return result_of(prepared, report, run.signals)


def result_of(prepared: PreparedRun, report: Report, signals: Sequence[str]) -> Result:
    """Return how a run ended, with its policy."""
    known: dict[str, Any] = {field.name: getattr(report, field.name) for field in fields(Report)}
    roles = make_roles(prepared.config)
    return Result(
        **{**known, "digest": report.digest or ""},
        run_dir=prepared.run_dir,
        policy=roles.policy(report.weights),
        interrupted=bool(signals),
        has_evaluator=roles.evaluate is not None,
        has_envs=prepared.config.algorithm.has_envs,
    )


def make_pipeline(
    config: RunConfig,
    run_dir: Path | None,
    name: str,
    callbacks: Sequence[Callback],
    clock: Clock,
    notices: Sequence[str] = (),
) -> Pipeline:
    """Make the pipeline of a configuration."""
    roles = make_roles(config)
    about = RunSummary(
        name,
        config.algorithm.name,
        config.env.id,
        stop_return=config.run.stop_return,
        stop_within_s=_stop_within_s(config),
    )
    names = (field.name for field in fields(Settings))
    settings = Settings(**{name: getattr(config, name) for name in names})
    return Pipeline(
        collect=roles.collect,
        train=PerWorker(partial(_make_learner, algorithms.find(config.algorithm.name), config)),
        evaluate=roles.evaluate,
        segments_per_round=roles.segments_per_round,
        seed=config.run.seed,
        run_dir=run_dir,
        mode=roles.mode,
        replay_ratio=roles.replay_ratio,
        min_segments=roles.min_segments,
        warmup_s=roles.warmup_s,
        settings=settings,
        callbacks=callbacks,
        notices=notices,
        summary=about,
        clock=clock,
    )


def _stop_within_s(config: RunConfig) -> float:
    return config.run.stop_timeout_s or config.runtime.train_timeout_s


def make_roles(config: RunConfig) -> Roles:
    """Make the roles of a configuration's algorithm."""
    return algorithms.find(config.algorithm.name).build(config)


def _make_learner(algorithm: Algorithm, config: RunConfig, context: WorkerContext) -> Learner:
    """Make the learner where it is to live, with the threads it is to have."""
    learner = algorithm.build(config).learner(context.ranks)
    wanted = ("train", "weights", "state_dict", "load_state_dict")
    check_methods(learner, wanted, "the algorithm's learner")
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(config.runtime.torch_threads)
    return learner


@contextlib.contextmanager
def few_threads(config: RunConfig) -> Iterator[None]:
    """Keep numpy's BLAS to the threads asked for: on a busy machine more of them only spin."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(config.runtime.worker_torch_threads, user_api="blas"):
        yield


def _reached_before(prepared: PreparedRun) -> str:
    """Return the goal that a resumed run has reached already, with the fix; empty: none."""
    settings, manager = prepared.config.run, CheckpointManager(prepared.run_dir / "checkpoints")
    goals = {"stop_return": settings.stop_return, "stop_eval_return": settings.stop_eval_return}
    if not prepared.resumed or not any(goal is not None for goal in goals.values()) or not manager.versions():
        return ""
    with fitting("this run"):
        saved = manager.load()
        returns = numbers(saved.parts["meter"]["recent_returns"])
    mean = sum(returns) / len(returns) if len(returns) >= 100 else -math.inf
    score = -math.inf if saved.score is None else saved.score
    for (name, goal), found in zip(goals.items(), (mean, score), strict=True):
        if goal is not None and found >= goal:
            return f"run.{name} {goal:g} was reached before; run.{name}=null goes on"
    return ""


def _own_handlers(
    prepared: PreparedRun, reached: str, finish: Callable[[str], None], driver: Driver
) -> Handlers:
    """Return the handlers that end a run at its goals and keep the files of its earlier settings true.

    ``reached`` names a goal that it has reached before; empty: none.
    """
    settings, run_dir, meter = prepared.config.run, prepared.run_dir, driver.meter
    goal, eval_goal = settings.stop_return, settings.stop_eval_return

    def started(event: Started, now_s: float) -> None:
        if event.resumed:
            cut_until(run_dir, event.version)
        if reached:
            finish(reached)

    def round_trained(event: RoundTrained, now_s: float) -> None:
        if goal is None or meter.metrics["rollout/total_episodes"] < 100:
            return
        if meter.metrics["rollout/return_mean_100"] >= goal:
            finish(f"the last 100 episodes returned {goal:g} or more on average")

    def evaluated(event: EvalDone, now_s: float) -> None:
        found = (event.metrics or {}).get("eval/return_mean", -math.inf)
        if eval_goal is not None and found >= eval_goal:
            finish(f"the evaluation of version {event.version} returned {eval_goal:g} or more")

    return {Started: started, RoundTrained: round_trained, EvalDone: evaluated}
