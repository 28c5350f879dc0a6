"""Batched Monte-Carlo tree search over a model: many trees, one model call per simulation."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.ops.compiled import uses_numba
from offbeat.search import reference
from offbeat.search.config import SearchConfig
from offbeat.search.layout import (
    AT_LOW,
    CHILD,
    MEAN,
    PARENT,
    PRIOR,
    REWARD,
    VALUE,
    VISITS,
    Q,
    make_forest,
)
from offbeat.search.result import SearchResult
from offbeat.search.rules import exploration_table, halving_table

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

ModelStep = Callable[[I32, I32, int], tuple[ArrayLike, ArrayLike, ArrayLike]]
"""``model_step(parents [B], actions [B], node) -> (rewards [B], values [B], logits [B, A])``.

For each tree, what follows when ``actions`` are taken at the nodes ``parents``; it becomes node ``node``."""

_FIRST_PLAY = {"mean": MEAN, "low": AT_LOW}


class Trees:
    """``num_trees`` search trees over ``num_actions`` actions, made once and used for every search.

    Node 0 is the root, and simulation s makes node s + 1 in every tree: what a model keeps per node is one
    array with an axis of ``config.num_nodes``. A search is `begin`, then ``num_simulations`` times `descend`
    and `expand`, then `result`; `search` does that. It is a function of what it is given: a tree's seed
    breaks its ties, and the other trees do not matter.

    Example::

        trees = Trees(SearchConfig("gumbel", num_simulations=16), num_trees=64, num_actions=4)
        trees.begin(logits, values, seeds=seeds)
        for node in range(1, trees.config.num_nodes):
            parents, actions = trees.descend()
            trees.expand(*model(states[parents, lanes], actions))
        actions = trees.result().act()
    """

    def __init__(self, config: SearchConfig, num_trees: int, num_actions: int) -> None:
        if num_trees < 1 or num_actions < 1:
            raise ValueError(
                f"{num_trees} trees with {num_actions} actions: a search needs at least one of each"
            )
        self.config, self.num_trees, self.num_actions = config, num_trees, num_actions
        self._kernels = _kernels()
        self._forest = make_forest(num_trees, config.num_nodes, num_actions)
        self._leaf: tuple[I32, I32] = (self._forest.leaf[0], self._forest.leaf[1])
        self._root_logits = np.zeros((num_trees, num_actions), np.float32)
        self._no_noise = np.zeros((num_trees, num_actions), np.float32)
        self._num_done = config.num_simulations
        self._has_begun = False
        discount = -config.discount if config.two_player else config.discount
        self._discount, self._delta = discount, config.value_delta_max
        if config.kind == "puct":
            self._table: F32 | I32 = exploration_table(config)
            self._begin, self._advance = self._kernels.begin_puct, self._kernels.advance_puct
            self._rule: tuple[float, ...] = (discount, self._delta, _FIRST_PLAY[config.first_play])
        else:
            self._table = halving_table(config)
            self._begin, self._advance = self._kernels.begin_gumbel, self._kernels.advance_gumbel
            self._rule = (discount, config.c_visit, config.c_scale, self._delta)

    # ------------------------------------------------------------ the tree as arrays

    @property
    def prior(self) -> F32:
        """Priors ``[B, N, A]``, a view; at the root with noise. Nodes not yet made hold what was there."""
        return self._forest.edges[:, :, PRIOR]

    @property
    def q(self) -> F32:
        """Mean returns of actions ``[B, N, A]``, a view; 0 for an action that was not tried."""
        return self._forest.edges[:, :, Q]

    @property
    def visits(self) -> I32:
        """Visits of actions ``[B, N, A]``, a view."""
        return self._forest.links[:, :, VISITS]

    @property
    def child(self) -> I32:
        """Nodes that actions lead to ``[B, N, A]``, -1 where there is none; a view."""
        return self._forest.links[:, :, CHILD]

    @property
    def parent(self) -> I32:
        """Nodes above nodes ``[B, N]``, -1 above the root; a view."""
        return self._forest.counts[:, :, PARENT]

    @property
    def reward(self) -> NDArray[np.float64]:
        """Rewards on the way to nodes ``[B, N]``, a view."""
        return self._forest.nodes[:, :, REWARD]

    @property
    def value(self) -> NDArray[np.float64]:
        """The model's values of nodes ``[B, N]``, a view."""
        return self._forest.nodes[:, :, VALUE]

    # ------------------------------------------------------------ a search

    def begin(
        self,
        logits: ArrayLike,
        values: ArrayLike,
        *,
        seeds: ArrayLike,
        legal: ArrayLike | None = None,
        noise: ArrayLike | None = None,
    ) -> None:
        """Start a search at roots with these ``logits`` ``[B, A]`` and ``values`` ``[B]``.

        ``seeds`` ``[B]`` (uint64) break ties. Illegal actions (``legal`` ``[B, A]`` False, or logits of -inf)
        are never tried; below the root their logits say so. ``noise`` ``[B, A]`` comes from `draw_noise`;
        without it the search explores no more than its rule does.
        """
        self._has_begun = False
        forest, shape = self._forest, (self.num_trees, self.num_actions)
        np.copyto(self._root_logits, _floats("logits", logits, shape))
        if legal is not None:
            self._root_logits[~_bools("legal", legal, shape)] = -np.inf
        forest.seeds[:] = _shaped("seeds", np.asarray(seeds, np.uint64), shape[:1])
        arguments = self._rule
        if self.config.kind == "puct":
            arguments = (0.0 if noise is None else self.config.root_noise_weight, *arguments)
        drawn = self._no_noise if noise is None else _floats("noise", noise, shape)
        root_values = _floats("values", values, shape[:1])
        bad = self._begin(*forest, self._root_logits, root_values, drawn, self._table, *arguments)
        if bad >= 0:
            raise ValueError(self._say_what_is_wrong(bad, self._root_logits, root_values))
        self._num_done, self._has_begun = 0, True

    def descend(self) -> tuple[I32, I32]:
        """Which child of which node each tree wants next: nodes ``[B]`` and actions ``[B]``.

        They are views that `expand` writes to: copy what is to be kept.
        """
        self._check_that_it_goes_on()
        return self._leaf

    def expand(self, rewards: ArrayLike, values: ArrayLike, logits: ArrayLike) -> None:
        """Add the nodes that `descend` asked for and back their values up.

        ``rewards`` ``[B]`` are for the actions that lead there (of the player who moved), ``values`` ``[B]``
        those of the new nodes (of the player to move there), ``logits`` ``[B, A]`` their log priors.
        """
        self._check_that_it_goes_on()
        shape = (self.num_trees, self.num_actions)
        gained = _floats("rewards", rewards, shape[:1])
        valued, priors = _floats("values", values, shape[:1]), _floats("logits", logits, shape)
        step = self._num_done + 1
        bad = self._advance(*self._forest, priors, valued, gained, self._table, step, *self._rule)
        if bad >= 0:
            self._has_begun = False
            raise ValueError(self._say_what_is_wrong(bad, priors, valued, gained))
        self._num_done = step

    def result(self) -> SearchResult:
        """What was found, after all simulations."""
        if not self._has_begun or self._num_done < self.config.num_simulations:
            raise RuntimeError(
                f"the search has done {self._num_done} of {self.config.num_simulations} simulations; "
                "call descend and expand for the others first"
            )
        visits = self.visits[:, 0].copy()
        share = visits / self.config.num_simulations
        values = np.cumsum(share * self.q[:, 0], axis=1)[:, -1].astype(np.float32)
        policy, scores = share.astype(np.float32), np.zeros(share.shape, np.float32)
        if self.config.kind == "puct":
            return SearchResult("puct", visits, values, policy, scores)
        self._kernels.finish_gumbel(*self._forest, self._root_logits, policy, scores, *self._rule[1:])
        return SearchResult("gumbel", visits, values, policy, scores)

    def _check_that_it_goes_on(self) -> None:
        if not self._has_begun:
            raise RuntimeError("no search has begun: call begin first")
        if self._num_done == self.config.num_simulations:
            raise RuntimeError(
                f"all {self._num_done} simulations are done: call result, or begin for another search"
            )

    def _say_what_is_wrong(self, tree: int, logits: F32, values: F32, rewards: F32 | None = None) -> str:
        if not np.isnan(logits[tree]).any() and logits[tree].max() == -np.inf:
            return f"tree {tree} has no legal action: give it one"
        gained = "" if rewards is None else f", its reward {rewards[tree]}"
        return (
            f"tree {tree} was given a number that is not finite: its value is {values[tree]}{gained}, its "
            f"logits are {logits[tree]}; look for NaN in the model's weights"
        )


def search(
    model_step: ModelStep,
    trees: Trees,
    logits: ArrayLike,
    values: ArrayLike,
    *,
    seeds: ArrayLike,
    legal: ArrayLike | None = None,
    noise: ArrayLike | None = None,
) -> SearchResult:
    """Search from roots with these logits ``[B, A]`` and values ``[B]``; the rest is as in `Trees.begin`."""
    trees.begin(logits, values, seeds=seeds, legal=legal, noise=noise)
    for node in range(1, trees.config.num_nodes):
        trees.expand(*model_step(*trees.descend(), node))
    return trees.result()


def _kernels() -> ModuleType:
    if not uses_numba():
        return reference
    from offbeat.search import kernels

    return kernels


def _floats(name: str, values: ArrayLike, shape: tuple[int, ...]) -> F32:
    found = np.ascontiguousarray(values, np.float32)
    if found.shape != shape:
        raise ValueError(f"{name} has the shape {found.shape}; give {shape}")
    return found


def _bools(name: str, values: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    found = np.asarray(values, np.bool_)
    if found.shape != shape:
        raise ValueError(f"{name} has the shape {found.shape}; give {shape}")
    return found


def _shaped(name: str, values: NDArray[np.uint64], shape: tuple[int, ...]) -> NDArray[np.uint64]:
    if values.shape != shape:
        raise ValueError(f"{name} has the shape {values.shape}; give {shape}")
    return values
