"""A run that is killed while a checkpoint is written beside its rounds: a whole one is always there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from offbeat import PerWorker, Pipeline
from offbeat.checkpoint import CheckpointManager
from offbeat.config.models import CheckpointConfig
from offbeat.config.settings import Settings
from offbeat.observe.events import read_events

SIZE = 4_000_000
ROUNDS = 100_000
PATIENCE_S = 60.0


class Learner:
    """Its arrays hold the number of rounds, everywhere."""

    def __init__(self, context: Any) -> None:
        self.w, self.mean = np.zeros(SIZE), np.zeros(SIZE // 2)

    def train(self, batch: Any) -> dict[str, float]:
        self.w += 1.0
        self.mean += 1.0
        return {}

    def weights(self) -> Any:
        return {"w": self.w.copy()}

    def state_dict(self) -> Any:
        return {"w": self.w, "mean": self.mean}

    def load_state_dict(self, state: Any) -> None:
        self.w[:], self.mean[:] = state["w"], state["mean"]


def collect(ticket: Any, weights: Any) -> Any:
    time.sleep(0.005)
    return {"x": np.ones(2)}


def pipeline(run_dir: Path) -> Pipeline:
    return Pipeline(
        collect=collect,
        train=PerWorker(Learner),
        runtime="threads",
        num_workers=1,
        off_policy_degree=1,
        run_dir=run_dir,
        settings=Settings(checkpoint=CheckpointConfig(interval_rounds=3)),
    )


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    give_up_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < give_up_s and process.poll() is None
        time.sleep(0.002)
    return found


def newest(directory: Path) -> int:
    return max(CheckpointManager(directory).versions(), default=-1)


def killed_in_a_write(run_dir: Path, share: float) -> tuple[Collection[int], int]:
    """Run until a write that is not the first has taken this share of its time, and kill the run.

    Returns the versions that were there before, and the one that was being written.
    """
    code = f"from {__name__} import *; pipeline(Path({str(run_dir)!r})).run({ROUNDS})"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    saved, checkpoints = run_dir / "events.jsonl", run_dir / "checkpoints"
    try:
        wait_until(lambda: checkpoints.is_dir() and newest(checkpoints) > 0, process)
        records = wait_until(
            lambda: [one for one in read_events(saved) if one["kind"] == "checkpoint"], process
        )
        (writing,) = wait_until(lambda: list(checkpoints.glob(".writing-*")), process)
        before = CheckpointManager(checkpoints).versions()
        time.sleep(share * records[-1]["seconds"])
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    return before, int(writing.name.rpartition("_")[2])


def check(run_dir: Path, before: Collection[int], version: int) -> bool:
    """The version that was being written is there, whole, or those before it are; return which."""
    saved = CheckpointManager(run_dir / "checkpoints").load()
    assert saved.warnings == ()
    assert saved.version in before or saved.version >= version
    for array in (saved.parts["learner"]["w"], saved.parts["learner"]["mean"], saved.weights["w"]):
        assert np.unique(array).tolist() == [saved.version]
    assert pipeline(run_dir).resume(saved.version + 2).version == saved.version + 2
    names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert all(name.startswith("step_") for name in names), names
    return saved.version >= version


@pytest.mark.parametrize("share", [0.1, 0.7])
def test_run_killed_in_a_write_goes_on_from_a_whole_checkpoint(share: float, tmp_path: Path) -> None:
    check(tmp_path, *killed_in_a_write(tmp_path, share))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_killed_at_ten_random_moments_of_a_write_always_goes_on(tmp_path: Path) -> None:
    rng, was_newer = Random(7), []
    for number in range(10):
        run_dir = tmp_path / f"{number}"
        was_newer.append(check(run_dir, *killed_in_a_write(run_dir, rng.uniform(0.0, 1.1))))
    assert not all(was_newer), "some were killed before the end of the write"
