"""A numpy mirror of small networks: for a few environments 7 to 9 times faster than torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from offbeat.models.actions import GaussianActions
from offbeat.models.observations import Normalizer
from offbeat.models.spec import Activation, NetworkSpec
from offbeat.types import Array

Floats = NDArray[np.float32]
Layer = tuple[Floats, Floats]


class NumpyActor:
    """Acts with the weights of ``MLPActorCritic`` or ``GRUActorCritic``, by their parameter names."""

    def __init__(self, spec: NetworkSpec) -> None:
        self._spec = spec
        self._normalizer: Normalizer | None = None
        self._body: list[Layer] = []
        self._head: Layer
        self._cell: tuple[Layer, Layer] | None = None
        self._log_std: Floats | None = None

    def load(self, weights: Mapping[str, Array]) -> None:
        """Copy the weights, transposed once so that a step multiplies contiguous matrices."""
        self._normalizer = Normalizer.from_weights(weights)
        if self._spec.kind == "gru":
            self._body = _layers(weights, "encoder")
            self._cell = (_layer(weights, "memory.input"), _layer(weights, "memory.recurrent"))
            self._head = _layer(weights, "actor")
        else:
            *self._body, self._head = _layers(weights, "actor")
        if isinstance(self._spec.actions, GaussianActions):
            self._log_std = np.array(weights["log_std"])

    def outputs(self, obs: Array, memory: Floats) -> tuple[Floats, Floats]:
        """Outputs ``[N, P]`` and the next memory ``[N, H]``."""
        features = self._spec.encode(obs, self._normalizer)
        for layer in self._body:
            features = _activate(_affine(features, layer), self._spec.activation)
        if self._cell is not None:
            features = memory = gru_step(_affine(features, self._cell[0]), memory, self._cell[1])
        outputs = _affine(features, self._head)
        if self._log_std is not None:
            outputs = np.concatenate([outputs, np.broadcast_to(self._log_std, outputs.shape)], axis=-1)
        return outputs, memory


def gru_step(projected: Floats, memory: Floats, recurrent: Layer) -> Floats:
    """One step of a gated recurrent unit, https://arxiv.org/abs/1406.1078 (torch's variant).

    Args:
        projected: ``[N, 3 H]``, the input's part of reset gate, update gate and candidate.
        memory: ``[N, H]``.
        recurrent: weight ``[H, 3 H]`` and bias ``[3 H]`` of the memory's part.
    """
    size = memory.shape[-1]
    carried = _affine(memory, recurrent)
    gates = _sigmoid(projected[:, : 2 * size] + carried[:, : 2 * size])
    candidate: Floats = np.tanh(projected[:, 2 * size :] + gates[:, :size] * carried[:, 2 * size :])
    update = gates[:, size:]
    new_memory: Floats = candidate + update * (memory - candidate)
    return new_memory


def _layers(weights: Mapping[str, Array], name: str) -> list[Layer]:
    layers: list[Layer] = []
    while f"{name}.{len(layers)}.weight" in weights:
        layers.append(_layer(weights, f"{name}.{len(layers)}"))
    return layers


def _layer(weights: Mapping[str, Array], name: str) -> Layer:
    return np.array(weights[f"{name}.weight"].T, order="C"), np.array(weights[f"{name}.bias"])


def _affine(x: Floats, layer: Layer) -> Floats:
    y: Floats = x @ layer[0]
    y += layer[1]
    return y


def _activate(x: Floats, activation: Activation) -> Floats:
    if activation == "tanh":
        return np.tanh(x, out=x)
    return np.maximum(x, np.float32(0), out=x)


def _sigmoid(x: Floats) -> Floats:
    # tanh does not overflow where exp would.
    y: Floats = np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)
    return y
