"""Pictures of a board, as text and as pixels, with nothing but numpy."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from offbeat.envs.connect4.rules import NUM_COLUMNS, NUM_ROWS, STRIDE, has_four

Picture = NDArray[np.uint8]
Pixels = NDArray[np.float64]

LETTERS = ".XO"
"""How a cell is written: empty, the first player, the second."""
CELL = 60
MARGIN = 2
WIDTH = NUM_COLUMNS * CELL + 2 * MARGIN
HEIGHT = NUM_ROWS * CELL + 2 * MARGIN

_ANSI = (0, 91, 93)
_COLOURS = ((24, 27, 33), (229, 57, 53), (253, 203, 40))
_BOARD, _MARK = (36, 84, 180), (245, 247, 250)


def text(first: int, second: int, last: int | None, agent: int | None = None) -> str:
    """A board as coloured letters, which say the same without colours.

    ``last`` is the column moved in; ``agent``, 0 or 1, the player who has an opponent in the environment.
    """
    lines = [" ".join(_letter(cell) for cell in row) for row in _cells(first, second)]
    lines.append(" ".join(str(column) for column in range(NUM_COLUMNS)))
    if agent is not None:
        lines.append(f"the agent is {LETTERS[1 + agent]}")
    if last is not None:
        lines.append(f"dropped in {last}")
    if has_four(first) or has_four(second):
        lines.append(f"{LETTERS[1] if has_four(first) else LETTERS[2]} has four in a line")
    return "\n".join(lines) + "\n"


def picture(first: int, second: int, last: int | None) -> Picture:
    """A board as an image ``[364, 424, 3]``, red for the first player; a dot marks the last stone."""
    image = np.tile(np.array(_BOARD, np.float64), (HEIGHT, WIDTH, 1))
    cells = _cells(first, second)
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            _blend(image, row, column, 0.42 * CELL, _COLOURS[cell])
    if last is not None:
        top = next((row for row in range(NUM_ROWS) if cells[row][last]), None)
        if top is not None:
            _blend(image, top, last, 0.1 * CELL, _MARK)
    return image.round().astype(np.uint8)


def _cells(first: int, second: int) -> list[list[int]]:
    """0 for an empty cell, 1 and 2 for the players, by row from the top and column."""
    rows = [[STRIDE * column + row for column in range(NUM_COLUMNS)] for row in reversed(range(NUM_ROWS))]
    return [[(first >> cell & 1) + 2 * (second >> cell & 1) for cell in row] for row in rows]


def _letter(cell: int) -> str:
    return LETTERS[cell] if cell == 0 else f"\x1b[{_ANSI[cell]}m{LETTERS[cell]}\x1b[0m"


def _blend(image: Pixels, row: int, column: int, radius: float, colour: tuple[int, int, int]) -> None:
    top, left = MARGIN + row * CELL, MARGIN + column * CELL
    area = image[top : top + CELL, left : left + CELL]
    area += _disc(radius)[..., None] * (np.array(colour, np.float64) - area)


@functools.cache
def _disc(radius: float) -> Pixels:
    """How much of each pixel ``[60, 60]`` a disc in the middle covers."""
    steps = np.arange(CELL) - (CELL - 1) / 2
    covered: Pixels = np.clip(radius - np.hypot(steps[:, None], steps[None, :]) + 0.5, 0.0, 1.0)
    return covered
