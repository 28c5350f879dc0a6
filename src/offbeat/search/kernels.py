"""The loops of the search, compiled by numba.

Imported only where kernels are compiled: see `offbeat.ops.jit`. `offbeat.search.reference` holds the same
functions in numpy; both do the same operations on the same types in the same order, so that they agree bit
for bit. That is why constants are float32 here and exp is made of multiplications: libraries differ in
theirs. What the arrays hold is said in `offbeat.search.layout`.

All functions lie in one file: numba compiles anew what has changed in the file of a function, and does not
look at others, not at `layout` either.

Compiled code counts references to the arrays that a function takes, which would cost more than all the rest
if it were done for every tree. So the larger functions loop over trees themselves, and no array is handed on
in a tuple or cut into parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offbeat.ops.jit import jit
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
    Q,
)

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_INF = np.float32(np.inf)
_SMALLEST = np.float32(SMALLEST_EXPONENT)
_PER_LN2 = np.float32(1 / np.log(2))
_LN2_HIGH = np.float32(355 / 512)  # few bits, so that its products with small integers are exact
_LN2_LOW = np.float32(np.log(2) - 355 / 512)
_C2, _C3, _C4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
_C5, _C6, _C7 = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


# ---------------------------------------------------------------- numbers and ties


@jit
def _exp(x: Any) -> Any:
    """exp of a float32 that is not positive: 2^k times the series of the rest."""
    inside = _SMALLEST if x < _SMALLEST else x  # lets NaN through
    power = np.floor(inside * _PER_LN2 + _HALF)
    rest = (inside - power * _LN2_HIGH) - power * _LN2_LOW
    series = _C4 + rest * (_C5 + rest * (_C6 + rest * _C7))
    series = _ONE + rest * (_ONE + rest * (_C2 + rest * (_C3 + rest * series)))
    scale = np.int32((np.int32(power) + _BIAS) << _MANTISSA_BITS).view(np.float32)
    return _ZERO if x < _SMALLEST else series * scale


@jit
def _pick(seed: Any, step: Any, node: Any, num_nodes: Any, count: Any) -> Any:
    """One of ``count`` equals, by the number at (step, node) of the tree's splitmix64 stream."""
    mixed = seed + _GOLDEN * np.uint64(step * num_nodes + node + 1)
    mixed = (mixed ^ (mixed >> _30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _27)) * _MIX_2
    mixed = mixed ^ (mixed >> _31)
    return np.int64(((mixed >> _32) * np.uint64(count)) >> _32)


@jit
def _nth_equal(scores: Any, best: Any, number: Any) -> Any:
    """The action before which there are ``number`` of this score."""
    found = 0
    for action in range(scores.size):
        is_best = scores[action] == best
        found = action if is_best and number == 0 else found
        number -= is_best
    return found


@jit
def _best(scores: Any, seed: Any, step: Any, node: Any, num_nodes: Any) -> Any:
    """The action of highest score; ties are broken by the tree's stream."""
    best, found, ties = scores[0], 0, 1
    for action in range(1, scores.size):
        score = scores[action]
        if score > best:
            best, found, ties = score, action, 1
        elif score == best:
            ties += 1
    if ties > 1:
        found = _nth_equal(scores, best, _pick(seed, step, node, num_nodes, ties))
    return np.int64(found)


# ---------------------------------------------------------------- nodes


@jit
def _open(edges: Any, links: Any, counts: Any, nodes: Any, node: Any, logits: Any, values: Any) -> Any:
    """Make a node without visits in every tree, with the softmax of its logits as prior.

    Returns a tree whose logits or value are not finite, or -1.
    """
    bad, num_actions = -1, logits.shape[1]
    for tree in range(logits.shape[0]):
        highest, total = -_INF, _ZERO
        for action in range(num_actions):
            highest = logits[tree, action] if logits[tree, action] > highest else highest
        for action in range(num_actions):
            edges[tree, node, PRIOR, action] = _exp(logits[tree, action] - highest)
        for action in range(num_actions):
            total += edges[tree, node, PRIOR, action]
        # The total is NaN where a logit is NaN or +inf, or where all are -inf.
        if bad < 0 and not (total > _ZERO and abs(values[tree]) < _INF):
            bad = tree
        scale = np.divide(_ONE, total)
        for action in range(num_actions):
            edges[tree, node, PRIOR, action] *= scale
            edges[tree, node, Q, action] = _ZERO
            links[tree, node, VISITS, action] = 0
            links[tree, node, CHILD, action] = -1
        counts[tree, node, TOTAL_VISITS] = counts[tree, node, TRIED] = counts[tree, node, MOST_VISITS] = 0
        counts[tree, node, LEGAL] = num_actions
        nodes[tree, node, VALUE] = values[tree]
        nodes[tree, node, WEIGHTED_Q] = nodes[tree, node, WEIGHT] = 0.0
    return bad


@jit
def _link(links: Any, counts: Any, nodes: Any, leaf: Any, node: Any, rewards: Any) -> Any:
    """Hang the new nodes where the trees wanted them; returns a tree whose reward is not finite, or -1."""
    bad = -1
    for tree in range(rewards.size):
        parent, action = leaf[0, tree], leaf[1, tree]
        links[tree, parent, CHILD, action] = node
        counts[tree, node, PARENT] = parent
        counts[tree, node, ACTION] = action
        nodes[tree, node, REWARD] = rewards[tree]
        if bad < 0 and not abs(rewards[tree]) < _INF:
            bad = tree
    return bad


@jit
def _visit(
    edges: Any, links: Any, counts: Any, tree: Any, node: Any, action: Any, gain: Any
) -> tuple[Any, Any, Any]:
    """Count a visit and take its return into the mean; returns the visits, the mean before and after."""
    visits = links[tree, node, VISITS, action] + np.int32(1)
    before = edges[tree, node, Q, action]
    after = before + np.divide(gain - before, np.float32(visits))
    links[tree, node, VISITS, action] = visits
    edges[tree, node, Q, action] = after
    counts[tree, node, TOTAL_VISITS] += 1
    counts[tree, node, TRIED] += visits == 1
    return visits, before, after


# ---------------------------------------------------------------- pUCT


@jit
def _back_up_puct(
    edges: Any, links: Any, counts: Any, nodes: Any, bounds: Any, new: Any, factor: Any
) -> None:
    """Take the values of the new nodes into the means of all edges above them."""
    for tree in range(nodes.shape[0]):
        node, gain = np.int64(new), np.float32(nodes[tree, new, VALUE])
        low, high = bounds[tree, LOW], bounds[tree, HIGH]
        while node > 0:
            gain = np.float32(nodes[tree, node, REWARD]) + factor * gain
            action, node = np.int64(counts[tree, node, ACTION]), np.int64(counts[tree, node, PARENT])
            visits, before, after = _visit(edges, links, counts, tree, node, action, gain)
            prior = edges[tree, node, PRIOR, action]
            edges[tree, node, SHARE, action] = np.divide(prior, np.float32(visits + 1))
            nodes[tree, node, WEIGHTED_Q] += np.float64(after) - np.float64(before)
            low, high = min(low, after), max(high, after)
        bounds[tree, LOW], bounds[tree, HIGH] = low, high


@jit
def _score_puct(
    edges: Any, links: Any, scores: Any, tree: Any, node: Any, low: Any, scale: Any, untried: Any, weight: Any
) -> None:
    """Write the pUCT scores of a node."""
    base = min(max((untried - low) * scale, _ZERO), _ONE)
    for action in range(scores.size):
        value = min(max((edges[tree, node, Q, action] - low) * scale, _ZERO), _ONE)
        value = value if links[tree, node, VISITS, action] > 0 else base
        scores[action] = value + edges[tree, node, SHARE, action] * weight


@jit
def _descend_puct(
    edges: Any,
    links: Any,
    counts: Any,
    nodes: Any,
    bounds: Any,
    leaf: Any,
    seeds: Any,
    table: Any,
    step: Any,
    factor: Any,
    delta: Any,
    first_play: Any,
) -> None:
    """Walk from the roots to actions without a node: the leaves."""
    num_nodes, num_actions = edges.shape[1], edges.shape[3]
    scores = np.empty(num_actions, np.float32)
    for tree in range(leaf.shape[1]):
        node, action, child, above = np.int64(0), np.int64(0), np.int64(0), 0.0
        low = bounds[tree, LOW]
        scale = np.divide(_ONE, max(bounds[tree, HIGH] - low, delta))
        while child >= 0:
            node, untried = child, -np.inf
            if first_play == MEAN:
                num_known = max(counts[tree, node, TRIED] + (node > 0), 1)
                untried = np.divide(above + nodes[tree, node, WEIGHTED_Q], np.float64(num_known))
            weight = table[counts[tree, node, TOTAL_VISITS]]
            _score_puct(edges, links, scores, tree, node, low, scale, np.float32(untried), weight)
            action = _best(scores, seeds[tree], step, node, num_nodes)
            child, above = np.int64(links[tree, node, CHILD, action]), untried if factor > _ZERO else -untried
        leaf[0, tree], leaf[1, tree] = node, action


@jit
def begin_puct(
    edges: Any,
    links: Any,
    counts: Any,
    nodes: Any,
    bounds: Any,
    leaf: Any,
    seeds: Any,
    logits: Any,
    values: Any,
    noise: Any,
    table: Any,
    noise_weight: float,
    discount: float,
    delta: float,
    first_play: int,
) -> int:
    """Make the roots and choose the first leaves; returns a tree with a number that is not finite, or -1."""
    bad: int = _open(edges, links, counts, nodes, 0, logits, values)
    if bad >= 0:
        return bad
    own, other = np.float32(1.0 - noise_weight), np.float32(noise_weight)
    for tree in range(logits.shape[0]):
        counts[tree, 0, PARENT] = counts[tree, 0, ACTION] = -1
        nodes[tree, 0, REWARD] = 0.0
        bounds[tree, LOW], bounds[tree, HIGH] = _INF, -_INF
        for action in range(logits.shape[1]):
            prior = own * edges[tree, 0, PRIOR, action] + other * noise[tree, action]
            is_legal = logits[tree, action] > -_INF
            edges[tree, 0, PRIOR, action] = prior if is_legal else _ZERO
            edges[tree, 0, SHARE, action] = prior if is_legal else -_INF
            counts[tree, 0, LEGAL] -= not is_legal
    factor, least = np.float32(discount), np.float32(delta)
    _descend_puct(edges, links, counts, nodes, bounds, leaf, seeds, table, 0, factor, least, first_play)
    return -1


@jit
def advance_puct(
    edges: Any,
    links: Any,
    counts: Any,
    nodes: Any,
    bounds: Any,
    leaf: Any,
    seeds: Any,
    logits: Any,
    values: Any,
    rewards: Any,
    table: Any,
    step: int,
    discount: float,
    delta: float,
    first_play: int,
) -> int:
    """Add node ``step`` to every tree and choose the next leaves; returns as `begin_puct`.

    ``discount`` is negative where players alternate.
    """
    bad: int = max(
        _open(edges, links, counts, nodes, step, logits, values),
        _link(links, counts, nodes, leaf, step, rewards),
    )
    if bad >= 0:
        return bad
    for tree in range(logits.shape[0]):
        for action in range(logits.shape[1]):
            is_legal = logits[tree, action] > -_INF
            edges[tree, step, SHARE, action] = edges[tree, step, PRIOR, action] if is_legal else -_INF
    factor, least = np.float32(discount), np.float32(delta)
    _back_up_puct(edges, links, counts, nodes, bounds, step, factor)
    if step + 1 < edges.shape[1]:
        _descend_puct(
            edges, links, counts, nodes, bounds, leaf, seeds, table, step, factor, least, first_play
        )
    return -1


# ---------------------------------------------------------------- Gumbel


@jit
def _back_up_gumbel(edges: Any, links: Any, counts: Any, nodes: Any, new: Any, factor: Any) -> None:
    """Take the values of the new nodes into the means of all edges above them."""
    for tree in range(nodes.shape[0]):
        node, gain = np.int64(new), np.float32(nodes[tree, new, VALUE])
        while node > 0:
            gain = np.float32(nodes[tree, node, REWARD]) + factor * gain
            action, node = np.int64(counts[tree, node, ACTION]), np.int64(counts[tree, node, PARENT])
            visits, before, after = _visit(edges, links, counts, tree, node, action, gain)
            weight = max(np.float64(edges[tree, node, PRIOR, action]), TINY)
            nodes[tree, node, WEIGHTED_Q] += weight * (np.float64(after) - np.float64(before))
            nodes[tree, node, WEIGHT] += weight if visits == 1 else 0.0
            counts[tree, node, MOST_VISITS] = max(counts[tree, node, MOST_VISITS], visits)


@jit
def _mixed_value(total_visits: Any, value: Any, weighted_q: Any, weight: Any) -> Any:
    """v_mix: see `reference.mixed_values`."""
    total = np.float64(total_visits)
    return np.float32(np.divide(value * weight + total * weighted_q, weight * (1.0 + total)))


@jit
def _scale(
    edges: Any, links: Any, tree: Any, node: Any, mixed: Any, some: Any, weight: Any, delta: Any
) -> tuple[Any, Any]:
    """The lowest completed Q of a node and what differences to it are multiplied with.

    ``mixed`` is Q of untried actions, if there are some.
    """
    low, high = (mixed, mixed) if some else (_INF, -_INF)
    for action in range(edges.shape[3]):
        value = edges[tree, node, Q, action]
        is_tried = links[tree, node, VISITS, action] > 0
        low = value if is_tried and value < low else low
        high = value if is_tried and value > high else high
    return low, np.divide(weight, max(high - low, delta))


@jit
def _best_prior(edges: Any, tree: Any, node: Any, seed: Any, step: Any) -> Any:
    """The action of highest log prior, of a node that has no visits: `_best` without copying its row."""
    highest, first, ties = edges[tree, node, LOGIT, 0], 0, 1
    for action in range(1, edges.shape[3]):
        score = edges[tree, node, LOGIT, action]
        if score > highest:
            highest, first, ties = score, action, 1
        elif score == highest:
            ties += 1
    left, found = _pick(seed, step, node, edges.shape[1], ties) if ties > 1 else 0, first
    for action in range(first, edges.shape[3] if ties > 1 else first):
        if edges[tree, node, LOGIT, action] == highest:
            found = action if left == 0 else found
            left -= 1
    return found


@jit
def _score_halving(
    edges: Any, links: Any, scores: Any, tree: Any, visits: Any, mixed: Any, low: Any, scale: Any
) -> None:
    """Write the root's scores: for actions with this number of visits, whose turn it is."""
    for action in range(scores.size):
        num_visits = links[tree, 0, VISITS, action]
        value = edges[tree, 0, Q, action] if num_visits > 0 else mixed
        score = edges[tree, 0, LOGIT, action] + (value - low) * scale
        scores[action] = score if num_visits == visits else -_INF


@jit
def _score_lag(
    edges: Any,
    links: Any,
    scores: Any,
    tree: Any,
    node: Any,
    num_visits: Any,
    mixed: Any,
    low: Any,
    scale: Any,
) -> None:
    """Write how far the visits of each action lag behind the improved policy.

    policy(a) - n_a / (1 + N), times what makes it free of divisions.
    """
    highest, total = -_INF, _ZERO
    for action in range(scores.size):
        value = edges[tree, node, Q, action] if links[tree, node, VISITS, action] > 0 else mixed
        score = edges[tree, node, LOGIT, action] + (value - low) * scale
        scores[action] = score
        highest = score if score > highest else highest
    for action in range(scores.size):
        scores[action] = _exp(scores[action] - highest)
    for action in range(scores.size):
        total += scores[action]
    all_visits = np.float32(num_visits + 1)
    for action in range(scores.size):
        visits = np.float32(links[tree, node, VISITS, action])
        scores[action] = scores[action] * all_visits - visits * total


@jit
def _descend_gumbel(
    edges: Any,
    links: Any,
    counts: Any,
    nodes: Any,
    leaf: Any,
    seeds: Any,
    table: Any,
    step: Any,
    c_visit: Any,
    c_scale: Any,
    delta: Any,
) -> None:
    """Walk from the roots to actions without a node: the leaves."""
    num_nodes = edges.shape[1]
    scores = np.empty(edges.shape[3], np.float32)
    for tree in range(leaf.shape[1]):
        node, action, child = np.int64(0), np.int64(0), np.int64(0)
        while child >= 0:
            node, total_visits = child, counts[tree, child, TOTAL_VISITS]
            if total_visits == 0:
                action = np.int64(_best_prior(edges, tree, node, seeds[tree], step))
            else:
                value, weighted_q = nodes[tree, node, VALUE], nodes[tree, node, WEIGHTED_Q]
                mixed = _mixed_value(total_visits, value, weighted_q, nodes[tree, node, WEIGHT])
                some = counts[tree, node, TRIED] < counts[tree, node, LEGAL]
                weight = (c_visit + np.float32(counts[tree, node, MOST_VISITS])) * c_scale
                low, scale = _scale(edges, links, tree, node, mixed, some, weight, delta)
                if node > 0:
                    _score_lag(edges, links, scores, tree, node, total_visits, mixed, low, scale)
                else:
                    row = min(counts[tree, 0, LEGAL], table.shape[0] - 1)
                    _score_halving(edges, links, scores, tree, table[row, step], mixed, low, scale)
                action = np.int64(_best(scores, seeds[tree], step, node, num_nodes))
            child = np.int64(links[tree, node, CHILD, action])
        leaf[0, tree], leaf[1, tree] = node, action


@jit
def begin_gumbel(
    edges: Any,
    links: Any,
    counts: Any,
    nodes: Any,
    bounds: Any,
    leaf: Any,
    seeds: Any,
    logits: Any,
    values: Any,
    noise: Any,
    table: Any,
    discount: float,
    c_visit: float,
    c_scale: float,
    delta: float,
) -> int:
    """Make the roots and choose the first leaves; returns a tree with a number that is not finite, or -1."""
    bad: int = _open(edges, links, counts, nodes, 0, logits, values)
    if bad >= 0:
        return bad
    for tree in range(logits.shape[0]):
        counts[tree, 0, PARENT] = counts[tree, 0, ACTION] = -1
        nodes[tree, 0, REWARD] = 0.0
        for action in range(logits.shape[1]):
            is_legal = logits[tree, action] > -_INF
            edges[tree, 0, LOGIT, action] = logits[tree, action] + noise[tree, action] if is_legal else -_INF
            counts[tree, 0, LEGAL] -= not is_legal
    visit, weight, least = np.float32(c_visit), np.float32(c_scale), np.float32(delta)
    _descend_gumbel(edges, links, counts, nodes, leaf, seeds, table, 0, visit, weight, least)
    return -1


@jit
def advance_gumbel(
    edges: Any,
    links: Any,
    counts: Any,
    nodes: Any,
    bounds: Any,
    leaf: Any,
    seeds: Any,
    logits: Any,
    values: Any,
    rewards: Any,
    table: Any,
    step: int,
    discount: float,
    c_visit: float,
    c_scale: float,
    delta: float,
) -> int:
    """Add node ``step`` to every tree and choose the next leaves; returns as `begin_gumbel`.

    ``discount`` is negative where players alternate.
    """
    bad: int = max(
        _open(edges, links, counts, nodes, step, logits, values),
        _link(links, counts, nodes, leaf, step, rewards),
    )
    if bad >= 0:
        return bad
    for tree in range(logits.shape[0]):
        for action in range(logits.shape[1]):
            edges[tree, step, LOGIT, action] = logits[tree, action]
    _back_up_gumbel(edges, links, counts, nodes, step, np.float32(discount))
    if step + 1 < edges.shape[1]:
        visit, weight, least = np.float32(c_visit), np.float32(c_scale), np.float32(delta)
        _descend_gumbel(edges, links, counts, nodes, leaf, seeds, table, step, visit, weight, least)
    return -1


@jit
def finish_gumbel(
    edges: Any,
    links: Any,
    counts: Any,
    nodes: Any,
    bounds: Any,
    leaf: Any,
    seeds: Any,
    logits: Any,
    policy: Any,
    scores: Any,
    c_visit: float,
    c_scale: float,
    delta: float,
) -> None:
    """Write the roots' improved policy and their scores with noise, both ``[B, A]``."""
    visit, share, least = np.float32(c_visit), np.float32(c_scale), np.float32(delta)
    gains = np.empty(logits.shape[1], np.float32)
    for tree in range(logits.shape[0]):
        value, weighted_q = nodes[tree, 0, VALUE], nodes[tree, 0, WEIGHTED_Q]
        mixed = _mixed_value(counts[tree, 0, TOTAL_VISITS], value, weighted_q, nodes[tree, 0, WEIGHT])
        some = counts[tree, 0, TRIED] < counts[tree, 0, LEGAL]
        weight = (visit + np.float32(counts[tree, 0, MOST_VISITS])) * share
        low, scale = _scale(edges, links, tree, 0, mixed, some, weight, least)
        highest, total = -_INF, _ZERO
        for action in range(gains.size):
            q = edges[tree, 0, Q, action] if links[tree, 0, VISITS, action] > 0 else mixed
            gain = (q - low) * scale
            scores[tree, action] = edges[tree, 0, LOGIT, action] + gain
            gains[action] = gain + logits[tree, action]
            highest = gains[action] if gains[action] > highest else highest
        for action in range(gains.size):
            policy[tree, action] = _exp(gains[action] - highest)
        for action in range(gains.size):
            total += policy[tree, action]
        for action in range(gains.size):
            policy[tree, action] *= np.divide(_ONE, total)
