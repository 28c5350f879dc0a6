"""How a run is started: checked, described in its directory, made into a pipeline, and opened."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from offbeat import algorithms
from offbeat.checkpoint import CheckpointManager, files
from offbeat.config import loader, short
from offbeat.config.loader import dump_yaml
from offbeat.config.models import RunConfig
from offbeat.errors import CheckpointError, ConfigError, EnvError, OffbeatError
from offbeat.lanes import Loss
from offbeat.observe.callbacks import Callback, RoundInfo, RunControl, RunInfo, RunSummary
from offbeat.observe.sinks import check_sinks
from offbeat.pipeline import Pipeline, Report, Settings
from offbeat.roles import Learner, PerWorker, WorkerContext
from offbeat.running import OpenRun

if TYPE_CHECKING:
    from offbeat.algorithms.base import Policy, Roles

Overrides = Mapping[str, object] | Sequence[str]
"""Settings by dotted key: a mapping, or ``key=value`` strings."""

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
UNTIL = "config-until-{}.yaml"
"""What the settings are called that a run had until a version."""


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


@dataclass(frozen=True, slots=True)
class Start:
    """A run that can begin: its settings, its directory, and whether it goes on with what is there.

    ``is_new``: the directory was made for it, and is removed should the run be refused.
    """

    config: RunConfig
    run_dir: Path
    name: str
    resumed: bool = False
    is_new: bool = False


def start_anew(recipe: str | Path | RunConfig, overrides: Overrides, config: RunConfig) -> Start:
    """Try out what only a try can tell, and make the run's directory; ``config`` is what was loaded."""
    _try_out(config)
    name = _name_of(config, recipe)
    is_new = config.run.dir is None or not Path(config.run.dir).exists()
    run_dir = _make_run_dir(config, name)
    _write_description(run_dir, config, recipe, overrides)
    return Start(config, run_dir, name, is_new=is_new)


def start_again(run_dir: str | Path, overrides: Overrides, config: RunConfig) -> Start:
    """Check a run that is to go on; ``config`` are its settings with the overrides, which stay with it."""
    directory = existing(run_dir)
    _check_ranks(config)
    check_sinks(config.observe)
    if overrides:
        _check_eval_env(config)
        _change_config(directory, config, overrides)
    return Start(config, directory, _recorded_name(directory, config), resumed=True)


def load(source: str | Path | RunConfig, overrides: Overrides = ()) -> RunConfig:
    """Load and check a configuration, as ``offbeat.load_config``."""
    return loader.load_config(
        source, overrides, algorithm_model=algorithms.config_model, algorithms=algorithms.BUILTIN
    )


def load_again(run_dir: str | Path, overrides: Overrides) -> RunConfig:
    """The settings of a run that is to go on, with overrides that may change on the way."""
    path = existing(run_dir) / "config.yaml"
    if overrides:
        _check_resumable(overrides, load(path))
    return load(path, overrides)


def _change_config(directory: Path, config: RunConfig, overrides: Overrides) -> None:
    """Write the settings that hold from now on, and keep those that held until the newest checkpoint."""
    manager = CheckpointManager(directory / "checkpoints")
    version = manager.load().version if manager.versions() else 0
    for path in directory.glob(UNTIL.format("*")):
        if until_version(path) >= version:
            path.unlink()  # of rounds that are trained again
    before = (directory / "config.yaml").read_text()
    if version > 0:
        _write(directory / UNTIL.format(f"{version:08d}"), before)
    lines = [f"# resumed at version {version} with {line}" for line in as_lines(overrides)]
    _write(directory / "config.yaml", "\n".join(lines) + "\n" + dump_yaml(config))
    _write(directory / "resolved.yaml", dump_yaml(config.resolved()))


# ---------------------------------------------------------------- running


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that goes, and the signals that asked it to end."""

    start: Start
    run: OpenRun
    signals: list[str]

    def result(self, report: Report) -> Result:
        """How the run ended, with its policy."""
        return Result(
            run_dir=self.start.run_dir,
            reason=report.reason,
            rounds=report.version,
            digest=report.digest or "",
            metrics=report.metrics,
            eval_return=report.eval_metrics.get("eval/return_mean"),
            wall_s=report.wall_s,
            env_steps=report.env_steps,
            steps_per_s=report.steps_per_s,
            max_staleness=report.max_staleness,
            interrupted=bool(self.signals),
            policy=make_roles(self.start.config).policy(report.weights),
            losses=report.losses,
            restarts=report.restarts,
        )


@contextlib.contextmanager
def opened(start: Start, callbacks: Sequence[Callback], *, stepwise: bool = False) -> Iterator[Opened]:
    """Begin a run; leaving the block ends it."""
    config = start.config
    was_reached = _had_reached(start.run_dir, config) if start.resumed else False
    goal = _StopAtReturn(config.run.stop_return, was_reached)
    notices = () if start.resumed else _facts(config)
    everybody = (*callbacks, goal, _EarlierSettings(start.run_dir))
    pipeline = make_pipeline(config, start.run_dir, start.name, everybody, notices)
    run = pipeline.open(config.run.rounds, resumed=start.resumed, stepwise=stepwise)
    with few_threads(config), _stopping_on_signals(pipeline) as signals, run:
        yield Opened(start, run, signals)


@contextlib.contextmanager
def without_trace(start: Start) -> Iterator[None]:
    """Remove the directory of a new run that is refused in the block, before it has saved anything."""
    try:
        yield
    except ConfigError:
        if start.is_new and not (start.run_dir / "checkpoints").exists():
            shutil.rmtree(start.run_dir, ignore_errors=True)
        raise


def _facts(config: RunConfig) -> list[str]:
    """What the algorithm has to say before a run."""
    tell = algorithms.find(config.algorithm.name).facts
    return [f"{name}: {text}" for name, text in tell(config).items()] if tell is not None else []


def make_pipeline(
    config: RunConfig,
    run_dir: Path | None,
    name: str,
    callbacks: Sequence[Callback],
    notices: Sequence[str] = (),
) -> Pipeline:
    """The pipeline of a configuration."""
    roles = make_roles(config)
    about = RunSummary(
        name, config.algorithm.name, config.env.id, "", 0, 0, 0, stop_return=config.run.stop_return
    )
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
        summary=about,
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
        later = [
            path for path in self._run_dir.glob(UNTIL.format("*")) if until_version(path) > info.resumed_from
        ]
        for path in sorted(later)[1:]:
            path.unlink()  # of rounds that are trained again
        for path in sorted(later)[:1]:
            path.replace(self._run_dir / UNTIL.format(f"{info.resumed_from:08d}"))


def until_version(path: Path) -> int:
    """The version that settings of a file called `UNTIL` held until."""
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
    check_sinks(config.observe)
    check = algorithms.find(config.algorithm.name).check
    try:
        if check is not None:
            check(config)
    except EnvError as error:
        raise ConfigError(str(error)) from error
    _check_eval_env(config)


def _check_eval_env(config: RunConfig) -> None:
    from offbeat.envs.judged import check_eval_env

    look = algorithms.find(config.algorithm.name).look
    try:
        if look is not None:
            check_eval_env(config, look)
    except EnvError as error:
        raise ConfigError(str(error)) from error


def _check_ranks(config: RunConfig) -> None:
    if config.learner.num_ranks > 1 and not make_roles(config).data_parallel:
        raise ConfigError(
            f"learner.num_ranks is {config.learner.num_ranks}, but the algorithm {config.algorithm.name!r} "
            "does not train in several processes (Roles.data_parallel): set learner.num_ranks to 1"
        )


def make_roles(config: RunConfig) -> Roles:
    """The roles that the algorithm of a configuration makes."""
    return algorithms.find(config.algorithm.name).build(config)


@dataclass(frozen=True, slots=True)
class _MakeLearner:
    """Makes the learner where it is to live, with the threads it is to have."""

    config: RunConfig

    def __call__(self, context: WorkerContext) -> Learner:
        learner = make_roles(self.config).learner(context.ranks)
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(self.config.runtime.torch_threads)
        return learner


@contextlib.contextmanager
def few_threads(config: RunConfig) -> Iterator[None]:
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


def existing(run_dir: str | Path) -> Path:
    """The directory of a run that is there."""
    directory = Path(run_dir)
    if not (directory / "manifest.json").exists():
        raise CheckpointError(f"{directory} is not a run directory: it has no manifest.json")
    return directory


def _check_resumable(overrides: Overrides, config: RunConfig) -> None:
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
    chosen: Overrides,
) -> None:
    """Write what was asked for, what it resolved to, and with which versions it runs."""
    source = recipe if isinstance(recipe, str | Path) else "a RunConfig"
    given = [f"# from {source}", *(f"# with {line}" for line in as_lines(chosen))]
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


def joined(overrides: Overrides | None, named: Mapping[str, object]) -> Overrides:
    """Overrides with arguments of a call laid over them, those that are not None."""
    given = {key: value for key, value in named.items() if value is not None}
    if isinstance(overrides, Mapping):
        return {**overrides, **given}
    return [*(overrides or ()), *as_lines(given)]


def as_lines(overrides: Overrides) -> list[str]:
    """Overrides as ``key=value``."""
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
