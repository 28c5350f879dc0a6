"""Responses with tools and rewards: caches, slots, failures, cuts, begun work, records that are repeated."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import numpy as np
import pytest

from offbeat.errors import TaskError
from offbeat.llm.conversation import from_tree, to_tree
from offbeat.llm.tasks import Chat, Dialogue, Problem, Turn
from offbeat.llm.tokens import CharTokenizer
from offbeat.types import TIMEOUT, Answer
from tests.unit.talk_fakes import Desk, Episodes, Letters, Talks, same


def test_answers_are_in_the_response_and_are_not_its_own() -> None:
    desk = Desk(task := Talks())
    desk.begin(8)
    over = desk.finish(32)
    several = [one for one in over.values() if len(one.answers) > 1]
    assert several, "no response has several turns"
    for one in several:
        texts = [answer.value for answer in one.answers[:-1]]
        assert texts == ["ab;"] * len(texts)
        given = task.tokenizer.decode(one.whole.tokens[~one.whole.is_own].tolist())
        assert given == "ab;" * len(texts)
        assert not one.whole.log_probs[~one.whole.is_own].any()
        assert [answer.turn for answer in one.answers] == list(range(len(one.answers)))
        assert sum(span.size for span in one.whole.spans) == one.whole.is_own.sum()
    finished = [one for one in over.values() if one.end == "eos"]
    for one in finished:
        dialogue = one.dialogue(task.tokenizer)
        assert one.reward == len(dialogue.turns[-1])
        assert all(turn.endswith("?") for turn in dialogue.turns[:-1])
    assert {one.reward for one in over.values() if one.end == "length"} <= {0.0}


def test_a_response_that_waits_for_a_tool_keeps_its_cache_and_is_no_row() -> None:
    desk = Desk(Talks(wait_s=1.0), slots=8)
    desk.begin(2)
    desk.finish(8, until=lambda: desk.dialogues.num_waiting("tool") == 8 and not desk.engine.is_busy)
    assert (desk.engine.num_held, desk.engine.num_rows, desk.engine.num_free) == (8, 0, 0)
    assert not desk.dialogues.is_busy
    over = desk.finish(8)
    assert all(one.tool_s >= 1.0 for one in over.values() if one.end != "length")
    assert desk.engine.num_free == 8


@pytest.mark.parametrize("make", [Letters, Talks])
def test_a_response_that_waits_for_its_reward_holds_no_slot(make: type[Letters]) -> None:
    async def reward(problem: Problem, response: str) -> float:
        await asyncio.sleep(0.5)
        return 1.0

    desk = Desk(make(reward=reward), slots=8)
    desk.begin(4)
    over = desk.finish(16, until=lambda: desk.dialogues.num_waiting("reward") >= 9)
    assert desk.dialogues.num_waiting("reward") >= 9  # more than there are slots
    waits = desk.dialogues.num_waiting
    desk.finish(16 - len(over), until=lambda: not desk.engine.is_busy and not waits("tool"))
    assert (desk.engine.num_held, desk.engine.num_free) == (0, 8)


def test_what_a_response_is_does_not_depend_on_time_slots_or_the_kind_of_task() -> None:
    """Answers that come late, few slots and an episode in the place of steps change no token."""
    first = Desk(Talks())
    first.begin(6)
    expected = first.finish(24)
    for desk in (Desk(Talks(wait_s=0.01), slots=3), Desk(Episodes(), slots=5)):
        desk.begin(6)
        for name, one in desk.finish(24).items():
            assert one.whole.tokens.tolist() == expected[name].whole.tokens.tolist()
            assert one.whole.log_probs.tobytes() == expected[name].whole.log_probs.tobytes()
            assert one.end == expected[name].end


class Impatient(Episodes):
    """Asks what is refused, and does not wait for the refusal."""

    async def episode(self, chat: Chat, problem: Problem) -> float:
        await chat.generate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(chat.generate(), 0.01)
        return 1.0


def test_an_episode_that_has_failed_and_returns_all_the_same_is_over_once() -> None:
    desk = Desk(Impatient())
    desk.begin(2)
    found = dict[tuple[int, int], float]()
    give_up_s = time.monotonic() + 30.0
    while len(found) < 8:
        assert time.monotonic() < give_up_s
        found |= {one.name: one.reward for one in desk.dialogues.step()}
        if not desk.dialogues.is_busy:
            time.sleep(0.05)  # question and end come together
    assert all(map(math.isnan, found.values()))


def raises(problem: Problem, response: str) -> float:
    raise ValueError("no reward today")


def hangs(problem: Problem, response: str) -> float:
    time.sleep(1.0)
    return 1.0


async def waits(problem: Problem, response: str) -> float:
    await asyncio.sleep(60.0)
    return 1.0


def wrong(problem: Problem, response: str) -> object:
    return "much"


def not_a_number(problem: Problem, response: str) -> float:
    return math.nan


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        (raises, "ValueError: no reward today"),
        (hangs, TIMEOUT),
        (waits, TIMEOUT),
        (wrong, "ValueError: could not convert string to float: 'much'"),
        (not_a_number, "the reward nan is not finite"),
    ],
)
@pytest.mark.parametrize("is_quick", [False, True])
def test_a_reward_that_fails_is_none(reward: object, error: str, is_quick: bool) -> None:
    if is_quick and error == TIMEOUT:
        pytest.skip("what is quick has no limit")
    task = Letters(reward=reward)  # type: ignore[arg-type]
    task.is_quick = is_quick  # type: ignore[attr-defined]
    desk = Desk(task, reward_s=0.1)
    desk.begin(1)
    over = desk.finish(4)
    ended = [one for one in over.values() if one.end == "eos"]
    assert ended
    for one in ended:
        assert math.isnan(one.reward)
        assert one.answers == [Answer(0, None, error)]


def test_a_tool_that_fails_ends_its_response_without_a_reward() -> None:
    def answer(dialogue: object) -> str:
        raise RuntimeError("the tool is broken")

    for task, error, end in (
        (Talks(answer=answer), "RuntimeError: the tool is broken", "error"),
        (Talks(wait_s=60.0), TIMEOUT, "timeout"),
        (Talks(answer=lambda dialogue: "c"), "ConfigError: the character 'c'", "error"),
    ):
        desk = Desk(task, tool_s=0.1)
        desk.begin(2)
        over = desk.finish(8)
        failed = [one for one in over.values() if one.end == end]
        assert failed
        assert desk.engine.num_free == 16
        for one in failed:
            assert math.isnan(one.reward)
            assert one.answers[-1].error.startswith(error)


class Returns(Talks):
    """Ends the first turn of everything with a value."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    async def step(self, dialogue: Dialogue) -> Turn:
        return self.value  # type: ignore[return-value]


class ReturnsAtLast(Episodes):
    """The same as an episode; a text is said to the model before."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    async def episode(self, chat: Chat, problem: Problem) -> float:
        await chat.generate()
        if isinstance(self.value, str):
            await chat.generate(self.value)
        return self.value  # type: ignore[return-value]


class Shy:
    """Has no number and no text."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Fussy(CharTokenizer):
    """A tokenizer that raises what it likes."""

    def encode(self, text: str) -> list[int]:
        if "!" in text:
            raise TypeError("must be str")
        return super().encode(text)


LONG = "ab" * (1 << 20)


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (Returns(Turn(reward="x")), "the reward 'x' is no number"),  # type: ignore[arg-type]
        (Returns(Turn(reward=10**5000)), "the reward of type int is no number"),
        (Returns(Turn(reward=Shy())), "the reward of type Shy is no number"),  # type: ignore[arg-type]
        (Returns(Turn(reward=math.inf)), "the reward inf is not finite"),
        (Returns(Shy()), "step returned of type Shy: it must be a Turn"),
        (Returns(Turn("ab!")), "TypeError: must be str"),
        (Returns(Turn(LONG)), "an answer has 2,097,152 characters"),
        (ReturnsAtLast(10**400), "the reward 1000"),
        (ReturnsAtLast(Shy()), "the reward of type Shy is no number"),
        (ReturnsAtLast("ab!"), "TypeError: must be str"),
        (ReturnsAtLast(LONG), "an answer has 2,097,152 characters"),
    ],
)
def test_whatever_a_task_returns_fails_its_response_alone(task: Letters, error: str) -> None:
    task.tokenizer = Fussy("ab?;", add_bos=False)
    desk = Desk(task)
    desk.begin(2)
    over = desk.finish(8)
    failed = [one for one in over.values() if one.answers[-1].error]
    assert failed
    assert desk.engine.num_free == 16
    for one in failed:
        assert math.isnan(one.reward)
        assert one.answers[-1].error.startswith(error)


@pytest.mark.parametrize("kind", ["reward", "tool"])
def test_failures_in_a_row_end_it_with_the_last_traceback(kind: str) -> None:
    async def broken(dialogue: object) -> Turn:
        raise RuntimeError("the tool is broken")

    task = Letters(reward=raises) if kind == "reward" else Talks()
    if isinstance(task, Talks):
        task.step = broken  # type: ignore[method-assign]
    desk = Desk(task, max_failures=5)
    desk.begin(16)
    with pytest.raises(TaskError, match=r"5 .* in a row have failed.*(?s:.)*Traceback(?s:.)*Error"):
        desk.finish(64)


def test_one_success_begins_the_count_anew() -> None:
    count = iter(range(1000))
    task = Letters(reward=lambda problem, response: 1 / (next(count) % 3))  # every third one fails
    task.is_quick = True  # type: ignore[attr-defined]
    desk = Desk(task, max_failures=2)
    desk.begin(16)
    over = desk.finish(64)
    assert any(math.isnan(one.reward) for one in over.values())


def test_cut_ends_what_generates_and_what_waits() -> None:
    desk = Desk(Talks(wait_s=60.0), slots=2)
    desk.begin(1, size=4)
    desk.finish(4, until=lambda: desk.dialogues.num_waiting("tool") == 2)  # others have no slot yet
    desk.dialogues.cut(0)
    over = desk.finish(4)
    assert {one.end for one in over.values()} <= {"cut", "length"}
    assert [one.reward for one in over.values()] == [0.0] * 4
    assert desk.engine.num_free == 2

    desk = Desk(Letters(reward=waits))
    desk.begin(1)
    known = desk.finish(
        4, until=lambda: desk.dialogues.num_waiting("reward") >= 1 and not desk.dialogues.is_busy
    )
    desk.dialogues.cut(0)
    late = desk.finish(4 - len(known))
    assert all(math.isnan(one.reward) and one.answers[-1].error == "cut" for one in late.values())
    assert {one.end for one in late.values()} <= {"eos", "stop"}


def begun_of(desk: Desk) -> list[tuple[object, list[Answer]]]:
    return [
        from_tree(one.key, one.sample, to_tree(response, one.answers, one.end), 0)
        for one, response in desk.dialogues.begun()
    ]


def test_a_response_goes_on_in_the_middle_of_a_dialogue() -> None:
    whole = Desk(Talks())
    whole.begin(1, size=8)
    expected = whole.finish(8)
    asked = whole.task.num_steps
    desk = Desk(task := Talks(wait_s=0.2), slots=8)
    desk.begin(1, size=8)
    early = desk.finish(8, until=lambda: any(one.answers for one, _ in desk.dialogues.begun()))
    begun = begun_of(desk)
    assert any(answers for _, answers in begun), "nothing was answered yet"
    assert task.num_steps > 0
    other = Desk(Talks(), slots=8)
    other.begin(1, size=8, begun=[(one, answers) for one, answers in begun])
    late = other.finish(8)
    for name, one in expected.items():
        found = early[name] if name in early else late[name]
        assert found.whole.tokens.tolist() == one.whole.tokens.tolist()
        assert (found.answers, found.reward, found.end) == (one.answers, one.reward, one.end)
    assert 0 < other.task.num_steps < asked


def test_a_reward_that_was_there_is_not_asked_for_again() -> None:
    desk = Desk(Letters())
    desk.begin(1)
    over = desk.finish(4)
    begun = [from_tree(0, one.sample, to_tree(one.whole, one.answers, one.end), 0) for one in over.values()]
    other = Desk(Letters())
    other.begin(1, begun=begun)
    assert all(same(one, over[name]) for name, one in other.finish(4).items())
    assert other.task.num_rewards == 0


@pytest.mark.parametrize("make", [Letters, Talks, Episodes])
def test_a_record_is_repeated_without_calling_anything(make: type[Letters]) -> None:
    """Also where tools failed, came late, or a response was cut while it waited."""
    desk = Desk(make())
    desk.begin(6)
    over = desk.finish(24)
    if make is Talks:
        slow = Desk(Talks(wait_s=0.3), tool_s=0.1)
        slow.begin(6)
        cut = Desk(Talks(wait_s=60.0))
        cut.begin(6)
        ended = cut.finish(24, until=lambda: cut.dialogues.num_waiting("tool") >= 12)
        for key in range(6):
            cut.dialogues.cut(key)
        records = [over, slow.finish(24), ended | cut.finish(24 - len(ended))]
    else:
        records = [over]
    for record in records:
        task = make()
        other = Desk(task)
        for key in range(6):
            scripts = [record[key, sample].piece for sample in range(4)]
            problem = task.problem("train", key)
            prompt = tuple(task.tokenizer.encode(problem.prompt))
            other.dialogues.begin(key, problem, prompt, seed=key, size=4, scripts=scripts)
        for name, one in other.finish(24).items():
            assert same(one, record[name]), name
        assert [getattr(task, name, 0) for name in ("num_steps", "num_rewards", "num_episodes")] == [0, 0, 0]


def test_a_record_without_answers_is_asked_again() -> None:
    desk = Desk(Talks())
    desk.begin(4)
    over = desk.finish(16)
    other = Desk(task := Talks())
    for key in range(4):
        problem = task.problem("train", key)
        prompt = tuple(task.tokenizer.encode(problem.prompt))
        scripts = [over[key, sample].piece._replace(answers=()) for sample in range(4)]
        other.dialogues.begin(key, problem, prompt, seed=key, size=4, scripts=scripts)
    assert all(same(one, over[name]) for name, one in other.finish(16).items())
    assert task.num_steps > 0


def test_an_answer_that_does_not_fit_ends_the_response() -> None:
    desk = Desk(Talks(), max_length=16)  # the prompt has 8
    desk.begin(4)
    over = desk.finish(16)
    assert all(len(one.whole.tokens) <= 8 for one in over.values())
    assert {one.reward for one in over.values() if one.end == "length"} == {0.0}
    assert desk.engine.num_free == 16


class OwnReward(Episodes):
    """An episode without a reward beside it."""

    @property
    def reward(self) -> object:  # type: ignore[override]
        raise AttributeError("reward")


def test_an_episode_needs_no_reward_beside_it() -> None:
    desk = Desk(OwnReward())
    desk.begin(2)
    assert all(math.isfinite(one.reward) for one in desk.finish(8).values())


class Hasty(Episodes):
    """An episode that does something else than it may."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    async def episode(self, chat: object, problem: Problem) -> float:
        if self.what == "returns":
            return 1.0
        if self.what == "raises":
            raise KeyError("x")
        await chat.generate("ab" if self.what == "begins" else "")  # type: ignore[attr-defined]
        if self.what == "says nothing":
            await chat.generate("")  # type: ignore[attr-defined]
        if self.what == "waits":
            await asyncio.sleep(60.0)
        return 1.0


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("returns", "the episode returned before"),
        ("raises", "KeyError"),
        ("begins", "leave the text out"),
        ("says nothing", "needs a text"),
        ("waits", TIMEOUT),
    ],
)
def test_an_episode_that_fails_has_no_reward(what: str, error: str) -> None:
    desk = Desk(Hasty(what), tool_s=0.2)
    desk.begin(2)
    over = desk.finish(8)
    assert len(over) == 8
    assert desk.engine.num_free == 16
    failed = [one for one in over.values() if math.isnan(one.reward)]
    assert failed
    assert all(error in one.answers[-1].error for one in failed)


def test_hundreds_that_wait_for_tools_are_answered_at_once() -> None:
    desk = Desk(Talks(wait_s=0.3), slots=128)
    desk.begin(32)
    desk.finish(128, until=lambda: desk.dialogues.num_waiting("tool") >= 100)
    assert desk.engine.num_held >= 100
    over = desk.finish(128)
    assert np.isfinite([one.reward for one in over.values()]).all()


def test_response_under_way_has_no_reward_in_begun_work() -> None:
    desk = Desk(Letters(reward=waits))
    desk.begin(1)
    desk.finish(4, until=lambda: desk.dialogues.num_waiting("reward") >= 1)
    for one, response in desk.dialogues.begun():
        assert one.answers == []
        assert (one.end != "") == (one.waits == "reward")
        assert one.end in ("", response.end)
