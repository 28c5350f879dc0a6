"""What every evaluator does alike: how many episodes, how long at most, what is told of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import EvalError
from offbeat.types import Metrics

MAX_EPISODE_STEPS = 200_000
"""An episode longer than this is taken for one that never ends."""


def quotas(num_episodes: int, num_envs: int) -> NDArray[np.int64]:
    """Episodes each environment plays, ``[N]``, as even as can be.

    They are fixed beforehand: taking the first to finish would favour short ones.
    """
    return num_episodes // num_envs + (np.arange(num_envs) < num_episodes % num_envs)


def check_length(steps: NDArray[np.int64]) -> None:
    """Raise EvalError where an episode of so many steps ``[N]`` seems to have no end."""
    if steps.max() > MAX_EPISODE_STEPS:
        raise EvalError(
            f"an episode has not ended after {MAX_EPISODE_STEPS} steps; set env.max_episode_steps to a limit"
        )


def return_metrics(returns: Sequence[float], lengths: Sequence[int]) -> Metrics:
    """What is told about the episodes that were played."""
    return {
        "eval/return_mean": float(np.mean(returns)),
        "eval/return_std": float(np.std(returns)),
        "eval/return_min": min(returns),
        "eval/return_max": max(returns),
        "eval/length_mean": float(np.mean(lengths)),
        "eval/episodes": float(len(returns)),
    }


def sampled_metrics(returns: Sequence[float]) -> Metrics:
    """Return what is told about episodes with drawn actions, beside those with the most likely ones."""
    return {
        "eval/return_mean_sampled": float(np.mean(returns)),
        "eval/return_std_sampled": float(np.std(returns)),
    }
