"""Losses of policies over tokens, in torch: one value for each token, for the caller to weight and sum.

Tokens of several responses lie one behind the other, ``[N]``; ``rows`` ``[N]`` numbers the response of each.
Three policies appear: *behaviour* drew a token, the *proximal* one is what a step is kept close to, and the
one that is *trained*. At a ratio of 1 the gradient of every policy loss by ``log_probs`` is ``-A``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
FARTHEST = 20.0
"""Bound on logarithms before they are exponents."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Input of a policy loss: tokens that the policy drew, whole responses at a time. All are ``[N]``.

    ``log_probs`` under the policy that is trained, with a gradient; ``proximal`` under the policy that
    ratios are taken to: the one that drew the tokens, or that at the round's start (decoupled);
    ``behaviour`` under the weights that drew each token; ``advantages``; ``rows``, the number of each
    token's response within the batch, from 0 on.
    """

    log_probs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    rows: Tensor


def token_ratios(log_probs: Tensor, proximal: Tensor) -> Tensor:
    """Ratio of probabilities of each token ``[N]``; differences of logarithms are held within 20."""
    return (log_probs - proximal).clamp(-FARTHEST, FARTHEST).exp()


def sequence_ratios(log_probs: Tensor, proximal: Tensor, rows: Tensor) -> Tensor:
    """Geometric mean of the ratios of a response, at each of its tokens ``[N]`` (GSPO).

    ``s = exp(mean_t (log_probs - proximal))``, https://arxiv.org/abs/2507.18071, in the form for advantages
    that may differ by token (its section 4.3): the gradient of a token's ratio by its own log-prob is ``s``,
    and none by those of others. Where all have one advantage, the sum over them is that of GSPO.
    """
    means = mean_by_row((log_probs - proximal).detach(), rows)[rows]
    return (means + log_probs - log_probs.detach()).clamp(-FARTHEST, FARTHEST).exp()


def sum_by_row(values: Tensor, rows: Tensor) -> Tensor:
    """Sum of ``values`` ``[N]`` over the tokens of each response, ``[R]``."""
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    return values.new_zeros(num_rows).index_add(0, rows, values)


def mean_by_row(values: Tensor, rows: Tensor) -> Tensor:
    """Mean of ``values`` ``[N]`` over the tokens of each response, ``[R]``."""
    return sum_by_row(values, rows) / sum_by_row(torch.ones_like(values), rows)


def clipped_loss(
    ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Clipped surrogate of each token, ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    PPO's (https://arxiv.org/abs/1707.06347) with bounds of its own on both sides (DAPO,
    https://arxiv.org/abs/2503.14476), and with a bound ``c |A|`` on the loss of negative advantages (dual
    clip, https://arxiv.org/abs/1912.09729).

    Args:
        ratios: ``[N]``, of the trained policy to the proximal one, with a gradient.
        advantages: ``[N]``.
        clip_low: how far below 1 a ratio may be.
        clip_high: how far above 1.
        dual_clip: ``c``, above 1; None for no such bound.
    """
    clipped = ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = -torch.minimum(ratios * advantages, clipped * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def detached_loss(
    ratios: Tensor, log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Log-likelihood of each token, weighted by its clipped ratio as a constant (CISPO).

    ``-sg(clip(r, 1 - low, 1 + high)) A log p``, https://arxiv.org/abs/2506.13585: clipping bounds the weight
    of a token, and no token loses its gradient.

    Args:
        ratios: ``[N]``, of the trained policy to the proximal one.
        log_probs: ``[N]``, under the trained policy, with a gradient.
        advantages: ``[N]``.
        clip_low: how far below 1 a weight may be.
        clip_high: how far above 1.
    """
    return -ratios.detach().clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * log_probs


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimate of KL(trained || reference) at each token ``[N]`` (http://joschu.net/blog/kl-approx.html).

    With ``d = log_probs - reference``: k1 is ``d``, k2 ``d^2 / 2`` and k3 ``e^-d + d - 1``, at most 10.
    k2's gradient is that of the KL divergence; that of k1 has mean 0.
    """
    difference = log_probs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    bounded = difference.clamp(-FARTHEST, FARTHEST)
    return ((-bounded).exp() + bounded - 1.0).clamp(max=10.0)


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """Half the squared error of each value ``[N]``, and not less than if it had changed by ``clip`` at most.

    PPO's (https://arxiv.org/abs/1707.06347), with ``old_values`` of the round's start.
    """
    errors = (values - targets).square()
    if clip is None:
        return 0.5 * errors
    bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    return 0.5 * torch.maximum(errors, (bounded - targets).square())
