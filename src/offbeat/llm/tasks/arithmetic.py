"""Sums, written with the least significant digit first, as they are added up."""

from __future__ import annotations

import numpy as np

from offbeat.errors import ConfigError
from offbeat.llm.tasks.base import Problem, Split
from offbeat.llm.tokens import CharTokenizer

_MOST_DIGITS = 4
_NUM_HELD_OUT = 1_000


class Arithmetic:
    """Sums of two numbers of ``digits`` digits; the reward is 1 for the right sum, else 0.

    1,000 pairs of numbers are held out, all others are for training; a guess is right less often than once in
    ``10 ** digits``. Example: 12 + 34 is the prompt ``21+43=`` with the answer ``640``.
    """

    is_quick = True

    def __init__(self, digits: int = 2) -> None:
        if not 2 <= digits <= _MOST_DIGITS:
            raise ConfigError(f"env.kwargs.digits is {digits}: it must be 2 to {_MOST_DIGITS}")
        self.tokenizer = CharTokenizer("0123456789+=", add_bos=False)
        self.max_prompt_tokens = 2 * digits + 2
        self.max_new_tokens = digits + 2
        self._digits = digits
        self._order = np.random.Generator(np.random.PCG64(digits)).permutation(100**digits)

    def num_problems(self, split: Split) -> int:
        """Return how many pairs a split has."""
        return _NUM_HELD_OUT if split == "held_out" else len(self._order) - _NUM_HELD_OUT

    def problem(self, split: Split, index: int) -> Problem:
        """Return a sum."""
        place = index if split == "held_out" else _NUM_HELD_OUT + index
        first, second = divmod(int(self._order[place]), 10**self._digits)
        left, right = (f"{number:0{self._digits}d}"[::-1] for number in (first, second))
        return Problem(f"{left}+{right}=", f"{first + second:0{self._digits + 1}d}"[::-1])

    def reward(self, problem: Problem, response: str) -> float:
        """Return 1.0 for the right answer."""
        return float(response == problem.answer)
