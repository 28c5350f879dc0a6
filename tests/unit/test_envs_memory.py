"""The memory task: solvable with the cue, a coin toss without."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from offbeat.config.models import EnvConfig
from offbeat.envs import make_world


def play(vectorize: str, remembers: bool, num_cues: int = 2, length: int = 3) -> tuple[float, int]:
    """Mean return of a policy that answers with the cue, or always with 0, and the number of episodes."""
    config = EnvConfig(
        id="offbeat/Memory-v0", vectorize=vectorize, kwargs={"length": length, "num_cues": num_cues}
    )
    world = make_world(config, 16)
    obs = world.reset(0)
    cues = np.zeros(16, np.int64)
    total, num_episodes = 0.0, 0
    for _ in range(50 * (length + 3)):
        shown = obs[:, -2] == 1
        cues[shown] = obs[shown, :num_cues].argmax(axis=1)
        step = world.step(cues if remembers else np.zeros(16, np.int64))
        assert not step.rewards[~step.terminated].any()
        total += step.rewards.sum()
        num_episodes += int(step.terminated.sum())
        obs = step.obs
    return total / num_episodes, num_episodes


@pytest.mark.parametrize("vectorize", ["loop", "vector"])
@pytest.mark.parametrize("num_cues", [2, 4])
def test_memory_decides(vectorize: str, num_cues: int) -> None:
    assert play(vectorize, True, num_cues) == (1.0, 800)
    mean, _ = play(vectorize, False, num_cues)
    assert abs(mean - 1 / num_cues) < 0.07


@pytest.mark.parametrize("vectorize", ["loop", "vector"])
def test_an_episode_shows_cue_noise_and_question(vectorize: str) -> None:
    config = EnvConfig(id="offbeat/Memory-v0", vectorize=vectorize, kwargs={"length": 2, "noise": 0.1})
    world = make_world(config, 2)
    rows = [world.reset(1), *(world.step(np.zeros(2, np.int64)).obs for _ in range(5))]
    flags = [row[:, 2:].tolist() for row in rows]
    assert flags == [[f, f] for f in ([1, 0], [0, 0], [0, 0], [0, 1], [0, 0], [1, 0])]
    for cue in (rows[0], rows[5]):
        assert sorted(cue[0, :2]) == [0, 1]
    assert all(0 < np.abs(row[:, :2]).max() < 0.6 for row in rows[1:4])


def test_the_single_task_passes_gymnasiums_own_checks() -> None:
    check_env(gymnasium.make("offbeat/Memory-v0").unwrapped, skip_render_check=True)
