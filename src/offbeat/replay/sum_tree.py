"""A sum tree: priorities as leaves, and the leaf in which a mass falls.

Every node has 16 children. Leaves are float32, so that a group of them is one cache line; sums are float64
and always made anew from their children, never changed by differences, so that they do not drift. The tree
is therefore a function of its leaves alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.ops.compiled import uses_numba
from offbeat.replay.rings import LINE_BYTES, aligned_zeros

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

WIDTH = 16
"""Children of a node."""
_SCAN = 2  # entries per mass up to which walking along a level beats descending to it; the same in kernels


class TreeKernels(Protocol):
    """The inner loops of the tree.

    ``starts`` says where in ``inner`` each level begins, the root's first, and where the last one ends.
    """

    def find(self, leaves: F32, inner: F64, starts: U64, masses: F64) -> U64:
        """Leaf in which each mass falls; ``masses`` ascend and are used up."""

    def set_leaves(self, leaves: F32, inner: F64, starts: U64, index: U64, values: F32) -> None:
        """Write leaves, later ones over earlier ones, and re-sum what is above them."""

    def resum_range(self, leaves: F32, inner: F64, starts: U64, first: int, end: int) -> None:
        """Re-sum all that is above the leaves ``first`` to ``end - 1``."""


class SumTree:
    """Priorities of ``capacity`` leaves, all 0 at first.

    Example: ``tree.set([0, 3], [1.0, 2.0])``; then ``tree.total`` is 3 and ``tree.find([0.5, 1.5])`` is
    ``[0, 3]``.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(
                f"a sum tree needs at least one leaf: capacity must be 1 or more, not {capacity}"
            )
        self.capacity = capacity
        sizes = list(_level_sizes(capacity))
        *inner, leaves = sizes
        self.leaves: F32 = aligned_zeros(4 * leaves).view(np.float32)
        self.inner: F64 = aligned_zeros(8 * sum(inner)).view(np.float64)
        self.starts: U64 = np.cumsum([0, *inner]).astype(np.uint64)
        self._kernels = _kernels()

    @staticmethod
    def num_bytes(capacity: int) -> int:
        """Memory that a tree of this capacity takes."""
        *inner, leaves = _level_sizes(capacity)
        return 4 * leaves + 8 * sum(inner) + 2 * LINE_BYTES

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self.inner[0])

    @property
    def state(self) -> F32:
        """All priorities ``[capacity]``, a view that cannot be written; `set_range` restores them."""
        view = self.leaves[: self.capacity]
        view.flags.writeable = False
        return view

    def get(self, index: ArrayLike) -> F32:
        """Priorities of the leaves ``index`` ``[B]``."""
        found: F32 = self.leaves[self._checked_index(index)]
        return found

    def set(self, index: ArrayLike, priorities: ArrayLike) -> None:
        """Give the leaves ``index`` ``[B]`` these priorities ``[B]``; of equal indices the last one counts.

        A priority is finite and not negative, also as float32, which is how it is kept.
        """
        where, values = self._checked_index(index), checked_priorities(priorities)
        if where.shape != values.shape:
            raise ValueError(f"{where.size} indices and {values.size} priorities: give one for each")
        self._kernels.set_leaves(self.leaves, self.inner, self.starts, where.view(np.uint64), values)

    def set_range(self, start: int, priorities: ArrayLike) -> None:
        """Give the leaves from ``start`` on these priorities ``[B]``: cheaper than `set` for neighbours."""
        values = checked_priorities(priorities)
        end = start + values.size
        if not 0 <= start <= end <= self.capacity:
            raise IndexError(f"leaves {start} to {end - 1} are not all within the capacity {self.capacity}")
        if values.size:
            self.leaves[start:end] = values
            self._kernels.resum_range(self.leaves, self.inner, self.starts, start, end)

    def find(self, masses: ArrayLike) -> I64:
        """Leaf in which each mass ``[B]`` (between 0 and ``total``) falls; never one of priority 0.

        Leaf i takes the masses from the sum of all leaves before it up to that sum plus its own priority.
        """
        wanted = np.array(masses, np.float64, ndmin=1)
        if not self.total > 0:
            raise ValueError("no leaf can be found: all priorities are 0; set some first")
        if not np.all((wanted >= 0) & (wanted <= self.total)):
            raise ValueError(f"masses must be between 0 and the total {self.total:g}")
        order = np.argsort(wanted, kind="stable")
        found = np.empty(wanted.size, np.int64)
        found[order] = self._kernels.find(self.leaves, self.inner, self.starts, wanted[order])
        return found

    def _checked_index(self, index: ArrayLike) -> I64:
        where = np.ascontiguousarray(index, np.int64)
        if where.size and not (where.min() >= 0 and where.max() < self.capacity):
            raise IndexError(f"leaves {where.min()} to {where.max()} are not all in 0..{self.capacity - 1}")
        return where


def checked_priorities(priorities: ArrayLike) -> F32:
    """Priorities as float32; ValueError where one is negative, NaN or infinite."""
    with np.errstate(over="ignore"):
        values = np.array(priorities, np.float64, ndmin=1).astype(np.float32)
    if not np.all((values >= 0) & (values < np.inf)):
        worst = values[~((values >= 0) & (values < np.inf))][0]
        raise ValueError(f"a priority is {worst}; priorities must be finite (as float32) and not negative")
    return values


def _level_sizes(capacity: int) -> Iterator[int]:
    """Entries of each level, whole groups only: the root's first, the leaves last."""
    sizes = [_whole_groups(capacity)]
    while sizes[0] > WIDTH:
        sizes.insert(0, _whole_groups(sizes[0] // WIDTH))
    yield WIDTH  # the root, alone in its group
    yield from sizes


def _whole_groups(count: int) -> int:
    return -(-count // WIDTH) * WIDTH


# ---------------------------------------------------------------- the same loops in numpy


class NumpyKernels:
    """What `offbeat.replay.kernels` does, by numpy alone and with the same results, bit for bit."""

    def find(self, leaves: F32, inner: F64, starts: U64, masses: F64) -> U64:
        """Leaf in which each mass falls; ``masses`` ascend and are used up."""
        nodes = np.zeros(masses.size, np.int64)
        begins: list[int] = starts.tolist()
        level = 1
        while level < len(begins) - 1 and begins[level + 1] - begins[level] <= _SCAN * masses.size:
            level += 1
        if level > 1:
            nodes = _scan(inner[begins[level - 1] : begins[level]], masses)
        for begin in begins[level:-1]:
            nodes = _descend(inner[begin:], masses, nodes)
        return _descend(leaves, masses, nodes).view(np.uint64)

    def set_leaves(self, leaves: F32, inner: F64, starts: U64, index: U64, values: F32) -> None:
        """Write leaves, later ones over earlier ones, and re-sum what is above them."""
        nodes = index.view(np.int64)
        leaves[nodes] = values
        self.resum_above(leaves, inner, starts, nodes)

    def resum_above(self, leaves: F32, inner: F64, starts: U64, nodes: I64) -> None:
        """Re-sum all that is above these leaves."""
        source: NDArray[np.floating] = leaves
        for start in starts[-2::-1].tolist():
            nodes = _without_repeats(nodes // WIDTH)
            inner[start + nodes] = _sum_groups(_groups(source)[nodes])
            source = inner[start:]

    def resum_range(self, leaves: F32, inner: F64, starts: U64, first: int, end: int) -> None:
        """Re-sum all that is above the leaves ``first`` to ``end - 1``; there is at least one."""
        source: NDArray[np.floating] = leaves
        low, high = first, end - 1
        for start in starts[-2::-1].tolist():
            low, high = low // WIDTH, high // WIDTH
            inner[start + low : start + high + 1] = _sum_groups(_groups(source)[low : high + 1])
            source = inner[start:]


def _groups(values: NDArray[np.floating]) -> NDArray[np.floating]:
    return values.reshape(-1, WIDTH)


def _sum_groups(groups: NDArray[np.floating]) -> F64:
    """Sums of ``[n, 16]`` by halves, in the order in which the compiled loops add."""
    wide = groups.astype(np.float64)
    for half in (8, 4, 2, 1):
        wide = wide[:, :half] + wide[:, half : 2 * half]
    return wide[:, 0]


def _without_repeats(nodes: I64) -> I64:
    """The nodes without those that equal the one before them."""
    is_new = np.ones(nodes.size, np.bool_)
    np.not_equal(nodes[1:], nodes[:-1], out=is_new[1:])
    return nodes[is_new]


def _scan(values: F64, masses: F64) -> I64:
    """Entries of a level in which the masses fall; masses become those within the entry."""
    sums = np.zeros(values.size + 1)
    np.cumsum(values, out=sums[1:])
    # Where rounding puts a mass beyond the end, it falls into the last entry that adds to the sum.
    last = np.searchsorted(sums[1:], sums[-1], side="left")
    entries: I64 = np.minimum(np.searchsorted(sums[1:], masses, side="right"), last)
    masses -= sums[entries]
    return entries


def _descend(values: NDArray[np.floating], masses: F64, nodes: I64) -> I64:
    """Children in which the masses fall; masses become those within the child."""
    sums = np.zeros((nodes.size, WIDTH + 1))
    np.cumsum(_groups(values)[nodes], axis=1, dtype=np.float64, out=sums[:, 1:])
    child: I64 = np.count_nonzero(sums[:, 1:] <= masses[:, None], axis=1)
    beyond = np.flatnonzero(child == WIDTH)
    if beyond.size:  # rounding: a node's sum may exceed the running sum of its children
        child[beyond] = np.count_nonzero(sums[beyond, 1:] < sums[beyond, -1:], axis=1)
    masses -= sums[np.arange(nodes.size), child]
    return nodes * WIDTH + child


def _kernels() -> TreeKernels:
    if not uses_numba():
        return NumpyKernels()
    from offbeat.replay import kernels

    return kernels
