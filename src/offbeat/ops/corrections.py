"""Corrections for tokens that another policy drew, in torch: constant weights of their losses.

Tokens of several responses lie one behind the other, ``[N]``; see ``token_losses``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from offbeat.ops.token_losses import FARTHEST, mean_by_row, sum_by_row

Level = Literal["token", "sequence"]


def importance_weights(log_ratios: Tensor, rows: Tensor, *, level: Level, cap: float) -> Tensor:
    """Truncated importance weights ``min(p, cap)``, at each token ``[N]``.

    ``p`` is the ratio of a token (decoupled PPO, https://arxiv.org/abs/2110.00641) or the product of those of
    its response. Truncated ratios: https://doi.org/10.1198/106186008X320456.

    Args:
        log_ratios: ``[N]``, log-probs under the proximal policy minus those under behaviour.
        rows: ``[N]``, number of each token's response.
        level: ratios of tokens, or of whole responses.
        cap: the largest weight.
    """
    exponents = log_ratios if level == "token" else sum_by_row(log_ratios, rows)[rows]
    return exponents.clamp(-FARTHEST, FARTHEST).exp().clamp(max=cap)


def sequence_mask(log_ratios: Tensor, rows: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """Tell at each token ``[N]`` (1.0 or 0.0) if the geometric mean of its response's ratios is in bounds.

    A mean over tokens, not a product: so bounds are the same for long and short responses.

    Args:
        log_ratios: ``[N]``, log-probs under a newer policy minus those under behaviour.
        rows: ``[N]``, number of each token's response.
        low: smallest geometric mean; None for no bound.
        high: largest geometric mean; None for no bound.
    """
    means = mean_by_row(log_ratios.clamp(-FARTHEST, FARTHEST), rows)
    lowest = -math.inf if low is None else math.log(low)
    highest = math.inf if high is None else math.log(high)
    return ((means >= lowest) & (means <= highest)).to(torch.float32)[rows]
