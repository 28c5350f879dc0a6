"""Supervised training on a task's answers, until some problems are solved."""

from __future__ import annotations

import logging

import numpy as np
import torch

from offbeat.algorithms.grpo.config import WarmupConfig
from offbeat.algorithms.grpo.evaluator import accuracy
from offbeat.llm.model import Decoder, Packing
from offbeat.llm.tasks import Task
from offbeat.llm.tasks.base import expert_of, stop_ids_of
from offbeat.progress import report_progress
from offbeat.seeding import derive_seed

_log = logging.getLogger(__name__)
_CHECK_STEPS, _CHECK_PROBLEMS = 25, 256


def warm_up(model: Decoder, task: Task, config: WarmupConfig, seed: int) -> float:
    """Train until the accuracy on held-out problems is reached; return the accuracy at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    draw, reached = np.random.default_rng(derive_seed(seed, "warmup")), 0.0
    for step in range(1, config.most_steps + 1):
        _train(model, task, draw.integers(task.num_problems("train"), size=config.batch_size), optimizer)
        if step % _CHECK_STEPS == 0:
            reached = accuracy(model, task, _CHECK_PROBLEMS)
            report_progress(f"warm-up step {step}: {100 * reached:.0f} % solved")
            if config.accuracy is not None and reached >= config.accuracy:
                report_progress("")
                return reached
    _log.warning(
        "the warm-up ended after %d steps with %.0f %% of the held-out problems solved, below %.0f %%: raise "
        "algorithm.warmup.most_steps",
        config.most_steps,
        100 * reached,
        100 * (config.accuracy or 0.0),
    )
    return reached


def _train(model: Decoder, task: Task, indices: np.ndarray, optimizer: torch.optim.Optimizer) -> None:
    """Take one step on the answers to some problems."""
    tokens, is_answer, lengths = list[int](), list[bool](), []
    for index in indices.tolist():
        problem = task.problem("train", index)
        before = len(tokens)
        tokens += task.tokenizer.encode(problem.prompt)
        is_answer += [False] * (len(tokens) - before)
        for number, text in enumerate(expert_of(task, problem)):
            part = task.tokenizer.encode_more(text)
            is_own = number % 2 == 0
            if is_own and (not part or part[-1] not in stop_ids_of(task)):
                part.append(task.tokenizer.eos_ids[0])
            tokens += part
            is_answer += [is_own] * len(part)
        lengths.append(len(tokens) - before)
    found = model.log_probs(torch.tensor(tokens), Packing.of(lengths))
    loss = -found[torch.tensor(is_answer)].mean()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
