"""Mean reward of the most likely responses to held-out problems."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import torch

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.errors import EvalError
from offbeat.llm.dialogues import Dialogues
from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder
from offbeat.llm.rewards import Reward
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Task
from offbeat.llm.tasks.base import Limits, most_tokens
from offbeat.types import Metrics

_SLOTS = 128
_LOOK_S = 1.0


def accuracy(
    model: Decoder, task: Task, count: int, limits: Limits | None = None, reward: Reward | None = None
) -> float:
    """Return the mean reward of greedy responses to the first ``count`` held-out problems.

    Those that have no reward, since it failed, are left out; EvalError when none has one.
    """
    limits = limits or Limits(task.max_new_tokens)
    problems = [task.problem("held_out", index) for index in range(min(count, task.num_problems("held_out")))]
    prompts = [tuple(task.tokenizer.encode(problem.prompt)) for problem in problems]
    sizes = [min(limits.max_new_tokens, one.max_new_tokens or limits.max_new_tokens) for one in problems]
    longest = max(map(len, prompts)) + most_tokens(task, max(sizes))
    slots, most = min(_SLOTS, len(prompts)), model.shape.max_positions
    engine = Engine(model, slots=slots, max_length=min(longest, most))
    woken = threading.Event()
    dialogues = Dialogues(engine, task, limits, woken.set, temperature=0.0, reward=reward)
    for key, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
        dialogues.begin(key, problem, prompt)
    rewards: dict[int, float] = {}
    while len(rewards) < len(problems):
        woken.clear()
        over = dialogues.step()
        rewards |= {one.key: one.reward for one in over}
        if not over and not dialogues.is_busy:
            woken.wait(_LOOK_S)
    found = [rewards[key] for key in sorted(rewards) if math.isfinite(rewards[key])]
    if not found:
        raise EvalError("no response has a reward: all of them failed, or took too long")
    return sum(found) / len(found)


class AccuracyEvaluator:
    """Evaluates the first ``episodes`` held-out problems of a task, or all where it has fewer."""

    def __init__(
        self, config: GRPOConfig, task: Task, shape: Shape, episodes: int, reward: Reward | None = None
    ) -> None:
        self._task, self._model, self._reward = task, Decoder(shape), reward
        self._episodes = episodes
        self._limits = config.limits(config.max_new_tokens or task.max_new_tokens)

    def evaluate(self, weights: Mapping[str, Any], seed: int) -> Metrics:
        """Return the mean reward as ``eval/return_mean``."""
        self._model.set_weights({name: torch.as_tensor(value) for name, value in weights.items()})
        found = accuracy(self._model, self._task, self._episodes, self._limits, self._reward)
        return {"eval/return_mean": found}
