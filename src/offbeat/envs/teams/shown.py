"""One environment with several agents, to be watched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from offbeat.envs.teams.adapters import Rows, Single
from offbeat.envs.teams.team import View
from offbeat.types import Array


class ShownTeam:
    """An environment of one team with the methods that Gymnasium's have, so that it can be played and drawn.

    Observations are a `View` of N = 1. Episodes are cut off after ``max_steps`` steps.
    """

    def __init__(self, single: Single, max_steps: int | None = None) -> None:
        self._single = single
        self._max_steps = max_steps
        self._num_steps = 0
        self.metadata: Mapping[str, Any] = getattr(single.env, "metadata", None) or {}
        self.action_space = gymnasium.spaces.Tuple([single.single_action_space] * single.num_agents)

    def reset(self, *, seed: int | None = None) -> tuple[View, dict[str, Any]]:
        """Start an episode."""
        self._num_steps = 0
        view = self._blank()
        self._single.reset(seed, _rows(view))
        return view, {}

    def step(self, action: Array) -> tuple[View, float, bool, bool, dict[str, Any]]:
        """Take one action of each agent, ``[A, ...]`` or ``[1, A, ...]``."""
        shape = self._single.single_action_space.shape or ()
        actions = np.asarray(action).reshape(self._single.num_agents, *shape)
        is_discrete = isinstance(self._single.single_action_space, gymnasium.spaces.Discrete)
        view = self._blank()
        outcome = self._single.step(actions.tolist() if is_discrete else list(actions), _rows(view))
        self._num_steps += 1
        is_late = self._max_steps is not None and self._num_steps >= self._max_steps
        truncated = outcome.truncated or (is_late and not outcome.terminated)
        return view, outcome.reward, outcome.terminated, truncated, {"is_success": outcome.success}

    def render(self) -> Any:
        """A picture or a text, as the environment was made for."""
        return self._single.env.render()

    def close(self) -> None:
        """Free what the environment holds."""
        self._single.close()

    def _blank(self) -> View:
        single = self._single
        num_actions = int(getattr(single.single_action_space, "n", 0))
        legal = np.ones((1, single.num_agents, num_actions), np.bool_) if single.has_legal else None
        return View(
            obs=np.zeros((1, single.num_agents, single.obs_size), np.float32),
            state=np.zeros((1, single.state_size), np.float32),
            legal=legal,
            alive=np.ones((1, single.num_agents), np.bool_),
        )


def _rows(view: View) -> Rows:
    legal = None if view.legal is None else view.legal[0]
    return Rows(view.obs[0], view.state[0], legal, view.alive[0])
