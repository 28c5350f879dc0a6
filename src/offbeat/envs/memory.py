"""A small task that no policy solves without memory: a cue at the start decides what is right at the end."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import registry
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

ENV_ID = "offbeat/Memory-v0"
Floats = NDArray[np.float32]
Info = dict[str, Any]


def register_memory() -> None:
    """Make the task known to Gymnasium as ``offbeat/Memory-v0``; a second call changes nothing."""
    if ENV_ID not in registry:
        gymnasium.register(
            ENV_ID,
            entry_point="offbeat.envs.memory:MemoryEnv",
            vector_entry_point="offbeat.envs.memory:MemoryVectorEnv",
            reward_threshold=0.95,
        )


class MemoryVectorEnv(VectorEnv[Floats, NDArray[np.int64], NDArray[Any]]):
    """The memory task, N at a time, each starting again at the step after its end.

    An episode has ``length + 2`` steps. The first observation shows a cue, one of ``num_cues``; ``length``
    observations of noise follow; the last asks for the cue. Only the action at the last counts: reward 1 when
    it names the cue, else 0. Whoever forgets the cue gets ``1 / num_cues`` on average.

    An observation is ``[num_cues + 2]`` float32: the cue one-hot, or noise of deviation ``noise`` in its
    place; 1 at the start; 1 when asked.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, length: int = 6, num_cues: int = 2, noise: float = 0.5) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (num_cues + 2,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(num_cues)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._last_step = length + 1
        self._num_cues = num_cues
        self._noise = noise
        self._cues = np.zeros(num_envs, np.int64)
        self._steps = np.zeros(num_envs, np.int64)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Floats, Info]:
        """Start an episode everywhere."""
        super().reset(seed=seed)
        self._steps = np.zeros(self.num_envs, np.int64)
        self._cues = self.np_random.integers(self._num_cues, size=self.num_envs)
        return self._observe(), {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Floats, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]:
        """Go one step on; where an episode has ended, start the next."""
        is_over = self._steps > self._last_step
        is_asked = self._steps == self._last_step
        rewards = (is_asked & (actions == self._cues)).astype(np.float64)
        self._steps = np.where(is_over, 0, self._steps + 1)
        if is_over.any():
            self._cues[is_over] = self.np_random.integers(self._num_cues, size=int(is_over.sum()))
        return self._observe(), rewards, is_asked, np.zeros(self.num_envs, np.bool_), {}

    def _observe(self) -> Floats:
        obs = np.zeros((self.num_envs, self._num_cues + 2), np.float32)
        noise = self.np_random.standard_normal((self.num_envs, self._num_cues), np.float32)
        obs[:, : self._num_cues] = noise * np.float32(self._noise)
        is_start = self._steps == 0
        obs[is_start, : self._num_cues] = np.eye(self._num_cues, dtype=np.float32)[self._cues[is_start]]
        obs[:, -2] = is_start
        obs[:, -1] = self._steps == self._last_step
        return obs


class MemoryEnv(gymnasium.Env[Floats, np.int64]):
    """The memory task, one at a time; see `MemoryVectorEnv` for its rules."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, length: int = 6, num_cues: int = 2, noise: float = 0.5) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (num_cues + 2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(num_cues)
        self._last_step = length + 1
        self._num_cues = num_cues
        self._noise = noise
        self._cue = 0
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Floats, Info]:
        """Start an episode."""
        super().reset(seed=seed)
        self._num_steps = 0
        self._cue = int(self.np_random.integers(self._num_cues))
        return self._observe(), {}

    def step(self, action: int | np.int64) -> tuple[Floats, float, bool, bool, Info]:
        """Go one step on."""
        is_asked = self._num_steps == self._last_step
        self._num_steps += 1
        return self._observe(), float(is_asked and action == self._cue), is_asked, False, {}

    def _observe(self) -> Floats:
        obs = np.zeros(self._num_cues + 2, np.float32)
        if self._num_steps == 0:
            obs[self._cue] = obs[-2] = 1.0
        else:
            noise = self.np_random.standard_normal(self._num_cues, np.float32)
            obs[:-2] = noise * np.float32(self._noise)
            obs[-1] = self._num_steps == self._last_step
        return obs
