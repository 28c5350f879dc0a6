"""Convolutions on a board: shapes, legal moves only, gradients for every parameter, and a step that helps."""

import numpy as np
import pytest
import torch

from offbeat.envs.colorlines.env import observation_space
from offbeat.envs.colorlines.moves import Moves
from offbeat.models.actor import initial_memory, make_actor
from offbeat.models.board import BoardActorCritic
from offbeat.models.flat import FlatAdam, FlatParameters
from offbeat.models.likelihood import likelihood
from offbeat.models.lines_kernels import ILLEGAL, MAX_MOVES
from offbeat.models.networks import CRITIC_PREFIX, make_network
from offbeat.models.spec import NetworkConfig, network_spec
from tests.unit.board_fakes import EMPTY, FULL, as_matrix, boards

SPEC = network_spec(NetworkConfig(kind="board", hidden=(12, 8)), observation_space(), Moves())


def make(seed=0):
    generator = torch.Generator().manual_seed(seed)
    network = make_network(SPEC, generator)
    assert isinstance(network, BoardActorCritic)
    with torch.no_grad():
        # Trained-looking parameters: an untrained head is almost 0 and would hide errors.
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network


def tensor(obs):
    return torch.from_numpy(obs)


def test_shapes_and_legal_moves():
    obs = boards(9, seed=1)
    found = make().evaluate(tensor(obs))
    assert found.outputs.shape == (9, MAX_MOVES)
    assert found.values.shape == (9,)
    assert torch.isfinite(found.values).all()
    legal = Moves().legal(obs).reshape(9, 81, 81)
    np.testing.assert_array_equal(~np.isnan(as_matrix(obs, found.outputs.numpy())), legal)


def test_all_ways_to_ask_agree():
    network, obs = make(), boards(5, seed=2)
    found = network.evaluate(tensor(obs))
    with torch.no_grad():
        torch.testing.assert_close(network.outputs(tensor(obs)), found.outputs)
        torch.testing.assert_close(network.values(tensor(obs)), found.values)
        alone = network.outputs(tensor(obs[3:4]))
    torch.testing.assert_close(alone, found.outputs[3:4], rtol=1e-4, atol=1e-5)


def test_a_score_belongs_to_both_ends_of_a_move():
    """Other than a sum over ends, it can prefer one target for one ball and another for the next."""
    obs = boards(1, seed=3, fill=0.3)
    (scores,) = as_matrix(obs, make().evaluate(tensor(obs)).outputs.numpy())
    sources, targets = np.flatnonzero(~np.isnan(scores).all(1)), np.flatnonzero(~np.isnan(scores).all(0))
    inner = scores[np.ix_(sources[:6], targets[:6])]
    inner = inner[~np.isnan(inner).any(1)]
    assert len(inner) >= 2
    assert np.abs((inner[0] - inner[1]) - (inner[0] - inner[1]).mean()).max() > 1e-4


def test_coming_colours_matter():
    obs = boards(1, seed=4)
    other = obs.copy()
    other[0, -3:] = other[0, -3:] % 7 + 1
    network = make()
    values = network.evaluate(tensor(np.concatenate([obs, other]))).values
    assert abs(values[0] - values[1]) > 1e-5
    swapped = obs.copy()
    swapped[0, -3:] = obs[0, [-1, -3, -2]]
    torch.testing.assert_close(network.values(tensor(swapped)), network.values(tensor(obs)))


def test_gradients_are_those_of_autograd_and_reach_every_parameter():
    network, obs = make(), boards(6, seed=5)
    parameters = FlatParameters(network)
    generator = torch.Generator().manual_seed(0)
    by_outputs, by_values = (
        torch.randn(6, MAX_MOVES, generator=generator),
        torch.randn(6, generator=generator),
    )
    parameters.sums.zero_()
    network.evaluate(tensor(obs)).backward(by_outputs, by_values)
    found = parameters.grad.clone()
    parameters.sums.zero_()
    outputs, values = network.outputs(tensor(obs)), network.values(tensor(obs))
    (
        (outputs * by_outputs).masked_fill(outputs == float(ILLEGAL), 0).sum() + (values * by_values).sum()
    ).backward()
    torch.testing.assert_close(found, parameters.grad, rtol=1e-3, atol=1e-3)
    assert all(parameter.grad.abs().max() > 0 for parameter in network.parameters())


def test_steps_lower_the_loss():
    network, obs = make(), boards(16, seed=6)
    parameters = FlatParameters(network)
    optimizer = FlatAdam(parameters, eps=1e-5)
    wanted = torch.from_numpy(np.array([np.flatnonzero(row)[0] for row in Moves().legal(obs)]))
    actions = torch.from_numpy(SPEC.actions.from_env(wanted.numpy(), obs))
    losses = []
    for _ in range(15):
        parameters.sums.zero_()
        network_says = network.evaluate(tensor(obs))
        judged = likelihood(SPEC.actions, network_says.outputs, actions)
        losses.append((-judged.logp.mean() + 0.5 * (network_says.values - 2).square().mean()).item())
        by_outputs = judged.backward(torch.full((16,), -1 / 16), 0.0)
        network_says.backward(by_outputs, (network_says.values - 2) / 16)
        optimizer.step(0.01)
    assert losses[1] < losses[0]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("obs", [FULL, EMPTY], ids=["full", "empty"])
def test_boards_without_a_move_give_numbers(obs):
    network = make()
    parameters = FlatParameters(network)
    parameters.sums.zero_()
    found = network.evaluate(tensor(obs))
    judged = likelihood(SPEC.actions, found.outputs, torch.zeros(1, dtype=torch.int16))
    assert judged.entropy.item() == pytest.approx(np.log(MAX_MOVES), rel=1e-5), (
        "nothing is better than anything"
    )
    found.backward(judged.backward(torch.ones(1), 1.0), torch.ones(1))
    assert torch.isfinite(parameters.grad).all()


def test_the_actor_mirrors_the_network():
    network, obs = make(), boards(7, seed=7)
    actor = make_actor(SPEC)
    weights = {
        name: parameter.detach().numpy().copy()
        for name, parameter in network.named_parameters()
        if not name.startswith(CRITIC_PREFIX)
    }
    actor.load(weights)
    outputs, memory = actor.outputs(obs, initial_memory(SPEC, 7))
    np.testing.assert_allclose(outputs, network.evaluate(tensor(obs)).outputs, atol=1e-6)
    assert memory.shape == (7, 0)


def test_initialisation_depends_on_the_generator_only():
    first, again, other = (make_network(SPEC, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(first.source.weight, other.source.weight)


def test_an_untrained_policy_is_almost_uniform():
    obs = boards(8, seed=8)
    outputs = make_network(SPEC, torch.Generator().manual_seed(0)).evaluate(tensor(obs)).outputs
    judged = likelihood(SPEC.actions, outputs, torch.zeros(8, dtype=torch.int16))
    counts = (outputs != float(ILLEGAL)).sum(1)
    torch.testing.assert_close(judged.entropy, counts.float().log(), rtol=1e-3, atol=1e-3)
