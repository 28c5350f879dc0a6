"""What networks are fitted to, and whether the environment that weights are judged in has it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import EnvError

if TYPE_CHECKING:
    from offbeat.config.models import EnvConfig, RunConfig

_SCALARS_BYTES = 16
"""Reward, value, log-probability and flags of a step, roughly."""


@dataclass(frozen=True, slots=True)
class EnvLook:
    """What is to be seen of an environment: by name, and about how many bytes a step takes in a segment.

    ``notes`` say what is changed about it before networks see it.
    """

    features: Mapping[str, object]
    step_bytes: int
    notes: tuple[str, ...] = ()


def look_at_world(config: EnvConfig) -> EnvLook:
    """Make one environment of a single agent and look at it."""
    from offbeat.envs.make import make_world

    world = make_world(config, 1)
    spaces = (world.single_observation_space, world.single_action_space)
    world.close()
    step_bytes = sum(np.asarray(space.sample()).nbytes for space in spaces) + _SCALARS_BYTES
    return EnvLook({"observations": spaces[0], "actions": spaces[1]}, step_bytes, world.notes)


def look_at_team(config: EnvConfig) -> EnvLook:
    """Make one environment of several agents and look at it."""
    from offbeat.envs.teams import make_team

    team = make_team(config, 1)
    features = {
        "number of agents": team.num_agents,
        "observations": team.obs_size,
        "state": team.state_size,
        "actions": team.single_action_space,
    }
    team.close()
    seen = 4 * (team.num_agents * team.obs_size + team.state_size)
    return EnvLook(features, 2 * seen + team.num_agents * _SCALARS_BYTES)  # before and after each step


def check_eval_env(config: RunConfig, look: Callable[[EnvConfig], EnvLook]) -> None:
    """Look at both environments where ``eval.env_kwargs`` tells them apart; raises EnvError with the fix."""
    if not config.eval.env_kwargs:
        return
    trained = look(config.env).features
    try:
        judged = look(config.eval_env).features
    except EnvError as error:
        raise EnvError(f"eval.env_kwargs: {error}") from error
    for name, before in trained.items():
        if before != judged[name]:
            raise EnvError(
                f"eval.env_kwargs changes the {name} of {config.env.id} from {before} to {judged[name]}, so "
                "that the weights do not fit; leave the arguments out that do so, or move them to env.kwargs"
            )
