"""Losses of policies over tokens, in torch: one value for each token, to be averaged by the caller."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_token_loss(
    log_probs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Clipped surrogate of each token, ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    PPO's (https://arxiv.org/abs/1707.06347) with bounds of its own on both sides (DAPO,
    https://arxiv.org/abs/2503.14476); ``r = exp(log_probs - behaviour)``. At ``r = 1`` the gradient by
    ``log_probs`` is ``-A``.

    Args:
        log_probs: ``[N]``, under the policy that is trained.
        behaviour: ``[N]``, under the weights that drew each token.
        advantages: ``[N]``, of the response that each token is part of.
        clip_low: how far below 1 a ratio may be.
        clip_high: how far above 1.
    """
    ratio = (log_probs - behaviour).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)
