"""The action distributions of ``actions`` once more, in torch and with gradients: what a learner needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.models.actions import HALF_LOG_2PI, Actions, CategoricalActions, GaussianActions


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-probability ``[M]`` of the actions taken, entropy ``[M]``, and the way back to the outputs.

    ``backward(grad_logp, grad_entropy)`` takes a gradient ``[M]`` by the log-probabilities and one number,
    the gradient by every entropy; it returns the gradient ``[M, P]`` by the outputs.
    """

    logp: Tensor
    entropy: Tensor
    backward: Callable[[Tensor, float], Tensor]


def likelihood(head: Actions, outputs: Tensor, actions: Tensor) -> Likelihood:
    """Judge actions ``[M, *shape]`` by outputs ``[M, P]``."""
    if isinstance(head, GaussianActions):
        return _gaussian(outputs, actions)
    if not head.shape:
        return _categorical(outputs, actions.unsqueeze(-1))
    return _several_choices(head, outputs, actions.reshape(len(outputs), -1))


def _categorical(logits: Tensor, chosen: Tensor) -> Likelihood:
    log_probs = torch.log_softmax(logits, dim=-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(-1)

    def backward(grad_logp: Tensor, grad_entropy: float) -> Tensor:
        # d logp / d logit_j = [j chosen] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy).
        grad = probs * -grad_logp.unsqueeze(-1)
        grad.scatter_add_(-1, chosen, grad_logp.unsqueeze(-1))
        if grad_entropy:
            grad.sub_(probs * (log_probs + entropy.unsqueeze(-1)), alpha=grad_entropy)
        return grad

    return Likelihood(log_probs.gather(-1, chosen).squeeze(-1), entropy, backward)


def _several_choices(head: CategoricalActions, outputs: Tensor, chosen: Tensor) -> Likelihood:
    logits = torch.split(outputs, list(head.nvec), dim=-1)
    parts = [_categorical(part, chosen[:, i : i + 1]) for i, part in enumerate(logits)]
    logp = torch.stack([part.logp for part in parts]).sum(0)
    entropy = torch.stack([part.entropy for part in parts]).sum(0)

    def backward(grad_logp: Tensor, grad_entropy: float) -> Tensor:
        return torch.cat([part.backward(grad_logp, grad_entropy) for part in parts], dim=-1)

    return Likelihood(logp, entropy, backward)


def _gaussian(outputs: Tensor, actions: Tensor) -> Likelihood:
    mean, log_std = outputs.chunk(2, dim=-1)
    precision = (-log_std).exp()
    scaled = (actions.reshape(mean.shape) - mean) * precision
    squares = scaled.square()
    logp = (-0.5 * squares - log_std - float(HALF_LOG_2PI)).sum(-1)
    entropy = (log_std + (0.5 + float(HALF_LOG_2PI))).sum(-1)

    def backward(grad_logp: Tensor, grad_entropy: float) -> Tensor:
        by_logp = grad_logp.unsqueeze(-1)
        return torch.cat([by_logp * scaled * precision, by_logp * (squares - 1) + grad_entropy], dim=-1)

    return Likelihood(logp, entropy, backward)
