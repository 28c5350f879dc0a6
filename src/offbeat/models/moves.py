"""Moves on a board as actions: a ball and where it goes, scored together, chosen among the legal ones.

Of the 6,561 pairs of two cells at most 1,640 have a ball first and an empty cell second. Outputs and stored
actions count only those: number ``i * E + j`` is the i-th ball of the board moved to its j-th empty cell,
both counted row by row, E the number of empty cells. Moves that the board forbids have the output
``ILLEGAL``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.models.lines_kernels import CELLS, MAX_MOVES, draw, judge_moves, to_cells, to_number
from offbeat.ops.exploration import explored
from offbeat.types import Array

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MoveActions:
    """The distribution over the legal moves of a board; actions of the environment are from * 81 + to."""

    shape: tuple[int, ...] = ()
    dtype: str = "int16"

    @property
    def num_outputs(self) -> int:
        """Scores of all pairs of a ball and an empty cell."""
        return MAX_MOVES

    def noise(self, rng: np.random.Generator, num_steps: int, num_envs: int) -> Floats:
        """Uniform draws ``[T, N, 1]``: one per move is enough, and 1,640 would cost more than the rest."""
        return rng.random((num_steps, num_envs, 1), dtype=np.float32)

    def sample(self, outputs: Floats, noise: Floats) -> Array:
        """Draw moves ``[N]`` from outputs ``[N, P]`` and one step's noise ``[N, 1]``."""
        chosen = np.empty(len(outputs), np.int16)
        draw(outputs, noise[:, 0], chosen)
        return chosen

    def mode(self, outputs: Floats) -> Array:
        """The likeliest moves ``[...]``."""
        best: Array = outputs.argmax(axis=-1).astype(np.int16)
        return best

    def log_prob(self, outputs: Floats, actions: Array) -> Floats:
        """Log-probability ``[...]`` of moves ``[...]`` under outputs ``[..., P]``."""
        rows = outputs.reshape(-1, MAX_MOVES)
        logp, entropy, log_total = np.empty((3, len(rows)), np.float32)
        judge_moves(rows, actions.reshape(-1), logp, entropy, log_total)
        return logp.reshape(actions.shape)

    def explore(self, outputs: Floats, *, temperature: float, epsilon: float) -> Floats:
        """Outputs of the policy that is acted with; see ``ops.exploration``."""
        return explored(outputs, temperature=temperature, epsilon=epsilon)

    def to_env(self, actions: Array, obs: Array) -> Array:
        """What the environment's ``step`` takes, for boards ``[N, 84]``."""
        moves = np.empty(len(actions), np.int64)
        to_cells(obs[:, :CELLS], actions, moves)
        return moves

    def from_env(self, moves: Array, obs: Array) -> Array:
        """Numbers of the environment's moves ``[N]`` on boards ``[N, 84]``."""
        actions = np.empty(len(moves), np.int16)
        to_number(obs[:, :CELLS], moves, actions)
        return actions
