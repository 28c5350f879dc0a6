"""Actor-critic networks of learners, in torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from offbeat.models.actions import GaussianActions
from offbeat.models.mlp import MLP, linear
from offbeat.models.spec import NetworkSpec

ACTOR_GAIN = 0.01
CRITIC_GAIN = 1.0
HIDDEN_GAIN = math.sqrt(2)
CRITIC_PREFIX = "critic."


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Outputs ``[M, P]`` and values ``[M]`` of M observations, and the way back to the parameters.

    ``backward(grad_outputs, grad_values)`` adds to the parameters' gradients.
    """

    outputs: Tensor
    values: Tensor
    backward: Callable[[Tensor, Tensor], None]


def with_autograd(outputs: Tensor, values: Tensor) -> Evaluation:
    """An evaluation whose way back is the graph behind outputs and values."""

    def backward(grad_outputs: Tensor, grad_values: Tensor) -> None:
        torch.autograd.backward((outputs, values), (grad_outputs, grad_values))

    return Evaluation(outputs.detach(), values.detach(), backward)


class FeedForward(nn.Module, ABC):
    """A network that judges observations one by one."""

    @abstractmethod
    def evaluate(self, obs: Tensor) -> Evaluation:
        """Judge observations ``[M, ...]`` for training."""

    @abstractmethod
    def outputs(self, obs: Tensor) -> Tensor:
        """Outputs ``[M, P]``."""

    @abstractmethod
    def values(self, obs: Tensor) -> Tensor:
        """Values ``[M]``."""


class MLPActorCritic(FeedForward):
    """Separate dense bodies for policy and value; observations ``[M, F]``."""

    def __init__(self, spec: NetworkSpec, generator: torch.Generator) -> None:
        super().__init__()
        sizes = (spec.observation.num_features, *spec.hidden)
        self.actor = MLP((*sizes, _num_head_outputs(spec)), spec.activation, generator, last_gain=ACTOR_GAIN)
        self.critic = MLP((*sizes, 1), spec.activation, generator, last_gain=CRITIC_GAIN)
        self.log_std = _log_std(spec)
        # Like the bodies', its gradient is written out in `evaluate`.
        self.requires_grad_(False)

    def evaluate(self, obs: Tensor) -> Evaluation:
        """Judge observations ``[M, F]`` for training."""
        actor, critic = self.actor.trace(obs), self.critic.trace(obs)

        def backward(grad_outputs: Tensor, grad_values: Tensor) -> None:
            if self.log_std is not None:
                grad_outputs, by_log_std = grad_outputs.chunk(2, dim=-1)
                assert self.log_std.grad is not None
                self.log_std.grad.add_(by_log_std.sum(0))
            self.actor.backward(actor, grad_outputs)
            self.critic.backward(critic, grad_values.unsqueeze(-1))

        return Evaluation(_with_log_std(actor[-1], self.log_std), critic[-1].squeeze(-1), backward)

    def outputs(self, obs: Tensor) -> Tensor:
        """Outputs ``[M, P]``."""
        return _with_log_std(self.actor.forward(obs), self.log_std)

    def values(self, obs: Tensor) -> Tensor:
        """Values ``[M]``."""
        return self.critic.forward(obs).squeeze(-1)


class CNNActorCritic(FeedForward):
    """Convolutions shared by policy and value; observations ``[M, H, W, C]`` or ``[M, C, H, W]``.

    Large images get the layers of https://www.nature.com/articles/nature14236, small ones (MinAtar's
    10 x 10) the single 3 x 3 layer of https://arxiv.org/abs/1903.03176.
    """

    def __init__(self, spec: NetworkSpec, generator: torch.Generator) -> None:
        super().__init__()
        self._scale = spec.observation.scale
        shape = spec.observation.shape
        # The channel axis is the shortest one, the last of several.
        self._channel_first = shape[0] < shape[-1]
        channels, side = (shape[0], shape[1]) if self._channel_first else (shape[-1], shape[0])
        self.trunk = nn.Sequential(*_convolutions(channels, side, generator), nn.Flatten())
        num_features = self._num_trunk_features(shape)
        self.dense = linear(num_features, spec.hidden[-1], HIDDEN_GAIN, generator)
        self.actor = linear(spec.hidden[-1], _num_head_outputs(spec), ACTOR_GAIN, generator)
        self.critic = linear(spec.hidden[-1], 1, CRITIC_GAIN, generator)
        self.log_std = _log_std(spec)

    def evaluate(self, obs: Tensor) -> Evaluation:
        """Judge images for training."""
        features = self.features(obs)
        outputs = _with_log_std(self.actor(features), self.log_std)
        return with_autograd(outputs, self.critic(features).squeeze(-1))

    def outputs(self, obs: Tensor) -> Tensor:
        """Outputs ``[M, P]``."""
        return _with_log_std(self.actor(self.features(obs)), self.log_std)

    def values(self, obs: Tensor) -> Tensor:
        """Values ``[M]``."""
        values: Tensor = self.critic(self.features(obs))
        return values.squeeze(-1)

    def features(self, obs: Tensor) -> Tensor:
        """Shared features ``[M, hidden]``; bytes are scaled here, so that storage stays small."""
        if not obs.is_floating_point():
            obs = obs.float() * self._scale
        if not self._channel_first:
            obs = obs.permute(0, 3, 1, 2)
        features: Tensor = self.dense(self.trunk(obs.contiguous()))
        return features.relu()

    def _num_trunk_features(self, shape: tuple[int, ...]) -> int:
        obs = torch.zeros(1, *shape)
        with torch.no_grad():
            return int(self.trunk(obs if self._channel_first else obs.permute(0, 3, 1, 2)).shape[1])


class GRUActorCritic(nn.Module):
    """Dense encoder, gated recurrent unit, linear heads; sequences ``[T, M, F]``."""

    def __init__(self, spec: NetworkSpec, generator: torch.Generator) -> None:
        super().__init__()
        *encoder, size = spec.hidden
        sizes = (spec.observation.num_features, *encoder)
        self.encoder = nn.ModuleList(linear(*pair, HIDDEN_GAIN, generator) for pair in pairwise(sizes))
        self._activate = torch.tanh if spec.activation == "tanh" else torch.relu
        self.memory = nn.ModuleDict(
            {
                "input": linear(sizes[-1], 3 * size, 1.0, generator),
                "recurrent": linear(size, 3 * size, 1.0, generator),
            }
        )
        self.actor = linear(size, _num_head_outputs(spec), ACTOR_GAIN, generator)
        self.critic = linear(size, 1, CRITIC_GAIN, generator)
        self.log_std = _log_std(spec)

    def forward(self, obs: Tensor, memory: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[T, M, P]`` and values ``[T, M]``.

        Args:
            obs: ``[T, M, F]``.
            memory: ``[M, H]`` before the first step.
            valid: ``[T, M]``; the memory after a step that is not valid is that of a new episode, zeros.
        """
        num_steps, num_envs = obs.shape[:2]
        features = obs.reshape(num_steps * num_envs, -1)
        for layer in self.encoder:
            features = self._activate(layer(features))
        projected = self.memory["input"](features)
        states = _unroll(projected.view(num_steps, num_envs, -1), memory, valid, self.memory["recurrent"])
        return _with_log_std(self.actor(states), self.log_std), self.critic(states).squeeze(-1)


ActorCritic = FeedForward | GRUActorCritic


def make_network(spec: NetworkSpec, generator: torch.Generator) -> ActorCritic:
    """Build the network of a spec, initialised from ``generator`` only."""
    if spec.kind == "lines":
        from offbeat.models.lines import LinesActorCritic

        return LinesActorCritic()
    if spec.kind == "board":
        from offbeat.models.board import BoardActorCritic

        return BoardActorCritic(spec, generator)
    if spec.kind == "gru":
        return GRUActorCritic(spec, generator)
    if spec.kind == "cnn":
        return CNNActorCritic(spec, generator)
    return MLPActorCritic(spec, generator)


def _unroll(projected: Tensor, memory: Tensor, valid: Tensor, recurrent: nn.Module) -> Tensor:
    """Memory after each step ``[T, M, H]``; the recurrence of ``numpy_actor.gru_step``."""
    size = memory.shape[-1]
    keep = valid.unsqueeze(-1).to(memory.dtype)
    states: list[Tensor] = []
    for step, inputs in enumerate(projected.unbind(0)):
        carried = recurrent(memory)
        gates = torch.sigmoid(inputs[:, : 2 * size] + carried[:, : 2 * size])
        reset, update = gates.chunk(2, dim=-1)
        candidate = torch.tanh(inputs[:, 2 * size :] + reset * carried[:, 2 * size :])
        state = torch.lerp(candidate, memory, update)
        states.append(state)
        memory = state * keep[step]
    return torch.stack(states)


def _convolutions(channels: int, side: int, generator: torch.Generator) -> list[nn.Module]:
    if side < 36:
        layers = [(channels, 16, 3, 1)]
    else:
        layers = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
    modules: list[nn.Module] = []
    for num_in, num_out, kernel, stride in layers:
        with torch.random.fork_rng(devices=()):
            layer = nn.Conv2d(num_in, num_out, kernel, stride)
        nn.init.orthogonal_(layer.weight, HIDDEN_GAIN, generator=generator)
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        modules += [layer, nn.ReLU()]
    return modules


def _num_head_outputs(spec: NetworkSpec) -> int:
    head = spec.actions
    return head.num_outputs // 2 if isinstance(head, GaussianActions) else head.num_outputs


def _log_std(spec: NetworkSpec) -> nn.Parameter | None:
    head = spec.actions
    return nn.Parameter(torch.zeros(head.num_outputs // 2)) if isinstance(head, GaussianActions) else None


def _with_log_std(mean: Tensor, log_std: Tensor | None) -> Tensor:
    return mean if log_std is None else torch.cat([mean, log_std.expand_as(mean)], dim=-1)
