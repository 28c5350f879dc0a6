"""A numpy mirror of actors and critics of teams. No torch.

It computes in double precision and rounds what it hands out, as ``recurrent`` does where it judges: the last
digits of products in single precision depend on the machine, and on how many rows are multiplied at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from offbeat.models.numpy_actor import gru_step
from offbeat.models.spec import Activation
from offbeat.models.team_spec import TeamSpec
from offbeat.types import Array

Floats = NDArray[np.float32]
Layer = tuple[Array, Array]
"""Weight ``[in, out]`` and bias ``[out]``."""
NORM_EPS = 1e-5
"""Added to variances that are divided by. Default of torch's LayerNorm."""


class NumpyRecurrent:
    """Acts with the weights of ``Recurrent``, by their parameter names."""

    def __init__(self, spec: TeamSpec) -> None:
        self._spec = spec
        self._before: list[Layer] = []
        self._cell: tuple[Layer, Layer] | None = None
        self._after: list[Layer] = []
        self._head: Layer

    def load(self, weights: Mapping[str, Array], prefix: str) -> None:
        """Copy the weights whose names begin with ``prefix`` and a dot, as a step multiplies them."""
        self._before, self._after = (layers(weights, f"{prefix}.{name}") for name in ("before", "after"))
        if self._spec.feature_norm:
            (weight, bias), norm = self._before[0], f"{prefix}.norm"
            scale, shift = (weights[f"{norm}.{name}"].astype(np.float64) for name in ("weight", "bias"))
            self._before[0] = weight * scale[:, None], bias + shift @ weight
        if self._spec.recurrent:
            cell = f"{prefix}.memory"
            self._cell = layer(weights, f"{cell}.input"), layer(weights, f"{cell}.recurrent")
        self._head = layer(weights, f"{prefix}.head")

    def step(self, inputs: Floats, memory: Floats) -> tuple[Floats, Floats]:
        """Outputs ``[M, P]`` and the next memory ``[M, H]`` for inputs ``[M, F]`` and memory ``[M, H]``."""
        x: Array = inputs.astype(np.float64)
        if self._spec.feature_norm:
            x = normalise(x)
        for dense in self._before:
            x = activated(affine(x, dense), self._spec.activation)
        if self._cell is not None:
            after: Array = gru_step(affine(x, self._cell[0]), memory.astype(np.float64), self._cell[1])
            memory = after.astype(np.float32)
            x = memory.astype(np.float64)
        for dense in self._after:
            x = activated(affine(x, dense), self._spec.activation)
        return affine(x, self._head).astype(np.float32), memory


def normalise(x: Array) -> Array:
    """Rows ``[..., F]`` with mean 0 and variance 1 each: LayerNorm without its weights."""
    size = x.shape[-1]
    centred: Array = x - np.add.reduce(x, axis=-1, keepdims=True) / size
    variance = np.add.reduce(np.square(centred), axis=-1, keepdims=True) / size
    variance += NORM_EPS
    centred /= np.sqrt(variance)
    return centred


def layer(weights: Mapping[str, Array], name: str, dtype: type[np.floating] = np.float64) -> Layer:
    """The dense layer of this name, its weight transposed once so that products read it in order."""
    return np.array(weights[f"{name}.weight"].T, dtype, order="C"), np.array(weights[f"{name}.bias"], dtype)


def layers(weights: Mapping[str, Array], name: str, dtype: type[np.floating] = np.float64) -> list[Layer]:
    """All dense layers ``name.0``, ``name.1``, ..."""
    found: list[Layer] = []
    while f"{name}.{len(found)}.weight" in weights:
        found.append(layer(weights, f"{name}.{len(found)}", dtype))
    return found


def affine(x: Array, dense: Layer) -> Array:
    """``x W + b``, ``[..., out]``."""
    y: Array = x @ dense[0]
    y += dense[1]
    return y


def activated(x: Array, activation: Activation) -> Array:
    """``x`` with the activation applied in place."""
    return np.tanh(x, out=x) if activation == "tanh" else np.maximum(x, 0, out=x)
