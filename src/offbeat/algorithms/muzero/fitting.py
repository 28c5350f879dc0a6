"""From an environment to the world model that fits it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.muzero.config import PlanningConfig, planning_config
from offbeat.config.models import RunConfig
from offbeat.envs import World, make_world
from offbeat.errors import ConfigError, EnvError
from offbeat.models.observations import observation_spec
from offbeat.models.world_spec import WorldSpec, action_sizes, choose_kind
from offbeat.types import Array

CONTINUOUS_SAMPLES = 20
"""Actions that a tree chooses among where they are continuous and nothing else is said."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A world model, and how the environment's actions relate to it.

    ``num_slots`` is the number of actions that a tree chooses among: all, or some that are drawn for each
    node. ``space`` knows which actions are legal where it has a method of that name.
    """

    spec: WorldSpec
    num_slots: int
    two_player: bool
    space: gymnasium.Space[object]

    def legal(self, obs: Array, ended: NDArray[np.bool_] | None = None) -> Array | None:
        """Which actions ``[N, A]`` may be taken at observations ``[N, ...]``; None: all of them.

        After an episode's end none may be; all are shown then, for somebody asks what to do. ``ended``
        ``[N]`` says where that is so, if it is known.
        """
        judge = getattr(self.space, "legal", None)
        if judge is None:
            return None
        legal, shape = np.asarray(judge(obs)), (len(obs), self.spec.num_actions)
        if legal.shape != shape or legal.dtype != np.bool_:
            raise EnvError(
                f"legal(obs) of {self.space} gave {legal.dtype} of shape {legal.shape} for {len(obs)}"
                f" observations; it must give bool of shape {shape}"
            )
        some = np.asarray(legal.any(axis=1))
        if ended is not None and not (some | ended).all():
            raise EnvError(
                f"legal(obs) of {self.space} allows no action at an observation whose episode goes on: it"
                " must allow one there, or the environment must end the episode"
            )
        found: Array = legal | ~some[:, None]
        return found

    @property
    def is_sampled(self) -> bool:
        """Whether trees choose among actions that are drawn from the policy."""
        return self.num_slots != self.spec.num_actions

    def to_env(self, actions: Array) -> Array:
        """Actions as the environment takes them: those within -1 and 1 are brought to its own range."""
        if self.spec.num_actions:
            return actions
        assert isinstance(self.space, gymnasium.spaces.Box)
        low, high = self.space.low, self.space.high
        scaled: Array = low + (np.clip(actions, -1, 1) + 1) / 2 * (high - low)
        return scaled.astype(self.space.dtype)


def fit(algorithm: PlanningConfig, world: World, name: str) -> Fit:
    """Fit the networks of a run to its environments."""
    space, settings = world.single_action_space, algorithm.network
    num_actions, action_size = action_sizes(name, space)
    spec = WorldSpec(
        observation=observation_spec(world.single_observation_space),
        num_actions=num_actions,
        action_size=action_size,
        kind=choose_kind(world.single_observation_space, settings.kind),
        latent=settings.latent,
        hidden=settings.hidden,
        blocks=settings.blocks,
        value_support=settings.value_support,
        reward_support=settings.reward_support,
        projection=settings.hidden if algorithm.compares_latents else 0,
    )
    wanted = algorithm.search.num_samples
    if num_actions and wanted and wanted > num_actions:
        raise ConfigError(
            f"algorithm.search.num_samples {wanted} is above the {num_actions} actions of {name}: leave it"
            " out, and trees choose among all of them"
        )
    num_slots = wanted or num_actions or CONTINUOUS_SAMPLES
    return Fit(spec, num_slots, players(name, space) == 2, space)


def players(name: str, space: gymnasium.Space[object]) -> int:
    """How many take turns at the actions of an environment: its action space's ``num_players``, or one."""
    count = int(getattr(space, "num_players", 1))
    if count not in (1, 2):
        raise ConfigError(f"{name} has {count} players who take turns: a search knows one or two")
    return count


def fit_environment(config: RunConfig) -> Fit:
    """The same, with one environment made for it."""
    world = make_world(config.env, 1)
    try:
        return fit(planning_config(config), world, config.env.id)
    finally:
        world.close()
