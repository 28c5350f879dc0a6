"""Samples seen in another way: the same play on boards that are turned, with colours renamed. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from offbeat.algorithms.ppo.config import ppo_config
from offbeat.algorithms.ppo.policy import environment_spec
from offbeat.algorithms.ppo.rounds import Round
from offbeat.config.models import RunConfig
from offbeat.envs import make_world
from offbeat.errors import ConfigError
from offbeat.types import Array

Augment = Callable[[Round, np.random.Generator], Round]
"""From a round to one that is as true: other observations and actions, the same rewards."""


@runtime_checkable
class Augments(Protocol):
    """An action space that knows what its environment does not care about."""

    def augment(
        self, rng: np.random.Generator, obs: Array, moves: Array, *, symmetry: bool, colours: bool
    ) -> tuple[Array, Array]:
        """Observations ``[T + 1, B, ...]`` and actions ``[T, B]`` of B environments, seen in another way."""
        ...


@runtime_checkable
class Translates(Protocol):
    """Stored actions that can be turned into those of the environment, and back."""

    def to_env(self, actions: Array, obs: Array) -> Array:
        """Actions of the environment ``[N]`` where the policy saw ``obs`` ``[N, ...]``."""
        ...

    def from_env(self, moves: Array, obs: Array) -> Array:
        """The stored form ``[N]`` of the environment's actions."""
        ...


@dataclass(frozen=True, slots=True)
class AugmentMoves:
    """Augments rounds of moves; each environment is seen in a way of its own, all its steps alike."""

    space: Augments
    actions: Translates
    symmetry: bool
    colours: bool

    def __call__(self, data: Round, rng: np.random.Generator) -> Round:
        """The round with other observations and the actions that belong to them."""
        shape = data.actions.shape
        moves = self.actions.to_env(data.actions.reshape(-1), _rows(data.obs)).reshape(shape)
        obs, moves = self.space.augment(rng, data.obs, moves, symmetry=self.symmetry, colours=self.colours)
        actions = self.actions.from_env(moves.reshape(-1), _rows(obs)).reshape(shape)
        return replace(data, obs=obs, actions=actions)


def make_augment(config: RunConfig) -> Augment | None:
    """What a run's learner does to its samples, None for nothing; refuse where it cannot be done."""
    wanted = ppo_config(config).augment
    if wanted == "none":
        return None
    actions = environment_spec(config).actions
    world = make_world(config.env, 1)
    space = world.single_action_space
    world.close()
    if not isinstance(space, Augments) or not isinstance(actions, Translates):
        raise ConfigError(
            f"algorithm.augment is {wanted}, which is for moves on a board, and {config.env.id} has"
            f" {space}: set algorithm.augment to none"
        )
    return AugmentMoves(space, actions, wanted != "colours", wanted != "symmetry")


def _rows(obs: Array) -> Array:
    """Observations that were acted on, ``[T B, ...]``."""
    return obs[:-1].reshape(-1, *obs.shape[2:])
