"""The inner loops of the sum tree and of the prioritized buffer, compiled by numba.

Imported only where kernels are compiled: see `offbeat.ops.jit`. `offbeat.replay.sum_tree` and
`offbeat.replay.prioritized` hold the same functions in numpy; both add and compare in the same order, so
that they agree bit for bit. Indices are unsigned: numba then leaves out the check for negative ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.ops.jit import jit

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_0, _1, _2, _3 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)
_4, _8, _12, _16 = np.uint64(4), np.uint64(8), np.uint64(12), np.uint64(16)


def _compiled(function: _Function) -> _Function:
    return cast("_Function", jit(function))


@_compiled
def _quarter(values: Any, at: Any) -> Any:
    upper = np.float64(values[at]) + np.float64(values[at + _8])
    lower = np.float64(values[at + _4]) + np.float64(values[at + _12])
    return upper + lower


@_compiled
def _sum_group(values: Any, at: Any) -> Any:
    """Sum of 16 values by halves: eight pairs, four, two, one."""
    even = _quarter(values, at) + _quarter(values, at + _2)
    odd = _quarter(values, at + _1) + _quarter(values, at + _3)
    return even + odd


@_compiled
def _scan(values: Any, start: Any, size: Any, masses: Any, nodes: Any) -> None:
    """Find the entry of a level in which each mass falls; masses ascend and become those within the entry."""
    entry, before, prefix = _0, 0.0, values[start]
    rise, before_rise = entry, before
    for item in range(np.uint64(masses.size)):
        mass = masses[item]
        while prefix <= mass and entry + _1 < size:
            entry += _1
            before = prefix
            prefix += values[start + entry]
            if prefix > before:
                rise, before_rise = entry, before
        # Where rounding puts a mass beyond the end, this is the last entry that adds to the sum.
        nodes[item] = rise
        masses[item] = mass - before_rise


@_compiled
def _touch(values: Any, start: Any, nodes: Any, sink: Any) -> None:
    """Read from every node's children, so that their memory is on its way before it is waited for."""
    first = second = values[start]
    for item in range(np.uint64(nodes.size)):
        at = start + nodes[item] * _16
        first, second = max(first, values[at]), max(second, values[at + _8])
    sink[0] = first + second  # a result, or the compiler would leave it all out


@_compiled
def _descend(values: Any, start: Any, masses: Any, nodes: Any) -> None:
    """Move every node to the child in which its mass falls; masses become those within the child."""
    sums = np.empty(17, np.float64)
    _touch(values, start, nodes, sums)
    sums[0] = 0.0
    for item in range(np.uint64(nodes.size)):
        at = start + nodes[item] * _16
        prefix = 0.0
        for step in range(_16):
            prefix += np.float64(values[at + step])
            sums[step + _1] = prefix
        mass, child = masses[item], _0
        for step in range(_16):
            child += np.uint64(sums[step + _1] <= mass)
        if child == _16:  # rounding: a node's sum may exceed the running sum of its children
            child = _0
            for step in range(_16):
                child += np.uint64(sums[step + _1] < prefix)
        nodes[item] = nodes[item] * _16 + child
        masses[item] = mass - sums[child]


@_compiled
def find(leaves: F32, inner: F64, starts: U64, masses: F64) -> U64:
    """Leaf in which each mass falls; ``masses`` ascend and are used up."""
    nodes = np.zeros(masses.size, np.uint64)
    num_levels, level = np.uint64(starts.size) - _1, _1
    while level < num_levels and starts[level + _1] - starts[level] <= _2 * np.uint64(masses.size):
        level += _1
    if level > _1:
        _scan(inner, starts[level - _1], starts[level] - starts[level - _1], masses, nodes)
    for below in range(level, num_levels):
        _descend(inner, starts[below], masses, nodes)
    _descend(leaves, _0, masses, nodes)
    return nodes


@_compiled
def _resum_parents(values: Any, start: Any, inner: Any, target: Any, nodes: Any) -> None:
    """Replace each node by its parent, whose sum is made anew."""
    last = np.uint64(0xFFFFFFFFFFFFFFFF)
    for item in range(np.uint64(nodes.size)):
        parent = nodes[item] // _16
        nodes[item] = parent
        if parent != last:
            inner[target + parent] = _sum_group(values, start + parent * _16)
            last = parent


@_compiled
def _resum_above(leaves: Any, inner: Any, starts: Any, nodes: Any) -> None:
    level = np.uint64(starts.size) - _2
    _resum_parents(leaves, _0, inner, starts[level], nodes)
    while level > _0:
        _resum_parents(inner, starts[level], inner, starts[level - _1], nodes)
        level -= _1


@_compiled
def set_leaves(leaves: F32, inner: F64, starts: U64, index: U64, values: F32) -> None:
    """Write leaves, later ones over earlier ones, and re-sum what is above them."""
    nodes = np.empty(index.size, np.uint64)
    for item in range(np.uint64(index.size)):
        leaves[index[item]] = values[item]
        nodes[item] = index[item]
    _resum_above(leaves, inner, starts, nodes)


@_compiled
def resum_range(leaves: F32, inner: F64, starts: U64, first: int, end: int) -> None:
    """Re-sum all that is above the leaves ``first`` to ``end - 1``; there is at least one."""
    low, high = np.uint64(first) // _16, (np.uint64(end) - _1) // _16
    level = np.uint64(starts.size) - _2
    for parent in range(low, high + _1):
        inner[starts[level] + parent] = _sum_group(leaves, parent * _16)
    while level > _0:
        source, target = starts[level], starts[level - _1]
        low, high = low // _16, high // _16
        for parent in range(low, high + _1):
            inner[target + parent] = _sum_group(inner, source + parent * _16)
        level -= _1


@_compiled
def draw(
    leaves: F32, inner: F64, starts: U64, uniform: F64, capacity: int, num_written: int
) -> tuple[I64, I64, F32, F64]:
    """Draw one leaf from each of equal shares of the total.

    Returns its index, the generation of its slot, the smallest priority drawn over its own, and its
    probability.
    """
    size, total = uniform.size, inner[0]
    masses, width = np.empty(size, np.float64), total / size
    for item in range(size):
        masses[item] = (item + uniform[item]) * width
    nodes = find(leaves, inner, starts, masses)
    turns, following = divmod(num_written, capacity)
    generations, ratios, smallest = np.empty(size, np.int64), np.empty(size, np.float32), np.inf
    for item in range(np.uint64(size)):
        node = nodes[item]
        generations[item] = turns + (node < np.uint64(following))
        masses[item] = np.float64(leaves[node])
        smallest = min(smallest, masses[item])
    for item in range(np.uint64(size)):
        ratios[item] = smallest / masses[item]
        masses[item] /= total
    return nodes.view(np.int64), generations, ratios, masses


@_compiled
def _is_refused(index: Any, priorities: Any, values: Any, capacity: Any) -> bool:
    for item in range(np.uint64(index.size)):
        if index[item] >= capacity or not priorities[item] >= 0.0 or not values[item] < np.inf:
            return True
    return False


@_compiled
def update(
    leaves: F32,
    inner: F64,
    starts: U64,
    index: U64,
    handle_generations: I64,
    priorities: F32,
    values: F32,
    capacity: int,
    num_written: int,
) -> tuple[int, Any]:
    """Write ``values`` into the leaves whose item is still there.

    Returns how many that were and the largest of their priorities, or -1 where nothing was written because
    an index or a priority is out of range.
    """
    if _is_refused(index, priorities, values, np.uint64(capacity)):
        return -1, np.float32(0.0)
    turns, following = divmod(num_written, capacity)
    nodes = np.empty(index.size, np.uint64)
    count, largest = 0, np.float32(0.0)
    for item in range(np.uint64(index.size)):
        node = index[item]
        generation = turns + (node < np.uint64(following))
        if generation == handle_generations[item] and leaves[node] > 0:
            leaves[node] = values[item]
            nodes[count] = node
            count += 1
            largest = max(largest, priorities[item])
    _resum_above(leaves, inner, starts, nodes[:count])
    return count, largest
