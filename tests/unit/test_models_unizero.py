"""UniZero's transformer: token by token it says what it says of whole sequences."""

import pytest
import torch

from offbeat.models.observations import ObservationSpec
from offbeat.models.unizero import TransformerSpec, UniZeroNetwork, turned
from offbeat.models.world_spec import WorldSpec

SPEC = WorldSpec(ObservationSpec((4,), "float32"), num_actions=3, latent=16, hidden=8, value_support=5)


def make(spec=SPEC, layers=2, heads=2):
    generator = torch.Generator().manual_seed(0)
    network = UniZeroNetwork(spec, TransformerSpec(layers, heads), generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return network


def sequence(num_rows=5, num_steps=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(num_rows, num_steps, 4, generator=generator)
    return obs, torch.randint(3, (num_rows, num_steps), generator=generator)


@torch.no_grad()
def test_no_token_sees_a_later_one():
    network, (obs, actions) = make(), sequence()
    latents = network.encode(obs)
    whole = network(latents, actions)
    changed = latents.clone()
    changed[:, 3] += torch.randn(16, generator=torch.Generator().manual_seed(9))
    other = network(changed, actions)
    for name in ("policy", "value", "reward", "latent"):
        torch.testing.assert_close(getattr(whole, name)[:, :3], getattr(other, name)[:, :3])
        assert not torch.allclose(getattr(whole, name)[:, 3], getattr(other, name)[:, 3])


@torch.no_grad()
def test_token_by_token_is_the_same_as_all_at_once():
    network, (obs, actions) = make(), sequence()
    latents = network.encode(obs)
    whole = network(latents, actions)
    none = torch.zeros(5, dtype=torch.long)
    state, window = network.look(latents[:, :2], actions[:, :1], none, size=16)
    torch.testing.assert_close(network.policy(state), whole.policy[:, 1])
    for step in (1, 2):
        state, window = network.go_on(network.embed(actions[:, step]), window)
        torch.testing.assert_close(network.reward(state), whole.reward[:, step])
        torch.testing.assert_close(network.latent(state), whole.latent[:, step])
        state, window = network.go_on(latents[:, step + 1], window)
        torch.testing.assert_close(network.value(state), whole.value[:, step + 1])
    window = window.settled()
    assert window.count.tolist() == [7] * 5 and window.fresh.shape[4] == 0
    state, _ = network.go_on(network.embed(actions[:, 3]), window)
    torch.testing.assert_close(network.reward(state), whole.reward[:, 3])


@torch.no_grad()
def test_what_stands_before_an_episode_is_not_seen():
    network, (obs, actions) = make(), sequence()
    first = torch.tensor([0, 1, 2, 3, 3])
    latents = network.encode(obs)
    state, window = network.look(latents, actions[:, :3], first, size=8)
    for row, start in enumerate(first.tolist()):
        alone, _ = network.look(
            latents[row : row + 1, start:], actions[row : row + 1, start:3], torch.tensor([0]), size=8
        )
        torch.testing.assert_close(state[row : row + 1], alone)
    assert window.count.tolist() == [7, 5, 3, 1, 1]
    after, _ = network.go_on(network.embed(actions[:, 3]), window)
    for row, start in enumerate(first.tolist()):
        whole = network(latents[row : row + 1, start:], actions[row : row + 1, start:])
        torch.testing.assert_close(network.reward(after[row : row + 1]), whole.reward[:, -1])


@torch.no_grad()
def test_a_full_window_forgets_its_oldest_tokens():
    network, (obs, actions) = make(layers=1), sequence(num_steps=6)
    latents = network.encode(obs)
    none = torch.zeros(5, dtype=torch.long)
    _, window = network.look(latents[:, :5], actions[:, :4], none, size=4)
    assert window.count.tolist() == [4] * 5
    _, window = network.go_on(network.embed(actions[:, 4]), window)
    window = window.settled()
    assert window.keys_values.shape[4] == 4 and window.count.tolist() == [4] * 5
    state, _ = network.go_on(latents[:, 5], window)
    # With one layer, keys and values of a token do not depend on what came before it.
    tokens = [latents[:, 3], network.embed(actions[:, 3]), latents[:, 4], network.embed(actions[:, 4])]
    alone, _ = network.read(torch.stack([*tokens, latents[:, 5]], 1))
    torch.testing.assert_close(state, alone[:, -1])


def test_turned_vectors_know_their_distance_only():
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 7, 8, generator=generator)
    near = (turned(a, torch.tensor(2)) * turned(b, torch.tensor(5))).sum(-1)
    far = (turned(a, torch.tensor(40)) * turned(b, torch.tensor(43))).sum(-1)
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(near, (a * b).sum(-1))


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_heads_begin_with_no_belief(kind):
    shape = (4,) if kind == "mlp" else (2, 6, 7)
    spec = WorldSpec(ObservationSpec(shape, "float32"), num_actions=3, latent=16, hidden=8, kind=kind)
    network = UniZeroNetwork(spec, TransformerSpec(), torch.Generator().manual_seed(0))
    outputs = network(network.encode(torch.randn(2, 3, *shape)), torch.zeros(2, 3, dtype=torch.long))
    assert not outputs.policy.any() and not outputs.value.any() and not outputs.reward.any()
    torch.testing.assert_close(network.values.mean(outputs.value), torch.zeros(2, 3), atol=1e-5, rtol=0)


def test_gradients_reach_every_parameter():
    network, (obs, actions) = make(), sequence()
    outputs = network(network.encode(obs), actions)
    total = sum(getattr(outputs, name).square().sum() for name in ("policy", "value", "reward", "latent"))
    total.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())
