"""One step of generation on the device: forward, draw, and the state of the rows after it.

Nothing here asks the host, and shapes come from a fixed set: rows in eights, lengths in buckets. So a step
can be compiled, and runs on any device; between two steps the scheduler reads the one tensor that it returns.

Numerics: what a row computes does not depend on the rows beside it. Linear layers give other bits for fewer
rows than eight (with two threads also for five to seven), hence the eights. Attention is two batched matrix
products and a softmax in fp32 over a row's own cache, and positions behind a row's end add exact zeros, hence
equal bits in every bucket; fused attention on CPUs has other bits by slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.llm.model import Decoder
from offbeat.llm.sampling import draw
from offbeat.llm.shape import Shape

MOST_STOPS = 8
"""Tokens at which one response may end, the tokenizer's own among them."""
TOKEN, POSITION, ACTIVE, LAST, TOP_K, STOPS = range(6)
"""Columns of `Slots.whole`; the stop tokens are the last ones."""
TEMPERATURE, TOP_P, UNIFORMS = range(3)
"""Columns of `Slots.real`; the uniforms by position are the last ones."""


class Group(NamedTuple):
    """Rows ``begin`` to ``end`` attend to ``length`` positions of their caches."""

    begin: int
    end: int
    length: int


class Slots:
    """Memory of all responses under way: a cache, and what the next step of each needs.

    ``cache`` has keys and values of each layer, ``[slots, kv heads, length, head]``. A row of ``whole`` holds
    the token to feed, its position, 1 for a row that is active, the last position, top-k and stop tokens; one
    of ``real`` the temperature, top-p and the uniform of each position.
    """

    def __init__(
        self, shape: Shape, num_slots: int, length: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        size = (num_slots, shape.num_kv_heads, length, shape.head_size)

        def zeros() -> Tensor:
            return torch.zeros(size, device=device, dtype=dtype)

        # A tensor each: a compiled step that writes to a part of a tensor copies all of it.
        self.cache = [(zeros(), zeros()) for _ in range(shape.num_layers)]
        self.whole = torch.zeros(num_slots, STOPS + MOST_STOPS, device=device, dtype=torch.int64)
        self.real = torch.zeros(num_slots, UNIFORMS + length + 1, device=device, dtype=torch.float64)

    @staticmethod
    def num_bytes(shape: Shape, num_slots: int, length: int, dtype: torch.dtype) -> int:
        """Return the memory that so many slots of this length take."""
        size = shape.num_layers * 2 * shape.num_kv_heads * shape.head_size * dtype.itemsize
        return num_slots * length * (size + 8)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Move slots with ``length`` positions of their caches; sources and targets may overlap."""
        old, new = (torch.tensor(one, device=self.whole.device) for one in (sources, targets))
        for one in self._caches():
            one[new, :, :length] = one[old, :, :length]
        self.whole[new], self.real[new] = self.whole[old], self.real[old]

    def share(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy ``length`` positions of one cache to others."""
        others = torch.tensor(targets, device=self.whole.device)
        for one in self._caches():
            one[others, :, :length] = one[source, :, :length]

    def kept(self, slot: int, length: int) -> list[Tensor]:
        """Return a copy of ``length`` positions of one cache."""
        return [one[slot, :, :length].clone() for one in self._caches()]

    def put_back(self, slot: int, kept: Sequence[Tensor]) -> None:
        """Write such a copy to a slot."""
        for one, part in zip(self._caches(), kept, strict=True):
            one[slot, :, : part.shape[1]] = part

    def _caches(self) -> Iterator[Tensor]:
        return chain.from_iterable(self.cache)


def decode(
    model: Decoder,
    slots: Slots,
    rotation: tuple[Tensor, Tensor],
    groups: Sequence[Group],
    *,
    is_filtered: bool = False,
) -> Tensor:
    """Feed one token of each row and draw the next; return ``[3, rows]`` (see `emit`).

    Args:
        model: the network.
        slots: the first rows of them are computed; those that are not active stay as they are.
        rotation: cosines and sines by position.
        groups: rows of similar length, which follow on each other from row 0.
        is_filtered: True when any row has a top-k or top-p.
    """
    num_rows = groups[-1].end
    rows = torch.arange(num_rows, device=slots.whole.device)
    tokens, positions = slots.whole[:num_rows, TOKEN], slots.whole[:num_rows, POSITION]
    behind = [_behind(positions[begin:end, None, None, None], length) for begin, end, length in groups]
    heads, head = model.shape.num_kv_heads, model.shape.head_size
    per_head, scale = model.shape.num_heads // heads, head**-0.5

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = slots.cache[layer]
        keys[rows, :, positions] = k
        values[rows, :, positions] = v
        seen = [
            _attention(
                q[begin:end].reshape(end - begin, heads, per_head, head) * scale,
                keys[begin:end, :, :length],
                values[begin:end, :, :length],
                bias,
            )
            for (begin, end, length), bias in zip(groups, behind, strict=True)
        ]
        return (seen[0] if len(seen) == 1 else torch.cat(seen)).reshape(num_rows, -1)

    hidden = model.run(tokens, (rotation[0][positions], rotation[1][positions]), attend)
    return emit(model, slots, rows, hidden, is_filtered=is_filtered)


def extend(
    model: Decoder,
    slots: Slots,
    rotation: tuple[Tensor, Tensor],
    at: Tensor,
    tokens: Tensor,
    starts: Tensor,
    length: int,
) -> Tensor:
    """Feed several tokens of some slots; return the hidden states ``[B, T, width]``.

    Args:
        model: the network.
        slots: their caches hold what comes before.
        rotation: cosines and sines by position.
        at: the slots ``[B]``.
        tokens: ``[B, T]``, T a multiple of 8; what is beyond the end of one is overwritten later.
        starts: the position of the first token of each, ``[B]``.
        length: positions of the caches to look at; no position is behind it.
    """
    size, num_tokens = tokens.shape
    last = slots.cache[0][0].shape[2] - 1  # nobody looks there: the last token of a sequence is never fed
    positions = (starts[:, None] + torch.arange(num_tokens, device=tokens.device)).clamp_(max=last)
    heads, head = model.shape.num_kv_heads, model.shape.head_size
    per_head, scale = model.shape.num_heads // heads, head**-0.5
    # A query of several heads that share keys is as many rows of one product.
    behind = _behind(positions.repeat(1, per_head)[:, None, :, None], length)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = slots.cache[layer]
        keys[at[:, None], :, positions] = k.view(size, num_tokens, heads, head)
        values[at[:, None], :, positions] = v.view(size, num_tokens, heads, head)
        q = q.reshape(size, num_tokens, heads, per_head, head).permute(0, 2, 3, 1, 4)
        q = q.reshape(size, heads, per_head * num_tokens, head) * scale
        seen = _attention(q, keys[at, :, :length], values[at, :, :length], behind)
        seen = seen.view(size, heads, per_head, num_tokens, head).permute(0, 3, 1, 2, 4)
        return seen.reshape(size * num_tokens, -1)

    flat = positions.flatten()
    hidden = model.run(tokens.flatten(), (rotation[0][flat], rotation[1][flat]), attend)
    return hidden.view(size, num_tokens, -1)


def emit(model: Decoder, slots: Slots, at: Tensor, hidden: Tensor, *, is_filtered: bool = False) -> Tensor:
    """Draw the next token of slots from their hidden states, and make it the one to feed next.

    Args:
        model: the network.
        slots: the state of the rows.
        at: the slots ``[N]``, N a multiple of 8; one that is there twice comes out the same.
        hidden: ``[N, width]`` of the tokens that were fed.
        is_filtered: True when any row has a top-k or top-p.

    Returns:
        int32 ``[3, N]``: tokens, 1 where the response has ended, bits of the fp32 log-probs.
    """
    whole, real = slots.whole[at], slots.real
    position, is_active = whole[:, POSITION] + 1, whole[:, ACTIVE] > 0
    temperature, uniform = real[at, TEMPERATURE].float(), real[at, position + UNIFORMS]
    most = (whole[:, TOP_K], real[at, TOP_P]) if is_filtered else (None, None)
    token, log_prob = draw(model.logits(hidden), temperature, uniform, *most)
    has_ended = (token[:, None] == whole[:, STOPS:]).any(1) | (position >= whole[:, LAST])
    fed = torch.stack([token, position, (~has_ended).long()], 1)
    slots.whole[at, : ACTIVE + 1] = torch.where(is_active[:, None], fed, whole[:, : ACTIVE + 1])
    return torch.stack([token.int(), has_ended.int(), log_prob.view(torch.int32)])


def _behind(positions: Tensor, length: int) -> Tensor:
    """Return what hides the cache behind queries at positions ``[..., 1]``: 0 or -inf, ``[..., length]``."""
    is_behind = torch.arange(length, device=positions.device) > positions
    return torch.zeros(is_behind.shape, device=positions.device).masked_fill_(is_behind, float("-inf"))


def _attention(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, keys.transpose(-1, -2)).float() + bias
    return torch.matmul(scores.softmax(-1).to(values.dtype), values)
