"""A trained PPO policy for users."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from offbeat.algorithms.ppo.config import ppo_config
from offbeat.config.models import RunConfig
from offbeat.envs import make_world
from offbeat.errors import OffbeatError
from offbeat.models.actor import initial_memory, make_actor
from offbeat.models.spec import NetworkSpec, network_spec
from offbeat.types import Array


class PPOPolicy:
    """Acts with published weights. Example: ``action = policy.act(obs)``."""

    def __init__(self, spec: NetworkSpec, weights: Mapping[str, Array], *, seed: int = 0) -> None:
        self._spec = spec
        self._actor = make_actor(spec)
        self._actor.load(weights)
        self._rng = np.random.default_rng(seed)
        self._memory = initial_memory(spec, 0)

    def reset(self) -> None:
        """Reset the recurrent state; call it at the start of each episode."""
        self._memory = initial_memory(self._spec, 0)

    def act(self, obs: Array, *, deterministic: bool = True) -> Array:
        """Action ``[*action shape]`` for one observation, or ``[N, *action shape]`` for a batch of N."""
        head, observation = self._spec.actions, self._spec.observation
        stored = np.asarray(obs, observation.dtype)
        rows = stored if self._is_batch(stored) else stored[None]
        if len(self._memory) != len(rows):
            self._memory = initial_memory(self._spec, len(rows))
        outputs, self._memory = self._actor.outputs(rows, self._memory)
        if deterministic:
            chosen = head.mode(outputs)
        else:
            chosen = head.sample(outputs, head.noise(self._rng, 1, len(rows))[0])
        actions = head.to_env(chosen, rows)
        return actions if rows is stored else actions[0]

    def _is_batch(self, obs: Array) -> bool:
        shape = self._spec.observation.shape
        if obs.shape == shape:
            return False
        if obs.shape[1:] == shape and obs.ndim == len(shape) + 1:
            return True
        raise OffbeatError(f"expected an observation of shape {shape} or a batch of them, got {obs.shape}")


def make_policy(config: RunConfig, weights: Mapping[str, Array]) -> PPOPolicy:
    """Fit the run's network to its environment and load published weights."""
    return PPOPolicy(environment_spec(config), weights, seed=config.run.seed)


def environment_spec(config: RunConfig) -> NetworkSpec:
    """The run's network, fitted to its environment."""
    world = make_world(config.env, 1)
    try:
        network = ppo_config(config).network
        return network_spec(network, world.single_observation_space, world.single_action_space)
    finally:
        world.close()
