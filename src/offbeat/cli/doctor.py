"""``offbeat doctor``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offbeat.cli.output import EXIT_FAILED, JsonFlag, reporting, show_table
from offbeat.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from offbeat.config.models import EnvConfig

Play = tuple[Callable[[int], object], Callable[[], None]]
"""Return ``(step, close)`` of environments driven by random actions; ``step(n)`` takes the n-th step."""

_EXTRAS = {
    "box2d": "box2d",
    "minatar": "minatar",
    "minigrid": "minigrid",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "ray": "ray",
    "numba": "numba",
    "marl": "lbforaging",
    "video": "imageio-ffmpeg",
    "llm": "tokenizers",
    "gguf": "gguf",
}
_TORCH_PROBE = "import torch; print(torch.__version__, torch.get_num_threads(), torch.cuda.is_available())"
_PROBE_TIMEOUT_S = 120
_LEAST_MEMORY_BYTES = 2**30
_LEAST_OPEN_FILES = 1024
_GIB = 2**30
_WIDE = 32
_MEASURE_S = 0.3
_CHEAP_US, _EXPENSIVE_US = 20.0, 1000.0


Status = Literal["ok", "missing", "warning", "failed"]
"""``missing``: not installed, and needed by some only."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the doctor looked at. Example: ``Finding("cores", "ok", "2 usable of 2")``."""

    name: str
    status: Status
    text: str


def doctor(
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ID|RECIPE|FILE", help="Measure a step of this environment, or of a recipe's or a file's."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine and what is installed."""
    with reporting(as_json) as report:
        findings = list(examine())
        if env is not None:
            try:
                findings += measure_env(_env_config(env))
            except EnvError as error:
                raise ConfigError(f"--env {env}: {error}") from error
        marks = {"ok": "", "missing": "", "warning": "WARNING: ", "failed": "FAILED: "}
        show_table("offbeat doctor", {one.name: marks[one.status] + one.text for one in findings})
        report.values["findings"] = [
            {"name": one.name, "status": one.status, "text": one.text} for one in findings
        ]
        report.exit_code = EXIT_FAILED if any(one.status == "failed" for one in findings) else 0


def examine() -> Iterator[Finding]:
    """Look at everything that needs no environment."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield _torch()
    version = _version("gymnasium")
    yield Finding("gymnasium", "ok" if version else "failed", version or "not installed")
    yield _cores()
    yield _memory()
    yield _open_files()
    for extra, package in _EXTRAS.items():
        version, name = _version(package), "" if package == extra else f"{package} "
        if version is not None:
            yield Finding(extra, "ok", f"{name}{version}")
        else:
            yield Finding(extra, "missing", f"{name}not installed: pip install 'offbeat[{extra}]'")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Finding:
    # In a process of its own: a broken installation may crash the interpreter, not only raise.
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("torch", "failed", f"did not import within {_PROBE_TIMEOUT_S} s")
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        return Finding("torch", "failed", f"cannot be imported: {last}")
    version, threads, has_cuda = probe.stdout.split()
    variable = os.environ.get("OMP_NUM_THREADS", "not set")
    device = "CUDA" if has_cuda == "True" else "CPU only"
    text = f"{version}, {device}, threads by default: {threads} (OMP_NUM_THREADS {variable});"
    return Finding("torch", "ok", f"{text} runs use runtime.torch_threads")


def _cores() -> Finding:
    from offbeat.config.checks import usable_cores

    usable = usable_cores()
    text = f"{usable} usable of {os.cpu_count()}"
    if usable == 1:
        return Finding(
            "cores", "warning", f"{text}: collectors and learner will take turns, async gains nothing"
        )
    return Finding("cores", "ok", f"{text}: about {usable - 1} for collectors beside the learner")


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB"
    if memory.available < _LEAST_MEMORY_BYTES:
        needs = (
            "each process that imports torch needs about 0.3 GiB, and segments in flight live in memory too"
        )
        return Finding("memory", "warning", f"{text}: {needs}")
    return Finding("memory", "ok", text)


def _open_files() -> Finding:
    try:
        import resource
    except ImportError:  # not on every system
        return Finding("open files", "ok", "no limit known on this system")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "not limited")
    if limit < _LEAST_OPEN_FILES:
        remedy = f"workers and segments in flight need some each; `ulimit -n {_LEAST_OPEN_FILES}` raises it"
        return Finding("open files", "warning", f"at most {limit}: {remedy}")
    return Finding("open files", "ok", f"at most {limit}")


def _env_config(name: str) -> EnvConfig:
    """Return the settings of an environment: those of a recipe or file, or of an id."""
    import offbeat
    from offbeat.config.models import EnvConfig
    from offbeat.config.recipes import RecipeBook

    if name.endswith((".yaml", ".yml")) or name in RecipeBook().names():
        return offbeat.load_config(name).env
    return EnvConfig(id=name)


def measure_env(config: EnvConfig) -> Iterator[Finding]:
    """Time one environment and a batch of them, and advise on workers."""
    from offbeat.config.checks import usable_cores

    alone_us = step_cost_us(config, 1)
    wide_us = step_cost_us(config, _WIDE) / _WIDE
    text = (
        f"{alone_us:.0f} us a step alone, {wide_us:.1f} us per environment when {_WIDE} are stepped together"
    )
    yield Finding(config.id, "ok", text)
    yield Finding("advice", "ok", advice(wide_us, usable_cores()))


def step_cost_us(config: EnvConfig, num_envs: int) -> float:
    """Microseconds of one step of ``num_envs`` environments together, by random actions."""
    take_step, close = random_play(config.model_copy(update={"num_envs": num_envs}))
    steps, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < _MEASURE_S:
        take_step(steps)
        steps += 1
    close()
    return spent / steps * 1e6


def random_play(config: EnvConfig) -> Play:
    """Reset environments with one agent or with several, whichever they are, to be played at random."""
    try:
        return _random_world(config)
    except EnvError:
        with contextlib.suppress(EnvError):
            return _random_team(config)
        raise


def _random_world(config: EnvConfig) -> Play:
    import numpy as np

    from offbeat.envs import make_world

    world = make_world(config, config.num_envs)
    world.reset(0)
    space = world.single_action_space
    space.seed(0)
    choices = [np.stack([space.sample() for _ in range(config.num_envs)]) for _ in range(64)]
    return lambda step: world.step(choices[step % len(choices)]), world.close


def _random_team(config: EnvConfig) -> Play:
    import numpy as np

    from offbeat.envs.teams import make_team, random_actions

    team, rng = make_team(config, config.num_envs), np.random.default_rng(0)
    view = team.reset(0)
    choices = [random_actions(team, view, rng) for _ in range(64)]

    def take_step(step: int) -> None:
        nonlocal view
        actions = random_actions(team, view, rng) if team.has_legal else choices[step % len(choices)]
        view = team.step(actions).view

    return take_step, team.close


def advice(step_us: float, cores: int) -> str:
    """Say which runtime fits environments that cost ``step_us`` microseconds a step each.

    A hop between processes costs 20 to 50 us, so what a worker does between two hops must be worth it.
    """
    workers = max(1, cores - 1)
    if step_us < _CHEAP_US:
        return (
            "cheap steps: few wide workers (runtime.num_workers=1 or 2, env.num_envs=64 or more), to spread"
            " the 20-50 us of a hop between processes over many steps; the learner will be the bottleneck"
        )
    if step_us > _EXPENSIVE_US:
        return (
            f"expensive steps: runtime.kind=processes, runtime.num_workers={workers} (one per free core),"
            " off_policy_degree 1 or more, so that the learner does not wait for the slowest"
        )
    return (
        f"middling steps: runtime.kind=processes, runtime.num_workers={workers},"
        " and 8 or more environments for each"
    )
