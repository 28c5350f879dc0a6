"""The one interface through which collectors and evaluators see environments with several agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.types import Array, StateTree

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class View:
    """What N teams of A agents see before they act; every array belongs to the caller.

    ``obs`` ``[N, A, O]`` is what each agent sees, ``state`` ``[N, S]`` what only training may know.
    ``legal`` ``[N, A, K]`` says which discrete actions are allowed, None: all, always. ``alive`` ``[N, A]``
    is False for agents that have left; they see zeros and their actions are ignored.
    """

    obs: Floats
    state: Floats
    legal: Bools | None
    alive: Bools


@dataclass(frozen=True, slots=True)
class TeamStep:
    """What one step of N teams led to; every array belongs to the caller.

    ``view`` is what to act on next: where an episode ended it is already the first of a new one.
    ``next_obs`` ``[N, A, O]`` and ``next_state`` ``[N, S]`` are what this step led to: those of ``view``, but
    the true final ones where an episode ended. ``rewards`` ``[N]`` float64 are the team's, ``terminated`` and
    ``truncated`` ``[N]`` say that an episode ended. ``success`` ``[N]`` says that one ended well, None where
    the environment has no such notion.
    """

    view: View
    next_obs: Floats
    next_state: Floats
    rewards: NDArray[np.float64]
    terminated: Bools
    truncated: Bools
    success: Bools | None = None


class Team(Protocol):
    """N copies of an environment in which A agents act together, stepped together.

    An episode that ends is followed by a new one in the same step. The agents share one kind of observation
    and action: shorter observations are padded with zeros, and missing actions are never legal.
    """

    num_envs: int
    num_agents: int
    obs_size: int
    state_size: int
    single_action_space: gymnasium.Space[Any]
    has_legal: bool

    def reset(self, seed: int) -> View:
        """Start a new episode everywhere."""
        ...

    def step(self, actions: Array, active: Bools | None = None) -> TeamStep:
        """Take actions ``[N, A, ...]``, one of each agent.

        Environments that are not ``active`` ``[N]`` stand still: their view stays as it is, their reward is 0
        and nothing ends.
        """
        ...

    def state_dict(self) -> StateTree | None:
        """Everything the next steps depend on, the present view included; None where it cannot be told."""
        ...

    def load_state_dict(self, state: StateTree) -> View:
        """Go on from a state taken earlier, here or in another process; return the view of that moment."""
        ...

    def close(self) -> None:
        """Free what the environments hold."""
        ...


def random_actions(team: Team, view: View, rng: np.random.Generator) -> Array:
    """Actions ``[N, A, ...]``, each legal one as likely as any other."""
    space, shape = team.single_action_space, view.alive.shape
    if not isinstance(space, gymnasium.spaces.Discrete):
        space.seed(int(rng.integers(2**31)))
        drawn = np.stack([space.sample() for _ in range(view.alive.size)])
        return drawn.reshape(*shape, *drawn.shape[1:])
    odds = rng.random((*shape, int(space.n)))
    actions: Array = (odds if view.legal is None else odds * view.legal).argmax(axis=-1)
    return actions
