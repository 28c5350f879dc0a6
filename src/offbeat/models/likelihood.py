"""The action distributions of ``actions`` once more, in torch and with gradients: what a learner needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.models.actions import HALF_LOG_2PI, Actions, CategoricalActions, GaussianActions


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-probability ``[M]`` of the actions taken, entropy ``[M]``, and the way back to the outputs.

    ``backward(grad_logp, grad_entropy)`` takes a gradient ``[M]`` by the log-probabilities and one by the
    entropies, ``[M]`` or one number for all; it returns the gradient ``[M, P]`` by the outputs.
    """

    logp: Tensor
    entropy: Tensor
    backward: Callable[[Tensor, Tensor | float], Tensor]


def likelihood(head: Actions, outputs: Tensor, actions: Tensor) -> Likelihood:
    """Judge actions ``[M, *shape]`` by outputs ``[M, P]``."""
    if isinstance(head, GaussianActions):
        return _gaussian(outputs, actions)
    if isinstance(head, CategoricalActions) and head.shape:
        return _several_choices(head, outputs, actions.reshape(len(outputs), -1))
    if not isinstance(head, CategoricalActions) and outputs.device.type == "cpu":
        return _moves(outputs, actions)
    return _categorical(outputs, actions.long().unsqueeze(-1))


def _categorical(logits: Tensor, chosen: Tensor) -> Likelihood:
    log_probs = torch.log_softmax(logits, dim=-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(-1)

    def backward(grad_logp: Tensor, grad_entropy: Tensor | float) -> Tensor:
        # d logp / d logit_j = [j chosen] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy).
        grad = probs * -grad_logp.unsqueeze(-1)
        grad.scatter_add_(-1, chosen, grad_logp.unsqueeze(-1))
        if isinstance(grad_entropy, Tensor):
            grad.sub_(probs * (log_probs + entropy.unsqueeze(-1)).mul_(grad_entropy.unsqueeze(-1)))
        elif grad_entropy:
            grad.sub_(probs * (log_probs + entropy.unsqueeze(-1)), alpha=grad_entropy)
        return grad

    return Likelihood(log_probs.gather(-1, chosen).squeeze(-1), entropy, backward)


def _moves(outputs: Tensor, chosen: Tensor) -> Likelihood:
    """As ``_categorical``, but passes over moves that are not legal; compiled."""
    from offbeat.models.lines_kernels import grade_likelihood, judge_moves

    scores, moves = outputs.numpy(), chosen.numpy()
    logp, entropy, log_total = np.empty((3, len(scores)), np.float32)
    judge_moves(scores, moves, logp, entropy, log_total)

    def backward(grad_logp: Tensor, grad_entropy: Tensor | float) -> Tensor:
        grad = np.empty_like(scores)
        by_entropy = torch.as_tensor(grad_entropy, dtype=torch.float32).expand(len(scores)).numpy()
        grade_likelihood(scores, moves, entropy, log_total, grad_logp.numpy(), by_entropy, grad)
        return torch.from_numpy(grad)

    return Likelihood(torch.from_numpy(logp), torch.from_numpy(entropy), backward)


def _several_choices(head: CategoricalActions, outputs: Tensor, chosen: Tensor) -> Likelihood:
    logits = torch.split(outputs, list(head.nvec), dim=-1)
    parts = [_categorical(part, chosen[:, i : i + 1]) for i, part in enumerate(logits)]
    logp = torch.stack([part.logp for part in parts]).sum(0)
    entropy = torch.stack([part.entropy for part in parts]).sum(0)

    def backward(grad_logp: Tensor, grad_entropy: Tensor | float) -> Tensor:
        return torch.cat([part.backward(grad_logp, grad_entropy) for part in parts], dim=-1)

    return Likelihood(logp, entropy, backward)


def _gaussian(outputs: Tensor, actions: Tensor) -> Likelihood:
    mean, log_std = outputs.chunk(2, dim=-1)
    precision = (-log_std).exp()
    scaled = (actions.reshape(mean.shape) - mean) * precision
    squares = scaled.square()
    logp = (-0.5 * squares - log_std - float(HALF_LOG_2PI)).sum(-1)
    entropy = (log_std + (0.5 + float(HALF_LOG_2PI))).sum(-1)

    def backward(grad_logp: Tensor, grad_entropy: Tensor | float) -> Tensor:
        by_logp = grad_logp.unsqueeze(-1)
        by_entropy = grad_entropy.unsqueeze(-1) if isinstance(grad_entropy, Tensor) else grad_entropy
        return torch.cat([by_logp * scaled * precision, by_logp * (squares - 1) + by_entropy], dim=-1)

    return Likelihood(logp, entropy, backward)
