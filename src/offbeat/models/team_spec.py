"""What the networks of a team are built from, and what they read. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.models.actions import Actions
from offbeat.models.spec import Activation
from offbeat.types import Array

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TeamSpec:
    """The networks of a team: everything collectors and learner need to build the same ones.

    ``actions`` are those of one agent. With ``num_team_skills`` and ``num_skills`` of 0 there is no
    hierarchy. ``layers`` counts the dense layers before and after the memory, ``blocks`` and ``heads`` those
    of the transformer that chooses skills, ``discriminator_layers`` the hidden ones of what tells skills
    apart. With ``agent_id`` an agent also sees which one it is.
    """

    num_agents: int
    obs_size: int
    state_size: int
    actions: Actions
    has_legal: bool = False
    hidden: int = 64
    layers: int = 1
    recurrent: bool = True
    activation: Activation = "relu"
    feature_norm: bool = True
    agent_id: bool = False
    num_team_skills: int = 0
    num_skills: int = 0
    blocks: int = 1
    heads: int = 1
    discriminator_layers: int = 2

    @property
    def memory_size(self) -> int:
        """Units carried from step to step; 0 without memory."""
        return self.hidden if self.recurrent else 0

    @property
    def num_actor_inputs(self) -> int:
        """Features that an agent's actor reads."""
        return self.obs_size + self.num_skills + (self.num_agents if self.agent_id else 0)

    @property
    def num_critic_inputs(self) -> int:
        """Features that the critic reads."""
        return self.state_size + self.num_team_skills

    def actor_inputs(self, obs: Floats, skills: Array | None) -> Floats:
        """What actors read ``[..., A, F]`` of observations ``[..., A, O]`` and skills ``[..., A]``."""
        parts = [obs]
        if self.num_skills:
            assert skills is not None
            parts.append(np.eye(self.num_skills, dtype=np.float32)[skills])
        if self.agent_id:
            eye = np.eye(self.num_agents, dtype=np.float32)
            parts.append(np.broadcast_to(eye, (*obs.shape[:-1], self.num_agents)))
        return np.concatenate(parts, axis=-1) if len(parts) > 1 else obs

    def critic_inputs(self, state: Floats, team_skills: Array | None) -> Floats:
        """What the critic reads ``[..., F]`` of states ``[..., S]`` and team skills ``[...]``."""
        if not self.num_team_skills:
            return state
        assert team_skills is not None
        return np.concatenate([state, np.eye(self.num_team_skills, dtype=np.float32)[team_skills]], axis=-1)
