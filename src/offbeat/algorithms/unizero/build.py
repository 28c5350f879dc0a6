"""UniZero's own parts. No torch until they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.algorithms.base import Roles
from offbeat.algorithms.muzero.fitting import Fit
from offbeat.algorithms.muzero.parts import Parts, make_roles
from offbeat.algorithms.unizero.config import unizero_config
from offbeat.config.models import RunConfig
from offbeat.roles import Learner

if TYPE_CHECKING:
    from offbeat.algorithms.muzero.planning import Planner


def _planner(config: RunConfig, fit: Fit, num_trees: int, lane: int | None) -> Planner:
    import torch

    from offbeat.algorithms.muzero.planning import ready_device
    from offbeat.algorithms.unizero.learner import transformer_spec
    from offbeat.algorithms.unizero.planning import UniZeroPlanner
    from offbeat.models.unizero import UniZeroNetwork

    algorithm = unizero_config(config)
    transformer = transformer_spec(algorithm)
    network = UniZeroNetwork(fit.spec, transformer, torch.Generator())
    wanted = algorithm.search_config(two_player=fit.two_player, is_eval=lane is None)
    return UniZeroPlanner(
        network,
        fit,
        transformer,
        wanted,
        num_trees,
        algorithm.window_tokens,
        ready_device(config, lane or 0, is_eval=lane is None),
        how=algorithm.network.computing,
    )


def _learner(config: RunConfig, fit: Fit) -> Learner:
    from offbeat.algorithms.unizero.learner import make_learner

    return make_learner(config, fit)


PARTS = Parts(_planner, _learner)


def build(config: RunConfig) -> Roles:
    """Make the roles of a run of UniZero."""
    return make_roles(config, PARTS)
