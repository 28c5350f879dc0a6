"""Baselines of Color Lines, its pictures, and what is left of it without numba."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from offbeat.envs.colorlines import ENV_ID
from offbeat.envs.colorlines.baselines import BASELINES, LongestLine, RandomMoves, Windows, play_games
from offbeat.envs.colorlines.moves import Moves
from offbeat.envs.colorlines.rules import NUM_CELLS, find_lines, potential
from offbeat.envs.colorlines.vector import ColorLinesVectorEnv
from tests.unit.colorlines_boards import action, cells

each_baseline = pytest.mark.parametrize("name", BASELINES)


def positions(rules: str, num_steps: int = 40) -> np.ndarray:
    """Boards ``[M, 84]`` from games of mixed strength, none of them full."""
    env, players = ColorLinesVectorEnv(16, rules=rules), [RandomMoves(1), LongestLine(2), Windows(3)]
    obs, _ = env.reset(seed=3)
    found = [obs]
    for number in range(num_steps):
        obs = env.step(players[number % 3].act(obs))[0]
        found.append(obs)
    boards = np.concatenate(found)
    return boards[(boards[:, :NUM_CELLS] == 0).any(axis=1)]


def after(obs: np.ndarray, move: int) -> list[int]:
    """The board after a move, lines taken off, nothing dropped."""
    board = obs[:NUM_CELLS].tolist()
    source, target = divmod(int(move), NUM_CELLS)
    board[target], board[source] = board[source], 0
    for cell in {cell for line in find_lines(board) for cell in line}:
        board[cell] = 0
    return board


def points(obs: np.ndarray, move: int) -> int:
    return sum(map(bool, obs[:NUM_CELLS].tolist())) - sum(map(bool, after(obs, move)))


# ---------------------------------------------------------------- baselines


@each_baseline
@pytest.mark.parametrize("rules", ["classic", "seed"])
def test_moves_are_legal_and_repeat_with_the_seed(name: str, rules: str) -> None:
    boards = positions(rules)
    actions = BASELINES[name](5).act(boards)
    assert actions.shape == (len(boards),)
    assert Moves().legal(boards)[np.arange(len(boards)), actions].all()
    assert np.array_equal(BASELINES[name](5).act(boards), actions)
    assert not np.array_equal(BASELINES[name](6).act(boards), actions)
    assert BASELINES[name](5).act(boards[0]) == actions[0]


@each_baseline
def test_a_full_board_is_no_trouble(name: str) -> None:
    assert BASELINES[name](0).act(np.full((2, 84), 1, np.int8)).tolist() == [0, 0]


def test_random_moves_have_equal_chances() -> None:
    board = np.array([*cells("R.G...... .GG...... GG......."), 1, 1, 1], np.int8)
    legal = np.flatnonzero(Moves().legal(board))
    num_draws = 200 * len(legal)
    actions = RandomMoves(1).act(np.tile(board, (num_draws, 1)))
    counts = np.bincount(actions, minlength=6561)[legal]
    assert counts.sum() == num_draws
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert abs(chi_square - len(legal)) < 5 * np.sqrt(2 * len(legal))


@pytest.mark.parametrize("player", [LongestLine(0), Windows(0)], ids=["greedy", "windows"])
def test_a_line_is_taken_where_there_is_one(player) -> None:
    boards = [
        ("RRRR..... ......... ....G.... ....R....", "d5 a5"),
        ("RR.RR..R. ......... GGGG.....", "a8 a3"),
        ("B........ .B....... ..B...... .....B... ....B.... .....Y...", "d6 d4"),
    ]
    for text, move in boards:
        obs = np.array([*cells(text), 1, 2, 3], np.int8)
        assert player.act(obs) == action(move)


def test_greedy_makes_the_most_of_one_move() -> None:
    boards = positions("classic", 12)[::7]
    legal = Moves().legal(boards)
    for obs, moves, chosen in zip(boards, legal, LongestLine(1).act(boards), strict=True):
        best = max(points(obs, move) for move in np.flatnonzero(moves))
        assert points(obs, chosen) == best


def test_windows_leaves_the_best_board_by_its_own_measure() -> None:
    boards = positions("classic", 12)[::17]
    worth = (0.0, 1 / 32, 1 / 8, 1 / 2, 2.0, 8.0)  # the measure of rules.potential
    legal = Moves().legal(boards)
    num_checked = 0
    for obs, moves, chosen in zip(boards, legal, Windows(1, worth).act(boards), strict=True):
        if any(points(obs, move) for move in np.flatnonzero(moves)):
            continue
        best = max(potential(after(obs, move)) for move in np.flatnonzero(moves))
        assert potential(after(obs, chosen)) == best
        num_checked += 1
    assert num_checked > 5


def test_players_are_as_strong_as_they_should_be() -> None:
    means = {name: play_games(make(1), "classic", 24, seed=7).mean() for name, make in BASELINES.items()}
    assert means["random"] < 6 < 30 < means["greedy"] < 100 < 150 < means["windows"]


def test_games_of_a_player_repeat() -> None:
    first, second = (play_games(LongestLine(1), "seed", 5, seed=2) for _ in range(2))
    assert first.shape == (5,) and np.array_equal(first, second)


# ---------------------------------------------------------------- pictures


def played(render_mode: str):
    env = gymnasium.make(ENV_ID, render_mode=render_mode)
    obs, _ = env.reset(seed=1)
    obs, *_, infos = env.step(LongestLine(0).act(obs))
    return env, obs, infos


def test_text_shows_the_board_without_its_colours() -> None:
    env, obs, _ = played("ansi")
    text = re.sub(r"\x1b\[\d+m", "", env.render())
    lines = text.splitlines()
    assert lines[0].startswith("score 0   next ")
    assert lines[1] == "  1 2 3 4 5 6 7 8 9"
    shown = [".RGYBMCW".index(letter) for line in lines[2:11] for letter in line[2:].split(" ")]
    assert shown == obs[:81].tolist()
    assert re.fullmatch(r"moved [a-i][1-9] to [a-i][1-9]", lines[11])


def test_pictures_differ_by_board_score_and_last_move() -> None:
    from offbeat.envs.colorlines.rendering import picture

    env, obs, _ = played("rgb_array")
    image = env.render()
    assert image.shape == (460, 400, 3) and image.dtype == np.uint8
    other = obs.copy()
    other[0] = 1 + other[0] % 7
    coming = obs.copy()
    coming[83] = 1 + coming[83] % 7
    images = [
        picture(obs, 0, None),
        picture(obs, 98, None),
        picture(obs, 0, (3, 4)),
        picture(other, 0, None),
        picture(coming, 0, None),
    ]
    assert len({made.tobytes() for made in images}) == 5
    assert picture(obs, 123456789, None).shape == image.shape
    for ball in range(1, 8):
        board = np.zeros(84, np.int8)
        board[40] = ball
        centre = picture(board, 0, None)[60 + 2 + 4 * 44 + 30, 2 + 4 * 44 + 30]
        assert np.abs(centre.astype(int) - picture(np.zeros(84, np.int8), 0, None)[300, 200]).sum() > 60


def test_many_games_render_one_picture_each() -> None:
    for mode, kind in (("rgb_array", np.ndarray), ("ansi", str)):
        env = ColorLinesVectorEnv(2, render_mode=mode)
        obs, _ = env.reset(seed=0)
        env.step(LongestLine(0).act(obs))
        frames = env.render()
        assert len(frames) == 2 and all(isinstance(frame, kind) for frame in frames)
        single = gymnasium.make(ENV_ID, render_mode=mode)
        obs, _ = single.reset(seed=0)
        single.step(LongestLine(0).act(obs))
        assert np.array_equal(single.render(), frames[0])
    assert ColorLinesVectorEnv(2).render() is None


# ---------------------------------------------------------------- without numba

WITHOUT_NUMBA = """
import json, sys
import numpy as np
from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
from offbeat.envs.colorlines.baselines import BASELINES, play_games
from offbeat.envs.colorlines.moves import Moves
world = make_world(EnvConfig(id="offbeat/ColorLines-v0"), 8)
boards = np.array(json.load(sys.stdin), np.int8)
print(json.dumps({
    "world": type(world).__name__,
    "numba": "numba" in sys.modules,
    "legal": Moves().legal(boards).sum(axis=1).tolist(),
    "actions": {name: make(4).act(boards).tolist() for name, make in BASELINES.items()},
    "scores": play_games(BASELINES["random"](1), "classic", 3, seed=1).tolist(),
}))
"""


def run_python(code: str, text: str = "", **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        input=text,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_without_numba_everything_goes_on_by_itself() -> None:
    boards = positions("classic", 8)[::40]
    shown = run_python(WITHOUT_NUMBA, json.dumps(boards.tolist()), OFFBEAT_NUMBA="0")
    assert shown["world"] == "LoopWorld" and not shown["numba"]
    assert shown["legal"] == Moves().legal(boards).sum(axis=1).tolist()
    assert shown["actions"] == {name: make(4).act(boards).tolist() for name, make in BASELINES.items()}
    assert shown["scores"] == play_games(RandomMoves(1), "classic", 3, seed=1).tolist()


def test_without_numba_the_vector_version_says_what_to_install() -> None:
    code = """
import json
from offbeat.envs.colorlines.vector import ColorLinesVectorEnv
from offbeat.errors import EnvError
try:
    ColorLinesVectorEnv(2)
except EnvError as error:
    print(json.dumps({"text": str(error)}))
"""
    assert "offbeat[numba]" in run_python(code, OFFBEAT_NUMBA="0")["text"]


def test_games_are_played_where_numba_can_write_nothing() -> None:
    code = """
import json
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
from offbeat.envs.colorlines import kernels
import numpy as np
print(json.dumps({"drawn": int(kernels.draw(np.array([1], np.uint64), 0, 1000))}))
"""
    from offbeat.envs.colorlines.rules import Stream

    assert run_python(code)["drawn"] == Stream(1).below(1000)


def test_importing_environments_loads_neither_numba_nor_the_game() -> None:
    code = """
import json, sys
import offbeat.envs
names = [name for name in sys.modules if name == "numba" or name.startswith("offbeat.envs.colorlines.")]
print(json.dumps({"names": names}))
"""
    assert run_python(code)["names"] == []
