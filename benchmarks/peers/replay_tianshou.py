"""tianshou's prioritized replay, for ``replay.py``. It takes items one by one; next observations are off."""

from __future__ import annotations

from typing import Any

from replay_server import ALPHA, BETA, serve
from tianshou.data import Batch, PrioritizedReplayBuffer


class Buffer:
    def __init__(self, capacity: int) -> None:
        self._replay = PrioritizedReplayBuffer(capacity, alpha=ALPHA, beta=BETA)

    def add(self, obs: Any, act: Any, rew: Any, done: Any) -> None:
        for o, a, r, d in zip(obs, act, rew, done, strict=True):
            self._replay.add(Batch(obs=o, act=a, rew=r, terminated=d, truncated=False))

    def cycle(self, batch: int, priorities: Any) -> None:
        _, index = self._replay.sample(batch)
        self._replay.update_weight(index, priorities)


if __name__ == "__main__":
    serve("tianshou", Buffer)
