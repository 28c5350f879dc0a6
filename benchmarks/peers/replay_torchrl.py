"""torchrl's prioritized replay, for ``replay.py``."""

from __future__ import annotations

import os
import sys
from typing import Any

# torchrl's compiled trees name a symbol that this torch does not have and that they never call: without
# this they do not load.
sys.setdlopenflags(os.RTLD_LAZY)

import torch  # noqa: E402
from replay_server import ALPHA, BETA, serve  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torchrl.data import LazyTensorStorage, ReplayBuffer  # noqa: E402
from torchrl.data.replay_buffers.samplers import PrioritizedSampler  # noqa: E402


class Buffer:
    def __init__(self, capacity: int) -> None:
        sampler = PrioritizedSampler(capacity, alpha=ALPHA, beta=BETA)
        self._replay = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)

    def add(self, obs: Any, act: Any, rew: Any, done: Any) -> None:
        self._replay.extend(TensorDict({"obs": obs, "act": act, "rew": rew, "done": done}, [len(act)]))

    def cycle(self, batch: int, priorities: Any) -> None:
        _, info = self._replay.sample(batch, return_info=True)
        self._replay.update_priority(info["index"], priorities)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve("torchrl", Buffer, torch.from_numpy)
