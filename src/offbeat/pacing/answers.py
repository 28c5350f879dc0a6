"""Answers of tools and rewards as a run records them, and those that differ when they are asked for again."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from offbeat.errors import ReplayError
from offbeat.types import Answer, Piece

Answers = Mapping[int, Mapping[int, Sequence[Answer]]]
"""Ticket -> number of the piece -> its answers."""


def lines_of(ticket: int, pieces: Sequence[Piece]) -> str:
    """Return the lines of ``answers.jsonl`` for a segment, one for each answer."""
    return "".join(
        f'{{"ticket":{ticket},"response":{number},"turn":{answer.turn},{_value_field(answer)}}}\n'
        for number, piece in enumerate(pieces)
        for answer in piece.answers
    )


def _value_field(answer: Answer) -> str:
    if answer.error or answer.value is None:
        return f'"error":{json.dumps(answer.error)}'
    name = "text" if isinstance(answer.value, str) else "number"
    return f'"{name}":{json.dumps(answer.value, allow_nan=False)}'


def answers_of(records: Iterable[Mapping[str, Any]]) -> Answers:
    """Read the lines of ``answers.jsonl``; ReplayError when they are not those of a run.

    The lines of a ticket come together. Where they come again, the last ones count.
    """
    found: dict[int, dict[int, list[Answer]]] = {}
    before = None
    try:
        for record in records:
            if record.get("kind") == "gap":
                raise ReplayError(
                    "answers.jsonl has a gap: the disk was full while the run went on. With --call tools and "
                    "rewards are called again"
                )
            ticket, response, turn = map(operator.index, (record[name] for name in _PLACE))
            if ticket != before or (response, turn) == (0, 0):
                found[ticket] = {}
            before, answers = ticket, found[ticket].setdefault(response, [])
            if turn != len(answers) or response < 0:
                raise ValueError(f"turn {turn} of response {response} of ticket {ticket}")
            answers.append(Answer(turn, *_value_of(record)))
    except (KeyError, TypeError, ValueError) as error:
        raise ReplayError(
            f"answers.jsonl was damaged or edited, the run cannot be repeated from it ({error!r}). With "
            "--call tools and rewards are called again"
        ) from error
    return found


_PLACE = ("ticket", "response", "turn")


def _value_of(record: Mapping[str, Any]) -> tuple[str | float | None, str]:
    """Return value and error of a record; KeyError, TypeError or ValueError when it has none."""
    if "error" in record:
        if not isinstance(record["error"], str):
            raise TypeError("an error that is no text")
        return None, record["error"]
    if "text" in record:
        if not isinstance(record["text"], str):
            raise TypeError("an answer that is no text")
        return record["text"], ""
    number = float(record["number"])
    if isinstance(record["number"], str) or not math.isfinite(number):
        raise ValueError(f"{record['number']!r:.40} in place of a number")
    return number, ""


def with_answers(
    ticket: int, pieces: Sequence[Piece], counts: Sequence[int], answers: Answers
) -> tuple[Piece, ...]:
    """Return pieces with their recorded answers, of which there were so many; ReplayError for others."""
    if len(counts) != len(pieces):
        raise ReplayError(f"schedule.jsonl was damaged or edited: ticket {ticket} has {len(counts)} answers")
    found = answers.get(ticket, {})
    whole = []
    for number, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        own = tuple(found.get(number, ()))
        if len(own) != count:
            raise ReplayError(
                f"answers.jsonl has {len(own)} of {count} answers to response {number} of ticket {ticket}: "
                "it was cut or edited. With --call tools and rewards are called again"
            )
        whole.append(piece._replace(answers=own))
    return tuple(whole)


def unanswered(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return pieces without what they were answered."""
    return tuple([piece._replace(answers=()) for piece in pieces])


@dataclass(frozen=True, slots=True)
class ChangedAnswer:
    """The first answer that was another one when it was asked for again; None for one that was not given."""

    ticket: int
    response: int
    turn: int
    recorded: Answer | None
    now: Answer | None

    def __str__(self) -> str:
        place = f"turn {self.turn} of response {self.response} of ticket {self.ticket}"
        return f"{place} was answered {_shown(self.recorded)}, now {_shown(self.now)}"


def _shown(answer: Answer | None) -> str:
    if answer is None:
        return "with nothing"
    return f"{answer.value!r:.80}" if not answer.error else f"by an error ({answer.error:.80})"


def first_change(ticket: int, recorded: Sequence[Piece], now: Sequence[Piece]) -> ChangedAnswer | None:
    """Compare the answers of a segment with the recorded ones. Errors are equal whatever they say."""
    for number, (before, after) in enumerate(zip_longest(recorded, now, fillvalue=Piece(()))):
        pairs = zip_longest(before.answers, after.answers)
        for turn, (one, other) in enumerate(pairs):
            if one is None or other is None or (one.value, not one.error) != (other.value, not other.error):
                return ChangedAnswer(ticket, number, turn, one, other)
    return None
