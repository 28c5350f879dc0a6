"""Searches against numbers worked out by hand, and what holds for every search."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.search import SearchConfig, search
from offbeat.search import reference as plain
from offbeat.search.layout import (
    HIGH,
    LEGAL,
    LOW,
    MOST_VISITS,
    PRIOR,
    SHARE,
    TOTAL_VISITS,
    TRIED,
    VALUE,
    VISITS,
    WEIGHT,
    WEIGHTED_Q,
    Q,
    make_forest,
)
from offbeat.search.rules import considered_visits, exploration_table, halving_table
from tests.unit.search_problems import BACKENDS, TableModel, make_trees

ROOT = np.zeros(1, np.int64)


# ---------------------------------------------------------------- by hand


def test_weight_of_the_prior():
    table = exploration_table(SearchConfig("puct", 5, 1.0))
    assert table.shape == (6,) and table[0] > 0, "a node's own visit counts"
    assert table[3] == pytest.approx(2 * (1.25 + math.log(19657 / 19652)))


@pytest.mark.parametrize(
    ("high", "expected"), [(4.0, [0.25, 1.0, 0.625]), (2.0, [0.5, 1.0, 1.0]), (0.005, [1.0, 1.0, 1.0])]
)
def test_puct_scores_and_min_max(high, expected):
    """Two actions were tried, of Q 1 and 4; the third counts as their mean 2.5. The lowest Q is 0."""
    forest = make_forest(1, 2, 3)
    forest.edges[0, 0, Q] = 1.0, 4.0, 0.0
    forest.edges[0, 0, SHARE] = 0.1, 0.2, 0.5
    forest.links[0, 0, VISITS] = 3, 1, 0
    forest.counts[0, 0, TOTAL_VISITS], forest.counts[0, 0, TRIED] = 4, 2
    forest.nodes[0, 0, WEIGHTED_Q] = 5.0
    forest.bounds[0] = 0.0, high
    table = np.array([0, 0, 0, 0, 2.0], np.float32)
    untried = plain._untried(forest, ROOT, ROOT, np.zeros(1), 0)
    assert untried.tolist() == [2.5]
    scores = plain._score_puct(forest, table, ROOT, ROOT, untried, np.float32(0.01))
    np.testing.assert_allclose(scores[0], np.add(expected, [0.2, 0.4, 1.0]), rtol=1e-6)


def test_small_ranges_are_not_blown_up():
    forest = make_forest(1, 2, 2)
    forest.edges[0, 0, Q], forest.links[0, 0, VISITS] = (1.0, 1.005), 1
    forest.bounds[0] = 1.0, 1.005
    scores = plain._score_puct(forest, np.ones(3, np.float32), ROOT, ROOT, np.zeros(1), np.float32(0.01))
    np.testing.assert_allclose(scores[0], [0.0, 0.5], atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["puct", "gumbel"])
@pytest.mark.parametrize(
    ("two_player", "root", "first", "second"), [(False, 6.0, 11.0, 20.0), (True, -2 / 3, 1.0, -12.0)]
)
def test_back_up(backend, kind, two_player, root, first, second):
    """A chain with rewards 1, 2, 4 and values 8, 16, 32 at half the discount.

    One player: 1 + 8/2 = 5; 2 + 16/2 = 10, 1 + 10/2 = 6; 4 + 32/2 = 20, 2 + 20/2 = 12, 1 + 12/2 = 7. Two:
    1 - 8/2 = -3; 2 - 16/2 = -6, 1 + 6/2 = 4; 4 - 32/2 = -12, 2 + 12/2 = 8, 1 - 8/2 = -3.
    """
    trees = make_trees(SearchConfig(kind, 3, 0.5, two_player=two_player), 1, 1, backend)
    trees.begin([[0.0]], [100.0], seeds=[1])
    for node, (reward, value) in enumerate(((1, 8), (2, 16), (4, 32))):
        parents, actions = trees.descend()
        assert (parents[0], actions[0]) == (node, 0)
        trees.expand([reward], [value], [[0.0]])
    assert trees.q[0, :3, 0].tolist() == pytest.approx([root, first, second])
    assert trees.result().values[0] == pytest.approx(root)
    low, high = trees._forest.bounds[0, LOW], trees._forest.bounds[0, HIGH]
    if kind == "puct":
        assert (low, high) == ((5.0, 20.0) if not two_player else (-12.0, 1.0))


@pytest.mark.parametrize(
    ("num_considered", "num_simulations", "expected"),
    [
        (1, 4, [0, 1, 2, 3]),
        (2, 5, [0, 0, 1, 1, 2]),
        (4, 8, [0, 0, 0, 0, 1, 1, 2, 2]),
        (3, 5, [0, 0, 0, 1, 1]),
        (8, 16, [0] * 8 + [1] * 4 + [2, 2, 3, 3]),
        (16, 10, [0] * 10),
    ],
)
def test_sequential_halving(num_considered, num_simulations, expected):
    assert considered_visits(num_considered, num_simulations) == expected
    table = halving_table(SearchConfig("gumbel", num_simulations, 1.0))
    assert table[num_considered].tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_halving_keeps_the_better_half(backend):
    """Four of eight actions are considered, by their logits; the two of best Q are visited again."""
    logits = np.array([[0.0, 3.0, 0.0, 2.0, 1.0, 4.0, 0.0, 0.0]])
    trees = make_trees(SearchConfig("gumbel", 8, 1.0, max_considered=4, c_scale=1.0), 1, 8, backend)
    values = {5: 0.0, 1: 10.0, 3: 9.0, 4: 1.0}

    def step(parents, actions, node):
        return [0.0], [values[int(actions[0])] if parents[0] == 0 else 9.5], np.zeros((1, 8))

    found = search(step, trees, logits, [0.0], seeds=[0])
    assert found.visits.tolist() == [[0, 3, 0, 3, 1, 1, 0, 0]]
    assert found.act().tolist() == [1]


def gumbel_forest():
    forest = make_forest(1, 2, 3)
    forest.edges[0, 0, PRIOR] = 0.5, 0.3, 0.2
    forest.edges[0, 0, Q] = 1.0, 3.0, 0.0
    forest.links[0, 0, VISITS] = 2, 1, 0
    for column, count in ((TOTAL_VISITS, 3), (TRIED, 2), (LEGAL, 3), (MOST_VISITS, 2)):
        forest.counts[0, 0, column] = count
    forest.nodes[0, 0, VALUE], forest.nodes[0, 0, WEIGHTED_Q], forest.nodes[0, 0, WEIGHT] = 0.5, 1.4, 0.8
    return forest


def test_mixed_value_and_completed_q():
    """(0.5 + 3 * 1.4 / 0.8) / 4 = 1.4375, a share 0.21875 of the way from 1 to 3; (50 + 2) * 0.1 = 5.2."""
    forest = gumbel_forest()
    assert plain.mixed_values(forest, ROOT, ROOT)[0] == pytest.approx(1.4375)
    weighing = plain.Weighing(np.float32(50), np.float32(0.1), np.float32(0.01))
    gains = plain.advantages(forest, ROOT, ROOT, weighing)
    np.testing.assert_allclose(gains[0], [0.0, 5.2, 5.2 * 0.21875], rtol=1e-6)
    forest.counts[0, 0, LEGAL], forest.nodes[0, 0, VALUE] = 2, 100.0  # the untried one is illegal
    assert plain.advantages(forest, ROOT, ROOT, weighing)[0, :2].tolist() == pytest.approx([0.0, 5.2])


def test_exp_is_exp():
    x = np.concatenate([-np.linspace(0, 90, 100_000), [-np.inf]]).astype(np.float32)
    np.testing.assert_allclose(plain.exp(x), np.where(x < -87, 0, np.exp(x.astype(np.float64))), rtol=3e-7)
    np.testing.assert_allclose(plain.softmax(np.array([[0.0, -np.inf, 0.0]], np.float32))[0], [0.5, 0, 0.5])


# ---------------------------------------------------------------- what always holds


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["puct", "gumbel"]),
    backend=st.sampled_from(BACKENDS),
    num_actions=st.integers(1, 12),
    num_simulations=st.integers(1, 30),
    two_player=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_invariants(kind, backend, num_actions, num_simulations, two_player, ties, seed):
    config = SearchConfig(kind, num_simulations, 0.9, two_player=two_player)
    model = TableModel(seed, 6, config.num_nodes, num_actions, ties)
    trees = make_trees(config, 6, num_actions, backend)
    noise = model.noise(config, model.legal)
    roots = model.root_logits, model.root_values
    found = search(model.step, trees, *roots, seeds=model.seeds, legal=model.legal, noise=noise)
    assert np.all(found.visits.sum(axis=1) == num_simulations)
    assert not found.visits[~model.legal].any() and not found.policy[~model.legal].any()
    np.testing.assert_allclose(found.policy.sum(axis=1), 1, rtol=1e-5)
    types = [array.dtype for array in (found.visits, found.values, found.policy, found.scores)]
    assert types == [np.int32, np.float32, np.float32, np.float32]
    assert np.all(model.legal[np.arange(6), found.act()])
    bound = sum(0.9**depth for depth in range(num_simulations)) * np.abs(model.rewards).max()
    assert np.all(np.abs(found.values) <= bound + np.abs(model.values).max() + 1e-4)
    for tree in range(6):
        check_tree(trees, tree)
    if kind == "gumbel":
        check_improvement(trees, found, model)


def check_tree(trees, tree):
    """Every node but the root is the child of one action, and has one visit more than all below it."""
    child, visits = trees.child[tree], trees.visits[tree]
    at = np.argwhere(child >= 0)
    assert sorted(child[child >= 0]) == list(range(1, trees.config.num_nodes))
    for node, action in at:
        below = child[node, action]
        assert node < below and trees.parent[tree, below] == node
        assert visits[node, action] == 1 + visits[below].sum()
    assert np.all((visits > 0) == (child >= 0))


def check_improvement(trees, found, model):
    """The policy target is worth at least as much as the prior, by the completed Q."""
    forest, lanes = trees._forest, np.arange(6)
    mixed = plain.mixed_values(forest, lanes, np.zeros(6, np.int64))[:, None]
    q = np.where(found.visits > 0, trees.q[:, 0], mixed).astype(np.float64)
    assert np.all((found.policy * q).sum(axis=1) >= (trees.prior[:, 0] * q).sum(axis=1) - 1e-4)


# ---------------------------------------------------------------- a game


class TakeAway:
    """Take 1 to 3 from a pile; who takes the last one wins, who takes too many loses."""

    def __init__(self, piles, num_nodes):
        self.left = np.zeros((num_nodes, len(piles)), np.int64)
        self.left[0] = piles
        self.lanes = np.arange(len(piles))

    def step(self, parents, actions, node):
        before = self.left[parents, self.lanes]
        after = before - (actions + 1)
        rewards = np.where(before <= 0, 0.0, np.where(after == 0, 1.0, np.where(after < 0, -1.0, 0.0)))
        self.left[node] = np.maximum(after, 0)
        return rewards, np.zeros(len(after)), np.zeros((len(after), 3))


@pytest.mark.parametrize("kind", ["puct", "gumbel"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_perfect_model_of_a_game_finds_the_winning_move(kind, backend):
    piles = np.array([1, 2, 3, 5, 6, 7])
    config = SearchConfig(kind, 200, 1.0, two_player=True, c_scale=1.0)
    trees, game = make_trees(config, len(piles), 3, backend), TakeAway(piles, config.num_nodes)
    legal = np.arange(1, 4) <= piles[:, None]
    roots = np.zeros((len(piles), 3)), np.zeros(len(piles))
    found = search(game.step, trees, *roots, seeds=np.arange(len(piles)), legal=legal)
    assert (found.act() + 1).tolist() == (piles % 4).tolist()
    assert kind == "gumbel" or np.all(found.values > 0)  # halving tries losing moves as often as winning ones


# ---------------------------------------------------------------- calls that cannot be


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "uct"},
        {"num_simulations": 0},
        {"discount": 0.0},
        {"discount": 1.1},
        {"discount": math.nan},
        {"pb_c_init": -1.0},
        {"pb_c_base": 0.0},
        {"value_delta_max": 0.0},
        {"dirichlet_alpha": 0.0},
        {"root_noise_weight": 1.5},
        {"max_considered": 0},
        {"c_visit": -1.0},
        {"c_scale": math.inf},
        {"first_play": "high"},
    ],
)
def test_impossible_configs_name_the_key_and_the_fix(bad):
    with pytest.raises(ConfigError, match=f"{next(iter(bad))} is .*; set it to"):
        SearchConfig(**bad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["puct", "gumbel"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(backend, kind, bad):
    trees = make_trees(SearchConfig(kind, 3, 1.0), 2, 2, backend)
    good, logits = [0.0, 0.0], np.zeros((2, 2))
    with pytest.raises(ValueError, match="tree 1 was given a number that is not finite"):
        trees.begin(logits, [0.0, bad], seeds=[0, 1])
    with pytest.raises(RuntimeError, match="call begin first"):
        trees.descend()
    for rewards, values in (([0.0, bad], good), (good, [0.0, bad])):
        trees.begin(logits, good, seeds=[0, 1])
        with pytest.raises(ValueError, match="look for NaN"):
            trees.expand(rewards, values, logits)
    if bad != -math.inf:
        trees.begin(logits, good, seeds=[0, 1])
        with pytest.raises(ValueError, match="tree 1"):
            trees.expand(good, good, [[0.0, 0.0], [0.0, bad]])


@pytest.mark.parametrize("kind", ["puct", "gumbel"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_actions_without_a_logit_are_not_tried_below_the_root(kind, backend):
    """The first action scores and nothing behind it does: what was not tried there looks better."""
    legal = np.array([False, True])

    def step(parents, actions, node):
        return np.where(parents == 0, 1.0, 0.0), np.zeros(2), np.where(legal, [[0.0, 0.0]] * 2, -np.inf)

    trees = make_trees(SearchConfig(kind, 30, 0.97), 2, 2, backend)
    search(step, trees, [[0.0, -np.inf]] * 2, np.zeros(2), seeds=[0, 1])
    assert trees.visits[:, 1:].sum() > 0
    assert not trees.visits[:, 1:, ~legal].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_without_legal_actions_is_refused(backend):
    trees = make_trees(SearchConfig("puct", 1, 1.0), 2, 2, backend)
    legal = [[True, True], [False, False]]
    with pytest.raises(ValueError, match="tree 1 has no legal action"):
        trees.begin(np.zeros((2, 2)), np.zeros(2), seeds=[0, 1], legal=legal)


def test_calls_out_of_order_and_of_wrong_shape_say_what_to_do():
    with pytest.raises(ValueError, match="at least one of each"):
        make_trees(SearchConfig(), 0, 2)
    trees = make_trees(SearchConfig("puct", 1, 1.0), 2, 3)
    with pytest.raises(RuntimeError, match="call begin first"):
        trees.expand([0, 0], [0, 0], np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"logits has the shape \(2, 2\); give \(2, 3\)"):
        trees.begin(np.zeros((2, 2)), [0, 0], seeds=[0, 1])
    with pytest.raises(ValueError, match="legal has the shape"):
        trees.begin(np.zeros((2, 3)), [0, 0], seeds=[0, 1], legal=[True, True])
    trees.begin(np.zeros((2, 3)), [0, 0], seeds=[0, 1])
    with pytest.raises(RuntimeError, match="0 of 1 simulations"):
        trees.result()
    trees.expand([0, 0], [0, 0], np.zeros((2, 3)))
    with pytest.raises(RuntimeError, match="call result"):
        trees.descend()


def test_import_does_not_load_numba_or_torch():
    code = "import sys, offbeat.search; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
