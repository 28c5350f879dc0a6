"""Losses of policy-gradient learners in torch, each with its gradient.

The gradients are written out because they are short, and because a graph of some twenty small tensor
operations costs more than all the arithmetic of a small network's update.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    clip_coef: float,
    weights: Tensor | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate, https://arxiv.org/abs/1707.06347, optionally decoupled.

    ``-mean(w min(r A, clip(r, 1 - e, 1 + e) A))`` with ``r = exp(logp - old_logp)``. With ``old_logp`` of
    the proximal policy and ``w`` the bounded ratio of proximal to behaviour policy this is the decoupled
    objective of https://arxiv.org/abs/2110.00641. The gradient by ``logp`` is ``-w A r / M`` where the
    first term is the smaller one, else 0.

    Args:
        logp: ``[M]``, log-probability of the action under the policy being trained.
        old_logp: ``[M]``, under the policy the step is kept close to.
        advantages: ``[M]``.
        clip_coef: e.
        weights: ``[M]``, constant weight of each sample, None for 1.
        bounds: ``[M]`` each, samples' own least and largest ratio in place of ``1 - e`` and ``1 + e``.

    Returns:
        The loss ``[]``, its gradient by ``logp`` ``[M]``, and the log-ratios ``[M]``.
    """
    log_ratio = logp - old_logp
    ratio = log_ratio.exp()
    plain = ratio * advantages
    if bounds is None:
        ratio.clamp_(1 - clip_coef, 1 + clip_coef)
    else:  # only one of them holds for a sample: the least may lie above the largest
        low, high = bounds
        ratio = torch.where(advantages > 0, ratio.minimum(high), ratio.maximum(low))
    clipped = ratio.mul_(advantages)
    is_plain = plain <= clipped
    surrogate = torch.minimum(plain, clipped)
    if weights is not None:
        surrogate.mul_(weights)
        plain.mul_(weights)
    gradient = plain.mul_(is_plain).mul_(-1.0 / len(logp))
    return -surrogate.mean(), gradient, log_ratio


def value_loss(
    values: Tensor,
    targets: Tensor,
    *,
    old_values: Tensor | None = None,
    clip_coef: float = 0.0,
    weights: Tensor | None = None,
    huber_delta: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Half the mean squared error, with PPO's value clipping where ``old_values`` are given.

    With ``huber_delta`` d, an error e beyond d counts ``d (|e| - d / 2)``, not ``e^2 / 2`` (Huber 1964).

    Args:
        values: ``[M]``, the critic being trained.
        targets: ``[M]``.
        old_values: ``[M]``, the critic at the start of the round. A value further from it than
            ``clip_coef`` is judged as if it had stopped there, when that is the worse of the two.
        clip_coef: bound of the change.
        weights: ``[M]``, constant weight of each sample inside the mean, None for 1.
        huber_delta: error from which on the loss grows linearly, None for never.

    Returns:
        The loss ``[]`` and its gradient by ``values`` ``[M]``.
    """
    errors = values - targets
    losses, gradient = huber(errors, huber_delta), _slopes(errors, huber_delta) / len(values)
    if old_values is not None:
        change = values - old_values
        bounded = old_values + change.clamp(-clip_coef, clip_coef) - targets
        gradient.mul_((change.abs() <= clip_coef) | (errors.abs() >= bounded.abs()))
        losses = torch.maximum(losses, huber(bounded, huber_delta))
    if weights is not None:
        losses, gradient = losses * weights, gradient * weights
    return losses.mean(), gradient


def huber(errors: Tensor, delta: float | None) -> Tensor:
    """Loss of each error: half its square, and beyond ``delta``, unless None, the tangent to that."""
    halves = 0.5 * errors.square()
    if delta is None:
        return halves
    sizes = errors.abs()
    return torch.where(sizes <= delta, halves, delta * (sizes - 0.5 * delta))


def _slopes(errors: Tensor, delta: float | None) -> Tensor:
    return errors if delta is None else errors.clamp(-delta, delta)
