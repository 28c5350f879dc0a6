"""Sums whose reward takes its time, as that of a judge or a sandbox does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offbeat.llm.tasks.arithmetic import Arithmetic
from offbeat.llm.tasks.base import Dialogue, Problem
from offbeat.llm.tasks.latency import Latency


class SlowReward:
    """The sums of `Arithmetic`, rewarded after a simulated time.

    ``latency_s`` is its median, log-normal with ``latency_sigma``, and ``latency_limit_s`` the longest; it
    depends on the response alone. 0: no time.
    """

    def __init__(
        self,
        digits: int = 2,
        latency_s: float = 0.0,
        latency_sigma: float = 1.0,
        latency_limit_s: float = 8.0,
    ) -> None:
        self._sums = Arithmetic(digits)
        self._latency = Latency(latency_s, latency_sigma, latency_limit_s)
        self.is_quick = not latency_s
        self.reward: Callable[..., Any] = self._sums.reward if self.is_quick else self._late
        self.tokenizer, self.max_new_tokens = self._sums.tokenizer, self._sums.max_new_tokens
        self.max_prompt_tokens = self._sums.max_prompt_tokens
        self.num_problems, self.problem = self._sums.num_problems, self._sums.problem

    async def _late(self, problem: Problem, response: str, dialogue: Dialogue) -> float:
        await self._latency.wait(dialogue.seed, 0)
        return self._sums.reward(problem, response)
