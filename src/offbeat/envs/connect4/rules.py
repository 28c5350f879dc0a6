"""The rules of Connect Four in plain Python: written to be read, and the judge of the compiled version.

The stones of a player are the bits of one number. Column c, counted from the left, has the seven bits from
7 * c on: six cells from the bottom up, and one above the board that stays 0, so that no line runs on from the
top of a column into the bottom of the next.

     6 13 20 27 34 41 48   (always 0)
     5 12 19 26 33 40 47
     4 11 18 25 32 39 46
     3 10 17 24 31 38 45
     2  9 16 23 30 37 44
     1  8 15 22 29 36 43
     0  7 14 21 28 35 42
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from offbeat.errors import EnvError

NUM_COLUMNS = 7
NUM_ROWS = 6
NUM_CELLS = NUM_COLUMNS * NUM_ROWS
STRIDE = NUM_ROWS + 1
"""Bits from a cell to the one on its right."""
DIRECTIONS = (1, STRIDE - 1, STRIDE, STRIDE + 1)
"""Bits between neighbours on a line: up, down to the right, to the right, up to the right."""
BOTTOM = sum(1 << STRIDE * column for column in range(NUM_COLUMNS))
"""The lowest cell of each column."""
BOARD = BOTTOM * ((1 << NUM_ROWS) - 1)
"""All cells."""
CENTRE_FIRST = (3, 2, 4, 1, 5, 0, 6)
"""The columns by how many lines go through them."""

WIN_REWARD = 1.0
LOSS_REWARD = -1.0
"""For a game that the opponent wins, and for a column that is full: to choose one loses at once."""
MAX_RANDOM_PLIES = 5
"""The seventh stone can win; these and an opponent who begins stay below it."""
MAX_DEPTH = 12
"""How far ahead an opponent may look."""

BeginsName = Literal["alternate", "random", "agent", "opponent"]
TiesName = Literal["random", "centre"]
BEGINS: tuple[BeginsName, ...] = get_args(BeginsName)
TIES: tuple[TiesName, ...] = get_args(TiesName)
NO_OPPONENT = -1
RANDOM_OPPONENT = 0


@dataclass(frozen=True, slots=True)
class Options:
    """How games are played, in numbers.

    ``opponent`` is `NO_OPPONENT`, `RANDOM_OPPONENT` or the depth of a minimax; ``begins`` an index of
    `BEGINS`. Each game starts with ``random_plies`` stones at random. ``centre_first``: a minimax takes the
    column nearest to the middle among equal ones, else any.
    """

    opponent: int
    begins: int
    random_plies: int
    centre_first: bool


def read_options(opponent: str, begins: str, random_plies: int, ties: str) -> Options:
    """Turn what an environment is made with into `Options`, or say what it can be made with."""
    if begins not in BEGINS:
        raise EnvError(f"Connect Four has no begins {begins!r}; choose one of {', '.join(BEGINS)}")
    if ties not in TIES:
        raise EnvError(f"Connect Four has no ties {ties!r}; choose one of {', '.join(TIES)}")
    if not 0 <= random_plies <= MAX_RANDOM_PLIES:
        raise EnvError(f"random_plies is {random_plies}; give a number from 0 to {MAX_RANDOM_PLIES}")
    return Options(read_opponent(opponent), BEGINS.index(begins), random_plies, ties == "centre")


def read_opponent(name: str) -> int:
    """The number of an opponent, as in `Options`: -1 for "none", 0 for "random", 3 for "minimax:3"."""
    simple = {"none": NO_OPPONENT, "random": RANDOM_OPPONENT}
    if name in simple:
        return simple[name]
    kind, _, depth = name.partition(":")
    if kind == "minimax" and depth.isdecimal() and 1 <= int(depth) <= MAX_DEPTH:
        return int(depth)
    raise EnvError(
        f"Connect Four has no opponent {name!r}; "
        f"choose none, random, or minimax:D with D from 1 to {MAX_DEPTH}"
    )


def has_four(stones: int) -> bool:
    """Whether four stones lie in a line: each shift keeps the stones that have a neighbour that far on."""
    for shift in DIRECTIONS:
        pairs = stones & stones >> shift
        if pairs & pairs >> 2 * shift:
            return True
    return False


def is_open(taken: int, column: int) -> bool:
    """Whether a column has room; ``taken`` are the stones of both players."""
    return not taken >> (STRIDE * column + NUM_ROWS - 1) & 1


def landing(taken: int, column: int) -> int:
    """The cell that a stone dropped into an open column falls to, as a bit."""
    top = 1 << STRIDE * column
    while taken & top:
        top <<= 1
    return top


class Game:
    """One board. The first player, 0, has the even plies; `play` drops a stone for whose turn it is."""

    def __init__(self) -> None:
        self.stones = [0, 0]
        self.num_plies = 0

    @property
    def to_play(self) -> int:
        """Whose turn it is, 0 or 1."""
        return self.num_plies % 2

    @property
    def is_full(self) -> bool:
        """Whether no column has room."""
        return self.num_plies == NUM_CELLS

    def start(self) -> None:
        """Take all stones off the board."""
        self.stones = [0, 0]
        self.num_plies = 0

    def open_columns(self) -> list[int]:
        """The columns that have room, from left to right."""
        taken = self.stones[0] | self.stones[1]
        return [column for column in range(NUM_COLUMNS) if is_open(taken, column)]

    def play(self, column: int) -> bool:
        """Drop a stone into an open column; return whether it wins."""
        player = self.to_play
        self.stones[player] |= landing(self.stones[0] | self.stones[1], column)
        self.num_plies += 1
        return has_four(self.stones[player])
