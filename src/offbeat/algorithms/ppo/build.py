"""From a run's configuration to PPO's roles. No torch until the learner is made."""

from __future__ import annotations

from functools import partial

from offbeat.algorithms.base import Roles
from offbeat.algorithms.ppo.augment import make_augment
from offbeat.algorithms.ppo.collector import make_collector
from offbeat.algorithms.ppo.config import ppo_config
from offbeat.algorithms.ppo.evaluator import make_evaluator
from offbeat.algorithms.ppo.policy import environment_spec, make_policy
from offbeat.config.models import RunConfig
from offbeat.models.spec import device_for
from offbeat.roles import Learner, PerWorker, Ranks


def _make_learner(config: RunConfig, ranks: Ranks) -> Learner:
    """Make the learner inside its process; only then is torch imported."""
    from offbeat.algorithms.ppo.learner import make_learner

    return make_learner(config, ranks)


def check(config: RunConfig) -> None:
    """Make one environment and fit the network to it, so that a mistake is found before anything runs."""
    device_for(environment_spec(config), config.trainer.device, config.learner.num_ranks)
    make_augment(config)


def startup_notes(config: RunConfig) -> dict[str, str]:
    """A learning rate with which the network may learn nothing."""
    remark = ppo_config(config).lr_remark(environment_spec(config).kind)
    return {} if remark is None else {"learning rate": remark}


def build(config: RunConfig) -> Roles:
    """The roles of a PPO run."""
    config = config.model_copy(update={"algorithm": ppo_config(config)})
    return Roles(
        collect=PerWorker(partial(make_collector, config)),
        learner=partial(_make_learner, config),
        evaluate=PerWorker(partial(make_evaluator, config)),
        policy=partial(make_policy, config),
        mode="stream",
        segments_per_round=config.segments_per_round,
        data_parallel=True,
    )
