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
        return cls(**{name: _concatenated(name, [s.data[name] for s in segments]) for name in names})

    @classmethod
    def side_by_side(cls, rounds: Sequence[Round]) -> Round:
        """The environments of several rounds of equal length together; arrays that one lacks are left out."""
        names = [f.name for f in fields(cls) if all(getattr(one, f.name) is not None for one in rounds)]
        return cls(**{name: _concatenated(name, [getattr(one, name) for one in rounds]) for name in names})

    def columns(self, chosen: Array) -> Round:
        """Some of the environments."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        picked = {name: array for name, array in arrays.items() if array is not None}
        return Round(**{name: array.take(chosen, axis=_env_axis(name)) for name, array in picked.items()})

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
class Shares:
    """How much each environment's samples count in the losses, each ``[B]``: for policy and for critic."""

    policy: Floats
    critic: Floats


@dataclass(frozen=True, slots=True)
class Targets:
    """What the losses of a round compare with, each ``[T, B]``.

    ``weights`` correct the policy loss for the age of actions; ``policy_share`` and ``critic_share`` say how
    much a sample counts at all. None stands for 1. ``low`` and ``high`` are samples' own bounds on the ratio
    of the policy to ``old_logp``; None for those of ``clip_coef``.
    """

    advantages: Floats
    values: Floats
    old_values: Floats
    old_logp: Floats
    weights: Floats | None
    low: Floats | None = None
    high: Floats | None = None
    policy_share: Floats | None = None
    critic_share: Floats | None = None


def compute_targets(
    config: PPOConfig,
    data: Round,
    values: Floats,
    prox_logp: Floats,
    shares: Shares | None = None,
    *,
    is_stale: bool = True,
) -> Targets:
    """Advantages, value targets and sample weights of a round.

    Args:
        config: settings with a resolved ``correction``.
        data: the round.
        values: ``[T + 1, B]``, the critic before the round.
        prox_logp: ``[T, B]``, log-probability of the actions under the policy before the round.
        shares: how much each environment's samples count; None: all the same.
        is_stale: some samples were collected by an older policy.
    """
    gamma, gae_lambda, c_bar = config.gamma, config.gae_lambda, config.c_bar
    steps = (data.rewards, values, data.terminated, data.truncated, data.valid)
    low = high = None
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
            if is_stale and config.behaviour_clip is not None:
                low, high = _bounds(ratios, config.clip_coef, config.behaviour_clip)
        old_logp, weights = prox_logp, np.minimum(ratios, np.float32(bound))
    if shares is None:
        if config.norm_adv:
            advantages = masked_normalise(advantages, data.valid)
        return Targets(advantages, targets, values[:-1], old_logp, weights, low, high)
    policy, critic = (np.broadcast_to(part, data.valid.shape) for part in (shares.policy, shares.critic))
    if config.norm_adv:
        advantages = masked_normalise(advantages, data.valid, weights=policy)
    weights = policy if weights is None else weights * policy
    return Targets(advantages, targets, values[:-1], old_logp, weights, low, high, policy, critic)


def _bounds(ratios: Floats, clip_coef: float, behaviour_clip: float) -> tuple[Floats, Floats]:
    """Least and largest ratio to the proximal policy: near that, and near the policy that acted.

    ``ratios`` are those of the proximal policy to the one that acted.
    """
    low = np.maximum((1 - behaviour_clip) / ratios, 1 - clip_coef)
    high = np.minimum((1 + behaviour_clip) / ratios, 1 + clip_coef)
    return low.astype(np.float32), high.astype(np.float32)


def _concatenated(name: str, arrays: Sequence[Array]) -> Array:
    return np.concatenate(arrays, axis=_env_axis(name))


def _env_axis(name: str) -> int:
    return 0 if name == "memory" else 1
