"""The rules of Connect Four against a slow reference, its two versions against each other, its state."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
from offbeat.envs.connect4 import ENV_ID, kernels, rendering, rules
from offbeat.envs.connect4.env import Columns, Connect4Env
from offbeat.envs.connect4.vector import Connect4VectorEnv
from offbeat.envs.loop import LoopWorld
from offbeat.envs.vector import VectorWorld
from offbeat.errors import EnvError
from tests.unit.test_envs_snapshot import through_json

LANES = 32
PLACES = list(itertools.product(range(6), range(7)))
STEPS = {"row": (0, 1), "column": (1, 0), "diagonal": (1, 1), "other diagonal": (1, -1)}
DRAWN = [int(column) for column in "555054466351352123041430222100021613443666"]
"""A game of 42 stones without four in a line."""


LINES = [
    [(row + i * down, column + i * right) for i in range(4)]
    for down, right in STEPS.values()
    for row, column in PLACES
    if 0 <= row + 3 * down < 6 and 0 <= column + 3 * right < 7
]
LINES_THROUGH = {place: [line for line in LINES if place in line] for place in PLACES}


class SlowGame:
    """The rules by hand: a board of letters, and every place where four could lie."""

    def __init__(self) -> None:
        self.board = dict.fromkeys(PLACES, ".")
        self.num_plies = 0
        self.winner = ""

    def legal(self) -> list[bool]:
        return [self.board[5, column] == "." for column in range(7)]

    def drop(self, column: int) -> None:
        row = min(row for row in range(6) if self.board[row, column] == ".")
        player = "XO"[self.num_plies % 2]
        self.board[row, column] = player
        self.num_plies += 1
        if any(all(self.board[place] == player for place in line) for line in LINES_THROUGH[row, column]):
            self.winner = player

    def planes(self) -> np.ndarray:
        own, other = "XO" if self.num_plies % 2 == 0 else "OX"
        rows = [[self.board[row, column] for column in range(7)] for row in reversed(range(6))]
        letters = np.array(rows)
        return np.stack([letters == own, letters == other, np.full((6, 7), own == "X")]).astype(np.float32)


def bits(places: list[tuple[int, int]]) -> int:
    return sum(1 << (7 * column + row) for row, column in places)


def random_columns(legal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Any legal column ``[N]`` of each row of ``legal`` ``[N, 7]``."""
    return (legal * rng.random(legal.shape)).argmax(axis=-1)


# ---------------------------------------------------------------- the rules


def test_there_are_69_places_for_four() -> None:
    assert len(LINES) == 24 + 21 + 12 + 12
    assert bits(PLACES) == rules.BOARD
    assert bits([(0, column) for column in range(7)]) == rules.BOTTOM


@pytest.mark.parametrize("has_four", [rules.has_four, kernels.has_four], ids=["plain", "compiled"])
def test_each_line_of_four_wins_and_no_three_of_it(has_four) -> None:
    for line in LINES:
        assert has_four(bits(line))
        assert has_four(bits(line) | rules.BOTTOM)
        for left_out in range(4):
            assert not has_four(bits(line[:left_out] + line[left_out + 1 :]))


@pytest.mark.parametrize("has_four", [rules.has_four, kernels.has_four], ids=["plain", "compiled"])
def test_lines_do_not_run_on_around_the_edges(has_four) -> None:
    # Cells that follow each other in the bits, or would on a board without a row to part the columns.
    for stride in (6, 7):
        for step, start in itertools.product((1, stride - 1, stride, stride + 1), range(42)):
            cells = [start + i * step for i in range(4)]
            if cells[-1] >= 42:
                continue
            places = [(cell % stride, cell // stride) for cell in cells]
            if any(row >= 6 for row, _ in places):
                continue
            rows, columns = ([b - a for a, b in itertools.pairwise(values)] for values in zip(*places))
            is_line = len(set(rows)) == len(set(columns)) == 1 and abs(rows[0]) <= 1 and columns[0] <= 1
            assert bool(has_four(bits(places))) == is_line, places
    for column in range(6):
        top, bottom = [(4, column), (5, column)], [(0, column + 1), (1, column + 1)]
        assert not has_four(bits(top + bottom))
        assert not has_four(bits([*top, (3, column), *bottom[:1]]))


@pytest.mark.parametrize("has_four", [rules.has_four, kernels.has_four], ids=["plain", "compiled"])
def test_random_stones_have_four_where_the_reference_finds_it(has_four) -> None:
    rng = np.random.default_rng(0)
    found = 0
    for density in np.linspace(0.1, 0.7, 3000):
        places = [place for place in PLACES if rng.random() < density]
        expected = any(set(line) <= set(places) for line in LINES)
        assert bool(has_four(bits(places))) == expected
        found += expected
    assert 500 < found < 2500


def test_stones_fall_on_what_lies_in_the_column() -> None:
    game = rules.Game()
    for row in range(6):
        assert 3 in game.open_columns()
        assert rules.landing(game.stones[0] | game.stones[1], 3) == bits([(row, 3)])
        assert kernels.landing_cells(game.stones[0] | game.stones[1]) & bits([(row, 3)])
        game.play(3)
    assert game.open_columns() == [0, 1, 2, 4, 5, 6]
    assert game.stones == [bits([(0, 3), (2, 3), (4, 3)]), bits([(1, 3), (3, 3), (5, 3)])]


def test_hundreds_of_random_games_go_as_in_the_reference() -> None:
    rng = np.random.default_rng(1)
    env = Connect4VectorEnv(LANES)
    obs, infos = env.reset(seed=0)
    slow, plain = [SlowGame() for _ in range(LANES)], [rules.Game() for _ in range(LANES)]
    ended, results = np.zeros(LANES, np.bool_), {"X": 0, "O": 0, "": 0}
    while sum(results.values()) < 500:
        actions = random_columns(infos["action_mask"], rng)
        obs, rewards, terminated, truncated, infos = env.step(actions)
        assert not truncated.any() and not infos["illegal"].any()
        for lane in range(LANES):
            if ended[lane]:
                slow[lane], plain[lane] = SlowGame(), rules.Game()
                assert (rewards[lane], terminated[lane]) == (0.0, False)
            else:
                slow[lane].drop(actions[lane])
                winner = slow[lane].winner
                assert plain[lane].play(actions[lane]) == bool(winner)
                assert rewards[lane] == bool(winner)
                assert terminated[lane] == (bool(winner) or slow[lane].num_plies == 42)
                assert plain[lane].is_full == (slow[lane].num_plies == 42)
                if terminated[lane]:
                    results[winner] += 1
            assert obs[lane].tobytes() == slow[lane].planes().tobytes()
            assert infos["to_play"][lane] == slow[lane].num_plies % 2 == plain[lane].to_play
            legal = slow[lane].legal()
            assert np.flatnonzero(legal).tolist() == plain[lane].open_columns()
            assert infos["action_mask"][lane].tolist() == (legal if any(legal) else [True] * 7)
        assert np.array_equal(env.action_masks(), infos["action_mask"])
        assert np.array_equal(env.single_action_space.legal(obs), infos["action_mask"])
        assert np.array_equal(env.to_play, infos["to_play"])
        ended = terminated
    assert all(results.values()), results


@pytest.mark.parametrize("kind", ["plain", "vector"])
def test_a_full_board_without_four_is_drawn(kind: str) -> None:
    table = Table(kind)
    table.reset(seed=0)
    for column in DRAWN[:-1]:
        _, reward, terminated, _ = table.step(column)
        assert reward == 0 and not terminated
    obs, reward, terminated, info = table.step(DRAWN[-1])
    assert reward == 0 and terminated
    assert obs[:2].sum() == 42 and obs[2].min() == 1
    assert info["action_mask"].tolist() == [1] * 7, "whoever chooses needs something to choose"


def test_the_last_stone_can_win() -> None:
    # Swapping stones of the drawn game would change the rest; a search over random games finds such an end.
    rng = np.random.default_rng(0)
    env = Connect4VectorEnv(4096)
    _, infos = env.reset(seed=0)
    wins = 0
    for _ in range(120):
        obs, rewards, terminated, _, infos = env.step(random_columns(infos["action_mask"], rng))
        full = obs[:, :2].sum(axis=(1, 2, 3)) == 42
        assert terminated[full].all()
        wins += int(rewards[full].sum())
    assert wins > 0


# ---------------------------------------------------------------- both versions


class Table:
    """One game in either version, with the same calls."""

    def __init__(self, kind: str, **kwargs) -> None:
        self.is_plain = kind == "plain"
        self.env = Connect4Env(**kwargs) if self.is_plain else Connect4VectorEnv(1, **kwargs)

    def reset(self, seed: int | None) -> np.ndarray:
        obs = self.env.reset(seed=seed)[0]
        return obs if self.is_plain else obs[0]

    def step(self, column: int):
        if self.is_plain:
            obs, reward, terminated, _, info = self.env.step(column)
            return obs, reward, terminated, info
        obs, reward, terminated, _, info = self.env.step(np.array([column]))
        return obs[0], reward[0], terminated[0], {key: value[0] for key, value in info.items()}


KINDS = ("plain", "vector")
OPPONENTS = [
    {},
    {"random_plies": 3},
    {"opponent": "random"},
    {"opponent": "random", "begins": "random", "random_plies": 4},
    {"opponent": "minimax:1", "begins": "agent", "random_plies": 1},
    {"opponent": "minimax:2", "begins": "opponent", "random_plies": 5},
    {"opponent": "minimax:3", "random_plies": 2},
    {"opponent": "minimax:4", "ties": "centre", "random_plies": 4},
]


@pytest.mark.parametrize("kwargs", OPPONENTS, ids=str)
def test_both_versions_play_the_same_games(kwargs: dict) -> None:
    rng = np.random.default_rng(2)
    compiled = Connect4VectorEnv(LANES, **kwargs)
    plain = [Connect4Env(**kwargs) for _ in range(LANES)]
    obs, infos = compiled.reset(seed=70)
    for lane, env in enumerate(plain):
        first, info = env.reset(seed=70 + lane)
        assert first.tobytes() == obs[lane].tobytes()
        assert info["to_play"] == infos["to_play"][lane]
    ended, seen = np.zeros(LANES, np.bool_), {"won": 0, "lost": 0, "illegal": 0}
    for _ in range(150):
        actions = random_columns(infos["action_mask"], rng)
        actions = np.where(rng.random(LANES) < 0.05, rng.integers(7, size=LANES), actions)
        obs, rewards, terminated, truncated, infos = compiled.step(actions)
        for lane, env in enumerate(plain):
            if ended[lane]:
                first, info = env.reset()
                one = (first, 0.0, False, False, info)
            else:
                one = env.step(int(actions[lane]))
            assert one[0].tobytes() == obs[lane].tobytes()
            assert one[1:4] == (rewards[lane], terminated[lane], truncated[lane])
            for key, value in one[4].items():
                assert np.array_equal(value, infos[key][lane]), key
        ended = terminated
        seen["won"] += int((rewards > 0).sum())
        seen["lost"] += int((rewards < 0).sum())
        seen["illegal"] += int(infos["illegal"].sum())
    assert seen["illegal"] > 0 and (seen["won"] > 0 or kwargs.get("opponent", "none") != "none"), seen
    assert seen["lost"] >= seen["illegal"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_ended_game_keeps_its_final_board_and_starts_at_the_next_step(kind: str) -> None:
    table = Table(kind)
    table.reset(seed=0)
    for column in (0, 1, 0, 1, 0, 1):
        table.step(column)
    obs, reward, terminated, info = table.step(0)
    assert reward == 1 and terminated
    assert obs[1, 2:, 0].tolist() == [1, 1, 1, 1], "seen by the one who would be next, who has lost"
    assert obs[0, :, 1].sum() == 3 and obs[2].max() == 0 and info["to_play"] == 1
    if kind == "vector":
        obs, reward, terminated, info = table.step(6)
        assert (reward, terminated, info["to_play"]) == (0, False, 0)
    else:
        obs = table.reset(seed=None)
    assert obs[:2].sum() == 0 and obs[2].min() == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opponent", ["none", "random"])
def test_a_full_column_loses_at_once(kind: str, opponent: str) -> None:
    table = Table(kind, opponent=opponent, begins="agent")
    for seed in range(200):
        obs = table.reset(seed=seed)
        terminated = False
        while not terminated and obs[:2, 0, 2].sum() == 0:
            before, reward, terminated, info = table.step(2)
            obs = before
        if not terminated:
            break
    assert info["action_mask"].tolist() == [1, 1, 0, 1, 1, 1, 1] or opponent == "random"
    after, reward, terminated, info = table.step(2)
    assert reward == -1 and terminated and info["illegal"]
    assert np.array_equal(after, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [-1, 7])
def test_what_is_no_column_is_refused(kind: str, bad: int) -> None:
    table = Table(kind)
    with pytest.raises(EnvError, match=r"call reset\(\)"):
        table.step(0)
    table.reset(seed=0)
    with pytest.raises(EnvError, match=r"no action.*0 to 6"):
        table.step(bad)


@pytest.mark.parametrize("make", [Connect4Env, Connect4VectorEnv])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"opponent": "alphazero"}, "none, random, or minimax:D"),
        ({"opponent": "minimax"}, "minimax:D"),
        ({"opponent": "minimax:0"}, "from 1 to 12"),
        ({"opponent": "minimax:13"}, "from 1 to 12"),
        ({"begins": "me"}, "alternate, random, agent, opponent"),
        ({"random_plies": 6}, "from 0 to 5"),
        ({"ties": "left"}, "random, centre"),
    ],
)
def test_what_the_game_cannot_be_made_with_is_refused(make: type, kwargs: dict, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make(**kwargs)


def test_the_vector_version_refuses_wrong_counts() -> None:
    with pytest.raises(EnvError, match="at least 1"):
        Connect4VectorEnv(0)
    env = Connect4VectorEnv(2)
    with pytest.raises(EnvError, match="3 seeds for 2 games"):
        env.reset(seed=[1, 2, 3])
    env.reset(seed=[5, 9])
    with pytest.raises(EnvError, match="one for each of 2"):
        env.step(np.zeros(3, np.int64))


def test_resets_repeat_with_the_seed_and_go_on_without() -> None:
    envs = [Connect4VectorEnv(8, random_plies=4) for _ in range(2)]
    games = [[env.reset(seed=seed)[0] for seed in (4, None, None)] for env in envs]
    for mine, other in zip(*games, strict=True):
        assert np.array_equal(mine, other)
    assert not np.array_equal(games[0][0], games[0][1])
    assert not np.array_equal(games[0][1], games[0][2])
    assert (games[0][0][:, :2].sum(axis=(1, 2, 3)) == 4).all()


def test_returned_arrays_belong_to_the_caller() -> None:
    env = Connect4VectorEnv(2)
    obs, infos = env.reset(seed=0)
    first = obs.copy()
    results = env.step(np.array([3, 3]))
    assert np.array_equal(obs, first)
    for array in (*results[:4], *results[4].values()):
        array[:] = 1
    env.to_play[:] = 7
    obs, rewards, terminated, _, infos = env.step(np.array([3, 3]))
    assert obs[:, :2].sum() == 4 and not terminated.any() and not infos["illegal"].any()
    assert infos["to_play"].tolist() == [0, 0]


# ---------------------------------------------------------------- as an environment


@pytest.mark.parametrize("kwargs", [{}, {"opponent": "random"}, {"opponent": "minimax:2", "random_plies": 4}])
@pytest.mark.parametrize("render_mode", [None, "ansi", "rgb_array"])
def test_the_plain_game_passes_gymnasiums_own_checks(kwargs: dict, render_mode: str | None) -> None:
    check_env(gymnasium.make(ENV_ID, render_mode=render_mode, **kwargs).unwrapped)


def test_columns_is_a_discrete_space_that_samples_from_masks() -> None:
    env = gymnasium.make(ENV_ID)
    _, info = env.reset(seed=2)
    for _ in range(6):
        _, _, _, _, info = env.step(4)
    space = env.action_space
    assert {space.sample(info["action_mask"]) for _ in range(200)} == {0, 1, 2, 3, 5, 6}
    assert np.array_equal(env.unwrapped.action_masks(), info["action_mask"])
    assert space == gymnasium.spaces.Discrete(7)
    assert space.num_players == 2 and Connect4Env("random").action_space.num_players == 1
    with pytest.raises(EnvError, match="3, 6, 7"):
        Columns().legal(np.zeros((2, 84)))
    assert Columns().legal(np.zeros((2, 5, 3, 6, 7), np.uint8)).shape == (2, 5, 7)


def test_worlds_take_the_version_that_fits() -> None:
    config = EnvConfig(id=ENV_ID, kwargs={"opponent": "minimax:2", "random_plies": 2})
    assert isinstance(make_world(config, 8), VectorWorld)
    assert isinstance(make_world(config, 2), LoopWorld)
    for num_envs in (2, 8):
        space = make_world(config, num_envs).single_action_space
        assert isinstance(space, Columns) and space.num_players == 1


@pytest.mark.parametrize("vectorize", ["loop", "vector"])
@pytest.mark.parametrize("kwargs", OPPONENTS[:4] + OPPONENTS[6:], ids=str)
def test_a_game_goes_on_from_its_saved_state(vectorize: str, kwargs: dict) -> None:
    config = EnvConfig(id=ENV_ID, vectorize=vectorize, kwargs=kwargs)
    world, rng = make_world(config, 6), np.random.default_rng(0)
    legal = world.single_action_space.legal
    obs = world.reset(11)
    for _ in range(25):
        obs = world.step(random_columns(legal(obs), rng)).obs
    state = world.state_dict()
    assert state is not None
    state = through_json(state)
    played = []
    for _ in range(60):
        actions = random_columns(legal(obs), rng)
        step = world.step(actions)
        played.append((actions, step))
        obs = step.obs
    assert sum(step.terminated.sum() for _, step in played) > 6
    other = make_world(config, 6)
    other.load_state_dict(state)
    for actions, step in played:
        again = other.step(actions)
        assert np.array_equal(again.obs, step.obs)
        assert np.array_equal(again.rewards, step.rewards)
        assert np.array_equal(again.terminated, step.terminated)


# ---------------------------------------------------------------- pictures


def test_the_board_is_written_from_the_top() -> None:
    env = Connect4Env(render_mode="ansi")
    env.reset(seed=0)
    for column in (3, 3, 0):
        env.step(column)
    plain = env.render()
    for code in ("\x1b[91m", "\x1b[93m", "\x1b[0m"):
        plain = plain.replace(code, "")
    lines = plain.splitlines()
    assert lines[:4] == [". . . . . . ."] * 4
    assert lines[4:] == [". . . O . . .", "X . . X . . .", "0 1 2 3 4 5 6", "dropped in 0"]
    assert "O has four in a line" in rendering.text(0, 0b1111, 0)


@pytest.mark.parametrize(("begins", "agent"), [("agent", "X"), ("opponent", "O")])
def test_the_board_says_whose_stones_are_the_agents(begins: Any, agent: str) -> None:
    env = Connect4Env("random", begins, render_mode="ansi")
    env.reset(seed=0)
    many = Connect4VectorEnv(2, "random", begins, render_mode="ansi")
    many.reset(seed=0)
    for text in (env.render(), *many.render()):
        assert f"the agent is {agent}" in text


def test_pictures_show_the_stones_and_mark_the_last() -> None:
    env = Connect4VectorEnv(2, render_mode="rgb_array")
    env.reset(seed=0)
    empty = env.render()
    assert len(empty) == 2 and empty[0].shape == (364, 424, 3) and empty[0].dtype == np.uint8
    env.step(np.array([0, 6]))
    first, second = env.render()
    assert first[342, 22].tolist() == [229, 57, 53], "red at the bottom left"
    assert second[342, 382].tolist() == [229, 57, 53], "and at the bottom right"
    assert first[332, 32].tolist() == [245, 247, 250], "with a dot in the middle"
    assert np.array_equal(first[:300], empty[0][:300])
    assert Connect4VectorEnv(2).render() is None


# ---------------------------------------------------------------- without numba


def test_without_numba_the_same_games_are_played() -> None:
    script = """
import numpy as np
from offbeat.envs.connect4 import kernels
from offbeat.envs.connect4.vector import Connect4VectorEnv
env = Connect4VectorEnv(3, opponent="minimax:3", random_plies=2)
rng, total = np.random.default_rng(0), 0
obs, infos = env.reset(seed=5)
for _ in range(30):
    actions = (infos["action_mask"] * rng.random((3, 7))).argmax(axis=-1)
    obs, rewards, terminated, _, infos = env.step(actions)
    total = (total * 31 + int((obs * np.arange(126).reshape(3, 6, 7)).sum() + rewards.sum() + 3)) % 2**31
import gymnasium, offbeat.envs
print(kernels.IS_COMPILED, gymnasium.spec("offbeat/Connect4-v0").vector_entry_point is None, total)
"""
    lines = []
    for wanted in ("1", "0"):
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env={**os.environ, "OFFBEAT_NUMBA": wanted},
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        lines.append(run.stdout.split())
    assert lines[0][:2] == ["True", "False"] and lines[1][:2] == ["False", "True"]
    assert lines[0][2] == lines[1][2]
