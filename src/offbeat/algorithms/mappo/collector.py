"""Collects segments of teams: one network call a step for all agents of all environments. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.mappo.config import MAPPOConfig
from offbeat.envs.teams.team import Team, TeamStep, View
from offbeat.models.recurrent_actor import NumpyRecurrent
from offbeat.models.team_spec import TeamSpec
from offbeat.ops.exploration import IMPOSSIBLE
from offbeat.seeding import derive_seed
from offbeat.types import Array, ArraySpec, Episodes, Segment, StateTree, Ticket

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
PER_ENV = ("memory", "critic_memory", "begun_")
"""How the names of arrays begin that have one row for each environment, and none for each step."""
BATCH_SIZE = "batch_size"
"""Name under which a learner with a batch_rule publishes the size it wants."""


@dataclass(slots=True)
class Lane:
    """Where a collector's N environments stand between two segments. Only its collector writes it.

    ``obs`` ``[N, A, O]``, ``state`` ``[N, S]``, ``legal`` ``[N, A, K]``, ``alive`` ``[N, A]`` are what is
    seen; ``is_first`` ``[N]`` says that an episode begins. ``memory`` ``[N, A, H]`` and ``critic_memory``
    ``[N, H]`` are those after the last step; ``returns`` and ``lengths`` ``[N]`` count the episodes under
    way.
    """

    obs: Floats
    state: Floats
    legal: Bools
    alive: Bools
    is_first: Bools
    memory: Floats
    critic_memory: Floats
    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @classmethod
    def begin(cls, view: View, spec: TeamSpec) -> Self:
        """All environments at the start of an episode."""
        num_envs, units = len(view.obs), spec.memory_size
        return cls(
            obs=view.obs,
            state=view.state,
            legal=_legal(view, spec),
            alive=view.alive,
            is_first=np.ones(num_envs, np.bool_),
            memory=np.zeros((num_envs, spec.num_agents, units), np.float32),
            critic_memory=np.zeros((num_envs, units), np.float32),
            returns=np.zeros(num_envs),
            lengths=np.zeros(num_envs, np.int64),
        )

    def see(self, view: View, spec: TeamSpec) -> None:
        """Take over what is seen now."""
        self.obs, self.state, self.alive = view.obs, view.state, view.alive
        self.legal = _legal(view, spec)

    def state_dict(self) -> dict[str, Array]:
        """Copies of all arrays, by name."""
        return {field.name: getattr(self, field.name).copy() for field in fields(self)}


class SkillLayer(Protocol):
    """What a hierarchy adds to a collector: skills that agents keep for some steps."""

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights."""
        ...

    def begin(self, num_envs: int) -> None:
        """Start anew in all environments."""
        ...

    def start(self, ticket: Ticket, rng: np.random.Generator, out: Mapping[str, Array]) -> None:
        """A segment begins."""
        ...

    def active(self, t: int, num_steps: int) -> Bools:
        """Which environments ``[N]`` take step ``t`` of a segment of about ``num_steps``."""
        ...

    def choose(self, t: int, lane: Lane, active: Bools) -> NDArray[np.int64]:
        """Skills ``[N, 1 + A]`` in force at step ``t``, chosen anew where their time is over."""
        ...

    def after(self, t: int, result: TeamStep, active: Bools) -> None:
        """A step was taken."""
        ...

    def finish(self, num_steps: int) -> None:
        """The segment ends after so many steps."""
        ...

    def segment_spec(self, num_steps: int, num_envs: int) -> dict[str, ArraySpec]:
        """Arrays that are added to a segment."""
        ...

    def extra_steps(self) -> int:
        """How many steps longer than asked for a segment can get."""
        ...

    def state_dict(self) -> dict[str, Array]:
        """Everything the next segment depends on."""
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        ...


class TeamCollector:
    """Collects segments of about T steps of N environments with A agents each.

    A segment's arrays, all with leading ``[C, N]`` where C is the most steps it can have: ``obs`` and
    ``next_obs`` ``[A, O]``, ``state`` and ``next_state`` ``[S]``, ``legal`` ``[A, K]`` where the environment
    has it, ``alive`` ``[A]``, ``actions`` ``[A, ...]``, ``logp`` ``[A]``, ``rewards``, ``terminated``,
    ``truncated``, ``starts`` (the first step of an episode) and ``valid``; ``memory`` ``[N, A, H]`` and
    ``critic_memory`` ``[N, H]`` before the first step for recurrent networks. Values are the learner's
    business.
    """

    def __init__(
        self,
        config: MAPPOConfig,
        team: Team,
        spec: TeamSpec,
        *,
        total_envs: int,
        layer: SkillLayer | None = None,
    ) -> None:
        self._config = config
        self._team = team
        self._spec = spec
        self._total_envs = total_envs
        self._layer = layer
        self._actor = NumpyRecurrent(spec)
        self._critic = NumpyRecurrent(spec)
        self._lane: Lane | None = None
        self._num_steps = self._steps_of(config.sync_batch_size)

    def segment_spec(self) -> dict[str, ArraySpec]:
        """Names, shapes and dtypes of a segment's arrays."""
        largest = max(self._config.sync_batch_size, self._config.batch_size_end or 0)
        num_steps, num_envs = self._steps_of(largest), self._team.num_envs
        if self._layer is not None:
            num_steps += self._layer.extra_steps()
        specs = segment_spec(self._spec, num_steps, num_envs)
        return specs if self._layer is None else specs | self._layer.segment_spec(num_steps, num_envs)

    def collect(self, ticket: Ticket, weights: Mapping[str, Array]) -> Segment:
        """Collect one segment into arrays of its own."""
        out = {name: spec.empty() for name, spec in self.segment_spec().items()}
        return self.collect_into(ticket, weights, out)

    def collect_into(self, ticket: Ticket, weights: Mapping[str, Array], out: Mapping[str, Array]) -> Segment:
        """Collect one segment into ``out``."""
        self._load(weights)
        if self._lane is None:
            self._lane = Lane.begin(self._team.reset(derive_seed(ticket.seed, "reset")), self._spec)
            if self._layer is not None:
                self._layer.begin(self._team.num_envs)
        rng = np.random.Generator(np.random.SFC64(ticket.seed))
        episodes = self._roll(self._lane, ticket, rng, out)
        by_env = tuple(np.count_nonzero(out["valid"], axis=0).tolist())
        units = {"env_steps": sum(by_env), "agent_steps": int(np.count_nonzero(out["alive"][out["valid"]]))}
        return Segment(ticket, out, np.array([ticket.version]), units, episodes, steps_by_env=by_env)

    def state_dict(self) -> StateTree | None:
        """Environments and where they stand; {} before the first segment; None if they cannot be saved."""
        if self._lane is None:
            return {}
        team = self._team.state_dict()
        if team is None:
            return None
        skills = {} if self._layer is None else self._layer.state_dict()
        return {"team": team, "lane": self._lane.state_dict(), "skills": skills}

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        self._lane = None
        if state:
            self._team.load_state_dict(state["team"])
            self._lane = Lane(**{name: np.array(value) for name, value in state["lane"].items()})
            if self._layer is not None:
                self._layer.load_state_dict(state["skills"])

    def _load(self, weights: Mapping[str, Array]) -> None:
        self._actor.load(weights, "actor")
        if self._spec.recurrent:
            self._critic.load(weights, "critic")
        if self._layer is not None:
            self._layer.load(weights)
        wanted = weights.get(BATCH_SIZE)
        self._num_steps = self._steps_of(self._config.sync_batch_size if wanted is None else int(wanted))

    def _steps_of(self, batch_size: int) -> int:
        return self._config.steps_of(batch_size, self._total_envs, self._spec.num_agents)

    def _roll(
        self, lane: Lane, ticket: Ticket, rng: np.random.Generator, out: Mapping[str, Array]
    ) -> Episodes:
        """Step the environments until the segment is full."""
        spec, layer, head = self._spec, self._layer, self._spec.actions
        capacity, num_envs = out["rewards"].shape
        rows = num_envs * spec.num_agents
        noise = head.noise(rng, capacity, rows)
        if spec.recurrent:
            out["memory"][:], out["critic_memory"][:] = lane.memory, lane.critic_memory
        if layer is not None:
            layer.start(ticket, rng, out)
        everywhere, nowhere = np.ones(num_envs, np.bool_), np.zeros(num_envs, np.bool_)
        skills: NDArray[np.int64] | None = None
        finished = Finished()
        t = 0
        while t < capacity:
            if layer is not None:
                active = layer.active(t, self._num_steps)
            else:
                active = everywhere if t < self._num_steps else nowhere
            if not active.any():
                break
            if layer is not None:
                skills = layer.choose(t, lane, active)
            self._write_view(lane, t, out)
            outputs, memory = self._act(lane, skills)
            actions = head.sample(outputs, noise[t])
            out["logp"][t] = head.log_prob(outputs, actions).reshape(num_envs, -1)
            out["actions"][t] = actions.reshape(num_envs, spec.num_agents, *head.shape)
            to_env = head.to_env(actions, lane.obs.reshape(rows, -1))
            shape = (num_envs, spec.num_agents, *head.shape)
            result = self._team.step(to_env.reshape(shape), None if active.all() else active)
            self._write_result(result, active, t, out)
            if spec.recurrent:
                self._remember(lane, memory, skills, active)
            finished.add(lane, result, active)
            lane.is_first = np.where(active, result.terminated | result.truncated, lane.is_first)
            lane.see(result.view, spec)
            if layer is not None:
                layer.after(t, result, active)
            t += 1
        if layer is not None:
            layer.finish(t)
        for name, array in out.items():
            if not is_per_env(name):
                array[t:] = 0
        return finished.episodes()

    def _act(self, lane: Lane, skills: NDArray[np.int64] | None) -> tuple[Floats, Floats]:
        """Outputs ``[N A, P]`` of the actor, and its memory ``[N, A, H]`` after the step."""
        spec = self._spec
        inputs = spec.actor_inputs(lane.obs, None if skills is None else skills[:, 1:])
        rows = inputs.shape[0] * inputs.shape[1]
        memory = lane.memory * ~lane.is_first[:, None, None]
        outputs, memory = self._actor.step(inputs.reshape(rows, -1), memory.reshape(rows, -1))
        if spec.has_legal:
            outputs = np.where(lane.legal.reshape(rows, -1), outputs, IMPOSSIBLE)
        return outputs, memory.reshape(lane.memory.shape)

    def _remember(self, lane: Lane, memory: Floats, skills: NDArray[np.int64] | None, active: Bools) -> None:
        inputs = self._spec.critic_inputs(lane.state, None if skills is None else skills[:, 0])
        _, critic = self._critic.step(inputs, lane.critic_memory * ~lane.is_first[:, None])
        lane.memory = np.where(active[:, None, None], memory, lane.memory)
        lane.critic_memory = np.where(active[:, None], critic, lane.critic_memory)

    def _write_view(self, lane: Lane, t: int, out: Mapping[str, Array]) -> None:
        out["obs"][t], out["state"][t], out["alive"][t] = lane.obs, lane.state, lane.alive
        out["starts"][t] = lane.is_first
        if self._spec.has_legal:
            out["legal"][t] = lane.legal

    def _write_result(self, result: TeamStep, active: Bools, t: int, out: Mapping[str, Array]) -> None:
        out["next_obs"][t], out["next_state"][t] = result.next_obs, result.next_state
        out["rewards"][t] = result.rewards
        out["terminated"][t], out["truncated"][t], out["valid"][t] = (
            result.terminated,
            result.truncated,
            active,
        )


class Finished:
    """Collects the episodes that end while a segment is made."""

    def __init__(self) -> None:
        self._returns: list[float] = []
        self._lengths: list[int] = []

    def add(self, lane: Lane, result: TeamStep, active: Bools) -> None:
        """Move the lane's sums on by a step."""
        lane.returns += result.rewards
        lane.lengths += active
        ended = np.flatnonzero(result.terminated | result.truncated)
        if ended.size:
            self._returns += lane.returns[ended].tolist()
            self._lengths += lane.lengths[ended].tolist()
            lane.returns[ended], lane.lengths[ended] = 0.0, 0

    def episodes(self) -> Episodes:
        """All of them, in the order in which they ended."""
        return Episodes(tuple(self._returns), tuple(self._lengths))


def is_per_env(name: str) -> bool:
    """Whether an array of a segment has environments on its first axis, not steps."""
    return name.startswith(PER_ENV)


def segment_spec(spec: TeamSpec, num_steps: int, num_envs: int) -> dict[str, ArraySpec]:
    """Arrays of a segment of a team without skills."""
    lead, agents = (num_steps, num_envs), (num_steps, num_envs, spec.num_agents)
    specs = {
        **{name: ArraySpec((*agents, spec.obs_size), "float32") for name in ("obs", "next_obs")},
        **{name: ArraySpec((*lead, spec.state_size), "float32") for name in ("state", "next_state")},
        "actions": ArraySpec((*agents, *spec.actions.shape), spec.actions.dtype),
        "logp": ArraySpec(agents, "float32"),
        "alive": ArraySpec(agents, "bool"),
        "rewards": ArraySpec(lead, "float32"),
        **{name: ArraySpec(lead, "bool") for name in ("terminated", "truncated", "starts", "valid")},
    }
    if spec.has_legal:
        specs["legal"] = ArraySpec((*agents, spec.actions.num_outputs), "bool")
    if spec.recurrent:
        specs["memory"] = ArraySpec((num_envs, spec.num_agents, spec.memory_size), "float32")
        specs["critic_memory"] = ArraySpec((num_envs, spec.memory_size), "float32")
    return specs


def _legal(view: View, spec: TeamSpec) -> Bools:
    if view.legal is None:
        return np.zeros((len(view.obs), spec.num_agents, 0), np.bool_)
    return view.legal
