"""Prioritized replay of records of fixed shape (Schaul et al. 2016, https://arxiv.org/abs/1511.05952).

Items lie in one ring per name; a sum tree over their priorities says which are drawn. A slot of the ring is
named by its index and by how often it was written, so that what was computed about an item never lands on
the one that has taken its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import CheckpointError, ConfigError
from offbeat.ops.compiled import uses_numba
from offbeat.replay.rings import Rings
from offbeat.replay.sum_tree import F32, F64, I64, U64, NumpyKernels, SumTree, checked_priorities
from offbeat.types import Array, ArraySpec, StateTree

_SMALLEST_LEAF = 1e-30


@dataclass(frozen=True, slots=True)
class Handles:
    """Names of items: slots ``index`` ``[M]`` and how often each had been written, ``generation`` ``[M]``."""

    index: I64
    generation: I64


@dataclass(frozen=True, slots=True)
class Sample:
    """Items that were drawn, in the order of their slots; arrays are copies.

    ``weights`` ``[B]`` undo the preference for large priorities: ``(N P)^-beta``, scaled so that the largest
    is 1. ``versions`` ``[B]`` made the items; ``probabilities`` ``[B]`` are P, the share of each draw.
    """

    items: dict[str, Array]
    handles: Handles
    weights: F32
    versions: I64
    probabilities: F64


class PrioritizedReplay:
    """The newest ``capacity`` items, drawn in proportion to ``(priority + eps) ** alpha``.

    Every use has its place in one thread: the learner's. Draws depend on the generator handed in and on
    nothing else; with and without numba they are the same, bit for bit.

    Example::

        replay = PrioritizedReplay({"obs": ArraySpec((64,), "float32")}, capacity=100_000)
        replay.add({"obs": obs}, versions=version)
        sample = replay.sample(rng, 128, beta=0.4)
        replay.update(sample.handles, errors)
    """

    def __init__(
        self, spec: Mapping[str, ArraySpec], capacity: int, *, alpha: float = 0.6, eps: float = 1e-6
    ) -> None:
        """Make an empty buffer.

        Args:
            spec: shape and dtype of each array of an item, without an axis for items.
            capacity: number of items that are kept.
            alpha: how much priorities count, from 0 (not at all) to 1 (in proportion). 0.6 as in the paper.
            eps: added to every priority, so that each item keeps a chance.
        """
        _check_settings(spec, capacity, alpha, eps)
        self.capacity, self.alpha, self.eps = capacity, alpha, eps
        self.spec = dict(spec)
        self._items = Rings(spec, capacity)
        self._rings = {name: self._items.view(name) for name in spec}
        self._versions = self._items.versions
        self._tree = SumTree(capacity)
        self._kernels = _kernels()
        self._num_written, self._num_live = 0, 0
        self._largest_priority = 1.0
        self._live_slots: I64 | None = None

    @staticmethod
    def num_bytes(spec: Mapping[str, ArraySpec], capacity: int) -> int:
        """Memory that a full buffer takes, with its tree."""
        live_slots = 8 * capacity  # which uniform draws use
        return Rings.num_bytes(spec, capacity) + SumTree.num_bytes(capacity) + live_slots

    def __len__(self) -> int:
        return self._num_live

    def __repr__(self) -> str:
        kept = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in self.spec.items())
        return f"PrioritizedReplay({len(self):,} of {self.capacity:,} items: {kept}; alpha {self.alpha:g})"

    @property
    def largest_priority(self) -> float:
        """Largest priority that any item was given, without alpha, and at least 1: that of new items."""
        return self._largest_priority

    @property
    def newest_version(self) -> int | None:
        """Newest version among the items; None when there are none."""
        return int(self._versions[self._live()].max()) if self._num_live else None

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among the items; None when there are none."""
        return int(self._versions[self._live()].min()) if self._num_live else None

    @property
    def _num_filled(self) -> int:
        return min(self._num_written, self.capacity)

    def _handles(self, index: I64) -> Handles:
        return Handles(index, _generations(index, self.capacity, self._num_written))

    # ------------------------------------------------------------ writing

    def add(
        self, items: Mapping[str, Array], versions: ArrayLike, priorities: ArrayLike | None = None
    ) -> Handles:
        """Write items over the oldest ones.

        Args:
            items: arrays ``[M, ...]`` for every name of the spec, M at most the capacity.
            versions: version behind each item, ``[M]`` or one for all.
            priorities: ``[M]``, finite and not negative; without them items get the largest one so far.
        """
        items = {name: np.asarray(array) for name, array in items.items()}
        count = self._checked_count(items)
        behind = np.broadcast_to(np.asarray(versions), (count,))
        if behind.dtype.kind not in "iu":
            raise ValueError(f"versions are whole numbers: give an integer array, not {behind.dtype}")
        leaves, largest = self._new_leaves(priorities, count)
        self._largest_priority = largest
        following = self._num_written % self.capacity
        for here, there in _pieces(following, count, self.capacity):
            self._num_live += (there.stop - there.start) - np.count_nonzero(self._tree.leaves[there])
            for name, ring in self._rings.items():
                ring[there] = items[name][here]
            self._versions[there] = behind[here]
            self._tree.set_range(there.start, leaves[here])
        self._num_written += count
        self._live_slots = None
        index = (following + np.arange(count)) % self.capacity
        return self._handles(index)

    def update(self, handles: Handles, priorities: ArrayLike) -> int:
        """Give items new priorities ``[M]``, finite and not negative; of equal handles the last one counts.

        Items that were overwritten or have expired are passed over.

        Returns:
            How many of the handles still named an item.
        """
        given = np.ascontiguousarray(priorities, np.float32)
        index = np.ascontiguousarray(handles.index, np.int64)
        generation = np.ascontiguousarray(handles.generation, np.int64)
        if not given.shape == index.shape == generation.shape:
            raise ValueError(f"{index.size} handles and {given.size} priorities: give one for each")
        tree = self._tree
        count, largest = self._kernels.update(
            tree.leaves,
            tree.inner,
            tree.starts,
            index.view(np.uint64),
            generation,
            given,
            self._leaves_of(given),
            self.capacity,
            self._num_written,
        )
        if count < 0:
            self._refuse(index, given)
        self._largest_priority = max(self._largest_priority, float(largest))
        return count

    def expire(self, before_version: int) -> int:
        """Let go of all items with a version below ``before_version``; return how many those were."""
        filled = slice(0, self._num_filled)
        is_old = (self._versions[filled] < before_version) & (self._tree.leaves[filled] > 0)
        slots = np.flatnonzero(is_old)
        if slots.size:
            self._tree.set(slots, np.zeros(slots.size))
            self._num_live -= slots.size
            self._live_slots = None
        return slots.size

    # ------------------------------------------------------------ drawing

    def sample(self, rng: np.random.Generator, batch_size: int, *, beta: float) -> Sample:
        """Draw items by priority: one from each of ``batch_size`` equal shares of the total priority.

        Args:
            rng: where the randomness comes from; each call takes ``batch_size`` numbers.
            batch_size: number of draws; an item can be among them more than once.
            beta: how much the weights correct, from 0 (not at all) to 1 (fully).
        """
        if self.alpha == 0:
            return self.sample_uniform(rng, batch_size)
        self._check_draw(batch_size)
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"beta must be from 0 to 1, not {beta}")
        tree = self._tree
        index, generation, ratios, probabilities = self._kernels.draw(
            tree.leaves, tree.inner, tree.starts, rng.random(batch_size), self.capacity, self._num_written
        )
        # (N P)^-beta over the largest of the batch: N and the total cancel out.
        weights: F32 = ratios**beta
        items, versions = self._items.gather(index)
        return Sample(items, Handles(index, generation), weights, versions, probabilities)

    def sample_uniform(self, rng: np.random.Generator, batch_size: int) -> Sample:
        """Draw items with equal chances, one from each of ``batch_size`` equal shares; all weights are 1."""
        self._check_draw(batch_size)
        places = (np.arange(batch_size) + rng.random(batch_size)) * (self._num_live / batch_size)
        index = np.minimum(places.astype(np.int64), self._num_live - 1)
        if self._num_live < self._num_filled:
            index = self._live()[index]
        items, versions = self._items.gather(index)
        weights, chances = np.ones(batch_size, np.float32), np.full(batch_size, 1 / self._num_live)
        return Sample(items, self._handles(index), weights, versions, chances)

    def _live(self) -> I64:
        """Slots whose item can be drawn, in order."""
        if self._live_slots is None:
            self._live_slots = np.flatnonzero(self._tree.leaves[: self._num_filled])
        return self._live_slots

    # ------------------------------------------------------------ saving

    def state_dict(self) -> StateTree:
        """All that a checkpoint needs: views of the part that was written, which change with the buffer."""
        filled = slice(0, self._num_filled)
        return {
            "settings": self._settings(),
            "items": {name: ring[filled] for name, ring in self._rings.items()},
            "versions": self._versions[filled],
            "leaves": self._tree.leaves[filled],
            "num_written": self._num_written,
            "largest_priority": self._largest_priority,
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave; everything goes on as it would have."""
        self._check_settings_of(state["settings"])
        num_filled = len(state["versions"])
        for name, ring in self._rings.items():
            ring[:num_filled] = state["items"][name]
        self._versions[:num_filled] = state["versions"]
        leaves = np.zeros(self.capacity, np.float32)
        leaves[:num_filled] = state["leaves"]
        self._tree.set_range(0, leaves)
        self._num_written = state["num_written"]
        self._num_live = int(np.count_nonzero(leaves))
        self._largest_priority = state["largest_priority"]
        self._live_slots = None

    def _settings(self) -> dict[str, StateTree]:
        spec = {name: [list(array.shape), np.dtype(array.dtype).str] for name, array in self.spec.items()}
        return {"capacity": self.capacity, "alpha": self.alpha, "eps": self.eps, "spec": spec}

    def _check_settings_of(self, saved: Mapping[str, StateTree]) -> None:
        ours = self._settings()
        for name in ("capacity", "alpha", "eps", "spec"):
            if saved[name] != ours[name]:
                raise CheckpointError(
                    f"the replay buffer was saved with {name} {saved[name]} and now has {ours[name]}: "
                    "set it back to go on with this checkpoint, or start a new run"
                )

    # ------------------------------------------------------------ checks

    def _checked_count(self, items: Mapping[str, Array]) -> int:
        if items.keys() != self._rings.keys():
            raise ValueError(f"items have {sorted(items)}: give exactly {sorted(self._rings)}")
        counts = {len(array) for array in items.values()}
        if len(counts) != 1:
            raise ValueError(f"arrays of {sorted(counts)} items: all need the same length")
        for name, ring in self._rings.items():
            array = items[name]
            if array.shape[1:] != ring.shape[1:] or not np.can_cast(array.dtype, ring.dtype, "safe"):
                raise ValueError(
                    f"{name} has items of shape {array.shape[1:]} and dtype {array.dtype}; "
                    f"the buffer was made for {ring.shape[1:]} and {ring.dtype}"
                )
        (count,) = counts
        if count > self.capacity:
            raise ValueError(
                f"{count} items at once do not fit into a buffer of {self.capacity}: "
                "raise its capacity or add fewer"
            )
        return count

    def _new_leaves(self, priorities: ArrayLike | None, count: int) -> tuple[F32, float]:
        """Leaves of new items, and the largest priority after them."""
        if priorities is None:
            return np.repeat(
                self._leaves_of(np.array([self._largest_priority], np.float32)), count
            ), self._largest_priority
        given = np.asarray(priorities, np.float32)
        if given.shape != (count,):
            raise ValueError(f"priorities have the shape {given.shape}: give one for each of {count} items")
        if not np.all(given >= 0):
            raise ValueError(
                f"a priority is {given[~(given >= 0)][0]}; priorities must not be negative or NaN"
            )
        leaves = checked_priorities(self._leaves_of(given))
        return leaves, max(self._largest_priority, float(given.max(initial=0.0)))

    def _leaves_of(self, priorities: F32) -> F32:
        leaves: F32 = (priorities + self.eps) ** self.alpha
        return leaves

    def _check_draw(self, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        if not self._num_live:
            raise ValueError("the buffer holds no item: add some before sampling")

    def _refuse(self, index: I64, priorities: F32) -> None:
        """Say why an update was refused."""
        if not np.all((index >= 0) & (index < self.capacity)):
            raise IndexError(f"handles do not belong to a buffer of capacity {self.capacity}")
        bad = priorities[~((priorities >= 0) & np.isfinite(self._leaves_of(priorities)))]
        raise ValueError(f"a priority is {bad[0]}; priorities must be finite and not negative")


def _generations(index: I64, capacity: int, num_written: int) -> I64:
    """How often slots were written: the ring goes round and round, so the number of all writes tells."""
    turns, following = divmod(num_written, capacity)
    return turns + (index < following)


def _pieces(start: int, count: int, capacity: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the items and of the ring they go to: two where the ring's end lies between."""
    first = min(count, capacity - start)
    if first:
        yield slice(0, first), slice(start, start + first)
    if count > first:
        yield slice(first, count), slice(0, count - first)


def _check_settings(spec: Mapping[str, ArraySpec], capacity: int, alpha: float, eps: float) -> None:
    if not spec:
        raise ConfigError("a replay buffer needs at least one array per item: give a spec that is not empty")
    for name, array in spec.items():
        if not isinstance(array, ArraySpec):
            raise ConfigError(f'{name} is {array!r}: give an ArraySpec, such as ArraySpec((4,), "float32")')
        if np.dtype(array.dtype).kind not in "biuf":
            raise ConfigError(f"{name} has dtype {array.dtype}: use a bool, integer or float dtype")
    if capacity < 1:
        raise ConfigError(f"capacity must be 1 or more, not {capacity}")
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"alpha must be from 0 (uniform) to 1 (proportional), not {alpha}")
    if not 0.0 < eps < np.inf or eps**alpha < _SMALLEST_LEAF:
        raise ConfigError(f"eps must be above 0 and not tiny, not {eps}: 1e-6 keeps every item in reach")


# ---------------------------------------------------------------- inner loops


class _Kernels(Protocol):
    """The inner loops of the buffer, fused where that pays."""

    def draw(
        self, leaves: F32, inner: F64, starts: U64, uniform: F64, capacity: int, num_written: int
    ) -> tuple[I64, I64, F32, F64]:
        """Slots, generations, smallest priority drawn over each one, and probabilities."""

    def update(
        self,
        leaves: F32,
        inner: F64,
        starts: U64,
        index: U64,
        handle_generations: I64,
        priorities: F32,
        values: F32,
        capacity: int,
        num_written: int,
    ) -> tuple[int, float]:
        """Write the leaves whose item is still there; how many (-1: refused) and their largest priority."""


class _NumpyKernels:
    """What `offbeat.replay.kernels` does, by numpy alone and with the same results, bit for bit."""

    def __init__(self) -> None:
        self._tree = NumpyKernels()

    def draw(
        self, leaves: F32, inner: F64, starts: U64, uniform: F64, capacity: int, num_written: int
    ) -> tuple[I64, I64, F32, F64]:
        """Slots, generations, smallest priority drawn over each one, and probabilities."""
        masses = (np.arange(uniform.size) + uniform) * (inner[0] / uniform.size)
        index = self._tree.find(leaves, inner, starts, masses).view(np.int64)
        drawn = leaves[index].astype(np.float64)
        ratios = (drawn.min() / drawn).astype(np.float32)
        return index, _generations(index, capacity, num_written), ratios, drawn / inner[0]

    def update(
        self,
        leaves: F32,
        inner: F64,
        starts: U64,
        index: U64,
        handle_generations: I64,
        priorities: F32,
        values: F32,
        capacity: int,
        num_written: int,
    ) -> tuple[int, float]:
        """Write the leaves whose item is still there; how many (-1: refused) and their largest priority."""
        if np.any(index >= capacity) or not np.all((priorities >= 0) & (values < np.inf)):
            return -1, 0.0
        slots = index.view(np.int64)
        holds: NDArray[np.bool_] = (_generations(slots, capacity, num_written) == handle_generations) & (
            leaves[slots] > 0
        )
        slots = slots[holds]
        if slots.size:
            leaves[slots] = values[holds]
            self._tree.resum_above(leaves, inner, starts, slots)
        return slots.size, float(priorities[holds].max(initial=0.0))


def _kernels() -> _Kernels:
    if not uses_numba():
        return _NumpyKernels()
    from offbeat.replay import kernels

    return kernels
