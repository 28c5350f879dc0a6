"""Strings to write backwards, of lengths with a heavy tail."""

from __future__ import annotations

import hashlib
import math
import string
from itertools import takewhile

import numpy as np

from offbeat.errors import ConfigError
from offbeat.llm.tasks.base import Problem, Split
from offbeat.llm.tokens import CharTokenizer
from offbeat.seeding import derive_seed

_LETTERS = string.ascii_letters + string.digits
_SHORTEST = 4
_LONGEST_LIMIT = 1_000
_SPARE = 8
_NUM_HELD_OUT, _NUM_TRAIN = 1_000, 100_000
_PARTS = 10  # of all strings, one is held out


class Reverse:
    """Strings of letters and digits, to be written backwards; lengths are log-normal.

    ``mean`` is that of the lengths, ``sigma`` the deviation of their logarithm: 1 for a heavy tail, 0.5 for a
    short one. Strings have 4 characters at least, and ``limit`` tokens at most with the one that ends them. A
    response is cut off 8 tokens behind the string's length: so responses have a tail whatever the policy.
    The reward is the share of characters that are right, counted from the start up to the first mistake: 1
    for the reversed string, less also for a longer response. 1,000 strings are held out, from a tenth of all
    strings, chosen by a checksum, that is never trained. Chance: a guess gets the first character right once
    in 62, and so less than 0.1 % of the reward.

    Example: the prompt ``x7Qb=`` has the answer ``bQ7x``; the response ``bQ77`` has reward 0.75.
    """

    is_quick = True

    def __init__(self, sigma: float = 1.0, mean: float = 60.0, limit: int = 480) -> None:
        if not 0.0 <= sigma <= 2.0:
            raise ConfigError(f"env.kwargs.sigma is {sigma}: it must be 0 to 2")
        if not _SHORTEST < limit <= _LONGEST_LIMIT:
            raise ConfigError(f"env.kwargs.limit is {limit}: it must be {_SHORTEST + 1} to {_LONGEST_LIMIT}")
        if not _SHORTEST <= mean < limit:
            raise ConfigError(f"env.kwargs.mean is {mean}: it must be {_SHORTEST} or more, and below limit")
        self.tokenizer = CharTokenizer(_LETTERS + "=", add_bos=False)
        self.max_new_tokens = self.max_prompt_tokens = limit
        self._sigma, self._median = sigma, math.log(mean) - sigma**2 / 2

    def num_problems(self, split: Split) -> int:
        """Return how many strings a split has."""
        return _NUM_HELD_OUT if split == "held_out" else _NUM_TRAIN

    def problem(self, split: Split, index: int) -> Problem:
        """Return a string, drawn anew until it belongs to the split."""
        draw = np.random.Generator(np.random.PCG64(derive_seed(0, f"reverse/{split}", index)))
        length = round(math.exp(self._median + self._sigma * draw.standard_normal()))
        length = min(max(length, _SHORTEST), self.max_new_tokens - 1)
        while True:
            text = "".join(_LETTERS[place] for place in draw.integers(len(_LETTERS), size=length))
            if _is_held_out(text) == (split == "held_out"):
                return Problem(f"{text}=", text[::-1], min(length + _SPARE, self.max_new_tokens))

    def reward(self, problem: Problem, response: str) -> float:
        """Return the share of right characters from the start."""
        pairs = zip(problem.answer, response, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return right / max(len(problem.answer), len(response))


def _is_held_out(text: str) -> bool:
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % _PARTS == 0
