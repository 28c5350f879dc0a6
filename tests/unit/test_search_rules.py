"""Noise, priors from elsewhere, sampled actions, and how actions are chosen."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.search import SearchConfig, SearchResult, draw_noise, mix_priors
from offbeat.search.rules import softmax


def generators(count):
    return [np.random.default_rng(seed) for seed in range(count)]


def make_result(visits, kind="puct", scores=None):
    counts = np.array(visits, np.int32)
    share = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)).astype(np.float32)
    found = np.zeros_like(share) if scores is None else np.array(scores, np.float32)
    return SearchResult(kind, counts, np.zeros(len(counts), np.float32), share, found)


@pytest.mark.parametrize("kind", ["puct", "gumbel"])
def test_noise_is_each_trees_own_and_for_legal_actions(kind):
    config = SearchConfig(kind)
    legal = np.random.default_rng(0).random((50, 6)) < 0.5
    noise = draw_noise(config, generators(50), legal)
    assert not noise[~legal].any() and np.all(noise[legal] != 0)
    if kind == "puct":
        np.testing.assert_allclose(noise[legal.any(axis=1)].sum(axis=1), 1, rtol=1e-5)
    alone = draw_noise(config, [np.random.default_rng(7)], legal[7:8])
    np.testing.assert_array_equal(alone[0], noise[7])
    with pytest.raises(ValueError, match="one for each"):
        draw_noise(config, generators(3), legal)


def test_mixed_priors():
    own, other = np.log([[0.5, 0.25, 0.25]]), np.log([[0.1, 0.8, 0.1]])
    np.testing.assert_allclose(np.exp(mix_priors(own, other, 0.25))[0], [0.4, 0.3875, 0.2125], rtol=1e-6)
    legal = np.array([[True, True, False]])
    mixed = mix_priors(own, other, 0.5, legal)
    assert mixed[0, 2] == -np.inf
    np.testing.assert_allclose(np.exp(mixed[0, :2]), [(2 / 3 + 1 / 9) / 2, (1 / 3 + 8 / 9) / 2], rtol=1e-6)
    np.testing.assert_allclose(softmax(mix_priors(own, other, 0.0)), np.exp(own), rtol=1e-6)
    certain = mix_priors([[0.0, -1000.0]], [[0.0, -1000.0]], 0.5)
    assert np.isfinite(certain).all()
    with pytest.raises(ValueError, match="between 0 and 1"):
        mix_priors(own, other, 1.5)


def test_most_visited_action():
    result = make_result([[1, 5, 5], [9, 0, 2]])
    assert result.act().tolist() == [1, 0]
    assert result.act(temperature=0.0, rngs=generators(2)).tolist() == [1, 0]
    with pytest.raises(ValueError, match="temperature"):
        result.act(temperature=-1.0)
    with pytest.raises(ValueError, match="one for each"):
        result.act(1.0, generators(3))


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, [0.2, 0.8, 0.0]), (0.5, [1 / 17, 16 / 17, 0.0])])
def test_actions_follow_tempered_visits(temperature, expected):
    result = make_result([[2, 8, 0]] * 4000)
    drawn = np.bincount(result.act(temperature, generators(4000)), minlength=3)
    assert drawn[2] == 0
    assert abs(drawn[0] / 4000 - expected[0]) < 5 * np.sqrt(expected[0] * (1 - expected[0]) / 4000)


def test_cold_temperatures_do_not_overflow():
    assert make_result([[400, 401]]).act(1e-4, generators(1)).tolist() == [1]


def test_gumbel_takes_the_best_of_the_most_visited():
    result = make_result([[4, 4, 1]], "gumbel", [[1.0, 2.0, 9.0]])
    assert result.act().tolist() == [1]
