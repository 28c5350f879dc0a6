"""Nested sums, differences and products that a calculator works out, one operation per call."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from offbeat.errors import ConfigError
from offbeat.llm.tasks.base import Dialogue, Problem, Split, Turn
from offbeat.llm.tasks.latency import Latency
from offbeat.llm.tokens import CharTokenizer

_NUM_HELD_OUT, _NUM_TRAIN = 1_000, 20_000
_MOST_VALUE = 999
_EXTRA_CALLS = 1
_LONGEST_PROMPT = 21
_CALL = re.compile(r"(\d{1,4})([+*-])(\d{1,4})\?")


class Calculator:
    """Expressions such as ``((3+4)*5)-6=`` with one to ``max_calls`` operations, the innermost first.

    The model writes ``3+4?``, the calculator answers ``7;``, and so on; the turn ``29`` is the answer, and
    the reward 1 if it is right, else 0. A call that is none is answered ``!;``. Values are whole numbers from
    0 to 999, the most frequent of which is right about once in 100. 1,000 expressions are held out, none of
    which is among the 20,000 to train on.

    ``latency_s`` is the median of the simulated time of a call, log-normal with ``latency_sigma``, and
    ``latency_limit_s`` the longest; it depends on the response and the turn alone. 0: no time.
    """

    def __init__(
        self,
        max_calls: int = 4,
        latency_s: float = 0.0,
        latency_sigma: float = 1.0,
        latency_limit_s: float = 5.0,
    ) -> None:
        if not 1 <= max_calls <= 4:
            raise ConfigError(f"env.kwargs.max_calls is {max_calls}: it must be 1 to 4")
        self.tokenizer = CharTokenizer("0123456789+-*()=?;!", add_bos=False)
        self.stop_ids = (*self.tokenizer.eos_ids, *self.tokenizer.encode("?"))
        self._most_calls = max_calls + _EXTRA_CALLS
        self.max_new_tokens = 8 * self._most_calls + 4
        self.max_given_tokens = 8 * self._most_calls
        self._latency = Latency(latency_s, latency_sigma, latency_limit_s)
        self.is_quick = not latency_s
        self.step: Callable[[Dialogue], Any] = self._answer if self.is_quick else self._answer_late
        self.max_prompt_tokens = _LONGEST_PROMPT
        problems = _draw(max_calls, _NUM_HELD_OUT + _NUM_TRAIN)
        self._problems = {"held_out": problems[:_NUM_HELD_OUT], "train": problems[_NUM_HELD_OUT:]}

    def num_problems(self, split: Split) -> int:
        """Return how many expressions a split has."""
        return len(self._problems[split])

    def problem(self, split: Split, index: int) -> Problem:
        """Return an expression."""
        prompt, answer = self._problems[split][index]
        return Problem(prompt, answer)

    def expert(self, problem: Problem) -> tuple[str, ...]:
        """Return the calls that work an expression out, each with its answer, and the result."""
        left, *rest = re.findall(r"\d+|[+*-]", problem.prompt)
        texts: list[str] = []
        for sign, right in zip(rest[::2], rest[1::2], strict=True):
            call = f"{left}{sign}{right}?"
            answer = _calculate(call)
            texts += [call, answer]
            left = answer.removesuffix(";")
        return (*texts, left)

    def _answer(self, dialogue: Dialogue) -> Turn:
        """Answer a call; a turn that is none is the answer."""
        text = dialogue.turns[-1]
        if text.endswith("?") and len(dialogue.turns) <= self._most_calls:
            return Turn(_calculate(text))
        return Turn(reward=self.reward(dialogue.problem, text))

    async def _answer_late(self, dialogue: Dialogue) -> Turn:
        turn = self._answer(dialogue)
        if turn.text:
            await self._latency.wait(dialogue.seed, len(dialogue.turns) - 1)
        return turn

    def reward(self, problem: Problem, response: str) -> float:
        """Return 1.0 for the right answer."""
        return float(response == problem.answer)


def _calculate(call: str) -> str:
    """Return what the calculator answers."""
    found = _CALL.fullmatch(call)
    if found is None:
        return "!;"
    value = _value(int(found[1]), found[2], int(found[3]))
    return f"{value};" if 0 <= value <= _MOST_VALUE else "!;"


def _value(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right if sign == "-" else left * right


def _draw(max_calls: int, count: int) -> list[tuple[str, str]]:
    """Draw different expressions with their values."""
    rng, found = random.Random(max_calls), dict[str, str]()
    while len(found) < count:
        value = rng.randrange(1, 100)
        text = str(value)
        for number in range(rng.randint(1, max_calls)):
            sign = rng.choice("+-*")
            right = rng.randrange(2, 10) if sign == "*" else rng.randrange(1, 100)
            if not 0 <= _value(value, sign, right) <= _MOST_VALUE:
                sign, right = "+" if value <= _MOST_VALUE // 2 else "-", right % 10
            value = _value(value, sign, right)
            text = f"({text}){sign}{right}" if number else f"{text}{sign}{right}"
        found[f"{text}="] = str(value)
    return list(found.items())
