"""Does an environment keep its contract? Complaints name it, what it returned and what its space says."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import gymnasium
import numpy as np

from offbeat.errors import EnvError
from offbeat.types import Array


def box_of(name: str, space: gymnasium.Space[Any]) -> gymnasium.spaces.Box:
    """Return the Box that a world shows for an observation space: itself, or one-hot for a Discrete."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return gymnasium.spaces.Box(0.0, 1.0, (int(space.n),), np.float32)
    if isinstance(space, gymnasium.spaces.Box):
        return space
    raise EnvError(
        f"{name}: observations must be Box or Discrete where they come from a vector environment, its "
        f"observation_space is {space}; set env.vectorize=loop, or wrap the environment"
    )


def check_action_space(name: str, space: gymnasium.Space[Any]) -> None:
    """Refuse action spaces that no world can take actions for."""
    allowed = (gymnasium.spaces.Discrete, gymnasium.spaces.MultiDiscrete, gymnasium.spaces.Box)
    if not isinstance(space, allowed):
        is_team = isinstance(space, gymnasium.spaces.Tuple)
        agents = "if it has a part for each of several agents, set algorithm.name=mappo or hmasd; else "
        raise EnvError(
            f"{name}: actions must be Discrete, MultiDiscrete or Box, its action_space is {space}; "
            f"{agents if is_team else ''}wrap the environment so that it takes one of these (env.wrappers)"
        )


def check_spaces(name: str, env: gymnasium.Env[Any, Any]) -> None:
    """Refuse an environment that does not say what it shows and takes."""
    for kind in ("observation_space", "action_space"):
        space = getattr(env, kind, None)
        if not isinstance(space, gymnasium.Space):
            found = "it has none" if space is None else f"it is {_describe(space)}"
            raise EnvError(
                f"{name}: {kind} must be a gymnasium.Space, {found}; set self.{kind} in the environment's "
                "__init__, for instance to gymnasium.spaces.Box(...)"
            )


def check_reset(name: str, returned: object) -> tuple[Any, Any]:
    """Return observation and info; refuse what ``reset`` returns under Gym's old interface."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise EnvError(
            f"{name}: reset() must return 2 values (observation, info), it returned {_values(returned)}; "
            "return an empty dict as info where there is nothing to say"
        )
    return returned


def check_step(name: str, returned: object) -> tuple[Any, Any, Any, Any, Any]:
    """Return the parts of a step; refuse what ``step`` returns under Gym's old interface."""
    if not (isinstance(returned, tuple) and len(returned) == 5):
        raise EnvError(
            f"{name}: step() must return 5 values (observation, reward, terminated, truncated, info), it "
            f"returned {_values(returned)}; what Gym called done is terminated, or truncated where only the "
            "time was over"
        )
    return returned


def _values(returned: object) -> str:
    return f"{len(returned)} values" if isinstance(returned, tuple) else _describe(returned)


def explain(name: str, env: gymnasium.Env[Any, Any], action: object, error: Exception) -> None:
    """Raise EnvError in place of ``error`` where the environment keeps to another interface.

    ``error`` is that of its first reset (``action`` None) or step. Wrappers unpack what an environment
    returns, so it is called here without them.
    """
    if not isinstance(error, TypeError | ValueError):
        return
    try:
        _check_interface(name, env.unwrapped, action)
    except EnvError as found:
        raise found from error
    except Exception:  # it fails by itself: the first error is the one to see
        return


def _check_interface(name: str, env: gymnasium.Env[Any, Any], action: object) -> None:
    parameters = inspect.signature(env.reset).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if not takes_all and not {"seed", "options"} <= parameters.keys():
        raise EnvError(
            f"{name}: reset() must take a seed and options; write def reset(self, *, seed=None, options=None)"
            " and call super().reset(seed=seed) first"
        )
    check_reset(name, env.reset(seed=0))
    if action is not None:
        check_step(name, env.step(action))


@dataclass(frozen=True, slots=True)
class Contract:
    """What the environment called ``name`` promised through its observation space."""

    name: str
    space: gymnasium.spaces.Box

    def fits(self, obs: object, shape: tuple[int, ...]) -> TypeGuard[Array]:
        """Tell whether ``obs`` is an array of this shape whose dtype goes into the space's without loss."""
        if type(obs) is not np.ndarray or obs.shape != shape:
            return False
        return obs.dtype == self.space.dtype or np.can_cast(obs.dtype, self.space.dtype)

    def complain_obs(self, obs: object, where: str, shape: tuple[int, ...]) -> EnvError:
        """Say what is wrong with an observation that does not fit."""
        return EnvError(
            f"{self.name}: {where} returned an observation that is {_describe(obs)}, but its "
            f"observation_space is {self.space}, so it must be an array "
            f"of shape {shape} and dtype {self.space.dtype}; correct what it returns, or its space"
        )

    def check_finite(self, obs: Array, where: str) -> None:
        """Refuse NaN and infinite observations ``[N, ...]``."""
        if obs.dtype.kind == "f" and not np.isfinite(obs).all():
            index, row = _first_bad(obs)
            raise EnvError(
                f"{self.name}: {where} of environment {index} returned an observation with "
                f"{_bad_values(row)}, which is not in its observation_space {self.space}; "
                "find where the environment divides by zero or lets a value grow without bound"
            )

    def check_rewards(self, rewards: Array) -> None:
        """Refuse NaN and infinite rewards ``[N]``."""
        if not np.isfinite(rewards).all():
            index, reward = _first_bad(rewards)
            raise EnvError(
                f"{self.name}: step() of environment {index} returned the reward {float(reward)}, "
                "a reward must be a finite number; correct the environment's reward"
            )

    def check_scalars(self, reward: object, terminated: object, truncated: object) -> None:
        """Check the types of what one step of one environment returned beside its observation."""
        if not isinstance(reward, (int, float, np.integer, np.floating)):
            raise EnvError(
                f"{self.name}: step() returned a reward that is {_describe(reward)}; return a float"
            )
        for flag, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, (bool, np.bool_)):
                raise EnvError(
                    f"{self.name}: step() returned {flag} that is {_describe(value)}; return a bool"
                )

    def check_vectors(self, num_envs: int, rewards: object, terminated: object, truncated: object) -> None:
        """Check shapes and dtypes of what a step of a vector environment returned beside observations."""
        for part, value, kinds in (
            ("rewards", rewards, "biuf"),
            ("terminated", terminated, "b"),
            ("truncated", truncated, "b"),
        ):
            array = np.asarray(value)
            if array.shape != (num_envs,) or array.dtype.kind not in kinds:
                raise EnvError(
                    f"{self.name}: step() returned {part} that is {_describe(value)}; "
                    f"return one {'number' if 'f' in kinds else 'bool'} for each of {num_envs} environments"
                )


class GlobalRandomness:
    """Notices environments that draw from the process-wide generators, which no seed or state reaches."""

    __slots__ = ("_before", "_name", "found")

    def __init__(self, name: str) -> None:
        self.found = False
        self._name = name
        self._before: tuple[object, ...] = ()

    def begin(self) -> None:
        """Look at the generators before the environment is called."""
        self._before = _global_states()

    def end(self) -> None:
        """Look again after the call; warn and remember when something drew from them."""
        if self.found or _global_states() == self._before:
            return
        self.found = True
        warnings.warn(
            f"{self._name} draws from Python's or numpy's global random state: runs with it cannot be "
            "repeated, and its state cannot be saved; make it draw from self.np_random",
            RuntimeWarning,
            stacklevel=3,
        )


def _global_states() -> tuple[object, ...]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    inner = state["state"]
    return random.getstate(), inner["key"].tobytes(), inner["pos"], state["has_gauss"]


def _first_bad(values: Array) -> tuple[int, Array]:
    finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    index = int(np.argmin(finite))
    return index, values[index]


def _bad_values(row: Array) -> str:
    places = np.argwhere(~np.isfinite(row))
    first = tuple(int(part) for part in places[0])
    return f"{row[first]} at index {first}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {type(value).__name__}"
