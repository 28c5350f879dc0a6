"""What the optimiser steps of one round report, for every algorithm with a clipped policy loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from offbeat.ops.statistics import approx_kl
from offbeat.types import Metrics


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of the loss ``[]`` of some samples, and their log-ratios ``[M]`` or ``[M, ...]``."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    log_ratio: Tensor


@dataclass(slots=True)
class Progress:
    """Reports of a round's optimiser steps, in order; tensors are read once, at the end."""

    policy_losses: list[Tensor] = field(default_factory=list)
    value_losses: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    log_ratios: list[Tensor] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def add(self, terms: Terms) -> None:
        """Note what one part of a minibatch gave."""
        self.policy_losses.append(terms.policy.detach())
        self.value_losses.append(terms.value.detach())
        self.entropies.append(terms.entropy.detach())
        self.log_ratios.append(terms.log_ratio.detach())

    def metrics(self, clip_coef: float, prefix: str = "learn/") -> Metrics:
        """Means over the round."""
        log_ratios = torch.cat(self.log_ratios).cpu().numpy()
        is_clipped = np.abs(np.expm1(log_ratios)) > clip_coef
        return {
            f"{prefix}policy_loss": _mean(self.policy_losses),
            f"{prefix}value_loss": _mean(self.value_losses),
            f"{prefix}entropy": _mean(self.entropies),
            f"{prefix}approx_kl": approx_kl(log_ratios),
            f"{prefix}clip_fraction": float(np.mean(is_clipped)),
            f"{prefix}grad_norm": float(np.mean(self.grad_norms)),
            f"{prefix}gradient_steps": float(len(self.grad_norms)),
        }


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean())
