"""Compiled arithmetic of the pattern tables: boards in, scores of moves and positions out, and the way back.

A *pattern* is what a cell sees along one of the four directions: the four cells on either side, each of
them empty (0), of the colour in question (1), or blocked by another colour or the edge (2), read as a
number in base 3. A *shape* is which of the eight cells around a cell are taken. A pattern and its mirror
image share one entry of a table, and so do shapes that can be turned into each other; kernels take tables
that are spread out over all patterns or shapes (`spread`), and gradients come back the same way (`gather`).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.ops.jit import jit

SIDE = 9
CELLS = SIDE * SIDE
COLOURS = 7
REACH = 4
"""Cells on either side that a pattern looks at: a line of five through a cell goes no further."""
DIGITS = 2 * REACH
NUM_PATTERNS = 3**DIGITS
NUM_SHAPES = 2**8
MAX_MOVES = (CELLS // 2) * (CELLS - CELLS // 2)
"""Most pairs of a ball and an empty cell that a board can have."""
# A literal, not the one of ops.exploration: compiled code that is kept on disk is renewed when this file
# changes, and not when another one does.
ILLEGAL = np.float32(-1e9)
"""Output of a move that is not legal: its probability is 0 to the last bit."""

Floats = NDArray[np.float32]
_PADDED = SIDE + 2 * REACH
_EDGE = COLOURS + 1
_ALL = (NUM_PATTERNS - 1) // 2
"""Sum of the weights of all digits: a pattern of ones."""


def _tables() -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.int16]]:
    """Where cells lie on a board with an edge ``[81]``, and the steps and weights of digits ``[4, 8]``."""
    rows, columns = np.divmod(np.arange(CELLS), SIDE)
    places = (rows + REACH) * _PADDED + columns + REACH
    offsets = np.array([step for step in range(-REACH, REACH + 1) if step])
    steps = np.array([1, _PADDED, _PADDED + 1, _PADDED - 1])[:, None] * offsets
    weights = 3 ** np.arange(DIGITS)
    return places.astype(np.int16), steps.astype(np.int16), weights.astype(np.int16)


def _entries() -> NDArray[np.int64]:
    """The table entry of each pattern ``[3^8]``: mirror images have one together."""
    digits = np.arange(NUM_PATTERNS)[:, None] // 3 ** np.arange(DIGITS) % 3
    mirrored = digits[:, ::-1] @ 3 ** np.arange(DIGITS)
    _, entry = np.unique(np.minimum(np.arange(NUM_PATTERNS), mirrored), return_inverse=True)
    return entry.astype(np.int64)


def _shape_entries() -> NDArray[np.int64]:
    """The table entry of each shape ``[2^8]``; bit i is the i-th cell around, beginning at the top left."""
    cells = np.array([0, 1, 2, 3, 5, 6, 7, 8])
    squares = np.zeros((NUM_SHAPES, 9), np.int64)
    squares[:, cells] = np.arange(NUM_SHAPES)[:, None] >> np.arange(8) & 1
    grids = squares.reshape(-1, 3, 3)
    turned = [np.rot90(side, turns, (1, 2)) for side in (grids, grids[:, ::-1]) for turns in range(4)]
    numbers = [grid.reshape(-1, 9)[:, cells] @ (1 << np.arange(8)) for grid in turned]
    _, entry = np.unique(np.min(numbers, axis=0), return_inverse=True)
    return entry.astype(np.int64)


PLACES, STEPS, WEIGHTS = _tables()
ENTRY = _entries()
NUM_ENTRIES = int(ENTRY.max()) + 1
SHAPE_ENTRY = _shape_entries()
NUM_SHAPE_ENTRIES = int(SHAPE_ENTRY.max()) + 1
AROUND = np.array([down * _PADDED + right for down in (-1, 0, 1) for right in (-1, 0, 1) if down or right])
TableKind = Literal["pattern", "shape", "count"]
"""What a table has entries for: patterns, shapes, or numbers of empty cells."""
TABLE_SIZES: dict[TableKind, int] = {
    "pattern": NUM_ENTRIES,
    "shape": NUM_SHAPE_ENTRIES,
    "count": CELLS + 1,
}
_ENTRIES: dict[TableKind, NDArray[np.int64]] = {"pattern": ENTRY, "shape": SHAPE_ENTRY}


def spread(table: NDArray[Any], kind: TableKind, scale: float = 1.0) -> Floats:
    """A table times ``scale``, one of patterns or shapes laid out over all of them."""
    scaled: Floats = table * np.float32(scale)
    return scaled[_ENTRIES[kind]] if kind in _ENTRIES else scaled


def gather(gradient: Floats, kind: TableKind) -> Floats:
    """The gradient of a table from that of what it was spread out to."""
    return np.bincount(_ENTRIES[kind], gradient).astype(np.float32) if kind in _ENTRIES else gradient


@jit
def _areas(cells, balls, empties, label, stack):  # type: ignore[no-untyped-def]
    """List balls and empty cells, and number the connected areas of empty cells from 1."""
    num_balls = 0
    num_empty = 0
    for x in range(CELLS):
        label[x] = 0
        if cells[x]:
            balls[num_balls] = x
            num_balls += 1
        else:
            empties[num_empty] = x
            num_empty += 1
    areas = 0
    for j in range(num_empty):
        if label[empties[j]]:
            continue
        areas += 1
        label[empties[j]] = areas
        stack[0] = empties[j]
        size = 1
        while size:
            size -= 1
            x = stack[size]
            row = x // SIDE
            column = x - row * SIDE
            if row > 0 and cells[x - SIDE] == 0 and label[x - SIDE] == 0:
                label[x - SIDE] = areas
                stack[size] = x - SIDE
                size += 1
            if row < SIDE - 1 and cells[x + SIDE] == 0 and label[x + SIDE] == 0:
                label[x + SIDE] = areas
                stack[size] = x + SIDE
                size += 1
            if column > 0 and cells[x - 1] == 0 and label[x - 1] == 0:
                label[x - 1] = areas
                stack[size] = x - 1
                size += 1
            if column < SIDE - 1 and cells[x + 1] == 0 and label[x + 1] == 0:
                label[x + 1] = areas
                stack[size] = x + 1
                size += 1
    return num_balls, num_empty


@jit
def _areas_beside(label, x):  # type: ignore[no-untyped-def]
    """The areas of empty cells beside a ball: four labels, 0 where there is none."""
    row = x // SIDE
    column = x - row * SIDE
    up = label[x - SIDE] if row > 0 else 0
    down = label[x + SIDE] if row < SIDE - 1 else 0
    left = label[x - 1] if column > 0 else 0
    right = label[x + 1] if column < SIDE - 1 else 0
    return up, down, left, right


@jit
def _patterns(cells, padded, own):  # type: ignore[no-untyped-def]
    """Fill ``own`` ``[81, 4, 9]``: the weights of the digits that show each colour, empty and edge included.

    The pattern of colour c at a cell is ``2 * (_ALL - own[0]) - own[c]``: what is not empty is another's
    (2), and one less makes it c's own (1).
    """
    for x in range(CELLS):
        padded[PLACES[x]] = cells[x]
    own[:] = 0
    for x in range(CELLS):
        place = PLACES[x]
        for d in range(4):
            seen = own[x, d]
            for k in range(DIGITS):
                seen[padded[place + STEPS[d, k]]] += WEIGHTS[k]


@jit
def _shape(padded, x):  # type: ignore[no-untyped-def]
    """Which of the cells around a cell are taken, as bits; beyond the edge all are."""
    shape = 0
    for k in range(8):
        shape |= (padded[PLACES[x] + AROUND[k]] != 0) << k
    return shape


@jit
def _seen_from(padded, x, d, k):  # type: ignore[no-untyped-def]
    """The k-th cell that a cell sees in direction d, if it is empty, else -1."""
    at = PLACES[x] + STEPS[d, k]
    if padded[at]:
        return -1
    return (at // _PADDED - REACH) * SIDE + at % _PADDED - REACH


@jit
def _pattern_with(own, t, d, colour):  # type: ignore[no-untyped-def]
    """The pattern of a colour at an empty cell."""
    return 2 * (_ALL - own[t, d, 0]) - own[t, d, colour]


@jit
def judge_boards(  # type: ignore[no-untyped-def]
    obs, place, remove, block, free, enter, leave, ball, empty, gap, count, outputs, values
):
    """Score the moves of boards ``[M, 84]``, and the boards themselves.

    Fills ``outputs`` ``[M, MAX_MOVES]`` and ``values`` ``[M]``; one of them may be empty, ``[0, ...]``, if it
    is not wanted.
    """
    wants_moves, wants_values = len(outputs) > 0, len(values) > 0
    balls = np.empty(CELLS, np.int64)
    empties = np.empty(CELLS, np.int64)
    label = np.zeros(CELLS, np.int64)
    stack = np.empty(CELLS, np.int64)
    padded = np.full(_PADDED * _PADDED, _EDGE, np.int64)
    own = np.empty((CELLS, 4, _EDGE + 1), np.int16)
    at_target = np.empty((CELLS, COLOURS + 1), np.float32)
    area_of = np.empty(CELLS, np.int64)
    for b in range(len(obs)):
        cells = obs[b]
        num_balls, num_empty = _areas(cells, balls, empties, label, stack)
        _patterns(cells, padded, own)
        worth = np.float32(0)
        for j in range(num_empty):
            t = empties[j]
            area_of[j] = label[t]
            stack[t] = j
            shape = _shape(padded, t)
            worth += gap[shape]
            plain = enter[shape]
            blocked = np.float32(0)
            target = at_target[j]
            target[:] = 0
            for d in range(4):
                seen = own[t, d]
                base = 2 * (_ALL - seen[0])
                plain += place[base]
                blocked += COLOURS * block[base]
                worth += COLOURS * empty[base]
                for c in range(1, COLOURS + 1):
                    if seen[c]:
                        mine = base - seen[c]
                        target[c] += place[mine] - place[base]
                        blocked += block[mine] - block[base]
                        worth += empty[mine] - empty[base]
            for c in range(1, COLOURS + 1):
                target[c] += plain + blocked
        if wants_values:
            for i in range(num_balls):
                f = balls[i]
                for d in range(4):
                    seen = own[f, d]
                    worth += ball[2 * (_ALL - seen[0]) - seen[cells[f]]]
            values[b] = worth + count[num_empty]
        if not wants_moves:
            continue
        row = outputs[b]
        row[:] = ILLEGAL
        is_stuck = True
        for i in range(num_balls):
            f = balls[i]
            colour = cells[f]
            up, down, left, right = _areas_beside(label, f)
            if up + down + left + right == 0:
                continue
            is_stuck = False
            leaving = leave[_shape(padded, f)]
            for d in range(4):
                seen = own[f, d]
                base = 2 * (_ALL - seen[0])
                leaving += COLOURS * free[base] + remove[base - seen[colour]]
                for c in range(1, COLOURS + 1):
                    if seen[c]:
                        leaving += free[base - seen[c]] - free[base]
            first = i * num_empty
            for j in range(num_empty):
                area = area_of[j]
                if area in (up, down, left, right):
                    row[first + j] = leaving + at_target[j, colour]
            # A target that sees the ball it gets: the ball is gone from there once it has moved.
            for d in range(4):
                for k in range(DIGITS):
                    t = _seen_from(padded, f, d, k)
                    if t < 0:
                        continue
                    slot = first + stack[t]
                    if row[slot] != ILLEGAL:
                        with_it = _pattern_with(own, t, d, colour)
                        row[slot] += place[with_it - WEIGHTS[DIGITS - 1 - k]] - place[with_it]
        if is_stuck:
            row[:] = 0


@jit
def grade_boards(  # type: ignore[no-untyped-def]
    obs,
    outputs,
    by_outputs,
    by_values,
    place,
    remove,
    block,
    free,
    enter,
    leave,
    ball,
    empty,
    gap,
    count,
):
    """Add the gradients by ``outputs`` ``[M, MAX_MOVES]`` and ``values`` ``[M]`` to those of the tables."""
    balls = np.empty(CELLS, np.int64)
    empties = np.empty(CELLS, np.int64)
    label = np.zeros(CELLS, np.int64)
    stack = np.empty(CELLS, np.int64)
    padded = np.full(_PADDED * _PADDED, _EDGE, np.int64)
    own = np.empty((CELLS, 4, _EDGE + 1), np.int16)
    at_target = np.empty((CELLS, COLOURS + 1), np.float32)
    for b in range(len(obs)):
        cells = obs[b]
        num_balls, num_empty = _areas(cells, balls, empties, label, stack)
        _patterns(cells, padded, own)
        row, grad, by_value = outputs[b], by_outputs[b], by_values[b]
        at_target[:num_empty] = 0
        count[num_empty] += by_value
        for j in range(num_empty):
            stack[empties[j]] = j
        for i in range(num_balls):
            f = balls[i]
            colour = cells[f]
            leaving = np.float32(0)
            first = i * num_empty
            for j in range(num_empty):
                if row[first + j] != ILLEGAL:
                    leaving += grad[first + j]
                    at_target[j, colour] += grad[first + j]
            leave[_shape(padded, f)] += leaving
            for d in range(4):
                seen = own[f, d]
                base = 2 * (_ALL - seen[0])
                ball[base - seen[colour]] += by_value
                if leaving != 0:
                    remove[base - seen[colour]] += leaving
                    whole = COLOURS
                    for c in range(1, COLOURS + 1):
                        if seen[c]:
                            free[base - seen[c]] += leaving
                            whole -= 1
                    free[base] += whole * leaving
                for k in range(DIGITS):
                    t = _seen_from(padded, f, d, k)
                    if t < 0:
                        continue
                    slot = first + stack[t]
                    if row[slot] != ILLEGAL:
                        with_it = _pattern_with(own, t, d, colour)
                        place[with_it - WEIGHTS[DIGITS - 1 - k]] += grad[slot]
                        place[with_it] -= grad[slot]
        for j in range(num_empty):
            t = empties[j]
            total = np.float32(0)
            for c in range(1, COLOURS + 1):
                total += at_target[j, c]
            shape = _shape(padded, t)
            enter[shape] += total
            gap[shape] += by_value
            for d in range(4):
                seen = own[t, d]
                base = 2 * (_ALL - seen[0])
                others = total
                whole = COLOURS
                for c in range(1, COLOURS + 1):
                    if seen[c]:
                        mine = base - seen[c]
                        place[mine] += at_target[j, c]
                        others -= at_target[j, c]
                        block[mine] += total
                        empty[mine] += by_value
                        whole -= 1
                place[base] += others
                block[base] += whole * total
                empty[base] += whole * by_value


@jit
def judge_moves(outputs, chosen, logp, entropy, log_total):  # type: ignore[no-untyped-def]
    """Log-probability, entropy and log of the sum of exponentials ``[M]`` of moves under ``outputs``."""
    for b in range(len(outputs)):
        row = outputs[b]
        largest = row[0]
        for j in range(len(row)):
            largest = max(largest, row[j])
        total = 0.0
        mean = 0.0
        for j in range(len(row)):
            if row[j] != ILLEGAL:
                weight = np.exp(row[j] - largest)
                total += weight
                mean += weight * (row[j] - largest)
        log_total[b] = largest + np.log(total)
        logp[b] = row[chosen[b]] - log_total[b]
        entropy[b] = np.log(total) - mean / total


@jit
def grade_likelihood(  # type: ignore[no-untyped-def]
    outputs, chosen, entropy, log_total, by_logp, by_entropy, by_outputs
):
    """Fill ``by_outputs`` ``[M, P]`` from gradients ``[M]`` by log-probabilities and entropies."""
    for b in range(len(outputs)):
        row, grad = outputs[b], by_outputs[b]
        for j in range(len(row)):
            if row[j] == ILLEGAL:
                grad[j] = 0
            else:
                log_p = row[j] - log_total[b]
                grad[j] = -np.exp(log_p) * (by_logp[b] + by_entropy[b] * (log_p + entropy[b]))
        grad[chosen[b]] += by_logp[b]


@jit
def draw(outputs, uniform, chosen):  # type: ignore[no-untyped-def]
    """Draw an entry from the softmax of each row of ``outputs`` ``[N, P]``; ``uniform`` ``[N]`` in [0, 1)."""
    weights = np.empty(outputs.shape[1], np.float32)
    for b in range(len(outputs)):
        row = outputs[b]
        largest = row[0]
        for j in range(len(row)):
            largest = max(largest, row[j])
        total = 0.0
        for j in range(len(row)):
            weights[j] = np.exp(row[j] - largest) if row[j] != ILLEGAL else np.float32(0)
            total += weights[j]
        left = np.float64(uniform[b]) * total
        pick = -1
        for j in range(len(row)):
            if weights[j] > 0:
                pick = j
                left -= weights[j]
                if left < 0:
                    break
        chosen[b] = pick


@jit
def to_cells(boards, numbers, moves):  # type: ignore[no-untyped-def]
    """Turn numbers of moves ``[N]`` on boards ``[N, 81]`` into from * 81 + to."""
    for b in range(len(boards)):
        cells = boards[b]
        num_empty = 0
        for x in range(CELLS):
            num_empty += cells[x] == 0
        moves[b] = 0
        if num_empty == 0 or num_empty == CELLS:
            continue
        ball, empty = numbers[b] // num_empty, numbers[b] % num_empty
        source, target = 0, 0
        for x in range(CELLS):
            if cells[x]:
                if ball == 0:
                    source = x
                ball -= 1
            else:
                if empty == 0:
                    target = x
                empty -= 1
        moves[b] = source * CELLS + target


@jit
def to_number(boards, moves, numbers):  # type: ignore[no-untyped-def]
    """Turn moves ``[N]``, from * 81 + to, on boards ``[N, 81]`` into their numbers."""
    for b in range(len(boards)):
        cells = boards[b]
        source, target = moves[b] // CELLS, moves[b] % CELLS
        num_empty, ball, empty = 0, 0, 0
        for x in range(CELLS):
            if cells[x]:
                ball += x < source
            else:
                num_empty += 1
                empty += x < target
        numbers[b] = ball * num_empty + empty


@jit
def pair_moves(obs, moves):  # type: ignore[no-untyped-def]
    """Fill ``moves`` ``[M, MAX_MOVES]`` with from * 81 + to of each number of a move, -1 where it is illegal.

    A board without any legal move gets 0 everywhere: whoever chooses needs something to choose.
    """
    balls = np.empty(CELLS, np.int64)
    empties = np.empty(CELLS, np.int64)
    label = np.zeros(CELLS, np.int64)
    stack = np.empty(CELLS, np.int64)
    for b in range(len(obs)):
        cells = obs[b]
        num_balls, num_empty = _areas(cells, balls, empties, label, stack)
        row = moves[b]
        row[:] = -1
        found = False
        for i in range(num_balls):
            up, down, left, right = _areas_beside(label, balls[i])
            for j in range(num_empty):
                area = label[empties[j]]
                if area in (up, down, left, right):
                    row[i * num_empty + j] = balls[i] * CELLS + empties[j]
                    found = True
        if not found:
            row[:] = 0
