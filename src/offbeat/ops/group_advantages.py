"""Advantages of responses and of their tokens, in numpy.

A reward that is not a number is one that there is none of: its response is left out of all means, and its
advantage is not a number either.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.ops.advantages import gae
from offbeat.ops.statistics import Floats

Baseline = Literal["group", "leave_one_out"]
Normalisation = Literal["group", "batch", "none"]


def group_advantages(
    rewards: NDArray[np.float64],
    *,
    baseline: Baseline = "group",
    norm: Normalisation = "group",
    eps: float = 1e-4,
) -> Floats:
    """Return how much better than its group each response is (GRPO, https://arxiv.org/abs/2402.03300).

    ``(r - mean r) / (std r + eps)`` with the sample's deviation. With ``leave_one_out`` the mean is that of
    the others (RLOO, https://arxiv.org/abs/2402.14740). With norms other than ``group`` nothing is divided
    (Dr. GRPO, https://arxiv.org/abs/2503.20783); see `whiten` for ``batch``.

    Args:
        rewards: ``[G]``, of the responses to one prompt; NaN where there is none.
        baseline: mean of the group, or of the others.
        norm: what centred rewards are divided by.
        eps: keeps groups with equal rewards at 0.
    """
    known = rewards[~np.isnan(rewards)]
    if len(known) < 2:
        return np.full(len(rewards), np.nan, np.float32)
    centred = rewards - known.mean()
    if norm == "group":
        centred = centred / (known.std(ddof=1) + eps)
    if baseline == "leave_one_out":
        centred = centred * (len(known) / (len(known) - 1))
    advantages: Floats = centred.astype(np.float32)
    return advantages


def whiten(values: Floats, *, eps: float = 1e-8) -> Floats:
    """Shift and scale values of tokens ``[N]`` to mean 0 and deviation 1 (https://arxiv.org/abs/2501.03262)."""
    if len(values) < 2:
        return np.zeros_like(values)
    wide = values.astype(np.float64)
    whitened: Floats = ((wide - wide.mean()) / np.sqrt(wide.var(ddof=1) + eps)).astype(np.float32)
    return whitened


def token_gae(
    rewards: Floats, values: Floats, sizes: NDArray[np.int64], *, gamma: float, gae_lambda: float
) -> tuple[Floats, Floats]:
    """Generalised advantage estimation over the tokens of responses, https://arxiv.org/abs/1506.02438.

    Each response is an episode that ends with its last token, however it ended.

    Args:
        rewards: ``[N]``, of all tokens, response after response.
        values: ``[N]``, before each token.
        sizes: ``[R]``, tokens of each response; their sum is N.
        gamma: discount per token.
        gae_lambda: 0 is one-step, 1 is Monte Carlo.

    Returns:
        Advantages ``[N]`` and value targets ``[N]``.
    """
    steps = np.arange(max(1, sizes.max(initial=0)))[:, None]
    valid = steps < sizes

    def padded(of_tokens: Floats, more: int = 0) -> Floats:
        whole = np.zeros((len(steps) + more, len(sizes)), np.float32)
        whole[: len(steps)].T[valid.T] = of_tokens
        return whole

    ends = steps == sizes - 1
    found = gae(
        padded(rewards),
        padded(values, 1),
        ends,
        np.zeros_like(ends),
        valid,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    advantages, targets = (one.T[valid.T] for one in found)
    return advantages, targets


def overlong_penalty(sizes: NDArray[np.int64], *, longest: int, buffer: int, penalty: float) -> Floats:
    """Return what is added to rewards of long responses (DAPO, https://arxiv.org/abs/2503.14476).

    0 up to ``longest - buffer`` tokens, then falling evenly to ``-penalty`` at ``longest``.

    Args:
        sizes: ``[R]``, tokens of each response.
        longest: tokens of the longest response that could be.
        buffer: length of the fall, in tokens; 0 for no penalty.
        penalty: what the longest response loses.
    """
    if buffer == 0:
        return np.zeros(len(sizes), np.float32)
    over = np.clip(sizes - (longest - buffer), 0, buffer) / buffer
    return (-penalty * over).astype(np.float32)
