"""The store of streams: what a checkpoint holds of it, and what it refuses to load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offbeat.replay import StreamStore
from offbeat.types import Episodes, Piece, Segment, Span, Ticket

PIECES = (Piece((Span(3, 3), Span(4, 1, True)), "eos"),)


def state() -> Any:
    """The state of a store with one segment."""
    store = StreamStore()
    data, units = {"obs": np.arange(4.0)}, {"env_steps": 4}
    episodes = Episodes((1.5,), (3,))
    store.add(Segment(Ticket(7, 1, 3, 4, 812), data, np.array([3]), units, episodes, 0.5, (4,), PIECES))
    return store.state_dict()


def test_a_saved_segment_comes_back() -> None:
    store = StreamStore()
    store.load_state_dict(state())
    assert store.ready() == (7,)
    (segment,) = store.next([7])
    assert segment.ticket == Ticket(7, 1, 3, 4, 812)
    assert segment.data["obs"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (segment.oldest_version, segment.num_steps, segment.steps_by_env) == (3, 4, (4,))
    assert (segment.episodes, segment.collect_s, segment.pieces) == (Episodes((1.5,), (3,)), 0.5, PIECES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ticket", [7, "x", 3, 4, 812]),
        ("versions", "3"),
        ("versions", np.array(["3"])),
        ("units", {"env_steps": "4"}),
        ("episodes", {"returns": ["x"], "lengths": [3]}),
        ("episodes", {"returns": [1.5], "lengths": [None]}),
        ("collect_s", []),
        ("steps_by_env", [{}]),
        ("pieces", [[[[3, "x", 0]], "eos"]]),
        ("pieces", [[[[3, 1, 0]], None]]),
    ],
)
def test_what_is_no_segment_is_refused(name: str, value: object) -> None:
    forged = state()
    forged["segments"][0][name] = value
    with pytest.raises(TypeError):
        StreamStore().load_state_dict(forged)
