"""Shared fixtures: small runs that take a fraction of a second."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # where threads share a core, spinning ones take it all
os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".numba_cache"))  # kernels are compiled once for all
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as is the package, for the many processes of tests
sys.dont_write_bytecode = False

SMALL = {
    "env.num_envs": 8,
    "algorithm.num_steps": 16,
    "algorithm.num_epochs": 2,
    "algorithm.minibatch_size": 64,
    "run.rounds": 6,
    "eval.episodes": 2,
    "eval.num_envs": 2,
    "observe.console": "none",
    "observe.tensorboard": False,
}


def pytest_configure() -> None:
    """Hear SIGHUP under nohup, too: commands that tests start inherit what is ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def group_of(nodeid: str) -> str:
    """The tests that a test stays together with: those of its file, which share fixtures; all of Ray's.

    Those of the net share nothing: they go wherever there is room.
    """
    if re.search(r"[_[]ray(_|]|$|\.py)", nodeid) and not nodeid.startswith("tests/unit/"):
        return "ray"
    return nodeid if nodeid.startswith("tests/net/") else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide the tests by groups; the marks of pytest-xdist 3.8 are lost on pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection of garbage: that is nearly all objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_run(tmp_path: Path) -> Callable[..., Any]:
    """Train a small CartPole run; keyword ``name`` is its directory, the rest are overrides."""
    import offbeat

    def run(overrides: dict[str, Any] | None = None, name: str = "run", **options: Any) -> Any:
        settings = {**SMALL, "run.dir": str(tmp_path / name), **(overrides or {})}
        return offbeat.train("cartpole-ppo", overrides=settings, **options)

    return run


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """One Ray for the runs of a module: each uses it and leaves it alone."""
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest) -> Any:
    """Whatever a test starts has to be gone when it ends. Unit tests start no workers."""
    if (ROOT / "tests" / "unit") in request.path.parents:
        yield
        return
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    workers = [child for child in left if is_worker(child)]
    for child in workers:
        child.kill()
    assert not workers, f"worker processes were left behind: {workers}"


def is_worker(process: psutil.Process) -> bool:
    """Whether this is a worker process of a run, and not merely the remains of one."""
    try:
        return "offbeat.runtime.worker" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
