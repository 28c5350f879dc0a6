"""Acting with pattern tables. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.models.lines_kernels import (
    CELLS,
    COLOURS,
    MAX_MOVES,
    NUM_PATTERNS,
    NUM_SHAPES,
    TableKind,
    judge_boards,
    spread,
)
from offbeat.types import Array

Floats = NDArray[np.float32]


class Table(NamedTuple):
    """What a table has entries for, and what they are multiplied with."""

    kind: TableKind
    scale: float


ACTOR_TABLES: Mapping[str, Table] = {
    "place": Table("pattern", 1.0),
    "remove": Table("pattern", 1.0),
    "block": Table("pattern", 1.0 / COLOURS),
    "free": Table("pattern", 1.0 / COLOURS),
    "enter": Table("shape", 1.0),
    "leave": Table("shape", 1.0),
}
"""The policy's tables: those that sum over colours take the mean."""


_NO_CRITIC = tuple(np.zeros(size, np.float32) for size in (NUM_PATTERNS, NUM_PATTERNS, NUM_SHAPES, CELLS + 1))
_NO_VALUES = np.empty(0, np.float32)


def actor_tables(tables: Mapping[str, Array]) -> list[Floats]:
    """The policy's tables as the kernels take them, in their order."""
    return [spread(tables[name], *table) for name, table in ACTOR_TABLES.items()]


def score_moves(obs: Array, tables: list[Floats]) -> Floats:
    """Scores ``[N, P]`` of the moves of boards ``[N, 84]``."""
    outputs = np.empty((len(obs), MAX_MOVES), np.float32)
    judge_boards(np.ascontiguousarray(obs), *tables, *_NO_CRITIC, outputs, _NO_VALUES)
    return outputs


class LinesActor:
    """Acts with the weights of ``LinesActorCritic``."""

    def __init__(self) -> None:
        self._tables: list[Floats] = []

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights."""
        self._tables = actor_tables(weights)

    def outputs(self, obs: Array, memory: Floats) -> tuple[Floats, Floats]:
        """Scores of moves ``[N, P]``; the memory is empty and comes back as it was."""
        return score_moves(obs, self._tables), memory
