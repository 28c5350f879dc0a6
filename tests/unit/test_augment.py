"""Boards seen in another way: the game stays the same, and so does what a symmetric policy thinks of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from offbeat.algorithms.ppo import PPOConfig
from offbeat.algorithms.ppo.augment import AugmentMoves, make_augment
from offbeat.algorithms.ppo.build import check
from offbeat.algorithms.ppo.config import ppo_config
from offbeat.algorithms.ppo.learner import make_learner
from offbeat.algorithms.ppo.rounds import Round
from offbeat.algorithms.ppo_per import PPOPERConfig
from offbeat.algorithms.ppo_per.make import make_learner as make_per_learner
from offbeat.config.models import AsyncTrainingConfig, EnvConfig, RunConfig
from offbeat.envs.colorlines import symmetry
from offbeat.envs.colorlines.moves import Moves
from offbeat.envs.colorlines.rules import RULES, Game, Stream, can_move, find_lines
from offbeat.envs.colorlines.vector import ColorLinesVectorEnv
from offbeat.errors import ConfigError
from offbeat.models.moves import MoveActions
from offbeat.roles import SingleRank
from offbeat.types import Batch, Segment, Ticket
from tests.unit.colorlines_boards import action, cells

NUM_GAMES, NUM_STEPS = 6, 12


def play(seed: int = 0, rules: str = "classic") -> tuple[np.ndarray, np.ndarray]:
    """Observations ``[T + 1, B, 84]`` and legal moves ``[T, B]`` of random games."""
    env = ColorLinesVectorEnv(NUM_GAMES, rules=rules)
    rng = np.random.default_rng(seed)
    obs = [np.array(env.reset(seed=seed)[0])]
    moves = []
    for _ in range(NUM_STEPS):
        legal = Moves().legal(obs[-1])
        moves.append(np.array([rng.choice(np.flatnonzero(row)) for row in legal]))
        obs.append(np.array(env.step(moves[-1])[0]))
    return np.array(obs), np.array(moves)


def seen_otherwise(obs: np.ndarray, moves: np.ndarray, seed: int = 1, **options: bool) -> Any:
    chosen = {"symmetry": True, "colours": True} | options
    return Moves().augment(np.random.default_rng(seed), obs, moves, **chosen)


# ---------------------------------------------------------------- boards


def test_the_symmetries_are_the_eight_of_the_square() -> None:
    assert len({tuple(row) for row in symmetry.SYMMETRIES}) == 8
    assert symmetry.SYMMETRIES[0].tolist() == list(range(81))
    board = np.arange(81)
    for row, back in zip(symmetry.SYMMETRIES, symmetry.TARGETS, strict=True):
        corners, middle = sorted(row[[0, 8, 72, 80]]), row[40]
        assert (corners, middle) == ([0, 8, 72, 80], 40)
        np.testing.assert_array_equal(board[row][back], board)


def test_neighbours_stay_neighbours_and_lines_stay_lines() -> None:
    boards = np.random.default_rng(3).choice([0, 1, 1, 1, 2], size=(200, 81))
    for row in symmetry.SYMMETRIES:
        for board in boards:
            lines = sorted(sorted(row.tolist().index(cell) for cell in line) for line in find_lines(board))
            assert lines == sorted(map(sorted, find_lines(board[row])))


def test_legal_moves_stay_legal_and_illegal_ones_illegal() -> None:
    obs, moves = play(rules="seed")
    before = Moves().legal(obs[:-1])
    rng = np.random.default_rng(2)
    symmetries = symmetry.draw_symmetries(rng, NUM_GAMES)
    turned = symmetry.turned(obs, symmetries)
    after = Moves().legal(turned[:-1])
    everything = np.broadcast_to(np.arange(6561)[:, None, None], (6561, NUM_STEPS, NUM_GAMES))
    places = symmetry.turned_moves(everything, symmetries)
    times, games = np.ogrid[:NUM_STEPS, :NUM_GAMES]
    np.testing.assert_array_equal(before.transpose(2, 0, 1), after[times, games, places])
    assert np.take_along_axis(after, symmetry.turned_moves(moves, symmetries)[..., None], -1).all()


def test_the_next_observation_is_that_of_the_turned_move() -> None:
    """What the player does to the board, without the balls that fall, is turned with it."""
    obs, moves = play()
    new_obs, new_moves = seen_otherwise(obs, moves)
    for before, number, turned, new in zip(
        obs[:-1].reshape(-1, 84), moves.ravel(), new_obs[:-1].reshape(-1, 84), new_moves.ravel(), strict=True
    ):
        source, target = divmod(int(number), 81)
        new_source, new_target = divmod(int(new), 81)
        assert can_move(turned[:81].tolist(), new_source, new_target)
        counts = [sorted(np.unique(row[:81], return_counts=True)[1]) for row in (before, turned)]
        assert counts[0] == counts[1]
        same = before[:81] == before[source]
        assert np.count_nonzero(same) == np.count_nonzero(turned[:81] == turned[new_source])
        assert before[target] == turned[new_target] == 0


def test_a_move_clears_as_much_on_the_turned_board() -> None:
    board = cells(
        """
        RRRR.....
        ......GGG
        .....G...
        ....G..R.
        """
    )
    obs = np.array([*board, 1, 2, 3], np.int8)
    move = action("d8 a5")
    points = set()
    for seed in range(20):
        new_obs, new_moves = seen_otherwise(np.tile(obs, (2, 1, 1)), np.array([[move]]), seed=seed)
        game = Game(RULES["classic"], Stream(5))
        game.board, game.coming = new_obs[0, 0, :81].tolist(), new_obs[0, 0, 81:].tolist()
        points.add(game.move(*divmod(int(new_moves[0, 0]), 81)))
    assert points == {(10, 5)}


def test_colours_are_renamed_on_the_board_and_in_what_comes_next() -> None:
    obs, moves = play()
    new_obs, new_moves = seen_otherwise(obs, moves, symmetry=False)
    np.testing.assert_array_equal(new_moves, moves)
    assert new_obs.dtype == obs.dtype
    for game in range(NUM_GAMES):
        pairs = set(zip(obs[:, game].ravel().tolist(), new_obs[:, game].ravel().tolist(), strict=True))
        names = dict(pairs)
        assert len(names) == len(pairs), "one new name for each colour, in all steps of a game"
        assert names[0] == 0
        assert len(set(names.values())) == len(names)
    assert not np.array_equal(new_obs, obs)


def test_nothing_changes_when_nothing_is_asked_for() -> None:
    obs, moves = play()
    new_obs, new_moves = seen_otherwise(obs, moves, symmetry=False, colours=False)
    np.testing.assert_array_equal(new_obs, obs)
    np.testing.assert_array_equal(new_moves, moves)


def test_every_symmetry_is_drawn_and_games_differ() -> None:
    drawn = symmetry.draw_symmetries(np.random.default_rng(0), 400)
    assert np.bincount(drawn, minlength=8).min() > 20
    renamings = symmetry.draw_renamings(np.random.default_rng(0), 50)
    assert len({tuple(row) for row in renamings}) > 45
    np.testing.assert_array_equal(np.sort(renamings, axis=1), np.tile(np.arange(8), (50, 1)))


# ---------------------------------------------------------------- rounds


def run_config(algorithm: Any, degree: int = 0, env: str = "offbeat/ColorLines-v0") -> RunConfig:
    return RunConfig(
        algorithm=algorithm,
        env=EnvConfig(id=env, num_envs=NUM_GAMES),
        async_training=AsyncTrainingConfig(off_policy_degree=degree),
    )


def collected(seed: int = 0) -> Round:
    """A round of random games as a collector stores it."""
    obs, moves = play(seed)
    head, shape = MoveActions(), moves.shape
    actions = head.from_env(moves.ravel(), obs[:-1].reshape(-1, 84)).reshape(shape)
    falses = np.zeros(shape, np.bool_)
    logp = np.full(shape, -5.0, np.float32)
    rewards = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return Round(obs, actions, logp, rewards, falses, falses.copy(), ~falses)


def augment_of(wanted: str) -> Any:
    made = make_augment(run_config(PPOConfig(augment=wanted)))
    assert isinstance(made, AugmentMoves)
    return made


@pytest.mark.parametrize(
    ("wanted", "symmetry", "colours"),
    [("symmetry", True, False), ("colours", False, True), ("both", True, True)],
)
def test_settings_say_what_is_changed(wanted: str, symmetry: bool, colours: bool) -> None:
    made = augment_of(wanted)
    assert (made.symmetry, made.colours) == (symmetry, colours)


def test_stored_actions_name_the_turned_moves() -> None:
    data = collected()
    seen = augment_of("both")(data, np.random.default_rng(7))
    head = MoveActions()
    before = head.to_env(data.actions.ravel(), data.obs[:-1].reshape(-1, 84)).reshape(data.actions.shape)
    obs, moves = Moves().augment(np.random.default_rng(7), data.obs, before, symmetry=True, colours=True)
    np.testing.assert_array_equal(seen.obs, obs)
    found = head.to_env(seen.actions.ravel(), seen.obs[:-1].reshape(-1, 84)).reshape(moves.shape)
    np.testing.assert_array_equal(found, moves)
    assert seen.actions.dtype == data.actions.dtype
    assert seen.rewards is data.rewards


def test_steps_after_the_end_of_a_game_do_no_harm() -> None:
    """An action on a full board is ignored by the environment, and names nothing."""
    data = collected()
    data.obs[3, 0, :81] = 1
    data.actions[3, 0] = 0
    data.valid[3, 0] = False
    seen = augment_of("both")(data, np.random.default_rng(0))
    assert seen.actions[3, 0] == 0
    assert (seen.actions >= 0).all()
    assert (seen.actions < MoveActions().num_outputs).all()


def test_the_same_generator_gives_the_same_round_and_another_one_does_not() -> None:
    data, augment = collected(), augment_of("both")
    first, second, other = (augment(data, np.random.default_rng(seed)) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.obs, second.obs)
    np.testing.assert_array_equal(first.actions, second.actions)
    assert not np.array_equal(first.obs, other.obs)


def test_pattern_tables_think_the_same_of_turned_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first lesson must be the same for both, so that only what they see in the second differs.
    algorithm = {"num_steps": NUM_STEPS, "minibatch_size": 72, "num_epochs": 1, "correction": "decoupled"}
    learners = [make_learner(run_config(PPOConfig(**algorithm, lr=0.1, augment=a))) for a in ("none", "both")]
    state = trained_state(algorithm)
    lessons = []
    for learner in learners:
        learner.load_state_dict(state)
        monkeypatch.setattr(learner, "_optimise", lambda *args: None)
        lessons.append(learner._learn(collected(), 1, np.random.default_rng(9), is_stale=True))
    assert not np.array_equal(lessons[0].data.obs, lessons[1].data.obs)
    plain, augmented = (lesson.behaviour_log_ratios for lesson in lessons)
    assert plain.std() > 1e-3, "the policy has learnt something"
    np.testing.assert_allclose(augmented, plain, atol=1e-4)
    np.testing.assert_allclose(lessons[1].values, lessons[0].values, atol=1e-4)


def trained_state(algorithm: dict[str, Any]) -> Any:
    learner = make_learner(run_config(PPOConfig(**algorithm, lr=0.1, lr_schedule="constant")))
    for version in range(2):
        learner._learn(collected(version + 1), version, np.random.default_rng(version), is_stale=True)
    return learner.state_dict()


def batch() -> Batch:
    """What a round of a learner gets."""
    data = collected()
    names = ("obs", "actions", "logp", "rewards", "terminated", "truncated", "valid")
    arrays = {name: getattr(data, name) for name in names}
    ticket = Ticket(0, 0, 0, 0, 1)
    return Batch(0, (Segment(ticket, arrays, np.array([0]), {"env_steps": 72}),), 0)


@pytest.mark.parametrize("make", [make_learner, make_per_learner])
def test_rounds_are_augmented_by_their_own_generator(make: Any) -> None:
    """The same run trains the same weights again, and others than one that is not augmented."""
    small = {"num_steps": NUM_STEPS, "minibatch_size": 72, "network": {"kind": "board", "hidden": (4,)}}
    if make is make_per_learner:
        kind: Any = PPOPERConfig
        small |= {"batch_size": 6, "buffer_capacity": 12}
    else:
        kind = PPOConfig
    digests = []
    for wanted in ("both", "both", "none"):
        learner = make(run_config(kind(**small, augment=wanted, correction="decoupled")), SingleRank())
        learner.train(batch())
        digests.append(learner.checksum())
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


# ---------------------------------------------------------------- settings


def test_environment_without_symmetries_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.augment is both.*CartPole-v1.*set algorithm\.augment"):
        check(run_config(PPOConfig(augment="both"), env="CartPole-v1"))
    check(run_config(PPOConfig(), env="CartPole-v1"))
    check(run_config(PPOConfig(augment="symmetry")))


def test_augmented_samples_are_corrected_at_any_dial() -> None:
    assert ppo_config(run_config(PPOConfig(augment="both"))).correction == "decoupled"
    assert ppo_config(run_config(PPOConfig())).correction == "gae"
    refused = PPOConfig(augment="both", correction="gae")
    assert [key for key, _ in refused.problems(run_config(refused))] == ["correction"]
