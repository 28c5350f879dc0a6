"""How old samples of a replay are, told in the words of all runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.types import Metrics


def age_metrics(ages: NDArray[np.int64], threshold: int) -> Metrics:
    """Mean, largest and 95th of 100 ages, and the share of those above ``threshold``; in versions."""
    return {
        "pace/avg_sample_age": float(ages.mean()),
        "pace/max_sample_age": float(ages.max()),
        "pace/p95_sample_age": float(np.quantile(ages, 0.95, method="inverted_cdf")),
        "pace/stale_samples_ratio": float(np.mean(ages > threshold)),
    }
