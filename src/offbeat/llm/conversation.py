"""One response with what it was answered: as it stands, as a task sees it, and as a checkpoint holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from offbeat.llm.calls import Question
from offbeat.llm.requests import Response
from offbeat.llm.tasks.base import Dialogue, Problem
from offbeat.llm.tokens import Tokenizer
from offbeat.types import TIMEOUT, Answer, End, Piece, Span, StateTree

COMPLETE = ("eos", "stop")
"""Ends of a turn that the model ended itself."""


@dataclass(slots=True, eq=False)
class Conversation:
    """A response and what it was answered. It is over when it has an ``end`` and waits for nothing.

    ``response`` is known at the end of each turn. ``answers`` are texts of tools, then the reward.
    ``script``: the record that it repeats; ``question``: what its episode waits for.
    """

    key: int
    sample: int
    problem: Problem
    seed: int = 0
    max_new_tokens: int = 0
    script: Piece | None = None
    response: Response | None = None
    answers: list[Answer] = field(default_factory=list)
    reward: float = math.nan
    end: End = ""
    waits: Literal["", "tool", "reward"] = ""
    since_s: float = 0.0
    tool_s: float = 0.0
    reward_s: float = 0.0
    num_own: int = 0
    num_replies: int = 0  # that an episode has got
    question: Question | None = None

    @property
    def name(self) -> tuple[int, int]:
        """Key and sample."""
        return self.key, self.sample

    @property
    def whole(self) -> Response:
        """The response, once a turn has ended."""
        assert self.response is not None, "no turn has ended"
        return self.response

    @property
    def piece(self) -> Piece:
        """The record from which a replay repeats it."""
        return Piece(self.whole.spans, self.end, tuple(self.answers))

    def recorded(self) -> Answer | None:
        """Return the next answer of the script; None where there is none, and it is to be asked for."""
        answers = () if self.script is None else self.script.answers
        return answers[len(self.answers)] if len(self.answers) < len(answers) else None

    @property
    def is_at_end_of_script(self) -> bool:
        """True when the recorded response had no more tokens of its own."""
        if self.script is None:
            return False
        return int(self.whole.is_own.sum()) >= sum(span.size for span in self.script.spans)

    def dialogue(self, tokenizer: Tokenizer) -> Dialogue:
        """Return it as its task sees it."""
        texts = tuple(str(answer.value) for answer in self.answers if isinstance(answer.value, str))
        turns = tuple(tokenizer.decode(ids) for ids in turns_of(self.whole))
        return Dialogue(self.problem, turns, texts, self.seed)


def turns_of(response: Response) -> list[list[int]]:
    """Return the tokens of each turn of the model."""
    is_own = response.is_own
    if not len(is_own):
        return [[]]
    edges = np.flatnonzero(np.diff(is_own.astype(np.int8), prepend=0, append=0)).tolist()
    return [
        response.tokens[begin:end].tolist() for begin, end in zip(edges[::2], edges[1::2], strict=True)
    ] or [[]]


def failure(error: str) -> End:
    """Return how a response ends whose tool failed."""
    return "timeout" if error == TIMEOUT else "error"


# ---------------------------------------------------------------- begun work


def to_tree(response: Response, answers: Sequence[Answer], end: End) -> StateTree:
    """Return a response as a checkpoint holds it; ``end`` is empty while it goes on."""
    return {
        "tokens": response.tokens,
        "log_probs": response.log_probs,
        "is_own": response.is_own,
        "made_s": response.made_s,
        "spans": [list(span) for span in response.spans],
        "end": end,
        "answers": [list(answer) for answer in answers],
    }


def from_tree(key: int, sample: int, tree: Mapping[str, Any], version: int) -> tuple[Response, list[Answer]]:
    """Return a response that was begun with its answers, without what versions above this one have made."""
    spans = [Span(int(made), int(size), bool(rebuilt)) for made, size, rebuilt in tree["spans"]]
    kept = [
        span for index, span in enumerate(spans) if all(one.version <= version for one in spans[: index + 1])
    ]
    is_own = np.asarray(tree["is_own"], np.bool_)
    num_own = sum(span.size for span in kept)
    is_whole = len(kept) == len(spans)
    length = len(is_own) if is_whole else int(np.searchsorted(is_own.cumsum(), num_own + 1))
    response = Response(
        key,
        sample,
        np.asarray(tree["tokens"], np.int32)[:length],
        np.asarray(tree["log_probs"], np.float32)[:length],
        is_own[:length],
        tuple(kept),
        tree["end"] if is_whole else "",
        np.asarray(tree.get("made_s", np.full(len(is_own), np.nan)))[:length],
    )
    answers = [Answer(int(turn), value, str(error)) for turn, value, error in tree.get("answers", ())]
    return response, answers if response.end else answers[: _num_given(response)]


def _num_given(response: Response) -> int:
    """Number of texts in a response that the model has not made."""
    return int((np.diff(response.is_own.astype(np.int8), prepend=1) == -1).sum())
