"""Boards written as text, and the same game in its two versions, for the tests of Color Lines."""

from __future__ import annotations

from typing import Any

import numpy as np

from offbeat.envs.colorlines.env import ColorLinesEnv
from offbeat.envs.colorlines.rendering import LETTERS
from offbeat.envs.colorlines.vector import ColorLinesVectorEnv

VERSIONS = ("plain", "vector")


def cells(text: str) -> list[int]:
    """A board of nine rows of letters; rows left out at the end are empty."""
    rows = text.split()
    rows += ["........."] * (9 - len(rows))
    assert len(rows) == 9 and all(len(row) == 9 for row in rows)
    return [LETTERS.index(letter) for row in rows for letter in row]


def action(move: str) -> int:
    """``a1 b2`` is the move from the first cell of the first row to the second of the second."""
    source, target = (("abcdefghi".index(name[0]), int(name[1]) - 1) for name in move.split())
    return (source[0] * 9 + source[1]) * 81 + target[0] * 9 + target[1]


class Table:
    """One game of either version, with a board that a test puts there."""

    def __init__(self, version: str, board: str, coming: str = "RGY", **kwargs: Any) -> None:
        self.is_plain = version == "plain"
        self.env: Any = ColorLinesEnv(**kwargs) if self.is_plain else ColorLinesVectorEnv(1, **kwargs)
        self.env.reset(seed=5)
        self.put(board, coming)

    def put(self, board: str, coming: str) -> None:
        balls, colours = cells(board), [LETTERS.index(letter) for letter in coming]
        if self.is_plain:
            self.env._game.board, self.env._game.coming = balls, colours
            self.env._potential = self.env._measure()
        else:
            from offbeat.envs.colorlines import kernels

            self.env._obs[0] = balls + colours
            self.env._potentials[0] = kernels.measure(self.env._obs[0], kernels.POTENTIAL)

    def move(self, move: str) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        """Return observation, reward, terminated and infos of one step."""
        number = action(move)
        result = self.env.step(number if self.is_plain else np.array([number]))
        obs, reward, terminated, truncated, infos = result
        assert not np.any(truncated)
        if self.is_plain:
            return obs, reward, terminated, infos
        return obs[0], float(reward[0]), bool(terminated[0]), {key: item[0] for key, item in infos.items()}
