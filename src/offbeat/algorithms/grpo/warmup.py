"""Supervised training on a task's answers, until some problems are solved."""

from __future__ import annotations

import logging

import numpy as np
import torch

from offbeat.algorithms.grpo.config import WarmupConfig
from offbeat.algorithms.grpo.evaluator import accuracy
from offbeat.errors import ConfigError
from offbeat.llm.model import Decoder, Packing
from offbeat.llm.packing import micro_batches
from offbeat.llm.tasks import Problem, Task
from offbeat.llm.tasks.base import expert_of, stop_ids_of
from offbeat.progress import report_progress
from offbeat.seeding import derive_seed

_log = logging.getLogger(__name__)
_CHECK_PROBLEMS, _MOST_DRAWS = 256, 1_000
_TOKENS_AT_ONCE = 2_048
"""Fewer than a round's: sequences of very different lengths are padded to the longest."""
_Encoded = tuple[list[int], list[bool]]
"""Prompt and answer as token ids, and which of them are to be learned."""


def warm_up(model: Decoder, task: Task, config: WarmupConfig, seed: int) -> float:
    """Train until the accuracy on held-out problems is reached; return the accuracy at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    draw, reached = np.random.default_rng(derive_seed(seed, "warmup")), 0.0
    for step in range(1, config.most_steps + 1):
        _train(model, _draw(task, config, draw), optimizer)
        if step % config.check_steps == 0:
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


def _draw(task: Task, config: WarmupConfig, draw: np.random.Generator) -> list[_Encoded]:
    """Return the problems of one step, without those whose answers are too long."""
    found: list[_Encoded] = []
    for _ in range(_MOST_DRAWS):
        for index in draw.integers(task.num_problems("train"), size=config.batch_size - len(found)).tolist():
            tokens, is_answer = _encoded(task, task.problem("train", index))
            if config.most_tokens is None or sum(is_answer) <= config.most_tokens:
                found.append((tokens, is_answer))
        if len(found) == config.batch_size:
            return found
    raise ConfigError(
        f"algorithm.warmup.most_tokens is {config.most_tokens}, and hardly any answer is as short: raise it"
    )


def _encoded(task: Task, problem: Problem) -> _Encoded:
    """Return a problem with the turns of a good dialogue; those of the model end with a stop token."""
    tokens = task.tokenizer.encode(problem.prompt)
    is_answer = [False] * len(tokens)
    for number, text in enumerate(expert_of(task, problem)):
        part, is_own = task.tokenizer.encode_more(text), number % 2 == 0
        if is_own and (not part or part[-1] not in stop_ids_of(task)):
            part.append(task.tokenizer.eos_ids[0])
        tokens += part
        is_answer += [is_own] * len(part)
    return tokens, is_answer


def _train(model: Decoder, batch: list[_Encoded], optimizer: torch.optim.Optimizer) -> None:
    """Take one step on the answers to some problems."""
    lengths = [len(tokens) for tokens, _ in batch]
    num_answers = sum(sum(is_answer) for _, is_answer in batch)
    for indices in micro_batches(lengths, _TOKENS_AT_ONCE):
        tokens = [token for index in indices for token in batch[index][0]]
        is_answer = [own for index in indices for own in batch[index][1]]
        found = model.log_probs(torch.tensor(tokens), Packing.of([lengths[index] for index in indices]))
        loss = -found[torch.tensor(is_answer)].sum() / num_answers
        loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
