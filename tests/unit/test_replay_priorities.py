"""Priorities of segments, by hand."""

import numpy as np
import pytest

from offbeat.ops.priorities import segment_priority


def test_mixture_of_largest_and_mean_error():
    deltas = np.array([[1.0, -8.0], [-3.0, 0.0]], np.float32)
    priorities = segment_priority(deltas, np.ones((2, 2), bool), eta=0.75)
    np.testing.assert_allclose(priorities, [0.75 * 3 + 0.25 * 2, 0.75 * 8 + 0.25 * 4])
    assert priorities.dtype == np.float32


def test_steps_that_are_not_valid_do_not_matter():
    deltas = np.array([[1.0, 2.0], [np.nan, -4.0], [np.inf, 100.0]])
    valid = np.array([[True, True], [False, True], [False, False]])
    np.testing.assert_allclose(segment_priority(deltas, valid, eta=0.5), [1.0, 0.5 * 4 + 0.5 * 3])


def test_a_segment_without_a_valid_step_is_worth_nothing():
    assert segment_priority(np.ones((3, 2)), np.zeros((3, 2), bool)).tolist() == [0, 0]


@pytest.mark.parametrize(("eta", "expected"), [(0.0, 2.0), (1.0, 3.0)])
def test_ends_of_the_mixture(eta, expected):
    assert segment_priority(np.array([[1.0], [3.0]]), np.ones((2, 1), bool), eta) == expected


def test_eta_is_a_share():
    with pytest.raises(ValueError, match="0 to 1"):
        segment_priority(np.ones((1, 1)), np.ones((1, 1), bool), eta=1.5)
