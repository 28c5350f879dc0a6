"""The contract of tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from offbeat.llm.tokens import Tokenizer

Split = Literal["train", "held_out"]
"""Problems to learn from, also before training, and problems that are seen in evaluations alone."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: a prompt, and the answer that its task rewards. Example: ``Problem("21+43=", "640")``.

    ``max_new_tokens`` is the longest response to it, where that is shorter than its task's.
    """

    prompt: str
    answer: str
    max_new_tokens: int | None = None


class Task(Protocol):
    """Problems by split and number, and the reward of a response."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokens that texts are written in."""
        ...

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt, of all splits."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens of the longest response, with the one that ends it."""
        ...

    def num_problems(self, split: Split) -> int:
        """Return how many different problems a split has."""
        ...

    def problem(self, split: Split, index: int) -> Problem:
        """Return a problem, 0 <= index < num_problems(split)."""
        ...

    def reward(self, problem: Problem, response: str) -> float:
        """Return the reward of a response, without special tokens."""
        ...
