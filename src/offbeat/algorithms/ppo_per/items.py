"""Replay segments: one environment's steps of a collector's segment, as records of fixed shape. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.ppo.rounds import Round
from offbeat.types import Array, ArraySpec, Segment

Ints = NDArray[np.int64]
_NAMES = tuple(field.name for field in fields(Round) if field.name != "discounted_returns")
_NO_STEPS = ("memory",)


def item_spec(segment_spec: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    """Arrays of one replay segment, from those of a collector's segment of N environments."""
    return {name: _without_envs(name, spec) for name, spec in segment_spec.items() if name in _NAMES}


def to_items(data: Round) -> dict[str, Array]:
    """The environments of a round as items ``[B, T, ...]``."""
    arrays = {name: getattr(data, name) for name in _NAMES}
    return {name: _swapped(name, array) for name, array in arrays.items() if array is not None}


def from_items(items: Mapping[str, Array]) -> Round:
    """Items ``[B, T, ...]`` side by side as a round."""
    return Round(**{name: _swapped(name, array) for name, array in items.items()})


def item_versions(segments: Sequence[Segment]) -> Ints:
    """The oldest version behind each environment's steps ``[B]``."""
    counts = [segment.data["rewards"].shape[1] for segment in segments]
    return np.repeat([segment.oldest_version for segment in segments], counts).astype(np.int64)


def _without_envs(name: str, spec: ArraySpec) -> ArraySpec:
    axis = 0 if name in _NO_STEPS else 1
    return ArraySpec((*spec.shape[:axis], *spec.shape[axis + 1 :]), spec.dtype)


def _swapped(name: str, array: Array) -> Array:
    return array if name in _NO_STEPS else array.swapaxes(0, 1)
