"""Weights that make a sum over tokens a mean of some kind, in numpy."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.ops.statistics import Floats

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregation_weights(sizes: NDArray[np.int64], kind: Aggregation, *, longest: int = 1) -> Floats:
    """Weight of each token, such that the sum of weighted losses is the aggregated loss.

    ``token_mean``: over all tokens (DAPO, https://arxiv.org/abs/2503.14476). ``sequence_mean``: over
    responses of means over their tokens (GRPO, https://arxiv.org/abs/2402.03300). ``constant``: over
    responses of sums over their tokens, divided by ``longest`` (Dr. GRPO, https://arxiv.org/abs/2503.20783).
    Denominators are those of all responses given, in however many parts they are differentiated.

    Args:
        sizes: ``[R]``, tokens of each response; one without any is no response.
        kind: how losses are aggregated.
        longest: tokens of the longest response that could be, for ``constant``.

    Returns:
        ``[sizes.sum()]``, in float32.
    """
    num_responses = max(1, int(np.count_nonzero(sizes)))
    if kind == "token_mean":
        divisors = np.full(len(sizes), max(1, int(sizes.sum())))
    elif kind == "sequence_mean":
        divisors = num_responses * sizes
    else:
        divisors = np.full(len(sizes), num_responses * longest)
    return (1.0 / np.repeat(divisors, sizes)).astype(np.float32)
