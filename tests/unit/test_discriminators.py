"""Discriminators: the numpy mirror agrees, and they learn what there is to tell apart."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from offbeat.models.discriminators import Discriminators
from offbeat.models.discriminators_actor import NumpyDiscriminators
from offbeat.models.flat import FlatAdam, FlatParameters
from tests.unit.team_fakes import published, shaken, skill_spec

AGENTS, OBS, STATE, TEAM_SKILLS, SKILLS = 3, 4, 6, 2, 5


def spec_of(**changes):
    fields = {"hidden": 16, "num_team_skills": TEAM_SKILLS, "num_skills": SKILLS, **changes}
    return skill_spec(AGENTS, OBS, STATE, **fields)


def make(spec, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    return shaken(Discriminators(spec, generator), generator, noise)


def mirror(net, spec):
    judge = NumpyDiscriminators(spec)
    judge.load(published(net, "discriminators"))
    return judge


def sample(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    state = rng.normal(size=(num_rows, STATE)).astype(np.float32)
    obs = rng.normal(size=(num_rows, AGENTS, OBS)).astype(np.float32)
    team, own = rng.integers(TEAM_SKILLS, size=(num_rows, 1)), rng.integers(SKILLS, size=(num_rows, AGENTS))
    return state, obs, np.concatenate([team, own], axis=1)


def torch_logits(net, state, obs, skills):
    state, obs, skills = (torch.from_numpy(part) for part in (state, obs, skills))
    rows = skills[:, 0].repeat_interleave(AGENTS)
    own = net.individual(obs.reshape(len(rows), -1), rows).view(len(obs), AGENTS, -1)
    return net.team(state), own


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation": "tanh"}, {"discriminator_layers": 3}, {"discriminator_layers": 0}],
    ids=str,
)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_mirror_agrees(changes, num_rows):
    spec = spec_of(**changes)
    net = make(spec)
    state, obs, skills = sample(num_rows)
    with torch.no_grad():
        team, own = torch_logits(net, state, obs, skills)
    index = torch.from_numpy(skills)
    expected = functional.log_softmax(team, -1).gather(-1, index[:, :1])[:, 0]
    expected_own = functional.log_softmax(own, -1).gather(-1, index[:, 1:, None])[..., 0]
    judge = mirror(net, spec)
    log_q, own_log_q = judge.log_q(state, obs, skills)
    assert log_q.shape == (num_rows,) and own_log_q.shape == (num_rows, AGENTS)
    assert log_q.dtype == own_log_q.dtype == np.float32
    np.testing.assert_allclose(log_q, expected.numpy(), atol=2e-6)
    np.testing.assert_allclose(own_log_q, expected_own.numpy(), atol=2e-6)
    guess, own_guess = judge.guess(state, obs, skills[:, 0])
    np.testing.assert_array_equal(guess, team.argmax(-1).numpy())
    np.testing.assert_array_equal(own_guess, own.argmax(-1).numpy())


def test_an_agent_is_judged_by_the_team_skill_as_well():
    net = make(spec_of())
    state, obs, skills = sample(5)
    other = skills.copy()
    other[:, 0] = 1 - other[:, 0]
    assert not torch.allclose(
        torch_logits(net, state, obs, skills)[1], torch_logits(net, state, obs, other)[1]
    )


def test_without_hidden_layers_they_are_linear():
    net = make(spec_of(discriminator_layers=0))
    state, _, _ = sample(3)
    first, second, third = net.team(torch.from_numpy(state))
    between = torch.from_numpy(state[:1] + state[1:2] - state[2:])
    torch.testing.assert_close(net.team(between)[0], first + second - third)


def test_before_training_all_skills_are_about_as_likely():
    spec = spec_of()
    net = Discriminators(spec, torch.Generator().manual_seed(0))
    team, own = mirror(net, spec).log_q(*sample(50))
    np.testing.assert_allclose(team, -math.log(TEAM_SKILLS), atol=0.1)
    np.testing.assert_allclose(own, -math.log(SKILLS), atol=0.1)


def test_they_learn_what_can_be_told_apart():
    spec = spec_of()
    net = Discriminators(spec, torch.Generator().manual_seed(0))
    parameters = FlatParameters(net)
    optimizer = FlatAdam(parameters, eps=1e-5)
    state, obs, skills = sample(256)
    state[:, 0] += 6 * skills[:, 0]
    # Which skill leads where depends on the team skill: without it an agent could not be told apart.
    obs[..., 0] = (skills[:, 1:] + skills[:, :1]) % SKILLS
    index = torch.from_numpy(skills)
    for _ in range(300):
        parameters.grad.zero_()
        team, own = torch_logits(net, state, obs, skills)
        loss = functional.cross_entropy(team, index[:, 0]) + functional.cross_entropy(
            own.flatten(0, 1), index[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step(1e-2)
    guess, own_guess = mirror(net, spec).guess(state, obs, skills[:, 0])
    assert (guess == skills[:, 0]).mean() > 0.95
    assert (own_guess == skills[:, 1:]).mean() > 0.9
