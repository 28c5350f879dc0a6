"""A team of ordinary environments, stepped one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from offbeat.envs import snapshot
from offbeat.envs.checks import GlobalRandomness
from offbeat.envs.teams.adapters import Outcome, Rows, Single
from offbeat.envs.teams.team import Bools, TeamStep, View
from offbeat.envs.world import StateTaker, env_seed
from offbeat.errors import EnvError
from offbeat.types import Array, StateTree

FORMAT = 1
"""Version of the layout of a team's state."""


class LoopTeam:
    """Steps a list of environments of the same kind; ``name`` is for messages and checks.

    Episodes are cut off after ``max_steps`` steps, None: only by the environments themselves.
    """

    def __init__(self, name: str, singles: Sequence[Single], max_steps: int | None = None) -> None:
        first = singles[0]
        self.num_envs = len(singles)
        self.num_agents = first.num_agents
        self.obs_size = first.obs_size
        self.state_size = first.state_size
        self.single_action_space: gymnasium.Space[Any] = first.single_action_space
        self.has_legal = first.has_legal
        self._name = name
        self._singles = list(singles)
        self._has_success = first.has_success
        self._max_steps = max_steps
        self._is_discrete = isinstance(first.single_action_space, gymnasium.spaces.Discrete)
        self._action_shape = (self.num_envs, self.num_agents, *(first.single_action_space.shape or ()))
        self._obs = np.zeros((self.num_envs, self.num_agents, self.obs_size), np.float32)
        self._state = np.zeros((self.num_envs, self.state_size), np.float32)
        self._legal = self._new_legal()
        self._alive = np.ones((self.num_envs, self.num_agents), np.bool_)
        self._steps = np.zeros(self.num_envs, np.int64)
        self._rows = [self._rows_of(index) for index in range(self.num_envs)]
        self._global_randomness = GlobalRandomness(name)
        self._taker = StateTaker(name)
        self._is_reset = False
        self._is_checked = False

    def reset(self, seed: int) -> View:
        """Start a new episode everywhere; environment i gets a seed of its own."""
        self._global_randomness.begin()
        for index in range(self.num_envs):
            self._reset_one(index, env_seed(seed, index))
        self._global_randomness.end()
        self._steps[:] = 0
        self._check_seen("reset()")
        self._is_reset = True
        return self._view()

    def step(self, actions: Array, active: Bools | None = None) -> TeamStep:
        """Take actions ``[N, A, ...]``; environments that are not ``active`` ``[N]`` stand still."""
        if actions.shape != self._action_shape:
            raise EnvError(f"{self._name}: actions must be {self._action_shape}, these are {actions.shape}")
        if not self._is_checked:
            self._global_randomness.begin()
        rewards = np.zeros(self.num_envs)
        terminated, truncated, success = np.zeros((3, self.num_envs), np.bool_)
        given = actions.tolist() if self._is_discrete else actions
        for index in range(self.num_envs) if active is None else np.flatnonzero(active).tolist():
            outcome = self._step_one(index, given[index])
            rewards[index] = outcome.reward
            terminated[index] = outcome.terminated
            truncated[index] = outcome.truncated
            success[index] = outcome.success
        self._check_rewards(rewards)
        self._check_seen("step()")
        next_obs, next_state = self._obs.copy(), self._state.copy()
        self._begin_anew(np.flatnonzero(terminated | truncated).tolist())
        if not self._is_checked:
            self._is_checked = True
            self._global_randomness.end()
        return TeamStep(
            view=self._view(),
            next_obs=next_obs,
            next_state=next_state,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            success=success & (terminated | truncated) if self._has_success else None,
        )

    def state_dict(self) -> StateTree | None:
        """The state of all environments and what is seen; None when one cannot give its state."""
        envs = None if self._global_randomness.found else self._taker.take(self._envs())
        if envs is None:
            return None
        return {
            "format": FORMAT,
            "team": "loop",
            "env": self._name,
            "obs": self._obs.copy(),
            "state": self._state.copy(),
            "legal": None if self._legal is None else self._legal.copy(),
            "alive": self._alive.copy(),
            "steps": self._steps.copy(),
            "envs": envs,
        }

    def load_state_dict(self, state: StateTree) -> View:
        """Go on from a state of as many environments of the same kind."""
        self._check_belongs(state)
        if not self._is_reset:
            self.reset(0)
        snapshot.restore(self._envs(), state["envs"])
        self._obs[:], self._state[:], self._alive[:] = state["obs"], state["state"], state["alive"]
        self._steps[:] = state["steps"]
        if self._legal is not None:
            self._legal[:] = state["legal"]
        return self._view()

    def close(self) -> None:
        """Close every environment."""
        for single in self._singles:
            single.close()

    def _new_legal(self) -> Bools | None:
        if not self.has_legal:
            return None
        assert isinstance(self.single_action_space, gymnasium.spaces.Discrete)
        return np.ones((self.num_envs, self.num_agents, int(self.single_action_space.n)), np.bool_)

    def _rows_of(self, index: int) -> Rows:
        legal = None if self._legal is None else self._legal[index]
        return Rows(self._obs[index], self._state[index], legal, self._alive[index])

    def _envs(self) -> list[Any]:
        return [single.env for single in self._singles]

    def _reset_one(self, index: int, seed: int | None) -> None:
        self._guarded(index, lambda single: single.reset(seed, self._rows[index]))

    def _step_one(self, index: int, actions: Sequence[Any]) -> Outcome:
        outcome: Outcome = self._guarded(index, lambda single: single.step(actions, self._rows[index]))
        self._steps[index] += 1
        is_late = self._max_steps is not None and self._steps[index] >= self._max_steps
        if is_late and not outcome.terminated:
            return Outcome(outcome.reward, False, True, outcome.success)
        return outcome

    def _begin_anew(self, ended: list[int]) -> None:
        if not ended:
            return
        for index in ended:
            self._reset_one(index, None)
        self._steps[ended] = 0
        self._check_seen("reset()")

    def _guarded(self, index: int, call: Callable[[Single], Any]) -> Any:
        try:
            return call(self._singles[index])
        except EnvError as error:
            raise EnvError(f"{self._name}: environment {index} of {self.num_envs}: {error}") from error
        except Exception as error:
            error.add_note(f"in environment {index} of {self.num_envs} of {self._name}")
            raise

    def _view(self) -> View:
        legal = None if self._legal is None else self._legal.copy()
        return View(self._obs.copy(), self._state.copy(), legal, self._alive.copy())

    def _check_seen(self, where: str) -> None:
        if np.isfinite(self._obs).all() and np.isfinite(self._state).all():
            return
        bad = np.argwhere(~np.isfinite(self._obs))
        if len(bad):
            index, agent, feature = bad[0].tolist()
            value = self._obs[index, agent, feature]
            what = f"an observation of agent {agent} with {value} at feature {feature}"
        else:
            index, feature = np.argwhere(~np.isfinite(self._state))[0].tolist()
            what = f"a state with {self._state[index, feature]} at feature {feature}"
        raise EnvError(
            f"{self._name}: {where} of environment {index} returned {what}; "
            "find where the environment divides by zero or lets a value grow without bound"
        )

    def _check_rewards(self, rewards: Array) -> None:
        if not np.isfinite(rewards).all():
            index = int(np.argmin(np.isfinite(rewards)))
            raise EnvError(
                f"{self._name}: step() of environment {index} returned rewards with the sum "
                f"{rewards[index]}, every agent's must be a finite number; correct the environment"
            )

    def _check_belongs(self, state: StateTree) -> None:
        here = {"format": FORMAT, "team": "loop", "env": self._name, "num_envs": self.num_envs}
        there = {key: state.get(key) for key in ("format", "team", "env")}
        there["num_envs"] = len(state.get("steps", ()))
        if there != here:
            raise EnvError(
                f"the saved environments are {there}, this run has {here}; "
                "go on with the configuration that made the checkpoint, or start a new run"
            )
