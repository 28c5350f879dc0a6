"""A round's segments side by side, and how they are cut into the chunks that a memory is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.mappo.collector import is_per_env
from offbeat.types import Array, Segment

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
CHECKED = ("obs", "state", "next_obs", "next_state", "rewards", "logp", "actions")
"""Arrays in which a NaN would ruin the networks."""


@dataclass(frozen=True, slots=True)
class TeamRound:
    """The samples of one round: B environments over T steps, segments in training order.

    ``arrays`` are those of a segment, ``[T, B, ...]``, or ``[B, ...]`` for what is known once per
    environment; T is the length of the longest segment.
    """

    arrays: Mapping[str, Array]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> TeamRound:
        """Copy the segments' arrays side by side: their own memory is reused after training."""
        used = max(int(np.flatnonzero(one.data["valid"].any(axis=1)).max(initial=0)) + 1 for one in segments)
        joined = {}
        for name in segments[0].data:
            parts = [one.data[name] if is_per_env(name) else one.data[name][:used] for one in segments]
            joined[name] = np.concatenate(parts, axis=0 if is_per_env(name) else 1)
        return cls(joined)

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def get(self, name: str) -> Array | None:
        """An array, or None if the segments have none of this name."""
        return self.arrays.get(name)

    @property
    def valid(self) -> Bools:
        """Steps that count, ``[T, B]``."""
        return self.arrays["valid"]

    @property
    def acted(self) -> Bools:
        """Actions that count, ``[T, B, A]``: those of agents that were there."""
        acted: Bools = self.arrays["alive"] & self.valid[..., None]
        return acted

    @property
    def ended(self) -> Bools:
        """Steps that ended an episode, ``[T, B]``."""
        ended: Bools = self.arrays["terminated"] | self.arrays["truncated"]
        return ended

    @property
    def is_last(self) -> Bools:
        """The last valid step of each environment, ``[T, B]``."""
        following = np.concatenate([self.valid[1:], np.zeros_like(self.valid[:1])])
        is_last: Bools = self.valid & ~following
        return is_last

    def non_finite(self) -> list[str]:
        """Names of arrays that hold a NaN or an infinity where it would be trained on."""
        suspects = {name: self.arrays[name] for name in CHECKED if self.arrays[name].dtype.kind == "f"}
        return [name for name, array in suspects.items() if not np.isfinite(array[self.valid]).all()]


@dataclass(frozen=True, slots=True)
class Chunks:
    """How T steps of B environments become chunks of ``length`` steps, the last padded at its end.

    A chunk is a column: column ``c B + b`` holds steps ``c length`` and following of environment b.
    """

    num_steps: int
    num_envs: int
    length: int

    @property
    def count(self) -> int:
        """Chunks of one environment."""
        return -(-self.num_steps // self.length)

    @property
    def num_columns(self) -> int:
        """Chunks of all environments."""
        return self.count * self.num_envs

    def cut(self, array: Array) -> Array:
        """``[T, B, ...]`` to ``[length, columns, ...]``; padding is 0."""
        missing = self.count * self.length - self.num_steps
        if missing:
            array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
        parts = array.reshape(self.count, self.length, *array.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(
            self.length, self.num_columns, *array.shape[2:]
        )

    def beginnings(self, first: Array, after: Array) -> Array:
        """What is known before each chunk ``[columns, ...]``: ``first`` ``[B, ...]`` and ``after`` steps.

        ``after`` ``[T, B, ...]`` is what is known after each step.
        """
        before = np.concatenate([first[None], after[self.length - 1 : self.num_steps - 1 : self.length]])
        return before.reshape(self.num_columns, *first.shape[1:])
