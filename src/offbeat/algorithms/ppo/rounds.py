"""A round's segments side by side, and the targets computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.ppo.config import PPOConfig
from offbeat.ops.advantages import gae, off_policy_gae, vtrace
from offbeat.ops.statistics import masked_normalise
from offbeat.types import Array, Segment

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Round:
    """The samples of one round: B environments over T steps, segments in training order.

    ``obs`` ``[T + 1, B, ...]``, ``actions`` ``[T, B, ...]``, ``memory`` ``[B, H]`` or None, the rest
    ``[T, B]``; ``logp`` is the behaviour policy's.
    """

    obs: Array
    actions: Array
    logp: Floats
    rewards: Floats
    terminated: Bools
    truncated: Bools
    valid: Bools
    memory: Floats | None = None
    discounted_returns: Floats | None = None

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Round:
        """Copy the segments' arrays side by side: their own memory is reused after training."""
        first = segments[0].data
        names = [field.name for field in fields(cls) if field.name in first]
        return cls(**{name: _side_by_side(name, segments) for name in names})

    def non_finite(self) -> list[str]:
        """Names of arrays that hold a NaN or an infinity where it would be trained on."""
        suspects = {name: getattr(self, name) for name in ("obs", "actions", "logp", "rewards")}
        floats = {name: array for name, array in suspects.items() if array.dtype.kind == "f"}
        # Looking at all steps first is cheaper than picking those that count.
        hit = {name: array for name, array in floats.items() if not np.isfinite(array).all()}
        masks = {name: self._seen() if name == "obs" else self.valid for name in hit}
        return [name for name, array in hit.items() if not np.isfinite(array[masks[name]]).all()]

    def _seen(self) -> Bools:
        """Observations ``[T + 1, B]`` that are acted on or bootstrapped from."""
        seen = np.concatenate([self.valid, np.zeros_like(self.valid[:1])])
        seen[1:] |= self.valid & ~self.terminated
        return seen


@dataclass(frozen=True, slots=True)
class Targets:
    """What the losses of a round compare with, each ``[T, B]``; ``weights`` None stands for 1."""

    advantages: Floats
    values: Floats
    old_values: Floats
    old_logp: Floats
    weights: Floats | None


def compute_targets(config: PPOConfig, data: Round, values: Floats, prox_logp: Floats) -> Targets:
    """Advantages, value targets and sample weights of a round.

    Args:
        config: settings with a resolved ``correction``.
        data: the round.
        values: ``[T + 1, B]``, the critic before the round.
        prox_logp: ``[T, B]``, log-probability of the actions under the policy before the round.
    """
    gamma, gae_lambda, c_bar = config.gamma, config.gae_lambda, config.c_bar
    steps = (data.rewards, values, data.terminated, data.truncated, data.valid)
    if config.correction == "gae":
        advantages, targets = gae(*steps, gamma=gamma, gae_lambda=gae_lambda)
        old_logp, weights = data.logp, None
    else:
        ratios = np.exp(prox_logp - data.logp)
        if config.correction == "vtrace":
            bound = config.rho_bar
            advantages, targets = vtrace(
                *steps, ratios, gamma=gamma, gae_lambda=gae_lambda, rho_bar=bound, c_bar=c_bar
            )
        else:
            bound = config.behaviour_cap
            advantages, targets = off_policy_gae(
                *steps, ratios, gamma=gamma, gae_lambda=gae_lambda, c_bar=c_bar
            )
        old_logp, weights = prox_logp, np.minimum(ratios, np.float32(bound))
    if config.norm_adv:
        advantages = masked_normalise(advantages, data.valid)
    return Targets(advantages, targets, values[:-1], old_logp, weights)


def _side_by_side(name: str, segments: Sequence[Segment]) -> Array:
    axis = 0 if name == "memory" else 1
    return np.concatenate([segment.data[name] for segment in segments], axis=axis)
