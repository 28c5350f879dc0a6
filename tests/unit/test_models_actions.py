"""Action distributions: numpy against torch.distributions, samples against probabilities."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch.distributions import Categorical, Independent, Normal

from offbeat.envs.colorlines.moves import Moves
from offbeat.errors import ConfigError, EnvError
from offbeat.models.actions import CategoricalActions, action_head, knows_moves
from offbeat.models.likelihood import likelihood
from offbeat.models.spec import NetworkConfig, network_spec

SPACES = {
    "discrete": Discrete(4),
    "multi": MultiDiscrete([2, 3]),
    "grid": MultiDiscrete(np.array([[2, 3], [4, 2]])),
    "box": Box(-1, 1, (2,), np.float32),
    "matrix": Box(-1, 1, (2, 2), np.float32),
}


def draw(head, num=6, seed=0):
    """Outputs ``[num, P]`` and actions sampled from them."""
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(num, head.num_outputs)).astype(np.float32)
    return outputs, head.sample(outputs, head.noise(rng, 1, num)[0])


def reference(head, outputs, actions):
    """Log-probability and entropy by torch.distributions."""
    rows = actions.reshape(len(outputs), -1)
    if head.dtype == "float32":
        mean, log_std = outputs.chunk(2, -1)
        normal = Independent(Normal(mean, log_std.exp()), 1)
        return normal.log_prob(rows), normal.entropy()
    parts = [Categorical(logits=logits) for logits in outputs.split(list(head.nvec), -1)]
    logp = sum(part.log_prob(rows[:, i]) for i, part in enumerate(parts))
    return logp, sum(part.entropy() for part in parts)


@pytest.mark.parametrize("name", SPACES)
def test_log_prob_is_that_of_torch_distributions(name):
    head = action_head(SPACES[name])
    outputs, actions = draw(head)
    assert actions.shape == (6, *SPACES[name].shape)
    expected, _ = reference(head, torch.from_numpy(outputs), torch.from_numpy(actions))
    np.testing.assert_allclose(head.log_prob(outputs, actions), expected, atol=1e-5)
    stacked = head.log_prob(np.stack([outputs, outputs]), np.stack([actions, actions]))
    np.testing.assert_array_equal(stacked[1], head.log_prob(outputs, actions))


@pytest.mark.parametrize("name", SPACES)
def test_likelihood_and_its_gradients_are_those_of_torch(name):
    head = action_head(SPACES[name])
    outputs, actions = (torch.from_numpy(array) for array in draw(head))
    grad_logp, grad_entropy = torch.randn(6, generator=torch.Generator().manual_seed(1)), 0.7
    judged = likelihood(head, outputs, actions)
    leaf = outputs.clone().requires_grad_()
    logp, entropy = reference(head, leaf, actions)
    torch.testing.assert_close(judged.logp, logp.detach())
    torch.testing.assert_close(judged.entropy, entropy.detach())
    ((grad_logp * logp).sum() + grad_entropy * entropy.sum()).backward()
    torch.testing.assert_close(judged.backward(grad_logp, grad_entropy), leaf.grad, atol=1e-5, rtol=1e-4)


def test_categorical_samples_follow_the_softmax():
    head = action_head(Discrete(4))
    logits = np.array([0.0, 1.0, -1.0, 2.0], np.float32)
    noise = head.noise(np.random.default_rng(0), 100, 1000)
    draws = np.stack([head.sample(np.broadcast_to(logits, (1000, 4)), step) for step in noise])
    shares = np.bincount(draws.ravel(), minlength=4) / draws.size
    np.testing.assert_allclose(shares, np.exp(logits) / np.exp(logits).sum(), atol=0.005)
    assert head.mode(logits) == 3


def test_gaussian_samples_have_mean_and_deviation():
    head = action_head(Box(-1, 1, (1,), np.float32))
    outputs = np.broadcast_to(np.array([0.5, np.log(2)], np.float32), (100_000, 2))
    draws = head.sample(outputs, head.noise(np.random.default_rng(0), 1, 100_000)[0])
    assert draws.mean() == pytest.approx(0.5, abs=0.03)
    assert draws.std() == pytest.approx(2.0, abs=0.03)
    np.testing.assert_allclose(head.mode(outputs[:2]), [[0.5], [0.5]])


def test_actions_reach_the_environment_in_its_own_numbers():
    assert action_head(Discrete(3, start=5)).to_env(np.array([0, 2]), np.zeros((2, 1))).tolist() == [5, 7]
    shifted = action_head(MultiDiscrete([2, 3], start=[1, 10]))
    assert shifted.to_env(np.array([[0, 2]]), np.zeros((1, 1))).tolist() == [[1, 12]]
    box = action_head(Box(np.array([-1, 0]), np.array([1, 2]), dtype=np.float64))
    clipped = box.to_env(np.array([[-3, 3]], np.float32), np.zeros((1, 1)))
    assert clipped.tolist() == [[-1, 2]]
    assert clipped.dtype == np.float64


def test_impossible_draws_never_happen():
    head = action_head(Discrete(2))
    noise = head.noise(np.random.default_rng(0), 10, 1000)
    assert np.isfinite(noise).all()
    outputs = np.broadcast_to(np.array([0, -1e9], np.float32), (1000, 2))
    assert not any(head.sample(outputs, step).any() for step in noise)


class Masked(Discrete):
    """Knows which actions are legal, and is no board."""

    def legal(self, obs):
        return np.ones((len(obs), self.n), bool)


def test_legal_actions_alone_make_no_board():
    space = Masked(5)
    assert isinstance(action_head(space), CategoricalActions)
    observations = Box(-1, 1, (84,), np.float32)
    assert network_spec(NetworkConfig(), observations, space).kind == "mlp"
    assert network_spec(NetworkConfig(kind="gru"), observations, space).kind == "gru"
    with pytest.raises(ConfigError, match=r"for moves on a board of 84 numbers.*set it to auto"):
        network_spec(NetworkConfig(kind="lines"), observations, space)
    assert knows_moves(Moves()) and not knows_moves(space)


def test_other_spaces_are_refused():
    with pytest.raises(EnvError, match="MultiBinary"):
        action_head(MultiBinary(3))
    with pytest.raises(EnvError, match="Box"):
        action_head(Box(0, 3, (1,), np.int64))
