"""A network with its optimizer, trained by clipped steps of Adam."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from offbeat.errors import DivergedError
from offbeat.models.flat import FlatAdam, FlatParameters
from offbeat.types import Array, StateTree


class Trainee:
    """Owns the parameters of a network, their gradient and Adam's moments; ``name`` is for messages."""

    def __init__(self, name: str, network: nn.Module, *, eps: float) -> None:
        self._name = name
        self.parameters = FlatParameters(network)
        self._optimizer = FlatAdam(self.parameters, eps=eps)

    @property
    def grad(self) -> Tensor:
        """The gradient ``[P]``, which differentiating the network adds to."""
        return self.parameters.grad

    def zero(self) -> None:
        """Forget the gradient."""
        self.parameters.grad.zero_()

    @torch.no_grad()
    def step(self, lr: float, max_norm: float, weight_decay: float | Tensor = 0.0) -> float:
        """Move the parameters against their gradient, shortened to ``max_norm``; return its length.

        Before that they lose ``lr * weight_decay`` of themselves (https://arxiv.org/abs/1711.05101), one
        number for all or one for each, ``[P]``.
        """
        norm = float(torch.linalg.vector_norm(self.grad))
        if not math.isfinite(norm):
            raise DivergedError(
                f"the gradient of the {self._name} has norm {norm:g}; the step was not applied."
                " Lower algorithm.lr or algorithm.max_grad_norm"
            )
        if norm > max_norm:
            self.grad.mul_(max_norm / norm)
        if isinstance(weight_decay, Tensor) or weight_decay:
            self.parameters.flat.mul_(1 - lr * weight_decay)
        self._optimizer.step(lr)
        return norm

    def arrays(self, prefix: str) -> dict[str, Array]:
        """Copies of the parameters, their names behind ``prefix`` and a dot."""
        return {f"{prefix}.{name}": array for name, array in self.parameters.arrays().items()}

    def state_dict(self) -> StateTree:
        """Parameters and optimizer."""
        return {"parameters": self.parameters.arrays(), "adam": self._optimizer.state_dict()}

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        self.parameters.load(state["parameters"])
        self._optimizer.load_state_dict(state["adam"])
