"""From a run's configuration to HMASD's roles. No torch until the learner is made."""

from __future__ import annotations

from dataclasses import replace

from offbeat.algorithms.base import Roles
from offbeat.algorithms.hmasd.choosing import SkillChooser, SkillWitness
from offbeat.algorithms.hmasd.config import hmasd_config
from offbeat.algorithms.hmasd.skills import Skills
from offbeat.algorithms.mappo.build import Parts, fit_to_env, fitted, make_roles
from offbeat.algorithms.mappo.policy import TeamPolicy
from offbeat.config.models import RunConfig
from offbeat.envs.teams import Team
from offbeat.models.team_spec import TeamSpec
from offbeat.roles import Learner


def _fit(config: RunConfig, team: Team) -> TeamSpec:
    algorithm = hmasd_config(config)
    return replace(
        fitted(algorithm, team),
        num_team_skills=algorithm.num_team_skills,
        num_skills=algorithm.num_skills,
        blocks=algorithm.blocks,
        heads=algorithm.heads,
        discriminator_layers=algorithm.discriminator.layers,
    )


def make_policy(config: RunConfig, spec: TeamSpec) -> TeamPolicy:
    """A team that chooses skills and acts by them."""
    algorithm = hmasd_config(config)
    return TeamPolicy(
        spec,
        seed=config.run.seed,
        chooser=SkillChooser(spec, algorithm.skill_interval),
        resets_at_choice=algorithm.reset_memory == "skill",
    )


def _make_layer(config: RunConfig, spec: TeamSpec) -> Skills:
    return Skills(hmasd_config(config), spec)


def _make_learner(config: RunConfig) -> Learner:
    from offbeat.algorithms.hmasd.learner import make_learner

    return make_learner(config, fit_to_env(config, PARTS))


PARTS = Parts(_fit, make_policy, _make_learner, _make_layer, SkillWitness)


def check(config: RunConfig) -> None:
    """Make one environment and fit the networks to it, so that a mistake is found before anything runs."""
    fit_to_env(config, PARTS)


def build(config: RunConfig) -> Roles:
    """The roles of an HMASD run."""
    return make_roles(config.model_copy(update={"algorithm": hmasd_config(config)}), PARTS)
