"""Connect Four in compiled code: stepping many boards, and looking ahead.

All of it releases the GIL. Without numba (or with ``OFFBEAT_NUMBA=0``) the same functions run as plain
Python: right, and slow.

Throughout, stones are bits as in `rules`: ``stones`` ``[N, 2]`` int64 holds those of both players of each
lane, ``plies`` ``[N]`` how many there are, ``rng`` ``[N]`` uint64 one stream of random numbers per lane.
Everything but `draw` lies in one file because numba's cache looks only at the file of the function it
compiles. It does not notice a change of that or of a number in `rules`: change this file with them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.envs.colorlines.kernels import draw
from offbeat.envs.connect4 import rules
from offbeat.ops.jit import IS_COMPILED, jit

__all__ = ["IS_COMPILED"]

Ints = NDArray[np.int64]
Streams = NDArray[np.uint64]
Floats = NDArray[np.float64]
Planes = NDArray[np.float32]
Masks = NDArray[np.int8]
Bools = NDArray[np.bool_]

NUM_COLUMNS = rules.NUM_COLUMNS
NUM_ROWS = rules.NUM_ROWS
NUM_CELLS = rules.NUM_CELLS
STRIDE = rules.STRIDE
BOTTOM = rules.BOTTOM
BOARD = rules.BOARD
CENTRE_FIRST = np.array(rules.CENTRE_FIRST, np.int64)
COLUMN = (1 << NUM_ROWS) - 1
WIN_REWARD = rules.WIN_REWARD
LOSS_REWARD = rules.LOSS_REWARD
NO_OPPONENT = rules.NO_OPPONENT
RANDOM_OPPONENT = rules.RANDOM_OPPONENT
ALTERNATE, RANDOM, AGENT, OPPONENT = (rules.BEGINS.index(name) for name in rules.BEGINS)

WIN = NUM_CELLS + 1
"""Score of a position that is won already; one that is won in p plies has p less."""
CLOSED = -100
"""Score of a column without room."""
OWN, OTHER, ALPHA, BETA, CELLS, NEXT, BEST = range(7)
NUM_FIELDS = 7
"""What `negamax` keeps of a position on the way to the one it looks at."""


# ---------------------------------------------------------------- the board


@jit
def has_four(stones: int) -> bool:
    """Whether four stones lie in a line (`rules.has_four`)."""
    up = stones & stones >> 1
    down_right = stones & stones >> (STRIDE - 1)
    right = stones & stones >> STRIDE
    up_right = stones & stones >> (STRIDE + 1)
    found = up & up >> 2 | down_right & down_right >> 2 * (STRIDE - 1)
    found |= right & right >> 2 * STRIDE | up_right & up_right >> 2 * (STRIDE + 1)
    return found != 0


@jit
def landing_cells(taken: int) -> int:
    """The lowest empty cell of each open column: adding 1 to a column carries through its stones."""
    return (taken + BOTTOM) & BOARD


@jit
def draw_column(taken: int, rng: Streams, lane: int) -> int:
    """Any open column with equal chance; there must be one."""
    cells = landing_cells(taken)
    count = 0
    for column in range(NUM_COLUMNS):
        count += (cells >> STRIDE * column & COLUMN) != 0
    number = draw(rng, lane, count)
    for column in range(NUM_COLUMNS):
        if (cells >> STRIDE * column & COLUMN) != 0:
            if number == 0:
                return column
            number -= 1
    return -1


# ---------------------------------------------------------------- looking ahead


@jit
def threats_along(own: int, shift: int) -> int:
    """Cells that complete a line of four in one direction, on the board or not."""
    before, after = (own << shift) & (own << 2 * shift), (own >> shift) & (own >> 2 * shift)
    cells = before & (own << 3 * shift) | before & (own >> shift)
    return cells | after & (own << shift) | after & (own >> 3 * shift)


@jit
def threats(own: int, taken: int) -> int:
    """Empty cells, to be reached now or later, where one more stone makes four."""
    cells: int = (own << 1) & (own << 2) & (own << 3)
    cells |= threats_along(own, STRIDE - 1) | threats_along(own, STRIDE) | threats_along(own, STRIDE + 1)
    return cells & BOARD & ~taken


@jit
def glance(own: int, other: int, num_ahead: int, depth: int) -> tuple[bool, int, int]:
    """Whether a position needs no further look, its score then, and else the cells to try.

    Arguments are those of a position inside `negamax`: ``own`` is to move, ``num_ahead`` plies after the
    position that was asked for, and ``depth`` more plies are to be seen, at least 1.
    """
    taken = own | other
    cells = landing_cells(taken)
    if cells == 0:
        return True, 0, 0
    if threats(own, taken) & cells:
        return True, WIN - num_ahead - 1, 0
    if depth == 1:
        return True, 0, 0
    must_stop = threats(other, taken) & cells
    if must_stop & (must_stop - 1):
        return True, num_ahead + 2 - WIN, 0
    return False, 0, must_stop if must_stop else cells


@jit
def negamax(own: int, other: int, depth: int, frames: Ints) -> int:
    """Score for ``own``, who is to move, ``depth`` plies on, one ply after the position that was asked for.

    Alpha-beta without recursion, which numba cannot keep on disk: ``frames`` ``[depth, 7]`` is its stack.
    """
    level, is_new, value = 0, True, 0
    set_frame(frames[0], own, other, -WIN, WIN)
    while level >= 0:
        frame = frames[level]
        if is_new:
            left = depth - level
            is_decided, value, cells = glance(frame[OWN], frame[OTHER], level + 1, left)
            highest = WIN - level - 4 if left >= 3 else 0
            if not is_decided and frame[BETA] > highest:
                frame[BETA] = value = highest
                is_decided = frame[ALPHA] >= highest
            frame[CELLS], frame[NEXT], frame[BEST] = cells, 0, -WIN
        else:
            is_decided = note_score(frame, -value)
            value = frame[BEST]
        cell = 0 if is_decided else next_cell(frame)
        if cell:
            set_frame(frames[level + 1], frame[OTHER], frame[OWN] | cell, -frame[BETA], -frame[ALPHA])
            level, is_new = level + 1, True
        else:
            level, is_new = level - 1, False
    return value


@jit
def set_frame(frame: Ints, own: int, other: int, alpha: int, beta: int) -> None:
    """Begin to look at a position."""
    frame[OWN], frame[OTHER], frame[ALPHA], frame[BETA] = own, other, alpha, beta


@jit
def note_score(frame: Ints, score: int) -> bool:
    """Take in the score of a cell that was tried; return whether the others need not be."""
    frame[BEST] = max(frame[BEST], score)
    frame[ALPHA] = max(frame[ALPHA], score)
    is_enough: bool = frame[BEST] >= frame[BETA]
    return is_enough


@jit
def next_cell(frame: Ints) -> int:
    """The next cell to try, those in the middle first; 0 when there is none left."""
    while frame[NEXT] < NUM_COLUMNS:
        cell: int = frame[CELLS] & (COLUMN << STRIDE * CENTRE_FIRST[frame[NEXT]])
        frame[NEXT] += 1
        if cell:
            return cell
    return 0


@jit
def score_columns(own: int, other: int, depth: int, scores: Ints) -> None:
    """Fill ``scores`` ``[7]`` (`minimax.best_moves`)."""
    frames = np.empty((depth, NUM_FIELDS), np.int64)
    cells = landing_cells(own | other)
    for column in range(NUM_COLUMNS):
        cell = cells & (COLUMN << STRIDE * column)
        if cell == 0:
            scores[column] = CLOSED
        elif has_four(own | cell):
            scores[column] = WIN - 1
        elif depth == 1:
            scores[column] = 0
        else:
            scores[column] = -negamax(other, own | cell, depth - 1, frames)


@jit
def choose_column(own: int, other: int, depth: int, centre_first: bool, rng: Streams, lane: int) -> int:
    """The column with the best score, any open one for depth 0; a tie takes a random number."""
    if depth == RANDOM_OPPONENT:
        column: int = draw_column(own | other, rng, lane)
        return column
    scores = np.empty(NUM_COLUMNS, np.int64)
    score_columns(own, other, depth, scores)
    best = scores.max()
    if centre_first:
        for column in CENTRE_FIRST:
            if scores[column] == best:
                return column
    number = draw(rng, lane, (scores == best).sum())
    for column in range(NUM_COLUMNS):
        if scores[column] == best:
            if number == 0:
                return column
            number -= 1
    return -1


@jit
def choose_all(planes: Planes, depth: int, centre_first: bool, rng: Streams, actions: Ints) -> None:
    """What `choose_column` takes on each of the boards ``[N, 3, 6, 7]``; 0 on a full one. One stream."""
    for lane in range(planes.shape[0]):
        own, other = 0, 0
        for column in range(NUM_COLUMNS):
            for row in range(NUM_ROWS):
                cell = 1 << (STRIDE * column + NUM_ROWS - 1 - row)
                if planes[lane, 0, row, column] > 0.5:
                    own |= cell
                elif planes[lane, 1, row, column] > 0.5:
                    other |= cell
        actions[lane] = 0
        if own | other != BOARD:
            actions[lane] = choose_column(own, other, depth, centre_first, rng, 0)


# ---------------------------------------------------------------- many games


@jit
def play(stones: Ints, plies: Ints, last: Ints, lane: int, column: int) -> bool:
    """Drop a stone into an open column; return whether it wins (`rules.Game.play`)."""
    player = plies[lane] & 1
    cells = landing_cells(stones[lane, 0] | stones[lane, 1])
    stones[lane, player] |= cells & (COLUMN << STRIDE * column)
    plies[lane] += 1
    last[lane] = column
    is_won: bool = has_four(stones[lane, player])
    return is_won


@jit
def reply(
    stones: Ints,
    plies: Ints,
    last: Ints,
    rng: Streams,
    lane: int,
    opponent: int,
    centre_first: bool,
) -> bool:
    """Let the opponent move; return whether he wins."""
    player = plies[lane] & 1
    own, other = stones[lane, player], stones[lane, 1 - player]
    column = choose_column(own, other, opponent, centre_first, rng, lane)
    is_won: bool = play(stones, plies, last, lane, column)
    return is_won


@jit
def start_game(
    stones: Ints,
    plies: Ints,
    last: Ints,
    agents: Ints,
    is_agents_turn: Bools,
    rng: Streams,
    lane: int,
    opponent: int,
    begins: int,
    random_plies: int,
    centre_first: bool,
) -> None:
    """Begin a new game: the stones at random, then the opponent's first where it is his turn to begin.

    ``agents`` ``[N]`` is the player that the agent is; ``is_agents_turn`` ``[N]`` whether he begins the
    next game when they take turns.
    """
    stones[lane] = 0
    plies[lane] = 0
    last[lane] = -1
    for _ in range(random_plies):
        play(stones, plies, last, lane, draw_column(stones[lane, 0] | stones[lane, 1], rng, lane))
    if opponent == NO_OPPONENT:
        return
    is_first = begins == AGENT
    if begins == ALTERNATE:
        is_first = is_agents_turn[lane]
        is_agents_turn[lane] = not is_first
    elif begins == RANDOM:
        is_first = draw(rng, lane, 2) == 0
    agents[lane] = plies[lane] & 1 if is_first else 1 - (plies[lane] & 1)
    if not is_first:
        reply(stones, plies, last, rng, lane, opponent, centre_first)


@jit
def show(own: int, other: int, player: int, planes: Planes, mask: Masks) -> None:
    """Fill one lane's observation ``[3, 6, 7]`` and its open columns ``[7]``, all of them on a full board."""
    cells = landing_cells(own | other)
    for column in range(NUM_COLUMNS):
        mask[column] = cells == 0 or (cells & (COLUMN << STRIDE * column)) != 0
        for row in range(NUM_ROWS):
            shift = STRIDE * column + NUM_ROWS - 1 - row
            planes[0, row, column] = own >> shift & 1
            planes[1, row, column] = other >> shift & 1
    planes[2] = 1 - player


@jit
def show_all(
    stones: Ints, plies: Ints, agents: Ints, opponent: int, planes: Planes, masks: Masks, to_play: Ints
) -> None:
    """Fill observations ``[N, 3, 6, 7]``, open columns ``[N, 7]`` and whose view they are ``[N]``."""
    for lane in range(stones.shape[0]):
        player = plies[lane] & 1 if opponent == NO_OPPONENT else agents[lane]
        show(stones[lane, player], stones[lane, 1 - player], player, planes[lane], masks[lane])
        to_play[lane] = player


@jit
def reset_all(
    stones: Ints,
    plies: Ints,
    last: Ints,
    agents: Ints,
    is_agents_turn: Bools,
    rng: Streams,
    opponent: int,
    begins: int,
    random_plies: int,
    centre_first: bool,
) -> None:
    """Begin a new game in every lane."""
    for lane in range(stones.shape[0]):
        start_game(
            stones,
            plies,
            last,
            agents,
            is_agents_turn,
            rng,
            lane,
            opponent,
            begins,
            random_plies,
            centre_first,
        )


@jit
def step_all(
    stones: Ints,
    plies: Ints,
    last: Ints,
    agents: Ints,
    is_agents_turn: Bools,
    rng: Streams,
    is_over: Bools,
    actions: Ints,
    rewards: Floats,
    illegal: Bools,
    opponent: int,
    begins: int,
    random_plies: int,
    centre_first: bool,
) -> None:
    """One step in every lane: the arrays up to ``is_over`` go on, ``rewards`` and ``illegal`` are filled.

    Where ``is_over``, a new game starts instead. The rest are `rules.Options`.
    """
    for lane in range(stones.shape[0]):
        rewards[lane], illegal[lane] = 0.0, False
        if is_over[lane]:
            is_over[lane] = False
            start_game(
                stones,
                plies,
                last,
                agents,
                is_agents_turn,
                rng,
                lane,
                opponent,
                begins,
                random_plies,
                centre_first,
            )
            continue
        cells = landing_cells(stones[lane, 0] | stones[lane, 1])
        if (cells & (COLUMN << STRIDE * actions[lane])) == 0:
            rewards[lane], illegal[lane], is_over[lane] = LOSS_REWARD, True, True
        elif play(stones, plies, last, lane, actions[lane]):
            rewards[lane], is_over[lane] = WIN_REWARD, True
        elif (
            opponent != NO_OPPONENT
            and plies[lane] < NUM_CELLS
            and reply(stones, plies, last, rng, lane, opponent, centre_first)
        ):
            rewards[lane], is_over[lane] = LOSS_REWARD, True
        if plies[lane] == NUM_CELLS:
            is_over[lane] = True
