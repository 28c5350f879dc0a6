"""What Color Lines does not care about: how the board is turned, and which colour is called which.

A game whose boards and moves are all turned by one of the 8 symmetries of the square, and whose colours are
renamed, is again a game by the same rules, with the same points. A *symmetry* is its number, 0 for none; a
*renaming* is the new colour of each, ``[8]`` with 0 for empty cells first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.envs.colorlines.rules import NUM_CELLS, NUM_COLOURS, NUM_COMING, SIDE

Ints = NDArray[np.int64]


def _symmetries() -> Ints:
    board = np.arange(NUM_CELLS).reshape(SIDE, SIDE)
    return np.array([np.rot90(half, turns).ravel() for half in (board, board.T) for turns in range(4)])


SYMMETRIES = _symmetries()
"""Where a cell's ball comes from, ``[8, 81]``: turned by s, cell c holds what ``SYMMETRIES[s, c]`` did."""
TARGETS = SYMMETRIES.argsort(axis=1)
"""Where a cell's ball goes to, ``[8, 81]``."""
_SOURCES = np.hstack([SYMMETRIES, np.tile(np.arange(NUM_CELLS, NUM_CELLS + NUM_COMING), (8, 1))])


def draw_symmetries(rng: np.random.Generator, count: int) -> Ints:
    """Random symmetries ``[B]``."""
    return rng.integers(len(SYMMETRIES), size=count)


def draw_renamings(rng: np.random.Generator, count: int) -> NDArray[np.int8]:
    """Random renamings of the colours ``[B, 8]``."""
    renamings = np.zeros((count, NUM_COLOURS + 1), np.int8)
    colours = np.arange(1, NUM_COLOURS + 1, dtype=np.int8)
    renamings[:, 1:] = rng.permuted(np.tile(colours, (count, 1)), axis=1)
    return renamings


def turned(obs: NDArray[Any], symmetries: Ints) -> NDArray[Any]:
    """Observations ``[..., B, 84]``, each of B games turned by its own symmetry ``[B]``."""
    games = np.arange(len(symmetries))[:, None]
    found: NDArray[Any] = obs[..., games, _SOURCES[symmetries]]
    return found


def turned_moves(moves: NDArray[Any], symmetries: Ints) -> NDArray[Any]:
    """The same moves ``[..., B]``, from * 81 + to, on boards that were turned."""
    targets = TARGETS[symmetries]
    games = np.arange(len(symmetries))
    sources, ends = np.divmod(moves, NUM_CELLS)
    return (targets[games, sources] * NUM_CELLS + targets[games, ends]).astype(moves.dtype, copy=False)


def renamed(obs: NDArray[Any], renamings: NDArray[np.int8]) -> NDArray[Any]:
    """Observations ``[..., B, 84]`` with the colours of each game renamed by its own ``[B, 8]``."""
    games = np.arange(len(renamings))[:, None]
    found: NDArray[Any] = renamings[games, obs].astype(obs.dtype, copy=False)
    return found
