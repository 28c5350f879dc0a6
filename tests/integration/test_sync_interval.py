"""Runs that publish weights seldom: killed and resumed, they end where an uninterrupted one does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import offbeat
from tests.conftest import SMALL


def train(directory: Path, **changes: Any) -> Any:
    """A small replay run at k = 0 that publishes every third version."""
    settings = {
        **SMALL,
        "runtime.kind": "inline",
        "algorithm.batch_size": 8,
        "algorithm.buffer_capacity": 32,
        "async_training.off_policy_degree": 0,
        "async_training.weight_sync_interval": 3,
        "checkpoint.interval_rounds": 2,
        "checkpoint.interval_s": None,
        "checkpoint.keep": 9,
        "run.rounds": 8,
        "run.dir": str(directory),
        **changes,
    }
    return offbeat.train("cartpole-ppo-per", overrides=settings)


def test_killed_and_resumed_replay_run_ends_where_the_other_does(tmp_path: Path) -> None:
    whole = train(tmp_path / "run")
    saved = sorted((whole.run_dir / "checkpoints").glob("step_*"))
    assert [path.name for path in saved] == ["step_00000003", "step_00000006", "step_00000008"]
    for path in saved[1:]:  # as if it had been killed in round 5
        shutil.rmtree(path)
    assert offbeat.resume(whole.run_dir).digest == whole.digest
    assert offbeat.replay_run(whole.run_dir).identical


def test_weights_that_are_published_seldom_make_another_run(tmp_path: Path) -> None:
    often = train(tmp_path / "often", **{"async_training.weight_sync_interval": 1})
    seldom = train(tmp_path / "seldom")
    assert often.digest != seldom.digest
