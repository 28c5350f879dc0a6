"""What networks see of an observation: storage type, encoding, normalisation. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.types import Array

Floats = NDArray[np.float32]
CLIP = np.float32(10.0)
"""Normalised observations are clipped to this many deviations, as in OpenAI baselines."""


@dataclass(frozen=True, slots=True)
class ObservationSpec:
    """How one observation is stored, and how many features it becomes.

    ``scale`` is what stored values are multiplied with: 1/255 for bytes.

    Example: ``ObservationSpec(shape=(4,), dtype="float32")`` for CartPole.
    """

    shape: tuple[int, ...]
    dtype: str
    scale: float = 1.0

    @property
    def num_features(self) -> int:
        """Length of the encoded, flattened observation."""
        return int(np.prod(self.shape, dtype=np.int64))


def observation_spec(space: gymnasium.spaces.Box) -> ObservationSpec:
    """Describe the observations of a Box; floats are stored as float32, the rest as it is."""
    if np.issubdtype(space.dtype, np.floating):
        return ObservationSpec(space.shape, "float32")
    is_bytes = space.dtype == np.uint8 and space.high.max(initial=0) > 1
    return ObservationSpec(space.shape, str(space.dtype), scale=1 / 255 if is_bytes else 1.0)


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Shift and scale of the encoded features, both ``[F]`` float32, as they travel with the weights."""

    mean: Floats
    scale: Floats

    MEAN_KEY = "normalizer.mean"
    SCALE_KEY = "normalizer.scale"

    @classmethod
    def from_weights(cls, weights: Mapping[str, Array]) -> Normalizer | None:
        """The normaliser inside published weights; None when observations are not normalised."""
        if cls.MEAN_KEY not in weights:
            return None
        return cls(np.array(weights[cls.MEAN_KEY]), np.array(weights[cls.SCALE_KEY]))

    def to_weights(self) -> dict[str, Array]:
        """The entries ``from_weights`` reads."""
        return {self.MEAN_KEY: self.mean.copy(), self.SCALE_KEY: self.scale.copy()}


def encode(obs: Array, spec: ObservationSpec, normalizer: Normalizer | None = None) -> Floats:
    """Turn stored observations ``[..., *shape]`` into features ``[..., F]`` float32.

    Collectors and learners both call this, so that they see the same numbers to the last bit.
    """
    lead = obs.shape[: obs.ndim - len(spec.shape)]
    features = obs.reshape(*lead, spec.num_features).astype(np.float32, copy=False)
    if spec.scale != 1.0:
        features = features * np.float32(spec.scale)
    if normalizer is not None:
        features = (features - normalizer.mean) * normalizer.scale
        np.clip(features, -CLIP, CLIP, out=features)
    return features
