"""A dense network with a memory, its backward pass through time written out.

There is no graph: only the memory itself goes step by step, all other products take all steps at once.

In inference mode, where there is no way back, it computes in double precision, as ``recurrent_actor`` does:
what a learner finds about a round before it trains on it is then what the collector found, to the last digit
of a float, whatever machine or device both run on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from offbeat.models.mlp import activate_, linear
from offbeat.models.recurrent_actor import NORM_EPS
from offbeat.models.spec import Activation
from offbeat.models.team_spec import TeamSpec

HIDDEN_GAIN = math.sqrt(2)


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """What a memory did in T steps of M columns.

    ``inputs`` ``[T M, K]``; ``gates`` ``[T, M, 3 H]``: candidate, reset, update; ``moved`` ``[T, M, 3 H]``,
    the memory's part of reset, update and candidate; ``befores`` and ``afters`` ``[T, M, H]``, the memory
    before and after each step; ``resets`` ``[T, M, 1]``, and ``is_reset`` ``[T]``: whether a step has any.
    """

    inputs: Tensor
    gates: Tensor
    moved: Tensor
    befores: Tensor
    afters: Tensor
    resets: Tensor
    is_reset: list[bool]


@dataclass(frozen=True, slots=True)
class Trace:
    """Outputs ``[T, M, P]``, memories ``[T, M, H]`` after each step, and what ``Recurrent.backward`` needs.

    ``before`` and ``after`` hold the inputs of the dense layers, and last what they made, ``[T M, ...]``.
    """

    outputs: Tensor
    memories: Tensor
    before: list[Tensor]
    memory: MemoryTrace | None
    after: list[Tensor]


class Recurrent(nn.Module):
    """Input norm, dense layers, gated recurrent unit, dense layers, linear head. Never part of a graph.

    Parameters are those of ``norm``, ``before.0``, ..., ``memory.input``, ``memory.recurrent``, ``after.0``,
    ... and ``head``; ``norm`` and ``memory`` only where the spec has them. Weights are orthogonal, the head's
    with ``last_gain``; biases are 0.
    """

    def __init__(
        self, num_in: int, num_out: int, spec: TeamSpec, generator: torch.Generator, *, last_gain: float
    ) -> None:
        super().__init__()
        self._activation: Activation = spec.activation
        sizes = [spec.hidden] * spec.layers
        self.norm = nn.LayerNorm(num_in) if spec.feature_norm else None
        self._before = _dense([num_in, *sizes], generator)
        self.before = nn.ModuleList(self._before)
        self.memory = Memory(spec.hidden, spec.hidden, generator) if spec.recurrent else None
        self._after = _dense([spec.hidden, *sizes], generator)
        self.after = nn.ModuleList(self._after)
        self.head = linear(spec.hidden, num_out, last_gain, generator)
        self.requires_grad_(False)

    def forward(self, inputs: Tensor, memory: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[T, M, P]`` and memories after each step ``[T, M, H]``; see ``trace``."""
        trace = self.trace(inputs, memory, starts)
        return trace.outputs, trace.memories

    def trace(self, inputs: Tensor, memory: Tensor, resets: Tensor) -> Trace:
        """Go through T steps of M columns.

        Args:
            inputs: ``[T, M, F]``.
            memory: ``[M, H]``, before the first step; H is 0 for a network without memory.
            resets: ``[T, M]`` bool, the memory is set to zeros before the step.
        """
        lead, num_rows = inputs.shape[:2], inputs.shape[:2].numel()
        x = inputs.reshape(num_rows, inputs.shape[2])
        if torch.is_inference_mode_enabled():
            x = x.double()
        if self.norm is not None:
            x = nn.functional.layer_norm(x, x.shape[1:], eps=NORM_EPS)
        before = self._trace_dense(x, self._before, self.norm)
        cell, x, memories = None, before[-1], memory.new_zeros((*lead, 0))
        if self.memory is not None:
            cell = self.memory.trace(x, memory, resets)
            memories = cell.afters
            x = memories.reshape(num_rows, memories.shape[2])
        after = self._trace_dense(x, self._after, None)
        outputs = _affine(after[-1], self.head.weight, self.head.bias).view(*lead, self.head.out_features)
        return Trace(outputs.to(inputs.dtype), memories.to(inputs.dtype), before, cell, after)

    def backward(self, trace: Trace, grad_outputs: Tensor) -> None:
        """Add the parameters' gradients to their ``grad``, given that by the outputs ``[T, M, P]``."""
        assert trace.outputs.dtype == trace.after[-1].dtype, "traced in inference mode: there is no way back"
        grad = grad_outputs.reshape(len(trace.after[-1]), self.head.out_features)
        _add_gradient(self.head, grad, trace.after[-1])
        # A product over a single term is a slow way to multiply.
        grad = grad * self.head.weight if grad.shape[1] == 1 else torch.mm(grad, self.head.weight)
        grad = self._dense_backward(grad, trace.after, self._after, 0)
        if self.memory is not None:
            assert trace.memory is not None
            grad = self.memory.backward(trace.memory, grad)
        grad = self._dense_backward(grad, trace.before, self._before, 1)
        grad = _activation_backward(grad, trace.before[1], self._activation)
        self._first_backward(grad, trace.before[0])

    def _trace_dense(self, x: Tensor, layers: list[nn.Linear], norm: nn.LayerNorm | None) -> list[Tensor]:
        trace = [x]
        for layer in layers:
            weight, bias = layer.weight.to(x.dtype), layer.bias.to(x.dtype)
            if norm is not None and len(trace) == 1:
                # Scale and shift of the norm become part of the first layer.
                weight, bias = weight * norm.weight, bias + weight @ norm.bias.to(x.dtype)
            x = _affine(x, weight, bias)
            activate_(x, self._activation)
            trace.append(x)
        return trace

    def _dense_backward(
        self, grad: Tensor, trace: list[Tensor], layers: list[nn.Linear], until: int
    ) -> Tensor:
        """From the gradient by what the last layer made to that by the input of layer ``until``."""
        for index in range(len(layers) - 1, until - 1, -1):
            layer = layers[index]
            grad = _activation_backward(grad, trace[index + 1], self._activation)
            _add_gradient(layer, grad, trace[index])
            grad = torch.mm(grad, layer.weight)
        return grad

    def _first_backward(self, grad: Tensor, x: Tensor) -> None:
        layer = self._before[0]
        if self.norm is None:
            _add_gradient(layer, grad, x)
            return
        # y = W (g x + c) + b: all gradients follow from two sums over rows, of dy x and of dy.
        weight, scale, shift = layer.weight, self.norm.weight, self.norm.bias
        by_product, by_bias = torch.mm(x.t(), grad).t(), grad.sum(0)
        _grad_of(layer.bias).add_(by_bias)
        _grad_of(weight).add_(by_product * scale).addr_(by_bias, shift)
        _grad_of(scale).add_((weight * by_product).sum(0))
        _grad_of(shift).add_(by_bias @ weight)


class Memory(nn.Module):
    """The gated recurrent unit of ``numpy_actor.gru_step``; weights ``[3 H, ...]``: reset, update, new."""

    def __init__(self, num_in: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self._size = size
        self.input = linear(num_in, 3 * size, 1.0, generator)
        self.recurrent = linear(size, 3 * size, 1.0, generator)

    def trace(self, x: Tensor, memory: Tensor, resets: Tensor) -> MemoryTrace:
        """Go through T steps of inputs ``[T M, K]``; see ``Recurrent.trace``."""
        (num_steps, num_columns), size = resets.shape, self._size
        weight, bias = (self._halved(part).roll(size, 0) for part in (self.input.weight, self.input.bias))
        gates = _affine(x, weight, bias).view(num_steps, num_columns, 3 * size)
        recurrent = self._halved(self.recurrent.weight).to(x.dtype).t()
        offset = self._halved(self.recurrent.bias).to(x.dtype)
        resets = resets.unsqueeze(-1)
        is_reset: list[bool] = resets.flatten(1).any(1).tolist()
        states = x.new_empty((num_steps + 1, num_columns, size))
        states[0] = memory.masked_fill(resets[0], 0)
        has_breaks = any(is_reset[1:])
        befores = torch.empty_like(states[1:]) if has_breaks else states[:-1]
        moved = torch.empty_like(gates)
        for t in range(num_steps):
            before, own, after = befores[t], moved[t], states[t + 1]
            if has_breaks:
                before.copy_(states[t])
                if is_reset[t]:
                    before.masked_fill_(resets[t], 0)
            torch.addmm(offset, before, recurrent, out=own)
            candidate, both = gates[t, :, :size], gates[t, :, size:]
            both.add_(own[:, : 2 * size])
            activate_(both, "tanh")
            both.mul_(0.5).add_(0.5)
            candidate.add_(both[:, :size] * own[:, 2 * size :])
            activate_(candidate, "tanh")
            torch.sub(before, candidate, out=after).mul_(both[:, size:]).add_(candidate)
            if after.dtype != memory.dtype:
                after.copy_(after.to(memory.dtype))  # collectors keep it no more precisely
        return MemoryTrace(x, gates, moved, befores, states[1:], resets, is_reset)

    def backward(self, trace: MemoryTrace, grad: Tensor) -> Tensor:
        """Gradient by the inputs ``[T M, K]``; ``grad`` ``[T M, H]``, that by the memories, is used up."""
        num_steps, num_columns, size = trace.afters.shape
        grad = grad.view(num_steps, num_columns, size)
        # Gradients by what goes into candidate, reset and update, and by the memory's part of the candidate:
        # the first three are those of the input's weights, the last three those of the memory's.
        by_gates = grad.new_empty((num_steps, num_columns, 4 * size))
        for t in range(num_steps - 1, -1, -1):
            candidate, reset, update = trace.gates[t].chunk(3, dim=-1)
            by_candidate, by_reset, by_update, by_moved = by_gates[t].chunk(4, dim=-1)
            kept = grad[t] * update
            torch.sub(grad[t], kept, out=by_candidate)
            _tanh_backward_(by_candidate, candidate)
            torch.mul(by_candidate, reset, out=by_moved)
            torch.mul(by_candidate, trace.moved[t, :, 2 * size :], out=by_reset)
            _sigmoid_backward_(by_reset, reset)
            torch.sub(trace.befores[t], candidate, out=by_update).mul_(grad[t])
            _sigmoid_backward_(by_update, update)
            if t:
                kept.addmm_(by_gates[t, :, size:], self.recurrent.weight)
                if trace.is_reset[t]:
                    kept.masked_fill_(trace.resets[t], 0)
                grad[t - 1].add_(kept)
        rows = by_gates.view(num_steps * num_columns, 4 * size)
        return self._weights_backward(trace, rows)

    def _weights_backward(self, trace: MemoryTrace, by_gates: Tensor) -> Tensor:
        size, sums = self._size, by_gates.sum(0)
        by_input, by_memory = by_gates[:, : 3 * size], by_gates[:, size:]
        befores = trace.befores.reshape(len(by_gates), size)
        _grad_of(self.recurrent.weight).addmm_(by_memory.t(), befores)
        _grad_of(self.recurrent.bias).add_(sums[size:])
        _grad_of(self.input.weight).add_(torch.mm(by_input.t(), trace.inputs).roll(-size, 0))
        _grad_of(self.input.bias).add_(sums[: 3 * size].roll(-size, 0))
        return torch.mm(by_input, self.input.weight.roll(size, 0))

    def _halved(self, parameter: Tensor) -> Tensor:
        """A parameter, the rows of both gates halved, as in ``sigmoid(x) = (1 + tanh(x / 2)) / 2``."""
        halved = parameter.clone()
        halved[: 2 * self._size] *= 0.5
        return halved


def _dense(sizes: Sequence[int], generator: torch.Generator) -> list[nn.Linear]:
    return [linear(*pair, HIDDEN_GAIN, generator) for pair in pairwise(sizes)]


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias.to(x.dtype), x, weight.to(x.dtype).t())


def _grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _add_gradient(layer: nn.Linear, grad: Tensor, x: Tensor) -> None:
    """Add to a layer's gradients, given that by its output ``[M, out]`` and its input ``[M, in]``."""
    by_weight = _grad_of(layer.weight)
    # The narrower factor first: the other way round is slow in MKL.
    if grad.shape[1] <= x.shape[1]:
        by_weight.addmm_(grad.t(), x)
    else:
        by_weight.t().addmm_(x.t(), grad)
    _grad_of(layer.bias).add_(grad.sum(0))


def _activation_backward(grad: Tensor, out: Tensor, activation: Activation) -> Tensor:
    if activation == "tanh":
        return torch.ops.aten.tanh_backward(grad, out)  # type: ignore[no-any-return]
    return torch.ops.aten.threshold_backward(grad, out, 0)  # type: ignore[no-any-return]


def _tanh_backward_(grad: Tensor, out: Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(grad, out, grad_input=grad)


def _sigmoid_backward_(grad: Tensor, out: Tensor) -> None:
    torch.ops.aten.sigmoid_backward.grad_input(grad, out, grad_input=grad)
