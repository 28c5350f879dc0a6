"""A trained model for users: observations in, planned actions out."""

from __future__ import annotations

import numpy as np

from offbeat.algorithms.muzero.config import PlanningConfig
from offbeat.algorithms.muzero.fitting import Fit
from offbeat.algorithms.muzero.lane import Lane
from offbeat.algorithms.muzero.parts import MakePlanner
from offbeat.errors import OffbeatError
from offbeat.types import Array


class MuZeroPolicy:
    """Acts by searching. Example: ``action = policy.act(obs)``.

    A model that remembers wants to be told where episodes end: `reset`.
    """

    def __init__(self, algorithm: PlanningConfig, fit: Fit, make: MakePlanner, *, seed: int = 0) -> None:
        self._algorithm, self._fit, self._make = algorithm, fit, make
        self._rng = np.random.default_rng(seed)
        self._lane: Lane | None = None
        self._planner = make(1)
        self._done: Array | None = None

    def reset(self, ended: Array | None = None) -> None:
        """Forget what was seen of the episode, or of those of a batch that ``ended`` ``[N]``."""
        if ended is None:
            self._lane = None
        elif self._lane is not None:
            self._lane.ended = np.asarray(ended, np.bool_)

    def act(self, obs: Array, *, deterministic: bool = True) -> Array:
        """The action for one observation ``[...]``, or actions for a batch of them ``[N, ...]``."""
        spec = self._fit.spec.observation
        stored = np.asarray(obs, spec.dtype)
        is_one = stored.shape == spec.shape
        rows = stored[None] if is_one else stored
        if rows.shape[1:] != spec.shape:
            raise OffbeatError(
                f"expected an observation of shape {spec.shape} or a batch of them, got {stored.shape}"
            )
        count = len(rows)
        if self._lane is None or self._done is None or len(self._lane.obs) != count:
            self._lane = Lane.begin(rows, self._algorithm.context, self._fit)
        else:
            self._lane.move(self._done, rows, np.zeros(count, np.bool_))
        if count > self._planner.num_trees:
            self._planner = self._make(count)
        rngs = self._rng.spawn(self._planner.num_trees)
        roots = self._lane.roots(self._fit).filled(self._planner.num_trees)
        plan = self._planner.plan(roots, rngs, explores=False)
        chosen = plan.act(0.0 if deterministic else self._algorithm.search.temperature, rngs)
        self._done = chosen[:count]
        actions = self._fit.to_env(self._done)
        return actions[0] if is_one else actions
