"""Boards for the tests of networks and actions that move balls."""

import numpy as np
from hypothesis import strategies as st

from offbeat.models.lines_kernels import CELLS, ILLEGAL, MAX_MOVES, SIDE, pair_moves


def boards(num, seed=0, *, num_colours=7, fill=None):
    """Observations ``[num, 84]``; ``fill`` is the chance of a ball on a cell, any without it."""
    rng = np.random.default_rng(seed)
    chances = rng.uniform(0.03, 0.95, (num, 1)) if fill is None else np.full((num, 1), fill)
    balls = rng.random((num, CELLS)) < chances
    cells = np.where(balls, rng.integers(1, num_colours + 1, (num, CELLS)), 0)
    # Neither full nor empty: such boards have a test of their own.
    cells[:, 0], cells[:, 1] = 0, 1
    coming = rng.integers(1, 8, (num, 3))
    return np.concatenate([cells, coming], axis=1).astype(np.int8)


@st.composite
def any_boards(draw):
    """One observation ``[1, 84]`` with a ball and an empty cell at least, of any density."""
    fill = draw(st.sampled_from([0.02, 0.2, 0.5, 0.9, 0.99]))
    return boards(1, draw(st.integers(0, 100_000)), num_colours=draw(st.integers(1, 7)), fill=fill)


FULL = np.concatenate([np.arange(CELLS) % 7 + 1, [1, 2, 3]]).astype(np.int8)[None]
EMPTY = np.concatenate([np.zeros(CELLS), [1, 2, 3]]).astype(np.int8)[None]


def as_matrix(obs, outputs):
    """Outputs ``[N, P]`` by source and target ``[N, 81, 81]``; NaN where there is none."""
    moves = np.empty((len(obs), MAX_MOVES), np.int64)
    pair_moves(obs, moves)
    matrix = np.full((len(obs), CELLS * CELLS), np.nan, np.float32)
    for row, move, output in zip(matrix, moves, outputs, strict=True):
        assert ((output == ILLEGAL) == (move < 0)).all()
        row[move[move >= 0]] = output[move >= 0]
    return matrix.reshape(-1, CELLS, CELLS)


def symmetries():
    """The eight ways to turn and mirror a board: for each, which cell ``[81]`` comes to lie where."""
    grid = np.arange(CELLS).reshape(SIDE, SIDE)
    return [np.rot90(side, turns).ravel() for side in (grid, grid.T) for turns in range(4)]
