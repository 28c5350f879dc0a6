"""Ages of the samples that a learner draws from its replay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.types import Metrics


def age_metrics(ages: NDArray[np.int64], threshold: int) -> Metrics:
    """Mean, largest and 95th of 100 ages, and the share of those above ``threshold``; in versions."""
    return {
        "pace/avg_replayed_age": float(ages.mean()),
        "pace/max_replayed_age": float(ages.max()),
        "pace/p95_replayed_age": float(np.quantile(ages, 0.95, method="inverted_cdf")),
        "pace/stale_replayed_ratio": float(np.mean(ages > threshold)),
    }
