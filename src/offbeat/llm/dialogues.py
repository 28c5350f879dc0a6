"""Responses with tools and rewards: an engine generates, a task answers and rewards, and nothing waits.

A response whose turn is over keeps its cache while its tool is at work, and is no row of a step. One that is
over gives its slot back before its reward is asked for.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from offbeat.errors import TaskError
from offbeat.llm.calls import Calls, Outcome, Question, failed
from offbeat.llm.conversation import COMPLETE, Conversation, failure, turns_of
from offbeat.llm.engine import Engine
from offbeat.llm.requests import Request, Response
from offbeat.llm.rewards import Reward, task_reward
from offbeat.llm.tasks.base import Dialogue, EpisodeTask, Limits, Problem, Reply, Task, Turn, has_turns
from offbeat.seeding import derive_seed
from offbeat.types import Answer, End, Piece

Kind = Literal["tool", "reward"]
_FROM_OUTSIDE = ("cut", "timeout", "error")
"""Ends that do not follow from the tokens."""
_MOST_CHARACTERS = 1 << 20
"""Of an answer: JSON has up to 12 bytes for each, and a line of ``answers.jsonl`` must stay readable."""


class Dialogues:
    """Drives groups of responses to their rewards; `step` returns those that are over.

    Its engine is used by nobody else. ``wake()`` is called from a thread when an answer is there.
    ``reward`` is used in the place of the task's.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        limits: Limits,
        wake: Callable[[], None],
        *,
        temperature: float = 1.0,
        reward: Reward | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._task, self._limits = engine, task, limits
        self._temperature, self._clock = temperature, clock
        self._reward = reward or task_reward(task)
        self._is_quick = reward is None and bool(getattr(task, "is_quick", False))
        self._calls = Calls(wake, threads=limits.threads)
        self._has_turns, self._has_episodes = has_turns(task), isinstance(task, EpisodeTask)
        self._open: dict[tuple[int, int], Conversation] = {}
        self._over: list[Conversation] = []
        self._failures: Counter[Kind] = Counter()
        self.num_made = 0

    # ------------------------------------------------------------ what there is

    @property
    def is_busy(self) -> bool:
        """True while a step would compute something."""
        return bool(self._over) or self._engine.is_busy

    @property
    def needs(self) -> int | None:
        """The version without which nothing can go on."""
        return None if any(one.waits for one in self._open.values()) else self._engine.needs

    def num_waiting(self, kind: Kind) -> int:
        """Responses that wait for their tool, or for their reward."""
        return sum(one.waits == kind for one in self._open.values())

    def generating(self) -> set[int]:
        """Keys of requests that still need slots: a response of theirs is not over yet."""
        return {one.key for one in self._open.values() if not one.end}

    def begun(self) -> Iterable[tuple[Conversation, Response]]:
        """Return what another engine can go on with: responses as far as they are, without open episodes."""
        under_way = {(one.key, one.sample): one for one in self._engine.under_way()}
        for conversation in self._open.values():
            response = conversation.response if conversation.end else under_way.get(conversation.name)
            if response is None or (self._has_episodes and not conversation.end):
                continue
            yield conversation, response

    # ------------------------------------------------------------ requests

    def begin(
        self,
        key: int,
        problem: Problem,
        prompt: tuple[int, ...],
        *,
        seed: int = 0,
        size: int = 1,
        begun: Sequence[tuple[Response, Sequence[Answer]]] = (),
        scripts: Sequence[Piece] = (),
    ) -> None:
        """Begin a group of responses to a prompt, go on with what is begun, or repeat what scripts say."""
        known = {response.sample: (response, answers) for response, answers in begun}
        most = min(self._limits.max_new_tokens, problem.max_new_tokens or self._limits.max_new_tokens)
        seeds = [derive_seed(seed, "response", sample) for sample in range(size)]
        ones = [
            Conversation(key, sample, problem, own, most, scripts[sample] if scripts else None)
            for sample, own in enumerate(seeds)
        ]
        left = []
        for one in ones:
            self._open[one.name] = one
            response, answers = known.get(one.sample, (None, ()))
            one.answers = list(answers)
            if response is not None:
                one.num_own = int(response.is_own.sum())
            if response is None or not response.end:
                left.append(one.sample)
        if left:
            stop_ids = getattr(self._task, "stop_ids", None)
            self._engine.submit(
                Request(
                    key,
                    prompt,
                    num_samples=size,
                    max_new_tokens=most,
                    temperature=self._temperature,
                    stop_ids=None if stop_ids is None else tuple(stop_ids),
                    seed=seed,
                    hold=self._has_turns,
                    samples=tuple(left),
                    begun=tuple(known[sample][0] for sample in left if sample in known),
                    scripts=tuple(scripts),
                )
            )
        for one in ones:
            if one.sample not in left:
                self._restore(one, known[one.sample][0])
            elif self._has_episodes and (one.script is None or not one.script.answers):
                self._begin_episode(one)

    def _restore(self, one: Conversation, response: Response) -> None:
        """Take up a response that had ended; its reward may be there already."""
        one.response = response
        last = one.answers[-1] if one.answers else None
        if last is not None and not isinstance(last.value, str):
            self._finish(one, response.end, math.nan if last.error else float(last.value or 0.0))
        else:
            self._ask_reward(one, response.end)

    def cut(self, key: int) -> None:
        """End what is open of a request with what there is."""
        for one in [one for one in self._open.values() if one.key == key]:
            self._forget(one)
            if one.end:
                one.answers.append(Answer(len(one.answers), None, "cut"))
                self._finish(one, one.end, math.nan)
                continue
            for response in self._engine.abort(one.key, one.sample):
                one.response = response
            self._end(one, "cut")

    # ------------------------------------------------------------ the step

    def step(self) -> list[Conversation]:
        """Take answers that have come, make a token in each row, and return what is over."""
        for result in self._calls.take():
            self._take(result)
        if self._engine.is_busy:
            for response in self._engine.step():
                self._generated(response)
        over, self._over = self._over, []
        return over

    def _generated(self, response: Response) -> None:
        """Take a turn of the model, or the end of a response."""
        one = self._open[response.key, response.sample]
        one.response = response
        num_own = int(response.is_own.sum())
        self.num_made += num_own - one.num_own
        one.num_own = num_own
        if self._has_episodes and (one.script is None or not one.script.answers):
            self._reply(one)
        elif self._has_turns and response.end in COMPLETE:
            self._ask_tool(one)
        else:
            self._end(one, response.end)

    # ------------------------------------------------------------ tools

    def _ask_tool(self, one: Conversation) -> None:
        """Have the task answer a turn, or take the recorded answer."""
        if (recorded := one.recorded()) is not None:
            self._answer(one, recorded)
            return
        if one.script is not None and one.is_at_end_of_script and one.script.end in _FROM_OUTSIDE:
            self._end(one, one.script.end)
            return
        step: Any = self._task.step  # type: ignore[attr-defined]
        dialogue = one.dialogue(self._task.tokenizer)
        if self._is_quick:
            self._take_turn(one, _called(one, step, dialogue))
        else:
            self._wait(one, "tool")
            self._calls.call(one.name, step, dialogue, limit_s=self._limits.tool_s)

    def _answer(self, one: Conversation, answer: Answer) -> None:
        """Go on with the answer of a tool, or end where it says that the response is over."""
        if answer.error:
            one.answers.append(answer)
            self._end(one, failure(answer.error))
        elif isinstance(answer.value, str):
            ids, error = self._encoded(answer.value)
            if error:
                self._fail(one, "tool", error)
                return
            one.answers.append(answer)
            if not self._extend(one, ids):
                self._end(one, "length")
        else:
            one.answers.append(answer)
            self._release(one)
            self._finish(one, one.whole.end, float(answer.value or 0.0))

    def _encoded(self, text: str) -> tuple[Sequence[int], str]:
        """Return the tokens of an answer, or why it has none; the tokenizer may be a user's."""
        if len(text) > _MOST_CHARACTERS:
            return (), f"an answer has {len(text):,} characters: shorten it to {_MOST_CHARACTERS:,} or fewer"
        try:
            return self._task.tokenizer.encode_more(text), ""
        except Exception as error:
            return (), f"{type(error).__name__}: {error}"

    def _extend(self, one: Conversation, ids: Sequence[int]) -> bool:
        """Give a response more tokens; False if there is no room for them and a token after them."""
        engine, left = self._engine, one.max_new_tokens - one.num_own
        if left < 1 or not engine.is_held(*one.name) or not engine.has_room(*one.name, len(ids)):
            return False
        engine.extend(*one.name, ids, left)
        return True

    def _release(self, one: Conversation) -> None:
        if self._engine.is_held(*one.name):
            self._engine.release(*one.name)

    # ------------------------------------------------------------ episodes

    def _begin_episode(self, one: Conversation) -> None:
        chat = _Chat(self._calls, one.name, one.seed)
        episode: Any = self._task.episode  # type: ignore[attr-defined]
        self._calls.call(one.name, episode, chat, one.problem, limit_s=self._limits.tool_s)

    def _asked(self, one: Conversation, question: Question) -> None:
        """Let the model make the next turn of an episode."""
        self._stop_waiting(one)
        one.question = question
        if one.num_replies == 0 and not question.value:
            if one.response is not None:
                self._reply(one)
            return
        if one.num_replies == 0 or not question.value:
            wrong = "needs a text" if one.num_replies else "answers problem.prompt: leave the text out"
            self._fail(one, "tool", f"generate() number {one.num_replies + 1} {wrong}")
            return
        answer = Answer(len(one.answers), str(question.value))
        ids, error = self._encoded(str(question.value))
        if error:
            self._fail(one, "tool", error)
            return
        if one.whole.end not in COMPLETE or not self._extend(one, ids):
            end: End = "length" if one.whole.end in COMPLETE else one.whole.end
            self._calls.reply(question, Reply((), "", end))
            self._wait(one, "tool")
            return
        one.answers.append(answer)
        one.response = None

    def _reply(self, one: Conversation) -> None:
        """Hand a turn to the episode that waits for it."""
        if one.question is None:
            return
        question, one.question = one.question, None
        one.num_replies += 1
        ids = turns_of(one.whole)[-1]
        self._wait(one, "tool")
        self._calls.reply(question, Reply(tuple(ids), self._task.tokenizer.decode(ids), one.whole.end))

    # ------------------------------------------------------------ ends and rewards

    def _end(self, one: Conversation, end: End) -> None:
        """End a response: its slot is free from here, and its reward is asked for."""
        self._release(one)
        if one.answers and one.answers[-1].error:  # its tool failed: there is nothing to reward
            self._finish(one, end, math.nan)
        else:
            self._ask_reward(one, end)

    def _ask_reward(self, one: Conversation, end: End) -> None:
        one.end = end if one.script is None else one.script.end
        if (recorded := one.recorded()) is not None:
            self._rewarded(one, recorded)
        elif one.end not in COMPLETE:
            self._rewarded(one, Answer(len(one.answers), 0.0))
        elif self._is_quick:
            self._take_reward(one, _called(one, self._reward, one.dialogue(self._task.tokenizer)))
        else:
            self._wait(one, "reward")
            dialogue = one.dialogue(self._task.tokenizer)
            self._calls.call(one.name, self._reward, dialogue, limit_s=self._limits.reward_s)

    def _rewarded(self, one: Conversation, answer: Answer) -> None:
        one.answers.append(answer)
        self._finish(one, one.end, math.nan if answer.error else float(answer.value or 0.0))

    def _finish(self, one: Conversation, end: End, reward: float) -> None:
        """Hand a response out."""
        one.end = end if one.script is None else one.script.end
        one.reward, one.waits = reward, ""
        del self._open[one.name]
        self._over.append(one)

    # ------------------------------------------------------------ what was called

    def _take(self, result: Outcome | Question) -> None:
        """Take what a call of the task has come to."""
        one = self._open.get(result.key)  # type: ignore[call-overload]
        if one is None:  # what came before has ended it
            return
        if isinstance(result, Question):
            self._asked(one, result)
            return
        self._stop_waiting(one)
        if one.end:
            self._take_reward(one, result)
        elif self._has_episodes:
            self._take_episode(one, result)
        else:
            self._take_turn(one, result)

    def _take_turn(self, one: Conversation, result: Outcome) -> None:
        turn = result.value
        if result.error or not isinstance(turn, Turn):
            error = result.error or f"step returned {_shown(turn)}: it must be a Turn"
            self._fail(one, "tool", error, result.details)
            return
        self._failures["tool"] = 0
        if turn.text:
            self._answer(one, Answer(len(one.answers), str(turn.text)))
        elif turn.reward is None:
            self._end(one, one.whole.end)
        else:
            value, error = _read_reward(turn.reward)
            if error:
                self._fail(one, "tool", error)
            else:
                self._answer(one, Answer(len(one.answers), value))

    def _take_episode(self, one: Conversation, result: Outcome) -> None:
        if not result.error and (one.response is None or not one.num_replies):
            result = Outcome(result.key, None, "the episode returned before its turn ended")
        if result.error:
            self._fail(one, "tool", result.error, result.details)
            return
        self._release(one)
        one.end = one.whole.end
        self._take_reward(one, result)

    def _take_reward(self, one: Conversation, result: Outcome) -> None:
        """Take a reward; what is no finite number is no reward."""
        value, error = (math.nan, result.error) if result.error else _read_reward(result.value)
        turn = len(one.answers)
        if error:
            self._count_failure("reward", error, result.details)
            self._rewarded(one, Answer(turn, None, error))
        else:
            self._failures["reward"] = 0
            self._rewarded(one, Answer(turn, value))

    def _fail(self, one: Conversation, kind: Kind, error: str, details: str = "") -> None:
        """End a response whose tool has failed; it has no reward."""
        self._forget(one)
        if one.response is None:
            for response in self._engine.abort(one.key, one.sample):
                one.response = response
        self._answer(one, Answer(len(one.answers), None, error[:500]))
        self._count_failure(kind, error, details)

    def _count_failure(self, kind: Kind, error: str, details: str) -> None:
        """Count failures in a row; `TaskError` where there are too many."""
        self._failures[kind] += 1
        if self._failures[kind] >= self._limits.max_failures:
            name = "rewards" if kind == "reward" else "answers of tools"
            raise TaskError(
                f"{self._failures[kind]} {name} in a row have failed (algorithm.reward.max_failures). The "
                f"last one: {details or error}"
            )

    # ------------------------------------------------------------ waiting

    def _wait(self, one: Conversation, kind: Kind) -> None:
        one.waits, one.since_s = kind, self._clock()

    def _stop_waiting(self, one: Conversation) -> None:
        seconds = self._clock() - one.since_s
        if one.waits == "tool":
            one.tool_s += seconds
        elif one.waits == "reward":
            one.reward_s += seconds
        one.waits = ""

    def _forget(self, one: Conversation) -> None:
        """Give up what is called for a response."""
        self._stop_waiting(one)
        self._calls.forget(one.name)
        one.question = None


def _called(one: Conversation, function: Callable[..., Any], dialogue: Dialogue) -> Outcome:
    """Call what is quick."""
    try:
        return Outcome(one.name, function(dialogue))
    except Exception as error:
        return failed(one.name, error)


def _read_reward(value: Any) -> tuple[float, str]:
    """Return a reward as a number, and what is wrong with it."""
    try:
        number = float(value)
    except Exception:  # of somebody's ``__float__``
        return math.nan, f"the reward {_shown(value)} is no number"
    return number, "" if math.isfinite(number) else f"the reward {number} is not finite"


def _shown(value: Any) -> str:
    """Return the beginning of what a user's function returned."""
    try:
        return repr(value)[:80]
    except Exception:
        return f"of type {type(value).__name__}"


class _Chat:
    """The side of the model in an episode, in the loop that runs it."""

    def __init__(self, calls: Calls, name: tuple[int, int], seed: int) -> None:
        self._calls, self._name, self.seed = calls, name, seed

    async def generate(self, text: str = "") -> Reply:
        """Append a text that the model has not made, and return its next turn."""
        reply = await self._calls.ask(self._name, text)
        assert isinstance(reply, Reply)
        return reply
