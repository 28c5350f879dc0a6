"""How many samples a gradient needs: its noise against its length, in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DECAY = 0.95
"""How much of the old means an update keeps: single estimates are far off, even below 0."""
LARGEST = 1e9
"""Value where the gradient cannot be told from noise at all."""


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The simple noise scale ``tr(S) / |G|^2``, https://arxiv.org/abs/1812.06162, appendix A.1.

    The mean gradient of B samples has the expected squared length ``|G|^2 + tr(S) / B``, with G the true
    gradient and S the covariance of one sample's: from two values of B both follow, without bias.
    ``gradient`` and ``noise`` are running means of these estimates.
    """

    gradient: float = 0.0
    noise: float = 0.0
    num_updates: int = 0

    @property
    def value(self) -> float | None:
        """Batch size from which on more samples help little, in [0, 1e9]; None before the first update."""
        if not self.num_updates:
            return None
        if self.noise <= 0:
            return 0.0
        return self.noise / max(self.gradient, self.noise / LARGEST)

    def updated(
        self, parts: Sequence[tuple[float, float]], total_count: float, total_squared_norm: float
    ) -> NoiseScale:
        """Take in one more gradient.

        Args:
            parts: of each part of a batch the number of samples and the squared length of its mean gradient.
            total_count: samples of the whole batch.
            total_squared_norm: squared length of the mean gradient of the whole batch.

        Returns:
            The new scale; the same where the parts are no smaller than the whole, or there are none.
        """
        used = [(count, square) for count, square in parts if count > 0]
        if not used or total_count <= 0:
            return self
        # Parts may differ in size: what counts is the mean of 1 / B.
        inverse = sum(1 / count for count, _ in used) / len(used)
        square = sum(square for _, square in used) / len(used)
        apart = inverse - 1 / total_count
        if apart <= 1e-12 * inverse:
            return self
        noise = (square - total_squared_norm) / apart
        return NoiseScale(
            DECAY * self.gradient + (1 - DECAY) * (total_squared_norm - noise / total_count),
            DECAY * self.noise + (1 - DECAY) * noise,
            self.num_updates + 1,
        )

    def state_dict(self) -> dict[str, float]:
        """Plain values for a checkpoint."""
        return {"gradient": self.gradient, "noise": self.noise, "num_updates": self.num_updates}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> NoiseScale:
        """The scale that ``state_dict`` described."""
        return cls(float(state["gradient"]), float(state["noise"]), int(state["num_updates"]))
