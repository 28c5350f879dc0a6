"""Tables and distributions of the search, made by numpy: nothing here knows a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.search.config import SearchConfig

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
_TINY = np.float32(1e-30)


def exploration_table(config: SearchConfig) -> F32:
    """What pUCT multiplies P(a) / (1 + n_a) with, by the visits of all children: ``[num_simulations + 1]``.

    sqrt(N) * (c1 + log((N + c2 + 1) / c2)), where N is one more: the node's own visit.
    """
    visits = np.arange(config.num_nodes) + 1.0
    growth = np.log((visits + config.pb_c_base + 1) / config.pb_c_base)
    weights: NDArray[np.float64] = np.sqrt(visits) * (config.pb_c_init + growth)
    return weights.astype(np.float32)


def considered_visits(num_considered: int, num_simulations: int) -> list[int]:
    """How many visits the action tried at each simulation has had before: sequential halving.

    A phase gives every action still considered the same number of visits; then the better half is kept, of
    which there are at least two. Example: ``considered_visits(4, 8)`` is ``[0, 0, 0, 0, 1, 1, 2, 2]``.
    """
    if num_considered <= 1:
        return list(range(num_simulations))
    num_phases = math.ceil(math.log2(num_considered))
    left, visited, sequence = num_considered, 0, list[int]()
    while len(sequence) < num_simulations:
        rounds = max(1, num_simulations // (num_phases * left))
        for more in range(rounds):
            sequence += [visited + more] * left
        visited += rounds
        left = max(2, left // 2)
    return sequence[:num_simulations]


def halving_table(config: SearchConfig) -> I32:
    """`considered_visits` of 0 to ``max_considered`` actions: ``[max_considered + 1, num_simulations]``."""
    rows = [considered_visits(count, config.num_simulations) for count in range(config.max_considered + 1)]
    return np.array(rows, np.int32)


def draw_noise(config: SearchConfig, rngs: Sequence[np.random.Generator], legal: Bools) -> F32:
    """Noise ``[B, A]`` for the roots: Dirichlet (pUCT) or Gumbel; 0 where ``legal`` ``[B, A]`` is False.

    Row i comes from ``rngs[i]`` alone.
    """
    if len(rngs) != len(legal):
        raise ValueError(f"{len(rngs)} generators for {len(legal)} trees: give one for each")
    noise = np.empty(legal.shape, np.float32)
    if config.kind == "gumbel":
        for row, rng in zip(noise, rngs, strict=True):
            rng.standard_exponential(out=row, dtype=np.float32)
        return np.where(legal, -np.log(np.maximum(noise, _TINY)), np.float32(0))
    for row, rng in zip(noise, rngs, strict=True):
        rng.standard_gamma(config.dirichlet_alpha, out=row, dtype=np.float32)
    noise = np.where(legal, np.maximum(noise, _TINY), np.float32(0))  # with a small alpha all may be 0
    shares: F32 = noise / np.maximum(noise.sum(axis=1, keepdims=True), _TINY)
    return shares


def softmax(logits: ArrayLike, legal: Bools | None = None) -> F32:
    """Probabilities ``[..., A]``, 0 where an action is illegal."""
    wide = np.asarray(logits, np.float64)
    if legal is not None:
        wide = np.where(legal, wide, -np.inf)
    weights = np.exp(wide - wide.max(axis=-1, keepdims=True))
    shares: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return shares.astype(np.float32)


def mix_priors(logits: ArrayLike, other_logits: ArrayLike, weight: float, legal: Bools | None = None) -> F32:
    """Logits of ``weight * softmax(other_logits) + (1 - weight) * softmax(logits)``, all ``[B, A]``.

    For priors at the root that come from elsewhere, a language model say. Where ``legal`` is False the result
    is -inf.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight is {weight}; the share of the other prior must be between 0 and 1")
    own, other = softmax(logits, legal), softmax(other_logits, legal)
    mixed = weight * other + (1 - weight) * own
    with np.errstate(divide="ignore"):
        found: F32 = np.log(mixed)
    # A legal action whose share underflowed stays possible.
    lowest = np.log(np.finfo(np.float32).tiny)
    kept = np.ones(mixed.shape, np.bool_) if legal is None else legal
    return np.where(kept, np.maximum(found, lowest), -np.inf).astype(np.float32)
