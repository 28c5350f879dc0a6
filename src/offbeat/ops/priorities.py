"""How much a segment is worth replaying, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.types import Array

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


def segment_priority(deltas: Array, valid: Bools, eta: float = 0.9) -> Floats:
    """Priority of each segment, ``eta * max |delta| + (1 - eta) * mean |delta|`` over its valid steps.

    The mixture of R2D2 (Kapturowski et al. 2019): the mean alone would hide one large error in a long
    segment. A segment without a valid step has priority 0.

    Args:
        deltas: ``[T, B]``, errors of each step; those of steps that are not valid do not matter.
        valid: ``[T, B]``, which steps count.
        eta: share of the largest error, from 0 to 1.

    Returns:
        ``[B]``, float32.
    """
    if not 0.0 <= eta <= 1.0:
        raise ValueError(f"eta is the share of the largest error: give 0 to 1, not {eta}")
    sizes = np.where(valid, np.abs(deltas), 0).astype(np.float64)
    counts = np.maximum(np.count_nonzero(valid, axis=0), 1)
    mixed = eta * sizes.max(axis=0, initial=0) + (1 - eta) * sizes.sum(axis=0) / counts
    return np.asarray(mixed, np.float32)
