"""The skills of a collector's environments: who has which, since when, and what becomes of it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.hmasd.config import HMASDConfig
from offbeat.algorithms.mappo.collector import Lane
from offbeat.envs.teams.team import TeamStep
from offbeat.models.coordinator_actor import NumpyCoordinator
from offbeat.models.discriminators_actor import NumpyDiscriminators
from offbeat.models.team_spec import TeamSpec
from offbeat.ops.skills import Reason
from offbeat.types import Array, ArraySpec, StateTree, Ticket

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
TO_CHOOSE = -1
NO_VERSION = -1
"""Version of a period that was not begun before the segment, and of a verdict that is yet to be given."""


@dataclass(slots=True)
class SkillState:
    """Skills of N environments: one record, written by `Skills` alone.

    ``skills`` ``[N, 1 + A]`` are in force, ``timer`` ``[N]`` counts the steps since they were chosen (-1:
    they are to be chosen), ``version`` ``[N]`` chose them. ``state``, ``obs`` and ``logp`` are those of the
    choice, ``rewards`` ``[N]`` what was earned since.
    """

    skills: Ints
    timer: Ints
    version: Ints
    state: Floats
    obs: Floats
    logp: Floats
    rewards: NDArray[np.float64]

    @classmethod
    def begin(cls, num_envs: int, spec: TeamSpec) -> Self:
        """Nothing chosen yet."""
        choices = (num_envs, 1 + spec.num_agents)
        return cls(
            skills=np.zeros(choices, np.int64),
            timer=np.full(num_envs, TO_CHOOSE),
            version=np.zeros(num_envs, np.int64),
            state=np.zeros((num_envs, spec.state_size), np.float32),
            obs=np.zeros((num_envs, spec.num_agents, spec.obs_size), np.float32),
            logp=np.zeros(choices, np.float32),
            rewards=np.zeros(num_envs),
        )

    @property
    def is_open(self) -> Bools:
        """Where a period is under way, ``[N]``."""
        return self.timer > 0

    def state_dict(self) -> dict[str, Array]:
        """Copies of all arrays, by name."""
        return {field.name: getattr(self, field.name).copy() for field in fields(self)}


class Skills:
    """Chooses skills when their time is over, and writes down what the high level learns from.

    Arrays it adds to a segment, with leading ``[C, N]``: ``skills`` ``[1 + A]`` in force, ``selected`` (they
    were chosen before this step), ``skill_logp`` ``[1 + A]`` of the choice, ``reason`` why their period ended
    with this step (`Reason`), ``log_q_team`` and ``log_q_skill`` ``[A]`` of the discriminators, and
    ``stamps`` ``[3]``: the versions of who chose the skills, of who acted and of who judged. ``begun_...``
    ``[N, ...]`` describe periods that were under way when the segment began.
    """

    def __init__(self, config: HMASDConfig, spec: TeamSpec) -> None:
        self._config = config
        self._spec = spec
        self._coordinator = NumpyCoordinator(spec)
        self._discriminators = NumpyDiscriminators(spec)
        self._now: SkillState
        self._version = 0
        self._out: Mapping[str, Array]
        self._uniform: Floats

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights."""
        self._coordinator.load(weights)
        self._discriminators.load(weights)

    def begin(self, num_envs: int) -> None:
        """Start anew in all environments."""
        self._now = SkillState.begin(num_envs, self._spec)

    def start(self, ticket: Ticket, rng: np.random.Generator, out: Mapping[str, Array]) -> None:
        """Note what is under way, and draw the chances of all choices."""
        self._version, self._out, now = ticket.version, out, self._now
        self._uniform = rng.random(out["skills"].shape, dtype=np.float32)
        for name in ("skills", "state", "obs", "logp", "rewards"):
            out[f"begun_{name}"][:] = getattr(now, name)
        out["begun_version"][:] = np.where(now.is_open, now.version, NO_VERSION)

    def active(self, t: int, num_steps: int) -> Bools:
        """Every environment for ``num_steps`` steps; with ``straddle: align`` until its period is over."""
        if t < num_steps:
            return np.ones(len(self._now.timer), np.bool_)
        if self._config.straddle == "align":
            return self._now.is_open.copy()
        return np.zeros(len(self._now.timer), np.bool_)

    def choose(self, t: int, lane: Lane, active: Bools) -> Ints:
        """Skills ``[N, 1 + A]`` in force at step ``t``."""
        now, out = self._now, self._out
        due = active & (now.timer < 0)
        out["selected"][t], out["skill_logp"][t] = due, 0
        if due.any():
            at = np.flatnonzero(due)
            now.state[at], now.obs[at] = lane.state[at], lane.obs[at]
            now.skills[at], now.logp[at] = self._coordinator.choose(
                lane.state[at], lane.obs[at], self._uniform[t, at]
            )
            now.timer[at], now.version[at], now.rewards[at] = 0, self._version, 0
            out["skill_logp"][t, at] = now.logp[at]
            if self._config.reset_memory == "skill" and self._spec.recurrent:
                lane.memory[at], lane.critic_memory[at] = 0, 0
        out["skills"][t] = now.skills
        out["stamps"][t, :, 0] = now.version
        out["stamps"][t, :, 1] = self._version
        out["stamps"][t, :, 2] = self._version if self._config.intrinsic == "stamped" else NO_VERSION
        return now.skills

    def after(self, t: int, result: TeamStep, active: Bools) -> None:
        """Count the step, and end the periods that are over."""
        now = self._now
        now.timer[active] += 1
        now.rewards += result.rewards
        is_over = active & (now.timer >= self._config.skill_interval)
        reason = np.where(is_over, Reason.PERIOD_END, Reason.GOES_ON)
        reason = np.where(result.truncated, Reason.TRUNCATED, reason)
        reason = np.where(result.terminated, Reason.TERMINATED, reason)
        self._out["reason"][t] = reason
        now.timer[reason != Reason.GOES_ON] = TO_CHOOSE

    def finish(self, num_steps: int) -> None:
        """End what a cut ends, and let the discriminators judge all steps at once."""
        now, out = self._now, self._out
        if self._config.straddle == "cut":
            out["reason"][num_steps - 1, now.is_open] = Reason.FORCED
            now.timer[now.is_open] = TO_CHOOSE
        if self._config.intrinsic == "stamped":
            shape = (num_steps, len(now.timer))
            rows = [
                out[name][:num_steps].reshape(shape[0] * shape[1], *out[name].shape[2:])
                for name in ("next_state", "next_obs", "skills")
            ]
            team, skill = self._discriminators.log_q(*rows)
            out["log_q_team"][:num_steps] = team.reshape(shape)
            out["log_q_skill"][:num_steps] = skill.reshape(*shape, -1)
        else:
            out["log_q_team"][:], out["log_q_skill"][:] = 0, 0

    def segment_spec(self, num_steps: int, num_envs: int) -> dict[str, ArraySpec]:
        """Arrays that are added to a segment."""
        spec, lead, choices = self._spec, (num_steps, num_envs), 1 + self._spec.num_agents
        return {
            "skills": ArraySpec((*lead, choices), "int64"),
            "selected": ArraySpec(lead, "bool"),
            "skill_logp": ArraySpec((*lead, choices), "float32"),
            "reason": ArraySpec(lead, "int8"),
            "log_q_team": ArraySpec(lead, "float32"),
            "log_q_skill": ArraySpec((*lead, spec.num_agents), "float32"),
            "stamps": ArraySpec((*lead, 3), "int64"),
            "begun_skills": ArraySpec((num_envs, choices), "int64"),
            "begun_state": ArraySpec((num_envs, spec.state_size), "float32"),
            "begun_obs": ArraySpec((num_envs, spec.num_agents, spec.obs_size), "float32"),
            "begun_logp": ArraySpec((num_envs, choices), "float32"),
            "begun_rewards": ArraySpec((num_envs,), "float64"),
            "begun_version": ArraySpec((num_envs,), "int64"),
        }

    def extra_steps(self) -> int:
        """With ``straddle: align`` a period that has just begun is waited for."""
        return self._config.skill_interval - 1 if self._config.straddle == "align" else 0

    def state_dict(self) -> dict[str, Array]:
        """Everything the next segment depends on."""
        return self._now.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        self._now = SkillState(**{name: np.array(value) for name, value in state.items()})
