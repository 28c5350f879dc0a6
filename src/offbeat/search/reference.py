"""What `offbeat.search.kernels` does, by numpy alone, for all trees at a time and with the same results.

The fallback where numba is not, and what the compiled loops are tested against. Operations, types and order
are those of the kernels: sums run from the first action to the last, and exp is made of multiplications.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.search.layout import (
    ACTION,
    CHILD,
    HIGH,
    LEGAL,
    LOGIT,
    LOW,
    MEAN,
    MOST_VISITS,
    PARENT,
    PRIOR,
    REWARD,
    SHARE,
    SMALLEST_EXPONENT,
    TINY,
    TOTAL_VISITS,
    TRIED,
    VALUE,
    VISITS,
    WEIGHT,
    WEIGHTED_Q,
    Forest,
    Q,
)

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_ONE = np.float32(1)
_SMALLEST = np.float32(SMALLEST_EXPONENT)
_PER_LN2 = np.float32(1 / np.log(2))
_LN2_HIGH, _LN2_LOW = np.float32(355 / 512), np.float32(np.log(2) - 355 / 512)
_SERIES = [np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2, 1, 1)]
_GOLDEN, _MIX_1, _MIX_2 = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


# ---------------------------------------------------------------- numbers


def exp(x: F32) -> F32:
    """exp of float32 numbers that are not positive: 2^k times the series of the rest."""
    inside = np.maximum(x, _SMALLEST)
    power = np.floor(inside * _PER_LN2 + np.float32(0.5))
    rest = (inside - power * _LN2_HIGH) - power * _LN2_LOW
    series = np.full_like(rest, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series = coefficient + rest * series
    scale = ((power.astype(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.where(x < _SMALLEST, np.float32(0), series * scale)


def softmax(logits: F32) -> F32:
    """Probabilities ``[B, A]`` of logits of which some may be -inf, in the operations of the kernels."""
    weights = exp(logits - logits.max(axis=1, keepdims=True))
    return weights * (_ONE / _sum(weights))[:, None]


def _sum(rows: F32) -> F32:
    """Sums of rows ``[B, A]``, added from the first to the last."""
    total: F32 = np.cumsum(rows, axis=1)[:, -1]
    return total


def _pick(forest: Forest, trees: I64, step: int, nodes: I64, counts: NDArray[np.integer]) -> I64:
    """One of ``counts`` equals, by the number at (step, node) of each tree's splitmix64 stream."""
    position = (step * forest.edges.shape[1] + nodes + 1).astype(np.uint64)
    mixed = forest.seeds[trees] + _GOLDEN * position
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    picked: U64 = ((mixed >> np.uint64(32)) * counts.astype(np.uint64)) >> np.uint64(32)
    return picked.astype(np.int64)


def _best(forest: Forest, scores: F32, trees: I64, step: int, nodes: I64) -> I64:
    """The action of highest score; ties are broken by the tree's stream."""
    is_best = scores == scores.max(axis=1, keepdims=True)
    order = np.cumsum(is_best, axis=1)
    wanted = _pick(forest, trees, step, nodes, order[:, -1]) + 1
    found: I64 = (is_best & (order == wanted[:, None])).argmax(axis=1)
    return found


# ---------------------------------------------------------------- nodes


def _find_bad(trees: I64, logits: F32, *numbers: F32) -> int:
    """The first tree with a number that is not finite, or without any possible action; -1 without."""
    bad = np.isnan(logits[trees]).any(axis=1) | ~(np.abs(logits[trees].max(axis=1)) < np.inf)
    for values in numbers:
        bad |= ~(np.abs(values[trees]) < np.inf)
    return int(trees[bad.argmax()]) if bad.any() else -1


def _open(forest: Forest, trees: I64, node: int, logits: F32, values: F32) -> None:
    """Make nodes without visits whose prior is the softmax of the logits."""
    forest.edges[trees, node, PRIOR] = softmax(logits[trees])
    forest.edges[trees, node, Q] = 0
    forest.links[trees, node, VISITS] = 0
    forest.links[trees, node, CHILD] = -1
    forest.counts[trees, node] = 0
    forest.counts[trees, node, LEGAL] = logits.shape[1]
    forest.nodes[trees, node] = 0
    forest.nodes[trees, node, VALUE] = values[trees]


def _open_root(forest: Forest, trees: I64, logits: F32, values: F32) -> None:
    """Make roots."""
    forest.leaf[:] = 0
    _open(forest, trees, 0, logits, values)
    forest.counts[trees, 0, LEGAL] = (logits[trees] > -np.inf).sum(axis=1)
    forest.counts[trees, 0, PARENT] = forest.counts[trees, 0, ACTION] = -1


def _open_leaf(forest: Forest, trees: I64, node: int, logits: F32, values: F32, rewards: F32) -> None:
    """Make nodes where the trees want them."""
    _open(forest, trees, node, logits, values)
    parents, actions = forest.leaf[:, trees]
    forest.links[trees, parents, CHILD, actions] = node
    forest.counts[trees, node, PARENT] = parents
    forest.counts[trees, node, ACTION] = actions
    forest.nodes[trees, node, REWARD] = rewards[trees]


class _Visit(NamedTuple):
    """A step of a back-up: for each tree the node and action visited, its visits, and Q before and after."""

    trees: I64
    nodes: I32
    actions: I32
    visits: I32
    before: F32
    after: F32


def _visit(forest: Forest, trees: I64, nodes: I32, actions: I32, gains: F32) -> _Visit:
    """Count visits and take their returns into the means."""
    where = trees, nodes, VISITS, actions
    visits = forest.links[where] + np.int32(1)
    before = forest.edges[trees, nodes, Q, actions]
    after = before + (gains - before) / visits.astype(np.float32)
    forest.links[where] = visits
    forest.edges[trees, nodes, Q, actions] = after
    forest.counts[trees, nodes, TOTAL_VISITS] += 1
    forest.counts[trees, nodes, TRIED] += visits == 1
    return _Visit(trees, nodes, actions, visits, before, after)


def _back_up(forest: Forest, trees: I64, node: int, factor: np.float32) -> list[_Visit]:
    """Take the value of a new node into the means of all edges above it."""
    below = np.full(trees.size, node, np.int32)
    gains = forest.nodes[trees, below, VALUE].astype(np.float32)
    visits = list[_Visit]()
    while trees.size:
        gains = forest.nodes[trees, below, REWARD].astype(np.float32) + factor * gains
        actions, below = forest.counts[trees, below, ACTION], forest.counts[trees, below, PARENT]
        visits.append(_visit(forest, trees, below, actions, gains))
        goes_on = below > 0
        trees, below, gains = trees[goes_on], below[goes_on], gains[goes_on]
    return visits


# ---------------------------------------------------------------- pUCT


def _back_up_puct(forest: Forest, trees: I64, node: int, factor: np.float32) -> None:
    for visit in _back_up(forest, trees, node, factor):
        at = visit.trees, visit.nodes
        prior = forest.edges[*at, PRIOR, visit.actions]
        forest.edges[*at, SHARE, visit.actions] = prior / (visit.visits + np.int32(1)).astype(np.float32)
        forest.nodes[*at, WEIGHTED_Q] += visit.after.astype(np.float64) - visit.before.astype(np.float64)
        low, high = forest.bounds[visit.trees].T
        forest.bounds[visit.trees, LOW] = np.minimum(low, visit.after)
        forest.bounds[visit.trees, HIGH] = np.maximum(high, visit.after)


def _untried(forest: Forest, trees: I64, nodes: I64, above: F64, first_play: int) -> F64:
    """Q of the actions that were not tried; ``above`` is that of the node above."""
    if first_play == MEAN:
        weight = forest.counts[trees, nodes, TRIED] + (nodes > 0)
        mean: F64 = (above + forest.nodes[trees, nodes, WEIGHTED_Q]) / np.maximum(weight, 1)
        return mean
    return np.full(trees.size, -np.inf)


def _score_puct(forest: Forest, table: F32, trees: I64, nodes: I64, untried: F64, delta: np.float32) -> F32:
    """The pUCT scores ``[B, A]`` of nodes."""
    low, high = forest.bounds[trees].T[:, :, None]
    scale = _ONE / np.maximum(high - low, delta)
    weight = table[forest.counts[trees, nodes, TOTAL_VISITS]][:, None]
    is_tried = forest.links[trees, nodes, VISITS] > 0
    values = np.where(is_tried, forest.edges[trees, nodes, Q], untried.astype(np.float32)[:, None])
    pull = forest.edges[trees, nodes, SHARE] * weight
    scores: F32 = np.clip((values - low) * scale, np.float32(0), _ONE) + pull
    return scores


def _descend_puct(
    forest: Forest, table: F32, trees: I64, step: int, factor: np.float32, delta: np.float32, first_play: int
) -> None:
    """Walk from the roots to actions without a node: the leaves."""
    nodes, above = np.zeros(trees.size, np.int64), np.zeros(trees.size)
    while trees.size:
        untried = _untried(forest, trees, nodes, above, first_play)
        scores = _score_puct(forest, table, trees, nodes, untried, delta)
        actions = _best(forest, scores, trees, step, nodes)
        children = forest.links[trees, nodes, CHILD, actions]
        is_leaf = children < 0
        forest.leaf[:, trees[is_leaf]] = nodes[is_leaf], actions[is_leaf]
        trees, nodes = trees[~is_leaf], children[~is_leaf].astype(np.int64)
        above = untried[~is_leaf] if factor > 0 else -untried[~is_leaf]


def begin_puct(
    edges: F32,
    links: I32,
    counts: I32,
    nodes: F64,
    bounds: F32,
    leaf: I32,
    seeds: U64,
    logits: F32,
    values: F32,
    noise: F32,
    table: F32,
    noise_weight: float,
    discount: float,
    delta: float,
    first_play: int,
) -> int:
    """Make the roots and choose the first leaves; returns a tree with a number that is not finite, or -1."""
    forest, trees = Forest(edges, links, counts, nodes, bounds, leaf, seeds), np.arange(len(logits))
    if (bad := _find_bad(trees, logits, values)) >= 0:
        return bad
    _open_root(forest, trees, logits, values)
    own, other = np.float32(1.0 - noise_weight), np.float32(noise_weight)
    prior, is_legal = own * edges[trees, 0, PRIOR] + other * noise[trees], logits[trees] > -np.inf
    edges[trees, 0, PRIOR] = np.where(is_legal, prior, np.float32(0))
    edges[trees, 0, SHARE] = np.where(is_legal, prior, -np.inf)
    bounds[trees] = np.inf, -np.inf
    _descend_puct(forest, table, trees, 0, np.float32(discount), np.float32(delta), first_play)
    return -1


def advance_puct(
    edges: F32,
    links: I32,
    counts: I32,
    nodes: F64,
    bounds: F32,
    leaf: I32,
    seeds: U64,
    logits: F32,
    values: F32,
    rewards: F32,
    table: F32,
    step: int,
    discount: float,
    delta: float,
    first_play: int,
) -> int:
    """Add node ``step`` to every tree and choose the next leaves; returns as `begin_puct`.

    ``discount`` is negative where players alternate.
    """
    forest, trees = Forest(edges, links, counts, nodes, bounds, leaf, seeds), np.arange(len(logits))
    if (bad := _find_bad(trees, logits, values, rewards)) >= 0:
        return bad
    _open_leaf(forest, trees, step, logits, values, rewards)
    edges[trees, step, SHARE] = np.where(logits[trees] > -np.inf, edges[trees, step, PRIOR], -np.inf)
    factor = np.float32(discount)
    _back_up_puct(forest, trees, step, factor)
    if step + 1 < edges.shape[1]:
        _descend_puct(forest, table, trees, step, factor, np.float32(delta), first_play)
    return -1


# ---------------------------------------------------------------- Gumbel


class Weighing(NamedTuple):
    """How Q is weighed against the prior."""

    c_visit: np.float32
    c_scale: np.float32
    delta: np.float32


def _back_up_gumbel(forest: Forest, trees: I64, node: int, factor: np.float32) -> None:
    for visit in _back_up(forest, trees, node, factor):
        at = visit.trees, visit.nodes
        weight = np.maximum(forest.edges[*at, PRIOR, visit.actions].astype(np.float64), TINY)
        change = visit.after.astype(np.float64) - visit.before.astype(np.float64)
        forest.nodes[*at, WEIGHTED_Q] += weight * change
        forest.nodes[*at, WEIGHT] += np.where(visit.visits == 1, weight, 0.0)
        forest.counts[*at, MOST_VISITS] = np.maximum(forest.counts[*at, MOST_VISITS], visit.visits)


def mixed_values(forest: Forest, trees: I64, nodes: I64) -> F32:
    """v_mix ``[B]`` of nodes that have visits: what Q of their untried actions is taken to be.

    (v + N * sum of P * Q over tried actions / sum of P over these) / (1 + N).
    """
    total = forest.counts[trees, nodes, TOTAL_VISITS].astype(np.float64)
    weight = forest.nodes[trees, nodes, WEIGHT]
    gathered = forest.nodes[trees, nodes, VALUE] * weight + total * forest.nodes[trees, nodes, WEIGHTED_Q]
    mixed: F64 = gathered / (weight * (1.0 + total))
    return mixed.astype(np.float32)


def advantages(forest: Forest, trees: I64, nodes: I64, weighing: Weighing) -> F32:
    """s(completed Q) ``[B, A]`` of nodes that have visits.

    (c_visit + most visits) * c_scale * Q, with Q stretched to [0, 1].
    """
    mixed = mixed_values(forest, trees, nodes)[:, None]
    is_tried = forest.links[trees, nodes, VISITS] > 0
    q, counts = forest.edges[trees, nodes, Q], forest.counts[trees, nodes]
    bound = np.where((counts[:, TRIED] < counts[:, LEGAL])[:, None], mixed, np.float32(np.nan))
    found = np.concatenate([np.where(is_tried, q, np.float32(np.nan)), bound], axis=1)
    low, high = np.fmin.reduce(found, axis=1), np.fmax.reduce(found, axis=1)
    most = counts[:, MOST_VISITS].astype(np.float32)
    scale = (weighing.c_visit + most) * weighing.c_scale / np.maximum(high - low, weighing.delta)
    gains: F32 = (np.where(is_tried, q, mixed) - low[:, None]) * scale[:, None]
    return gains


def _score_root(forest: Forest, table: I32, trees: I64, step: int, weighing: Weighing) -> F32:
    """The roots' scores: -inf for all actions but those whose turn it is in sequential halving."""
    logits: F32 = forest.edges[trees, 0, LOGIT]
    if step == 0:
        return logits
    improved = logits + advantages(forest, trees, np.zeros(trees.size, np.int64), weighing)
    visits = table[np.minimum(forest.counts[trees, 0, LEGAL], len(table) - 1), step]
    is_next = forest.links[trees, 0, VISITS] == visits[:, None]
    return np.where(is_next, improved, np.float32(-np.inf))


def _score_inside(forest: Forest, trees: I64, nodes: I64, weighing: Weighing) -> F32:
    """How far the visits of each action lag behind the improved policy.

    policy(a) - n_a / (1 + N), times what makes it free of divisions.
    """
    logits: F32 = forest.edges[trees, nodes, LOGIT]
    total = forest.counts[trees, nodes, TOTAL_VISITS]
    scores, known = logits.copy(), total > 0
    if known.any():
        at = trees[known], nodes[known]
        improved = logits[known] + advantages(forest, *at, weighing)
        weights = exp(improved - improved.max(axis=1, keepdims=True))
        visits = forest.links[*at, VISITS].astype(np.float32)
        scale = (total[known] + np.int32(1)).astype(np.float32)
        scores[known] = weights * scale[:, None] - visits * _sum(weights)[:, None]
    return scores


def _descend_gumbel(forest: Forest, table: I32, trees: I64, step: int, weighing: Weighing) -> None:
    """Walk from the roots to actions without a node: the leaves."""
    nodes = np.zeros(trees.size, np.int64)
    scores = _score_root(forest, table, trees, step, weighing)
    while trees.size:
        actions = _best(forest, scores, trees, step, nodes)
        children = forest.links[trees, nodes, CHILD, actions]
        is_leaf = children < 0
        forest.leaf[:, trees[is_leaf]] = nodes[is_leaf], actions[is_leaf]
        trees, nodes = trees[~is_leaf], children[~is_leaf].astype(np.int64)
        scores = _score_inside(forest, trees, nodes, weighing)


def begin_gumbel(
    edges: F32,
    links: I32,
    counts: I32,
    nodes: F64,
    bounds: F32,
    leaf: I32,
    seeds: U64,
    logits: F32,
    values: F32,
    noise: F32,
    table: I32,
    discount: float,
    c_visit: float,
    c_scale: float,
    delta: float,
) -> int:
    """Make the roots and choose the first leaves; returns a tree with a number that is not finite, or -1."""
    forest, trees = Forest(edges, links, counts, nodes, bounds, leaf, seeds), np.arange(len(logits))
    if (bad := _find_bad(trees, logits, values)) >= 0:
        return bad
    _open_root(forest, trees, logits, values)
    is_legal = logits[trees] > -np.inf
    edges[trees, 0, LOGIT] = np.where(is_legal, logits[trees] + noise[trees], np.float32(-np.inf))
    weighing = Weighing(np.float32(c_visit), np.float32(c_scale), np.float32(delta))
    _descend_gumbel(forest, table, trees, 0, weighing)
    return -1


def advance_gumbel(
    edges: F32,
    links: I32,
    counts: I32,
    nodes: F64,
    bounds: F32,
    leaf: I32,
    seeds: U64,
    logits: F32,
    values: F32,
    rewards: F32,
    table: I32,
    step: int,
    discount: float,
    c_visit: float,
    c_scale: float,
    delta: float,
) -> int:
    """Add node ``step`` to every tree and choose the next leaves; returns as `begin_gumbel`.

    ``discount`` is negative where players alternate.
    """
    forest, trees = Forest(edges, links, counts, nodes, bounds, leaf, seeds), np.arange(len(logits))
    if (bad := _find_bad(trees, logits, values, rewards)) >= 0:
        return bad
    _open_leaf(forest, trees, step, logits, values, rewards)
    edges[trees, step, LOGIT] = logits[trees]
    _back_up_gumbel(forest, trees, step, np.float32(discount))
    if step + 1 < edges.shape[1]:
        weighing = Weighing(np.float32(c_visit), np.float32(c_scale), np.float32(delta))
        _descend_gumbel(forest, table, trees, step, weighing)
    return -1


def finish_gumbel(
    edges: F32,
    links: I32,
    counts: I32,
    nodes: F64,
    bounds: F32,
    leaf: I32,
    seeds: U64,
    logits: F32,
    policy: F32,
    scores: F32,
    c_visit: float,
    c_scale: float,
    delta: float,
) -> None:
    """Write the roots' improved policy and their scores with noise, both ``[B, A]``."""
    forest, trees = Forest(edges, links, counts, nodes, bounds, leaf, seeds), np.arange(len(logits))
    weighing = Weighing(np.float32(c_visit), np.float32(c_scale), np.float32(delta))
    gains = advantages(forest, trees, np.zeros(trees.size, np.int64), weighing)
    policy[:] = softmax(gains + logits)
    scores[:] = edges[:, 0, LOGIT] + gains
