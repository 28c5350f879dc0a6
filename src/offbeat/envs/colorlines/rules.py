"""The rules of Color Lines in plain Python: written to be read, and the judge of the compiled version.

A board is 81 numbers, row by row: 0 for an empty cell, 1 to 7 for the colour of a ball.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from offbeat.errors import EnvError

SIDE = 9
NUM_CELLS = SIDE * SIDE
NUM_COLOURS = 7
NUM_COMING = 3
LINE = 5
"""Balls of one colour in a row that vanish."""
POINTS_PER_BALL = 2
EMPTY = 0
OBS_SIZE = NUM_CELLS + NUM_COMING
NUM_ACTIONS = NUM_CELLS * NUM_CELLS

ILLEGAL_REWARD = -10.0
STEP_REWARD = 0.1
"""What ``reward="seed"`` gives for a step without points."""
POTENTIAL = (0.0, 1 / 32, 1 / 8, 1 / 2, 2.0, 8.0)
"""Worth of a window of five cells that holds so many balls, all of one colour. Sums of these are exact."""

RulesName = Literal["classic", "seed"]
RewardName = Literal["score", "seed", "shaped"]
REWARDS: tuple[RewardName, ...] = get_args(RewardName)

_STEPS = ((0, 1), (1, 0), (1, 1), (1, -1))
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Rules:
    """Where the two rule sets differ.

    ``num_start_balls`` lie on the board at the start. ``clears_drops``: lines made by dropped balls vanish
    at once, else with the next move. ``drops_what_fits``: with less room than balls to drop, drop as many
    as fit, else none.
    """

    num_start_balls: int
    clears_drops: bool
    drops_what_fits: bool


RULES: dict[RulesName, Rules] = {"classic": Rules(5, True, True), "seed": Rules(24, False, False)}


def check_choices(rules: str, reward: str, gamma: float) -> None:
    """Refuse what the game cannot be made with, and say what it can."""
    if rules not in RULES:
        raise EnvError(f"Color Lines has no rules {rules!r}; choose one of {', '.join(RULES)}")
    if reward not in REWARDS:
        raise EnvError(f"Color Lines has no reward {reward!r}; choose one of {', '.join(REWARDS)}")
    if not 0.0 <= gamma <= 1.0:
        raise EnvError(f"gamma is {gamma}; give the discount of the algorithm, between 0 and 1")


# ---------------------------------------------------------------- the board


def _walk(row: int, column: int, step: tuple[int, int]) -> Iterator[int]:
    """Cells from one cell on, to the edge of the board."""
    while 0 <= row < SIDE and 0 <= column < SIDE:
        yield row * SIDE + column
        row, column = row + step[0], column + step[1]


def _tracks() -> Iterator[tuple[int, ...]]:
    for step in _STEPS:
        for cell in range(NUM_CELLS):
            row, column = divmod(cell, SIDE)
            before = next(_walk(row - step[0], column - step[1], step), None)
            cells = tuple(_walk(row, column, step))
            if before is None and len(cells) >= LINE:
                yield cells


def _neighbours(cell: int) -> tuple[int, ...]:
    row, column = divmod(cell, SIDE)
    around = ((row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column))
    return tuple(r * SIDE + c for r, c in around if 0 <= r < SIDE and 0 <= c < SIDE)


TRACKS = tuple(_tracks())
"""Every row, column and diagonal that a line fits on, as cells in order."""
WINDOWS = tuple(track[i : i + LINE] for track in TRACKS for i in range(len(track) - LINE + 1))
"""Every place where a line of five fits: 140 times five cells."""
NEIGHBOURS = tuple(_neighbours(cell) for cell in range(NUM_CELLS))
"""The cells above, left, right and below of each cell."""


def find_lines(board: Sequence[int]) -> list[tuple[int, ...]]:
    """All lines on a board, each as its cells; a line is as long as its colour goes on."""
    return [line for track in TRACKS for line in _lines_of(track, board)]


def _lines_of(track: tuple[int, ...], board: Sequence[int]) -> Iterator[tuple[int, ...]]:
    start = 0
    for end in range(1, len(track) + 1):
        if end < len(track) and board[track[end]] == board[track[start]]:
            continue
        if end - start >= LINE and board[track[start]] != EMPTY:
            yield track[start:end]
        start = end


def can_move(board: Sequence[int], source: int, target: int) -> bool:
    """Whether there is a ball at ``source`` with a way through empty cells to ``target``."""
    if board[source] == EMPTY or board[target] != EMPTY:
        return False
    seen, todo = {source}, [source]
    while todo:
        for cell in NEIGHBOURS[todo.pop()]:
            if cell == target:
                return True
            if board[cell] == EMPTY and cell not in seen:
                seen.add(cell)
                todo.append(cell)
    return False


def potential(board: Sequence[int]) -> float:
    """How near a board is to lines: the worth of all its windows with balls of one colour only."""
    total = 0.0
    for window in WINDOWS:
        balls = [board[cell] for cell in window if board[cell] != EMPTY]
        if len(set(balls)) == 1:
            total += POTENTIAL[len(balls)]
    return total


# ---------------------------------------------------------------- the game


class Stream:
    """Random numbers whose whole state is one 64-bit number (SplitMix64, doi:10.1145/2714064.2660195)."""

    def __init__(self, seed: int) -> None:
        self.state = seed & _MASK

    def below(self, bound: int) -> int:
        """Draw one of ``0 .. bound - 1``."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self.state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
        return ((mixed >> 32) * bound) >> 32


class Game:
    """One board with the colours that come next; `start` begins a game, `move` plays it."""

    def __init__(self, rules: Rules, stream: Stream) -> None:
        self.rules = rules
        self.stream = stream
        self.board = [EMPTY] * NUM_CELLS
        self.coming = [EMPTY] * NUM_COMING

    @property
    def is_over(self) -> bool:
        """Whether the board is full."""
        return EMPTY not in self.board

    def start(self) -> None:
        """Begin a new game; the stream of random numbers goes on."""
        self.board = [EMPTY] * NUM_CELLS
        for _ in range(self.rules.num_start_balls):
            self._place(self._draw_colour())
        self._announce()

    def move(self, source: int, target: int) -> tuple[int, int]:
        """Move a ball, which must be legal; return the points made and the number of balls that vanished."""
        self.board[target], self.board[source] = self.board[source], EMPTY
        points, num_cleared = self._clear()
        if num_cleared and any(self.board):
            return points, num_cleared
        more_points, more_cleared = self._drop()
        return points + more_points, num_cleared + more_cleared

    def _clear(self) -> tuple[int, int]:
        lines = find_lines(self.board)
        cells = {cell for line in lines for cell in line}
        for cell in cells:
            self.board[cell] = EMPTY
        return POINTS_PER_BALL * sum(map(len, lines)), len(cells)

    def _drop(self) -> tuple[int, int]:
        num_empty = self.board.count(EMPTY)
        if num_empty < NUM_COMING and not self.rules.drops_what_fits:
            return 0, 0
        for colour in self.coming[:num_empty]:
            self._place(colour)
        self._announce()
        if not self.rules.clears_drops:
            return 0, 0
        points, num_cleared = self._clear()
        if not any(self.board):
            self._drop()  # three balls make no line, so this happens once
        return points, num_cleared

    def _place(self, colour: int) -> None:
        empty = [cell for cell, ball in enumerate(self.board) if ball == EMPTY]
        self.board[empty[self.stream.below(len(empty))]] = colour

    def _announce(self) -> None:
        self.coming = [self._draw_colour() for _ in range(NUM_COMING)]

    def _draw_colour(self) -> int:
        return 1 + self.stream.below(NUM_COLOURS)
