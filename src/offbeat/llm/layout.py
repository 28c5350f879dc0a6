"""The order of slots: rows that are computed come first, the longest in front, so that groups are slices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from offbeat.llm.step import Group

FREE, HELD, ROW = -2, -1, 0
"""Classes of slots that are not computed, and of rows, the larger the longer (see `length_classes`)."""
MULTIPLE = 8
"""Rows are computed in so many at a time: fewer would have other bits (see `offbeat.llm.step`)."""
_GROUP_COST = 1024
"""One more group costs about as much as so many positions of one row (0.4 M parameters, one CPU thread)."""
_MOST_GROUPS = 3


def ceil_to(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


def length_classes(positions: NDArray[np.int64], bucket: int) -> NDArray[np.int64]:
    """Return the classes of rows that look at positions up to these: 0, 1, 2-3, 4-7, ... more buckets."""
    return np.frexp(positions // bucket)[1].astype(np.int64)


def last_positions(classes: NDArray[np.int64], bucket: int) -> NDArray[np.int64]:
    """Return the last position that belongs to each class."""
    return (1 << classes) * bucket - 1


def moves(classes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sources and targets of moves after which the classes of slots fall, FREE ones last.

    What is in its place stays. Example: ``moves([0, FREE, 1])`` moves slots 2 and 0 to 0 and 1.
    """
    wanted = np.sort(classes)[::-1]
    wrong = np.flatnonzero(classes != wanted)
    sources = wrong[np.argsort(-classes[wrong], kind="stable")]
    targets = wrong[np.argsort(-wanted[wrong], kind="stable")]
    is_used = classes[sources] != FREE
    return sources[is_used], targets[is_used]


def groups_of(regions: Sequence[tuple[int, int]], num_slots: int) -> tuple[Group, ...]:
    """Divide rows into at most three groups, as cheap as possible.

    ``regions`` are (end, length) of rows that follow on each other: the last row of each, and the positions
    that its longest one looks at, in buckets; lengths fall. Groups begin and end at multiples of eight.
    """
    best: tuple[Group, ...] = ()
    least = float("inf")
    inner = range(len(regions) - 1)
    for count in range(min(_MOST_GROUPS, len(regions))):
        for cuts in combinations(inner, count):
            found, begin, first = [], 0, 0
            for cut in (*cuts, len(regions) - 1):
                end = min(num_slots, ceil_to(regions[cut][0], MULTIPLE))
                if end > begin:
                    found.append(Group(begin, end, regions[first][1]))
                begin, first = max(begin, end), cut + 1
            cost = sum((end - begin) * length + _GROUP_COST for begin, end, length in found)
            if cost < least:
                best, least = tuple(found), cost
    return best
