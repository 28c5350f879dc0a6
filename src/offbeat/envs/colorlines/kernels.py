"""Color Lines in compiled code: stepping many boards, their legal moves, and what the baselines choose.

All of it releases the GIL. Without numba (or with ``OFFBEAT_NUMBA=0``) the same functions run as plain
Python: right, and slow.

Throughout, ``board`` is one row ``[84]`` int8 of the observations (81 cells, three colours that come next),
``rng`` ``[N]`` uint64 holds one stream of random numbers per lane, and the functions change both in place.
Everything lies in one file because numba's cache looks only at the file of the function it compiles. It does
not notice a changed number in `rules` either: change this file with it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.envs.colorlines import rules
from offbeat.ops.jit import IS_COMPILED, jit

__all__ = ["IS_COMPILED"]

Board = NDArray[np.int8]
Boards = NDArray[np.int8]
Streams = NDArray[np.uint64]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


# ---------------------------------------------------------------- tables


def _padded(rows: list[list[int]]) -> Ints:
    width = max(map(len, rows))
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int64)


def _rays() -> list[list[list[int]]]:
    """Per cell and direction, forwards and back in turn: the cells from the next one to the edge."""
    rays: list[list[list[int]]] = [[] for _ in range(NUM_CELLS)]
    for cell in range(NUM_CELLS):
        row, column = divmod(cell, rules.SIDE)
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            for sign in (1, -1):
                steps = [(row + i * sign * down, column + i * sign * right) for i in range(1, rules.SIDE)]
                on_board = [(r, c) for r, c in steps if 0 <= r < rules.SIDE and 0 <= c < rules.SIDE]
                rays[cell].append([r * rules.SIDE + c for r, c in on_board])
    return rays


NUM_CELLS = rules.NUM_CELLS
NUM_COMING = rules.NUM_COMING
NUM_COLOURS = rules.NUM_COLOURS
LINE = rules.LINE
POINTS_PER_BALL = rules.POINTS_PER_BALL
ILLEGAL_REWARD = rules.ILLEGAL_REWARD
STEP_REWARD = rules.STEP_REWARD
SCORE, SEED, SHAPED = (rules.REWARDS.index(name) for name in rules.REWARDS)

TRACK_CELLS = np.concatenate([np.array(track, np.int64) for track in rules.TRACKS])
TRACK_ENDS = np.cumsum([len(track) for track in rules.TRACKS])
NEIGHBOURS = _padded([list(cells) for cells in rules.NEIGHBOURS])
NUM_NEIGHBOURS = np.array([len(cells) for cells in rules.NEIGHBOURS], np.int64)
WINDOWS = np.array(rules.WINDOWS, np.int64)
_WINDOWS_OF = [
    [index for index, window in enumerate(rules.WINDOWS) if cell in window] for cell in range(NUM_CELLS)
]
WINDOWS_OF = _padded(_WINDOWS_OF)
NUM_WINDOWS_OF = np.array([len(windows) for windows in _WINDOWS_OF], np.int64)
_RAYS = _rays()
RAYS = _padded([ray for rays in _RAYS for ray in rays]).reshape(NUM_CELLS, 8, -1)
RAY_LENGTHS = np.array([[len(ray) for ray in rays] for rays in _RAYS], np.int64)
POTENTIAL = np.array(rules.POTENTIAL)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ONE, _27, _30, _31, _32 = (np.uint64(number) for number in (1, 27, 30, 31, 32))


# ---------------------------------------------------------------- the game


@jit
def draw(rng: Streams, lane: int, bound: int) -> int:
    """Draw one of ``0 .. bound - 1`` from a lane's stream (`rules.Stream.below`)."""
    rng[lane] = rng[lane] + _GOLDEN
    mixed = rng[lane]
    mixed = (mixed ^ (mixed >> _30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _27)) * _MIX_2
    mixed = mixed ^ (mixed >> _31)
    return np.int64(((mixed >> _32) * np.uint64(bound)) >> _32)  # type: ignore[return-value]


@jit
def count_empty(board: Board) -> int:
    """Number of empty cells."""
    count = 0
    for cell in range(NUM_CELLS):
        count += board[cell] == 0
    return count


@jit
def place(board: Board, colour: int, rng: Streams, lane: int) -> None:
    """Put a ball on a random empty cell."""
    num_before = draw(rng, lane, count_empty(board))
    for cell in range(NUM_CELLS):
        if board[cell] == 0:
            if num_before == 0:
                board[cell] = colour
                return
            num_before -= 1


@jit
def announce(board: Board, rng: Streams, lane: int) -> None:
    """Draw the colours that come next."""
    for index in range(NUM_COMING):
        board[NUM_CELLS + index] = 1 + draw(rng, lane, NUM_COLOURS)


@jit
def start_game(board: Board, rng: Streams, lane: int, num_start_balls: int) -> None:
    """Begin a new game (`rules.Game.start`)."""
    board[:] = 0
    for _ in range(num_start_balls):
        place(board, 1 + draw(rng, lane, NUM_COLOURS), rng, lane)
    announce(board, rng, lane)


@jit
def clear_lines(board: Board) -> tuple[int, int]:
    """Take all lines off the board; return their points and the number of balls that vanished."""
    num_in_lines, num_cleared, first = 0, 0, 0
    is_gone = np.zeros(NUM_CELLS, np.bool_)
    for end in TRACK_ENDS:
        start = first
        for index in range(first + 1, end + 1):
            colour = board[TRACK_CELLS[start]]
            if index < end and board[TRACK_CELLS[index]] == colour:
                continue
            if index - start >= LINE and colour != 0:
                num_in_lines += index - start
                is_gone[TRACK_CELLS[start:index]] = True
            start = index
        first = end
    if num_in_lines:
        for cell in range(NUM_CELLS):
            if is_gone[cell]:
                board[cell] = 0
                num_cleared += 1
    return POINTS_PER_BALL * num_in_lines, num_cleared


@jit
def drop(board: Board, rng: Streams, lane: int, clears_drops: bool, drops_what_fits: bool) -> tuple[int, int]:
    """Let the announced balls fall and announce the next; return points and balls that vanished."""
    points, num_cleared = 0, 0
    while True:
        num_empty = count_empty(board)
        if num_empty < NUM_COMING and not drops_what_fits:
            break
        for index in range(min(NUM_COMING, num_empty)):
            place(board, board[NUM_CELLS + index], rng, lane)
        announce(board, rng, lane)
        if not clears_drops:
            break
        more_points, more_cleared = clear_lines(board)
        points += more_points
        num_cleared += more_cleared
        if more_cleared == 0 or count_empty(board) < NUM_CELLS:
            break
    return points, num_cleared


@jit
def group_empty(board: Board, groups: Streams, todo: Ints) -> None:
    """Give each connected group of empty cells a bit of its own: ``groups`` ``[81]``, 0 where balls are.

    There are at most 41 groups, as on a chess board. ``todo`` ``[81]`` is room to work in.
    """
    groups[:] = 0
    bit = _ONE
    for start in range(NUM_CELLS):
        if board[start] != 0 or groups[start] != 0:
            continue
        groups[start] = bit
        todo[0] = start
        num_todo = 1
        while num_todo:
            num_todo -= 1
            cell = todo[num_todo]
            for index in range(NUM_NEIGHBOURS[cell]):
                beside = NEIGHBOURS[cell, index]
                if board[beside] == 0 and groups[beside] == 0:
                    groups[beside] = bit
                    todo[num_todo] = beside
                    num_todo += 1
        bit = bit << _ONE


@jit
def reach(board: Board, groups: Streams, source: int) -> np.uint64:
    """Groups of empty cells that the ball at ``source`` can move to; 0 without a ball."""
    bits = _ONE - _ONE
    if board[source] != 0:
        for index in range(NUM_NEIGHBOURS[source]):
            bits = bits | groups[NEIGHBOURS[source, index]]
    return bits


@jit
def find_legal(obs: Boards, legal: Bools) -> None:
    """Fill ``legal`` ``[N, 6561]`` (`moves.Moves.legal`)."""
    groups, todo = np.empty(NUM_CELLS, np.uint64), np.empty(NUM_CELLS, np.int64)
    for lane in range(obs.shape[0]):
        board, row = obs[lane], legal[lane]
        group_empty(board, groups, todo)
        is_stuck = True
        for source in range(NUM_CELLS):
            bits = reach(board, groups, source)
            targets = row[source * NUM_CELLS : (source + 1) * NUM_CELLS]
            if bits == 0:
                targets[:] = False
                continue
            is_stuck = False
            for target in range(NUM_CELLS):
                targets[target] = (groups[target] & bits) != 0
        if is_stuck:
            row[:] = True


@jit
def measure(board: Board, worth: Floats) -> float:
    """Sum of ``worth[n]`` over the windows with n balls of one colour and no other (`rules.potential`)."""
    total = 0.0
    for window in range(WINDOWS.shape[0]):
        colour, count = 0, 0
        for index in range(LINE):
            ball = board[WINDOWS[window, index]]
            if ball != 0:
                if colour != 0 and ball != colour:
                    count = 0
                    break
                colour = ball
                count += 1
        total += worth[count]
    return total


@jit
def move(
    board: Board, source: int, target: int, rng: Streams, lane: int, clears_drops: bool, drops_what_fits: bool
) -> tuple[int, int]:
    """Make a legal move; return points and balls that vanished (`rules.Game.move`)."""
    board[target] = board[source]
    board[source] = 0
    points, num_cleared = clear_lines(board)
    if num_cleared == 0 or count_empty(board) == NUM_CELLS:
        more_points, more_cleared = drop(board, rng, lane, clears_drops, drops_what_fits)
        points += more_points
        num_cleared += more_cleared
    return points, num_cleared


@jit
def reset_all(obs: Boards, rng: Streams, potentials: Floats, num_start_balls: int, reward: int) -> None:
    """Begin a new game in every lane."""
    for lane in range(obs.shape[0]):
        start_game(obs[lane], rng, lane, num_start_balls)
        potentials[lane] = measure(obs[lane], POTENTIAL) if reward == SHAPED else 0.0


@jit
def step_all(
    obs: Boards,
    rng: Streams,
    actions: Ints,
    steps: Ints,
    scores: Ints,
    potentials: Floats,
    is_over: Bools,
    rewards: Floats,
    terminated: Bools,
    truncated: Bools,
    cleared: Ints,
    illegal: Bools,
    num_start_balls: int,
    clears_drops: bool,
    drops_what_fits: bool,
    reward: int,
    gamma: float,
    max_steps: int,
) -> None:
    """One step in every lane: arrays ``[N]`` from ``steps`` to ``is_over`` go on, the next five are filled.

    Where ``is_over``, a new game starts instead. The rest are the rules and the index of the reward.
    """
    groups, todo = np.empty(NUM_CELLS, np.uint64), np.empty(NUM_CELLS, np.int64)
    for lane in range(obs.shape[0]):
        board = obs[lane]
        rewards[lane], cleared[lane] = 0.0, 0
        terminated[lane] = truncated[lane] = illegal[lane] = False
        if is_over[lane]:
            start_game(board, rng, lane, num_start_balls)
            steps[lane], scores[lane], is_over[lane] = 0, 0, False
            potentials[lane] = measure(board, POTENTIAL) if reward == SHAPED else 0.0
            continue
        source, target = actions[lane] // NUM_CELLS, actions[lane] % NUM_CELLS
        group_empty(board, groups, todo)
        if reach(board, groups, source) & groups[target]:
            points, cleared[lane] = move(board, source, target, rng, lane, clears_drops, drops_what_fits)
            scores[lane] += points
            rewards[lane] = STEP_REWARD if reward == SEED and points == 0 else points
        else:
            illegal[lane] = True
            rewards[lane] = ILLEGAL_REWARD
        steps[lane] += 1
        terminated[lane] = count_empty(board) == 0
        truncated[lane] = steps[lane] >= max_steps
        is_over[lane] = terminated[lane] or truncated[lane]
        if reward == SHAPED:
            after = 0.0 if terminated[lane] else measure(board, POTENTIAL)
            rewards[lane] = rewards[lane] + gamma * after - potentials[lane]
            potentials[lane] = after


# ---------------------------------------------------------------- what the baselines choose


@jit
def choose_random(obs: Boards, rng: Streams, actions: Ints) -> None:
    """Any legal move with equal chance, for boards ``[N, 84]``; 0 on a full board. One stream, ``rng[0]``."""
    groups, todo = np.empty(NUM_CELLS, np.uint64), np.empty(NUM_CELLS, np.int64)
    counts = np.empty(NUM_CELLS, np.int64)
    for lane in range(obs.shape[0]):
        board, total = obs[lane], 0
        actions[lane] = 0
        group_empty(board, groups, todo)
        for source in range(NUM_CELLS):
            bits = reach(board, groups, source)
            count = 0
            for target in range(NUM_CELLS):
                count += (groups[target] & bits) != 0
            counts[source] = count
            total += count
        if total:
            actions[lane] = nth_move(board, groups, counts, draw(rng, 0, total))


@jit
def nth_move(board: Board, groups: Streams, counts: Ints, number: int) -> int:
    """The legal move before which there are ``number`` others; ``counts`` ``[81]`` are those of each cell."""
    source = 0
    while number >= counts[source]:
        number -= counts[source]
        source += 1
    bits = reach(board, groups, source)
    for target in range(NUM_CELLS):
        if groups[target] & bits:
            if number == 0:
                return source * NUM_CELLS + target
            number -= 1
    return 0


@jit
def line_through(board: Board, cell: int, colour: int) -> tuple[int, int]:
    """What a ball put on an empty cell makes: points of lines through it, and the longest row it is in."""
    points, longest = 0, 1
    for direction in range(0, 8, 2):
        length = 1
        for ray in range(direction, direction + 2):
            for index in range(RAY_LENGTHS[cell, ray]):
                if board[RAYS[cell, ray, index]] != colour:
                    break
                length += 1
        longest = max(longest, length)
        if length >= LINE:
            points += POINTS_PER_BALL * length
    return points, longest


@jit
def window_gain(board: Board, cell: int, colour: int, worth: Floats) -> float:
    """By how much a ball put on an empty cell changes `measure`."""
    gain = 0.0
    for number in range(NUM_WINDOWS_OF[cell]):
        window = WINDOWS_OF[cell, number]
        first, count, is_mixed = 0, 0, False
        for index in range(LINE):
            ball = board[WINDOWS[window, index]]
            if ball != 0:
                is_mixed = is_mixed or (first != 0 and ball != first)
                first = ball
                count += 1
        if not is_mixed:
            gain -= worth[count]
            if first == 0 or first == colour:
                gain += worth[count + 1]
    return gain


@jit
def value_after_clear(board: Board, target: int, colour: int, points: int, worth: Floats) -> float:
    """Windows left after a move that makes lines, and their points on the scale of ``worth``."""
    after = board.copy()
    after[target] = colour
    clear_lines(after)
    value: float = measure(after, worth) + worth[LINE] * points / (POINTS_PER_BALL * LINE)
    return value


@jit
def choose_best(obs: Boards, by_windows: bool, worth: Floats, rng: Streams, actions: Ints) -> None:
    """The best legal move as seen one step ahead, ties broken at random; 0 on a full board.

    By points and then the longest row, or by points and windows, whose ``worth`` ``[6]`` is given.
    """
    groups, todo = np.empty(NUM_CELLS, np.uint64), np.empty(NUM_CELLS, np.int64)
    best = np.zeros(NUM_CELLS * NUM_CELLS, np.int64)
    board = np.empty(obs.shape[1], np.int8)
    for lane in range(obs.shape[0]):
        board[:] = obs[lane]
        best[0], num_best, top = 0, 0, -np.inf
        group_empty(board, groups, todo)
        base = measure(board, worth) if by_windows else 0.0
        for source in range(NUM_CELLS):
            bits = reach(board, groups, source)
            if bits == 0:
                continue
            colour = board[source]
            board[source] = 0
            rest = base - window_gain(board, source, colour, worth) if by_windows else 0.0
            for target in range(NUM_CELLS):
                if (groups[target] & bits) == 0:
                    continue
                points, longest = line_through(board, target, colour)
                if not by_windows:
                    value = 100.0 * points + longest
                elif points:
                    value = value_after_clear(board, target, colour, points, worth)
                else:
                    value = rest + window_gain(board, target, colour, worth)
                if value > top:
                    top, num_best = value, 0
                if value == top:
                    best[num_best] = source * NUM_CELLS + target
                    num_best += 1
            board[source] = colour
        actions[lane] = best[draw(rng, 0, num_best)] if num_best > 1 else best[0]
