"""Moves as actions: the legal ones and no other, in the environment's numbers and back, drawn as scored."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.distributions import Categorical

from offbeat.envs.colorlines.env import observation_space
from offbeat.envs.colorlines.moves import Moves
from offbeat.models.actions import Explores, action_head
from offbeat.models.actor import initial_memory, make_actor
from offbeat.models.likelihood import likelihood
from offbeat.models.lines_kernels import CELLS, ILLEGAL, MAX_MOVES, pair_moves
from offbeat.models.moves import MoveActions
from offbeat.models.spec import NetworkConfig, network_spec
from tests.unit.board_fakes import EMPTY, FULL, any_boards, boards
from tests.unit.colorlines_boards import action, cells

HEAD = action_head(Moves())
SPEC = network_spec(NetworkConfig(), observation_space(), Moves())


def scored(obs, seed=0):
    """Outputs of random tables for boards ``[N, 84]``."""
    actor, rng = make_actor(SPEC), np.random.default_rng(seed)
    from offbeat.models.lines import LinesActorCritic

    network = LinesActorCritic()
    weights = {
        name: 0.5 * rng.normal(size=parameter.shape).astype(np.float32)
        for name, parameter in network.named_parameters()
    }
    actor.load(weights)
    return actor.outputs(obs, initial_memory(SPEC, len(obs)))[0]


def moves_of(obs):
    moves = np.empty((len(obs), MAX_MOVES), np.int64)
    pair_moves(obs, moves)
    return moves


def test_a_space_of_moves_gets_its_own_head():
    assert isinstance(HEAD, MoveActions)
    assert isinstance(HEAD, Explores)
    assert HEAD.num_outputs == MAX_MOVES == 40 * 41
    assert (HEAD.shape, HEAD.dtype) == ((), "int16")


@settings(max_examples=150, deadline=None)
@given(obs=any_boards())
def test_scored_moves_are_the_legal_ones(obs):
    legal = set(np.flatnonzero(Moves().legal(obs)[0]).tolist())
    (outputs,), (moves,) = scored(obs), moves_of(obs)
    numbers = np.flatnonzero(outputs != ILLEGAL)
    repeated = np.repeat(obs, len(numbers), axis=0)
    found = HEAD.to_env(numbers.astype(np.int16), repeated)
    assert set(found.tolist()) == legal
    assert len(found) == len(legal)
    np.testing.assert_array_equal(moves[numbers], found)
    assert (moves[outputs == ILLEGAL] == -1).all()


@settings(max_examples=150, deadline=None)
@given(obs=any_boards())
def test_numbers_of_moves_go_to_the_environment_and_back(obs):
    legal = np.flatnonzero(Moves().legal(obs)[0])
    repeated = np.repeat(obs, len(legal), axis=0)
    numbers = HEAD.from_env(legal, repeated)
    assert numbers.dtype == np.int16
    assert len(set(numbers.tolist())) == len(legal)
    np.testing.assert_array_equal(HEAD.to_env(numbers, repeated), legal)


def test_moves_are_counted_by_balls_and_empty_cells():
    obs = np.array([[*cells("R.......G"), 1, 2, 3]], np.int8)
    # 79 empty cells: the first ball's moves have the numbers 0 to 78, the second one's 79 to 157.
    assert HEAD.to_env(np.array([0], np.int16), obs).tolist() == [action("a1 a2")]
    assert HEAD.to_env(np.array([79 + 78], np.int16), obs).tolist() == [action("a9 i9")]
    assert HEAD.from_env(np.array([action("a9 a2")]), obs).tolist() == [79]


# ---------------------------------------------------------------- drawing


def test_moves_are_drawn_as_often_as_scored():
    """Chi-square of 60,000 draws on one board; 5 standard deviations of its distribution."""
    obs = boards(1, seed=3, fill=0.85)
    num, rng = 60_000, np.random.default_rng(0)
    outputs = np.repeat(scored(obs), num, axis=0)
    drawn = HEAD.sample(outputs, HEAD.noise(rng, 1, num)[0])
    legal = np.flatnonzero(outputs[0] != ILLEGAL)
    assert set(drawn.tolist()) <= set(legal.tolist())
    weights = np.exp(outputs[0, legal].astype(np.float64))
    expected = num * weights / weights.sum()
    counts = np.bincount(drawn, minlength=MAX_MOVES)[legal]
    often = expected > 5
    assert often.sum() > 10
    statistic = np.sum((counts - expected)[often] ** 2 / expected[often])
    freedom = often.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    stored = np.exp(HEAD.log_prob(outputs[: len(legal)], legal.astype(np.int16)))
    np.testing.assert_allclose(stored, weights / weights.sum(), rtol=1e-4)


def test_explored_moves_are_drawn_as_often_as_stored():
    obs = boards(1, seed=3, fill=0.85)
    num, rng = 60_000, np.random.default_rng(1)
    mixed = HEAD.explore(scored(obs), temperature=0.5, epsilon=0.4)
    legal = np.flatnonzero(scored(obs)[0] != ILLEGAL)
    assert ((mixed[0] == ILLEGAL) == (scored(obs)[0] == ILLEGAL)).all()
    drawn = HEAD.sample(np.repeat(mixed, num, axis=0), HEAD.noise(rng, 1, num)[0])
    counts = np.bincount(drawn, minlength=MAX_MOVES)[legal]
    rows = np.repeat(mixed, len(legal), axis=0)
    expected = num * np.exp(HEAD.log_prob(rows, legal.astype(np.int16)).astype(np.float64))
    assert expected.min() >= 0.4 * num / len(legal) * 0.999
    statistic = np.sum((counts - expected) ** 2 / expected)
    assert statistic < len(legal) - 1 + 5 * np.sqrt(2 * (len(legal) - 1))


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(np.float32(1), np.float32(0))])
def test_the_ends_of_the_draw_are_legal(uniform):
    obs = boards(64, seed=4)
    outputs = scored(obs)
    drawn = HEAD.sample(outputs, np.full((64, 1), uniform, np.float32))
    assert (outputs[np.arange(64), drawn] != ILLEGAL).all()


def test_the_likeliest_move():
    obs = boards(16, seed=5)
    outputs = scored(obs)
    best = HEAD.mode(outputs)
    assert (outputs[np.arange(16), best] == outputs.max(1)).all()
    legal = Moves().legal(obs)
    assert legal[np.arange(16), HEAD.to_env(best, obs)].all()


# ---------------------------------------------------------------- likelihood


def test_likelihood_and_its_gradients_are_those_of_torch():
    obs = boards(10, seed=6)
    outputs = torch.from_numpy(scored(obs))
    actions = torch.from_numpy(HEAD.sample(outputs.numpy(), HEAD.noise(np.random.default_rng(0), 1, 10)[0]))
    generator = torch.Generator().manual_seed(0)
    grad_logp, grad_entropy = torch.randn(2, 10, generator=generator)
    judged = likelihood(HEAD, outputs, actions)
    masked = outputs.double().requires_grad_()
    reference = Categorical(logits=masked)
    logp, entropy = reference.log_prob(actions.long()), reference.entropy()
    torch.testing.assert_close(judged.logp.double(), logp.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(judged.entropy.double(), entropy.detach(), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(HEAD.log_prob(outputs.numpy(), actions.numpy()), logp.detach(), atol=1e-5)
    for by_entropy in (grad_entropy, 0.3, 0.0):
        ((grad_logp * logp).sum() + (by_entropy * entropy).sum()).backward(retain_graph=True)
        found = judged.backward(grad_logp, by_entropy)
        torch.testing.assert_close(found.double(), masked.grad, atol=1e-5, rtol=1e-4)
        assert (found[outputs == float(ILLEGAL)] == 0).all()
        masked.grad = None


@pytest.mark.parametrize("obs", [FULL, EMPTY], ids=["full", "empty"])
def test_boards_without_a_move_give_numbers(obs):
    """Such boards are over, but stand in a batch until their world starts anew."""
    outputs = scored(obs)
    drawn = HEAD.sample(outputs, np.full((1, 1), 0.7, np.float32))
    for chosen in (drawn, HEAD.mode(outputs)):
        assert 0 <= HEAD.to_env(chosen, obs)[0] < CELLS * CELLS
        assert np.isfinite(HEAD.log_prob(outputs, chosen)).all()
    judged = likelihood(HEAD, torch.from_numpy(outputs), torch.from_numpy(drawn))
    gradient = judged.backward(torch.ones(1), torch.ones(1))
    for part in (judged.logp, judged.entropy, gradient):
        assert torch.isfinite(part).all()
    assert np.isfinite(HEAD.explore(outputs, temperature=2.0, epsilon=0.1)).all()


def test_only_neighbours_move_into_the_last_empty_cell():
    board = np.arange(CELLS) % 7 + 1
    board[0] = 0
    obs = np.concatenate([board, [1, 2, 3]]).astype(np.int8)[None]
    outputs = scored(obs)
    legal = np.flatnonzero(outputs[0] != ILLEGAL)
    assert HEAD.to_env(legal.astype(np.int16), np.repeat(obs, len(legal), 0)).tolist() == [
        action("a2 a1"),
        action("b1 a1"),
    ]


def test_scores_far_apart_stay_finite():
    outputs = np.full((1, MAX_MOVES), ILLEGAL, np.float32)
    outputs[0, :3] = [-5e4, 3e4, 0.0]
    judged = likelihood(HEAD, torch.from_numpy(outputs), torch.tensor([0], dtype=torch.int16))
    assert judged.logp.item() == pytest.approx(-8e4)
    assert judged.entropy.item() == pytest.approx(0.0)
    assert torch.isfinite(judged.backward(torch.ones(1), torch.ones(1))).all()
    assert HEAD.sample(outputs, np.full((1, 1), 0.999, np.float32)).tolist() == [1]
