"""CartPole-v1 that writes down each of its finished episodes, for offbeat and its peers alike.

One line per episode, its return, appended to the file that the environment variable ``EPISODE_LOG`` names.
Importing this module registers ``LoggedCartPole-v1``, single and vectorised. Needs Gymnasium only, so that
it works in every peer's own virtual environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.wrappers import TimeLimit

ENV_ID = "LoggedCartPole-v1"
LOG_VARIABLE = "EPISODE_LOG"
MAX_STEPS = 500


def log_episodes(returns: Iterable[float]) -> None:
    """Append returns; one write, so that lines of several processes never mix."""
    lines = "".join(f"{value:g}\n" for value in returns)
    descriptor = os.open(os.environ[LOG_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, lines.encode())
    finally:
        os.close(descriptor)


class LoggedEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds up rewards and writes the sum down when an episode ends."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._return = 0.0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self._return += float(result[1])
        if result[2] or result[3]:
            log_episodes([self._return])
            self._return = 0.0
        return result


class LoggedCartPoleVector(CartPoleVectorEnv):
    """Gymnasium's vectorised CartPole; each step of it pays 1, so an episode's steps are its return."""

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if self.prev_done.any():
            log_episodes(self.steps[self.prev_done].tolist())
        return result


def make_logged_cartpole(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    """One CartPole with its step limit and its log."""
    return LoggedEpisodes(TimeLimit(CartPoleEnv(**kwargs), MAX_STEPS))


if ENV_ID not in gymnasium.registry:
    gymnasium.register(
        ENV_ID,
        entry_point="logged_cartpole:make_logged_cartpole",
        vector_entry_point="logged_cartpole:LoggedCartPoleVector",
    )
