"""UniZero's world model: a transformer over what was seen and done (https://arxiv.org/abs/2406.10667).

A step is two tokens: the latent of what is seen, and the action taken then. At a latent stand policy and
value, at an action the reward and the latent that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.models.muzero import dense, seed_layers
from offbeat.models.world_spec import MAX_TOKENS, WorldSpec
from offbeat.ops.supports import Support

CHANNELS = 32
"""Of the convolutions that read planes."""
_NEVER = -1e9


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """Size of the transformer: ``latent`` of the world is its width."""

    layers: int = 2
    heads: int = 2


@dataclass(frozen=True, slots=True)
class Window:
    """Keys and values ``[B, L, 2, heads, W, size]`` of W tokens, the newest last, and of those after them.

    ``count`` ``[B]`` says how many of the W there are, and ``position`` ``[B]`` where the next token stands.
    ``fresh`` ``[B, L, 2, heads, F, size]`` are of tokens that came since.
    """

    keys_values: Tensor
    fresh: Tensor
    count: Tensor
    position: Tensor

    def settled(self) -> Window:
        """The same with the newest W tokens in their place and none after them."""
        num_fresh = self.fresh.shape[4]
        kept = torch.cat([self.keys_values[..., num_fresh:, :], self.fresh], 4)
        count = (self.count + num_fresh).clamp(max=kept.shape[4])
        return Window(kept, self.fresh[..., :0, :], count, self.position)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What stands at the tokens of K steps: each ``[B, K, ...]``."""

    policy: Tensor
    value: Tensor
    reward: Tensor
    latent: Tensor


class UniZeroNetwork(nn.Module):
    """Encoder, transformer and heads."""

    def __init__(self, spec: WorldSpec, transformer: TransformerSpec, generator: torch.Generator) -> None:
        super().__init__()
        self.spec = spec
        self.values, self.rewards = Support(spec.value_support), Support(spec.reward_support)
        width = spec.latent
        self.encoder = _Encoder(spec)
        self.action: nn.Module = (
            nn.Embedding(spec.num_actions, width) if spec.num_actions else nn.Linear(spec.action_size, width)
        )
        self.blocks = nn.ModuleList(_Block(width, transformer.heads) for _ in range(transformer.layers))
        self.policy = dense(width, spec.hidden, spec.num_outputs, 1)
        self.value = dense(width, spec.hidden, self.values.num_atoms, 1)
        self.reward = dense(width, spec.hidden, self.rewards.num_atoms, 1)
        self.latent = nn.Sequential(dense(width, spec.hidden, width, 1), nn.LayerNorm(width))
        seed_layers(self, (self.policy, self.value, self.reward), generator)
        angles = torch.arange(MAX_TOKENS)[:, None] * rates(width // transformer.heads // 2)
        self.turns: Tensor
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    # ------------------------------------------------------------ whole sequences

    def encode(self, obs: Tensor) -> Tensor:
        """Latents ``[..., width]`` of observations ``[..., *shape]``; planes have their channels first."""
        axes = len(self.spec.observation.shape)
        lead, shape = obs.shape[: obs.ndim - axes], obs.shape[obs.ndim - axes :]
        flat = obs.reshape(-1, *shape)
        return cast(Tensor, self.encoder(flat)).view(*lead, -1)

    def forward(self, latents: Tensor, actions: Tensor) -> Outputs:
        """Look at K steps ``[B, K, width]`` and ``[B, K]``, no token at a later one."""
        tokens = torch.stack([latents, self.embed(actions)], 2).flatten(1, 2)
        states, _ = self.read(tokens)
        seen, done = states[:, ::2], states[:, 1::2]
        return Outputs(self.policy(seen), self.value(seen), self.reward(done), self.latent(done))

    def embed(self, actions: Tensor) -> Tensor:
        """Tokens ``[..., width]`` of actions ``[...]`` or ``[..., size]``."""
        return cast(Tensor, self.action(actions))

    def read(self, tokens: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States ``[B, S, width]`` of tokens, and their keys and values ``[L, 2, B, heads, S, size]``.

        ``first`` ``[B]`` is where each sequence begins; what stands before is nobody's.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        allowed = places[None, :] <= places[:, None]
        if first is not None:
            # A token before the first sees itself, so that no row of the softmax is empty.
            is_own = (places[None, None, :] >= first[:, None, None]) | torch.eye(
                len(places), dtype=torch.bool, device=tokens.device
            )
            allowed = (allowed & is_own)[:, None]
        kept = []
        for block in self.blocks:
            tokens, keys, values = cast(_Block, block)(tokens, places, allowed)
            kept.append(torch.stack([keys, values]))
        return tokens, torch.stack(kept)

    # ------------------------------------------------------------ token by token

    def look(self, latents: Tensor, actions: Tensor, first: Tensor, size: int) -> tuple[Tensor, Window]:
        """The state ``[B, width]`` at the last of C latents ``[B, C, width]``, and the window it leaves.

        ``actions`` ``[B, C - 1]`` were taken in between; ``first`` ``[B]`` is the episode's first latent.
        """
        tokens = torch.stack([latents[:, :-1], self.embed(actions)], 2).flatten(1, 2)
        states, kept = self.read(torch.cat([tokens, latents[:, -1:]], 1), 2 * first)
        num_tokens = kept.shape[4]
        kept = functional.pad(kept, (0, 0, max(0, size - num_tokens), 0))[..., -size:, :]
        kept = kept.permute(2, 0, 1, 3, 4, 5)
        position = torch.full_like(first, num_tokens)
        count = (num_tokens - 2 * first).clamp(max=size)
        return states[:, -1], Window(kept, kept[..., :0, :], count, position)

    def go_on(self, token: Tensor, window: Window) -> tuple[Tensor, Window]:
        """The state ``[B, width]`` of one more token ``[B, width]``, and the window that ends with it."""
        size = window.keys_values.shape[4]
        places = torch.arange(size, device=token.device)
        # Added to the scores: nothing of a row that is not there gets a share.
        missing = (places[None, :] < size - window.count[:, None]).to(token.dtype) * _NEVER
        turn = (self.turns[0, window.position][:, None], self.turns[1, window.position][:, None])
        kept = []
        for layer, block in enumerate(self.blocks):
            before, since = window.keys_values[:, layer], window.fresh[:, layer]
            token, own = cast(_Block, block).step(token, turn, before, since, missing[:, None])
            kept.append(own)
        fresh = torch.cat([window.fresh, torch.stack(kept, 1)], 4)
        return token, Window(window.keys_values, fresh, window.count, window.position + 1)


class _Encoder(nn.Module):
    def __init__(self, spec: WorldSpec) -> None:
        super().__init__()
        if spec.kind == "conv":
            channels, height, width = spec.planes
            layers: list[nn.Module] = []
            for _ in range(1 + spec.blocks):
                layers += [nn.Conv2d(channels, CHANNELS, 3, padding=1), nn.GroupNorm(1, CHANNELS), nn.GELU()]
                channels = CHANNELS
            self.body: nn.Module = nn.Sequential(
                *layers, nn.Flatten(), nn.Linear(CHANNELS * height * width, spec.latent)
            )
        else:
            self.body = nn.Sequential(
                nn.Flatten(), dense(spec.observation.num_features, spec.hidden, spec.latent, spec.blocks)
            )
        self.norm = nn.LayerNorm(spec.latent)

    def forward(self, obs: Tensor) -> Tensor:
        """Latents ``[N, width]`` of observations ``[N, ...]``."""
        return cast(Tensor, self.norm(self.body(obs)))


class _Block(nn.Module):
    """Attention and a dense part, each with its input normalised; positions turn queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.three = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"))
        self.back = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor, places: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``[B, S, width]`` at ``places`` ``[S]``; returns them with their keys and values."""
        query, keys, values = self._parts(tokens)  # [B, heads, S, size]
        query, keys = turned(query, places), turned(keys, places)
        found = functional.scaled_dot_product_attention(query, keys, values, attn_mask=allowed)
        return self._after(tokens, found.transpose(1, 2).flatten(2)), keys, values

    def step(
        self, token: Tensor, turn: tuple[Tensor, Tensor], before: Tensor, since: Tensor, missing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One token ``[B, width]`` after those with keys and values ``before`` and ``since``.

        These are ``[B, 2, heads, W, size]``. Returns its state and its own keys and values.
        """
        three = self.three(self.before_attention(token)).view(len(token), 3, self.heads, self.size)
        both = spun(three[:, :2], turn[0][:, None], turn[1][:, None])
        query = both[:, 0, :, None] * (1 / math.sqrt(self.size))
        own = torch.stack([both[:, 1], three[:, 2]], 1).unsqueeze(3)
        late = torch.cat([since, own], 3)
        # Products of single queries, as sums: faster than as matrices.
        early_scores = (query * before[:, 0]).sum(-1) + missing
        late_scores = (query * late[:, 0]).sum(-1)
        shares = torch.cat([early_scores, late_scores], -1).softmax(-1)[..., None]
        size = before.shape[3]
        found = (shares[:, :, :size] * before[:, 1]).sum(2) + (shares[:, :, size:] * late[:, 1]).sum(2)
        return self._after(token, found.flatten(1)), own

    def _parts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        three = self.three(self.before_attention(tokens))
        parts = three.view(*tokens.shape[:2], 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]

    def _after(self, tokens: Tensor, found: Tensor) -> Tensor:
        tokens = tokens + cast(Tensor, self.out(found))
        return tokens + cast(Tensor, self.back(self.dense(self.before_dense(tokens))))


def turned(vectors: Tensor, places: Tensor) -> Tensor:
    """Turn pairs of features ``[..., size]`` by angles that grow with their place (rotary positions).

    ``places`` fits the axes before the last one: what two tokens make of each other then depends on how far
    apart they are, and on nothing else (https://arxiv.org/abs/2104.09864).
    """
    angles = places[..., None] * rates(vectors.shape[-1] // 2).to(vectors.device)
    return spun(vectors, angles.cos(), angles.sin())


def spun(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features ``[..., size]`` by angles ``[..., size / 2]``."""
    first, second = vectors.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def rates(half: int) -> Tensor:
    """How fast each of so many pairs of features turns from place to place."""
    return torch.tensor(10_000.0) ** (-torch.arange(half) / half)
