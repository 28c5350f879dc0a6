"""What users call: train, resume, evaluate, play, replay, digest."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from offbeat import algorithms, load_config
from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint, files
from offbeat.config import short
from offbeat.config.loader import dump_yaml
from offbeat.config.models import RunConfig
from offbeat.errors import CheckpointError, ConfigError, EnvError, OffbeatError
from offbeat.lanes import Loss
from offbeat.observe import check_sinks
from offbeat.observe.callbacks import Callback, RoundInfo, RunControl, RunInfo, RunSummary
from offbeat.pipeline import Pipeline, Report, Settings
from offbeat.recording import learner_digest
from offbeat.replaying import ReplayReport
from offbeat.roles import Learner, PerWorker, WorkerContext
from offbeat.seeding import derive_seed
from offbeat.types import Metrics

if TYPE_CHECKING:
    from offbeat.algorithms.base import Policy, Roles
    from offbeat.playing import PlayResult, Watch

_RESUMABLE = (
    "run.rounds",
    "run.stop_return",
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
_SIGNAL_LIMIT_S = 8.0
_SAME_SIGNAL_S = 0.3
_UNTIL = "config-until-{}.yaml"


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended, and the policy it made: ``result.policy.act(obs)``."""

    run_dir: Path
    reason: str
    rounds: int
    digest: str
    metrics: dict[str, float | str]
    eval_return: float | None
    wall_s: float
    env_steps: int
    steps_per_s: float
    max_staleness: int
    interrupted: bool
    policy: Policy
    losses: tuple[Loss, ...] = ()
    restarts: int = 0


def train(
    recipe: str | Path | RunConfig,
    *,
    off_policy_degree: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    overrides: Mapping[str, object] | Sequence[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train a recipe, a file or a configuration, in a run directory of its own.

    Example: ``offbeat.train("cartpole-ppo", off_policy_degree=4).policy.act(obs)``.
    """
    named = {
        "async_training.off_policy_degree": off_policy_degree,
        "run.rounds": rounds,
        "run.seed": seed,
    }
    chosen = _joined(overrides, {key: value for key, value in named.items() if value is not None})
    config = load_config(recipe, chosen)
    _try_out(config)
    source = _name_of(config, recipe)
    is_new = config.run.dir is None or not Path(config.run.dir).exists()
    run_dir = _make_run_dir(config, source)
    _write_description(run_dir, config, recipe, chosen)
    try:
        return _run(config, run_dir, source, callbacks)
    except ConfigError:
        if is_new and not (run_dir / "checkpoints").exists():
            shutil.rmtree(run_dir, ignore_errors=True)  # refused before it began: it leaves no trace
        raise


def resume(
    run_dir: str | Path,
    *,
    overrides: Mapping[str, object] | Sequence[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Go on with a run from its newest good checkpoint, or from its beginning if it has none yet.

    Overrides stay with the run: what comes after them goes on with them, also in its replay.
    """
    directory = _existing(run_dir)
    if overrides:
        _check_resumable(overrides, load_config(directory / "config.yaml"))
    config = load_config(directory / "config.yaml", overrides or ())
    _check_ranks(config)
    if overrides:
        _check_eval_env(config)
        _change_config(directory, config, overrides)
    return _run(config, directory, _recorded_name(directory, config), callbacks, resumed=True)


def _change_config(
    directory: Path, config: RunConfig, overrides: Mapping[str, object] | Sequence[str]
) -> None:
    """Write the settings that hold from now on, and keep those that held until the newest checkpoint."""
    manager = CheckpointManager(directory / "checkpoints")
    version = manager.load().version if manager.versions() else 0
    for path in directory.glob(_UNTIL.format("*")):
        if _until(path) >= version:
            path.unlink()  # of rounds that are trained again
    before = (directory / "config.yaml").read_text()
    if version > 0:
        _write(directory / _UNTIL.format(f"{version:08d}"), before)
    lines = [f"# resumed at version {version} with {line}" for line in _as_lines(overrides)]
    _write(directory / "config.yaml", "\n".join(lines) + "\n" + dump_yaml(config))
    _write(directory / "resolved.yaml", dump_yaml(config.resolved()))


def evaluate(
    run_dir: str | Path, *, episodes: int | None = None, seed: int | None = None, best: bool = False
) -> Metrics:
    """Judge a run's newest (or best) weights; returns metrics named ``eval/...``."""
    directory = _existing(run_dir)
    chosen = {"eval.episodes": episodes} if episodes is not None else {}
    config = load_config(directory / "config.yaml", chosen)
    manager = CheckpointManager(directory / "checkpoints")
    saved = _load(manager, manager.best() if best else None)
    seed = derive_seed(config.run.seed, "evaluate", saved.version) if seed is None else seed
    evaluator = _roles(config).evaluate.make(WorkerContext(lane=0, num_lanes=1, seed=seed))
    return {"eval/version": float(saved.version), **evaluator.evaluate(saved.weights, seed)}


def play(
    run_dir: str | Path,
    *,
    episodes: int = 1,
    seed: int | None = None,
    best: bool = False,
    out: str | Path | None = None,
    film: bool = True,
    fps: float | None = None,
    against: str | None = None,
    stochastic: bool = False,
    max_steps: int | None = None,
    watch: Watch | None = None,
) -> PlayResult:
    """Play a run's newest (or best) weights in the environment of its evaluation, and film it.

    The film goes to ``out`` (a ``.gif`` or ``.mp4``), by default to ``play.gif`` in the run's directory;
    ``film=False`` makes none. ``seed`` is that of the first episode, by default ``run.seed``; the next have
    the next ones. ``against`` names a baseline that plays the same seeds; ``watch`` is called at every step.

    Example: ``offbeat.play("runs/lines", out="lines.mp4", against="greedy").scores``.
    """
    from offbeat import playing

    directory = _existing(run_dir)
    config = load_config(directory / "config.yaml")
    wishes = playing.Wishes(
        episodes=episodes,
        seed=config.run.seed if seed is None else seed,
        out=None if out is None else Path(out),
        film=directory / "play.gif" if film and out is None else None,
        fps=fps,
        against=against,
        deterministic=config.eval.deterministic and not stochastic,
        max_steps=playing.MAX_EPISODE_STEPS if max_steps is None else max_steps,
        watch=watch,
    )
    manager = CheckpointManager(directory / "checkpoints")
    saved = _load(manager, manager.best() if best else None)
    return playing.play(config.eval_env, _roles(config).policy(saved.weights), saved.version, wishes)


def replay_run(run_dir: str | Path, tell: Callable[[int, int], None] | None = None) -> ReplayReport:
    """Repeat a run serially from its schedule and compare the weights with its newest checkpoint's.

    ``tell(version, rounds)`` is called after each of the rounds.
    """
    directory = _existing(run_dir)
    earlier = sorted(directory.glob(_UNTIL.format("*")))
    configs = [load_config(path) for path in (*earlier, directory / "config.yaml")]
    pipelines = [_pipeline(config, directory, "", ()) for config in configs]
    changes = [_until(path) for path in earlier]
    later = [(version, pipeline.plan()) for version, pipeline in zip(changes, pipelines[1:], strict=True)]
    with _few_threads(configs[0]):
        report = pipelines[0].replay(later, tell)
    for warning in report.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return report


def digest(run_dir: str | Path) -> str:
    """A sha256 over the learner of a run's newest good checkpoint: weights, optimizer, statistics."""
    return learner_digest(_load(CheckpointManager(_existing(run_dir) / "checkpoints")).parts["learner"])


def _load(manager: CheckpointManager, version: int | None = None) -> LoadedCheckpoint:
    """Load a checkpoint and say which newer ones were passed over, and why."""
    saved = manager.load(version)
    for warning in saved.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return saved


# ---------------------------------------------------------------- running


def _run(
    config: RunConfig,
    run_dir: Path,
    name: str,
    callbacks: Sequence[Callback],
    resumed: bool = False,
) -> Result:
    goal = _StopAtReturn(config.run.stop_return, _had_reached(run_dir, config) if resumed else False)
    notices = () if resumed else _facts(config)
    pipeline = _pipeline(config, run_dir, name, (*callbacks, goal, _EarlierSettings(run_dir)), notices)
    with _few_threads(config), _stopping_on_signals(pipeline) as interrupted:
        report = (pipeline.resume if resumed else pipeline.run)(config.run.rounds)
    return _result(config, run_dir, report, bool(interrupted))


def _facts(config: RunConfig) -> list[str]:
    """What the algorithm has to say before a run."""
    tell = algorithms.find(config.algorithm.name).facts
    return [f"{name}: {text}" for name, text in tell(config).items()] if tell is not None else []


def _pipeline(
    config: RunConfig,
    run_dir: Path | None,
    name: str,
    callbacks: Sequence[Callback],
    notices: Sequence[str] = (),
) -> Pipeline:
    roles = _roles(config)
    names = (field.name for field in fields(Settings))
    settings = Settings(**{name: getattr(config, name) for name in names})
    return Pipeline(
        collect=roles.collect,
        train=PerWorker(_MakeLearner(config)),
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
        summary=RunSummary(name, config.algorithm.name, config.env.id, "", 0, 0, 0),
    )


def _had_reached(run_dir: Path, config: RunConfig) -> bool:
    """Whether a run that is resumed has its goal behind it."""
    manager = CheckpointManager(run_dir / "checkpoints")
    if config.run.stop_return is None or not manager.versions():
        return False
    returns = manager.load().parts["meter"]["recent_returns"]
    return len(returns) >= 100 and sum(returns) / len(returns) >= config.run.stop_return


class _EarlierSettings(Callback):
    """Keeps the files of earlier settings true when a run goes back behind the point where they changed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def on_start(self, info: RunInfo) -> None:
        if info.resumed_from is None:
            return
        later = [path for path in self._run_dir.glob(_UNTIL.format("*")) if _until(path) > info.resumed_from]
        for path in sorted(later)[1:]:
            path.unlink()  # of rounds that are trained again
        for path in sorted(later)[:1]:
            path.replace(self._run_dir / _UNTIL.format(f"{info.resumed_from:08d}"))


def _until(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


class _StopAtReturn(Callback):
    """Ends the run once the mean return of the last 100 training episodes reaches a goal."""

    def __init__(self, goal: float | None, was_reached: bool = False) -> None:
        self._goal = goal
        self._was_reached = was_reached
        self._control: RunControl | None = None

    def on_start(self, info: RunInfo) -> None:
        self._control = info.control
        if self._was_reached:
            info.finish(f"run.stop_return {self._goal:g} was reached before; run.stop_return=null goes on")

    def on_round(self, info: RoundInfo) -> None:
        metrics = info.metrics
        if self._goal is None or self._control is None or float(metrics["rollout/total_episodes"]) < 100:
            return
        if float(metrics["rollout/return_mean_100"]) >= self._goal:
            self._control.finish(f"the last 100 episodes returned {self._goal:g} or more on average")


def _try_out(config: RunConfig) -> None:
    """Find out what only a try can tell, before the run leaves any trace."""
    _check_ranks(config)
    check_sinks(tensorboard=config.observe.tensorboard, use_wandb=config.observe.use_wandb)
    check = algorithms.find(config.algorithm.name).check
    try:
        if check is not None:
            check(config)
    except EnvError as error:
        raise ConfigError(str(error)) from error
    _check_eval_env(config)


def _check_eval_env(config: RunConfig) -> None:
    from offbeat.envs.judged import check_eval_env

    try:
        check_eval_env(config)
    except EnvError as error:
        raise ConfigError(str(error)) from error


def _check_ranks(config: RunConfig) -> None:
    if config.learner.num_ranks > 1 and not _roles(config).data_parallel:
        raise ConfigError(
            f"learner.num_ranks is {config.learner.num_ranks}, but the algorithm {config.algorithm.name!r} "
            "does not train in several processes (Roles.data_parallel): set learner.num_ranks to 1"
        )


def _roles(config: RunConfig) -> Roles:
    return algorithms.find(config.algorithm.name).build(config)


@dataclass(frozen=True, slots=True)
class _MakeLearner:
    """Makes the learner where it is to live, with the threads it is to have."""

    config: RunConfig

    def __call__(self, context: WorkerContext) -> Learner:
        learner = _roles(self.config).learner(context.ranks)
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(self.config.runtime.torch_threads)
        return learner


def _result(config: RunConfig, run_dir: Path, report: Report, interrupted: bool) -> Result:
    return Result(
        run_dir=run_dir,
        reason=report.reason,
        rounds=report.version,
        digest=report.digest or "",
        metrics=report.metrics,
        eval_return=report.eval_metrics.get("eval/return_mean"),
        wall_s=report.wall_s,
        env_steps=report.env_steps,
        steps_per_s=report.steps_per_s,
        max_staleness=report.max_staleness,
        interrupted=interrupted,
        policy=_roles(config).policy(report.weights),
        losses=report.losses,
        restarts=report.restarts,
    )


@contextlib.contextmanager
def _few_threads(config: RunConfig) -> Iterator[None]:
    """Keep numpy's BLAS to the threads asked for: on a busy machine more of them only spin."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(config.runtime.worker_torch_threads, user_api="blas"):
        yield


@contextlib.contextmanager
def _stopping_on_signals(pipeline: Pipeline) -> Iterator[list[str]]:
    """The first Ctrl-C or SIGTERM stops the run cleanly, the second one at once."""
    received: list[str] = []
    heard_s = float("-inf")

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal heard_s
        if (now_s := time.monotonic()) - heard_s < _SAME_SIGNAL_S:
            return  # sent to a whole process group, a signal comes twice: also by way of the command's guard
        heard_s = now_s
        received.append(signal.Signals(number).name)
        if len(received) > 1:
            raise KeyboardInterrupt
        pipeline.stop(f"interrupted by {received[0]}", _SIGNAL_LIMIT_S)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- run directories


def _make_run_dir(config: RunConfig, name: str) -> Path:
    directory = Path(config.run.dir) if config.run.dir else _unused_dir(name)
    if (directory / "manifest.json").exists():
        raise ConfigError(
            f"run.dir {directory} already holds a run: go on with `offbeat resume {directory}`, "
            "or choose another run.dir"
        )
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir {directory} cannot be made: {error.strerror}; choose another") from error
    return directory


def _unused_dir(name: str) -> Path:
    """``runs/<name>-<date>-<time>``, with a number behind it for runs of the same second."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{name}-{stamp}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 10_000))))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())


def _existing(run_dir: str | Path) -> Path:
    directory = Path(run_dir)
    if not (directory / "manifest.json").exists():
        raise CheckpointError(f"{directory} is not a run directory: it has no manifest.json")
    return directory


def _check_resumable(overrides: Mapping[str, object] | Sequence[str], config: RunConfig) -> None:
    keys = short.full_keys((str(item).partition("=")[0].strip() for item in overrides), config)
    refused = [key for key in keys if not key.startswith(_RESUMABLE) or key.startswith(_NOT_RESUMABLE)]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)} cannot change when a run is resumed; start a new run with `offbeat train`"
        )


def _write_description(
    run_dir: Path,
    config: RunConfig,
    recipe: str | Path | RunConfig,
    chosen: Mapping[str, object] | Sequence[str],
) -> None:
    """Write what was asked for, what it resolved to, and with which versions it runs."""
    source = recipe if isinstance(recipe, str | Path) else "a RunConfig"
    given = [f"# from {source}", *(f"# with {line}" for line in _as_lines(chosen))]
    _write(run_dir / "config.yaml", "\n".join(given) + "\n" + dump_yaml(config))
    _write(run_dir / "resolved.yaml", dump_yaml(config.resolved()))
    manifest = {
        "name": _name_of(config, recipe),
        "seed": config.run.seed,
        "command": sys.argv,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(("offbeat", "torch", "numpy", "gymnasium")),
        "git": _git_commit(),
        "pid": os.getpid(),
    }
    _write(run_dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Write a file in one step: a run killed meanwhile has the old one or the new, never half of one."""
    try:
        files.replace_bytes(path, text.encode())
    except OSError as error:
        raise OffbeatError(
            f"{path} cannot be written: {error}. Free disk space, make it writable or choose another run.dir"
        ) from error


def _recorded_name(directory: Path, config: RunConfig) -> str:
    """The name of a run that is resumed; of a damaged description, what its configuration calls it."""
    try:
        return str(json.loads((directory / "manifest.json").read_bytes())["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{directory / 'manifest.json'} is damaged ({type(error).__name__}: {error})"
        print(f"note: {what}; nothing but the run's name is read from it, going on", file=sys.stderr)
        return config.run.name or config.algorithm.name


def _joined(
    overrides: Mapping[str, object] | Sequence[str] | None, named: Mapping[str, object]
) -> Mapping[str, object] | Sequence[str]:
    if isinstance(overrides, Mapping):
        return {**overrides, **named}
    return [*(overrides or ()), *_as_lines(named)]


def _as_lines(overrides: Mapping[str, object] | Sequence[str]) -> list[str]:
    if isinstance(overrides, Mapping):
        return [f"{key}={value}" for key, value in overrides.items()]
    return list(overrides)


def _name_of(config: RunConfig, recipe: str | Path | RunConfig) -> str:
    return config.run.name or (Path(recipe).stem if isinstance(recipe, str | Path) else config.algorithm.name)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _git_commit() -> str | None:
    """The commit of the directory the run was started in, if it is a git checkout."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None
