"""Where a collector's environments stand: what was seen and done lately. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.muzero.fitting import Fit
from offbeat.types import Array, StateTree

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Roots:
    """Where B searches begin.

    ``obs`` ``[B, C, ...]`` are the last observations, the newest last, and ``actions`` ``[B, C - 1, ...]``
    what was done in between; ``first`` ``[B]`` is the first of them that belongs to the episode. ``legal``
    ``[B, A]`` may be None for all. ``prior`` ``[B, A]`` are logits of somebody else, and ``prior_weight`` is
    their share in the root's policy.
    """

    obs: Array
    actions: Array
    first: Ints
    legal: Bools | None = None
    prior: Floats | None = None
    prior_weight: float = 0.5

    def filled(self, count: int) -> Self:
        """The same with as many more of the last as make ``count``."""
        rows = np.minimum(np.arange(count), len(self.obs) - 1)
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        more: dict[str, Any] = {
            name: array[rows] for name, array in given.items() if isinstance(array, np.ndarray)
        }
        return replace(self, **more)


@dataclass(slots=True)
class Lane:
    """The last C observations ``[N, C, ...]`` and C - 1 actions of N environments, the newest last.

    ``first`` ``[N]`` is the first observation that belongs to the episode; ``ended`` ``[N]`` says that the
    newest is its last. ``returns`` and ``lengths`` ``[N]`` are those of the episodes so far.
    """

    obs: Array
    actions: Array
    first: Ints
    ended: Bools
    returns: NDArray[np.float64]
    lengths: Ints

    @classmethod
    def begin(cls, obs: Array, context: int, fit: Fit) -> Self:
        """All environments at the start of an episode."""
        num_envs, spec = len(obs), fit.spec
        seen = np.zeros((num_envs, context, *spec.observation.shape), spec.observation.dtype)
        seen[:, -1] = obs
        done = np.zeros((num_envs, context - 1), np.int64)
        if not spec.num_actions:
            done = np.zeros((num_envs, context - 1, spec.action_size), np.float32)
        return cls(
            seen,
            done,
            np.full(num_envs, context - 1),
            np.zeros(num_envs, np.bool_),
            np.zeros(num_envs),
            np.zeros(num_envs, np.int64),
        )

    def move(self, actions: Array, obs: Array, ended: Bools) -> None:
        """Take in what was done and seen; where an episode had ended, this is the first of another."""
        context = self.obs.shape[1]
        if context > 1:
            self.obs[:, :-1], self.actions[:, :-1] = self.obs[:, 1:].copy(), self.actions[:, 1:].copy()
            self.actions[:, -1] = actions
        self.obs[:, -1] = obs
        self.first = np.where(self.ended, context - 1, np.maximum(self.first - 1, 0))
        self.ended = ended

    def roots(self, fit: Fit) -> Roots:
        """Where searches begin that evaluate: with two players others moved in between, so nothing before."""
        newest = self.obs.shape[1] - 1
        first = np.full_like(self.first, newest) if fit.two_player else self.first
        return Roots(self.obs, self.actions, first, fit.legal(self.obs[:, -1]))

    def state_dict(self) -> StateTree:
        """Copies of all arrays, by name."""
        return {name: getattr(self, name).copy() for name in self.__slots__}

    @classmethod
    def from_state(cls, state: StateTree) -> Self:
        """The lane that gave this state."""
        return cls(**{name: np.array(value) for name, value in state.items()})
