"""Pictures of Alice and Bob's room, as text and as pixels, with nothing but numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from offbeat.envs.teams.alice_and_bob import Cell, Rules

Picture = NDArray[np.uint8]

CELL = 32
"""Pixels along the side of a cell; the walls take a cell on every side."""
_ANSI = (91, 94)
_COLOURS = ((214, 60, 55), (58, 110, 224))
_WALL, _FLOOR, _GRID = (62, 66, 74), (236, 234, 228), (214, 211, 203)
_AGENTS = ((246, 166, 35), (46, 160, 97))


def text(rules: Rules, cells: Sequence[Cell], is_collected: Sequence[bool], num_steps: int) -> str:
    """The room: ``o`` for buttons, ``*`` for diamonds, ``A`` and ``B`` behind what Alice and Bob stand on."""
    things = {cell: _coloured("o", colour) for colour, cell in enumerate(rules.buttons)}
    for colour, cell in enumerate(rules.diamonds):
        if not is_collected[colour]:
            things[cell] = _coloured("*", colour)
    found = ["collected" if flag else "there" for flag in is_collected]
    lines = [f"step {num_steps}   red {found[0]}   blue {found[1]}", "+" + "-" * (3 * rules.size) + "+"]
    for row in range(rules.size):
        parts = []
        for column in range(rules.size):
            who = "".join(
                name if cell == (row, column) else " " for name, cell in zip("AB", cells, strict=True)
            )
            parts.append(things.get((row, column), ".") + who)
        lines.append("|" + "".join(parts) + "|")
    return "\n".join([*lines, lines[1]]) + "\n"


def _coloured(letter: str, colour: int) -> str:
    return f"\x1b[{_ANSI[colour]}m{letter}\x1b[0m"


def picture(rules: Rules, cells: Sequence[Cell], is_collected: Sequence[bool]) -> Picture:
    """The room ``[H, W, 3]``: buttons are squares, diamonds rhombs, Alice an orange disc, Bob a green one."""
    side = (rules.size + 2) * CELL
    image: Picture = np.full((side, side, 3), _WALL, np.uint8)
    image[CELL:-CELL, CELL:-CELL] = _FLOOR
    image[CELL:-CELL:CELL, CELL:-CELL] = image[CELL:-CELL, CELL:-CELL:CELL] = _GRID
    down, right = np.mgrid[:CELL, :CELL] - (CELL - 1) / 2
    for colour, cell in enumerate(rules.buttons):
        _tile(image, cell)[np.maximum(abs(down), abs(right)) < 0.36 * CELL] = _COLOURS[colour]
    for colour, cell in enumerate(rules.diamonds):
        if not is_collected[colour]:
            _tile(image, cell)[abs(down) + abs(right) < 0.46 * CELL] = _COLOURS[colour]
    for agent, cell in enumerate(cells):
        shift = (agent - 0.5) * 0.34 * CELL
        _tile(image, cell)[down**2 + (right - shift) ** 2 < (0.26 * CELL) ** 2] = _AGENTS[agent]
    return image


def _tile(image: Picture, cell: Cell) -> Picture:
    """The part of an image where a cell is; drawing on it draws on the image."""
    top, left = (cell[0] + 1) * CELL, (cell[1] + 1) * CELL
    return image[top : top + CELL, left : left + CELL]
