"""Alice and Bob: the rules, and that many at once go the way of one."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import offbeat.envs  # noqa: F401 (registers the task)
from offbeat.checkpoint.codec import pack, unpack
from offbeat.envs.teams.alice_and_bob import AliceAndBobEnv, AliceAndBobTeam
from offbeat.envs.teams.team import TeamStep, View
from offbeat.errors import EnvError

STAY, UP, DOWN, LEFT, RIGHT = range(5)
TOP_LEFT, TOP_RIGHT, BOTTOM_LEFT, BOTTOM_RIGHT = (0, 0), (0, 7), (7, 0), (7, 7)
EVERYTHING = ("next_obs", "next_state", "rewards", "terminated", "truncated", "success")


def play(env: AliceAndBobEnv, cells: list[tuple[int, int]], moves: list[tuple[int, int]]) -> list[Any]:
    env.reset(seed=0, options={"cells": cells})
    return [env.step(move) for move in moves]


def all_arrays(step: TeamStep) -> list[np.ndarray]:
    parts = [getattr(step, name) for name in EVERYTHING]
    return [*parts, step.view.obs, step.view.state, step.view.alive]


def record(team: AliceAndBobTeam, actions: list[np.ndarray]) -> list[bytes]:
    return [b"".join(array.tobytes() for array in all_arrays(team.step(row))) for row in actions]


def random_actions(num_envs: int, num_steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, size=(num_envs, 2)) for _ in range(num_steps)]


# ---------------------------------------------------------------- the rules


def test_the_reward_comes_once_and_only_with_the_second_diamond() -> None:
    # Alice keeps the blue button while Bob collects the blue diamond; then she comes down to the red diamond
    # while he goes up to the red button.
    moves = [(STAY, DOWN)] * 7 + [(DOWN, UP)] * 7
    steps = play(AliceAndBobEnv(), [TOP_LEFT, TOP_RIGHT], moves)
    assert [step[1] for step in steps] == [0.0] * 13 + [1.0]
    assert [step[2] for step in steps] == [False] * 13 + [True]
    assert not any(step[3] for step in steps)
    flags = [step[0][0][16:].tolist() for step in steps]
    assert flags == [[0, 0]] * 6 + [[0, 1]] * 7 + [[1, 1]]
    assert [step[4]["is_success"] for step in steps] == [False] * 13 + [True]


@pytest.mark.parametrize(
    ("cells", "flags"),
    [
        ([TOP_LEFT, BOTTOM_RIGHT], [0, 1]),
        ([BOTTOM_RIGHT, TOP_LEFT], [0, 1]),
        ([TOP_RIGHT, BOTTOM_LEFT], [1, 0]),
        ([BOTTOM_LEFT, TOP_RIGHT], [1, 0]),
        ([TOP_LEFT, BOTTOM_LEFT], [0, 0]),
        ([TOP_RIGHT, BOTTOM_RIGHT], [0, 0]),
        ([BOTTOM_LEFT, BOTTOM_RIGHT], [0, 0]),
        ([TOP_LEFT, TOP_RIGHT], [0, 0]),
        ([(3, 3), BOTTOM_RIGHT], [0, 0]),
    ],
)
def test_a_diamond_needs_the_button_of_its_colour(cells: list[tuple[int, int]], flags: list[int]) -> None:
    env = AliceAndBobEnv()
    obs, _ = env.reset(options={"cells": cells})
    assert obs[0][16:].tolist() == [0, 0]
    assert env.step((STAY, STAY))[0][0][16:].tolist() == flags


def test_walls_hold_agents_and_moves_go_where_they_say() -> None:
    env = AliceAndBobEnv(observation="xy")
    for move, cell in ((UP, (2, 4)), (DOWN, (4, 4)), (LEFT, (3, 3)), (RIGHT, (3, 5)), (STAY, (3, 4))):
        env.reset(options={"cells": [(3, 4), (6, 6)]})
        seen = env.step((move, STAY))[0][0]
        assert (seen[:2] + 1) * 3.5 == pytest.approx([cell[1], cell[0]])
    for move, cell in ((UP, (0, 3)), (DOWN, (7, 3)), (LEFT, (3, 0)), (RIGHT, (3, 7))):
        env.reset(options={"cells": [cell, (5, 5)]})
        assert (env.step((move, STAY))[0][0][:2] + 1) * 3.5 == pytest.approx([cell[1], cell[0]])


@pytest.mark.parametrize("blocking", [False, True])
def test_blocking_forbids_meeting_and_changing_places(blocking: bool) -> None:
    env = AliceAndBobEnv(blocking=blocking, observation="xy")

    def after(cells: list[tuple[int, int]], moves: tuple[int, int]) -> list[list[int]]:
        env.reset(options={"cells": cells})
        return [((seen[:2] + 1) * 3.5).round().astype(int)[::-1].tolist() for seen in env.step(moves)[0]]

    free = not blocking
    assert after([(2, 2), (2, 4)], (RIGHT, LEFT)) == ([[2, 3], [2, 3]] if free else [[2, 2], [2, 4]])
    assert after([(2, 2), (2, 3)], (RIGHT, LEFT)) == ([[2, 3], [2, 2]] if free else [[2, 2], [2, 3]])
    assert after([(2, 2), (2, 3)], (RIGHT, STAY)) == ([[2, 3], [2, 3]] if free else [[2, 2], [2, 3]])
    assert after([(0, 0), (0, 1)], (STAY, LEFT)) == ([[0, 0], [0, 0]] if free else [[0, 0], [0, 1]])
    assert after([(2, 2), (2, 3)], (RIGHT, RIGHT)) == [[2, 3], [2, 4]]


def test_time_is_up_after_max_steps_and_a_solution_in_the_last_step_counts() -> None:
    moves = [(STAY, DOWN)] * 7 + [(DOWN, UP)] * 7
    late = play(AliceAndBobEnv(max_steps=13), [TOP_LEFT, TOP_RIGHT], moves[:13])
    assert [step[3] for step in late] == [False] * 12 + [True]
    assert not any(step[2] for step in late)
    just = play(AliceAndBobEnv(max_steps=14), [TOP_LEFT, TOP_RIGHT], moves)
    assert just[-1][1:4] == (1.0, True, False)
    assert len(play(AliceAndBobEnv(), [(3, 3), (4, 4)], [(STAY, STAY)] * 100)) == 100


def test_what_is_seen_and_what_is_known() -> None:
    for observation, place in (("onehot", 16), ("xy", 2)):
        alone = AliceAndBobEnv(observation=observation)
        both = AliceAndBobEnv(observation=observation, see_other=True)
        cells = {"cells": [(1, 2), (5, 6)]}
        (alice, bob), _ = alone.reset(options=cells)
        (alice_sees, bob_sees), _ = both.reset(options=cells)
        assert alice.shape == bob.shape == (place + 2,)
        assert np.array_equal(alice_sees, np.concatenate([alice, bob[:place]]))
        assert np.array_equal(bob_sees, np.concatenate([bob, alice[:place]]))
        assert np.array_equal(alone.state(), alice_sees)
        assert np.array_equal(both.state(), alice_sees)
    row, column = np.flatnonzero(AliceAndBobEnv().reset(options=cells)[0][0])
    assert (row, column) == (1, 8 + 2)


def test_gymnasium_accepts_the_plain_version() -> None:
    env = gymnasium.make("offbeat/AliceAndBob-v0", render_mode="rgb_array")
    check_env(env.unwrapped)
    picture = env.unwrapped.render()
    assert picture.shape == (320, 320, 3) and picture.dtype == np.uint8


def test_pictures_show_where_everybody_is() -> None:
    env = AliceAndBobEnv(render_mode="ansi", size=3)
    env.reset(options={"cells": [(0, 0), (2, 1)]})
    plain = env.render().replace("\x1b[91m", "").replace("\x1b[94m", "").replace("\x1b[0m", "")
    assert plain.splitlines() == [
        "step 0   red there   blue there",
        "+---------+",
        "|oA .  o  |",
        "|.  .  .  |",
        "|*  . B*  |",
        "+---------+",
    ]
    env.step((STAY, RIGHT))
    assert "blue collected" in env.render()
    pixels = AliceAndBobEnv(render_mode="rgb_array")
    pixels.reset(options={"cells": [(0, 0), (7, 6)]})
    before = pixels.render()
    pixels.step((STAY, RIGHT))
    changed = np.argwhere((before != pixels.render()).any(axis=2))
    assert changed.min(axis=0).tolist() >= [8 * 32, 7 * 32]


@pytest.mark.parametrize(
    "options", [{"observation": "pixels"}, {"size": 1}, {"max_steps": 0}], ids=lambda options: str(options)
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match=f"AliceAndBob.*{next(iter(options))}"):
        AliceAndBobEnv(**options)
    with pytest.raises(EnvError, match=next(iter(options))):
        AliceAndBobTeam(2, **options)


def test_wrong_actions_and_cells_are_refused() -> None:
    env = AliceAndBobEnv()
    env.reset()
    for action in ((0, 5), (-1, 0), (0,)):
        with pytest.raises(EnvError, match="give two of 0 to 4"):
            env.step(action)
    for cells in ([(0, 0), (0, 0)], [(0, 0), (0, 8)], [(0, 0)]):
        with pytest.raises(EnvError, match="two different"):
            env.reset(options={"cells": cells})
    team = AliceAndBobTeam(3)
    with pytest.raises(EnvError, match=r"\(3, 2\), these are \(2, 3\)"):
        team.step(np.zeros((2, 3), np.int64))
    with pytest.raises(IndexError):
        team.step(np.full((3, 2), 5))


# ---------------------------------------------------------------- many at once


class Walkers:
    """Sends the two agents to opposite corners, so that diamonds are collected more often than at random."""

    def __init__(self, num_envs: int, size: int) -> None:
        self._rng = np.random.default_rng(3)
        self._goals = np.zeros((num_envs, 2), np.int64)
        self._corners = np.array([0, size - 1, size * (size - 1), size * size - 1])
        self._size = size

    def act(self, cells: np.ndarray) -> np.ndarray:
        rng = self._rng
        corners = rng.choice(self._corners, len(cells))
        fresh = np.stack([corners, self._size**2 - 1 - corners], axis=1)
        self._goals = np.where(rng.random((len(cells), 1)) < 0.04, fresh, self._goals)
        (rows, columns), (to_rows, to_columns) = (
            np.divmod(part, self._size) for part in (cells, self._goals)
        )
        along = np.select([to_rows < rows, to_rows > rows], [UP, DOWN], STAY)
        aside = np.select([to_columns < columns, to_columns > columns], [LEFT, RIGHT], STAY)
        wise = np.where((aside == STAY) | ((along != STAY) & (rng.random(cells.shape) < 0.5)), along, aside)
        return np.where(rng.random(cells.shape) < 0.05, rng.integers(5, size=cells.shape), wise)


def start_plain(env: AliceAndBobEnv, cells: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    obs, _ = env.reset(options={"cells": [divmod(int(cell), size) for cell in cells]})
    return np.stack(obs), env.state()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"observation": "xy", "see_other": True, "blocking": True},
        {"size": 3, "see_other": True, "max_steps": 30},
        {"size": 2, "blocking": True, "max_steps": 9, "observation": "xy"},
    ],
    ids=["default", "options", "small", "tiny"],
)
def test_the_team_goes_step_by_step_like_plain_episodes(options: dict[str, Any]) -> None:
    num_envs, num_episodes = 50, 800
    team, plain = AliceAndBobTeam(num_envs, **options), [AliceAndBobEnv(**options) for _ in range(num_envs)]
    size = options.get("size", 8)
    walkers, rng = Walkers(num_envs, size), np.random.default_rng(1)
    view = team.reset(5)
    seen = [
        start_plain(env, cells, size) for env, cells in zip(plain, team.state_dict()["cells"], strict=True)
    ]
    num_solved = num_late = num_steps = 0
    while num_solved + num_late < num_episodes:
        assert np.array_equal(view.obs, np.stack([obs for obs, _ in seen]))
        assert np.array_equal(view.state, np.stack([state for _, state in seen]))
        actions = walkers.act(team.state_dict()["cells"])
        active = rng.random(num_envs) < 0.9 if num_steps % 2 else None
        step = team.step(actions, active)
        after, ends = team.state_dict()["cells"], np.zeros((3, num_envs))
        for index, env in enumerate(plain):
            if active is not None and not active[index]:
                continue
            obs, *ends[:, index], info = env.step(tuple(actions[index].tolist()))
            assert info["is_success"] == ends[1, index]
            seen[index] = np.stack(obs), env.state()
        assert np.array_equal(step.next_obs, np.stack([obs for obs, _ in seen]))
        assert np.array_equal(step.next_state, np.stack([state for _, state in seen]))
        assert np.array_equal([step.rewards, step.terminated, step.truncated], ends)
        assert np.array_equal(step.success, step.terminated)
        for index in np.flatnonzero(ends[1:].any(axis=0)):
            seen[index] = start_plain(plain[index], after[index], size)
        num_solved, num_late = num_solved + int(ends[1].sum()), num_late + int(ends[2].sum())
        view, num_steps = step.view, num_steps + 1
    assert num_solved > 100 and num_late > 100
    assert view.alive.all() and view.legal is None


def test_start_cells_are_different_and_all_pairs_are_equally_likely() -> None:
    team = AliceAndBobTeam(12_000, size=2)
    counts = np.zeros((4, 4), np.int64)
    team.reset(1)
    cells = team.state_dict()["cells"]
    np.add.at(counts, (cells[:, 0], cells[:, 1]), 1)
    assert not counts.diagonal().any()
    others = counts[~np.eye(4, dtype=bool)]
    # 12 pairs, 1000 expected of each with a deviation of 30.
    assert np.abs(others - 1000).max() < 150


def test_seeds_decide_all_episodes() -> None:
    actions = random_actions(16, 300)
    runs = []
    for seed in (1, 1, 2):
        team = AliceAndBobTeam(16)
        first = team.reset(seed)
        runs.append([first.obs.tobytes(), *record(team, actions)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_what_is_returned_belongs_to_the_caller() -> None:
    teams = AliceAndBobTeam(8), AliceAndBobTeam(8)
    views: list[View] = [team.reset(1) for team in teams]
    for actions in random_actions(8, 220):
        for array in (views[0].obs, views[0].state, views[0].alive):
            array[...] = 1 - array
        steps = [team.step(actions) for team in teams]
        for one, other in zip(*(all_arrays(step) for step in steps), strict=True):
            assert np.array_equal(one, other)
        arrays = all_arrays(steps[0])
        for index, array in enumerate(arrays):
            others = arrays[:index] + arrays[index + 1 :]
            before = [other.copy() for other in others]
            array[...] = 0 if array.dtype != np.bool_ else ~array
            assert all(map(np.array_equal, before, others))
        views = [step.view for step in steps]


def test_a_restored_team_goes_on_bit_by_bit() -> None:
    actions = random_actions(7, 400)
    team = AliceAndBobTeam(7, see_other=True)
    team.reset(1)
    record(team, actions[:137])
    last = team.step(actions[137]).view
    state = unpack(*pack(team.state_dict()))
    expected = record(team, actions[138:])
    other = AliceAndBobTeam(7, see_other=True)
    other.reset(9)
    record(other, actions[:3])
    for _ in range(2):
        view = other.load_state_dict(state)
        assert np.array_equal(view.obs, last.obs) and np.array_equal(view.state, last.state)
        assert record(other, actions[138:]) == expected


@pytest.mark.parametrize(
    "other", [AliceAndBobTeam(3), AliceAndBobTeam(2, size=7), AliceAndBobTeam(2, blocking=True)]
)
def test_a_state_of_other_environments_is_refused(other: AliceAndBobTeam) -> None:
    with pytest.raises(EnvError, match="the saved environments are"):
        other.load_state_dict(AliceAndBobTeam(2).state_dict())
