"""The networks that tell skills apart by where they lead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.models.mlp import linear
from offbeat.models.team_spec import TeamSpec

HIDDEN_GAIN = math.sqrt(2)
LAST_GAIN = 0.01
"""Of the last layer: before training every skill is as likely as any other."""


class Discriminators(nn.Module):
    """Dense networks: one for the team skill, given a state, one for an agent's, given what it sees and that.

    Each has ``spec.discriminator_layers`` hidden layers; parameters are ``by_state.0.weight``, ...,
    ``by_obs.0.weight``, ... Inputs are taken as they are: a norm would hide how far off things are.
    """

    def __init__(self, spec: TeamSpec, generator: torch.Generator) -> None:
        super().__init__()
        self._num_team_skills = spec.num_team_skills
        self._activate = torch.tanh if spec.activation == "tanh" else torch.relu
        hidden = [spec.hidden] * spec.discriminator_layers
        self.by_state = _layers([spec.state_size, *hidden, spec.num_team_skills], generator)
        self.by_obs = _layers([spec.obs_size + spec.num_team_skills, *hidden, spec.num_skills], generator)

    def team(self, state: Tensor) -> Tensor:
        """Logits ``[M, nZ]`` of the team skill that led to states ``[M, S]``."""
        return self._run(self.by_state, state)

    def individual(self, obs: Tensor, team_skill: Tensor) -> Tensor:
        """Logits ``[M, nz]`` of the skill that led an agent to ``[M, O]`` under a team skill ``[M]``."""
        chosen = functional.one_hot(team_skill, self._num_team_skills).to(obs.dtype)
        return self._run(self.by_obs, torch.cat([obs, chosen], dim=-1))

    def _run(self, layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers[:-1]:
            x = self._activate(layer(x))
        logits: Tensor = layers[-1](x)
        return logits


def _layers(sizes: Sequence[int], generator: torch.Generator) -> nn.ModuleList:
    gains = [HIDDEN_GAIN] * (len(sizes) - 2) + [LAST_GAIN]
    pairs = zip(pairwise(sizes), gains, strict=True)
    return nn.ModuleList(linear(num_in, num_out, gain, generator) for (num_in, num_out), gain in pairs)
