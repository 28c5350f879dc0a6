"""Values as distributions over whole numbers, after a transform that brings large ones together.

Appendix A of https://arxiv.org/abs/1805.11593 has the transform, appendix F of
https://arxiv.org/abs/1911.08265 the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 0.001


def squash(values: Tensor) -> Tensor:
    """``sign(x) (sqrt(|x| + 1) - 1) + 0.001 x``."""
    return values.sign() * ((values.abs() + 1).sqrt() - 1) + EPSILON * values


def unsquash(squashed: Tensor) -> Tensor:
    """The inverse of `squash`."""
    far = squashed.abs() + 1 + EPSILON
    # (sqrt(1 + 4 e far) - 1) / 2 e, without the difference of two numbers that are almost the same.
    root = 2 * far / ((1 + 4 * EPSILON * far).sqrt() + 1)
    return squashed.sign() * (root.square() - 1)


@dataclass(frozen=True, slots=True)
class Support:
    """The atoms ``-size`` to ``size`` of a distribution over squashed values."""

    size: int

    @property
    def num_atoms(self) -> int:
        """How many atoms there are."""
        return 2 * self.size + 1

    @property
    def limit(self) -> float:
        """The largest value that can be told."""
        return float(unsquash(torch.tensor(float(self.size))))

    def two_hot(self, values: Tensor) -> Tensor:
        """Distributions ``[..., num_atoms]`` with the mean of each value ``[...]``, on its two neighbours."""
        at = squash(values).clamp(-self.size, self.size) + self.size
        low = at.floor().clamp(max=2 * self.size - 1)
        share = (at - low).unsqueeze(-1)
        found = torch.zeros((*values.shape, self.num_atoms), device=values.device)
        index = low.long().unsqueeze(-1)
        found.scatter_(-1, index, 1 - share)
        return found.scatter_(-1, index + 1, share)

    def mean(self, logits: Tensor) -> Tensor:
        """The value ``[...]`` of logits ``[..., num_atoms]``."""
        atoms = torch.arange(-self.size, self.size + 1, dtype=torch.float32, device=logits.device)
        return unsquash((logits.float().softmax(-1) * atoms).sum(-1))

    def loss(self, logits: Tensor, values: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """Cross entropy ``[...]`` of logits ``[..., num_atoms]`` against values ``[...]``.

        ``smoothing`` of each target is spread over all atoms. In float32, whatever the logits are in.
        """
        targets = self.two_hot(values)
        if smoothing:
            targets = targets * (1 - smoothing) + smoothing / self.num_atoms
        return -(targets * functional.log_softmax(logits.float(), -1)).sum(-1)
