"""Score labels: log-probs of many continuations under one prompt, which is fed once.

A score depends on its prompt and the labels asked beside it, not on the other prompts of a call: prompts are
computed together only where their sizes, rounded up, are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.llm.layout import MULTIPLE, ceil_to
from offbeat.llm.model import Decoder
from offbeat.llm.requests import check_threads

_PROMPT_MULTIPLE, _LABEL_MULTIPLE = 16, 4
_MOST_TOKENS = 8192
"""Tokens that are computed together."""
_MOST_LOGITS = 1024
"""Rows of logits at a time; eights, so that their bits are those of all at once."""
Tokens = tuple[int, ...]
_Asked = tuple[Tokens, tuple[Tokens, ...]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of the labels of one prompt: ``sums`` over their tokens, and ``counts`` of these.

    Example: ``scores.sums`` compares whole labels, which favours short ones; ``scores.means`` does not.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean log-prob of the tokens of each label."""
        return self.sums / self.counts


class Scorer:
    """Scores labels with a network of its own.

    Args:
        model: the network, with the weights of ``version``. They are copied.
        version: of the weights.
        max_cached: prompts whose scores are kept, the last ones asked; weights of another version forget all.
        threads: torch's threads while it computes.

    Example::

        scorer = Scorer(model)
        (scores,) = scorer.score([prompt], [[tokenizer.encode(action) for action in actions]])
        prior = np.exp(scores.means - np.logaddexp.reduce(scores.means))
    """

    def __init__(
        self, model: Decoder, *, version: int = 0, max_cached: int = 10_000, threads: int = 1
    ) -> None:
        check_threads(threads)
        self.version = version
        self.num_asked = self.num_cached = 0
        self._threads, self._max_cached = threads, max_cached
        with torch.inference_mode():
            self._model = Decoder(model.shape, device=model.norm.device, dtype=model.norm.dtype)
            self._model.set_weights(model.weights())
        self._cache: OrderedDict[_Asked, Scores] = OrderedDict()

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Use these weights; scores of others are forgotten."""
        if version == self.version:
            return
        with torch.inference_mode():
            self._model.set_weights(weights)
        self.version = version
        self._cache.clear()

    def score(
        self, prompts: Sequence[Sequence[int]], labels: Sequence[Sequence[Sequence[int]]]
    ) -> list[Scores]:
        """Return the scores of each prompt's labels, as token ids.

        ``labels[i]`` are those of ``prompts[i]``. Metrics: ``num_asked`` counts prompts, ``num_cached`` those
        that were known.
        """
        if len(prompts) != len(labels):
            raise ConfigError(
                f"there are {len(prompts)} prompts and labels for {len(labels)}: give each a list of labels"
            )
        asked = [(tuple(prompt), tuple(map(tuple, own))) for prompt, own in zip(prompts, labels, strict=True)]
        for prompt, own in asked:
            self._check(prompt, own)
        new = [one for one in dict.fromkeys(asked) if one not in self._cache]
        self.num_asked += len(asked)
        self.num_cached += len(asked) - len(new)
        found = self._compute(new)
        self._cache |= found
        result = [self._cache[one] for one in asked]
        for one in asked:
            self._cache.move_to_end(one)
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return result

    def _check(self, prompt: Tokens, labels: tuple[Tokens, ...]) -> None:
        shape = self._model.shape
        if not prompt or not labels or not all(labels):
            raise ConfigError("a prompt, its labels and each label need one token at least")
        if len(prompt) + max(map(len, labels)) > shape.max_positions:
            longest = max(map(len, labels))
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens with a label of {longest} is longer than the "
                f"{shape.max_positions} positions of this model: shorten the prompt"
            )
        if not all(0 <= token < shape.vocab_size for one in (prompt, *labels) for token in one):
            raise ConfigError(
                f"a token is not among the {shape.vocab_size} of this model: another tokenizer's?"
            )

    @torch.inference_mode()
    def _compute(self, asked: Sequence[_Asked]) -> dict[_Asked, Scores]:
        if asked and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        by_size: dict[tuple[int, int, int], list[_Asked]] = {}
        for prompt, labels in asked:
            longest = max(map(len, labels))
            size = (
                ceil_to(len(prompt), _PROMPT_MULTIPLE),
                ceil_to(len(labels), MULTIPLE),
                ceil_to(longest, _LABEL_MULTIPLE),
            )
            by_size.setdefault(size, []).append((prompt, labels))
        found: dict[_Asked, Scores] = {}
        for size, batch in by_size.items():
            most = max(1, _MOST_TOKENS // (size[0] + size[1] * size[2]))
            for begin in range(0, len(batch), most):
                part = batch[begin : begin + most]
                found |= dict(zip(part, _score_batch(self._model, part, size), strict=True))
        return found


def _score_batch(model: Decoder, batch: Sequence[_Asked], size: tuple[int, int, int]) -> list[Scores]:
    """Score prompts of one size: (prompt, number of labels, tokens of a label), all rounded up."""
    found, counts = _feed(model, batch, size)
    each = found.cpu().numpy().astype(np.float64)
    sums = (each * (np.arange(size[2]) < counts[..., None])).sum(-1)
    return [
        Scores(sums[row, : len(own)], counts[row, : len(own)].copy()) for row, (_, own) in enumerate(batch)
    ]


def label_log_probs(
    model: Decoder, prompts: Sequence[Sequence[int]], labels: Sequence[Sequence[Sequence[int]]]
) -> tuple[Tensor, Tensor]:
    """Return log-probs ``[B, L]`` of whole labels, with gradients, and their numbers of tokens ``[B, L]``.

    Where a prompt has fewer than L labels both are 0. What a learner fits is what a `Scorer` computes.
    """
    batch = [(tuple(prompt), tuple(map(tuple, own))) for prompt, own in zip(prompts, labels, strict=True)]
    size = (
        max(len(prompt) for prompt, _ in batch),
        max(len(own) for _, own in batch),
        max(len(label) for _, own in batch for label in own),
    )
    found, counts = _feed(model, batch, size)
    lengths = torch.from_numpy(counts).to(found.device)
    is_token = torch.arange(size[2], device=found.device) < lengths[..., None]
    return torch.where(is_token, found, 0.0).sum(-1), lengths


def _feed(
    model: Decoder, batch: Sequence[_Asked], size: tuple[int, int, int]
) -> tuple[Tensor, NDArray[np.int64]]:
    """Return log-probs ``[B, L, U]`` of labels' tokens, and the number of tokens of each label ``[B, L]``."""
    num_prompt, num_labels, num_tokens = size
    prompts = np.zeros((len(batch), num_prompt), np.int64)
    labels = np.zeros((len(batch), num_labels, num_tokens), np.int64)
    counts = np.zeros((len(batch), num_labels), np.int64)
    for row, (prompt, own) in enumerate(batch):
        prompts[row, : len(prompt)] = prompt
        for column, label in enumerate(own):
            labels[row, column, : len(label)] = label
            counts[row, column] = len(label)
    device = model.norm.device
    lengths = torch.tensor([len(prompt) for prompt, _ in batch], device=device)
    label_ids = torch.from_numpy(labels).to(device)
    hidden, caches = _feed_prompts(model, torch.from_numpy(prompts).to(device))
    last = hidden[torch.arange(len(batch), device=device), lengths - 1]
    first = _log_probs(model, last[:, None].expand(-1, num_labels, -1), label_ids[..., 0])
    behind = _feed_labels(model, label_ids, lengths, caches)
    later = _log_probs(model, behind[:, :, :-1], label_ids[..., 1:])
    return torch.cat([first[..., None], later], -1), counts


def _log_probs(model: Decoder, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probs of tokens ``[...]`` given hidden states ``[..., width]``."""
    rows, wanted = hidden.flatten(0, -2), tokens.reshape(-1, 1)
    parts = [slice(begin, begin + _MOST_LOGITS) for begin in range(0, len(rows), _MOST_LOGITS)]
    found = [model.logits(rows[part]).log_softmax(-1).gather(-1, wanted[part]) for part in parts]
    return torch.cat(found).view(tokens.shape)


def _feed_prompts(model: Decoder, prompts: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Feed prompts ``[B, T]``; return hidden states ``[B, T, width]``, and keys and values of each layer."""
    size, num_tokens = prompts.shape
    heads, head = model.shape.num_kv_heads, model.shape.head_size
    per_head = model.shape.num_heads // heads
    steps = torch.arange(num_tokens, device=prompts.device)
    hides = (steps > steps[:, None]).repeat(per_head, 1)
    caches = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.reshape(size, num_tokens, heads, per_head, head).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k, v = (one.reshape(size, num_tokens, heads, head).transpose(1, 2).contiguous() for one in (k, v))
        caches.append((k, v))
        scores = torch.matmul(q * head**-0.5, k.transpose(-1, -2)).float().masked_fill(hides, float("-inf"))
        seen = torch.matmul(scores.softmax(-1).to(v.dtype), v)
        seen = seen.view(size, heads, per_head, num_tokens, head).permute(0, 3, 1, 2, 4)
        return seen.reshape(size * num_tokens, -1)

    rotation = model.rotation(steps.repeat(size))
    return model.run(prompts.flatten(), rotation, attend).view(size, num_tokens, -1), caches


def _feed_labels(
    model: Decoder, labels: Tensor, lengths: Tensor, caches: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Feed labels ``[B, L, U]`` behind their prompts; return hidden states ``[B, L, U, width]``.

    A label sees its prompt, whose keys all labels share, and its own tokens.
    """
    size, num_labels, num_tokens = labels.shape
    num_prompt = caches[0][0].shape[2]
    heads, head = model.shape.num_kv_heads, model.shape.head_size
    per_head = model.shape.num_heads // heads
    steps = torch.arange(num_tokens, device=labels.device)
    behind = torch.arange(num_prompt, device=labels.device) >= lengths[:, None, None, None]
    hides = (steps > steps[:, None]).repeat(per_head, 1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt_keys, prompt_values = caches[layer]
        q = q.reshape(size, num_labels, num_tokens, heads, per_head, head) * head**-0.5
        # [B, kv, L, G * U, head]: all queries of a prompt in one product, those of a label in another.
        q = q.permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
        k, v = (
            one.reshape(size, num_labels, num_tokens, heads, head).permute(0, 3, 1, 2, 4) for one in (k, v)
        )
        at_prompt = torch.matmul(q.flatten(2, 3), prompt_keys.transpose(-1, -2)).float()
        at_prompt = at_prompt.masked_fill(behind, float("-inf")).view(*q.shape[:-1], num_prompt)
        at_own = torch.matmul(q, k.transpose(-1, -2)).float().masked_fill(hides, float("-inf"))
        weights = torch.cat([at_prompt, at_own], -1).softmax(-1).to(v.dtype)
        seen = torch.matmul(weights[..., :num_prompt].flatten(2, 3), prompt_values).view(q.shape)
        seen = seen + torch.matmul(weights[..., num_prompt:], v)
        seen = seen.view(size, heads, num_labels, per_head, num_tokens, head).permute(0, 2, 4, 1, 3, 5)
        return seen.reshape(size * num_labels * num_tokens, -1)

    positions = (lengths[:, None, None] + steps).expand(labels.shape)
    hidden = model.run(labels.flatten(), model.rotation(positions.flatten()), attend)
    return hidden.view(size, num_labels, num_tokens, -1)
