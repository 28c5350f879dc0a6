"""Lengths of what was issued beside those of what was trained: do rounds prefer short pieces?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from offbeat.reading import numbers
from offbeat.types import Metrics, Segment, StateTree


class Lengths:
    """Mean lengths of pieces of segments, such as responses, since the run's first round.

    Nobody knows how long the pieces of open tickets get, and these are rather the long ones: a mean over all
    that has arrived would be too small. So dispatched ones are counted in the order of issue, up to the first
    ticket that is open, whether they are trained, wait or were dropped. Trained ones are all that rounds
    took. The two means differ by the early ones among the last k rounds, ever less as the run goes on, and
    not at all at its end, unless rounds leave out tickets of some lengths.
    """

    def __init__(self) -> None:
        self._next: int | None = 0  # the first ticket that is open; None: not known
        self._beyond: dict[int, tuple[int, int]] = {}  # arrived, but after an open one
        self._dispatched = self._trained = (0, 0)  # pieces and samples

    def arrived(self, segment: Segment) -> None:
        """Count the pieces of a ticket that has ended; those of each ticket once."""
        if self._next is None:
            return
        self._beyond[segment.ticket.number] = _size(segment)
        while (size := self._beyond.pop(self._next, None)) is not None:
            self._dispatched = _sum(self._dispatched, size)
            self._next += 1

    def trained(self, segments: Sequence[Segment]) -> None:
        """Count the pieces of a round."""
        for segment in segments:
            self._trained = _sum(self._trained, _size(segment))

    def metrics(self) -> Metrics:
        """Return both means, where segments have pieces."""
        if self._next is None or not self._trained[0]:
            return {}
        return {
            "rollout/dispatched_length_mean": _mean(self._dispatched),
            "rollout/trained_length_mean": _mean(self._trained),
        }

    def state_dict(self) -> StateTree:
        """Return the sums."""
        if self._next is None:
            return None
        return {
            "next": self._next,
            "beyond": {number: list(size) for number, size in self._beyond.items()},
            "dispatched": list(self._dispatched),
            "trained": list(self._trained),
        }

    def load_state_dict(self, state: Mapping[str, StateTree] | None) -> None:
        """Continue from saved sums; runs of earlier versions have none."""
        if state is None:
            self._next = None
            return
        (self._next,) = numbers([state["next"]])
        self._beyond = {int(number): _pair(size) for number, size in state["beyond"].items()}
        self._dispatched, self._trained = _pair(state["dispatched"]), _pair(state["trained"])


def _size(segment: Segment) -> tuple[int, int]:
    return (len(segment.pieces), segment.num_steps) if segment.pieces else (0, 0)


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _mean(size: tuple[int, int]) -> float:
    return size[1] / size[0] if size[0] else math.nan


def _pair(values: Sequence[int]) -> tuple[int, int]:
    pieces, samples = numbers(values)
    return pieces, samples
