"""MuZero's own parts. No torch until they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.algorithms.base import Roles
from offbeat.algorithms.muzero.config import planning_config
from offbeat.algorithms.muzero.fitting import Fit
from offbeat.algorithms.muzero.parts import Parts, make_roles
from offbeat.config.models import RunConfig
from offbeat.roles import Learner

if TYPE_CHECKING:
    from offbeat.algorithms.muzero.planning import Planner


def _planner(config: RunConfig, fit: Fit, num_trees: int, lane: int | None) -> Planner:
    import torch

    from offbeat.algorithms.muzero.planning import MuZeroPlanner, ready_device
    from offbeat.models.muzero import MuZeroNetwork

    algorithm, network = planning_config(config), MuZeroNetwork(fit.spec, torch.Generator())
    wanted = algorithm.search_config(two_player=fit.two_player, is_eval=lane is None)
    device = ready_device(config, lane or 0, is_eval=lane is None)
    return MuZeroPlanner(network, fit, wanted, num_trees, device, how=algorithm.network.computing)


def _learner(config: RunConfig, fit: Fit) -> Learner:
    from offbeat.algorithms.muzero.learner import make_learner

    return make_learner(config, fit)


PARTS = Parts(_planner, _learner)


def build(config: RunConfig) -> Roles:
    """Make the roles of a run of MuZero."""
    return make_roles(config, PARTS)
