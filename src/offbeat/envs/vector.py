"""A world around an environment that brings its own vectorised version."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from offbeat.envs import snapshot
from offbeat.envs.checks import (
    Contract,
    GlobalRandomness,
    box_of,
    check_action_space,
    check_reset,
    check_step,
)
from offbeat.envs.world import StateTaker, Step, env_seed, pack_state, unpack_state
from offbeat.errors import EnvError
from offbeat.types import Array, StateTree

AnyVectorEnv = VectorEnv[Any, Any, Any]


def resets_at_next_step(env: AnyVectorEnv) -> bool:
    """Tell whether a vector environment starts a new episode at the step after an end, as a world must."""
    mode = env.metadata.get("autoreset_mode")
    return mode in (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP.value)


class VectorWorld:
    """Adapts a Gymnasium vector environment with next-step autoreset; ``name`` is for messages and checks."""

    def __init__(self, name: str, env: AnyVectorEnv) -> None:
        if not resets_at_next_step(env):
            raise EnvError(
                f"{name}: its vector version has autoreset_mode {env.metadata.get('autoreset_mode')}, which "
                "loses the final observation or never starts again; set env.vectorize=loop, or make the "
                "vector environment start a new episode at the step after an end and say so with "
                "metadata['autoreset_mode'] = AutoresetMode.NEXT_STEP"
            )
        self.notes: tuple[str, ...] = ()
        self.num_envs = env.num_envs
        self.single_observation_space = box_of(name, env.single_observation_space)
        self.single_action_space = env.single_action_space
        check_action_space(name, self.single_action_space)
        self._name = name
        self._env = env
        self._contract = Contract(name, self.single_observation_space)
        self._shape = (self.num_envs, *self.single_observation_space.shape)
        self._first_class = _first_class(env.single_observation_space)
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._global_randomness = GlobalRandomness(name)
        self._state = StateTaker(name)
        self._is_reset = False
        self._is_checked = False

    def reset(self, seed: int) -> Array:
        """Start a new episode everywhere; the environment spreads the seed over its lanes itself."""
        self._global_randomness.begin()
        returned: object = self._env.reset(seed=env_seed(seed, 0))
        self._global_randomness.end()
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._is_reset = True
        return self._take(check_reset(self._name, returned)[0], "reset()")

    def step(self, actions: Array) -> Step:
        """Take one action ``[N, ...]`` in each environment; those that ended start again instead."""
        is_first, self._is_checked = not self._is_checked, True
        if is_first:
            self._global_randomness.begin()
        # The environment may keep its last actions, and the caller may reuse the array.
        returned: object = self._env.step(actions.copy())
        raw_obs, raw_rewards, raw_terminated, raw_truncated, _ = check_step(self._name, returned)
        if is_first:
            self._global_randomness.end()
            self._contract.check_vectors(self.num_envs, raw_rewards, raw_terminated, raw_truncated)
        rewards = np.array(raw_rewards, np.float64)
        terminated = np.array(raw_terminated, np.bool_)
        truncated = np.array(raw_truncated, np.bool_)
        self._note_ends(rewards, terminated | truncated)
        self._contract.check_rewards(rewards)
        return Step(self._take(raw_obs, "step()"), rewards, terminated, truncated)

    def state_dict(self) -> StateTree | None:
        """Return the environment's state and who ended; None when it cannot give its state."""
        env = None if self._global_randomness.found else self._state.take(self._env)
        return None if env is None else pack_state("vector", self._name, self._ended, env)

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a state of as many environments of the same kind."""
        ended, env = unpack_state(state, "vector", self._name, self.num_envs)
        if not self._is_reset:
            self.reset(0)
        snapshot.restore(self._env, env)
        self._ended = ended

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _take(self, raw: object, where: str) -> Array:
        if self._first_class is not None:
            return self._one_hot(raw, where)
        if not self._contract.fits(raw, self._shape):
            raise self._contract.complain_obs(raw, where, self._shape)
        obs = np.array(raw, self.single_observation_space.dtype)
        self._contract.check_finite(obs, where)
        return obs

    def _one_hot(self, raw: object, where: str) -> Array:
        num_classes = self._shape[1]
        classes = np.asarray(raw) - self._first_class
        is_whole = classes.shape == (self.num_envs,) and classes.dtype.kind in "iu"
        if not is_whole or classes.min() < 0 or classes.max() >= num_classes:
            raise EnvError(
                f"{self._name}: {where} returned the observations {raw!r}, but its observation_space has "
                f"{num_classes} values; return one of them for each of {self.num_envs} environments"
            )
        obs = np.zeros(self._shape, np.float32)
        obs[np.arange(self.num_envs), classes] = 1.0
        return obs

    def _note_ends(self, rewards: NDArray[np.float64], ended: NDArray[np.bool_]) -> None:
        restarted, self._ended = self._ended, ended
        if not np.count_nonzero(restarted):
            return
        rewards[restarted] = 0.0
        if np.count_nonzero(ended & restarted):
            index = int(np.argmax(ended & restarted))
            raise EnvError(
                f"{self._name}: environment {index} ended at two steps in a row: its vector version does not "
                "start a new episode at the step after an end; set env.vectorize=loop"
            )


def _first_class(space: gymnasium.Space[Any]) -> int | None:
    return int(space.start) if isinstance(space, gymnasium.spaces.Discrete) else None
