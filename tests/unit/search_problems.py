"""Models to search over, and searches written plainly, straight from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offbeat.ops.compiled import uses_numba
from offbeat.search import SearchConfig, Trees, draw_noise
from offbeat.search.rules import considered_visits

BACKENDS = ("numba", "numpy")


def make_trees(config, num_trees, num_actions, backend="numba"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBEAT_NUMBA", "1" if backend == "numba" else "0")
        if backend == "numba" and not uses_numba():
            pytest.skip("numba is not installed")
        return Trees(config, num_trees, num_actions)


class TableModel:
    """Rewards, values and logits for every (tree, node, action), all drawn beforehand."""

    def __init__(self, seed, num_trees, num_nodes, num_actions, ties=False):
        rng = np.random.default_rng(seed)
        shape = (num_trees, num_nodes, num_actions)
        self.lanes = np.arange(num_trees)
        self.rewards = rng.normal(size=shape).astype(np.float32)
        self.values = rng.normal(size=shape).astype(np.float32)
        self.logits = rng.normal(size=(*shape, num_actions)).astype(np.float32)
        self.root_logits = rng.normal(size=(num_trees, num_actions)).astype(np.float32)
        self.root_values = rng.normal(size=num_trees).astype(np.float32)
        if ties:
            for values in (self.rewards, self.logits, self.root_logits):
                values[:] = 0
            self.values[:] = self.root_values[:] = 0.3
        self.seeds = rng.integers(0, 2**64, num_trees, np.uint64)
        self.legal = rng.random((num_trees, num_actions)) < 0.6
        self.legal[self.lanes, rng.integers(0, num_actions, num_trees)] = True

    def step(self, parents, actions, node):
        at = self.lanes, parents, actions
        return self.rewards[at], self.values[at], self.logits[at]

    def noise(self, config, legal=None):
        rngs = [np.random.default_rng(lane) for lane in self.lanes]
        return draw_noise(config, rngs, np.ones_like(self.legal) if legal is None else legal)


# ---------------------------------------------------------------- plain searches of one tree


class Node:
    def __init__(self, index, value, logits, reward=0.0):
        self.index, self.value, self.reward = index, float(value), float(reward)
        self.logits = np.asarray(logits, np.float64)
        weights = np.exp(self.logits - self.logits.max())
        self.prior = weights / weights.sum()
        self.returns = [[] for _ in logits]
        self.children = {}

    def visits(self):
        return np.array([len(returns) for returns in self.returns])

    def q(self, otherwise):
        return np.array([np.mean(returns) if returns else otherwise for returns in self.returns])


def plain_search(config: SearchConfig, model: TableModel, tree: int, noise=None):
    """Root visits and value of one tree; ties go to the first action."""
    root = Node(0, model.root_values[tree], model.root_logits[tree])
    if noise is not None and config.kind == "puct":
        weight = config.root_noise_weight
        root.prior = (1 - weight) * root.prior + weight * noise
    everything = []
    for simulation in range(config.num_simulations):
        node, path, above = root, [], 0.0
        while True:
            if config.kind == "puct":
                action, above = plain_puct(config, node, everything, above)
            elif node is root:
                action = plain_halving(config, node, simulation, noise)
            else:
                action = plain_lag(config, node)
            path.append((node, action))
            if action not in node.children:
                break
            node = node.children[action]
        at = tree, node.index, action
        new = Node(simulation + 1, model.values[at], model.logits[at], model.rewards[at])
        node.children[action] = new
        gain = new.value
        for node, action in reversed(path):
            sign = -1 if config.two_player else 1
            gain = node.children[action].reward + sign * config.discount * gain
            node.returns[action].append(gain)
            everything.append(np.mean(node.returns[action]))
    return root.visits(), np.mean(np.concatenate(root.returns))


def plain_puct(config, node, everything, above):
    visits = node.visits()
    total = visits.sum() + 1
    tried = [np.mean(returns) for returns in node.returns if returns]
    below = [] if node.index == 0 else [above]
    untried = np.mean(tried + below) if tried + below else 0.0
    q = node.q({"mean": untried, "low": -np.inf}[config.first_play])
    low, high = (min(everything), max(everything)) if everything else (0.0, 0.0)
    q = np.clip((q - low) / max(high - low, config.value_delta_max), 0, 1)
    growth = math.log((total + config.pb_c_base + 1) / config.pb_c_base)
    pull = node.prior * math.sqrt(total) / (1 + visits) * (config.pb_c_init + growth)
    return int(np.argmax(q + pull)), -untried if config.two_player else untried


def plain_improved(config, node):
    """s(completed Q)."""
    visits = node.visits()
    tried = visits > 0
    if not tried.any():
        return np.zeros(len(visits))
    weighted = (node.prior * node.q(0.0))[tried].sum() / node.prior[tried].sum()
    mixed = (node.value + visits.sum() * weighted) / (1 + visits.sum())
    q = node.q(mixed)
    q = (q - q.min()) / max(q.max() - q.min(), config.value_delta_max)
    return (config.c_visit + visits.max()) * config.c_scale * q


def plain_halving(config, node, simulation, noise):
    scores = node.logits + plain_improved(config, node) + (0 if noise is None else noise)
    wanted = considered_visits(min(config.max_considered, len(scores)), config.num_simulations)[simulation]
    return int(np.argmax(np.where(node.visits() == wanted, scores, -np.inf)))


def plain_lag(config, node):
    improved = node.logits + plain_improved(config, node)
    policy = np.exp(improved - improved.max())
    return int(np.argmax(policy / policy.sum() - node.visits() / (1 + node.visits().sum())))
