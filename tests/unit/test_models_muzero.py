"""MuZero's network: shapes, scales, and that everything can learn."""

import pytest
import torch

from offbeat.models.muzero import MuZeroNetwork
from offbeat.models.observations import ObservationSpec
from offbeat.models.world_spec import WorldSpec

SPECS = {
    "mlp": WorldSpec(ObservationSpec((4,), "float32"), 3, latent=16, hidden=8, projection=8),
    "conv": WorldSpec(
        ObservationSpec((2, 6, 7), "float32"), 7, kind="conv", latent=8, hidden=8, projection=8
    ),
    "continuous": WorldSpec(ObservationSpec((3,), "float32"), 0, 2, latent=16, hidden=8, projection=8),
}


def make(case):
    return MuZeroNetwork(SPECS[case], torch.Generator().manual_seed(0))


def moves(spec, num_rows):
    generator = torch.Generator().manual_seed(1)
    if spec.num_actions:
        return torch.randint(spec.num_actions, (num_rows,), generator=generator)
    return torch.rand(num_rows, spec.action_size, generator=generator) * 2 - 1


@pytest.mark.parametrize("case", SPECS)
def test_shapes_and_scales(case):
    network, spec = make(case), SPECS[case]
    latent = network.encode(torch.randn(5, *spec.observation.shape))
    assert latent.shape == (5, *spec.latent_shape)
    after, reward = network.imagine(latent, moves(spec, 5))
    assert after.shape == latent.shape and reward.shape == (5, 101)
    for one in (latent, after):
        assert one.flatten(1).min(1).values.tolist() == [0.0] * 5
        assert one.flatten(1).max(1).values.tolist() == pytest.approx([1.0] * 5)
    policy, value = network.judge(after)
    assert policy.shape == (5, spec.num_outputs) and not policy.any()
    assert network.values.mean(value).abs().max() < 1e-5


@pytest.mark.parametrize("case", SPECS)
def test_actions_matter(case):
    network, spec = make(case), SPECS[case]
    latent = network.encode(torch.randn(1, *spec.observation.shape)).expand(2, *spec.latent_shape)
    given = torch.tensor([0, 1]) if spec.num_actions else torch.tensor([[0.0, 0.5], [0.0, -0.5]])
    after, _ = network.imagine(latent, given)
    assert not torch.allclose(after[0], after[1])


@pytest.mark.parametrize("case", SPECS)
def test_gradients_reach_every_parameter(case):
    network, spec = make(case), SPECS[case]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    obs = torch.randn(6, *spec.observation.shape)
    latent, seen = network.encode(obs), network.encode(obs + 0.1)
    after, reward = network.imagine(latent, moves(spec, 6))
    policy, value = network.judge(after)
    heads = reward.square().sum() + policy.square().sum() + value.square().sum()
    (network.consistency(after, seen).sum() + heads).backward()
    assert not {name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()}


def test_nothing_flows_back_into_what_was_seen():
    network = make("mlp")
    seen = network.encode(torch.randn(4, 4)).detach().requires_grad_()
    imagined = torch.rand(4, 16, requires_grad=True)
    network.consistency(imagined, seen).sum().backward()
    assert seen.grad is None and imagined.grad is not None


def test_the_same_seed_gives_the_same_weights():
    first, second = make("conv").state_dict(), make("conv").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
