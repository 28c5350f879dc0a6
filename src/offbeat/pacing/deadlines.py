"""The deadline rule: when a set of outstanding segments can still be trained in time.

A segment collected with published version w has the deadline w + k: the last round that may train it.
A round takes S segments. Everything the staleness bound rests on is in `feasible`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from offbeat.errors import PromiseBroken

Feasible = Callable[[Mapping[int, int], int, int], bool]


class BoundBroken(PromiseBroken):
    """A round was about to train a segment past its deadline."""


def feasible(deadlines: Mapping[int, int], next_round: int, segments_per_round: int) -> bool:
    """Return True if rounds ``next_round``, ``next_round + 1``, … of S segments can meet all deadlines.

    ``deadlines`` maps a deadline to the number of segments that have it. Taking segments in order of
    deadline, the i-th is trained in round r + i div S, so the condition r + i div S <= D[i] for all i is,
    for each deadline d, (segments due by d) <= S (d - r + 1): there are d - r + 1 rounds left up to d.
    """
    due = 0
    for deadline in sorted(deadlines):
        due += deadlines[deadline]
        if due and due > segments_per_round * (deadline - next_round + 1):
            return False
    return True


def lag_rule(deadlines: Mapping[int, int], next_round: int, segments_per_round: int) -> bool:
    """The usual check, for comparison: all that is outstanding fits before the newest deadline.

    It does not see that segments with an earlier deadline pile up behind a straggler.
    """
    waiting = sum(deadlines.values())
    return waiting == 0 or waiting <= segments_per_round * (max(deadlines) - next_round + 1)


def no_rule(deadlines: Mapping[int, int], next_round: int, segments_per_round: int) -> bool:
    """Allow everything, for comparison."""
    return True


RULES: dict[str, Feasible] = {"deadline": feasible, "lag": lag_rule, "none": no_rule}
