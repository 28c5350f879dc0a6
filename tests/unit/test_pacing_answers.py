"""Answers of tools and rewards: written, read, cut back, with gaps, and compared when asked for again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import CheckpointError, ReplayError
from offbeat.observe.events import ANSWERS, read_answers
from offbeat.pacing.answers import answers_of, first_change, lines_of, unanswered, with_answers
from offbeat.pacing.events import SegmentArrived
from offbeat.run.observers import AnswerRecorder
from offbeat.types import TIMEOUT, Answer, Piece, Segment, Span, Ticket

VALUES = st.one_of(
    st.text(max_size=20).map(lambda text: (text, "")),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda number: (number, "")),
    st.text(min_size=1, max_size=20).map(lambda error: (None, error)),
)


@given(st.lists(st.lists(VALUES, max_size=3), max_size=4))
def test_answers_come_back_as_they_were(values: list[list[tuple[str | float | None, str]]]) -> None:
    pieces = [Piece((), "eos", tuple(Answer(turn, *one) for turn, one in enumerate(own))) for own in values]
    lines = lines_of(7, pieces)
    found = answers_of([json.loads(line) for line in lines.splitlines()])
    counts = [len(piece.answers) for piece in pieces]
    assert with_answers(7, unanswered(pieces), counts, found) == tuple(pieces)


def arrived(number: int, *values: str | float) -> SegmentArrived:
    answers = tuple(Answer(turn, value) for turn, value in enumerate(values))
    ticket = Ticket(number, 0, 0, 0, 0)
    return SegmentArrived(Segment(ticket, {}, np.array([0]), pieces=(Piece((Span(0, 1),), "eos", answers),)))


def test_recorder_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    recorder = AnswerRecorder(tmp_path / ANSWERS, lambda text: None)
    assert recorder.state_dict() == {}
    recorder._arrived(arrived(0), 0.0)  # nothing was answered: no file
    recorder.flush()
    assert not (tmp_path / ANSWERS).exists()
    recorder._arrived(arrived(1, "46;", 1.0), 0.0)
    state = recorder.state_dict()
    recorder._arrived(arrived(2, 0.5), 0.0)
    recorder.close()
    assert [one["ticket"] for one in read_answers(tmp_path)] == [1, 1, 2]
    resumed = AnswerRecorder(tmp_path / ANSWERS, lambda text: None)
    resumed.truncate(state["answers_offset"], state["answers_gap"])
    resumed.close()
    assert [one["ticket"] for one in read_answers(tmp_path)] == [1, 1]
    (tmp_path / ANSWERS).unlink()
    with pytest.raises(CheckpointError, match="cut or replaced"):
        AnswerRecorder(tmp_path / ANSWERS, lambda text: None).truncate(state["answers_offset"], False)


def test_answers_that_the_disk_did_not_take_leave_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    recorder = AnswerRecorder(tmp_path / ANSWERS, told.append)

    def full(path: Path) -> object:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("offbeat.observe.events.open_to_append", full)
        recorder._arrived(arrived(1, 1.0), 0.0)
        recorder._arrived(arrived(2, 1.0), 0.0)
    assert len(told) == 1
    assert "the run cannot be replayed" in told[0]
    assert recorder.state_dict() == {"answers_gap": True}
    recorder._arrived(arrived(3, 1.0), 0.0)
    recorder.close()
    assert [one.get("kind", one.get("ticket")) for one in read_answers(tmp_path)] == ["gap", 3]
    with pytest.raises(ReplayError, match=r"answers\.jsonl has a gap.*--call"):
        answers_of(read_answers(tmp_path))


def test_the_last_answers_of_a_ticket_count() -> None:
    lines = [("1", 0.0), ("2", 0.0), ("1", 1.0)]
    records = [{"ticket": int(name), "response": 0, "turn": 0, "number": value} for name, value in lines]
    assert answers_of(records)[1] == {0: [Answer(0, 1.0)]}


def test_first_change_is_named() -> None:
    before = [Piece((), "eos", (Answer(0, "46;"), Answer(1, 1.0))), Piece((), "eos", (Answer(0, None, "a"),))]
    assert first_change(3, before, before) is None
    other_error = [before[0], Piece((), "eos", (Answer(0, None, TIMEOUT),))]
    assert first_change(3, before, other_error) is None
    other = [Piece((), "eos", (Answer(0, "47;"), Answer(1, 1.0))), before[1]]
    assert str(first_change(3, before, other)) == (
        "turn 0 of response 0 of ticket 3 was answered '46;', now '47;'"
    )
    fewer = [Piece((), "eos", (Answer(0, "46;"),)), before[1]]
    assert str(first_change(3, before, fewer)).endswith("was answered 1.0, now with nothing")
    better = [before[0], Piece((), "eos", (Answer(0, 0.5),))]
    assert str(first_change(3, before, better)).endswith("was answered by an error (a), now 0.5")
