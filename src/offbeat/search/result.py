"""What a search found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.search.config import Kind

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Roots after a search, copied out of the trees."""

    kind: Kind
    visits: I32
    """``[B, A]``: how often each action was tried; rows sum to the number of simulations."""
    values: F32
    """``[B]``: mean return of all simulations. The model's own value of the root is not in it."""
    policy: F32
    """``[B, A]``: what the model's policy is to become. pUCT: the share of visits; Gumbel: softmax(logits +
    s(completed Q))."""
    scores: F32
    """``[B, A]``: noise + logits + s(completed Q) for Gumbel, -inf for illegal actions; 0 for pUCT."""

    def act(self, temperature: float = 1.0, rngs: Sequence[np.random.Generator] | None = None) -> I64:
        """An action for each tree ``[B]``.

        pUCT: drawn from visits^(1 / temperature) with one number of each tree's own generator; the most
        visited one, and of these the first, where ``rngs`` is None or the temperature 0. Gumbel: the most
        visited one of highest score; its noise was drawn before the search, so neither argument matters.
        """
        if self.kind == "gumbel":
            most = self.visits.max(axis=1, keepdims=True)
            best: I64 = np.where(self.visits == most, self.scores, -np.inf).argmax(axis=1)
            return best
        if temperature < 0:
            raise ValueError(f"temperature is {temperature}; it must be 0 (the most visited action) or above")
        if rngs is None or temperature == 0:
            first: I64 = self.visits.argmax(axis=1)
            return first
        if len(rngs) != len(self.visits):
            raise ValueError(f"{len(rngs)} generators for {len(self.visits)} trees: give one for each")
        return _draw(tempered(self.visits, temperature), np.array([rng.random() for rng in rngs]))


def tempered(visits: I32, temperature: float) -> F64:
    """Probabilities ``[B, A]`` in proportion to visits^(1 / temperature)."""
    relative = visits / np.maximum(visits.max(axis=1, keepdims=True), 1)
    weights: F64 = relative ** (1 / temperature)
    shares: F64 = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
    return shares


def _draw(probabilities: F64, uniform: F64) -> I64:
    """The action of each row in which a uniform number falls; never one of probability 0."""
    ends = np.cumsum(probabilities, axis=1)
    masses = uniform * ends[:, -1]
    # Rounding may put a mass at the very end: it belongs to the last action that is possible.
    last = probabilities.shape[1] - 1 - (probabilities > 0)[:, ::-1].argmax(axis=1)
    found: I64 = np.minimum((ends <= masses[:, None]).sum(axis=1), last)
    return found
