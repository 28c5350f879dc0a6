"""One environment with several agents, whatever its kind, as `LoopTeam` steps it.

Two kinds are known: Gymnasium environments whose spaces are Tuples with a part for each agent, and parallel
environments as PettingZoo defines them, which are known by their methods: PettingZoo itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.envs.checks import check_action_space
from offbeat.envs.teams.team import Bools, Floats
from offbeat.errors import EnvError
from offbeat.types import Array

AnySpace = gymnasium.Space[Any]
MASK = "action_mask"
"""Name under which PettingZoo's environments say, in infos or observations, which actions are legal."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where one environment writes what is seen: views of a team's arrays.

    ``obs`` ``[A, O]``, ``state`` ``[S]``, ``legal`` ``[A, K]`` or None, ``alive`` ``[A]``.
    """

    obs: Floats
    state: Floats
    legal: Bools | None
    alive: Bools


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step of one environment led to, apart from what is seen."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool = False


class Single(Protocol):
    """One environment with A agents.

    ``env`` is what holds its state. ``has_success`` says whether outcomes tell success.
    """

    env: Any
    num_agents: int
    obs_size: int
    state_size: int
    single_action_space: AnySpace
    has_legal: bool
    has_success: bool

    def reset(self, seed: int | None, rows: Rows) -> None:
        """Start an episode."""
        ...

    def step(self, actions: Sequence[Any], rows: Rows) -> Outcome:
        """Take one action of each agent, those of agents that have left are ignored."""
        ...

    def close(self) -> None:
        """Free what the environment holds."""
        ...


def is_parallel(env: object) -> bool:
    """Whether an object is a parallel environment in PettingZoo's sense."""
    has_spaces = callable(getattr(env, "observation_space", None)) and callable(
        getattr(env, "action_space", None)
    )
    return has_spaces and hasattr(env, "possible_agents") and not is_turn_based(env)


def is_turn_based(env: object) -> bool:
    """Whether an object is an environment of PettingZoo's other kind, where agents act in turns."""
    return hasattr(env, "possible_agents") and callable(getattr(env, "agent_iter", None))


# ---------------------------------------------------------------- spaces


class Eye:
    """Writes the observations of one agent as flat float32 features; ``size`` counts them."""

    def __init__(self, space: AnySpace) -> None:
        self.has_mask = False
        self._space = space
        if isinstance(space, gymnasium.spaces.Dict) and set(space) == {"observation", MASK}:
            self.has_mask = True
            self._space = space["observation"]
        self._shape = self._space.shape if isinstance(self._space, gymnasium.spaces.Box) else None
        try:
            self.size = int(gymnasium.spaces.flatdim(self._space))
        except (NotImplementedError, ValueError) as error:
            raise EnvError(
                f"observations in {self._space} have no fixed number of features; "
                "wrap the environment so that agents see Box or Discrete observations"
            ) from error

    def write(self, seen: Any, row: Floats) -> None:
        """Put an observation into the front of a row ``[O]``; the rest stays as it is."""
        if self.has_mask:
            seen = seen["observation"]
        if self._shape is None:
            flat: Any = gymnasium.spaces.flatten(self._space, seen)
            row[: self.size] = flat
            return
        array = np.asarray(seen)
        if array.shape != self._shape:
            raise EnvError(
                f"an observation of shape {array.shape} was returned, but its space is {self._space}; "
                "correct one of the two"
            )
        row[: self.size] = array.ravel()


class Hands:
    """The actions of all agents, brought into one space ``space``.

    Discrete actions may differ in number: ``legal`` ``[A, K]`` says which each agent has, None when all have
    the same.
    """

    def __init__(self, spaces: Sequence[AnySpace], names: Sequence[object]) -> None:
        for name, space in zip(names, spaces, strict=True):
            check_action_space(f"agent {name}", space)
        self.legal: Bools | None = None
        self._names = names
        self._starts = [0] * len(spaces)
        discrete = [space for space in spaces if isinstance(space, gymnasium.spaces.Discrete)]
        self._is_discrete = len(discrete) == len(spaces)
        if not self._is_discrete:
            self.space = _only_one(spaces)
            return
        counts = np.array([int(space.n) for space in discrete])
        self._starts = [int(space.start) for space in discrete]
        self.space = gymnasium.spaces.Discrete(int(counts.max()))
        self._counts = counts.tolist()
        if counts.min() < counts.max():
            self.legal = np.arange(counts.max()) < counts[:, None]

    def check_masks(self, has_masks: bool) -> bool:
        """Whether there is anything to say about what is legal; masks are for discrete actions only."""
        if has_masks and not self._is_discrete:
            raise EnvError(
                f"it has an {MASK}, but its actions are {self.space}; only Discrete ones have masks"
            )
        return has_masks or self.legal is not None

    def allow(self, agent: int, mask: Any, legal: Bools) -> None:
        """Fill in which actions ``[K]`` an agent may take: those it has, and of these those of a mask."""
        legal[:] = True if self.legal is None else self.legal[agent]
        if mask is None:
            return
        allowed: NDArray[np.bool_] = np.asarray(mask, np.bool_)
        legal[: len(allowed)] &= allowed
        if not legal.any():
            raise EnvError(
                f"the {MASK} of agent {self._names[agent]} allows nothing; an agent that is still there "
                "needs at least one legal action"
            )

    def give(self, agent: int, action: Any) -> Any:
        """An agent's action as its environment takes it; never a view, environments may keep it."""
        if not self._is_discrete:
            return np.array(action, self.space.dtype)
        if not 0 <= action < self._counts[agent]:
            raise EnvError(
                f"agent {self._names[agent]} has the actions 0 to {self._counts[agent] - 1}, not {action}; "
                "choose among those that are legal"
            )
        return action + self._starts[agent]


def _only_one(spaces: Sequence[AnySpace]) -> AnySpace:
    if any(space != spaces[0] for space in spaces):
        raise EnvError(
            f"agents must have the same actions, or Discrete ones, these have {list(spaces)}; "
            "wrap the environment so that it takes the largest for all of them"
        )
    return spaces[0]


# ---------------------------------------------------------------- Gymnasium with Tuple spaces


@dataclass(frozen=True, slots=True)
class _Known:
    """An environment that says `terminated` where only its time is up; ``is_solved`` tells a true end."""

    is_solved: Callable[[Any], bool]
    has_success: bool


_KNOWN = {
    ("lbforaging", "ForagingEnv"): _Known(lambda env: not env.field.any(), has_success=True),
    ("rware", "Warehouse"): _Known(lambda env: False, has_success=False),
}


class TupleSingle:
    """A Gymnasium environment whose observation and action spaces are Tuples with a part for each agent.

    Rewards may be one number or one for each agent, which are summed. A ``state()`` of the environment gives
    the state, else it is all observations side by side. Success is what infos call ``is_success``, and that
    all food is gone in lbforaging, whose time limit counts as truncation here, as does that of rware.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        seen, acted = env.observation_space, env.action_space
        if not (isinstance(seen, gymnasium.spaces.Tuple) and isinstance(acted, gymnasium.spaces.Tuple)):
            raise EnvError(f"it has one agent: it sees {seen} and acts in {acted}")
        if len(seen) != len(acted) or len(seen) == 0:
            raise EnvError(f"it has observations of {len(seen)} agents and actions of {len(acted)}")
        self.env: Any = env
        self.num_agents = len(seen)
        self._eyes = [Eye(space) for space in seen]
        self._hands = Hands(acted.spaces, range(self.num_agents))
        self._plain: Any = env.unwrapped
        self._known = _KNOWN.get((type(self._plain).__module__.partition(".")[0], type(self._plain).__name__))
        _, info = env.reset(seed=0)
        state = _state_of(self._plain)
        self._has_state = state is not None
        self.obs_size = max(eye.size for eye in self._eyes)
        self.state_size = self.num_agents * self.obs_size if state is None else state.size
        self.single_action_space = self._hands.space
        self.has_legal = self._hands.check_masks(any(eye.has_mask for eye in self._eyes))
        self.has_success = self._known.has_success if self._known else "is_success" in info

    def reset(self, seed: int | None, rows: Rows) -> None:
        """Start an episode."""
        seen, _ = self.env.reset(seed=seed)
        rows.alive[:] = True
        self._write(seen, rows)

    def step(self, actions: Sequence[Any], rows: Rows) -> Outcome:
        """Take one action of each agent."""
        given = tuple(self._hands.give(agent, action) for agent, action in enumerate(actions))
        seen, rewards, ended, cut_off, info = _five(self.env.step(given))
        self._write(seen, rows)
        terminated, truncated = _ends(ended, cut_off)
        if self._known is None:
            return Outcome(_total(rewards), terminated, truncated, bool(info.get("is_success", False)))
        is_solved = terminated and self._known.is_solved(self._plain)
        return Outcome(_total(rewards), is_solved, truncated or (terminated and not is_solved), is_solved)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _write(self, seen: Any, rows: Rows) -> None:
        if len(seen) != self.num_agents:
            raise EnvError(f"observations of {len(seen)} agents were returned, it has {self.num_agents}")
        for agent, (eye, part) in enumerate(zip(self._eyes, seen, strict=True)):
            eye.write(part, rows.obs[agent])
            if rows.legal is not None:
                self._hands.allow(agent, part[MASK] if eye.has_mask else None, rows.legal[agent])
        rows.state[:] = np.ravel(self._plain.state()) if self._has_state else rows.obs.ravel()


# ---------------------------------------------------------------- PettingZoo's parallel environments


class ParallelSingle:
    """A parallel environment in PettingZoo's sense.

    Its rewards are summed over agents. An agent that leaves sees its last observation, and zeros from then
    on; the episode ends with the last agent, and counts as truncated when the time of one that was still
    there was up. ``state()`` gives the
    state where it works, else it is all observations side by side. An ``action_mask`` in infos, or beside an
    ``observation``, says which actions are legal.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._agents = list(env.possible_agents)
        if not self._agents:
            raise EnvError("its possible_agents are empty; name every agent that may take part")
        self.num_agents = len(self._agents)
        self._eyes = [Eye(env.observation_space(agent)) for agent in self._agents]
        self._hands = Hands([env.action_space(agent) for agent in self._agents], self._agents)
        _, infos = env.reset(seed=0)
        state = _state_of(env)
        self._has_state = state is not None
        self.obs_size = max(eye.size for eye in self._eyes)
        self.state_size = self.num_agents * self.obs_size if state is None else state.size
        self.single_action_space = self._hands.space
        has_masks = any(eye.has_mask for eye in self._eyes)
        has_masks = has_masks or any(MASK in (infos.get(agent) or {}) for agent in self._agents)
        self.has_legal = self._hands.check_masks(has_masks)
        self.has_success = False

    def reset(self, seed: int | None, rows: Rows) -> None:
        """Start an episode."""
        seen, infos = self.env.reset(seed=seed)
        self._write(seen, infos, self.env.agents, self.env.agents, rows)

    def step(self, actions: Sequence[Any], rows: Rows) -> Outcome:
        """Take one action of each agent that is still there."""
        there = set(self.env.agents)
        given = {
            name: self._hands.give(agent, actions[agent])
            for agent, name in enumerate(self._agents)
            if name in there
        }
        seen, rewards, ended, cut_off, infos = _five(self.env.step(given))
        is_over = not self.env.agents or all(ended.get(name) or cut_off.get(name) for name in given)
        # At an episode's end, those who were there until then count as still there.
        self._write(seen, infos, given, given if is_over else self.env.agents, rows)
        is_late = any(cut_off.get(name) for name in given)
        return Outcome(_total(list(rewards.values())), is_over and not is_late, is_over and is_late)

    def close(self) -> None:
        """Close the environment, if it can be."""
        if callable(getattr(self.env, "close", None)):
            self.env.close()

    def _write(
        self, seen: Mapping[Any, Any], infos: Mapping[Any, Any], shown: Any, there: Any, rows: Rows
    ) -> None:
        """Write what the agents ``shown`` see; those ``there`` are alive."""
        rows.obs[:] = 0.0
        for agent, name in enumerate(self._agents):
            rows.alive[agent] = is_there = name in there
            if name in shown and (is_there or name in seen):
                self._eyes[agent].write(seen[name], rows.obs[agent])
            if rows.legal is not None:
                mask = self._mask(agent, seen[name], infos.get(name) or {}) if is_there else None
                self._hands.allow(agent, mask, rows.legal[agent])
        rows.state[:] = np.ravel(self.env.state()) if self._has_state else rows.obs.ravel()

    def _mask(self, agent: int, seen: Any, info: Mapping[str, Any]) -> Any:
        return seen[MASK] if self._eyes[agent].has_mask else info.get(MASK)


# ---------------------------------------------------------------- what environments return


def _state_of(env: Any) -> Array | None:
    """What ``state()`` of an environment that was reset returns, if it has one that works."""
    if not callable(getattr(env, "state", None)):
        return None
    try:
        state = np.asarray(env.state())
    except Exception:
        return None
    return state if state.dtype.kind in "biuf" and state.size else None


def _total(rewards: Any) -> float:
    return float(np.sum(rewards))


def _ends(terminated: Any, truncated: Any) -> tuple[bool, bool]:
    """Whether an episode ended, and whether it was cut off, from flags that may be one for each agent.

    It is over when it is for every agent, and cut off when the time of one of them was up.
    """
    ended, cut_off = np.atleast_1d(terminated), np.atleast_1d(truncated)
    is_over, is_late = bool(np.all(ended | cut_off)), bool(cut_off.any())
    return is_over and not is_late, is_over and is_late


def _five(returned: Any) -> tuple[Any, Any, Any, Any, Any]:
    """What ``step()`` returned, if it is what it has to be."""
    if not isinstance(returned, tuple) or len(returned) != 5:
        what = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise EnvError(
            f"step() returned {what}; it has to return five:"
            " observations, rewards, terminated, truncated, info"
        )
    return returned
