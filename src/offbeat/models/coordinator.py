"""The network that chooses the skills of a team: a transformer that makes one choice after the other.

Where no gradients are asked for it computes in double precision, as ``coordinator_actor`` does: what a
learner finds about choices before it trains on them is then what the collector found, to the last digit of a
float. Training in double precision would take twice as long, and gain nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.models.mlp import linear
from offbeat.models.spec import Activation
from offbeat.models.team_spec import TeamSpec

HIDDEN_GAIN = math.sqrt(2)
LINEAR_GAIN = 1.0
VALUE_GAIN = 1.0
CHOICE_GAIN = 0.01


class SkillCoordinator(nn.Module):
    """Chooses a team skill and then the skill of each agent, from the state and all observations.

    An encoder turns the state and A observations into 1 + A tokens that see each other; each has a value. A
    decoder goes over the 1 + A choices: position 0 reads a start symbol, position 1 the team skill, position
    i the skill of agent i - 1, and none sees what comes later (https://arxiv.org/abs/2205.14953).
    """

    def __init__(self, spec: TeamSpec, generator: torch.Generator) -> None:
        super().__init__()
        width = spec.hidden
        self._num_agents = spec.num_agents
        self.state_norm = nn.LayerNorm(spec.state_size) if spec.feature_norm else None
        self.obs_norm = nn.LayerNorm(spec.obs_size) if spec.feature_norm else None
        self.state = linear(spec.state_size, width, HIDDEN_GAIN, generator)
        self.obs = linear(spec.obs_size, width, HIDDEN_GAIN, generator)
        self.encoder_norm = nn.LayerNorm(width)
        self.encoder = nn.ModuleList(EncoderBlock(spec, generator) for _ in range(spec.blocks))
        self.value = Dense(width, 1, VALUE_GAIN, spec.activation, generator)
        self.start = _table(1, width, generator)
        self.team_skill = _table(spec.num_team_skills, width, generator)
        self.skill = _table(spec.num_skills, width, generator)
        self.decoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderBlock(spec, generator) for _ in range(spec.blocks))
        self.team_head = Dense(width, spec.num_team_skills, CHOICE_GAIN, spec.activation, generator)
        self.skill_head = Dense(width, spec.num_skills, CHOICE_GAIN, spec.activation, generator)

    def evaluate(self, state: Tensor, obs: Tensor, skills: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Judge choices that were made.

        Args:
            state: ``[M, S]``.
            obs: ``[M, A, O]``.
            skills: ``[M, 1 + A]``, the team skill and those of the agents.

        Returns:
            Logits ``[M, nZ]`` of the team skill, logits ``[M, A, nz]`` of the agents' skills, each given the
            choices before it, and values ``[M, 1 + A]``.
        """
        tokens = self._encode(state, obs)
        tables = (self.start, self.team_skill, self.skill)
        indices = (torch.zeros_like(skills[:, :1]), skills[:, :1], skills[:, 1:-1])
        parts = [
            functional.embedding(index, table.to(tokens.dtype))
            for index, table in zip(indices, tables, strict=True)
        ]
        x = _norm(self.decoder_norm, torch.cat(parts, dim=1))
        for block in self.decoder:
            x = block(x, tokens)
        outputs = self.team_head(x[:, 0]), self.skill_head(x[:, 1:]), self._values(tokens)
        team_logits, skill_logits, values = (part.to(state.dtype) for part in outputs)
        return team_logits, skill_logits, values

    def values(self, state: Tensor, obs: Tensor) -> Tensor:
        """Values ``[M, 1 + A]`` of the choices to be made in states ``[M, S]``, seen as ``[M, A, O]``."""
        return self._values(self._encode(state, obs)).to(state.dtype)

    def _encode(self, state: Tensor, obs: Tensor) -> Tensor:
        seen, each = state.unsqueeze(1), obs
        if not torch.is_grad_enabled():
            seen, each = seen.double(), each.double()
        if self.state_norm is not None and self.obs_norm is not None:
            seen, each = _norm(self.state_norm, seen), _norm(self.obs_norm, each)
        x = torch.cat([_affine(self.state, seen), _affine(self.obs, each)], dim=1)
        x = _norm(self.encoder_norm, x)
        for block in self.encoder:
            x = block(x)
        return x

    def _values(self, tokens: Tensor) -> Tensor:
        values: Tensor = self.value(tokens)
        return values.squeeze(-1)


class EncoderBlock(nn.Module):
    """Attention of all tokens to all, and a dense layer for each; tokens ``[M, n, W]``."""

    def __init__(self, spec: TeamSpec, generator: torch.Generator) -> None:
        super().__init__()
        self.attention = Attention(spec.hidden, spec.heads, generator)
        self.norm = nn.LayerNorm(spec.hidden)
        self.dense = Dense(spec.hidden, spec.hidden, LINEAR_GAIN, spec.activation, generator)
        self.dense_norm = nn.LayerNorm(spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The tokens after the block."""
        x = _norm(self.norm, x + self.attention(x, x, is_causal=False))
        return _norm(self.dense_norm, x + self.dense(x))


class DecoderBlock(nn.Module):
    """Two attentions to what is not later, the second asked by the encoder's tokens, and a dense layer."""

    def __init__(self, spec: TeamSpec, generator: torch.Generator) -> None:
        super().__init__()
        self.attention = Attention(spec.hidden, spec.heads, generator)
        self.norm = nn.LayerNorm(spec.hidden)
        self.token_attention = Attention(spec.hidden, spec.heads, generator)
        self.token_norm = nn.LayerNorm(spec.hidden)
        self.dense = Dense(spec.hidden, spec.hidden, LINEAR_GAIN, spec.activation, generator)
        self.dense_norm = nn.LayerNorm(spec.hidden)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Positions ``[M, n, W]`` after the block, with the encoder's tokens ``[M, n, W]``."""
        x = _norm(self.norm, x + self.attention(x, x, is_causal=True))
        x = _norm(self.token_norm, tokens + self.token_attention(tokens, x, is_causal=True))
        return _norm(self.dense_norm, x + self.dense(x))


class Attention(nn.Module):
    """Each position asks the others, https://arxiv.org/abs/1706.03762."""

    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self._heads = heads
        self.query = linear(width, width, LINEAR_GAIN, generator)
        self.key = linear(width, width, LINEAR_GAIN, generator)
        self.value = linear(width, width, LINEAR_GAIN, generator)
        self.out = linear(width, width, LINEAR_GAIN, generator)

    def forward(self, asking: Tensor, asked: Tensor, *, is_causal: bool) -> Tensor:
        """What positions ``[M, n, W]`` get from ``asked`` ``[M, n, W]``; causal: from none that is later."""
        query, key = self._split(self.query, asking), self._split(self.key, asked)
        value = self._split(self.value, asked)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if is_causal:
            size = scores.shape[-1]
            later = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2)
        return _affine(self.out, mixed.reshape(asking.shape))

    def _split(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Heads as an axis of their own, ``[M, heads, n, W / heads]``."""
        return _affine(layer, x).view(*x.shape[:2], self._heads, -1).transpose(1, 2)


class Dense(nn.Module):
    """A hidden layer and a linear one."""

    def __init__(
        self, width: int, num_out: int, gain: float, activation: Activation, generator: torch.Generator
    ) -> None:
        super().__init__()
        self._activate = torch.tanh if activation == "tanh" else torch.relu
        self.hidden = linear(width, width, HIDDEN_GAIN, generator)
        self.out = linear(width, num_out, gain, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., W]`` to ``[..., out]``."""
        return _affine(self.out, self._activate(_affine(self.hidden, x)))


def _affine(layer: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def _norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return functional.layer_norm(
        x, layer.normalized_shape, layer.weight.to(x.dtype), layer.bias.to(x.dtype), layer.eps
    )


def _table(count: int, width: int, generator: torch.Generator) -> nn.Parameter:
    """Embeddings ``[count, W]``; a norm follows, so that their size does not matter."""
    return nn.Parameter(nn.init.orthogonal_(torch.empty(count, width), generator=generator))
