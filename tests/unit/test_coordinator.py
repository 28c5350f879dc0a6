"""The coordinator: no choice sees a later one, and the numpy mirror chooses with the same probabilities."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from offbeat.models.coordinator import SkillCoordinator
from offbeat.models.coordinator_actor import NumpyCoordinator, pick
from offbeat.models.flat import FlatAdam, FlatParameters
from tests.unit.team_fakes import published, shaken, skill_spec

OBS, STATE, TEAM_SKILLS, SKILLS = 4, 6, 3, 4
VARIANTS = {
    "plain": {},
    "tanh": {"activation": "tanh"},
    "without norm": {"feature_norm": False},
    "several blocks and heads": {"blocks": 2, "heads": 4},
}


def spec_of(num_agents=3, **changes):
    fields = {"hidden": 32, "num_team_skills": TEAM_SKILLS, "num_skills": SKILLS, **changes}
    return skill_spec(num_agents, OBS, STATE, **fields)


def make(spec, noise=0.2):
    generator = torch.Generator().manual_seed(0)
    return shaken(SkillCoordinator(spec, generator), generator, noise)


def mirror(net, spec):
    chooser = NumpyCoordinator(spec)
    chooser.load(published(net, "coordinator"))
    return chooser


def views(spec, num_rows, seed=0):
    rng = np.random.default_rng(seed)
    state = rng.normal(size=(num_rows, STATE)).astype(np.float32)
    obs = rng.normal(size=(num_rows, spec.num_agents, OBS)).astype(np.float32)
    return state, obs, rng.random((num_rows, 1 + spec.num_agents), dtype=np.float32)


def random_skills(spec, num_rows, seed=0):
    rng = np.random.default_rng(seed)
    team = rng.integers(TEAM_SKILLS, size=(num_rows, 1))
    return np.concatenate([team, rng.integers(SKILLS, size=(num_rows, spec.num_agents))], axis=1)


def evaluate(net, *arrays):
    with torch.inference_mode():
        return net.evaluate(*(torch.from_numpy(array) for array in arrays))


def log_probs(team, own, skills):
    index = torch.from_numpy(skills)
    first = functional.log_softmax(team, -1).gather(-1, index[:, :1])
    rest = functional.log_softmax(own, -1).gather(-1, index[:, 1:, None]).squeeze(-1)
    return torch.cat([first, rest], dim=1).numpy()


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes(variant):
    for num_agents in (1, 2, 5):
        spec = spec_of(num_agents, **VARIANTS[variant])
        net = make(spec)
        state, obs, _ = views(spec, 7)
        team, own, values = evaluate(net, state, obs, random_skills(spec, 7))
        assert team.shape == (7, TEAM_SKILLS)
        assert own.shape == (7, num_agents, SKILLS)
        assert values.shape == (7, 1 + num_agents)
        assert team.dtype == own.dtype == values.dtype == torch.float32
        with torch.inference_mode():
            torch.testing.assert_close(net.values(torch.from_numpy(state), torch.from_numpy(obs)), values)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_choice_sees_itself_or_a_later_one(variant):
    spec = spec_of(3, **VARIANTS[variant])
    net = make(spec)
    state, obs, _ = views(spec, 16)
    skills = random_skills(spec, 16)
    team, own, values = evaluate(net, state, obs, skills)
    logits = [team, *own.unbind(1)]
    for changed in range(skills.shape[1]):
        other = skills.copy()
        other[:, changed] = (other[:, changed] + 1) % (SKILLS if changed else TEAM_SKILLS)
        other_team, other_own, other_values = evaluate(net, state, obs, other)
        for position, (before, after) in enumerate(
            zip(logits, [other_team, *other_own.unbind(1)], strict=True)
        ):
            if position <= changed:
                assert torch.equal(before, after), (changed, position)
            else:
                assert (before - after).abs().max() > 1e-3, (changed, position)
        assert torch.equal(values, other_values)


def test_every_choice_sees_the_state_and_all_observations():
    spec = spec_of(3)
    net = make(spec)
    state, obs, _ = views(spec, 16)
    skills = random_skills(spec, 16)
    whole = torch.cat([part.flatten(1) for part in evaluate(net, state, obs, skills)[:2]], dim=1)
    changes = [(state + 1, obs)]
    for agent in range(3):
        other = obs.copy()
        other[:, agent] = other[:, agent, ::-1]
        changes.append((state, other))
    for seen in changes[1:]:
        now = torch.cat([part.flatten(1) for part in evaluate(net, *seen, skills)[:2]], dim=1)
        assert ((whole - now).abs().max(0).values > 1e-4).all()
    # Adding the same to all features is what the norm takes away.
    torch.testing.assert_close(evaluate(net, *changes[0], skills)[2], evaluate(net, state, obs, skills)[2])


@pytest.mark.parametrize("num_rows", [1, 4, 33])
@pytest.mark.parametrize("variant", VARIANTS)
def test_mirror_gives_the_log_probabilities_of_its_choices(variant, num_rows):
    for num_agents in (1, 3):
        spec = spec_of(num_agents, **VARIANTS[variant])
        net = make(spec)
        state, obs, uniform = views(spec, num_rows)
        for chances in (uniform, None):
            skills, logp = mirror(net, spec).choose(state, obs, chances)
            assert skills.shape == logp.shape == (num_rows, 1 + num_agents)
            assert skills.dtype == np.int64 and logp.dtype == np.float32
            team, own, _ = evaluate(net, state, obs, skills)
            assert max(team.abs().max(), own.abs().max()) > 1
            np.testing.assert_allclose(logp, log_probs(team, own, skills), rtol=0, atol=1e-6)


def test_without_chances_each_choice_is_the_likeliest():
    spec = spec_of(3)
    net = make(spec)
    state, obs, _ = views(spec, 50)
    skills, _ = mirror(net, spec).choose(state, obs, None)
    team, own, _ = evaluate(net, state, obs, skills)
    np.testing.assert_array_equal(skills[:, 0], team.argmax(-1).numpy())
    np.testing.assert_array_equal(skills[:, 1:], own.argmax(-1).numpy())


def test_rows_do_not_depend_on_each_other():
    spec = spec_of(3)
    chooser = mirror(make(spec), spec)
    state, obs, uniform = views(spec, 9)
    together, logp = chooser.choose(state, obs, uniform)
    for row in range(9):
        at = slice(row, row + 1)
        alone, own_logp = chooser.choose(state[at], obs[at], uniform[at])
        np.testing.assert_array_equal(alone[0], together[row])
        np.testing.assert_allclose(own_logp[0], logp[row], rtol=0, atol=1e-6)


def test_choices_come_as_often_as_they_are_likely():
    spec = spec_of(2)
    net = make(spec, noise=0.1)
    num_rows = 8_000
    state, obs, _ = views(spec, 1)
    state, obs = np.repeat(state, num_rows, axis=0), np.repeat(obs, num_rows, axis=0)
    uniform = np.random.default_rng(5).random((num_rows, 3), dtype=np.float32)
    skills, logp = mirror(net, spec).choose(state, obs, uniform)
    counts: dict[tuple[int, ...], list[float]] = {}
    for choice, own in zip(skills.tolist(), logp.sum(1).tolist(), strict=True):
        counts.setdefault(tuple(choice), []).append(own)
    assert len(counts) > 10
    for joint in counts.values():
        expected = math.exp(joint[0])
        assert len(joint) / num_rows == pytest.approx(expected, abs=5 * math.sqrt(expected / num_rows))


def test_pick_inverts_the_distribution():
    logits = np.log(np.array([[0.2, 0.3, 0.5]], np.float32))
    for chance, option in [(0.0, 0), (0.19, 0), (0.21, 1), (0.49, 1), (0.51, 2), (0.999, 2)]:
        assert pick(logits, np.array([chance], np.float32))[0] == option


@pytest.mark.parametrize("chance", [0.0, 0.5, 1 - 2**-24, np.nextafter(1.0, 0.0), 1.0])
def test_what_is_impossible_is_never_picked(chance):
    rows = np.array([[-1e9, 0, -1e9], [0, -1e9, -1e9], [-1e9, -1e9, 0], [-200, 0, -200], [1e9, 1e9, -5]])
    allowed = [{1}, {0}, {2}, {1}, {0, 1}]
    picked = pick(rows.astype(np.float32), np.full(len(rows), chance))
    assert all(option in options for option, options in zip(picked, allowed, strict=True))


def test_training_is_that_of_the_judged_network():
    """Single precision, with gradients, and double precision, without, are one network."""
    spec = spec_of(3)
    net = make(spec, noise=0.1)
    state, obs, _ = views(spec, 8)
    skills = random_skills(spec, 8)
    trained = net.evaluate(*(torch.from_numpy(array) for array in (state, obs, skills)))
    for left, right in zip(trained, evaluate(net, state, obs, skills), strict=True):
        assert left.requires_grad and not right.requires_grad
        torch.testing.assert_close(left.detach(), right, rtol=1e-4, atol=1e-4)


def test_all_parameters_get_gradients():
    spec = spec_of(3, blocks=2, heads=2)
    net = make(spec)
    parameters = FlatParameters(net)
    state, obs, _ = views(spec, 16)
    outputs = net.evaluate(*(torch.from_numpy(a) for a in (state, obs, random_skills(spec, 16))))
    sum(part.square().sum() for part in outputs).backward()
    for name, parameter in net.named_parameters():
        if not name.endswith("key.bias"):  # adds the same to all scores of a row
            assert parameter.grad.abs().max() > 1e-6, name
    assert parameters.grad.isfinite().all()


def test_before_training_all_choices_are_about_as_likely():
    spec = spec_of(3)
    net = SkillCoordinator(spec, torch.Generator().manual_seed(0))
    state, obs, uniform = views(spec, 20)
    _, logp = mirror(net, spec).choose(state, obs, uniform)
    np.testing.assert_allclose(logp[:, 0], -math.log(TEAM_SKILLS), atol=0.1)
    np.testing.assert_allclose(logp[:, 1:], -math.log(SKILLS), atol=0.1)
    again = SkillCoordinator(spec, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_it_learns_choices_that_depend_on_each_other():
    """The team skill follows from the state, each agent's from its own observation and the choice before."""
    spec = spec_of(2, hidden=16)
    net = SkillCoordinator(spec, torch.Generator().manual_seed(0))
    parameters = FlatParameters(net)
    optimizer = FlatAdam(parameters, eps=1e-5)
    state, obs, _ = views(spec, 96)
    skills = np.empty((96, 3), np.int64)
    skills[:, 0] = state[:, 0] > state[:, 1]
    skills[:, 1] = (obs[:, 0, 0] > obs[:, 0, 1]) + skills[:, 0]
    skills[:, 2] = (obs[:, 1, 0] > obs[:, 1, 1]) + skills[:, 1]
    given = [torch.from_numpy(array) for array in (state, obs, skills)]
    for _ in range(80):
        parameters.grad.zero_()
        team, own, _ = net.evaluate(*given)
        loss = functional.cross_entropy(team, given[2][:, 0])
        loss = loss + functional.cross_entropy(own.flatten(0, 1), given[2][:, 1:].flatten())
        loss.backward()
        optimizer.step(1e-2)
    chosen, _ = mirror(net, spec).choose(state, obs, None)
    assert (chosen == skills).mean() > 0.9
