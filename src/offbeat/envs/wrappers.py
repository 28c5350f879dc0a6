"""Thin wrappers that bring observations into the form worlds show."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.envs.checks import box_of
from offbeat.errors import EnvError

AnyEnv = gymnasium.Env[Any, Any]


class OneHot(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Turns Discrete observations into one-hot float32 vectors ``[n]``."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gymnasium.spaces.Discrete)
        self._first = int(space.start)
        self._num_classes = int(space.n)
        self.observation_space = box_of(str(env), space)

    def observation(self, observation: Any) -> NDArray[np.float32]:
        """Encode one class as a vector with a single 1."""
        index = int(observation) - self._first
        if not 0 <= index < self._num_classes:
            raise EnvError(
                f"{self.env}: the observation {observation!r} is not in its observation_space "
                f"{self.env.observation_space}; correct one of the two"
            )
        row = np.zeros(self._num_classes, np.float32)
        row[index] = 1.0
        return row


class MinAtarImages(gymnasium.Wrapper[NDArray[np.uint8], int, Any, int]):
    """Shows MinAtar's boolean ``[H, W, C]`` grids as uint8 ``[C, H, W]`` images of 0 and 1."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        assert env.observation_space.shape is not None
        height, width, channels = env.observation_space.shape
        self.observation_space = gymnasium.spaces.Box(0, 1, (channels, height, width), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start an episode; a seeded one forgets the sticky action of the episode before."""
        if seed is not None:
            game: Any = self.env.unwrapped
            game.game.last_action = 0
        grid, info = self.env.reset(seed=seed, options=options)
        return grid.view(np.uint8).transpose(2, 0, 1), info

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Take one action."""
        grid, reward, terminated, truncated, info = self.env.step(action)
        return grid.view(np.uint8).transpose(2, 0, 1), float(reward), terminated, truncated, info
