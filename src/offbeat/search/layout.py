"""Where things lie in the arrays of a search.

Few arrays with planes, not many arrays: a compiled call pays for each array that it is handed, and what
belongs to a node lies together in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Q, PRIOR, SHARE, LOGIT = 0, 1, 2, 2
"""Planes of ``edges`` ``[B, N, 3, A]``, float32: mean return of the action; the prior; P(a) / (1 + n_a), for
pUCT; log prior, for Gumbel (at the root with its noise). An illegal action has -inf in the last plane."""
NUM_EDGE_PLANES = 3

VISITS, CHILD = 0, 1
"""Planes of ``links`` ``[B, N, 2, A]``, int32: visits of the action; the node it leads to, or -1."""
NUM_LINK_PLANES = 2

TOTAL_VISITS, TRIED, LEGAL, MOST_VISITS, PARENT, ACTION = 0, 1, 2, 3, 4, 5
"""Columns of ``counts`` ``[B, N, 6]``, int32: visits of all actions, number of actions tried, number of legal
ones, most visits of one; the node above and the action that led here, -1 at the root."""
NUM_COUNTS = 6

VALUE, REWARD, WEIGHTED_Q, WEIGHT = 0, 1, 2, 3
"""Columns of ``nodes`` ``[B, N, 4]``, float64: the model's value; the reward on the way here; sum of Q over
tried actions (weighted by the prior for Gumbel); sum of these weights."""
NUM_NODE_COLUMNS = 4

LOW, HIGH = 0, 1
"""Columns of ``bounds`` ``[B, 2]``, float32: lowest and highest Q so far; LOW > HIGH where there is none."""

MEAN, AT_LOW = 0, 1
"""First-play rules as numbers."""

SMALLEST_EXPONENT = -87.0
"""exp of less than this counts as 0."""
TINY = 1e-30
"""Smallest weight of a tried action, so that weights can be divided by."""


class Forest(NamedTuple):
    """The arrays of B trees."""

    edges: NDArray[np.float32]
    links: NDArray[np.int32]
    counts: NDArray[np.int32]
    nodes: NDArray[np.float64]
    bounds: NDArray[np.float32]
    leaf: NDArray[np.int32]
    """``[2, B]``: the node at which the next one is to be added, and the action that leads to it."""
    seeds: NDArray[np.uint64]
    """``[B]``"""


def make_forest(num_trees: int, num_nodes: int, num_actions: int) -> Forest:
    """Arrays for trees of this size, all zero."""
    shape = (num_trees, num_nodes)
    return Forest(
        edges=np.zeros((*shape, NUM_EDGE_PLANES, num_actions), np.float32),
        links=np.zeros((*shape, NUM_LINK_PLANES, num_actions), np.int32),
        counts=np.zeros((*shape, NUM_COUNTS), np.int32),
        nodes=np.zeros((*shape, NUM_NODE_COLUMNS), np.float64),
        bounds=np.zeros((num_trees, 2), np.float32),
        leaf=np.zeros((2, num_trees), np.int32),
        seeds=np.zeros(num_trees, np.uint64),
    )
