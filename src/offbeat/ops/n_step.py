"""Value targets of steps in the middle of a stream of experience, ended or not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def n_step_targets(
    rewards: Floats,
    values: Floats,
    terminated: Bools,
    truncated: Bools,
    *,
    num_targets: int,
    num_steps: int | Ints,
    discount: float,
    two_player: bool = False,
) -> Floats:
    """``sum_{i<n} g^i r_{t+i} + g^n V_{t+n}``, cut where the episode ends.

    An episode that was terminated has no value after its last step. One that was truncated goes on in
    thought: what it was worth is ``values`` one step later, where the final observation stands. With
    ``two_player`` each step is the other player's, whose gain is a loss.

    Args:
        rewards: ``[B, W]`` of whoever moved; W is at least ``num_targets + n - 1``.
        values: ``[B, W + 1]`` of whoever moves next.
        terminated: ``[B, W]``, whether the step ended the episode.
        truncated: ``[B, W]``, whether the step was its last for lack of time.
        num_targets: how many targets each row has, from its first step on.
        num_steps: n, one for all or one for each row ``[B]``.
        discount: g.
        two_player: whether two players take turns.

    Returns:
        Targets ``[B, num_targets]``; those after an episode's end belong to whatever the stream goes on with.
    """
    steps = np.broadcast_to(np.asarray(num_steps), (len(rewards),))
    longest = int(steps.max(initial=1))
    if rewards.shape[1] < num_targets + longest - 1:
        raise ValueError(
            f"{num_targets} targets of {longest} steps need {num_targets + longest - 1} rewards a row, "
            f"not {rewards.shape[1]}"
        )
    factor = np.float32(-discount if two_player else discount)
    targets = np.zeros((len(rewards), num_targets), np.float32)
    scale = np.ones_like(targets)
    goes_on = np.ones(targets.shape, np.bool_)
    for i in range(longest):
        here = slice(i, i + num_targets)
        counts = goes_on & (steps > i)[:, None]
        targets += np.where(counts, scale * rewards[:, here], 0)
        after = slice(i + 1, i + 1 + num_targets)
        ends = terminated[:, here] | truncated[:, here]
        bootstraps = counts & ~terminated[:, here] & (truncated[:, here] | (steps == i + 1)[:, None])
        targets += np.where(bootstraps, scale * factor * values[:, after], 0)
        goes_on &= ~ends
        scale *= factor
    return targets


def within_episode(terminated: Bools, truncated: Bools) -> Bools:
    """Whether each step ``[B, W]`` belongs to the episode of the first one, ``[B, W]``."""
    ended = np.cumsum(terminated | truncated, axis=1) > 0
    inside = np.ones_like(ended)
    inside[:, 1:] = ~ended[:, :-1]
    return inside
