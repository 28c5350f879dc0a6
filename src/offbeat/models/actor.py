"""Acting: weights and observations in, outputs of the action distribution out. No torch unless needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.models.numpy_actor import NumpyActor
from offbeat.models.spec import NetworkSpec
from offbeat.types import Array

Floats = NDArray[np.float32]


class Actor(Protocol):
    """A policy that acts and never learns."""

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights (copied: the arrays may be reused by the caller)."""
        ...

    def outputs(self, obs: Array, memory: Floats) -> tuple[Floats, Floats]:
        """Outputs ``[N, P]`` for observations ``[N, ...]``, and the memory ``[N, H]`` after them."""
        ...


def make_actor(spec: NetworkSpec, *, num_threads: int = 1) -> Actor:
    """The cheapest actor for a network; torch with ``num_threads`` threads where there is none but it."""
    if spec.kind == "lines":
        from offbeat.models.lines_actor import LinesActor

        return LinesActor()
    if spec.kind in ("mlp", "gru"):
        return NumpyActor(spec)
    from offbeat.models.torch_actor import TorchActor

    return TorchActor(spec, num_threads=num_threads)


def initial_memory(spec: NetworkSpec, num_envs: int) -> Floats:
    """Memory at the start of an episode, ``[N, H]`` zeros; H = 0 for networks without memory."""
    return np.zeros((num_envs, spec.memory_size), np.float32)
