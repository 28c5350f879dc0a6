"""Looking ahead in Connect Four: negamax with alpha-beta cuts to a limited depth, without a heuristic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.envs.connect4 import kernels
from offbeat.envs.connect4.rules import BOARD, CENTRE_FIRST, MAX_DEPTH, NUM_COLUMNS, has_four
from offbeat.errors import EnvError

WIN = kernels.WIN
CLOSED = kernels.CLOSED


def best_moves(own: int, other: int, depth: int) -> NDArray[np.int64]:
    """Score each column ``[7]`` for ``own``, who is to move in a game that is not over.

    Both numbers are stones as in `rules`. Within ``depth`` plies the score is exact: ``WIN - p`` for a win
    with the p-th stone from now (1 is the move itself), ``p - WIN`` for a loss with the p-th, against the
    best defence. So quick wins and slow losses score more. What lies further away, and a full board, score 0.
    A column without room has the score ``CLOSED``, which is less than any other.

    Example: ``best_moves(0b111, 0b111 << 7, 1)`` is 42 for column 0 and 0 for all others.
    """
    _check(own, other, depth)
    scores = np.empty(NUM_COLUMNS, np.int64)
    kernels.score_columns(own, other, depth, scores)
    return scores


def centre_most(scores: NDArray[np.int64]) -> int:
    """The column nearest to the middle among those with the best of the scores ``[7]``."""
    best = scores.max()
    return next(column for column in CENTRE_FIRST if scores[column] == best)


def _check(own: int, other: int, depth: int) -> None:
    if not 1 <= depth <= MAX_DEPTH:
        raise EnvError(f"a minimax of depth {depth} was asked for; give a depth from 1 to {MAX_DEPTH}")
    if own & other or (own | other) & ~BOARD:
        raise EnvError(
            f"the stones {own:#x} and {other:#x} share cells or lie off the board; "
            "give each player's as bits of the cells that rules.py numbers"
        )
    if has_four(own) or has_four(other) or own | other == BOARD:
        raise EnvError("the game is over, no column is to be scored; ask before its last stone")
