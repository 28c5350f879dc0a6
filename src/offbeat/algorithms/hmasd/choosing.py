"""Skills while a team is judged or used: chosen anew when their time is over, and watched. No torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.mappo.policy import TeamPolicy
from offbeat.envs.teams import TeamStep
from offbeat.models.coordinator_actor import NumpyCoordinator
from offbeat.models.discriminators_actor import NumpyDiscriminators
from offbeat.models.team_spec import TeamSpec
from offbeat.types import Array, Metrics

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class SkillChooser:
    """Keeps the skills of N teams for ``interval`` steps; has nothing to do with those of a collector."""

    def __init__(self, spec: TeamSpec, interval: int) -> None:
        self._spec = spec
        self._interval = interval
        self._coordinator = NumpyCoordinator(spec)
        self.begin(0)

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights."""
        self._coordinator.load(weights)

    def begin(self, num_envs: int) -> None:
        """Start anew in all environments."""
        self._skills = np.zeros((num_envs, 1 + self._spec.num_agents), np.int64)
        self._timer = np.full(num_envs, self._interval)

    def choose(
        self, state: Floats, obs: Floats, starts: Bools, rng: np.random.Generator | None
    ) -> tuple[Ints, Bools]:
        """Skills ``[N, 1 + A]`` for the next step, and where they are new."""
        is_new = starts | (self._timer >= self._interval)
        at = np.flatnonzero(is_new)
        if at.size:
            uniform = None if rng is None else rng.random((at.size, self._skills.shape[1]), dtype=np.float32)
            self._skills[at], _ = self._coordinator.choose(state[at], obs[at], uniform)
            self._timer[at] = 0
        self._timer += 1
        return self._skills, is_new


class SkillWitness:
    """Measures how skills are used, how much they differ, and how well they are told apart.

    ``eval/skill_diversity`` is the mean distance between where different skills take an agent, in units of
    how far one skill's own places lie apart; 0 when all lead to the same place.
    """

    def __init__(self, spec: TeamSpec) -> None:
        self._spec = spec
        self._discriminators = NumpyDiscriminators(spec)
        self._clear()

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights, and forget what was seen."""
        self._discriminators.load(weights)
        self._clear()

    def _clear(self) -> None:
        spec = self._spec
        self._team_counts = np.zeros(spec.num_team_skills)
        self._counts = np.zeros(spec.num_skills)
        self._sums = np.zeros((spec.num_skills, spec.obs_size))
        self._squares = np.zeros((spec.num_skills, spec.obs_size))
        self._right = np.zeros(2)
        self._judged = np.zeros(2)

    def see(self, policy: TeamPolicy, alive: Bools, result: TeamStep, counts: Bools) -> None:
        """Note the skills in force and what the step led to; agents that had left have no part in it."""
        assert policy.skills is not None
        skills, obs, state = policy.skills[counts], result.next_obs[counts], result.next_state[counts]
        acted = alive[counts]
        own, rows = skills[:, 1:][acted], obs[acted]
        self._team_counts += np.bincount(skills[:, 0], minlength=len(self._team_counts))
        self._counts += np.bincount(own, minlength=len(self._counts))
        np.add.at(self._sums, own, rows)
        np.add.at(self._squares, own, np.square(rows))
        team, individual = self._discriminators.guess(state, obs, skills[:, 0])
        self._right += (team == skills[:, 0]).sum(), (individual[acted] == own).sum()
        self._judged += team.size, own.size

    def metrics(self) -> Metrics:
        """Usage, diversity and accuracy over all judged steps."""
        right = self._right / np.maximum(self._judged, 1)
        return {
            "eval/team_skill_evenness": evenness(self._team_counts),
            "eval/skill_evenness": evenness(self._counts),
            "eval/skill_diversity": self._diversity(),
            "eval/team_discriminator_accuracy": float(right[0]),
            "eval/skill_discriminator_accuracy": float(right[1]),
            **shares_of("eval/team_skill", self._team_counts),
            **shares_of("eval/skill", self._counts),
        }

    def _diversity(self) -> float:
        used = self._counts > 0
        if np.count_nonzero(used) < 2:
            return 0.0
        counts = self._counts[used, None]
        means = self._sums[used] / counts
        spread = np.sqrt(np.maximum(self._squares[used] / counts - np.square(means), 0).sum(-1).mean())
        apart = np.sqrt(np.square(means[:, None] - means[None]).sum(-1))
        pairs = apart[np.triu_indices(len(means), 1)]
        return float(pairs.mean() / (spread + 1e-6))


def evenness(counts: NDArray[np.float64]) -> float:
    """Entropy of shares over that of equal ones: 1 for all alike, 0 for always one."""
    total = counts.sum()
    if len(counts) < 2 or not total:
        return 1.0
    shares = counts[counts > 0] / total
    return float(-(shares * np.log(shares)).sum() / np.log(len(counts)))


def shares_of(name: str, counts: NDArray[np.float64]) -> Metrics:
    """Share of each skill, by name and number."""
    shares = counts / max(counts.sum(), 1)
    return {f"{name}_{index}_share": float(share) for index, share in enumerate(shares)}
