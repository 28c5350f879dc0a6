"""The one interface through which collectors and evaluators see environments."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.envs import snapshot
from offbeat.errors import EnvError
from offbeat.seeding import derive_seed
from offbeat.types import Array, StateTree

FORMAT = 1
"""Version of the layout of a world's state."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of N environments returned; every array belongs to the caller.

    ``obs`` is ``[N, ...]``, ``rewards`` ``[N]`` float64, ``terminated`` and ``truncated`` ``[N]`` bool.
    """

    obs: Array
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class World(Protocol):
    """N environments stepped together, each starting a new episode at the step after its end.

    When environment i ends at some step, ``obs[i]`` of that step is its true final observation. The next
    step ignores action i, starts a new episode and returns its first observation with reward 0 and both flags
    False.
    """

    num_envs: int
    single_observation_space: gymnasium.spaces.Box
    single_action_space: gymnasium.Space[Any]
    notes: tuple[str, ...]
    """What was changed about the environment, for its user to know."""

    def reset(self, seed: int) -> Array:
        """Start a new episode everywhere and return the first observations ``[N, ...]``."""
        ...

    def step(self, actions: Array) -> Step:
        """Take one action ``[N, ...]`` in each environment."""
        ...

    def state_dict(self) -> StateTree | None:
        """Everything the next steps depend on; None when the environments cannot give it."""
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a state taken earlier, here or in another process."""
        ...

    def close(self) -> None:
        """Free what the environments hold."""
        ...


class StateTaker:
    """Takes the state of environments, and says in the log, once, what keeps it from doing so."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_said_why = False

    def take(self, envs: object) -> StateTree | None:
        """Capture an environment or a list of them; None when their state cannot be seen."""
        state = snapshot.capture(envs)
        if state is None and not self._has_said_why:
            self._has_said_why = True
            text = "%s cannot be saved, its episodes restart after a fault or a resume: it holds %s"
            _log.warning(text, self._name, snapshot.why_not(envs))
        return state


def env_seed(seed: int, index: int) -> int:
    """Return environment ``index``'s own 31-bit seed: some environments take no more than 32 bits."""
    return derive_seed(seed, "env", index) >> 32


def pack_state(kind: str, name: str, ended: NDArray[np.bool_], envs: StateTree) -> StateTree:
    """Put a world's own bookkeeping around the state of its environments; ``ended`` is ``[N]``."""
    return {"format": FORMAT, "world": kind, "env": name, "ended": np.array(ended, np.bool_), "envs": envs}


def unpack_state(
    state: StateTree, kind: str, name: str, num_envs: int
) -> tuple[NDArray[np.bool_], StateTree]:
    """Return ``ended`` ``[N]`` and the environments' state, or say why this state belongs elsewhere."""
    here = {"format": FORMAT, "world": kind, "env": name, "num_envs": num_envs}
    there = {key: state.get(key) for key in ("format", "world", "env")} | {"num_envs": len(state["ended"])}
    if there != here:
        raise EnvError(
            f"the saved environments are {there}, this run has {here}; "
            "go on with the configuration that made the checkpoint, or start a new run"
        )
    return np.array(state["ended"], np.bool_), state["envs"]
