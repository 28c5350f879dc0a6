"""Action distributions in numpy: how outputs of an actor become actions and log-probabilities.

``outputs`` ``[..., P]`` are logits for discrete actions, and means followed by log-deviations for
continuous ones. Noise is drawn for a whole segment at once, so that a step costs two or three calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.errors import EnvError
from offbeat.ops.exploration import explored
from offbeat.ops.statistics import log_softmax_at
from offbeat.types import Array

Floats = NDArray[np.float32]
NUM_CELLS = 81
"""Cells of the boards that moves are made on."""
HALF_LOG_2PI = np.float32(0.5 * math.log(2 * math.pi))


class Actions(Protocol):
    """A distribution over actions: how the outputs ``[..., P]`` of an actor become actions.

    Stored actions are ``[..., *shape]`` of ``dtype``, and need not be what the environment takes.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one stored action."""
        ...

    @property
    def dtype(self) -> str:
        """Type of stored actions."""
        ...

    @property
    def num_outputs(self) -> int:
        """P, the outputs that describe the distribution."""
        ...

    def noise(self, rng: np.random.Generator, num_steps: int, num_envs: int) -> Floats:
        """What T steps of N environments draw their actions with, ``[T, N, ...]``."""
        ...

    def sample(self, outputs: Floats, noise: Floats) -> Array:
        """Draw actions ``[N, *shape]`` from outputs ``[N, P]`` and one step's noise."""
        ...

    def mode(self, outputs: Floats) -> Array:
        """The likeliest actions ``[..., *shape]``."""
        ...

    def log_prob(self, outputs: Floats, actions: Array) -> Floats:
        """Log-probability ``[...]`` of stored actions under outputs ``[..., P]``."""
        ...

    def to_env(self, actions: Array, obs: Array) -> Array:
        """What the environment's ``step`` takes where the policy saw ``obs`` ``[N, ...]``."""
        ...


@dataclass(frozen=True, slots=True)
class CategoricalActions:
    """One or several independent categorical choices (Discrete, MultiDiscrete).

    ``nvec`` counts the options of each choice, ``starts`` is the first option's number. ``shape`` is ()
    for Discrete. Stored actions count from 0: ``[..., *shape]`` int64.

    Example: ``CategoricalActions(nvec=(2,), starts=(0,), shape=())`` for CartPole.
    """

    nvec: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str = "int64"

    @property
    def num_outputs(self) -> int:
        """Logits of all choices together."""
        return sum(self.nvec)

    def noise(self, rng: np.random.Generator, num_steps: int, num_envs: int) -> Floats:
        """Gumbel noise ``[T, N, P]``: the largest of logit + noise is a draw from the softmax."""
        draws = rng.standard_exponential((num_steps, num_envs, self.num_outputs), dtype=np.float32)
        # An exponential draw of exactly 0 would be infinite noise.
        return -np.log(np.maximum(draws, np.float32(1e-30)))

    def sample(self, outputs: Floats, noise: Floats) -> Array:
        """Draw actions ``[N, *shape]`` from outputs ``[N, P]`` and one step's noise ``[N, P]``."""
        return self.mode(outputs + noise)

    def mode(self, outputs: Floats) -> Array:
        """The likeliest actions ``[..., *shape]``."""
        if not self.shape:
            return np.asarray(outputs.argmax(axis=-1))
        choices = [part.argmax(axis=-1) for part in self.split(outputs)]
        return np.stack(choices, axis=-1).reshape(*outputs.shape[:-1], *self.shape)

    def log_prob(self, outputs: Floats, actions: Array) -> Floats:
        """Log-probability ``[...]`` of stored actions ``[..., *shape]`` under outputs ``[..., P]``."""
        chosen = actions.reshape(*outputs.shape[:-1], len(self.nvec))
        total: Floats = np.zeros(outputs.shape[:-1], np.float32)
        for index, logits in enumerate(self.split(outputs)):
            total += log_softmax_at(logits, chosen[..., index])
        return total

    def to_env(self, actions: Array, obs: Array) -> Array:
        """What the environment's ``step`` takes."""
        if not any(self.starts):
            return actions
        return np.asarray(actions + np.asarray(self.starts).reshape(self.shape))

    def explore(self, outputs: Floats, *, temperature: float, epsilon: float) -> Floats:
        """Outputs of the policy that is acted with; see ``ops.exploration``."""
        parts = [explored(part, temperature=temperature, epsilon=epsilon) for part in self.split(outputs)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def split(self, outputs: Floats) -> list[Floats]:
        """Logits of each choice, ``[..., nvec[i]]``."""
        if len(self.nvec) == 1:
            return [outputs]
        return np.split(outputs, np.cumsum(self.nvec)[:-1], axis=-1)


@dataclass(frozen=True, slots=True, eq=False)
class GaussianActions:
    """Diagonal Gaussian over a Box; actions are clipped to the box on their way to the environment.

    The stored action ``[..., *shape]`` float32 is the unclipped one, and so is its log-probability:
    the ratio of two policies is then exact whatever the bounds. ``low`` and ``high`` are ``[*shape]``.
    """

    low: Array
    high: Array
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_outputs(self) -> int:
        """Means and log-deviations."""
        return 2 * self.low.size

    def noise(self, rng: np.random.Generator, num_steps: int, num_envs: int) -> Floats:
        """Standard normal noise ``[T, N, D]``."""
        return rng.standard_normal((num_steps, num_envs, self.low.size), dtype=np.float32)

    def sample(self, outputs: Floats, noise: Floats) -> Array:
        """Draw actions ``[N, *shape]`` from outputs ``[N, 2 D]`` and one step's noise ``[N, D]``."""
        mean, log_std = self._split(outputs)
        return (mean + np.exp(log_std) * noise).reshape(-1, *self.shape)

    def mode(self, outputs: Floats) -> Array:
        """The means ``[..., *shape]``."""
        return self._split(outputs)[0].reshape(*outputs.shape[:-1], *self.shape)

    def log_prob(self, outputs: Floats, actions: Array) -> Floats:
        """Log-density ``[...]`` of stored actions ``[..., *shape]`` under outputs ``[..., 2 D]``."""
        mean, log_std = self._split(outputs)
        scaled = (actions.reshape(mean.shape) - mean) * np.exp(-log_std)
        density: Floats = np.float32(-0.5) * np.square(scaled) - log_std - HALF_LOG_2PI
        total: Floats = density.sum(axis=-1)
        return total

    def to_env(self, actions: Array, obs: Array) -> Array:
        """What the environment's ``step`` takes: inside the box, in its dtype."""
        return np.clip(actions, self.low, self.high).astype(self.low.dtype, copy=False)

    def _split(self, outputs: Floats) -> tuple[Floats, Floats]:
        return outputs[..., : self.low.size], outputs[..., self.low.size :]


@runtime_checkable
class Explores(Protocol):
    """Actions that can be chosen less greedily than the policy says."""

    def explore(self, outputs: Floats, *, temperature: float, epsilon: float) -> Floats:
        """Outputs of the policy that is acted with; see ``ops.exploration``."""
        ...


class MovesLike(Protocol):
    """An action space of moves on a board, from * 81 + to, of which an observation allows some."""

    num_cells: int

    def legal(self, obs: Array) -> Array:
        """Which actions the observations ``[N, ...]`` allow, ``[N, n]`` bool."""
        ...


def knows_moves(space: object) -> TypeGuard[MovesLike]:
    """Whether actions are moves on a board of 81 cells; a space with ``legal`` alone may be anything."""
    return callable(getattr(space, "legal", None)) and getattr(space, "num_cells", None) == NUM_CELLS


def action_head(space: gymnasium.Space[Any]) -> Actions:
    """The distribution for a space of moves, a Discrete, MultiDiscrete or Box space; refuse others."""
    if knows_moves(space):
        from offbeat.models.moves import MoveActions

        return MoveActions()
    if isinstance(space, gymnasium.spaces.Discrete):
        return CategoricalActions((int(space.n),), (int(space.start),), ())
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        nvec = tuple(int(n) for n in space.nvec.flat)
        return CategoricalActions(nvec, tuple(int(n) for n in space.start.flat), space.nvec.shape)
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return GaussianActions(space.low, space.high, space.shape)
    raise EnvError(f"PPO needs Discrete, MultiDiscrete or float Box actions, this environment has {space}")
