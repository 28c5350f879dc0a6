"""Feeding of sequences to their slots: a prompt once for its group, in chunks, those of one size together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offbeat.llm.layout import ceil_to
from offbeat.llm.model import Decoder
from offbeat.llm.open_response import Open
from offbeat.llm.requests import Request
from offbeat.llm.slot_table import SlotTable
from offbeat.llm.step import Slots, extend

CHUNK = 256
"""Prompts are fed in pieces of so many tokens from their start: so bits depend on the prompt alone."""
_MOST_AT_ONCE = 4096
"""Tokens of several prompts that are fed together."""


class Prefix(NamedTuple):
    """The prompt of a group, kept while responses of the group wait for a slot."""

    version: int
    request: Request
    cache: list[Tensor]
    hidden: Tensor


class Prefill:
    """Fills caches with what responses have before their next token.

    Args:
        model: the network.
        slots: the caches.
        rotation: cosines and sines by position.
        table: the tokens of each slot.
        bucket: attention looks at multiples of so many positions.
    """

    def __init__(
        self, model: Decoder, slots: Slots, rotation: tuple[Tensor, Tensor], table: SlotTable, bucket: int
    ) -> None:
        self.num_tokens = 0
        self.kept: Prefix | None = None
        self._model, self._slots, self._rotation = model, slots, rotation
        self._table, self._bucket = table, bucket

    def keep_only(self, request: Request | None) -> None:
        """Forget the kept prompt unless it is that of this request."""
        if self.kept is not None and self.kept.request is not request:
            self.kept = None

    def feed(
        self, jobs: Sequence[tuple[Open, int]], version: int, next_request: Request | None
    ) -> dict[Open, Tensor]:
        """Feed what responses have from a position on; return the last hidden state of each.

        Args:
            jobs: responses with slots, each with the first position to feed; from 0 on for prompts, which
                are fed once for all responses of a request that have nothing else yet.
            version: of the weights.
            next_request: the one whose responses wait for the next slots; its prompt is kept.
        """
        leaders: dict[Any, Open] = {}
        followers: dict[Any, list[Open]] = {}
        own: list[tuple[Open, int]] = []
        hidden: dict[Open, Tensor] = {}
        for one, start in jobs:
            one.stamp = version if start == 0 else one.stamp
            name: Any = one.request.key if one.is_fresh else one.name
            if name in leaders:
                followers.setdefault(name, []).append(one)
                continue
            leaders[name] = one
            if (prefix := self._prefix_of(one, version)) is not None:
                self._slots.put_back(one.slot, prefix.cache)
                hidden[one] = prefix.hidden
            else:
                own.append((one, start))
        hidden |= self._feed_all(own)
        for name, leader in leaders.items():
            if others := followers.get(name):
                self._slots.share(leader.slot, [one.slot for one in others], leader.length)
                hidden |= dict.fromkeys(others, hidden[leader])
            is_next = leader.is_fresh and leader.request is next_request
            if is_next and self._prefix_of(leader, version) is None:
                cache = self._slots.kept(leader.slot, leader.length)
                self.kept = Prefix(version, leader.request, cache, hidden[leader].clone())
        return hidden

    def _prefix_of(self, one: Open, version: int) -> Prefix | None:
        """Return the kept prompt if it is that of a response without tokens, under these weights."""
        kept = self.kept
        if kept is None or kept.request is not one.request or kept.version != version:
            return None
        return kept if one.is_fresh else None

    def _feed_all(self, jobs: Sequence[tuple[Open, int]]) -> dict[Open, Tensor]:
        hidden: dict[Open, Tensor] = {}
        pieces = [(one, at) for one, start in jobs for at in range(start, one.length, CHUNK)]
        most_positions = len(self._rotation[0])
        by_shape: dict[tuple[int, int, int], list[tuple[Open, int]]] = {}
        for one, at in pieces:
            size = _padded(min(CHUNK, one.length - at))
            length = min(most_positions, ceil_to(at + size, self._bucket))
            by_shape.setdefault((at, size, length), []).append((one, at))
        for (_, size, length), batch in sorted(by_shape.items(), key=lambda item: item[0][0]):
            most = max(1, _MOST_AT_ONCE // size)
            for begin in range(0, len(batch), most):
                self._feed_batch(batch[begin : begin + most], size, length, hidden)
        self.num_tokens += sum(one.length - start for one, start in jobs)
        return hidden

    def _feed_batch(
        self, batch: Sequence[tuple[Open, int]], size: int, length: int, hidden: dict[Open, Tensor]
    ) -> None:
        device, tokens = self._slots.whole.device, np.zeros((len(batch), size), np.int64)
        for row, (one, at) in enumerate(batch):
            own = self._table.tokens[one.slot, at : min(at + size, one.length)]
            tokens[row, : len(own)] = own
        slots = torch.tensor([one.slot for one, _ in batch], device=device)
        starts = torch.tensor([at for _, at in batch], device=device)
        fed = torch.from_numpy(tokens).to(device)
        found = extend(self._model, self._slots, self._rotation, slots, fed, starts, length)
        for row, (one, at) in enumerate(batch):
            if at + CHUNK >= one.length:
                hidden[one] = found[row, one.length - 1 - at]


def _padded(size: int) -> int:
    """Return the size of a chunk: few different ones, so that prompts are fed together."""
    return ceil_to(size, 16 if size <= 64 else 64)
