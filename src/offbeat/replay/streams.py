"""Replay of steps in the order in which environments took them, drawn by transition.

Each environment has a stream, a ring of its newest steps. What is drawn is a window: a step and some after
it, across the borders of the segments in which they came. A step can be drawn once all of its window is
there, so that none is lost and none is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import CheckpointError, ConfigError
from offbeat.replay.sum_tree import F32, I64, SumTree, checked_priorities
from offbeat.types import Array, ArraySpec, StateTree

Bools = NDArray[np.bool_]
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Places:
    """Names of steps: their streams ``[M]`` and their numbers in it, from 0 at its beginning, ``[M]``."""

    stream: I64
    number: I64


@dataclass(frozen=True, slots=True)
class Windows:
    """Steps that were drawn, each with those after it.

    ``items`` are arrays ``[B, 1 + after, ...]`` by name; ``weights`` ``[B]`` undo the preference for large
    priorities, the largest is 1; ``versions`` ``[B]`` are those behind the steps that were drawn, and
    ``refreshed`` ``[B]`` those behind what was last written about them.
    """

    items: dict[str, Array]
    places: Places
    weights: F32
    versions: I64
    refreshed: I64


class StreamReplay:
    """The newest ``length`` steps of each of ``num_streams`` environments.

    Every use has its place in one thread. Draws depend on the generator handed in and on nothing else.

    Example::

        replay = StreamReplay(spec, num_streams=64, length=4096, after=10)
        replay.extend(streams, steps, version)
        drawn = replay.sample(rng, 256, beta=0.4)
        replay.set_priorities(drawn.places, errors)
    """

    def __init__(
        self,
        spec: Mapping[str, ArraySpec],
        num_streams: int,
        length: int,
        *,
        after: int = 0,
        alpha: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        """Make an empty replay.

        Args:
            spec: shape and dtype of each array of a step.
            num_streams: environments that steps come from.
            length: steps of each that are kept.
            after: steps that a window has after the one that is drawn.
            alpha: how much priorities count, from 0 (not at all) to 1 (in proportion).
            eps: added to every priority, so that each step keeps a chance.
        """
        if num_streams < 1:
            raise ConfigError(f"a replay needs at least one stream, not {num_streams}")
        if length <= after:
            raise ConfigError(
                f"streams of {length} steps cannot hold a window of {1 + after}: "
                "raise the capacity of the replay, or shorten what is unrolled"
            )
        self.num_streams, self.length = num_streams, length
        self.after, self.alpha, self.eps = after, alpha, eps
        self.spec = dict(spec)
        self._rings = {
            name: np.zeros((num_streams, length, *array.shape), np.dtype(array.dtype))
            for name, array in spec.items()
        }
        self._versions = np.full((num_streams, length), -1, np.int64)
        self._refreshed = np.full((num_streams, length), -1, np.int64)
        self._eligible = np.zeros((num_streams, length), np.bool_)
        self._begins = np.zeros((num_streams, length), np.bool_)
        self._leaves = np.zeros((num_streams, length), np.float32)
        self._written = np.zeros(num_streams, np.int64)
        self._tree = SumTree(num_streams * length)
        self._largest_priority = 1.0

    @staticmethod
    def num_bytes(spec: Mapping[str, ArraySpec], num_streams: int, length: int) -> int:
        """Memory that a full replay takes, with its tree."""
        each = sum(array.num_bytes for array in spec.values()) + 8 + 8 + 4 + 1 + 1
        return num_streams * length * each + SumTree.num_bytes(num_streams * length) + 8 * num_streams

    def __len__(self) -> int:
        """Steps that can be drawn."""
        return int(np.count_nonzero(self._tree.leaves[: self.num_streams * self.length]))

    @property
    def num_stored(self) -> int:
        """Steps that are kept, also those that cannot be drawn yet."""
        return int(np.minimum(self._written, self.length).sum())

    # ------------------------------------------------------------ writing

    def extend(
        self,
        streams: ArrayLike,
        steps: Mapping[str, Array],
        version: int,
        *,
        eligible: Bools | None = None,
        begins: Bools | None = None,
    ) -> None:
        """Append ``T`` steps to each of some streams. They get the largest priority so far.

        Args:
            streams: which ones, ``[N]``, none twice.
            steps: arrays ``[T, N, ...]`` for every name of the spec, T at most the length of a stream.
            version: what produced them.
            eligible: ``[T, N]``, which of them may be drawn; without it all of them.
            begins: ``[N]``, whether they do not go on where the stream was: no window may hold both.
        """
        where = np.asarray(streams, np.int64)
        num_steps = self._checked_steps(where, steps)
        start = self._written[where]
        if begins is not None and begins.any():
            self._break(where[begins])
        slots = (start + np.arange(num_steps)[:, None]) % self.length
        for name, ring in self._rings.items():
            ring[where, slots] = steps[name]
        self._versions[where, slots] = self._refreshed[where, slots] = version
        self._eligible[where, slots] = True if eligible is None else eligible
        self._begins[where, slots] = False
        if begins is not None:
            self._begins[where, slots[0]] = begins
        self._leaves[where, slots] = self._leaves_of(np.array(self._largest_priority, np.float32))
        self._written[where] = start + num_steps
        numbers = start + np.arange(num_steps)[:, None]
        self._show(where, numbers, False)  # what was there before
        self._show(where, numbers - self.after, True)

    def set_priorities(self, places: Places, priorities: ArrayLike) -> int:
        """Give steps new priorities ``[M]``; those that are gone are passed over.

        Returns:
            How many were still there.
        """
        given = checked_priorities(priorities)
        if given.shape != places.number.shape:
            raise ValueError(f"{places.number.size} steps and {given.size} priorities: give one for each")
        there = self._are_there(places)
        stream, number, given = places.stream[there], places.number[there], given[there]
        self._largest_priority = max(self._largest_priority, float(given.max(initial=0.0)))
        self._leaves[stream, number % self.length] = self._leaves_of(given)
        self._show_places(stream, number, True)
        return int(np.count_nonzero(there))

    def refresh(self, places: Places, arrays: Mapping[str, Array], version: int) -> int:
        """Write anew what ``version`` found out about steps ``[M]``; those that are gone are passed over.

        Something newer than that stays. Returns how many steps were written.
        """
        slots = places.number % self.length
        there = self._are_there(places)
        there &= self._refreshed[places.stream, slots] <= version
        stream, slot = places.stream[there], slots[there]
        for name, array in arrays.items():
            self._rings[name][stream, slot] = array[there]
        self._refreshed[stream, slot] = version
        return int(np.count_nonzero(there))

    def _break(self, streams: I64) -> None:
        """The newest steps of some streams never get the rest of their windows."""
        newest = self._written[streams] - 1 - np.arange(self.after)[:, None]
        where = np.broadcast_to(streams, newest.shape)
        known = newest >= np.maximum(self._written[streams] - self.length, 0)
        self._eligible[where[known], newest[known] % self.length] = False

    def _leaves_of(self, priorities: F32) -> F32:
        leaves: F32 = (priorities + np.float32(self.eps)) ** np.float32(self.alpha)
        return leaves

    def _show(self, where: I64, numbers: I64, is_shown: bool) -> None:
        """Let steps ``numbers`` ``[M, N]`` of some streams be drawn, or not, as far as they can be."""
        streams = np.broadcast_to(where, numbers.shape)
        known = numbers >= 0
        self._show_places(streams[known], numbers[known], is_shown)

    def _show_places(self, stream: I64, number: I64, is_shown: bool) -> None:
        slot = number % self.length
        leaves = np.zeros(len(slot), np.float32)
        if is_shown:
            written = self._written[stream]
            is_whole = (number >= written - self.length) & (number + self.after < written)
            can_be = is_whole & self._eligible[stream, slot]
            leaves = np.where(can_be, self._leaves[stream, slot], leaves)
        self._tree.set(stream * self.length + slot, leaves)

    def _are_there(self, places: Places) -> Bools:
        written = self._written[places.stream]
        there: Bools = (places.number >= written - self.length) & (places.number < written)
        return there & (places.number >= 0)

    # ------------------------------------------------------------ drawing

    def sample(self, rng: np.random.Generator, batch_size: int, *, beta: float = 1.0) -> Windows:
        """Draw steps by priority, one from each of ``batch_size`` equal shares of the total.

        Args:
            rng: where the randomness comes from; each call takes ``batch_size`` numbers.
            batch_size: number of draws; a step can be among them more than once.
            beta: how much the weights correct, from 0 (not at all) to 1 (fully).
        """
        if not self._tree.total > 0:
            raise ValueError(
                f"no step can be drawn: windows take {1 + self.after} steps, and no stream has "
                "as many; collect more before sampling"
            )
        masses = (np.arange(batch_size) + rng.random(batch_size)) * (self._tree.total / batch_size)
        index = self._tree.find(np.minimum(masses, self._tree.total))
        leaves = self._tree.leaves[index].astype(np.float64)
        weights = ((leaves.min() / leaves) ** beta).astype(np.float32)
        stream, slot = np.divmod(index, self.length)
        newest = self._written[stream] - 1
        places = Places(stream, newest - (newest - slot) % self.length)
        return Windows(
            self.windows(places, 0, self.after),
            places,
            weights,
            self._versions[stream, slot],
            self._refreshed[stream, slot],
        )

    def draw_oldest(
        self, rng: np.random.Generator, count: int, share: float, *, before: int = 0
    ) -> Places | None:
        """Draw steps evenly among the oldest ``share`` of those with so many ``before`` them.

        Those that may not be drawn are avoided, and those whose past was cut off, as far as some tries do.
        None when there are no steps.
        """
        first = np.maximum(self._written - self.length, 0) + before
        numbers = np.ceil(np.maximum(self._written - first, 0) * share).astype(np.int64)
        ends = np.cumsum(numbers)
        if not ends[-1]:
            return None
        chosen = rng.integers(ends[-1], size=count)
        for _ in range(_TRIES):
            stream = np.searchsorted(ends, chosen, side="right")
            number = first[stream] + chosen - (ends[stream] - numbers[stream])
            past = (number[:, None] - np.arange(before)) % self.length
            is_vain = ~self._eligible[stream, number % self.length]
            is_vain |= self._begins[stream[:, None], past].any(axis=1)
            if not is_vain.any():
                break
            chosen[is_vain] = rng.integers(ends[-1], size=np.count_nonzero(is_vain))
        return Places(stream, number)

    def windows(self, places: Places, before: int, after: int) -> dict[str, Array]:
        """Copies ``[M, before + 1 + after, ...]`` of steps and those around them, which must be there."""
        slots = (places.number[:, None] + np.arange(-before, after + 1)) % self.length
        return {name: ring[places.stream[:, None], slots] for name, ring in self._rings.items()}

    # ------------------------------------------------------------ saving

    def state_dict(self) -> StateTree:
        """All that a checkpoint needs: views of what was written, which change when steps are added."""
        filled = int(min(self._written.max(initial=0), self.length))
        part = (slice(None), slice(0, filled))
        return {
            "settings": self._settings(),
            "items": {name: ring[part] for name, ring in self._rings.items()},
            "versions": self._versions[part],
            "refreshed": self._refreshed[part],
            "eligible": self._eligible[part],
            "begins": self._begins[part],
            "leaves": self._leaves[part],
            "written": self._written,
            "largest_priority": self._largest_priority,
        }

    def load_state_dict(self, state: StateTree, called: Mapping[str, str] | None = None) -> None:
        """Restore what `state_dict` gave; everything goes on as it would have.

        ``called`` says what those who set them call ``num_streams``, ``length``, ``after`` and so on.
        """
        ours = self._settings()
        for name, saved in state["settings"].items():
            if saved != ours[name]:
                told = (called or {}).get(name, name)
                raise CheckpointError(
                    f"the replay was saved with {told} {saved} and now has {ours[name]}: "
                    "set it back to go on with this checkpoint, or start a new run"
                )
        filled = state["versions"].shape[1]
        part = (slice(None), slice(0, filled))
        for name, ring in self._rings.items():
            ring[part] = state["items"][name]
        for array, name in (
            (self._versions, "versions"),
            (self._refreshed, "refreshed"),
            (self._eligible, "eligible"),
            (self._begins, "begins"),
            (self._leaves, "leaves"),
        ):
            array[part] = state[name]
        self._written[:] = state["written"]
        self._largest_priority = state["largest_priority"]
        self._tree.set_range(0, np.zeros(self.num_streams * self.length))
        oldest = np.maximum(self._written - self.length, 0)
        numbers = oldest + np.arange(filled)[:, None]
        self._show(np.arange(self.num_streams), numbers, True)

    def _settings(self) -> dict[str, StateTree]:
        spec = {name: [list(array.shape), np.dtype(array.dtype).str] for name, array in self.spec.items()}
        sizes = {name: getattr(self, name) for name in ("num_streams", "length", "after")}
        return {**sizes, "alpha": self.alpha, "eps": self.eps, "spec": spec}

    # ------------------------------------------------------------ checks

    def _checked_steps(self, where: I64, steps: Mapping[str, Array]) -> int:
        if steps.keys() != self._rings.keys():
            raise ValueError(f"steps have {sorted(steps)}: give exactly {sorted(self._rings)}")
        if len(np.unique(where)) != len(where) or not np.all((where >= 0) & (where < self.num_streams)):
            raise ValueError(f"streams must differ and be in 0..{self.num_streams - 1}")
        (num_steps,) = {len(array) for array in steps.values()}
        for name, ring in self._rings.items():
            expected = (num_steps, len(where), *ring.shape[2:])
            if steps[name].shape != expected:
                raise ValueError(f"{name} has the shape {steps[name].shape}, it must be {expected}")
        if num_steps > self.length - self.after:
            raise ValueError(
                f"{num_steps} steps at once do not fit into streams of {self.length}, with windows of "
                f"{1 + self.after}: raise the capacity of the replay"
            )
        return num_steps
