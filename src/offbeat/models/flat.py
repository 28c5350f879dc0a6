"""All parameters of a network in one block of memory: one norm, one Adam step, one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.errors import CheckpointError
from offbeat.types import Array


class FlatParameters:
    """Makes a module's parameters and gradients views of two flat tensors.

    ``flat`` ``[P]`` goes to the optimizer; its ``grad`` ``[P]`` fills up as the module is differentiated
    and must be zeroed in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._named = dict(module.named_parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in self._named.values()]).requires_grad_()
        self.flat.grad = self.grad = torch.zeros_like(self.flat)
        offset = 0
        for parameter in self._named.values():
            end = offset + parameter.numel()
            parameter.data = self.flat.data[offset:end].view_as(parameter)
            parameter.grad = self.grad[offset:end].view_as(parameter)
            offset = end

    def arrays(self) -> dict[str, Array]:
        """Copies of the parameters by name."""
        return {name: _to_numpy(p) for name, p in self._named.items()}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Set the parameters by name, in place."""
        if set(arrays) != set(self._named):
            difference = sorted(set(arrays) ^ set(self._named))
            raise CheckpointError(f"parameters of another network: {', '.join(difference)} on one side only")
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(torch.from_numpy(np.array(arrays[name])).view_as(parameter))

    def adam_state(self, optimizer: torch.optim.Adam) -> dict[str, Array]:
        """Copies of an optimizer's moments ``[P]`` and step count."""
        state = optimizer.state.get(self.flat) or self._fresh_adam_state()
        return {name: _to_numpy(value) for name, value in state.items()}

    def load_adam_state(self, optimizer: torch.optim.Adam, state: Mapping[str, Array]) -> None:
        """Set an optimizer's moments and step count."""
        fresh = self._fresh_adam_state()
        optimizer.state[self.flat] = {
            name: torch.from_numpy(np.array(state[name])).to(value).reshape(value.shape)
            for name, value in fresh.items()
        }

    def _fresh_adam_state(self) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(self.flat) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=self.flat.device), **moments}


def _to_numpy(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().numpy()
    return array.copy()
