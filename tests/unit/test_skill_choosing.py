"""What is told about skills after games: usage, difference, and how well they are told apart."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from offbeat.algorithms.hmasd.choosing import SkillWitness, evenness
from offbeat.envs.teams.team import TeamStep, View
from offbeat.models.discriminators import Discriminators
from tests.unit.team_fakes import published, shaken, skill_spec

AGENTS, OBS, STATE, SKILLS = 2, 3, 4, 3


def make_witness():
    generator = torch.Generator().manual_seed(0)
    spec = skill_spec(AGENTS, OBS, STATE, hidden=8, num_team_skills=2, num_skills=SKILLS)
    witness = SkillWitness(spec)
    witness.load(published(shaken(Discriminators(spec, generator), generator, 0.3), "discriminators"))
    return witness


def watch(witness, skills, obs, alive=None, counts=None):
    """One step of as many environments as there are rows of skills ``[N, 1 + A]``."""
    skills, obs = np.array(skills), np.array(obs, np.float32)
    num_envs = len(skills)
    alive = np.ones((num_envs, AGENTS), np.bool_) if alive is None else np.array(alive)
    counts = np.ones(num_envs, np.bool_) if counts is None else np.array(counts)
    state, never = np.zeros((num_envs, STATE), np.float32), np.zeros(num_envs, np.bool_)
    view = View(obs=obs, state=state, legal=None, alive=alive)
    step = TeamStep(view, obs, state, np.zeros(num_envs), never, never)
    witness.see(SimpleNamespace(skills=skills), alive, step, counts)


def test_usage_counts_the_agents_that_acted_in_the_games_that_count():
    witness = make_witness()
    watch(
        witness,
        skills=[[0, 1, 2], [1, 0, 0], [1, 2, 2]],
        obs=np.zeros((3, AGENTS, OBS)),
        alive=[[True, False], [True, True], [True, True]],
        counts=[True, False, True],
    )
    metrics = witness.metrics()
    assert [metrics[f"eval/skill_{skill}_share"] for skill in range(SKILLS)] == pytest.approx(
        [0, 1 / 3, 2 / 3]
    )
    assert [metrics[f"eval/team_skill_{skill}_share"] for skill in range(2)] == [0.5, 0.5]
    assert metrics["eval/team_skill_evenness"] == pytest.approx(1.0)


def test_agents_that_have_left_are_not_judged():
    rng = np.random.default_rng(0)
    obs, skills = rng.normal(size=(40, AGENTS, OBS)), rng.integers(2, size=(40, 1 + AGENTS))
    alone, both = make_witness(), make_witness()
    alive = np.tile([True, False], (40, 1))
    watch(alone, skills, obs, alive)
    obs[:, 1] = 99.0
    watch(both, skills, obs, alive)
    assert alone.metrics() == both.metrics()


def test_skills_that_lead_to_different_places_are_diverse():
    rng = np.random.default_rng(1)
    skills = rng.integers(SKILLS, size=(300, 1 + AGENTS)) % [2, SKILLS, SKILLS]
    places = np.eye(SKILLS)[skills[:, 1:]]
    noise = rng.normal(size=places.shape)
    found = []
    for distance in (0.0, 10.0):
        witness = make_witness()
        watch(witness, skills, distance * places + noise)
        found.append(witness.metrics()["eval/skill_diversity"])
    assert found[0] < 0.3 and found[1] > 5.0


def test_one_skill_alone_is_not_diverse():
    witness = make_witness()
    watch(witness, [[0, 1, 1]], np.zeros((1, AGENTS, OBS)))
    assert witness.metrics()["eval/skill_diversity"] == 0.0


@pytest.mark.parametrize(
    ("counts", "expected"), [([5, 5], 1.0), ([7, 0], 0.0), ([3, 1], 0.8113), ([0, 0], 1.0), ([4], 1.0)]
)
def test_evenness(counts, expected):
    assert evenness(np.array(counts, np.float64)) == pytest.approx(expected, abs=1e-4)
