"""The rules of Color Lines, one by one, in both versions; its rewards, its legal moves and its state."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
from offbeat.envs.colorlines import ENV_ID
from offbeat.envs.colorlines.baselines import LongestLine, RandomMoves
from offbeat.envs.colorlines.env import ColorLinesEnv
from offbeat.envs.colorlines.moves import Moves, legal_moves
from offbeat.envs.colorlines.rules import POTENTIAL, TRACKS, WINDOWS, potential
from offbeat.envs.colorlines.vector import ColorLinesVectorEnv
from offbeat.envs.loop import LoopWorld
from offbeat.envs.vector import VectorWorld
from offbeat.errors import EnvError
from tests.unit.colorlines_boards import VERSIONS, Table, action, cells
from tests.unit.test_envs_snapshot import through_json

RULES = ("classic", "seed")
FULL_BUT_TWO = """
RGRGRGRGR
RGRGRGRGR
GRGRGRGRG
GRGRGRGRG
RGRGRGRGR
RGRGRGRGR
GRGRGRGRG
GRGRGRGRG
RGRGRGR..
"""
FULL_BUT_THREE = FULL_BUT_TWO.replace("RGRGRGR..", "RGRGRG...")

both_versions = pytest.mark.parametrize("version", VERSIONS)
both_rules = pytest.mark.parametrize("rules", RULES)


def num_balls(obs: np.ndarray) -> int:
    return int(np.count_nonzero(obs[:81]))


# ---------------------------------------------------------------- the rules


def test_a_board_has_36_tracks_and_140_windows() -> None:
    assert len(TRACKS) == 9 + 9 + 9 + 9
    assert len(WINDOWS) == 45 + 45 + 25 + 25
    assert len({frozenset(window) for window in WINDOWS}) == 140


@both_versions
@both_rules
def test_a_game_starts_with_the_balls_of_its_rules(version: str, rules: str) -> None:
    table = Table(version, "", rules=rules)
    obs, infos = table.env.reset(seed=3)
    obs = obs if table.is_plain else obs[0]
    assert num_balls(obs) == {"classic": 5, "seed": 24}[rules]
    assert obs.shape == (84,) and obs.dtype == np.int8
    assert all(1 <= colour <= 7 for colour in obs[81:])
    assert not np.any(infos["score"])


@both_versions
@both_rules
@pytest.mark.parametrize(
    ("board", "move", "points"),
    [
        ("RRRR..... ....R....", "b5 a5", 10),
        ("RRR.RR... ...R.....", "b4 a4", 12),
        ("R........ R........ R........ R........ .R.......", "e2 e1", 10),
        ("R........ .R....... ..R...... ...R..... .....R...", "e6 e5", 10),
        ("........R .......R. ......R.. .....R... R........", "e1 e5", 10),
        ("RRRR..... ....R.... ....R.... ....R.... ....R.... ...R.....", "f4 a5", 20),
        ("RRRRRRRR. ........R", "b9 a9", 18),
    ],
    ids=["row", "six", "column", "diagonal", "other diagonal", "crossing", "nine"],
)
def test_lines_vanish_and_give_two_points_a_ball(
    version: str, rules: str, board: str, move: str, points: int
) -> None:
    # One more ball, so that the board is not left empty.
    rows = board.split()
    table = Table(version, " ".join(rows + ["........."] * (8 - len(rows)) + ["........B"]), rules=rules)
    obs, reward, terminated, infos = table.move(move)
    assert reward == points == infos["score"]
    assert infos["cleared"] == sum(map(bool, cells(board)))
    assert num_balls(obs) == 1
    assert obs[81:].tolist() == [1, 2, 3], "nothing falls, and what was announced stays"
    assert not terminated and not infos["illegal"]


@both_versions
@both_rules
def test_a_move_without_a_line_drops_the_announced_colours(version: str, rules: str) -> None:
    table = Table(version, "R........ B........", coming="MMC", rules=rules)
    obs, reward, _, infos = table.move("a1 i9")
    assert obs[80] == 1 and obs[0] in (0, 5, 6)
    assert sorted(ball for ball in obs[:81].tolist() if ball) == [1, 4, 5, 5, 6]
    assert reward == 0 and infos["cleared"] == 0
    assert all(1 <= colour <= 7 for colour in obs[81:])


@both_versions
@both_rules
def test_an_emptied_board_gets_three_balls(version: str, rules: str) -> None:
    table = Table(version, "RRRR..... ........R", coming="GYB", rules=rules)
    obs, reward, terminated, _ = table.move("b9 a5")
    assert reward == 10
    assert sorted(ball for ball in obs[:81].tolist() if ball) == [2, 3, 4]
    assert not terminated


@both_versions
@pytest.mark.parametrize("rules", RULES)
def test_lines_made_by_dropped_balls(version: str, rules: str) -> None:
    # Some seed lets one of three red balls fall on the fifth cell, and leaves the cell at f1 empty.
    board = """
RRRR.GYGY
GYGYGYGYG
GYGYGYGYG
YGYGYGYGY
.........
YGYGYGYGY
GYGYGYGYG
GYGYGYGYG
YGYGYGYGY
"""
    table = Table(version, board, coming="RRR", rules=rules)
    for seed in range(200):
        table.env.reset(seed=seed)
        table.put(board, "RRR")
        obs, reward, _, infos = table.move("f1 e1")
        if (obs[4] == 1 or infos["score"]) and obs[45] == 0:
            break
    else:
        pytest.fail("no ball fell on the fifth cell")
    if rules == "classic":
        assert reward == 10 and infos["cleared"] == 5
        assert not obs[:5].any()
        return
    assert reward == 0 and obs[:5].tolist() == [1] * 5
    obs, reward, _, infos = table.move("f2 f1")
    assert reward >= 10 and infos["cleared"] >= 5, "any next move clears the line and scores it"
    assert not obs[:5].any()


@both_versions
@both_rules
def test_a_full_board_ends_the_game(version: str, rules: str) -> None:
    table = Table(version, FULL_BUT_THREE, coming="BMC", rules=rules)
    obs, reward, terminated, infos = table.move("i6 i7")
    assert terminated and not infos["illegal"]
    assert num_balls(obs) == 81
    assert reward == 0


@both_versions
def test_classic_drops_what_fits(version: str) -> None:
    table = Table(version, FULL_BUT_TWO, coming="BMC", rules="classic")
    obs, _, terminated, _ = table.move("i7 i8")
    assert terminated
    assert sorted([obs[78], obs[80]]) == [4, 5], "the first two of the three"


@both_versions
def test_seed_rules_drop_nothing_without_room_for_three(version: str) -> None:
    table = Table(version, FULL_BUT_TWO, coming="BMC", rules="seed")
    obs, reward, terminated, infos = table.move("i7 i8")
    assert not terminated and not infos["illegal"]
    assert num_balls(obs) == 79
    assert obs[81:].tolist() == [4, 5, 6]


@both_versions
@both_rules
@pytest.mark.parametrize(
    "move",
    ["a1 c3", "a3 b3", "a1 a3", "a1 a1", "i9 i8"],
    ids=["walled in", "onto", "ball", "stay", "no ball"],
)
def test_an_illegal_move_costs_ten_and_changes_nothing(version: str, rules: str, move: str) -> None:
    table = Table(version, "RGR...... GGB......", coming="YYY", rules=rules, reward="score")
    before = cells("RGR...... GGB......")
    obs, reward, terminated, infos = table.move(move)
    assert reward == -10 and infos["illegal"] and not terminated
    assert obs.tolist() == [*before, 3, 3, 3]


@both_versions
def test_a_ball_walks_around_corners_but_not_through_diagonals(version: str) -> None:
    wall = "R.G...... ..G...... GGG......"
    assert Table(version, wall).move("a1 b2")[3]["illegal"] == False  # noqa: E712
    assert Table(version, wall).move("a1 d4")[3]["illegal"] == True  # noqa: E712
    gap = "R.G...... ..G...... GG......."
    assert Table(version, gap).move("a1 i9")[3]["illegal"] == True, "c3 touches b2 only at a corner"  # noqa: E712


@both_versions
@pytest.mark.parametrize("bad", [-1, 6561])
def test_what_is_no_action_is_refused(version: str, bad: int) -> None:
    table = Table(version, "R........")
    with pytest.raises(EnvError, match=r"no action.*0 to 6560"):
        table.env.step(bad if table.is_plain else np.array([bad]))


@pytest.mark.parametrize("make", [ColorLinesEnv, ColorLinesVectorEnv])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rules": "modern"}, "classic, seed"),
        ({"reward": "points"}, "score, seed, shaped"),
        ({"gamma": 1.5}, "between 0 and 1"),
    ],
)
def test_what_the_game_cannot_be_made_with_is_refused(make: type, kwargs: dict, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make(**kwargs)


def test_the_vector_version_refuses_wrong_counts() -> None:
    with pytest.raises(EnvError, match="at least 1"):
        ColorLinesVectorEnv(2, max_episode_steps=0)
    env = ColorLinesVectorEnv(2)
    with pytest.raises(EnvError, match=r"call reset\(\)"):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(EnvError, match="3 seeds for 2 games"):
        env.reset(seed=[1, 2, 3])
    env.reset(seed=0)
    with pytest.raises(EnvError, match="one for each of 2"):
        env.step(np.zeros(3, np.int64))


# ---------------------------------------------------------------- rewards


@both_versions
def test_seed_reward_gives_a_tenth_for_each_step_without_points(version: str) -> None:
    table = Table(version, "RRRR..... ........R G........", reward="seed")
    assert table.move("c1 c2")[1] == 0.1
    table = Table(version, "RRRR..... ........R G........", reward="seed")
    assert table.move("b9 a5")[1] == 10
    assert table.move("i9 a1")[1] == -10


@both_versions
def test_shaped_reward_adds_the_discounted_change_of_the_potential(version: str) -> None:
    board = "RRRR..... ........R G........"
    table = Table(version, board, reward="shaped", gamma=0.9)
    left = potential(cells("......... ......... G........"))
    assert table.move("b9 a5")[1] == 10 + 0.9 * left - potential(cells(board))
    table = Table(version, board, reward="shaped", gamma=0.9)
    assert table.move("i9 a5")[1] == -10 + 0.9 * potential(cells(board)) - potential(cells(board))


def test_potential_counts_windows_of_one_colour() -> None:
    assert potential(cells("R........")) == 3 * POTENTIAL[1]
    in_row = POTENTIAL[4] + POTENTIAL[3] + POTENTIAL[2] + POTENTIAL[1]
    # Each ball also begins a column; diagonals go from the first four to the right, from none to the left.
    assert potential(cells("RRRR.....")) == in_row + 4 * POTENTIAL[1] + 4 * POTENTIAL[1]
    # Four windows of the row are mixed now; green has the fifth, a column and two diagonals.
    assert potential(cells("RRRRG....")) == 8 * POTENTIAL[1] + 4 * POTENTIAL[1]
    assert 2 * POTENTIAL[4] + 2 * POTENTIAL[3] > 4, "an open four is worth a good part of ten"


@both_rules
def test_shaping_telescopes(rules: str) -> None:
    gamma, player = 0.97, LongestLine(3)
    plain = ColorLinesVectorEnv(16, rules=rules, reward="score", max_episode_steps=60)
    shaped = ColorLinesVectorEnv(16, rules=rules, reward="shaped", gamma=gamma, max_episode_steps=60)
    obs, _ = plain.reset(seed=9)
    shaped.reset(seed=9)
    start = np.array([potential(row[:81].tolist()) for row in obs])
    total, discount, is_on = np.zeros(16), 1.0, np.ones(16, bool)
    left, num_terminated = np.zeros(16), 0
    for _ in range(60):
        actions = player.act(obs)
        obs, rewards, terminated, truncated, _ = plain.step(actions)
        total += is_on * discount * (shaped.step(actions)[1] - rewards)
        discount *= gamma
        ends = is_on & (terminated | truncated)
        for lane in np.flatnonzero(ends & ~terminated):
            left[lane] = discount * potential(obs[lane, :81].tolist())
        num_terminated += int((ends & terminated).sum())
        is_on &= ~ends
    assert not is_on.any()
    np.testing.assert_allclose(total, left - start, atol=1e-9)
    assert num_terminated > 0 or rules == "seed"


# ---------------------------------------------------------------- legal moves


def reachable(board: list[int], source: int) -> set[int]:
    """Cells a ball can go to, by spreading over the board until nothing changes."""
    spread = {source}
    while True:
        more = {
            cell
            for cell in range(81)
            if board[cell] == 0
            for other in spread
            if abs(cell // 9 - other // 9) + abs(cell % 9 - other % 9) == 1
        }
        if more <= spread:
            return spread - {source}
        spread |= more


@pytest.mark.parametrize("find", [Moves().legal, legal_moves], ids=["compiled", "numpy"])
def test_legal_moves_are_those_of_a_search_by_hand(find) -> None:
    rng = np.random.default_rng(0)
    boards = [
        (rng.integers(1, 8, 84) * (rng.random(84) < density)).astype(np.int8)
        for density in (0.02, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
        for _ in range(3)
    ]
    boards.append(np.array([*([1, 0] * 41)[:81], 1, 1, 1], np.int8))
    legal = find(np.array(boards)).reshape(-1, 81, 81)
    for board, found in zip(boards, legal, strict=True):
        balls = board[:81].tolist()
        assert any(balls) and not all(balls)
        for source in range(81):
            expected = reachable(balls, source) if balls[source] else set()
            assert set(np.flatnonzero(found[source])) == expected


@pytest.mark.parametrize("find", [Moves().legal, legal_moves], ids=["compiled", "numpy"])
def test_a_full_or_empty_board_leaves_everything_to_choose(find) -> None:
    boards = np.array([np.full(84, 3), np.zeros(84)], np.int8)
    assert find(boards).all()


def test_legal_takes_any_leading_shape_and_number_type() -> None:
    obs = ColorLinesVectorEnv(6).reset(seed=1)[0]
    legal = Moves().legal(obs)
    assert legal.shape == (6, 6561) and legal.dtype == np.bool_
    assert np.array_equal(Moves().legal(obs[0]), legal[0])
    assert np.array_equal(Moves().legal(obs.reshape(2, 3, 84).astype(np.float32)), legal.reshape(2, 3, -1))
    assert Moves().legal(obs[:0]).shape == (0, 6561)
    with pytest.raises(EnvError, match=r"\[\.\.\., 84\]"):
        Moves().legal(obs[:, :81])


def test_moves_is_a_discrete_space_that_samples_from_masks() -> None:
    env = gymnasium.make(ENV_ID)
    env.reset(seed=2)
    mask = env.get_wrapper_attr("action_masks")()
    for _ in range(20):
        assert mask[env.action_space.sample(mask.astype(np.int8))]
    assert Moves() == gymnasium.spaces.Discrete(6561)
    vector = ColorLinesVectorEnv(3)
    obs, _ = vector.reset(seed=2)
    assert np.array_equal(vector.action_masks(), Moves().legal(obs))
    assert isinstance(vector.action_space, gymnasium.spaces.MultiDiscrete)


# ---------------------------------------------------------------- as an environment


@both_rules
@pytest.mark.parametrize("reward", ["score", "seed", "shaped"])
def test_the_plain_game_passes_gymnasiums_own_checks(rules: str, reward: str) -> None:
    check_env(gymnasium.make(ENV_ID, rules=rules, reward=reward).unwrapped)


def test_worlds_take_the_version_that_fits() -> None:
    config = EnvConfig(id=ENV_ID, kwargs={"rules": "seed", "reward": "shaped", "gamma": 0.9})
    assert isinstance(make_world(config, 8), VectorWorld)
    assert isinstance(make_world(config, 2), LoopWorld)
    assert isinstance(make_world(config, 2).single_action_space, Moves)
    assert isinstance(make_world(config, 8).single_action_space, Moves)


@pytest.mark.parametrize("vectorize", ["loop", "vector"])
def test_a_game_is_cut_off_at_the_limit_and_started_again(vectorize: str) -> None:
    config = EnvConfig(id=ENV_ID, vectorize=vectorize, max_episode_steps=7)
    world, player = make_world(config, 2), RandomMoves(1)
    obs = world.reset(0)
    for number in range(1, 20):
        step = world.step(player.act(obs))
        obs = step.obs
        assert not step.terminated.any()
        assert step.truncated.all() == (number % 8 == 7)
        if number % 8 == 0:
            assert [num_balls(row) for row in obs] == [5, 5]


@both_versions
def test_limits_default_to_a_thousand_steps(version: str) -> None:
    if version == "plain":
        env = gymnasium.make(ENV_ID, rules="seed")
        env.reset(seed=0)
        ends = [env.step(0)[3] for _ in range(1000)]
    else:
        envs = gymnasium.make_vec(ENV_ID, 1, rules="seed")
        envs.reset(seed=0)
        ends = [bool(envs.step(np.zeros(1, np.int64))[3][0]) for _ in range(1000)]
    assert ends == [False] * 999 + [True], "illegal moves count, too"


@both_versions
def test_resets_without_a_seed_go_on_with_the_stream(version: str) -> None:
    tables = [Table(version, "") for _ in range(2)]
    games = [[np.array(table.env.reset(seed=seed)[0]) for seed in (4, None, None)] for table in tables]
    for mine, other in zip(*games, strict=True):
        assert np.array_equal(mine, other)
    assert not np.array_equal(games[0][0], games[0][1])
    assert not np.array_equal(games[0][1], games[0][2])
    fresh = [np.array(type(tables[0].env)().reset()[0]) for _ in range(2)]
    assert not np.array_equal(*fresh), "a game without any seed is a new one"


@both_rules
@pytest.mark.parametrize("vectorize", ["loop", "vector"])
def test_a_game_goes_on_from_its_saved_state(rules: str, vectorize: str) -> None:
    kwargs = {"rules": rules, "reward": "shaped"}
    config = EnvConfig(id=ENV_ID, vectorize=vectorize, kwargs=kwargs, max_episode_steps=30)
    world, player = make_world(config, 6), LongestLine(1)
    obs = world.reset(11)
    for _ in range(25):
        obs = world.step(player.act(obs)).obs
    state = world.state_dict()
    assert state is not None
    state = through_json(state)
    played = []
    for _ in range(40):
        actions = player.act(obs)
        step = world.step(actions)
        played.append((actions, step))
        obs = step.obs
    other = make_world(config, 6)
    other.load_state_dict(state)
    for actions, step in played:
        again = other.step(actions)
        assert np.array_equal(again.obs, step.obs)
        assert np.array_equal(again.rewards, step.rewards)
        assert np.array_equal(again.terminated, step.terminated)
        assert np.array_equal(again.truncated, step.truncated)


def test_returned_arrays_belong_to_the_caller() -> None:
    env = ColorLinesVectorEnv(2)
    obs, _ = env.reset(seed=0)
    first = obs.copy()
    results = env.step(np.array([action("a1 a2"), action("b1 b2")]))
    assert np.array_equal(obs, first)
    results[0][:] = 9
    results[4]["score"][:] = 99
    obs, *_, infos = env.step(np.zeros(2, np.int64))
    assert obs.max() <= 7 and infos["score"].max() < 99
