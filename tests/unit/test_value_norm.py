"""Values in units of their deviation, and back."""

import json

import numpy as np
import pytest

from offbeat.ops.value_norm import BETA, ValueNorm


def test_before_the_first_update_nothing_changes():
    values = np.array([-3.0, 0.0, 7.5], np.float32)
    np.testing.assert_array_equal(ValueNorm().normalise(values), values)
    np.testing.assert_array_equal(ValueNorm().denormalise(values), values)


def test_one_update_gives_the_moments_of_its_values():
    values = np.random.default_rng(0).normal(5, 3, 1000).astype(np.float32)
    normalised = ValueNorm().updated(values).normalise(values)
    assert normalised.dtype == np.float32
    assert normalised.mean() == pytest.approx(0, abs=1e-4)
    assert normalised.std() == pytest.approx(1, abs=1e-4)


def test_updates_weigh_by_age_and_not_by_size():
    norm = ValueNorm().updated(np.zeros(1000)).updated(np.full(1, 4.0))
    # Weights beta (1 - beta) and 1 - beta, made to sum up to 1.
    share = 1 / (1 + BETA)
    mean, square = 4 * share, 16 * share
    assert norm.denormalise(np.zeros(1))[0] == pytest.approx(mean)
    deviation = (square - mean**2) ** 0.5
    assert norm.denormalise(np.ones(1))[0] == pytest.approx(mean + deviation)


def test_there_and_back_again():
    norm = ValueNorm().updated(np.array([1.0, 5.0, 9.0]))
    values = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    assert norm.normalise(values).shape == values.shape
    np.testing.assert_allclose(norm.denormalise(norm.normalise(values)), values, rtol=1e-5, atol=1e-5)


def test_values_that_do_not_vary_are_not_blown_up():
    norm = ValueNorm().updated(np.full(10, 3.0))
    np.testing.assert_allclose(norm.normalise(np.array([3.0, 3.1])), [0, 1], atol=1e-6)


def test_large_values_keep_their_digits():
    values = 1e6 + np.arange(4.0)
    norm = ValueNorm().updated(values)
    np.testing.assert_allclose(norm.normalise(values).std(), 1, rtol=1e-3)


def test_no_values_change_nothing():
    norm = ValueNorm().updated(np.array([1.0, 2.0]))
    assert norm.updated(np.zeros(0, np.float32)) == norm
    assert ValueNorm().updated(np.zeros(0, np.float32)) == ValueNorm()


def test_an_update_leaves_the_old_norm_alone():
    norm = ValueNorm().updated(np.array([1.0, 2.0]))
    before = norm.state_dict()
    norm.updated(np.array([100.0]))
    assert norm.state_dict() == before


def test_state_survives_being_saved():
    norm = ValueNorm().updated(np.array([1.0, 2.5, -3.0], np.float32)).updated(np.array([0.1]))
    assert ValueNorm.from_state(json.loads(json.dumps(norm.state_dict()))) == norm
