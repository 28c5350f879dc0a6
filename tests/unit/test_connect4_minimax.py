"""Looking ahead in Connect Four, the opponent that answers, and players to compare with."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.envs.connect4.baselines import BASELINES, Minimax, RandomColumns, play_games
from offbeat.envs.connect4.env import Columns, Connect4Env
from offbeat.envs.connect4.minimax import CLOSED, WIN, best_moves, centre_most
from offbeat.envs.connect4.vector import Connect4VectorEnv
from offbeat.errors import EnvError
from tests.unit.test_connect4 import PLACES, SlowGame, bits, random_columns


def position(board: str) -> tuple[int, int]:
    """Stones of X and O on a board whose lowest rows are written, the bottom one last."""
    rows = board.split()[::-1]
    found = {letter: [] for letter in "XO."}
    for row, line in enumerate(rows):
        for column, letter in enumerate(line):
            found[letter].append((row, column))
    return bits(found["X"]), bits(found["O"])


def seen_ahead(game: SlowGame, depth: int, num_ahead: int = 0) -> list[int]:
    """Scores of the columns by trying every line of play, without any cut."""
    scores = []
    for column, is_legal in enumerate(game.legal()):
        if not is_legal:
            scores.append(CLOSED)
            continue
        after = SlowGame()
        after.board, after.num_plies = dict(game.board), game.num_plies
        after.drop(column)
        if after.winner:
            scores.append(WIN - num_ahead - 1)
        elif depth == 1 or after.num_plies == 42:
            scores.append(0)
        else:
            scores.append(-max(seen_ahead(after, depth - 1, num_ahead + 1)))
    return scores


def stones_of(game: SlowGame) -> tuple[int, int]:
    own, other = "XO" if game.num_plies % 2 == 0 else "OX"
    return tuple(bits([place for place in PLACES if game.board[place] == letter]) for letter in (own, other))


def random_position(rng: np.random.Generator, num_plies: int) -> SlowGame:
    """A position with so many stones in which nobody has won."""
    while True:
        game = SlowGame()
        while game.num_plies < num_plies and not game.winner:
            game.drop(rng.choice(np.flatnonzero(game.legal())))
        if not game.winner:
            return game


# ---------------------------------------------------------------- looking ahead


def test_a_win_in_one_and_how_it_is_stopped() -> None:
    x, o = position("X...... XO..... XO.....")
    for depth in range(1, 9):
        scores = best_moves(x, o, depth)
        assert scores[0] == WIN - 1 == scores.max() and (scores[1:] < WIN - 1).all()
    scores = best_moves(o, x, 2)
    assert scores[0] == 0, "it must be stopped"
    assert (scores[1:] == 2 - WIN).all()
    assert best_moves(o, x, 1).tolist() == [0] * 7, "and is not seen by one who looks one ply ahead"


def test_a_win_in_two() -> None:
    # Three in a row with both ends open cannot be stopped: X makes it now and wins with his second stone.
    x, o = position("..O.... ..XX...")
    assert best_moves(x, o, 2).tolist() == [0] * 7
    scores = best_moves(x, o, 3)
    assert scores[4] == WIN - 3 == scores.max()
    assert best_moves(o, x, 4)[0] == 4 - WIN, "who does not stop it loses with the fourth stone"
    assert best_moves(o, x, 4)[4] > 4 - WIN


def test_quick_wins_and_slow_losses_are_preferred() -> None:
    x, o = position("XO..... XO..... XO.....")
    scores = best_moves(x, o, 5)
    assert scores[0] == WIN - 1, "now, and not with a later stone"
    assert best_moves(o, x, 5)[1] == WIN - 1
    rng = np.random.default_rng(5)
    kinds = set()
    for _ in range(200):
        game = random_position(rng, 16)
        shallow, deep = best_moves(*stones_of(game), 3), best_moves(*stones_of(game), 6)
        if shallow.max() > 0:
            assert deep.max() == shallow.max(), "what is won soon stays as it is"
            kinds.add(int(shallow.max()))
    assert kinds == {WIN - 1, WIN - 3}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("num_plies", [8, 18, 28, 36, 39])
def test_scores_are_those_of_trying_everything(depth: int, num_plies: int) -> None:
    rng = np.random.default_rng(100 * depth + num_plies)
    for _ in range(4 if depth == 4 else 12):
        game = random_position(rng, num_plies)
        assert best_moves(*stones_of(game), depth).tolist() == seen_ahead(game, depth)


def test_the_end_of_a_game_is_seen_to_the_last_stone() -> None:
    rng = np.random.default_rng(7)
    values = set()
    for _ in range(60):
        game = random_position(rng, 36)
        scores = best_moves(*stones_of(game), 8)
        assert scores.tolist() == seen_ahead(game, 8)
        values |= set(scores.tolist())
    assert min(values - {CLOSED}) < 0 < max(values)
    assert {WIN - 1, 2 - WIN, 0, CLOSED} <= values


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(EnvError, match="from 1 to 12"):
        best_moves(0, 0, 0)
    with pytest.raises(EnvError, match="share cells"):
        best_moves(1, 1, 3)
    with pytest.raises(EnvError, match="off the board"):
        best_moves(1 << 6, 0, 3)
    with pytest.raises(EnvError, match="is over"):
        best_moves(0, 0b1111, 3)
    with pytest.raises(EnvError, match="from 1 to 12"):
        Minimax(depth=13)


# ---------------------------------------------------------------- the opponent


def follow(before: np.ndarray, after: np.ndarray) -> tuple[int, int]:
    """How many stones the agent and the opponent have added between two observations of a game."""
    assert (after[:2] >= before[:2]).all(), "no stone moves or vanishes"
    added = (after - before)[:2].sum(axis=(1, 2))
    taken = after[0] + after[1]
    assert taken.max() <= 1 and (np.diff(taken, axis=0) >= 0).all(), "nothing hangs in the air"
    return int(added[0]), int(added[1])


@pytest.mark.parametrize("opponent", ["random", "minimax:1", "minimax:3", "minimax:5"])
@pytest.mark.parametrize("random_plies", [0, 3])
def test_the_opponent_answers_every_stone_with_one(opponent: str, random_plies: int) -> None:
    rng = np.random.default_rng(0)
    env = Connect4VectorEnv(16, opponent=opponent, random_plies=random_plies)
    obs, infos = env.reset(seed=0)
    ended, results = np.zeros(16, np.bool_), set()
    for _ in range(100):
        before = obs
        obs, rewards, terminated, _, infos = env.step(random_columns(infos["action_mask"], rng))
        for lane in np.flatnonzero(~ended):
            mine, theirs = follow(before[lane], obs[lane])
            is_full = obs[lane, :2].sum() == 42
            assert mine == 1
            assert theirs == 1 or (terminated[lane] and (rewards[lane] == 1 or is_full))
            assert terminated[lane] == (rewards[lane] != 0 or is_full)
            assert obs[lane, 2].min() == obs[lane, 2].max() == before[lane, 2, 0, 0]
        results |= set(rewards[terminated].tolist())
        ended = terminated
    assert -1.0 in results and (1.0 in results or opponent != "random")


def test_first_moves_alternate_over_lanes_and_games() -> None:
    env = Connect4VectorEnv(6, opponent="random")
    obs, infos = env.reset(seed=40)
    firsts = [obs[:, :2].sum(axis=(1, 2, 3)).tolist()]
    assert firsts[0] == [0, 1, 0, 1, 0, 1]
    assert infos["to_play"].tolist() == [0, 1, 0, 1, 0, 1]
    plain = Connect4Env("random")
    starts = [plain.reset(seed=seed)[0][:2].sum() for seed in (41, None, None, None)]
    assert starts == [1, 0, 1, 0]
    rng, ended = np.random.default_rng(0), np.zeros(6, np.bool_)
    games: list[list[float]] = [[] for _ in range(6)]
    for _ in range(150):
        obs, _, terminated, _, infos = env.step(random_columns(infos["action_mask"], rng))
        for lane in np.flatnonzero(ended):
            games[lane].append(float(obs[lane, :2].sum()))
        ended = terminated
    for lane, starts in enumerate(games):
        assert len(starts) > 4
        assert starts == [(lane + 1 + game) % 2 for game in range(len(starts))]


def test_who_begins_can_be_set_or_drawn() -> None:
    for begins, expected in (("agent", 0), ("opponent", 1)):
        obs, infos = Connect4VectorEnv(50, opponent="random", begins=begins).reset(seed=0)
        assert (obs[:, :2].sum(axis=(1, 2, 3)) == expected).all()
        assert (infos["to_play"] == expected).all()
        assert (obs[:, 2, 0, 0] == 1 - expected).all()
    drawn = Connect4VectorEnv(400, opponent="random", begins="random").reset(seed=0)[0]
    assert 150 < drawn[:, :2].sum() < 250
    odd, infos = Connect4VectorEnv(50, opponent="random", begins="agent", random_plies=3).reset(seed=0)
    assert (infos["to_play"] == 1).all() and (odd[:, 1].sum(axis=(1, 2)) == 2).all()


def test_openings_differ_and_never_end_a_game() -> None:
    obs, _ = Connect4VectorEnv(500, random_plies=5).reset(seed=3)
    assert (obs[:, :2].sum(axis=(1, 2, 3)) == 5).all()
    assert len({row.tobytes() for row in obs}) > 450
    env = Connect4VectorEnv(2000, opponent="minimax:1", begins="opponent", random_plies=5)
    obs, _ = env.reset(seed=3)
    assert (obs[:, :2].sum(axis=(2, 3)) == 3).all()


def test_a_minimax_that_prefers_the_centre_is_the_same_every_time() -> None:
    env = Connect4Env("minimax:2", begins="opponent", ties="centre")
    for seed in range(5):
        obs, _ = env.reset(seed=seed)
        assert obs[1, 5].tolist() == [0, 0, 0, 1, 0, 0, 0]
    env = Connect4Env("minimax:2", begins="opponent", ties="random")
    assert len({env.reset(seed=seed)[0].tobytes() for seed in range(50)}) == 7


# ---------------------------------------------------------------- baselines


def boards() -> np.ndarray:
    """Positions ``[M, 3, 6, 7]`` out of random games that go on."""
    rng, env = np.random.default_rng(9), Connect4VectorEnv(64)
    obs, infos = env.reset(seed=0)
    found = [obs]
    for _ in range(30):
        obs, _, terminated, _, infos = env.step(random_columns(infos["action_mask"], rng))
        found.append(obs[~terminated])
    return np.concatenate(found)


@pytest.mark.parametrize("name", ["random", "minimax", "minimax:1", "minimax:5"])
def test_columns_are_legal_and_repeat_with_the_seed(name: str) -> None:
    obs = boards()
    actions = BASELINES[name](5).act(obs)
    assert actions.shape == (len(obs),)
    assert Columns().legal(obs)[np.arange(len(obs)), actions].all()
    assert np.array_equal(BASELINES[name](5).act(obs), actions)
    assert not np.array_equal(BASELINES[name](6).act(obs), actions)
    assert BASELINES[name](5).act(obs[0]) == actions[0]
    assert np.array_equal(BASELINES[name](5).act(obs[:6].reshape(2, 3, 3, 6, 7)).ravel(), actions[:6])
    full = np.zeros((2, 3, 6, 7), np.float32)
    full[:, 0] = 1
    assert BASELINES[name](5).act(full).tolist() == [0, 0]


def test_a_minimax_plays_what_scores_best() -> None:
    obs = boards()[::7]
    for depth in (1, 3, 4):
        for board, action in zip(obs, Minimax(1, depth).act(obs), strict=True):
            own, other = (bits([(5 - r, c) for r, c in np.argwhere(plane)]) for plane in board[:2])
            scores = best_moves(own, other, depth)
            assert scores[action] == scores.max()
            assert Minimax(1, depth, centre_first=True).act(board) == centre_most(scores)


def test_random_columns_have_equal_chances() -> None:
    game = Connect4Env()
    game.reset(seed=0)
    for column in (2, 2, 2, 2, 2, 2):
        obs = game.step(column)[0]
    counts = np.bincount(RandomColumns(3).act(np.tile(obs, (6000, 1, 1, 1))), minlength=7)
    assert counts[2] == 0
    assert abs(np.delete(counts, 2) - 1000).max() < 150


def test_three_plies_ahead_beat_chance() -> None:
    results = play_games(Minimax(seed=1, depth=3, centre_first=True), "random", 200, seed=1000)
    assert (results > 0).mean() > 0.95
    assert set(results.tolist()) <= {-1.0, 0.0, 1.0}
    again = play_games(Minimax(seed=1, depth=3, centre_first=True), "random", 200, seed=1000)
    assert np.array_equal(results, again)
    without = play_games(RandomColumns(1), "minimax:3", 2000, seed=1000)
    assert 0.93 < (without < 0).mean() < 0.97, "one that has no liking for the centre wins a little less"


def test_a_deeper_look_beats_a_shallower_one() -> None:
    results = play_games(Minimax(seed=1, depth=5), "minimax:2", 200, seed=2000)
    assert (results > 0).sum() > 1.5 * (results < 0).sum()


def test_a_player_and_an_opponent_end_a_game() -> None:
    env = Connect4Env("minimax:1", begins="agent")
    obs, _ = env.reset(seed=0)
    player, terminated, num_steps = Minimax(2, 4), False, 0
    while not terminated and num_steps < 22:
        obs, reward, terminated, _, _ = env.step(int(player.act(obs)))
        num_steps += 1
    assert num_steps <= 21 and reward in (-1.0, 0.0, 1.0)
