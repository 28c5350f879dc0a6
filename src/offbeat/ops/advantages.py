"""Advantages and value targets of segments, in numpy.

Shapes are time-major: ``[T, B]`` for T steps of B environments, ``[T + 1, B]`` for values, whose last
row is the bootstrap. ``values[t + 1]`` at a step that ended an episode is the value of the true final
observation: a truncated step bootstraps from it, a terminated one does not. A step that is not
``valid`` (the reset step after an episode's end) gets advantage 0 and passes nothing on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


def gae(
    rewards: Floats,
    values: Floats,
    terminated: Bools,
    truncated: Bools,
    valid: Bools,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Floats, Floats]:
    """Generalised advantage estimation, https://arxiv.org/abs/1506.02438.

    ``A_t = delta_t + gamma lambda A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``, cut at ends.

    Args:
        rewards: ``[T, B]``.
        values: ``[T + 1, B]``.
        terminated: ``[T, B]``, the episode ended by itself: no bootstrap.
        truncated: ``[T, B]``, the episode was cut off: bootstrap, no trace.
        valid: ``[T, B]``, False on reset steps.
        gamma: discount per step.
        gae_lambda: 0 is one-step, 1 is Monte Carlo.

    Returns:
        Advantages ``[T, B]`` and value targets ``A + V`` ``[T, B]``.
    """
    deltas = td_errors(rewards, values, terminated, valid, gamma)
    decay = _trace_decay(terminated, truncated, valid, gamma * gae_lambda)
    advantages = _discounted_sum(deltas, decay)
    return advantages, advantages + values[:-1]


def off_policy_gae(
    rewards: Floats,
    values: Floats,
    terminated: Bools,
    truncated: Bools,
    valid: Bools,
    ratios: Floats,
    *,
    gamma: float,
    gae_lambda: float,
    c_bar: float,
) -> tuple[Floats, Floats]:
    """GAE whose trace is weighted by truncated ratios of the *future* actions.

    ``A_t = delta_t + gamma lambda min(c_bar, rho_{t+1}) A_{t+1}``. The ratio of ``a_t`` itself is not in
    ``A_t``: the policy loss applies it, once. With all ratios 1 this is ``gae``. The targets
    ``V_t + min(c_bar, rho_t) A_t`` are V-trace targets with ``rho_bar = c_bar``
    (https://arxiv.org/abs/1802.01561, remark 2).

    Args:
        rewards: ``[T, B]``; ``terminated``, ``truncated``, ``valid`` alike, see ``gae``.
        values: ``[T + 1, B]``.
        terminated: see ``gae``.
        truncated: see ``gae``.
        valid: see ``gae``.
        ratios: ``[T, B]``, probability under the learner's policy over that under the behaviour policy.
        gamma: discount per step.
        gae_lambda: decay of the trace.
        c_bar: bound on each ratio in the trace.

    Returns:
        Advantages ``[T, B]`` and value targets ``[T, B]``.
    """
    deltas = td_errors(rewards, values, terminated, valid, gamma)
    decay = _trace_decay(terminated, truncated, valid, gamma * gae_lambda)
    bounded = _bounded(ratios, valid, c_bar)
    decay[:-1] *= bounded[1:]
    advantages = _discounted_sum(deltas, decay)
    return advantages, values[:-1] + bounded * advantages


def gae_to_next(
    rewards: Floats,
    values: Floats,
    next_values: Floats,
    terminated: Bools,
    ended: Bools,
    valid: Bools,
    *,
    gamma: float,
    gae_lambda: float,
    ratios: Floats | None = None,
    c_bar: float = 1.0,
) -> tuple[Floats, Floats]:
    """``gae``, or with ratios ``off_policy_gae``, where the value after each step is given by itself.

    All arrays are ``[T, ...]``; their trailing axes are broadcast against each other, so that one value may
    serve several agents. What is not valid may hold anything, even a NaN, and gives 0.

    Args:
        rewards: of the steps.
        values: before the steps.
        next_values: after the steps; not looked at where a step terminated.
        terminated: the episode ended by itself: no bootstrap.
        ended: the trace ends with the step, for whatever reason.
        valid: False where a step does not count.
        gamma: discount per step.
        gae_lambda: decay of the trace.
        ratios: probability under the learner's policy over that under the behaviour policy; None for 1.
        c_bar: bound on each ratio in the trace.

    Returns:
        Advantages and value targets, both of the broadcast shape.
    """
    bootstrap = np.where(terminated, np.float32(0), np.float32(gamma) * next_values)
    deltas: Floats = np.where(valid, rewards + bootstrap - values, np.float32(0)).astype(np.float32)
    decay = np.broadcast_to(np.float32(gamma * gae_lambda) * (valid & ~(terminated | ended)), deltas.shape)
    if ratios is None:
        advantages = _discounted_sum(deltas, decay)
        return advantages, np.where(valid, advantages + values, np.float32(0))
    bounded = np.broadcast_to(_bounded(ratios, valid, c_bar), deltas.shape)
    advantages = _discounted_sum(deltas, np.concatenate([decay[:-1] * bounded[1:], decay[-1:]]))
    return advantages, np.where(valid, values + bounded * advantages, np.float32(0))


def vtrace(
    rewards: Floats,
    values: Floats,
    terminated: Bools,
    truncated: Bools,
    valid: Bools,
    ratios: Floats,
    *,
    gamma: float,
    gae_lambda: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Floats, Floats]:
    """V-trace, https://arxiv.org/abs/1802.01561, section 4.1.

    ``v_t = V_t + min(rho_bar, rho_t) delta_t + gamma lambda min(c_bar, rho_t) (v_{t+1} - V_{t+1})`` and
    ``A_t = r_t + gamma v_{t+1} - V_t``. As in ``off_policy_gae`` the ratio of ``a_t`` belongs to the loss.

    Args:
        rewards: ``[T, B]``; ``terminated``, ``truncated``, ``valid`` alike, see ``gae``.
        values: ``[T + 1, B]``.
        terminated: see ``gae``.
        truncated: see ``gae``.
        valid: see ``gae``.
        ratios: ``[T, B]``, probability under the learner's policy over that under the behaviour policy.
        gamma: discount per step.
        gae_lambda: decay of the trace, 1 in the paper.
        rho_bar: bound on the ratio of the temporal difference; fixes what is learnt.
        c_bar: bound on each ratio in the trace; fixes how fast.

    Returns:
        Advantages ``[T, B]`` and value targets ``v`` ``[T, B]``.
    """
    deltas = td_errors(rewards, values, terminated, valid, gamma)
    continues = _trace_decay(terminated, truncated, valid, gamma)
    decay = np.float32(gae_lambda) * continues * _bounded(ratios, valid, c_bar)
    corrections = _discounted_sum(_bounded(ratios, valid, rho_bar) * deltas, decay)
    # r_t + gamma v_{t+1} - V_t = delta_t + gamma (v_{t+1} - V_{t+1}).
    deltas[:-1] += continues[:-1] * corrections[1:]
    return deltas, values[:-1] + corrections


def discounted_returns(rewards: Floats, ended: Bools, start: Floats, *, gamma: float) -> Floats:
    """Running discounted return of each environment, the stream that scales rewards.

    ``R_t = gamma R_{t-1} + r_t``, begun anew after each end.

    Args:
        rewards: ``[T, B]``.
        ended: ``[T, B]``, the step ended an episode.
        start: ``[B]``, the running return before the first step.
        gamma: discount per step.

    Returns:
        ``[T, B]``; the state for the next segment is ``where(ended[-1], 0, R[-1])``.
    """
    returns = np.empty_like(rewards)
    running = start
    for t in range(len(rewards)):
        returns[t] = np.float32(gamma) * running + rewards[t]
        running = np.where(ended[t], np.float32(0), returns[t])
    return returns


def td_errors(rewards: Floats, values: Floats, terminated: Bools, valid: Bools, gamma: float) -> Floats:
    """One-step errors ``r_t + gamma V_{t+1} - V_t`` ``[T, B]``, 0 where a step is not valid; see ``gae``."""
    # Choosing, not multiplying by 0: what does not count may be anything, even a NaN.
    bootstrap = np.where(terminated, np.float32(0), np.float32(gamma) * values[1:])
    deltas: Floats = (rewards + bootstrap - values[:-1]).astype(np.float32)
    deltas[~valid] = 0
    return deltas


def _trace_decay(terminated: Bools, truncated: Bools, valid: Bools, factor: float) -> Floats:
    return np.float32(factor) * (valid & ~(terminated | truncated))


def _bounded(ratios: Floats, valid: Bools, bound: float) -> Floats:
    return np.where(valid, np.minimum(ratios, np.float32(bound)), np.float32(0))


def _discounted_sum(terms: Floats, decay: Floats) -> Floats:
    """``S_t = terms_t + decay_t S_{t+1}``, ``[T, B]``."""
    sums = np.empty_like(terms)
    sums[-1] = running = terms[-1]
    for t in range(len(terms) - 2, -1, -1):
        sums[t] = running = terms[t] + decay[t] * running
    return sums
