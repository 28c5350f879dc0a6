"""Planners learn a small world within seconds: what they do in large ones is measured, not tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import offbeat

PLACES, LENGTH = 5, 5


class Walk(gymnasium.Env[np.ndarray, np.int64]):
    """Places in a row and a start in the middle; the last step to one of the two ends pays, 1.

    Which end it is can be seen. The way there is two steps of the right kind: the first pays nothing.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 1, (PLACES + 1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._place = self._time = self._goal = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._time = PLACES // 2, 0
        self._goal = (PLACES - 1) * int(self.np_random.integers(2))
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._place += 1 if action else -1
        self._time += 1
        is_there = self._place in (0, PLACES - 1)
        return self._seen(), float(self._place == self._goal), is_there, self._time == LENGTH, {}

    def _seen(self) -> np.ndarray:
        return np.append(np.eye(PLACES, dtype=np.float32)[self._place], np.float32(self._goal > 0))


@pytest.mark.parametrize(
    "recipe", ["cartpole-muzero", pytest.param("cartpole-unizero", marks=pytest.mark.slow)]
)
def test_planners_find_a_way_that_pays_at_its_end(recipe: str, tmp_path: Path) -> None:
    settings = {
        "run.dir": str(tmp_path / "run"),
        "run.rounds": 60,
        "runtime.kind": "inline",
        "env.id": f"{__name__}:Walk",
        "env.num_envs": 16,
        "algorithm.num_steps": 4,
        "algorithm.discount": 0.8,  # soon is better
        "algorithm.td_steps": 2,
        "algorithm.lr": 3e-3,
        "algorithm.lr_schedule": "constant",
        "algorithm.batch_size": 32,
        "algorithm.replay_ratio": 0.15,
        "algorithm.network.latent": 16,
        "algorithm.network.hidden": 32,
        "algorithm.search.num_simulations": 8,
        "async_training.enable_async_eval": False,
        "eval.interval_rounds": None,
        "observe.console": "none",
        "observe.tensorboard": False,
    }
    result = offbeat.train(recipe, overrides=settings, seed=1)
    assert result.eval_return == 1.0, "every episode; who does not look goes the right way in half of them"
