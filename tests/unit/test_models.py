"""Networks: numpy actors mirror torch networks, hand-written gradients are those of autograd."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import nn

from offbeat.errors import CheckpointError, ConfigError
from offbeat.models.actions import action_head
from offbeat.models.actor import initial_memory, make_actor
from offbeat.models.flat import FlatParameters
from offbeat.models.likelihood import likelihood
from offbeat.models.mlp import MLP
from offbeat.models.networks import CRITIC_PREFIX, GRUActorCritic, make_network
from offbeat.models.observations import Normalizer, encode, observation_spec
from offbeat.models.spec import NetworkConfig, network_spec

FLOATS = Box(-np.inf, np.inf, (3,), np.float32)
SPACES = {"discrete": Discrete(4), "multi": MultiDiscrete([2, 3]), "box": Box(-1, 1, (2,), np.float32)}


def make(observation_space, action_space, seed=0, **network):
    spec = network_spec(NetworkConfig(**network), observation_space, action_space)
    generator = torch.Generator().manual_seed(seed)
    net = make_network(spec, generator)
    with torch.no_grad():
        # Trained-looking parameters: an untrained head is almost 0 and would hide errors.
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return spec, net


def actor_weights(net):
    named = net.named_parameters()
    return {name: p.detach().numpy().copy() for name, p in named if not name.startswith(CRITIC_PREFIX)}


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_mlp_backward_is_that_of_autograd(activation):
    generator = torch.Generator().manual_seed(1)
    mlp = MLP((3, 8, 5, 2), activation, generator, last_gain=1.0)
    parameters = FlatParameters(mlp)
    act = nn.Tanh if activation == "tanh" else nn.ReLU
    reference = nn.Sequential(nn.Linear(3, 8), act(), nn.Linear(8, 5), act(), nn.Linear(5, 2))
    with torch.no_grad():
        for ours, theirs in zip(mlp.parameters(), reference.parameters(), strict=True):
            ours.add_(0.1 * torch.randn(ours.shape, generator=generator))
            theirs.copy_(ours)
    x, grad = torch.randn(16, 3, generator=generator), torch.randn(16, 2, generator=generator)
    trace = mlp.trace(x)
    expected = reference(x)
    torch.testing.assert_close(trace[-1], expected)
    for _ in range(2):
        mlp.backward(trace, grad)
    expected.backward(2 * grad)
    flat = torch.cat([p.grad.reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(parameters.grad, flat)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("normalised", [False, True])
def test_numpy_mlp_mirrors_the_network(kind, normalised):
    spec, net = make(FLOATS, SPACES[kind], hidden=(8, 6))
    obs = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    normalizer = Normalizer(np.full(3, 0.5, np.float32), np.full(3, 2.0, np.float32)) if normalised else None
    weights = actor_weights(net) | (normalizer.to_weights() if normalizer else {})
    actor = make_actor(spec)
    actor.load(weights)
    outputs, _ = actor.outputs(obs, initial_memory(spec, 7))
    expected = net.outputs(torch.from_numpy(encode(obs, spec.observation, normalizer)))
    assert outputs.shape == (7, spec.actions.num_outputs)
    np.testing.assert_allclose(outputs, expected.detach(), atol=1e-6)


@pytest.mark.parametrize("hidden", [(5,), (8, 5)])
def test_numpy_gru_mirrors_the_network(hidden):
    spec, net = make(FLOATS, Discrete(3), kind="gru", hidden=hidden)
    assert isinstance(net, GRUActorCritic)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(6, 4, 3)).astype(np.float32)
    valid = rng.random((6, 4)) > 0.3
    start = rng.normal(size=(4, 5)).astype(np.float32)
    expected, values = net(*(torch.from_numpy(array) for array in (obs, start, valid)))
    actor = make_actor(spec)
    actor.load(actor_weights(net))
    memory = start
    for t in range(6):
        outputs, memory = actor.outputs(obs[t], memory)
        np.testing.assert_allclose(outputs, expected[t].detach(), atol=1e-5)
        memory = memory * valid[t][:, None]
    assert values.shape == (6, 4)


def test_gru_matches_torchs_own():
    _, net = make(FLOATS, Discrete(3), kind="gru", hidden=(5,))
    cell = nn.GRU(3, 5)
    with torch.no_grad():
        for name, parameter in (
            ("weight_ih_l0", net.memory["input"].weight),
            ("bias_ih_l0", net.memory["input"].bias),
            ("weight_hh_l0", net.memory["recurrent"].weight),
            ("bias_hh_l0", net.memory["recurrent"].bias),
        ):
            getattr(cell, name).copy_(parameter)
    obs, start = torch.randn(6, 4, 3), torch.randn(4, 5)
    states, _ = cell(obs, start[None])
    outputs, values = net(obs, start, torch.ones(6, 4, dtype=torch.bool))
    torch.testing.assert_close(outputs, net.actor(states))
    torch.testing.assert_close(values, net.critic(states).squeeze(-1))


@pytest.mark.parametrize(
    "space",
    [
        Box(0, 1, (10, 10, 4), np.bool_),
        Box(0, 255, (4, 84, 84), np.uint8),
        Box(0, 1, (10, 10, 3), np.float32),
    ],
    ids=["minatar", "atari", "floats"],
)
def test_torch_actor_mirrors_the_convolutions(space):
    spec, net = make(space, Discrete(3), hidden=(32,))
    assert spec.kind == "cnn"
    space.seed(0)
    obs = np.stack([space.sample() for _ in range(5)])
    actor = make_actor(spec)
    actor.load(actor_weights(net))
    outputs, _ = actor.outputs(obs, initial_memory(spec, 5))
    evaluation = net.evaluate(torch.from_numpy(obs))
    np.testing.assert_allclose(outputs, evaluation.outputs, atol=1e-5)
    np.testing.assert_allclose(evaluation.values, net.values(torch.from_numpy(obs)).detach(), atol=1e-6)


def test_convolutions_read_either_channel_order():
    _, one = make(Box(0, 1, (4, 10, 10), np.float32), Discrete(3))
    _, other = make(Box(0, 1, (10, 10, 4), np.float32), Discrete(3))
    obs = torch.rand(2, 4, 10, 10)
    torch.testing.assert_close(one.outputs(obs), other.outputs(obs.permute(0, 2, 3, 1)))


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (FLOATS, "mlp"),
        (Box(0, 1, (4, 4), np.float32), "mlp"),
        (Box(0, 1, (3, 4, 2), np.float32), "mlp"),
        (Box(0, 1, (10, 10, 4), np.bool_), "cnn"),
        (Box(0, 255, (84, 84, 3), np.uint8), "cnn"),
    ],
)
def test_auto_takes_convolutions_for_images(space, kind):
    assert network_spec(NetworkConfig(), space, Discrete(2)).kind == kind


def test_convolutions_need_an_image():
    with pytest.raises(ConfigError, match=r"shape \(3,\).*mlp"):
        network_spec(NetworkConfig(kind="cnn"), FLOATS, Discrete(2))


def test_observations_are_stored_small_and_read_as_floats():
    image = observation_spec(Box(0, 255, (2, 2), np.uint8))
    assert (image.dtype, image.scale) == ("uint8", 1 / 255)
    np.testing.assert_allclose(encode(np.full((1, 2, 2), 255, np.uint8), image), np.ones((1, 4)))
    assert observation_spec(Box(0, 1, (2,), np.uint8)).scale == 1.0
    assert observation_spec(Box(0, 1, (2,), np.float64)).dtype == "float32"
    wide = Normalizer(np.zeros(2, np.float32), np.full(2, 1e6, np.float32))
    clipped = encode(np.array([[1, -1]], np.float32), observation_spec(Box(-1, 1, (2,), np.float32)), wide)
    np.testing.assert_array_equal(clipped, [[10, -10]])


@pytest.mark.parametrize("kind", ["mlp", "gru", "cnn"])
def test_initialisation_depends_on_the_generator_only(kind):
    space = Box(0, 1, (10, 10, 4), np.float32) if kind == "cnn" else FLOATS
    spec = network_spec(NetworkConfig(kind=kind), space, Discrete(2))
    before = torch.get_rng_state()
    nets = [make_network(spec, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]
    assert torch.equal(before, torch.get_rng_state())
    first, same, other = (torch.cat([p.detach().reshape(-1) for p in net.parameters()]) for net in nets)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_untrained_policies_are_almost_uniform():
    spec = network_spec(NetworkConfig(), FLOATS, Discrete(4))
    net = make_network(spec, torch.Generator().manual_seed(0))
    assert net.outputs(torch.randn(50, 3)).abs().max() < 0.05


def test_flat_parameters_move_the_module():
    _, net = make(FLOATS, Discrete(4))
    parameters = FlatParameters(net)
    obs = torch.randn(5, 3)
    before = net.outputs(obs).clone()
    saved = parameters.arrays()
    optimizer = torch.optim.Adam([parameters.flat], lr=0.1, fused=True)
    evaluation = net.evaluate(obs)
    evaluation.backward(torch.ones(5, 4), torch.ones(5))
    assert parameters.grad.abs().max() > 0
    optimizer.step()
    assert not torch.equal(before, net.outputs(obs))
    parameters.load(saved)
    assert torch.equal(before, net.outputs(obs))
    with pytest.raises(CheckpointError, match="another network"):
        parameters.load({"x": np.zeros(3)})


def test_every_parameter_gets_a_gradient():
    for space, network in ((SPACES["box"], {}), (Discrete(3), {"kind": "gru"})):
        spec, net = make(FLOATS, space, **network)
        parameters = FlatParameters(net)
        if spec.kind == "gru":
            outputs, values = net(
                torch.randn(4, 6, 3), torch.randn(6, 64), torch.ones(4, 6, dtype=torch.bool)
            )
            (outputs.square().sum() + values.square().sum()).backward()
        else:
            evaluation = net.evaluate(torch.randn(6, 3))
            evaluation.backward(evaluation.outputs + 1, evaluation.values + 1)
        assert all(p.grad.abs().max() > 0 for p in net.parameters())
        assert parameters.grad.count_nonzero() > 0.9 * parameters.grad.numel()


@pytest.mark.parametrize("kind", SPACES)
def test_samples_may_have_entropy_bonuses_of_their_own(kind):
    """A gradient by entropy for each sample is that number for the sample alone."""
    head = action_head(SPACES[kind])
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(6, head.num_outputs)).astype(np.float32)
    actions = head.sample(outputs, head.noise(rng, 1, 6)[0])
    grad_logp, bonuses = torch.randn(6), torch.tensor([0.0, 0.3, -1.0, 2.0, 0.0, 0.5])
    judged = likelihood(head, torch.from_numpy(outputs), torch.from_numpy(actions))
    found = judged.backward(grad_logp, bonuses)
    expected = torch.stack([judged.backward(grad_logp, float(bonus))[i] for i, bonus in enumerate(bonuses)])
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found, judged.backward(grad_logp, 0.0))


def test_world_of_gymnasium_fits():
    env = gymnasium.make("Pendulum-v1")
    spec = network_spec(NetworkConfig(), env.observation_space, env.action_space)
    assert (spec.kind, spec.memory_size, spec.actions.num_outputs) == ("mlp", 0, 2)
