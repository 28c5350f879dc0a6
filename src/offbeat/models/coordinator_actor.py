"""A numpy mirror of the network that chooses skills. No torch.

It computes in double precision, which costs nothing for a few rows; see ``coordinator``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.models.recurrent_actor import Layer, activated, affine, layer, normalise
from offbeat.models.spec import Activation
from offbeat.models.team_spec import TeamSpec
from offbeat.ops.statistics import log_softmax_at
from offbeat.types import Array

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Norm = tuple[Doubles, Doubles]
"""Scale and shift ``[W]``."""
PREFIX = "coordinator"


class NumpyCoordinator:
    """Chooses with the weights of ``SkillCoordinator``, by their parameter names."""

    def __init__(self, spec: TeamSpec) -> None:
        self._spec = spec
        self._state: Layer
        self._obs: Layer
        self._encoder_norm: Norm
        self._encoder: list[EncoderBlock] = []
        self._start: Doubles
        self._skills: list[Doubles] = []
        self._decoder: list[DecoderBlock] = []
        self._heads: list[Dense] = []

    def load(self, weights: Mapping[str, Array]) -> None:
        """Copy the weights whose names begin with ``coordinator.``, as a choice multiplies them."""
        spec, source = self._spec, Source(weights, self._spec.activation)
        self._state, self._obs = (self._embedding(source, name) for name in ("state", "obs"))
        self._encoder_norm = source.norm("encoder_norm")
        self._encoder = [EncoderBlock.of(source, f"encoder.{i}", spec.heads) for i in range(spec.blocks)]
        scale, shift = source.norm("decoder_norm")
        # Tables are read behind their norm.
        tables = [source[name] for name in ("start", "team_skill", "skill")]
        self._start, *self._skills = (normalise(table) * scale + shift for table in tables)
        self._decoder = [DecoderBlock.of(source, f"decoder.{i}", spec.heads) for i in range(spec.blocks)]
        self._heads = [source.dense(name) for name in ("team_head", "skill_head")]

    def choose(self, state: Floats, obs: Floats, uniform: Floats | None) -> tuple[Ints, Floats]:
        """Choose for M teams at once.

        Args:
            state: ``[M, S]``.
            obs: ``[M, A, O]``.
            uniform: ``[M, 1 + A]`` in [0, 1), the chances; None: the likeliest at each position.

        Returns:
            Skills ``[M, 1 + A]``, the team's first, and their log-probabilities ``[M, 1 + A]``.
        """
        num_rows, num_choices = len(state), 1 + self._spec.num_agents
        tokens = self._encode(state, obs)
        steps = [block.begin(tokens) for block in self._decoder]
        skills = np.empty((num_rows, num_choices), np.int64)
        logp = np.empty((num_rows, num_choices), np.float32)
        x = np.repeat(self._start, num_rows, axis=0)
        for position in range(num_choices):
            for step in steps:
                x = step.forward(x, position)
            logits = self._heads[position > 0](x).astype(np.float32)
            chance = None if uniform is None else uniform[:, position]
            skills[:, position] = chosen = pick(logits, chance)
            logp[:, position] = log_softmax_at(logits, chosen)
            x = self._skills[position > 0][chosen]
        return skills, logp

    def _embedding(self, source: Source, name: str) -> Layer:
        weight, bias = source.layer(name)
        if not self._spec.feature_norm:
            return weight, bias
        scale, shift = source.norm(f"{name}_norm")
        return weight * scale[:, None], bias + shift @ weight

    def _encode(self, state: Floats, obs: Floats) -> Doubles:
        seen, each = state.astype(np.float64), obs.astype(np.float64)
        if self._spec.feature_norm:
            seen, each = normalise(seen), normalise(each)
        x: Doubles = np.empty((len(state), 1 + self._spec.num_agents, self._spec.hidden))
        x[:, 0] = affine(seen, self._state)
        x[:, 1:] = affine(each, self._obs)
        x = _norm(x, self._encoder_norm)
        for block in self._encoder:
            x = block(x)
        return x


def pick(logits: Floats, chance: Floats | None) -> Ints:
    """One option ``[M]`` of each row of logits ``[M, n]``: the likeliest, or by chances ``[M]`` in [0, 1).

    An option whose probability is 0, as a float of single precision, is never picked.
    """
    if chance is None:
        likeliest: Ints = np.argmax(logits, axis=-1)
        return likeliest
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    sums = np.cumsum(shares, axis=-1, dtype=np.float64)
    total = sums[:, -1]
    # The first option whose sum is above the mark has a share of its own, even for a chance rounded up to 1.
    mark = np.minimum(chance * total, np.nextafter(total, 0))
    first: Ints = np.argmax(sums > mark[:, None], axis=-1)
    return first


@dataclass(frozen=True, slots=True)
class Dense:
    """A hidden layer and a linear one."""

    hidden: Layer
    out: Layer
    activation: Activation

    def __call__(self, x: Doubles) -> Doubles:
        """Map ``[..., W]`` to ``[..., out]``."""
        return affine(activated(affine(x, self.hidden), self.activation), self.out)


@dataclass(frozen=True, slots=True)
class Source:
    """Published weights in double precision, by the names of ``SkillCoordinator``."""

    weights: Mapping[str, Array]
    activation: Activation

    def __getitem__(self, name: str) -> Doubles:
        return self.weights[f"{PREFIX}.{name}"].astype(np.float64)

    def layer(self, name: str) -> Layer:
        """A dense layer."""
        return layer(self.weights, f"{PREFIX}.{name}")

    def joined(self, *names: str) -> Layer:
        """Dense layers of the same input as one, their outputs side by side."""
        weights, biases = zip(*(self.layer(name) for name in names), strict=True)
        return np.concatenate(weights, axis=1), np.concatenate(biases)

    def norm(self, name: str) -> Norm:
        """A norm."""
        return self[f"{name}.weight"], self[f"{name}.bias"]

    def dense(self, name: str) -> Dense:
        """A hidden layer and a linear one."""
        return Dense(self.layer(f"{name}.hidden"), self.layer(f"{name}.out"), self.activation)


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    """Attention of all tokens to all, and a dense layer for each."""

    asked: Layer
    out: Layer
    norm: Norm
    dense: Dense
    dense_norm: Norm
    heads: int

    @classmethod
    def of(cls, source: Source, name: str, heads: int) -> EncoderBlock:
        """The block of this name."""
        attention = f"{name}.attention"
        return cls(
            source.joined(f"{attention}.query", f"{attention}.key", f"{attention}.value"),
            source.layer(f"{attention}.out"),
            source.norm(f"{name}.norm"),
            source.dense(f"{name}.dense"),
            source.norm(f"{name}.dense_norm"),
            heads,
        )

    def __call__(self, x: Doubles) -> Doubles:
        """Tokens ``[M, n, W]`` after the block."""
        num_rows, num_tokens, width = x.shape
        parts = affine(x, self.asked).reshape(num_rows, num_tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.transpose(2, 0, 3, 1, 4)
        mixed = _softmax(query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])) @ value
        x = _norm(x + affine(mixed.swapaxes(1, 2).reshape(x.shape), self.out), self.norm)
        return _norm(x + self.dense(x), self.dense_norm)


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Two attentions to what is not later, the second asked by the encoder's tokens, and a dense layer."""

    asked: Layer
    out: Layer
    norm: Norm
    token_query: Layer
    token_asked: Layer
    token_out: Layer
    token_norm: Norm
    dense: Dense
    dense_norm: Norm
    heads: int

    @classmethod
    def of(cls, source: Source, name: str, heads: int) -> DecoderBlock:
        """The block of this name."""
        first, second = f"{name}.attention", f"{name}.token_attention"
        return cls(
            source.joined(f"{first}.query", f"{first}.key", f"{first}.value"),
            source.layer(f"{first}.out"),
            source.norm(f"{name}.norm"),
            source.layer(f"{second}.query"),
            source.joined(f"{second}.key", f"{second}.value"),
            source.layer(f"{second}.out"),
            source.norm(f"{name}.token_norm"),
            source.dense(f"{name}.dense"),
            source.norm(f"{name}.dense_norm"),
            heads,
        )

    def begin(self, tokens: Doubles) -> Decoding:
        """Get ready to decode with the encoder's tokens ``[M, n, W]``."""
        return Decoding(self, tokens)


class Decoding:
    """A decoder block while it goes from position to position, remembering what it was asked about."""

    def __init__(self, block: DecoderBlock, tokens: Doubles) -> None:
        num_rows, num_tokens, width = tokens.shape
        self._block = block
        self._tokens = tokens
        split = (num_rows, num_tokens, block.heads, width // block.heads)
        self._queries = affine(tokens, block.token_query).reshape(split)
        self._seen = np.empty((2, num_rows, block.heads, num_tokens, width // block.heads))
        self._token_seen = np.empty_like(self._seen)

    def forward(self, x: Doubles, position: int) -> Doubles:
        """Position ``[M, W]`` after the block; positions come in order."""
        block, token = self._block, self._tokens[:, position]
        split = self._queries.shape[2:]
        query, key, value = affine(x, block.asked).reshape(len(x), 3, *split).swapaxes(0, 1)
        mixed = _attend(query, key, value, self._seen, position)
        x = _norm(x + affine(mixed, block.out), block.norm)
        key, value = affine(x, block.token_asked).reshape(len(x), 2, *split).swapaxes(0, 1)
        mixed = _attend(self._queries[:, position], key, value, self._token_seen, position)
        x = _norm(token + affine(mixed, block.token_out), block.token_norm)
        return _norm(x + block.dense(x), block.dense_norm)


def _attend(query: Doubles, key: Doubles, value: Doubles, seen: Doubles, position: int) -> Doubles:
    """What a position ``[M, heads, d]`` gets from itself and those before, ``[M, W]``; fills ``seen`` up."""
    seen[0, :, :, position], seen[1, :, :, position] = key, value
    if not position:
        return value.reshape(len(value), -1)
    keys, values = seen[:, :, :, : position + 1]
    scores = (keys @ query[..., None])[..., 0] / math.sqrt(query.shape[-1])
    mixed: Doubles = _softmax(scores)[:, :, None] @ values
    return mixed.reshape(len(value), -1)


def _norm(x: Doubles, norm: Norm) -> Doubles:
    y = normalise(x)
    y *= norm[0]
    y += norm[1]
    return y


def _softmax(x: Doubles) -> Doubles:
    y: Doubles = np.exp(x - np.maximum.reduce(x, axis=-1, keepdims=True))
    y /= np.add.reduce(y, axis=-1, keepdims=True)
    return y
