"""All parameters of a network in one block of memory: one norm, one Adam step, one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.errors import CheckpointError
from offbeat.types import Array, StateTree


class FlatParameters:
    """Makes a module's parameters and gradients views of two flat tensors.

    ``flat`` ``[P]`` is what an optimizer moves; ``grad`` ``[P]`` fills up as the module is differentiated
    and must be zeroed in place. ``sums`` ``[P + num_extra]`` is ``grad`` with ``extra`` behind it: what the
    ranks of a learner add up in one go.
    """

    def __init__(self, module: nn.Module, *, num_extra: int = 0) -> None:
        self._named = dict(module.named_parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in self._named.values()]).requires_grad_()
        self.sums = torch.zeros(self.flat.numel() + num_extra, dtype=self.flat.dtype, device=self.flat.device)
        self.grad, self.extra = self.sums[: self.flat.numel()], self.sums[self.flat.numel() :]
        self.flat.grad = self.grad
        offset = 0
        for parameter in self._named.values():
            end = offset + parameter.numel()
            parameter.data = self.flat.data[offset:end].view_as(parameter)
            parameter.grad = self.grad[offset:end].view_as(parameter)
            offset = end

    def arrays(self) -> dict[str, Array]:
        """Copies of the parameters by name: parts of one array, which takes one copy."""
        whole, found, offset = _to_numpy(self.flat), dict[str, Array](), 0
        for name, parameter in self._named.items():
            end = offset + parameter.numel()
            found[name] = whole[offset:end].reshape(parameter.shape)
            offset = end
        return found

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Set the parameters by name, in place."""
        if set(arrays) != set(self._named):
            difference = sorted(set(arrays) ^ set(self._named))
            raise CheckpointError(f"parameters of another network: {', '.join(difference)} on one side only")
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(torch.from_numpy(np.array(arrays[name])).view_as(parameter))


class FlatAdam:
    """Adam on a flat tensor, fused into a few in-place operations (https://arxiv.org/abs/1412.6980).

    The same step as ``torch.optim.Adam``. Making that one imports torch's compiler, a CPU-second that a
    short run does not earn back, and its bookkeeping costs more than the arithmetic of a small network.
    """

    def __init__(
        self, parameters: FlatParameters, *, eps: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        self._parameters = parameters
        self._eps = eps
        self._betas = betas
        self._num_steps = 0
        self._mean = torch.zeros_like(parameters.grad)
        self._square = torch.zeros_like(parameters.grad)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move the parameters against their gradient."""
        grad, (beta1, beta2) = self._parameters.grad, self._betas
        self._num_steps += 1
        self._mean.lerp_(grad, 1 - beta1)
        self._square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction = math.sqrt(1 - beta2**self._num_steps)
        scale = self._square.sqrt().div_(correction).add_(self._eps)
        self._parameters.flat.addcdiv_(self._mean, scale, value=-lr / (1 - beta1**self._num_steps))

    def state_dict(self) -> dict[str, StateTree]:
        """Copies of both moments ``[P]`` and the number of steps."""
        moments = {"mean": _to_numpy(self._mean), "square": _to_numpy(self._square)}
        return {"num_steps": self._num_steps, **moments}

    def load_state_dict(self, state: Mapping[str, StateTree]) -> None:
        """Go on from a saved state."""
        self._num_steps = int(state["num_steps"])
        self._mean.copy_(torch.from_numpy(np.array(state["mean"])))
        self._square.copy_(torch.from_numpy(np.array(state["square"])))


def _to_numpy(tensor: Tensor) -> Array:
    # Where there is a GPU, memory that it writes to by itself, several times as fast.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    array: Array = host.copy_(tensor.detach()).numpy()
    return array
