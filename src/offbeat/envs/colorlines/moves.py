"""The actions of Color Lines: a Discrete space that knows which of them are legal."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.envs.colorlines.rules import EMPTY, NUM_ACTIONS, NUM_CELLS, OBS_SIZE, SIDE
from offbeat.envs.colorlines.symmetry import (
    draw_renamings,
    draw_symmetries,
    renamed,
    turned,
    turned_moves,
)
from offbeat.errors import EnvError

Bools = NDArray[np.bool_]


class Moves(gymnasium.spaces.Discrete[np.int64]):
    """All moves from one of 81 cells to another: action ``source * 81 + target``.

    Example: ``Moves().legal(obs)`` is ``[N, 6561]`` for observations ``[N, 84]``.
    """

    num_cells = NUM_CELLS
    """Cells of the board: with ``legal`` this tells networks for boards that actions are moves on one."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(NUM_ACTIONS, seed)

    def legal(self, obs: NDArray[Any]) -> Bools:
        """Which moves ``[..., 6561]`` are legal on the boards of observations ``[..., 84]``.

        A ball moves to any empty cell that it can reach in steps to the side, up or down through empty cells.
        A full board, on which no move is legal, gets all True: whoever chooses needs something to choose.
        """
        if obs.shape[-1:] != (OBS_SIZE,):
            raise EnvError(f"observations of Color Lines are [..., {OBS_SIZE}], these are {list(obs.shape)}")
        from offbeat.envs.colorlines import kernels  # it imports numba

        rows = np.ascontiguousarray(obs.reshape(-1, OBS_SIZE), np.int8)
        if kernels.IS_COMPILED:
            legal = np.empty((len(rows), NUM_ACTIONS), np.bool_)
            kernels.find_legal(rows, legal)
        else:
            legal = legal_moves(rows)
        return legal.reshape(*obs.shape[:-1], NUM_ACTIONS)

    def augment(
        self,
        rng: np.random.Generator,
        obs: NDArray[Any],
        moves: NDArray[Any],
        *,
        symmetry: bool,
        colours: bool,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The same play seen in another way: observations ``[T + 1, B, 84]`` and moves ``[T, B]``.

        Each of the B games is turned or mirrored at random (``symmetry``), and its colours are renamed at
        random (``colours``), all its steps alike. What it was rewarded with stays true.
        """
        num_games = obs.shape[-2]
        if symmetry:
            chosen = draw_symmetries(rng, num_games)
            obs, moves = turned(obs, chosen), turned_moves(moves, chosen)
        if colours:
            obs = renamed(obs, draw_renamings(rng, num_games))
        return obs, moves

    def __repr__(self) -> str:
        return "Moves()"


def legal_moves(obs: NDArray[np.int8]) -> Bools:
    """`Moves.legal` of ``[N, 84]`` without compiled code."""
    balls = obs[:, :NUM_CELLS] != EMPTY
    groups = _groups(balls)
    flat = groups[:, 1:-1, 1:-1].reshape(-1, 1, NUM_CELLS)
    legal = np.zeros((len(obs), NUM_CELLS, NUM_CELLS), np.bool_)
    for beside in (groups[:, :-2, 1:-1], groups[:, 2:, 1:-1], groups[:, 1:-1, :-2], groups[:, 1:-1, 2:]):
        legal |= beside.reshape(-1, NUM_CELLS, 1) == flat
    legal &= balls[:, :, None] & ~balls[:, None, :]
    legal[~legal.any(axis=(1, 2))] = True
    return legal.reshape(len(obs), NUM_ACTIONS)


def _groups(balls: Bools) -> NDArray[np.int8]:
    """Number of the connected group of empty cells each cell belongs to, 0 for balls: ``[N, 11, 11]``.

    There is an edge of zeros around the board. Each group takes the largest number among its cells.
    """
    groups = np.zeros((len(balls), SIDE + 2, SIDE + 2), np.int8)
    inner = groups[:, 1:-1, 1:-1]
    inner[...] = np.where(balls, 0, np.arange(1, NUM_CELLS + 1)).reshape(-1, SIDE, SIDE)
    is_empty = inner != 0
    for _ in range(NUM_CELLS):  # a way has fewer steps than that
        largest = inner.copy()
        for beside in (groups[:, :-2, 1:-1], groups[:, 2:, 1:-1], groups[:, 1:-1, :-2], groups[:, 1:-1, 2:]):
            np.maximum(largest, beside, out=largest)
        largest *= is_empty
        if np.array_equal(largest, inner):
            break
        inner[...] = largest
    return groups
