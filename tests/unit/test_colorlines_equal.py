"""The compiled games and the plain ones are the same games, step by step and bit for bit."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest

from offbeat.envs.colorlines import ENV_ID
from offbeat.envs.colorlines.baselines import LongestLine, RandomMoves
from offbeat.envs.colorlines.vector import ColorLinesVectorEnv
from tests.unit.colorlines_boards import Table, action, cells

LANES = 25
KINDS = list(itertools.product(("classic", "seed"), ("score", "seed", "shaped")))


class Mix:
    """Plays legal moves at random, the longest row, or anything at all, so that every rule comes up."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._random, self._greedy = RandomMoves(seed), LongestLine(seed)

    def act(self, obs: np.ndarray) -> np.ndarray:
        kind = self._rng.random(len(obs))
        actions = np.where(kind < 0.4, self._random.act(obs), self._greedy.act(obs))
        return np.where(kind < 0.05, self._rng.integers(6561, size=len(obs)), actions)


def compare(rules: str, reward: str, num_games: int, seed: int, max_steps: int) -> dict[str, int]:
    """Play games in both versions and compare everything they return; count what happened."""
    kwargs = {"rules": rules, "reward": reward, "gamma": 0.97}
    compiled = ColorLinesVectorEnv(LANES, max_episode_steps=max_steps, **kwargs)
    plain = [gymnasium.make(ENV_ID, max_episode_steps=max_steps, **kwargs) for _ in range(LANES)]
    player = Mix(seed)
    obs, _ = compiled.reset(seed=seed)
    for lane, env in enumerate(plain):
        assert np.array_equal(env.reset(seed=seed + lane)[0], obs[lane])
    ended = np.zeros(LANES, np.bool_)
    seen = dict.fromkeys(("games", "terminated", "truncated", "illegal", "cleared", "steps"), 0)
    while seen["games"] < num_games:
        actions = player.act(obs)
        obs, rewards, terminated, truncated, infos = compiled.step(actions)
        for lane, env in enumerate(plain):
            if ended[lane]:
                one = (env.reset()[0], 0.0, False, False, {"score": 0, "cleared": 0, "illegal": False})
            else:
                one = env.step(int(actions[lane]))
            assert np.array_equal(one[0], obs[lane])
            assert one[1:4] == (rewards[lane], terminated[lane], truncated[lane])
            assert one[4] == {key: infos[key][lane] for key in ("score", "cleared", "illegal")}
        ended = terminated | truncated
        seen["games"] += int(ended.sum())
        seen["terminated"] += int(terminated.sum())
        seen["truncated"] += int(truncated.sum())
        seen["illegal"] += int(infos["illegal"].sum())
        seen["cleared"] += int((infos["cleared"] > 0).sum())
        seen["steps"] += LANES
    return seen


@pytest.mark.parametrize(("rules", "reward"), KINDS)
def test_fifty_games_of_each_kind_are_equal(rules: str, reward: str) -> None:
    seen = compare(rules, reward, num_games=50, seed=100, max_steps=40)
    assert all(seen.values()), seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rules", "reward"), KINDS)
def test_ten_thousand_games_are_equal(rules: str, reward: str) -> None:
    max_steps = 200 if rules == "seed" else 1000
    seen = compare(rules, reward, num_games=10_000 // len(KINDS) + 1, seed=1, max_steps=max_steps)
    assert all(count for name, count in seen.items() if name != "truncated"), seen


def test_a_sequence_of_seeds_gives_each_game_its_own() -> None:
    seeds = [7, 3, 2**64 - 1]
    env = ColorLinesVectorEnv(3)
    obs, _ = env.reset(seed=seeds)
    for seed, row in zip(seeds, obs, strict=True):
        single = gymnasium.make(ENV_ID)
        assert np.array_equal(single.reset(seed=seed)[0], row)


def test_a_drop_that_empties_the_board_is_followed_by_another() -> None:
    # Two red balls, and three that fall into line with them: about five in a hundred thousand games.
    env = ColorLinesVectorEnv(100_000)
    env.reset(seed=0)
    board = [*cells("......... ......... ......... ......... ...RR...."), 1, 1, 1]
    env._obs[:] = board
    move = action("e4 e6")
    obs, rewards, *_, infos = env.step(np.full(100_000, move))
    lanes = np.flatnonzero(infos["cleared"])
    assert 0 < len(lanes) < 50
    for lane in lanes.tolist():
        assert rewards[lane] == 10 and infos["cleared"][lane] == 5
        assert np.count_nonzero(obs[lane, :81]) == 3
        single = Table("plain", "")
        single.env.reset(seed=lane)
        single.put("......... ......... ......... ......... ...RR....", "RRR")
        assert np.array_equal(single.move("e4 e6")[0], obs[lane])
