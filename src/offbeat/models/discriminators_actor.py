"""A numpy mirror of the networks that tell skills apart. No torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from offbeat.models.recurrent_actor import Layer, activated, affine, layers
from offbeat.models.team_spec import TeamSpec
from offbeat.ops.statistics import log_softmax_at
from offbeat.types import Array

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
PREFIX = "discriminators"


class NumpyDiscriminators:
    """Judges with the weights of ``Discriminators``, by their parameter names."""

    def __init__(self, spec: TeamSpec) -> None:
        self._spec = spec
        self._by_state: list[Layer] = []
        self._by_obs: list[Layer] = []

    def load(self, weights: Mapping[str, Array]) -> None:
        """Copy the weights whose names begin with ``discriminators.``."""
        self._by_state = layers(weights, f"{PREFIX}.by_state", np.float32)
        self._by_obs = layers(weights, f"{PREFIX}.by_obs", np.float32)

    def log_q(self, next_state: Floats, next_obs: Floats, skills: Array) -> tuple[Floats, Floats]:
        """Log-probability of the skills that were in force, by what they led to.

        Args:
            next_state: ``[M, S]``.
            next_obs: ``[M, A, O]``.
            skills: ``[M, 1 + A]``, the team's first.

        Returns:
            That of the team skill ``[M]``, and those of the agents' skills ``[M, A]``.
        """
        team, individual = self._logits(next_state, next_obs, skills[:, 0])
        return log_softmax_at(team, skills[:, 0]), log_softmax_at(individual, skills[:, 1:])

    def guess(self, next_state: Floats, next_obs: Floats, team_skill: Array) -> tuple[Ints, Ints]:
        """The likeliest team skill ``[M]``, and the likeliest skill of each agent ``[M, A]``; see ``log_q``.

        ``team_skill`` ``[M]`` is the true one, which the agents' skills are guessed with.
        """
        team, individual = self._logits(next_state, next_obs, team_skill)
        return team.argmax(-1), individual.argmax(-1)

    def _logits(self, state: Floats, obs: Floats, team_skill: Array) -> tuple[Floats, Floats]:
        chosen = np.eye(self._spec.num_team_skills, dtype=np.float32)[team_skill]
        shape = (*obs.shape[:2], chosen.shape[-1])
        seen = np.concatenate([obs, np.broadcast_to(chosen[:, None], shape)], axis=-1)
        rows = self._run(self._by_obs, seen.reshape(len(obs) * obs.shape[1], -1))
        return self._run(self._by_state, state), rows.reshape(*obs.shape[:2], -1)

    def _run(self, dense: list[Layer], x: Floats) -> Floats:
        for layer in dense[:-1]:
            x = activated(affine(x, layer), self._spec.activation)
        return affine(x, dense[-1])
