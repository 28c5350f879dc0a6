"""Acting less greedily: the probabilities are exactly those of the mixture, and only of legal actions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.models.actions import CategoricalActions
from offbeat.ops.exploration import IMPOSSIBLE, explored


def mixture(logits, legal, temperature, epsilon):
    """The definition, one row at a time, in double precision."""
    scaled = np.exp((logits[legal].astype(np.float64) - logits[legal].max()) / temperature)
    probabilities = np.zeros(len(logits))
    probabilities[legal] = (1 - epsilon) * scaled / scaled.sum() + epsilon / np.count_nonzero(legal)
    return probabilities


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.25, 1.0, 2.0, 10.0]),
    epsilon=st.sampled_from([0.0, 0.05, 0.5, 0.99]),
)
def test_probabilities_are_those_of_the_mixture(seed, temperature, epsilon):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (5, 9)).astype(np.float32)
    legal = rng.random((5, 9)) < 0.5
    legal[:, rng.integers(9)] = True
    logits[~legal] = IMPOSSIBLE
    found = explored(logits, temperature=temperature, epsilon=epsilon)
    assert found.dtype == np.float32
    assert (found[~legal] == IMPOSSIBLE).all()
    for row, mask, logs in zip(logits, legal, found, strict=True):
        np.testing.assert_allclose(np.exp(logs), mixture(row, mask, temperature, epsilon), atol=1e-6)
    np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(-1), 1.0, atol=1e-6)


def test_temperature_one_and_epsilon_zero_are_the_policy():
    logits = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(explored(logits, temperature=1.0, epsilon=0.0), expected, atol=1e-6)


def test_epsilon_keeps_every_legal_action_in_reach():
    logits = np.array([[0.0, 80.0, -80.0, IMPOSSIBLE]], np.float32)
    found = np.exp(explored(logits, temperature=1.0, epsilon=0.3))
    np.testing.assert_allclose(found, [[0.1, 0.8, 0.1, 0.0]], atol=1e-6)


def test_an_action_whose_probability_vanishes_stays_finite_and_above_what_is_illegal():
    logits = np.array([[0.0, -1e6, IMPOSSIBLE]], np.float32)
    found = explored(logits, temperature=1.0, epsilon=0.0)
    assert np.isfinite(found).all()
    assert found[0, 0] == 0.0
    assert IMPOSSIBLE < found[0, 1] < -1e4


def test_only_one_legal_action():
    logits = np.full((1, 4), IMPOSSIBLE, np.float32)
    logits[0, 2] = 5.0
    found = explored(logits, temperature=3.0, epsilon=0.7)
    assert found.tolist() == [[IMPOSSIBLE, IMPOSSIBLE, 0.0, IMPOSSIBLE]]


def test_the_input_is_left_alone():
    logits = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    before = logits.copy()
    explored(logits, temperature=2.0, epsilon=0.1)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("nvec", [(4,), (3, 2)])
def test_actions_are_drawn_as_often_as_is_stored(nvec):
    """Chi-square over the joint choices; 5 standard deviations of its distribution."""
    head = CategoricalActions(nvec, (0,) * len(nvec), () if len(nvec) == 1 else (len(nvec),))
    rng, num = np.random.default_rng(3), 40_000
    logits = np.repeat(rng.normal(0, 2, (1, sum(nvec))).astype(np.float32), num, axis=0)
    outputs = head.explore(logits, temperature=1.7, epsilon=0.2)
    actions = head.sample(outputs, head.noise(rng, 1, num)[0])
    stored = head.log_prob(outputs, actions)
    numbers = np.ravel_multi_index(tuple(actions.reshape(num, -1).T), nvec)
    for index, part in enumerate(head.split(logits[:1])):
        size = nvec[index]
        expected = mixture(part[0], np.ones(size, bool), 1.7, 0.2)
        counts = np.bincount(actions.reshape(num, -1)[:, index], minlength=size)
        statistic = np.sum((counts - num * expected) ** 2 / (num * expected))
        assert statistic < size - 1 + 5 * np.sqrt(2 * (size - 1))
    for number in np.unique(numbers):
        share = np.mean(numbers == number)
        assert np.exp(stored[numbers == number][0]) == pytest.approx(share, abs=5 * np.sqrt(share / num))
