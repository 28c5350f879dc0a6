"""Reward of the most likely responses to held-out problems."""

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
    sizes = [problem.max_new_tokens or task.max_new_tokens for problem in problems]
    engine = Engine(model, slots=min(_SLOTS, len(prompts)), max_length=max(map(len, prompts)) + max(sizes))
    found = engine.generate(
        Request(key, prompt, max_new_tokens=size, temperature=0.0)
        for key, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
    )
    rewards = [
        task.reward(problem, task.tokenizer.decode(one.tokens.tolist())) if one.end == "eos" else 0.0
        for problem, one in zip(problems, found, strict=True)
    ]
    return sum(rewards) / len(rewards)


class AccuracyEvaluator:
    """Evaluates the first ``episodes`` held-out problems of a task, or all where it has fewer."""

    def __init__(self, task: Task, shape: Shape, episodes: int) -> None:
        self._task, self._model, self._episodes = task, Decoder(shape), episodes

    def evaluate(self, weights: Mapping[str, Any], seed: int) -> Metrics:
        """Return the mean reward as ``eval/return_mean``."""
        self._model.set_weights({name: torch.as_tensor(value) for name, value in weights.items()})
        return {"eval/return_mean": accuracy(self._model, self._task, self._episodes)}
