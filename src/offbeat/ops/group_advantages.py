"""Advantages of responses to the same prompt, in numpy."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.ops.statistics import Floats

Normalisation = Literal["group", "none"]


def group_advantages(
    rewards: NDArray[np.float64], *, norm: Normalisation = "group", eps: float = 1e-4
) -> Floats:
    """Return how much better than its group each response is (GRPO, https://arxiv.org/abs/2402.03300).

    ``(r - mean r) / (std r + eps)`` with the sample's deviation; ``none`` does not divide (Dr. GRPO,
    https://arxiv.org/abs/2503.20783).

    Args:
        rewards: ``[G]``, of the responses to one prompt.
        norm: what centred rewards are divided by.
        eps: keeps groups with equal rewards at 0.
    """
    centred = rewards - rewards.mean()
    if norm == "group" and len(rewards) > 1:
        centred = centred / (rewards.std(ddof=1) + eps)
    advantages: Floats = centred.astype(np.float32)
    return advantages
