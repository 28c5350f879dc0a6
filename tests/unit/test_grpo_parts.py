"""Parts of GRPO: advantages, losses, packing, tasks, begun work that is cut back."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from offbeat.algorithms.grpo.config import GRPOConfig, WarmupConfig
from offbeat.algorithms.grpo.dropping import why_dropped
from offbeat.algorithms.grpo.evaluator import AccuracyEvaluator
from offbeat.algorithms.grpo.metrics import by_age, round_metrics
from offbeat.algorithms.grpo.warmup import _draw, warm_up
from offbeat.errors import ConfigError
from offbeat.llm.conversation import from_tree, to_tree
from offbeat.llm.model import Decoder
from offbeat.llm.packing import micro_batches
from offbeat.llm.requests import Response
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Problem, Task, make_task
from offbeat.llm.tasks.arithmetic import Arithmetic
from offbeat.llm.tasks.base import Split
from offbeat.types import Answer, Piece, Segment, Span, Ticket


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


@pytest.mark.parametrize(
    ("rewards", "settings", "reason"),
    [
        ([1.0, 1.0], {}, ""),
        ([1.0, 1.0], {"dynamic_sampling": True}, "no_spread"),
        ([1.0, 0.0], {"dynamic_sampling": True}, ""),
        ([1.0, math.nan], {"dynamic_sampling": True}, "reward_failed"),
        ([1.0, math.inf], {}, "reward_failed"),
        ([1.0, 1.0, math.nan], {"dynamic_sampling": True}, "no_spread"),
        ([1.0], {"loss": "ppo", "group_size": 1}, ""),
        ([math.nan], {"loss": "ppo", "group_size": 1}, "reward_failed"),
    ],
)
def test_groups_that_are_dropped(rewards: list[float], settings: dict[str, Any], reason: str) -> None:
    assert why_dropped(np.array(rewards), GRPOConfig(**settings)) == reason


@pytest.mark.parametrize("sigma", [1.0, 0.5])
def test_strings_to_reverse_have_the_lengths_that_were_asked_for(sigma: float) -> None:
    task = make_task("reverse", {"sigma": sigma})
    lengths = np.array([len(task.problem("train", index).answer) for index in range(3_000)])
    assert lengths.mean() == pytest.approx(60, rel=0.06)
    assert np.log(lengths).std() == pytest.approx(sigma, rel=0.05)
    assert np.median(lengths) == pytest.approx(60 * math.exp(-(sigma**2) / 2), rel=0.08)
    assert lengths.min() >= 4
    assert lengths.max() < task.max_new_tokens == task.max_prompt_tokens == 480


def test_no_string_to_reverse_is_trained_and_held_out() -> None:
    task = make_task("reverse", {"mean": 6, "sigma": 0.5})  # short ones, which could be the same
    held_out = {task.problem("held_out", index).prompt for index in range(task.num_problems("held_out"))}
    trained = {task.problem("train", index).prompt for index in range(20_000)}
    assert len(held_out) >= 990
    assert not held_out & trained
    assert task.problem("train", 7) == make_task("reverse", {"mean": 6, "sigma": 0.5}).problem("train", 7)


def test_reward_of_a_reversed_string_counts_up_to_the_first_mistake() -> None:
    task, problem = make_task("reverse", {}), Problem("x7Qb=", "bQ7x")
    responses = {"bQ7x": 1.0, "bQ77": 0.75, "bQ": 0.5, "aQ7x": 0.0, "": 0.0, "bQ7xbQ7x": 0.5}
    assert {text: task.reward(problem, text) for text in responses} == responses


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "reverse", "slow_reward"])
def test_no_prompt_or_answer_is_longer_than_its_task_says(name: str) -> None:
    task = make_task(name, {})
    problems = [task.problem(split, index) for split in ("train", "held_out") for index in range(1_000)]
    assert max(len(task.tokenizer.encode(one.prompt)) for one in problems) == task.max_prompt_tokens
    assert max(len(task.tokenizer.encode(one.answer)) for one in problems) < task.max_new_tokens


def test_warm_up_on_short_answers_alone() -> None:
    task = make_task("reverse", {})
    batch = _draw(task, WarmupConfig(batch_size=40, most_tokens=9), np.random.default_rng(0))
    assert len(batch) == 40
    assert max(sum(is_answer) for _, is_answer in batch) == 9
    with pytest.raises(ConfigError, match="most_tokens"):
        _draw(task, WarmupConfig(batch_size=2, most_tokens=3), np.random.default_rng(0))


def segment_of(spans: list[tuple[Span, ...]], made_s: list[float], rewards: list[float]) -> Segment:
    """Two responses, the first of which was given a token after its first own one."""
    versions = [span.version for one in spans for span in one for _ in range(span.size)]
    is_own = np.array([True, False] + [True] * (len(versions) - 1))
    data = {"made_s": np.array(made_s), "is_own": is_own, "rewards": np.array(rewards)}
    data["load"] = np.array([4.0, 20.0, 2.0, 8.0, 10.0, 0.5])
    pieces = tuple(Piece(one, "eos" if index else "length") for index, one in enumerate(spans))
    ticket = Ticket(0, 0, 3, 5, 0)
    return Segment(ticket, data, np.array(versions), {"tokens": len(versions)}, pieces=pieces)


def test_metrics_of_a_round_by_hand() -> None:
    spans = [(Span(3, 1), Span(4, 1)), (Span(5, 2),)]
    segments = [segment_of(spans, [90.0, math.nan, 92.0, 96.0, math.nan], [1.0, 0.0])] * 2
    found = round_metrics(segments, 100.0)
    assert found["pace/avg_sample_age_s"] == pytest.approx((10 + 8 + 4) / 3)
    assert found["pace/max_sample_age_s"] == pytest.approx(10.0)
    assert found["rollout/mixed_ratio"] == found["rollout/truncated_ratio"] == 0.5
    assert (found["rollout/versions_max"], found["rollout/length_max"]) == (2.0, 2.0)
    assert (found["rollout/no_signal_ratio"], found["rollout/return_std"]) == (0.0, 0.5)
    loads = ("live_rows_mean", "held_slots_mean", "waiting_responses_mean", "free_slots_mean")
    assert [found[f"rollout/{name}"] for name in loads] == [5.0, 0.5, 2.0, 2.5]
    assert found["rollout/engine_tokens_per_s"] == 40.0


def test_price_of_staleness_by_age() -> None:
    ratios = np.log(np.array([1.0, 1.0, 2.0, 0.5], np.float32))
    found = by_age(ratios, np.array([0, 0, 2, 2]))
    assert found["learn/ess_age_0"] == 1.0
    assert found["learn/behaviour_kl_age_0"] == 0.0
    assert found["learn/ess_age_2"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert found["learn/behaviour_kl_age_2"] == pytest.approx(((1 - math.log(2)) + (-0.5 + math.log(2))) / 2)
    assert "learn/ess_age_1" not in found


build = importlib.import_module("offbeat.algorithms.grpo.build")  # the package has a function of that name


def tiny_shape(task: Task) -> Shape:
    eos_ids = task.tokenizer.eos_ids
    return Shape(
        "LlamaForCausalLM", task.tokenizer.vocab_size, 16, 1, 2, 1, 8, 16, tied=True, eos_ids=eos_ids
    )


def test_evaluations_take_as_many_held_out_problems_as_asked_for() -> None:
    class Counting(Arithmetic):
        asked: ClassVar[list[tuple[str, int]]] = []

        def problem(self, split: Split, index: int) -> Problem:
            self.asked.append((split, index))
            return super().problem(split, index)

    task = Counting()
    evaluator = AccuracyEvaluator(GRPOConfig(), task, tiny_shape(task), episodes=3)
    weights = {name: one.numpy() for name, one in Decoder(tiny_shape(task)).initialize(0).weights().items()}
    assert 0.0 <= evaluator.evaluate(weights, 0)["eval/return_mean"] <= 1.0
    assert task.asked == [("held_out", index) for index in range(3)]


def test_prompts_that_do_not_fit_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(tiny_shape(make_task("reverse", {})), max_positions=480)
    monkeypatch.setattr(build, "shape_of", lambda model, task: shape)
    config = offbeat.load_config("reverse-grpo")
    with pytest.raises(ConfigError, match=r"prompts of reverse have up to 480 tokens.*480 positions"):
        build.check(config)
    build.check(offbeat.load_config("reverse-grpo", {"env.kwargs": {"limit": 400}}))


@pytest.mark.parametrize("kwargs", [{"sigma": -1}, {"mean": 500}, {"limit": 4}, {"limit": 5_000}])
def test_strings_of_impossible_lengths_are_refused(kwargs: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"env\.kwargs\.(sigma|mean|limit) is"):
        make_task("reverse", kwargs)
