"""Rewards with the signatures that people have, tasks of users, and tasks that come with offbeat."""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.errors import ConfigError
from offbeat.llm.rewards import named_reward, task_reward
from offbeat.llm.tasks import Dialogue, Problem, Turn, check_expert, make_task
from offbeat.llm.tasks.latency import Latency
from tests.unit.talk_fakes import Letters, Talks

FAKES = "tests.unit.reward_fakes"
PROBLEM = Problem("2+2=", "4", source="sums", extra={"level": 1})


def value_of(name: str, response: str, problem: Problem = PROBLEM) -> float:
    found = named_reward(f"{FAKES}:{name}")(Dialogue(problem, ("?", response), ("5",)))
    return asyncio.run(found) if inspect.isawaitable(found) else found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("compute_score", 5.0, 4.0),
        ("simple_score", 1.0, 0.0),
        ("exact", 1.0, 0.0),
        ("lengths", 1.0, 2.0),
        ("ours", 1.0, 0.0),
        ("turns", 2.0, 2.0),
    ],
)
def test_rewards_of_all_signatures(name: str, right: float, wrong: float) -> None:
    assert value_of(name, "4") == right
    assert value_of(name, "44") == wrong


def test_none_is_no_reward() -> None:
    assert math.isnan(value_of("lengths", "4", Problem("2+2=", "4", extra={"level": 0})))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{FAKES}:anything", "takes .command.: a reward is"),
        (f"{FAKES}:Clever", "is no function"),
        (f"{FAKES}:nothing", "cannot be imported"),
        ("os:system", "module of Python itself"),
        ("no_such_module:reward", "cannot be imported"),
    ],
)
def test_what_is_no_reward_is_refused_before_it_is_called(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_reward(name)
    config = offbeat.load_config("arithmetic-grpo", {"algorithm.reward.function": name})
    with pytest.raises(ConfigError, match=message):
        offbeat.algorithms.find("grpo").check(config)  # type: ignore[misc]


def test_reward_of_a_task_may_take_the_dialogue() -> None:
    assert task_reward(Letters())(Dialogue(PROBLEM, ("ab",))) == 2.0  # type: ignore[arg-type]


# ---------------------------------------------------------------- tasks of users


class Bare:
    """A class that is no task."""


class Overlapping(Letters):
    def problem(self, split: Any, index: int) -> Problem:
        return Problem(f"b{'a' * (index % 4)}", "a")


class Roomless(Talks):
    def __init__(self) -> None:
        super().__init__()
        self.max_given_tokens = 0


class Both(Talks):
    async def episode(self, chat: Any, problem: Problem) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Bare", "no class of a task"),
        ("Overlapping", "trains on .* held out"),
        ("Roomless", "max_given_tokens"),
        ("Both", "step and episode"),
        ("nothing", "cannot be imported"),
    ],
)
def test_tasks_of_users_that_cannot_be_trained_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(f"{__name__}:{name}", {})


def test_answers_that_cannot_be_warmed_up_on_are_refused() -> None:
    class Long(Letters):
        def expert(self, problem: Problem) -> tuple[str, ...]:
            return ("ab" * 20,)

    class Strange(Letters):
        def expert(self, problem: Problem) -> tuple[str, ...]:
            return ("xyz",)

    check_expert(Letters())  # type: ignore[arg-type]
    for task, message in ((Long(), "max_new_tokens is 24: raise it"), (Strange(), "cannot be warmed up on")):
        with pytest.raises(ConfigError, match=message):
            check_expert(task)  # type: ignore[arg-type]


# ---------------------------------------------------------------- tasks of ours


def test_calculator_is_right_and_held_out_expressions_are_not_trained() -> None:
    task: Any = make_task("calculator", {})
    problems = {
        split: [task.problem(split, index) for index in range(task.num_problems(split))]
        for split in ("held_out", "train")
    }
    held_out, trained = ({one.prompt for one in problems[split]} for split in ("held_out", "train"))
    assert (len(held_out), len(trained)) == (1_000, 20_000)
    assert not held_out & trained
    calls = set()
    for problem in problems["held_out"]:
        assert eval(problem.prompt.removesuffix("=")) == int(problem.answer)
        texts = task.expert(problem)
        calls.add(len(texts) // 2)
        assert texts[-1] == problem.answer
        for turn in range(0, len(texts) - 1, 2):
            dialogue = Dialogue(problem, texts[: turn + 1 : 2], texts[1:turn:2])
            assert task.step(dialogue) == Turn(texts[turn + 1])
        assert task.step(Dialogue(problem, texts[::2], texts[1::2])) == Turn(reward=1.0)
        assert sum(map(len, texts[::2])) < task.max_new_tokens
    assert calls == {1, 2, 3, 4}
    assert task.step(Dialogue(problems["train"][0], ("1++2?",))) == Turn("!;")
    assert task.step(Dialogue(problems["train"][0], ("1-2?",))) == Turn("!;")
    assert task.step(Dialogue(problems["train"][0], ("1+2?",) * 6, ("3;",) * 5)) == Turn(reward=0.0)


def test_latency_is_log_normal_and_depends_on_response_and_turn_alone() -> None:
    latency = Latency(0.15, 1.0, 5.0)
    times = np.array([latency.seconds(seed, 0) for seed in range(4_000)])
    assert np.median(times) == pytest.approx(0.15, rel=0.06)
    assert np.log(times).std() == pytest.approx(1.0, rel=0.05)
    assert times.max() <= 5.0
    assert latency.seconds(3, 1) == latency.seconds(3, 1) != latency.seconds(3, 2)
    assert Latency(0.0, 1.0, 5.0).seconds(3, 1) == 0.0
    with pytest.raises(ConfigError, match="latency"):
        Latency(-1.0, 1.0, 5.0)


@pytest.mark.parametrize("name", ["calculator", "slow_reward"])
def test_latency_changes_no_answer(name: str) -> None:
    quick, slow = (make_task(name, {"latency_s": one}) for one in (0.0, 1e-4))
    problem = quick.problem("train", 3)
    dialogue = Dialogue(problem, (problem.answer,), (), 5)
    method = "step" if name == "calculator" else "reward"
    arguments = (dialogue,) if name == "calculator" else (problem, problem.answer, dialogue)
    later = asyncio.run(getattr(slow, method)(*arguments))
    now = getattr(quick, method)(*arguments[: 1 if name == "calculator" else 2])
    assert later == now
    assert (quick.is_quick, slow.is_quick) == (True, False)  # type: ignore[attr-defined]
