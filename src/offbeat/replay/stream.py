"""The store of streams: a segment waits until a round takes it, once."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np

from offbeat.reading import numbers
from offbeat.types import Episodes, Piece, RemoteData, Segment, Span, StateTree, Ticket


class StreamStore:
    """Segments by ticket number, in order of arrival."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def add(self, segment: Segment) -> None:
        """Take a segment that has arrived."""
        self._segments[segment.ticket.number] = segment

    def ready(self) -> Sequence[int]:
        """Numbers of the tickets whose segments are here."""
        return tuple(self._segments)

    def next(self, tickets: Sequence[int]) -> tuple[Segment, ...]:
        """Hand these segments over, in this order."""
        return tuple([self._segments.pop(ticket) for ticket in tickets])

    def state_dict(self) -> StateTree:
        """All segments, with their own arrays: whoever keeps them for longer than a round copies them."""
        return {"segments": [_to_tree(segment) for segment in self._segments.values()]}

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave."""
        segments = map(_from_tree, state["segments"])
        self._segments = {segment.ticket.number: segment for segment in segments}


def _to_tree(segment: Segment) -> dict[str, StateTree]:
    return {
        "ticket": list(segment.ticket.as_row()),
        "data": segment.data.fetch() if isinstance(segment.data, RemoteData) else segment.data,
        "versions": segment.versions,
        "units": dict(segment.units),
        "episodes": {"returns": list(segment.episodes.returns), "lengths": list(segment.episodes.lengths)},
        "collect_s": segment.collect_s,
        "steps_by_env": list(segment.steps_by_env),
        "pieces": [[list(map(list, piece.spans)), piece.end] for piece in segment.pieces],
    }


def _from_tree(tree: dict[str, StateTree]) -> Segment:
    """Return a segment; TypeError, among others, when the tree has another form than `_to_tree` gives it."""
    versions, episodes = tree["versions"], tree["episodes"]
    if not isinstance(versions, np.ndarray) or versions.dtype.kind != "i":
        raise TypeError("versions that are no integers")
    return Segment(
        ticket=Ticket(*map(index, tree["ticket"])),
        data=tree["data"],
        versions=versions,
        units={unit: index(count) for unit, count in tree["units"].items()},
        episodes=Episodes(tuple(numbers(episodes["returns"])), tuple(map(index, episodes["lengths"]))),
        collect_s=float(tree["collect_s"]),
        steps_by_env=tuple(map(index, tree.get("steps_by_env", ()))),
        pieces=tuple(map(_piece, tree.get("pieces", ()))),
    )


def _piece(saved: StateTree) -> Piece:
    spans, end = saved
    if type(end) is not str:
        raise TypeError("a piece whose end is no text")
    return Piece(tuple(Span(index(version), index(size), bool(was)) for version, size, was in spans), end)  # type: ignore[arg-type]
