"""cpprb's prioritized replay, for ``replay.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
from cpprb import PrioritizedReplayBuffer
from replay_server import ALPHA, BETA, OBS_SIZE, serve

FIELDS = {
    "obs": {"shape": OBS_SIZE, "dtype": np.float32},
    "act": {"dtype": np.int64},
    "rew": {"dtype": np.float32},
    "done": {"dtype": np.bool_},
}


class Buffer:
    def __init__(self, capacity: int) -> None:
        self._replay = PrioritizedReplayBuffer(capacity, FIELDS, alpha=ALPHA)

    def add(self, obs: Any, act: Any, rew: Any, done: Any) -> None:
        self._replay.add(obs=obs, act=act, rew=rew, done=done)

    def cycle(self, batch: int, priorities: Any) -> None:
        sample = self._replay.sample(batch, beta=BETA)
        self._replay.update_priorities(sample["indexes"], priorities)


if __name__ == "__main__":
    serve("cpprb", Buffer)
