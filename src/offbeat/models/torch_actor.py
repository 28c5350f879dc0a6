"""Acting with a torch network, for those numpy cannot mirror cheaply."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.models.networks import CRITIC_PREFIX, FeedForward, make_network
from offbeat.models.observations import Normalizer
from offbeat.models.spec import NetworkSpec
from offbeat.types import Array

Floats = NDArray[np.float32]


class TorchActor:
    """Acts with the weights of a network without memory on the CPU."""

    def __init__(self, spec: NetworkSpec, *, num_threads: int = 1) -> None:
        # More threads than cores spin and starve the other workers: 5 to 20 times slower.
        torch.set_num_threads(num_threads)
        self._spec = spec
        self._normalizer: Normalizer | None = None
        network = make_network(spec, torch.Generator())
        assert isinstance(network, FeedForward)
        self._network = network
        self._actor_parameters = {
            name: p for name, p in self._network.named_parameters() if not name.startswith(CRITIC_PREFIX)
        }

    def load(self, weights: Mapping[str, Array]) -> None:
        """Copy the weights into the network."""
        self._normalizer = Normalizer.from_weights(weights)
        with torch.no_grad():
            for name, parameter in self._actor_parameters.items():
                parameter.copy_(torch.from_numpy(np.array(weights[name])))

    def outputs(self, obs: Array, memory: Floats) -> tuple[Floats, Floats]:
        """Outputs ``[N, P]``; the memory is empty and comes back as it was."""
        encoded = np.ascontiguousarray(self._spec.encode(obs, self._normalizer))
        with torch.inference_mode():
            outputs: Floats = self._network.outputs(torch.from_numpy(encoded)).numpy()
        return outputs, memory
