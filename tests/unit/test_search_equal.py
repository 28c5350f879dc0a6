"""The compiled search and the one in numpy are the same, bit for bit; and both are what the formulas say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from offbeat.search import SearchConfig, search
from tests.unit.search_problems import TableModel, make_trees, plain_search

SIZES = [(1, 1), (1, 50), (2, 1), (2, 2), (2, 50), (5, 2), (5, 25), (20, 50)]
NUM_TREES = 128


def run(config, model, num_actions, backend, legal=None, noise=None, num_trees=None):
    trees = make_trees(config, num_trees or len(model.seeds), num_actions, backend)
    given = {"seeds": model.seeds, "legal": legal, "noise": noise}
    found = search(model.step, trees, model.root_logits, model.root_values, **given)
    return trees, found


def check_equal(ours, theirs):
    for name in ("visits", "values", "policy", "scores"):
        np.testing.assert_array_equal(getattr(ours[1], name), getattr(theirs[1], name), name)
    for name in ("visits", "q", "prior", "child", "parent", "reward", "value"):
        np.testing.assert_array_equal(getattr(ours[0], name), getattr(theirs[0], name), name)


@pytest.mark.parametrize("kind", ["puct", "gumbel"])
@pytest.mark.parametrize(("num_actions", "num_simulations"), SIZES)
def test_a_thousand_problems_are_equal(kind, num_actions, num_simulations):
    rules = itertools.product((False, True), repeat=3)
    for number, (masked, two_player, ties) in enumerate(rules):
        config = SearchConfig(kind, num_simulations, 1.0 if ties else 0.97, two_player=two_player)
        model = TableModel(number, NUM_TREES, config.num_nodes, num_actions, ties)
        legal = model.legal if masked else None
        noise = None if ties else model.noise(config, legal)
        ours, theirs = (run(config, model, num_actions, name, legal, noise) for name in ("numba", "numpy"))
        check_equal(ours, theirs)
        assert np.all(ours[1].visits.sum(axis=1) == num_simulations)
        assert not masked or not ours[1].visits[~legal].any()


@pytest.mark.parametrize("first_play", ["mean", "low"])
def test_variants_of_puct_are_equal(first_play):
    config = SearchConfig("puct", 30, 0.97, first_play=first_play, two_player=True)
    model = TableModel(1, NUM_TREES, config.num_nodes, 6)
    ours, theirs = (run(config, model, 6, name, model.legal) for name in ("numba", "numpy"))
    check_equal(ours, theirs)
    assert np.all(ours[1].visits.sum(axis=1) == 30)


@pytest.mark.parametrize("two_player", [False, True])
@pytest.mark.parametrize(("kind", "first_play"), [("puct", "mean"), ("puct", "low"), ("gumbel", "mean")])
def test_searches_are_what_the_formulas_say(kind, two_player, first_play):
    config = SearchConfig(kind, 40, 0.95, two_player=two_player, first_play=first_play, max_considered=4)
    model = TableModel(7, 40, config.num_nodes, 5)
    noise = model.noise(config)
    found = run(config, model, 5, "numba", noise=noise)[1]
    same = 0
    for tree in range(40):
        visits, value = plain_search(config, model, tree, noise[tree])
        if np.array_equal(visits, found.visits[tree]):
            same += 1
            assert found.values[tree] == pytest.approx(value, abs=1e-4)
    assert same >= 39  # float32 may decide a near-tie in another way


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("kind", ["puct", "gumbel"])
@pytest.mark.parametrize("ties", [False, True])
def test_trees_know_nothing_of_each_other(backend, kind, ties):
    config = SearchConfig(kind, 20, 0.97)
    model = TableModel(3, 12, config.num_nodes, 4, ties)
    together = run(config, model, 4, backend)[1]
    again = run(config, model, 4, backend)[1]
    for tree in range(12):
        one = TableModel(3, 12, config.num_nodes, 4, ties)
        for name in ("rewards", "values", "logits", "root_logits", "root_values", "seeds"):
            setattr(one, name, getattr(one, name)[tree : tree + 1])
        one.lanes = np.arange(1)
        alone = run(config, one, 4, backend)[1]
        for name in ("visits", "values", "policy", "scores"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[tree])
            np.testing.assert_array_equal(getattr(again, name)[tree], getattr(together, name)[tree])


def test_ties_depend_on_the_seed_and_favour_nobody():
    config = SearchConfig("puct", 1, 1.0)
    model = TableModel(5, 3000, config.num_nodes, 3, ties=True)
    visits = run(config, model, 3, "numba")[1].visits
    assert np.all(np.abs(visits.sum(axis=0) - 1000) < 5 * np.sqrt(1000))
    model.seeds = model.seeds + np.uint64(1)
    assert np.mean(np.any(run(config, model, 3, "numba")[1].visits != visits, axis=1)) > 0.5


def test_trees_are_as_new_for_every_search():
    config = SearchConfig("gumbel", 30, 0.97)
    first, second = (TableModel(seed, 16, config.num_nodes, 4) for seed in (1, 2))
    trees, fresh = make_trees(config, 16, 4), make_trees(config, 16, 4)
    search(first.step, trees, first.root_logits, first.root_values, seeds=first.seeds)
    results = [
        search(second.step, made, second.root_logits, second.root_values, seeds=second.seeds)
        for made in (trees, fresh)
    ]
    check_equal((trees, results[0]), (fresh, results[1]))
