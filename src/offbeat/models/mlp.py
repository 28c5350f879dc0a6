"""A dense network with its backward pass written out.

With layers of 64 units the time goes into calls, not into arithmetic: without a graph, and with numpy's
vectorised tanh, an update on the CPU costs half of what it does with autograd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.models.spec import Activation


class MLP(nn.Module):
    """Dense layers ``sizes[0] -> ... -> sizes[-1]``, the last one linear. Never part of an autograd graph.

    Parameters are named ``0.weight`` ``[out, in]``, ``0.bias`` ``[out]``, ``1.weight``, ... Weights are
    orthogonal with gain sqrt(2), the last with ``last_gain``; biases are 0 (https://arxiv.org/abs/2005.12729).
    """

    def __init__(
        self, sizes: Sequence[int], activation: Activation, generator: torch.Generator, *, last_gain: float
    ) -> None:
        super().__init__()
        self._activation = activation
        gains = [math.sqrt(2)] * (len(sizes) - 2) + [last_gain]
        layers = [
            linear(num_in, num_out, gain, generator)
            for num_in, num_out, gain in zip(sizes[:-1], sizes[1:], gains, strict=True)
        ]
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer.requires_grad_(False))
        # Looking a parameter up in a module costs as much as a small tensor operation.
        self._layers = [(layer.weight, layer.bias) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[M, in]`` to ``[M, out]``."""
        return self.trace(x)[-1]

    def trace(self, x: Tensor) -> list[Tensor]:
        """Inputs of every layer, and last the output ``[M, out]``: what ``backward`` needs."""
        trace = [x]
        for weight, bias in self._layers:
            if len(trace) > 1:
                activate_(x, self._activation)
            x = torch.addmm(bias, x, weight.t())
            trace.append(x)
        return trace

    def backward(self, trace: list[Tensor], grad: Tensor) -> None:
        """Add the parameters' gradients to their ``grad``, given that by the output ``[M, out]``."""
        for index in range(len(self._layers) - 1, -1, -1):
            x, (weight, bias) = trace[index], self._layers[index]
            assert weight.grad is not None
            assert bias.grad is not None
            weight.grad.add_(_outer(grad, x))
            bias.grad.add_(grad.sum(0))
            if index:
                grad = _activation_backward(torch.mm(grad, weight), x, self._activation)


def linear(num_in: int, num_out: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """A dense layer with an orthogonal weight and bias 0, made without the global random state."""
    with torch.random.fork_rng(devices=()):
        layer = nn.Linear(num_in, num_out)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def activate_(x: Tensor, activation: Activation) -> None:
    """Apply the activation in place, without gradients."""
    if activation == "relu":
        x.relu_()
    elif x.is_cpu:
        # numpy's tanh is 7 times faster than torch's on the CPU, and the collectors' own.
        view = x.numpy()
        np.tanh(view, out=view)
    else:
        x.tanh_()


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """``grad^T x`` ``[out, in]``, the narrower factor first: the other way round is 5 times slower in MKL."""
    return grad.t() @ x if grad.shape[1] <= x.shape[1] else (x.t() @ grad).t()


def _activation_backward(grad: Tensor, out: Tensor, activation: Activation) -> Tensor:
    if activation == "tanh":
        return torch.ops.aten.tanh_backward(grad, out)  # type: ignore[no-any-return]
    return grad.mul_(out > 0)
