"""Share of held-out problems that the most likely response solves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder
from offbeat.llm.requests import Request
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Task
from offbeat.types import Metrics

_SLOTS = 128


def accuracy(model: Decoder, task: Task, count: int) -> float:
    """Return the mean reward of greedy responses to the first ``count`` held-out problems."""
    problems = [task.problem("held_out", index) for index in range(min(count, task.num_problems("held_out")))]
    prompts = [tuple(task.tokenizer.encode(problem.prompt)) for problem in problems]
    longest = max(map(len, prompts)) + task.max_new_tokens
    engine = Engine(model, slots=_SLOTS, max_length=longest)
    found = engine.generate(
        Request(key, prompt, max_new_tokens=task.max_new_tokens, temperature=0.0)
        for key, prompt in enumerate(prompts)
    )
    rewards = [
        task.reward(problem, task.tokenizer.decode(one.tokens.tolist())) if one.end == "eos" else 0.0
        for problem, one in zip(problems, found, strict=True)
    ]
    return sum(rewards) / len(rewards)


class AccuracyEvaluator:
    """Evaluates all held-out problems of a task."""

    def __init__(self, task: Task, shape: Shape) -> None:
        self._task, self._model = task, Decoder(shape)

    def evaluate(self, weights: Mapping[str, Any], seed: int) -> Metrics:
        """Return the accuracy as ``eval/return_mean``."""
        self._model.set_weights({name: torch.as_tensor(value) for name, value in weights.items()})
        return {"eval/return_mean": accuracy(self._model, self._task, self._task.num_problems("held_out"))}
