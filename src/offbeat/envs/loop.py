"""A world that steps ordinary environments one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from offbeat.envs import snapshot
from offbeat.envs.checks import (
    Contract,
    GlobalRandomness,
    box_of,
    check_action_space,
    check_reset,
    explain,
)
from offbeat.envs.world import StateTaker, Step, env_seed, pack_state, unpack_state
from offbeat.types import Array, StateTree

AnyEnv = gymnasium.Env[Any, Any]


class LoopWorld:
    """Steps a list of Gymnasium environments with Box observations.

    ``name`` is for messages and checks; ``notes`` say what was changed about the environment.
    """

    def __init__(self, name: str, envs: Sequence[AnyEnv], notes: Sequence[str] = ()) -> None:
        self.notes = tuple(notes)
        self.num_envs = len(envs)
        self.single_observation_space = box_of(name, envs[0].observation_space)
        self.single_action_space = envs[0].action_space
        check_action_space(name, self.single_action_space)
        self._name = name
        self._envs = list(envs)
        self._contract = Contract(name, self.single_observation_space)
        self._row_shape = self.single_observation_space.shape
        self._dtype = self.single_observation_space.dtype
        self._ended = [False] * self.num_envs
        self._is_scalar_action = isinstance(self.single_action_space, gymnasium.spaces.Discrete)
        self._global_randomness = GlobalRandomness(name)
        self._state = StateTaker(name)
        self._is_reset = False
        self._is_checked = False

    def reset(self, seed: int) -> Array:
        """Start a new episode everywhere; environment i gets a seed of its own."""
        obs = self._new_obs()
        self._global_randomness.begin()
        for index, env in enumerate(self._envs):
            try:
                returned: object = env.reset(seed=env_seed(seed, index))
            except Exception as error:
                explain(self._name, env, None, error)
                raise
            row, _ = check_reset(self._name, returned)
            self._put(obs, index, row, "reset()")
        self._global_randomness.end()
        self._contract.check_finite(obs, "reset()")
        self._ended = [False] * self.num_envs
        self._is_reset = True
        return obs

    def step(self, actions: Array) -> Step:
        """Take one action ``[N, ...]`` in each environment; those that ended start again instead."""
        if not self._is_checked:
            self._global_randomness.begin()
        obs = self._new_obs()
        rewards = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, np.bool_)
        truncated = np.zeros(self.num_envs, np.bool_)
        ended, rows, index = self._ended, self._split(actions), 0
        try:
            for index, env in enumerate(self._envs):
                if ended[index]:
                    ended[index] = False
                    row, _ = env.reset()
                    self._put(obs, index, row, "reset()")
                    continue
                row, reward, is_terminated, is_truncated, _ = env.step(rows[index])
                self._put(obs, index, row, "step()")
                if not self._is_checked:
                    self._contract.check_scalars(reward, is_terminated, is_truncated)
                rewards[index] = reward
                if is_terminated or is_truncated:
                    terminated[index] = is_terminated
                    truncated[index] = is_truncated
                    ended[index] = True
        except Exception as error:
            if not self._is_checked:
                explain(self._name, self._envs[index], rows[index], error)
            error.add_note(f"in environment {index} of {self.num_envs} of {self._name}")
            raise
        self._check(obs, rewards)
        return Step(obs, rewards, terminated, truncated)

    def state_dict(self) -> StateTree | None:
        """Return the state of all environments and who ended; None when one cannot give its state."""
        envs = None if self._global_randomness.found else self._state.take(self._envs)
        return None if envs is None else pack_state("loop", self._name, np.array(self._ended), envs)

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a state of as many environments of the same kind."""
        ended, envs = unpack_state(state, "loop", self._name, self.num_envs)
        if not self._is_reset:
            self.reset(0)
        snapshot.restore(self._envs, envs)
        self._ended = ended.tolist()

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()

    def _new_obs(self) -> Array:
        return np.empty((self.num_envs, *self._row_shape), self._dtype)

    def _put(self, obs: Array, index: int, row: object, where: str) -> None:
        if not self._contract.fits(row, self._row_shape):
            raise self._contract.complain_obs(row, where, self._row_shape)
        obs[index] = row

    def _split(self, actions: Array) -> list[Any]:
        """One action per environment, none of them a view: an environment may keep its last action."""
        if self._is_scalar_action:
            return list(actions.tolist())
        dtype = self.single_action_space.dtype
        return [np.array(action, dtype) for action in actions]

    def _check(self, obs: Array, rewards: Array) -> None:
        self._contract.check_finite(obs, "step()")
        self._contract.check_rewards(rewards)
        if not self._is_checked:
            self._is_checked = True
            self._global_randomness.end()
