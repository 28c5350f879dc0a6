"""MuZero's three functions in torch: see, imagine, judge (https://arxiv.org/abs/1911.08265)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.models.world_spec import WorldSpec
from offbeat.ops.supports import Support


class MuZeroNetwork(nn.Module):
    """Encodes observations, imagines what actions lead to, and says what it is worth.

    Latents are scaled to lie within 0 and 1, so that imagined ones stay where real ones are.
    """

    def __init__(self, spec: WorldSpec, generator: torch.Generator) -> None:
        super().__init__()
        self.spec = spec
        self.values, self.rewards = Support(spec.value_support), Support(spec.reward_support)
        if spec.kind == "conv":
            self.encoder: nn.Module = _ConvEncoder(spec)
            self.dynamics: nn.Module = _ConvDynamics(spec)
            self.reward: nn.Module = _ConvHead(spec, self.rewards.num_atoms)
            self.policy: nn.Module = _ConvHead(spec, spec.num_outputs)
            self.value: nn.Module = _ConvHead(spec, self.values.num_atoms)
        else:
            actions = spec.num_actions or spec.action_size
            self.encoder = dense(spec.observation.num_features, spec.hidden, spec.latent, spec.blocks)
            self.dynamics = _DenseDynamics(spec, actions)
            self.reward = dense(spec.latent + actions, spec.hidden, self.rewards.num_atoms, 1)
            self.policy = dense(spec.latent, spec.hidden, spec.num_outputs, 1)
            self.value = dense(spec.latent, spec.hidden, self.values.num_atoms, 1)
        if spec.projection:
            size = int(torch.tensor(spec.latent_shape).prod())
            self.projector: nn.Module = dense(size, spec.hidden, spec.projection, 1)
            self.expector: nn.Module = dense(spec.projection, spec.hidden, spec.projection, 1)
        seed_layers(self, (self.reward, self.policy, self.value), generator)

    def encode(self, obs: Tensor) -> Tensor:
        """Latents ``[N, ...]`` of observations ``[N, ...]``: floats, planes with their channels first."""
        if self.spec.kind == "mlp":
            obs = obs.flatten(1)
        return _scaled(self.encoder(obs))

    def judge(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Policies ``[N, P]`` and logits of values ``[N, atoms]``."""
        return self.policy(latent), self.value(latent)

    def imagine(self, latent: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Latents after actions ``[N]`` or ``[N, size]``, and logits of the rewards for them."""
        given = self._actions(actions)
        if self.spec.kind == "conv":
            both = torch.cat([latent, _planes(given, latent)], 1)
            after = self.dynamics(both)
            return _scaled(after), cast(Tensor, self.reward(after))
        both = torch.cat([latent, given], -1)
        return _scaled(self.dynamics(both)), cast(Tensor, self.reward(both))

    def project(self, latent: Tensor) -> Tensor:
        """What two latents of the same moment are compared by."""
        return cast(Tensor, self.projector(latent.flatten(1)))

    def consistency(self, imagined: Tensor, seen: Tensor) -> Tensor:
        """How far imagined latents ``[N, ...]`` are from those of real observations, ``[N]`` in -1 to 1.

        SimSiam (https://arxiv.org/abs/2011.10566) as EfficientZero uses it: nothing flows back into ``seen``.
        """
        guess = self.expector(self.project(imagined))
        with torch.no_grad():
            target = self.project(seen)
        return -functional.cosine_similarity(guess.float(), target.float(), dim=-1)

    def _actions(self, actions: Tensor) -> Tensor:
        if self.spec.num_actions:
            return functional.one_hot(actions, self.spec.num_actions).to(torch.float32)
        return actions


class _DenseDynamics(nn.Module):
    def __init__(self, spec: WorldSpec, actions: int) -> None:
        super().__init__()
        self.size = spec.latent
        self.change = dense(spec.latent + actions, spec.hidden, spec.latent, spec.blocks)

    def forward(self, both: Tensor) -> Tensor:
        """What is there, and what the action changes."""
        return both[..., : self.size] + cast(Tensor, self.change(both))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _conv(channels, channels)
        self.second = _conv(channels, channels)

    def forward(self, planes: Tensor) -> Tensor:
        """Add what two convolutions find."""
        return functional.relu(planes + cast(Tensor, self.second(functional.relu(self.first(planes)))))


class _ConvEncoder(nn.Sequential):
    def __init__(self, spec: WorldSpec) -> None:
        blocks = [_Residual(spec.latent) for _ in range(spec.blocks)]
        super().__init__(_conv(spec.planes[0], spec.latent), nn.ReLU(), *blocks)


class _ConvDynamics(nn.Module):
    def __init__(self, spec: WorldSpec) -> None:
        super().__init__()
        self.size = spec.latent
        self.enter = _conv(spec.latent + (spec.num_actions or spec.action_size), spec.latent)
        self.blocks = nn.Sequential(*(_Residual(spec.latent) for _ in range(spec.blocks)))

    def forward(self, both: Tensor) -> Tensor:
        """What is there, and what the action changes."""
        changed = both[:, : self.size] + cast(Tensor, self.enter(both))
        return cast(Tensor, self.blocks(functional.relu(changed)))


class _ConvHead(nn.Sequential):
    def __init__(self, spec: WorldSpec, num_outputs: int) -> None:
        _, height, width = spec.planes
        few = 8
        super().__init__(
            nn.Conv2d(spec.latent, few, 1),
            nn.Flatten(),
            nn.LayerNorm(few * height * width),
            nn.ReLU(),
            dense(few * height * width, spec.hidden, num_outputs, 1),
        )


def dense(num_in: int, hidden: int, num_out: int, layers: int) -> nn.Sequential:
    """Hidden layers, each normalised, and one on top."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(num_in, hidden), nn.LayerNorm(hidden), nn.ReLU()]
        num_in = hidden
    return nn.Sequential(*parts, nn.Linear(num_in, num_out))


def _conv(num_in: int, num_out: int) -> nn.Sequential:
    # GroupNorm over all channels: batches of a search are small and differ from those of training.
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.GroupNorm(1, num_out))


def _planes(values: Tensor, like: Tensor) -> Tensor:
    """Planes ``[N, F, H, W]`` of features ``[N, F]``."""
    return values[:, :, None, None].expand(-1, -1, *like.shape[2:])


def _scaled(latent: Tensor) -> Tensor:
    """Bring the features of each sample between 0 and 1."""
    flat = latent.flatten(1)
    low, high = flat.min(1, keepdim=True).values, flat.max(1, keepdim=True).values
    return ((flat - low) / (high - low).clamp(min=1e-5)).view_as(latent)


@torch.no_grad()
def seed_layers(network: nn.Module, heads: Iterable[nn.Module], generator: torch.Generator) -> None:
    """Draw all weights from ``generator``; the last layers of heads begin at 0: nothing is believed yet."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fan_in = module.weight[0].numel()
            module.weight.normal_(0, (2 / fan_in) ** 0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0, 0.02, generator=generator)
    for head in heads:
        last = [part for part in head.modules() if isinstance(part, nn.Linear)][-1]
        last.weight.zero_()
