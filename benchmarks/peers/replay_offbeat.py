"""offbeat's prioritized replay, for ``replay.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
from replay_server import ALPHA, BETA, OBS_SIZE, serve

from offbeat.replay import PrioritizedReplay
from offbeat.types import ArraySpec

SPEC = {
    "obs": ArraySpec((OBS_SIZE,), "float32"),
    "act": ArraySpec((), "int64"),
    "rew": ArraySpec((), "float32"),
    "done": ArraySpec((), "bool"),
}


class Buffer:
    def __init__(self, capacity: int) -> None:
        self._replay = PrioritizedReplay(SPEC, capacity, alpha=ALPHA)
        self._rng = np.random.default_rng(0)

    def add(self, obs: Any, act: Any, rew: Any, done: Any) -> None:
        self._replay.add({"obs": obs, "act": act, "rew": rew, "done": done}, versions=0)

    def cycle(self, batch: int, priorities: Any) -> None:
        sample = self._replay.sample(self._rng, batch, beta=BETA)
        self._replay.update(sample.handles, priorities)


if __name__ == "__main__":
    serve("offbeat", Buffer)
