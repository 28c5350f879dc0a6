"""Small tasks with turns and rewards that do what a test wants, and a network too small to learn anything."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from offbeat.llm.conversation import Conversation
from offbeat.llm.dialogues import Dialogues
from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Chat, Dialogue, Problem, Split, Turn
from offbeat.llm.tasks.base import Limits
from offbeat.llm.tokens import CharTokenizer

LIMIT_S = 30.0
CALLS: Counter[str] = Counter()
"""Calls of all tasks of this process, by what was called."""


class Letters:
    """Prompts of two letters; the reward is the number of letters of a response."""

    def __init__(self, reward: Callable[[Problem, str], object] | None = None) -> None:
        self.tokenizer = CharTokenizer("ab?;", add_bos=False)
        self.stop_ids = (2, *self.tokenizer.encode("?"))
        self.max_prompt_tokens, self.max_new_tokens, self.max_given_tokens = 8, 24, 24
        self.num_rewards = 0
        self._reward = reward or (lambda problem, response: float(len(response)))

    def num_problems(self, split: Split) -> int:
        return 8 if split == "held_out" else 64

    def problem(self, split: Split, index: int) -> Problem:
        return Problem(
            "b" + f"{index:06b}".replace("0", "a").replace("1", "b") + "a" * (split == "train"), "a"
        )

    def reward(self, problem: Problem, response: str) -> object:
        self.num_rewards += 1
        CALLS["reward"] += 1
        return self._reward(problem, response)


class Talks(Letters):
    """Answers a turn that ends with ``?``, after ``wait_s`` seconds, with what ``answer`` says."""

    def __init__(
        self,
        wait_s: float = 0.0,
        answer: Callable[[Dialogue], str] = lambda dialogue: "ab;",
        reward: Callable[[Problem, str], object] | None = None,
    ) -> None:
        super().__init__(reward)
        self.num_steps, self.wait_s, self.answer = 0, wait_s, answer

    async def step(self, dialogue: Dialogue) -> Turn:
        self.num_steps += 1
        CALLS["step"] += 1
        assert len(dialogue.turns) == len(dialogue.answers) + 1
        if self.wait_s:
            await asyncio.sleep(self.wait_s)
        return Turn(self.answer(dialogue)) if dialogue.turns[-1].endswith("?") else Turn()


class Episodes(Letters):
    """The same as an episode."""

    def __init__(self) -> None:
        super().__init__()
        self.num_episodes = 0

    async def episode(self, chat: Chat, problem: Problem) -> float:
        self.num_episodes += 1
        CALLS["episode"] += 1
        reply, length = await chat.generate(), 0
        while reply.text.endswith("?"):
            length += len(reply.ids)
            reply = await chat.generate("ab;")
        return float(length + len(reply.ids))


class Waits(Talks):
    """Tools and rewards that take a random time, fail now and then, and never answer the same twice."""

    def __init__(self, wait_s: float = 0.02, fail: float = 0.0, salt: int = 0, hang: float = 0.0) -> None:
        super().__init__(answer=self._now)
        self.fail, self.salt, self.hang, self.mean_s = fail, salt, hang, wait_s

    def _now(self, dialogue: Dialogue) -> str:
        return random.choice(["ab;", "a;", "bb;"])

    async def step(self, dialogue: Dialogue) -> Turn:
        draw = random.random()
        await asyncio.sleep(60.0 if draw < self.hang else random.expovariate(1.0 / self.mean_s))
        if draw > 1.0 - self.fail:
            raise RuntimeError("the tool is broken")
        return await super().step(dialogue)

    async def reward(self, problem: Problem, response: str) -> float:  # type: ignore[override]
        CALLS["reward"] += 1
        draw = random.random()
        await asyncio.sleep(60.0 if draw < self.hang else random.expovariate(1.0 / self.mean_s))
        if draw > 1.0 - self.fail:
            return math.nan
        return random.random()


class Steady(Talks):
    """Answers and rewards that depend on the dialogue alone and take ``wait_s`` at most."""

    def __init__(self, wait_s: float = 0.0, salt: int = 0) -> None:
        super().__init__()
        self.most_s, self.salt = wait_s, salt

    async def step(self, dialogue: Dialogue) -> Turn:
        await asyncio.sleep(self.most_s * random.random())
        turn = await super().step(dialogue)
        return Turn(("ab;", "b;", "aab;")[(dialogue.seed + self.salt) % 3]) if turn.text else turn

    async def reward(self, problem: Problem, response: str) -> float:  # type: ignore[override]
        CALLS["reward"] += 1
        await asyncio.sleep(self.most_s * random.random())
        return float(response.count("a")) - 0.3 * len(response)


def shape_of(task: Letters) -> Shape:
    return Shape(
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


def engine_of(task: Letters, slots: int = 16, max_length: int = 64, seed: int = 0) -> Engine:
    return Engine(Decoder(shape_of(task)).initialize(seed), slots=slots, max_length=max_length)


class Desk:
    """Dialogues with an event that wakes."""

    def __init__(self, task: Letters, slots: int = 16, max_length: int = 64, **limits: object) -> None:
        self.task, self.woken = task, threading.Event()
        self.engine = engine_of(task, slots, max_length)
        known = {"max_new_tokens": task.max_new_tokens, **limits}
        self.dialogues = Dialogues(self.engine, task, Limits(**known), self.woken.set)  # type: ignore[arg-type]

    def begin(self, count: int = 1, size: int = 4, **more: object) -> None:
        for key in range(count):
            problem = self.task.problem("train", key)
            prompt = tuple(self.task.tokenizer.encode(problem.prompt))
            self.dialogues.begin(key, problem, prompt, seed=key, size=size, **more)  # type: ignore[arg-type]

    def finish(
        self, count: int, until: Callable[[], bool] = lambda: False
    ) -> dict[tuple[int, int], Conversation]:
        """Go on until so many are over, or something holds; return what is over."""
        over: dict[tuple[int, int], Conversation] = {}
        give_up_s = time.monotonic() + LIMIT_S
        while len(over) < count and not until():
            assert time.monotonic() < give_up_s, f"{len(over)} of {count} are over"
            self.woken.clear()
            found = self.dialogues.step()
            over |= {one.name: one for one in found}
            if not found and not self.dialogues.is_busy:
                self.woken.wait(0.05)
        return over


def same(one: Conversation, other: Conversation) -> bool:
    """Tell whether two responses have the same tokens, answers, ends and rewards."""
    first, second = one.whole, other.whole
    rewards: Sequence[float] = (one.reward, other.reward)
    return (
        first.tokens.tolist() == second.tokens.tolist()
        and first.log_probs.tobytes() == second.log_probs.tobytes()
        and one.piece == other.piece
        and (rewards[0] == rewards[1] or all(map(math.isnan, rewards)))
    )
