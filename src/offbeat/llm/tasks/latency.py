"""Simulated times of tools and rewards, for tasks that measure what waiting costs."""

from __future__ import annotations

import asyncio
import math

import numpy as np

from offbeat.errors import ConfigError
from offbeat.seeding import derive_seed


class Latency:
    """Log-normal times with a median of ``median_s``, at most ``limit_s``; 0 takes no time.

    The time depends on the seed of a response and the number of its turn alone.
    """

    def __init__(self, median_s: float, sigma: float, limit_s: float) -> None:
        if not (0.0 <= median_s < math.inf and 0.0 <= sigma < math.inf and 0.0 <= limit_s < math.inf):
            raise ConfigError("env.kwargs: latency_s, latency_sigma and latency_limit_s must be 0 or more")
        self._median_s, self._sigma, self._limit_s = median_s, sigma, limit_s

    def seconds(self, seed: int, turn: int) -> float:
        """Return the time of an answer."""
        if not self._median_s:
            return 0.0
        rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "latency", turn)))
        return float(min(self._limit_s, self._median_s * math.exp(self._sigma * rng.standard_normal())))

    async def wait(self, seed: int, turn: int) -> None:
        """Let the time of an answer pass."""
        if seconds := self.seconds(seed, turn):
            await asyncio.sleep(seconds)
