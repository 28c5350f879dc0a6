"""Acting less greedily than the policy says, with the probabilities that this really gives. numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
IMPOSSIBLE = np.float32(-1e9)
"""Logit of an action that may not be taken."""


def explored(logits: Floats, *, temperature: float, epsilon: float) -> Floats:
    """Logits of the policy that is acted with: ``mu = (1 - epsilon) softmax(z / T) + epsilon / |A|``.

    A is the set of actions whose logit is above ``IMPOSSIBLE``. What comes out are log-probabilities, so
    that drawing from them and storing their value as the behaviour's is exact.

    Args:
        logits: ``[..., P]``.
        temperature: T.
        epsilon: share of actions drawn evenly.
    """
    is_legal = logits > IMPOSSIBLE
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    probabilities = np.where(is_legal, np.exp(scaled), 0.0)
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    even = is_legal / np.count_nonzero(is_legal, axis=-1, keepdims=True)
    mixed = (1 - epsilon) * probabilities + epsilon * even
    with np.errstate(divide="ignore"):
        logs = np.maximum(np.log(mixed), np.float64(-1e8))
    return np.where(is_legal, logs, IMPOSSIBLE).astype(np.float32)
