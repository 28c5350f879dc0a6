"""Draw tokens by the inverse of the cumulative distribution, at uniforms by request and position.

So the tokens of a request never depend on what else is generated, and a request that continues elsewhere
draws what it would have drawn.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = 48
"""Of a uniform: the largest is below 1 by more than fp64 rounds a product with a sum of probabilities."""


def uniforms(seed: int, sample: int, length: int) -> NDArray[np.float64]:
    """Return the uniforms of one response by position in its sequence, each inside (0, 1).

    Raw bits of Philox, whose stream NumPy never changes; a longer stream begins with the shorter one.
    """
    bits = np.random.Philox(key=(seed % (1 << 64)) | (sample << 64)).random_raw(length)
    return ((bits >> (64 - _BITS)).astype(np.float64) + 0.5) / float(1 << _BITS)


def draw(
    logits: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row; return tokens ``[N]`` and their log-probs ``[N]``.

    Args:
        logits: ``[N, V]`` in fp32.
        temperature: ``[N]``; 0 takes the most likely token.
        uniform: ``[N]`` in fp64, inside (0, 1).
        top_k: ``[N]``, draw among so many most likely tokens; None for all rows: among all.
        top_p: ``[N]``, draw among the most likely tokens that have this much probability together.

    Log-probs are those of softmax(logits / temperature), of softmax(logits) at temperature 0, before
    ``top_k`` and ``top_p``.
    """
    is_greedy = temperature <= 0.0
    log_probs = (logits / torch.where(is_greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    probs = log_probs.exp()
    token = inverse(probs, uniform[:, None])[:, 0]
    if top_k is not None and top_p is not None:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        kept = (rank < top_k[:, None]) & (before < top_p[:, None])
        place = inverse(torch.where(kept | (rank == 0), ordered, 0.0), uniform[:, None])
        # The order decides what a uniform draws: rows without limits draw as they do without such company.
        is_limited = (top_k < probs.shape[-1]) | (top_p < 1.0)
        token = torch.where(is_limited, order.gather(-1, place)[:, 0], token)
    token = torch.where(is_greedy, log_probs.argmax(-1), token)
    return token, log_probs.gather(-1, token[:, None])[:, 0]


def inverse(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return where cumulative sums of ``probs`` ``[N, V]`` pass ``uniform`` ``[N, M]`` times the whole."""
    cumulated = probs.cumsum(-1, dtype=torch.float64)
    target = uniform * cumulated[:, -1:]
    return torch.searchsorted(cumulated, target, right=True).clamp_(max=probs.shape[-1] - 1)
