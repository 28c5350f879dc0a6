"""Steps of the replay that are to be searched anew: they travel with the weights. No torch.

A round's wishes are drawn by the learner when it publishes, so that they depend on its version and nothing
else; a ticket then says which part of them is its own. That makes reanalysis as repeatable as collecting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from offbeat.types import Array

PREFIX = "wishes."
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wishes:
    """M steps: what was seen and done before them, ``[M, C, ...]``, and where they stand in the replay."""

    obs: Array
    actions: Array
    first: Ints
    stream: Ints
    number: Ints

    def __len__(self) -> int:
        return len(self.stream)

    def part(self, rows: slice) -> Self:
        """Some of them."""
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to_weights(self, num_parts: int) -> dict[str, Array]:
        """As arrays ``[num_parts, M / num_parts, ...]`` to be published."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        size = len(self) // num_parts
        return {
            f"{PREFIX}{name}": array.reshape(num_parts, size, *array.shape[1:])
            for name, array in arrays.items()
        }


def wishes_of(weights: Mapping[str, Array], turn: int) -> Wishes | None:
    """The part of published wishes whose turn it is; None when there are none yet."""
    if f"{PREFIX}stream" not in weights:
        return None
    part = turn % len(weights[f"{PREFIX}stream"])
    return Wishes(*(np.asarray(weights[f"{PREFIX}{field.name}"][part]) for field in fields(Wishes)))
