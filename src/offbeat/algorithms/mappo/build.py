"""From a run's configuration to the roles of a team. No torch until the learner is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from offbeat.algorithms.base import Roles
from offbeat.algorithms.mappo.collector import SkillLayer, TeamCollector
from offbeat.algorithms.mappo.config import MAPPOConfig, envs_per_round, mappo_config
from offbeat.algorithms.mappo.evaluator import TeamEvaluator, Witness
from offbeat.algorithms.mappo.policy import TeamPolicy
from offbeat.config.models import RunConfig
from offbeat.envs.teams import Team, make_team
from offbeat.errors import ConfigError
from offbeat.models.actions import CategoricalActions, action_head
from offbeat.models.team_spec import TeamSpec
from offbeat.roles import Learner, PerWorker, Ranks, WorkerContext
from offbeat.types import Array


@dataclass(frozen=True, slots=True)
class Parts:
    """Functions that make the parts of a team which a hierarchy changes, from the run's settings."""

    fit: Callable[[RunConfig, Team], TeamSpec]
    policy: Callable[[RunConfig, TeamSpec], TeamPolicy]
    learner: Callable[[RunConfig], Learner]
    layer: Callable[[RunConfig, TeamSpec], SkillLayer] | None = None
    witness: Callable[[TeamSpec], Witness] | None = None


def fitted(config: MAPPOConfig, team: Team) -> TeamSpec:
    """The networks of a team without skills, fitted to its environment."""
    actions = action_head(team.single_action_space)
    if team.has_legal and not (isinstance(actions, CategoricalActions) and not actions.shape):
        raise ConfigError(f"only Discrete actions can be illegal, and these are {team.single_action_space}")
    return TeamSpec(
        num_agents=team.num_agents,
        obs_size=team.obs_size,
        state_size=team.state_size,
        actions=actions,
        has_legal=team.has_legal,
        hidden=config.hidden,
        layers=config.layers,
        recurrent=config.recurrent,
        activation=config.activation,
        feature_norm=config.feature_norm,
        agent_id=config.agent_id,
    )


def _fit(config: RunConfig, team: Team) -> TeamSpec:
    return fitted(mappo_config(config), team)


def _make_policy(config: RunConfig, spec: TeamSpec) -> TeamPolicy:
    return TeamPolicy(spec, seed=config.run.seed)


def _make_learner(config: RunConfig) -> Learner:
    from offbeat.algorithms.mappo.learner import make_learner

    return make_learner(config, fit_to_env(config, PARTS))


PARTS = Parts(_fit, _make_policy, _make_learner)


def fit_to_env(config: RunConfig, parts: Parts) -> TeamSpec:
    """The networks of a run, fitted to its environment."""
    team = make_team(config.env, 1)
    try:
        return parts.fit(config, team)
    finally:
        team.close()


def make_collector(config: RunConfig, parts: Parts, context: WorkerContext) -> TeamCollector:
    """Make a collector with its environments and its actor, inside its worker."""
    team = make_team(config.env, config.envs_per_worker)
    spec = parts.fit(config, team)
    layer = None if parts.layer is None else parts.layer(config, spec)
    return TeamCollector(mappo_config(config), team, spec, total_envs=envs_per_round(config), layer=layer)


def make_learner(config: RunConfig, parts: Parts, ranks: Ranks) -> Learner:
    """Make the learner inside its process; only then is torch imported."""
    return parts.learner(config)


def make_evaluator(config: RunConfig, parts: Parts, context: WorkerContext) -> TeamEvaluator:
    """Make the evaluator with its own environments and policy, inside its worker."""
    settings = config.eval
    team = make_team(config.eval_env, min(settings.num_envs, settings.episodes))
    spec = parts.fit(config, team)
    witness = None if parts.witness is None else parts.witness(spec)
    return TeamEvaluator(settings, team, parts.policy(config, spec), witness)


def make_policy(config: RunConfig, parts: Parts, weights: Mapping[str, Array]) -> TeamPolicy:
    """Fit the run's networks to its environment and load published weights."""
    policy = parts.policy(config, fit_to_env(config, parts))
    policy.load(weights)
    return policy


def make_roles(config: RunConfig, parts: Parts) -> Roles:
    """The roles of a run whose agents are a team; ``config`` has its algorithm's settings resolved."""
    return Roles(
        collect=PerWorker(partial(make_collector, config, parts)),
        learner=partial(make_learner, config, parts),
        evaluate=PerWorker(partial(make_evaluator, config, parts)),
        policy=partial(make_policy, config, parts),
        mode="stream",
        segments_per_round=config.segments_per_round,
    )


def check(config: RunConfig) -> None:
    """Make one environment and fit the networks to it, so that a mistake is found before anything runs."""
    fit_to_env(config, PARTS)


def build(config: RunConfig) -> Roles:
    """The roles of a run of multi-agent PPO."""
    return make_roles(config.model_copy(update={"algorithm": mappo_config(config)}), PARTS)
