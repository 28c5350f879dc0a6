"""Pictures of a board, as text and as pixels, with nothing but numpy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.envs.colorlines.rules import EMPTY, NUM_CELLS, SIDE

Picture = NDArray[np.uint8]
Pixels = NDArray[np.float64]
Move = tuple[int, int]

LETTERS = ".RGYBMCW"
"""How a cell is written: empty, then red, green, yellow, blue, magenta, cyan, white."""
CELL = 44
MARGIN = 2
HEADER = 60
WIDTH = SIDE * CELL + 2 * MARGIN
HEIGHT = WIDTH + HEADER
RADIUS = 17.0

_ANSI = (0, 91, 92, 93, 94, 95, 96, 97)
_COLOURS = (
    (0, 0, 0),
    (229, 57, 53),
    (67, 180, 80),
    (253, 203, 40),
    (56, 116, 233),
    (205, 74, 200),
    (56, 200, 215),
    (236, 236, 236),
)
_BACK, _TILE, _INK = (24, 27, 33), (44, 50, 60), (205, 211, 221)
# Five rows of three pixels each, a row written as one octal digit.
_FONT = {
    "0": "75557",
    "1": "26227",
    "2": "71747",
    "3": "71717",
    "4": "55711",
    "5": "74717",
    "6": "74757",
    "7": "71222",
    "8": "75757",
    "9": "75717",
    "N": "75555",
    "E": "74747",
    "X": "55255",
    "T": "72222",
    "S": "74717",
    "C": "74447",
    "O": "75557",
    "R": "75655",
}


# ---------------------------------------------------------------- text


def text(obs: NDArray[Any], score: int, last_move: Move | None) -> str:
    """A board ``[84]`` as coloured letters, which say the same without colours."""
    coming = " ".join(_letter(ball) for ball in obs[NUM_CELLS:].tolist())
    lines = [f"score {score}   next {coming}", "  " + " ".join("123456789")]
    for row, name in enumerate("abcdefghi"):
        cells = obs[row * SIDE : (row + 1) * SIDE].tolist()
        lines.append(f"{name} " + " ".join(_letter(ball) for ball in cells))
    if last_move is not None:
        lines.append(f"moved {_cell_name(last_move[0])} to {_cell_name(last_move[1])}")
    return "\n".join(lines) + "\n"


def _letter(ball: int) -> str:
    return LETTERS[ball] if ball == EMPTY else f"\x1b[{_ANSI[ball]}m{LETTERS[ball]}\x1b[0m"


def _cell_name(cell: int) -> str:
    return "abcdefghi"[cell // SIDE] + str(cell % SIDE + 1)


# ---------------------------------------------------------------- pixels


def picture(obs: NDArray[Any], score: int, last_move: Move | None) -> Picture:
    """A board ``[84]`` as an image ``[460, 400, 3]``.

    A frame marks the cell that the last move went to, a small dot the one it came from.
    """
    image = _empty_board().copy()
    for cell, ball in enumerate(obs[:NUM_CELLS].tolist()):
        if ball != EMPTY:
            _blend(_tile(image, cell), _ball_alpha(RADIUS), _shaded(ball, RADIUS))
    if last_move is not None:
        _mark(image, last_move)
    _draw_header(image, obs[NUM_CELLS:].tolist(), score)
    return image.round().astype(np.uint8)


def _draw_header(image: Pixels, coming: list[int], score: int) -> None:
    _write(image, "NEXT", 14, 22, 3)
    for index, ball in enumerate(coming):
        left = 66 + index * 34
        area = image[8 : 8 + CELL, left : left + CELL]
        if ball != EMPTY:
            _blend(area, _ball_alpha(14.0), _shaded(ball, 14.0))
    digits = str(score)
    left = WIDTH - 14 - _text_width(digits, 5)
    _write(image, digits, left, 17, 5)
    _write(image, "SCORE", left - 14 - _text_width("SCORE", 3), 22, 3)


def _mark(image: Pixels, move: Move) -> None:
    source, target = (_tile(image, cell) for cell in move)
    _blend(source, 0.6 * _ball_alpha(4.0), np.array(_INK, np.float64))
    edge = np.ones((CELL, CELL))
    edge[4:-4, 4:-4] = 0.0
    edge[:2] = edge[-2:] = edge[:, :2] = edge[:, -2:] = 0.0
    _blend(target, edge, np.array(_INK, np.float64))


def _tile(image: Pixels, cell: int) -> Pixels:
    """The part of an image ``[44, 44, 3]`` where a cell is; drawing on it draws on the image."""
    top, left = HEADER + MARGIN + cell // SIDE * CELL, MARGIN + cell % SIDE * CELL
    return image[top : top + CELL, left : left + CELL]


def _blend(area: Pixels, alpha: Pixels, colour: Pixels) -> None:
    area += alpha[..., None] * (colour - area)


@functools.cache
def _empty_board() -> Pixels:
    image = np.tile(np.array(_BACK, np.float64), (HEIGHT, WIDTH, 1))
    for cell in range(NUM_CELLS):
        _tile(image, cell)[1:-1, 1:-1] = _TILE
    return image


@functools.cache
def _ball_alpha(radius: float) -> Pixels:
    """How much of each pixel ``[44, 44]`` a disc in the middle covers."""
    return np.clip(radius - _distance(0.0) + 0.5, 0.0, 1.0)


@functools.cache
def _shaded(ball: int, radius: float) -> Pixels:
    """The colour of a ball lit from above left ``[44, 44, 3]``."""
    away = _distance(-0.35 * radius) / radius
    colour = np.array(_COLOURS[ball], np.float64) * (1.08 - 0.42 * np.clip(away - 0.3, 0.0, 1.2))[..., None]
    shine = 0.55 * np.clip(1.0 - away / 0.55, 0.0, 1.0)[..., None]
    return np.clip(colour + shine * (255.0 - colour), 0.0, 255.0)


def _distance(shift: float) -> Pixels:
    """Distance of each pixel ``[44, 44]`` from the middle, moved along the diagonal."""
    steps = np.arange(CELL) - (CELL - 1) / 2 - shift
    distance: Pixels = np.hypot(steps[:, None], steps[None, :])
    return distance


def _text_width(word: str, size: int) -> int:
    return (4 * len(word) - 1) * size


def _write(image: Pixels, word: str, left: int, top: int, size: int) -> None:
    for letter in word:
        bits = np.array([[int(row) >> shift & 1 for shift in (2, 1, 0)] for row in _FONT[letter]], np.bool_)
        area = image[top : top + 5 * size, left : left + 3 * size]
        area[np.kron(bits, np.ones((size, size), np.bool_))] = _INK
        left += 4 * size
