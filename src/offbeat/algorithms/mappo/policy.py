"""A team that acts: for evaluation, and for users. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.envs.teams import View
from offbeat.errors import OffbeatError
from offbeat.models.recurrent_actor import NumpyRecurrent
from offbeat.models.team_spec import TeamSpec
from offbeat.ops.exploration import IMPOSSIBLE
from offbeat.types import Array

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class Chooser(Protocol):
    """What chooses the skills of a team that acts."""

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights."""
        ...

    def begin(self, num_envs: int) -> None:
        """Start anew in all environments."""
        ...

    def choose(
        self, state: Floats, obs: Floats, starts: Bools, rng: np.random.Generator | None
    ) -> tuple[NDArray[np.int64], Bools]:
        """Skills ``[N, 1 + A]`` for the next step, and where they are new; without ``rng`` the likeliest."""
        ...


class TeamPolicy:
    """Acts with published weights, for one team or many at once.

    Example: ``actions = policy.act(obs, state=state)`` with ``obs`` ``[A, O]`` and ``state`` ``[S]``.
    """

    def __init__(
        self,
        spec: TeamSpec,
        *,
        seed: int = 0,
        chooser: Chooser | None = None,
        resets_at_choice: bool = False,
    ) -> None:
        self.spec = spec
        self._actor = NumpyRecurrent(spec)
        self._chooser = chooser
        self._resets_at_choice = resets_at_choice
        self._rng = np.random.default_rng(seed)
        self._memory: Floats = np.zeros((0, spec.num_agents, spec.memory_size), np.float32)
        self._starts = np.zeros(0, np.bool_)
        self.skills: NDArray[np.int64] | None = None

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights, and start anew."""
        self._actor.load(weights, "actor")
        if self._chooser is not None:
            self._chooser.load(weights)
        self.reset()

    def seed(self, seed: int) -> None:
        """Draw from here on with this seed."""
        self._rng = np.random.default_rng(seed)

    def reset(self) -> None:
        """Forget what was remembered of all episodes."""
        self._memory = self._memory[:0]

    def ended(self, where: Bools) -> None:
        """Forget what was remembered of the episodes that ended, ``[N]``."""
        self._starts = self._starts | where

    def act(
        self,
        obs: Array | View,
        *,
        state: Array | None = None,
        legal: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Actions ``[A, ...]`` for one team's observations ``[A, O]``, or ``[N, A, ...]`` for ``[N, A, O]``.

        ``state`` ``[S]`` or ``[N, S]`` is needed where skills are chosen; ``legal`` says which actions may be
        taken. A `View` has all of it.
        """
        if isinstance(obs, View):
            return self.act(obs.obs, state=obs.state, legal=obs.legal, deterministic=deterministic)
        spec, head = self.spec, self.spec.actions
        seen = np.asarray(obs, np.float32)
        is_one = seen.ndim == 2
        seen = seen[None] if is_one else seen
        if seen.shape[1:] != (spec.num_agents, spec.obs_size):
            raise OffbeatError(
                f"expected observations of shape {(spec.num_agents, spec.obs_size)} or a batch of them,"
                f" got {np.shape(obs)}"
            )
        if legal is None and spec.has_legal:
            raise OffbeatError("not every action is always legal here: give act(obs, legal=...)")
        if len(self._memory) != len(seen):
            self._begin(len(seen))
        skills = self._choose(seen, state, deterministic)
        rows = len(seen) * spec.num_agents
        memory = self._memory * ~self._starts[:, None, None]
        inputs = spec.actor_inputs(seen, None if skills is None else skills[:, 1:])
        outputs, after = self._actor.step(inputs.reshape(rows, -1), memory.reshape(rows, -1))
        if legal is not None:
            outputs = np.where(np.reshape(legal, (rows, -1)), outputs, IMPOSSIBLE)
        self._memory = after.reshape(memory.shape)
        self._starts = np.zeros(len(seen), np.bool_)
        if deterministic:
            chosen = head.mode(outputs)
        else:
            chosen = head.sample(outputs, head.noise(self._rng, 1, rows)[0])
        shape = (len(seen), spec.num_agents, *head.shape)
        actions = head.to_env(chosen, seen.reshape(rows, -1)).reshape(shape)
        return actions[0] if is_one else actions

    def _begin(self, num_envs: int) -> None:
        self._memory = np.zeros((num_envs, self.spec.num_agents, self.spec.memory_size), np.float32)
        self._starts = np.ones(num_envs, np.bool_)
        if self._chooser is not None:
            self._chooser.begin(num_envs)

    def _choose(self, obs: Floats, state: Array | None, deterministic: bool) -> NDArray[np.int64] | None:
        if self._chooser is None:
            return None
        if state is None:
            raise OffbeatError("skills are chosen from the state as well: give act(obs, state=...)")
        whole = np.asarray(state, np.float32).reshape(len(obs), self.spec.state_size)
        rng = None if deterministic else self._rng
        self.skills, is_new = self._chooser.choose(whole, obs, self._starts, rng)
        if self._resets_at_choice:
            self._memory[is_new] = 0
        return self.skills
