"""Groups that are not worth training. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.grpo.config import GRPOConfig


def why_dropped(rewards: NDArray[np.float64], config: GRPOConfig) -> str:
    """Return why a group with rewards ``[G]`` is dropped; empty when it is trained.

    ``reward_failed``: too few have a reward that is a number. ``no_spread``: all rewards are the same, and
    `dynamic_sampling` asks for others.
    """
    rewarded = rewards[np.isfinite(rewards)]
    if len(rewarded) < (1 if config.choices.advantage == "gae" else 2):
        return "reward_failed"
    return "no_spread" if config.dynamic_sampling and not np.ptp(rewarded) else ""
