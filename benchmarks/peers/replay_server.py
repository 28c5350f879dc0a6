"""Runs one replay buffer and times it on request, so that several can take turns in one benchmark.

Reads a JSON object per line and answers each with one: ``{"capacity": n, "limit_s": s}`` makes a buffer and
fills it for at most that long; ``{"batch": b, "seconds": s}`` samples and updates for about that long. All
seconds are those of the processor. Ends when there is nothing left to read. Used by the scripts beside it,
each with its own library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

import numpy as np

ALPHA, BETA = 0.6, 0.4
OBS_SIZE, BLOCK, NUM_PRIORITIES, NUM_TIMED_INSERTS = 64, 1000, 64, 10


class Buffer(Protocol):
    """A library's buffer. Items have an observation, an action, a reward and whether they end an episode."""

    def add(self, obs: Any, act: Any, rew: Any, done: Any) -> None:
        """Insert a block of items."""

    def cycle(self, batch: int, priorities: Any) -> None:
        """Sample items with their weights, then give them these priorities."""


class Bench:
    """The buffer at hand."""

    def __init__(self, name: str, make: Callable[[int], Buffer], convert: Callable[[Any], Any]) -> None:
        self._version, self._make, self._convert = metadata.version(name), make, convert
        self._rng = np.random.default_rng(0)
        self._priorities: dict[int, list[Any]] = {}
        self._buffer: Buffer

    def fill(self, capacity: int, limit_s: float) -> dict[str, Any]:
        """Make a buffer and fill it block by block; the rate is that of some blocks more, over the oldest."""
        self._buffer = self._make(BLOCK)  # to compile what is compiled, and to free the one before
        self._buffer.add(*self._items(BLOCK))
        self.time(BLOCK, 0.0)
        self._buffer = self._make(capacity)
        filled, stop_s = 0, time.process_time() + limit_s
        while filled < capacity and time.process_time() < stop_s:
            size = min(BLOCK, capacity - filled)
            self._buffer.add(*self._items(size))
            filled += size
        blocks = [self._items(BLOCK) for _ in range(NUM_TIMED_INSERTS)]
        started_s = time.process_time()
        for block in blocks:
            self._buffer.add(*block)
        spent_s = time.process_time() - started_s
        rate = NUM_TIMED_INSERTS * BLOCK / spent_s
        return {"filled": filled, "inserted_per_s": rate, "version": self._version}

    def _items(self, size: int) -> list[Any]:
        obs = self._rng.random((size, OBS_SIZE), np.float32)
        act = self._rng.integers(0, 18, size)
        rew = self._rng.random(size, np.float32)
        return [self._convert(array) for array in (obs, act, rew, rew < 0.01)]

    def time(self, batch: int, seconds: float) -> dict[str, float]:
        """Run cycles of sample + update; how many, and the processor seconds they took."""
        if batch not in self._priorities:
            drawn = self._rng.exponential(size=(NUM_PRIORITIES, batch)).astype(np.float32)
            self._priorities[batch] = [self._convert(row) for row in drawn]
        priorities, cycle, count = self._priorities[batch], self._buffer.cycle, 0
        started_s = time.process_time()
        while True:
            for row in priorities[:16]:
                cycle(batch, row)
            count += 16
            spent_s = time.process_time() - started_s
            if spent_s >= seconds:
                return {"cycles": count, "seconds": spent_s}


def serve(
    name: str, make: Callable[[int], Buffer], convert: Callable[[Any], Any] = lambda array: array
) -> None:
    """Answer requests until there are no more.

    ``name`` is that of the library's package; ``convert`` turns arrays into what it takes.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    bench = Bench(name, make, convert)
    for line in sys.stdin:
        request = json.loads(line)
        if "capacity" in request:
            answer = bench.fill(request["capacity"], request["limit_s"])
        else:
            answer = bench.time(request["batch"], request["seconds"])
        print(json.dumps(answer), file=answers, flush=True)
