"""Parts of GRPO: advantages, losses, packing, tasks, begun work that is cut back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.algorithms.grpo.config import WarmupConfig
from offbeat.algorithms.grpo.warmup import warm_up
from offbeat.errors import ConfigError
from offbeat.llm.conversation import from_tree, to_tree
from offbeat.llm.model import Decoder
from offbeat.llm.packing import micro_batches
from offbeat.llm.requests import Response
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import make_task
from offbeat.ops.group_advantages import group_advantages
from offbeat.ops.token_losses import clipped_token_loss
from offbeat.types import Answer, Span


def test_advantages_by_hand() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    deviation = math.sqrt(4 * 0.25 / 3)
    expected = np.array([0.5, -0.5, -0.5, 0.5])
    assert group_advantages(rewards, norm="none").tolist() == expected.tolist()
    assert group_advantages(rewards, eps=0.0) == pytest.approx(expected / deviation)
    assert group_advantages(np.ones(4)).tolist() == [0.0] * 4


def test_token_loss_and_gradient_by_hand() -> None:
    """Ratios 1, 2 and 1/2 with either sign of the advantage; clipped at 0.8 and 1.28."""
    log_probs = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5, 0.25, 0.25]))
    behaviour = torch.log(torch.tensor([0.5, 0.5, 0.25, 0.25, 0.5, 0.5]))
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])
    log_probs.requires_grad_()
    loss = clipped_token_loss(log_probs, behaviour, advantages, clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-2.0, 2.0, -2.56, 4.0, -1.0, 1.6])
    loss.sum().backward()
    # At ratio 1 the gradient is -A; where the clipped term is the smaller one there is none.
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-2.0, 2.0, 0.0, 4.0, -1.0, 0.0])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 100))
def test_micro_batches_hold_each_sequence_once_within_the_budget(lengths: list[int], most: int) -> None:
    batches = micro_batches(lengths, most)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[index] for index in batch) <= most for batch in batches)


def test_sums_are_right_and_held_out_ones_are_not_trained() -> None:
    task = make_task("arithmetic", {"digits": 2})
    held_out = {task.problem("held_out", index).prompt for index in range(task.num_problems("held_out"))}
    trained = {task.problem("train", index).prompt for index in range(task.num_problems("train"))}
    assert (len(held_out), len(trained)) == (1_000, 9_000)
    assert not held_out & trained
    problem = task.problem("train", 5)
    left, right = (int(part[::-1]) for part in problem.prompt.removesuffix("=").split("+"))
    assert int(problem.answer[::-1]) == left + right
    assert (task.reward(problem, problem.answer), task.reward(problem, problem.answer + "0")) == (1.0, 0.0)
    assert len(task.tokenizer.encode(problem.answer)) + 1 <= task.max_new_tokens


@pytest.mark.parametrize(
    ("name", "kwargs"), [("sums", {}), ("arithmetic", {"digit": 2}), ("arithmetic", {"digits": 9})]
)
def test_tasks_that_cannot_be_made_are_refused(name: str, kwargs: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"env\.(id|kwargs)"):
        make_task(name, kwargs)


def test_warm_up_reaches_an_accuracy_or_says_so(caplog: pytest.LogCaptureFixture) -> None:
    task = make_task("arithmetic", {})
    shape = Shape(
        "LlamaForCausalLM",
        task.tokenizer.vocab_size,
        16,
        1,
        2,
        1,
        8,
        16,
        tied=True,
        eos_ids=task.tokenizer.eos_ids,
    )
    reached = warm_up(Decoder(shape).initialize(0), task, WarmupConfig(accuracy=0.9, most_steps=26), 0)
    assert reached < 0.9
    assert "raise algorithm.warmup.most_steps" in caplog.text


ANSWERS = [Answer(0, "12"), Answer(1, 1.0)]


def test_begun_work_is_cut_back_to_the_versions_that_there_are() -> None:
    """Two own tokens of version 3, two given ones, one of version 4 and one of version 5."""
    is_own = np.array([True, True, False, False, True, True])
    whole = Response(
        7,
        1,
        np.arange(6, dtype=np.int32),
        np.zeros(6, np.float32),
        is_own,
        (Span(3, 2), Span(4, 1), Span(5, 1)),
        "eos",
    )
    for version, length, end in ((5, 6, "eos"), (4, 5, ""), (3, 4, ""), (2, 0, "")):
        cut, answers = from_tree(7, 1, to_tree(whole, ANSWERS, whole.end), version)
        assert (len(cut.tokens), len(cut.is_own), cut.end) == (length, length, end)
        assert all(span.version <= version for span in cut.spans)
        assert sum(span.size for span in cut.spans) == cut.is_own.sum()
        assert answers == (ANSWERS if end else ANSWERS[:1] if length else [])
