"""Spaces that networks are fitted to, and the check that the environment of an evaluation has them too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import EnvError

if TYPE_CHECKING:
    from offbeat.config.models import EnvConfig, RunConfig
    from offbeat.envs.teams.team import Team
    from offbeat.envs.world import World

_SCALARS_BYTES = 16
"""Reward, value, log-probability and flags of a step, roughly."""


@dataclass(frozen=True, slots=True)
class EnvSpaces:
    """Spaces and sizes of an environment by name, and about how many bytes a step takes in a segment.

    ``notes`` say what is changed about it before networks see it.
    """

    features: Mapping[str, object]
    step_bytes: int
    notes: tuple[str, ...] = ()


def probe_env(config: EnvConfig) -> EnvSpaces:
    """Make one environment of a single agent, take a step in it, and return its spaces."""
    from offbeat.envs.make import make_world

    world = make_world(config, 1)
    spaces = (world.single_observation_space, world.single_action_space)
    try:
        if _may_break_contract(config):
            _take_step(world)
    finally:
        world.close()
    step_bytes = sum(np.asarray(space.sample()).nbytes for space in spaces) + _SCALARS_BYTES
    return EnvSpaces({"observations": spaces[0], "actions": spaces[1]}, step_bytes, world.notes)


def probe_team(config: EnvConfig) -> EnvSpaces:
    """Make one environment of several agents, take a step in it, and return its spaces."""
    from offbeat.envs.teams import make_team

    team = make_team(config, 1)
    features = {
        "number of agents": team.num_agents,
        "observations": team.obs_size,
        "state": team.state_size,
        "actions": team.single_action_space,
    }
    try:
        if _may_break_contract(config):
            _take_team_step(team)
    finally:
        team.close()
    seen = 4 * (team.num_agents * team.obs_size + team.state_size)
    return EnvSpaces(features, 2 * seen + team.num_agents * _SCALARS_BYTES)  # before and after each step


def _may_break_contract(config: EnvConfig) -> bool:
    """Return False for offbeat's own environments, of which some compile for their first step."""
    return not config.id.startswith("offbeat/")


def _take_step(world: World) -> None:
    """Take a step; EnvError says which contract the environment does not keep.

    What it raises by itself is left to the run, which shows it with the stack of its worker.
    """
    space = world.single_action_space
    with _only_env_errors():
        world.reset(0)
        space.seed(0)
        world.step(np.stack([space.sample()]))


def _take_team_step(team: Team) -> None:
    from offbeat.envs.teams import random_actions

    with _only_env_errors():
        team.step(random_actions(team, team.reset(0), np.random.default_rng(0)))


@contextlib.contextmanager
def _only_env_errors() -> Iterator[None]:
    try:
        yield
    except EnvError:
        raise
    except Exception:
        return


def check_eval_env(config: RunConfig, probe: Callable[[EnvConfig], EnvSpaces]) -> None:
    """Probe both environments where ``eval.env_kwargs`` tells them apart; raise EnvError with the fix."""
    if not config.eval.env_kwargs:
        return
    trained = probe(config.env).features
    try:
        judged = probe(config.eval_env).features
    except EnvError as error:
        raise EnvError(f"eval.env_kwargs: {error}") from error
    for name, before in trained.items():
        if before != judged[name]:
            raise EnvError(
                f"eval.env_kwargs changes the {name} of {config.env.id} from {before} to {judged[name]}, so "
                "that the weights do not fit; leave the arguments out that do so, or move them to env.kwargs"
            )
