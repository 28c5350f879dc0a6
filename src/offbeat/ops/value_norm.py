"""Values in units of their running deviation, in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.types import Array

Floats = NDArray[np.float32]
BETA = 0.99999
"""How much of the old moments an update keeps. Default of MAPPO's code."""
MIN_VARIANCE = 1e-2
"""Values that hardly vary are not blown up. Default of MAPPO's code."""


@dataclass(frozen=True, slots=True)
class ValueNorm:
    """Running mean and mean square of value targets, https://arxiv.org/abs/2103.01955 (and 1602.07714).

    ``weight`` is what all updates so far weigh together; both are divided by it, or they would begin near 0.
    Before the first update nothing is changed. Example: ``norm = norm.updated(targets)``.
    """

    mean: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def updated(self, values: Array) -> ValueNorm:
        """The norm after a round with these value targets ``[M]``; without any it stays as it is."""
        if not values.size:
            return self
        wide = values.astype(np.float64)
        return ValueNorm(
            BETA * self.mean + (1 - BETA) * float(wide.mean()),
            BETA * self.square + (1 - BETA) * float(np.square(wide).mean()),
            BETA * self.weight + (1 - BETA),
        )

    def normalise(self, values: Array) -> Floats:
        """From the units of rewards ``[...]`` to those the critic is trained in, float32."""
        mean, deviation = self._moments()
        normalised: Floats = ((values - mean) / deviation).astype(np.float32)
        return normalised

    def denormalise(self, values: Array) -> Floats:
        """From what the critic gives ``[...]`` to the units of rewards, float32."""
        mean, deviation = self._moments()
        denormalised: Floats = (values * deviation + mean).astype(np.float32)
        return denormalised

    def state_dict(self) -> dict[str, float]:
        """Plain values for a checkpoint."""
        return {"mean": self.mean, "square": self.square, "weight": self.weight}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ValueNorm:
        """The norm that ``state_dict`` described."""
        return cls(float(state["mean"]), float(state["square"]), float(state["weight"]))

    def _moments(self) -> tuple[np.float64, np.float64]:
        """Mean and deviation; of double precision, so that large values lose nothing on the way."""
        if not self.weight:
            return np.float64(0), np.float64(1)
        mean = self.mean / self.weight
        variance = max(self.square / self.weight - mean**2, MIN_VARIANCE)
        return np.float64(mean), np.float64(variance**0.5)
