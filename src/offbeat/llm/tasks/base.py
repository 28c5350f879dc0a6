"""The contract of tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from offbeat.llm.tokens import Tokenizer

Split = Literal["train", "held_out"]
"""Problems to learn from, also before training, and problems that are seen in evaluations alone."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: a prompt, and the answer that its task rewards. Example: ``Problem("21+43=", "640")``.

    ``max_new_tokens`` is the longest response to it, where that is shorter than its task's;
    ``source`` and ``extra`` are for reward functions that want to know where a problem is from, and more.
    """

    prompt: str
    answer: str
    max_new_tokens: int | None = None
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A response under way, as tasks see it: turns of the model, and what each but the last was answered.

    ``seed`` is that of the response, for whatever is to be drawn.
    """

    problem: Problem
    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()
    seed: int = 0


class Turn(NamedTuple):
    """A task's answer to a turn of the model: ``text`` goes on, without it the response is over.

    Over, it has this ``reward``, or what `Task.reward` says of the last turn. ``Turn("46")``, ``Turn()``.
    """

    text: str = ""
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of responses: tokens of their own, seconds for each answer and reward, failures in a row.

    ``threads``: plain functions that are called at a time.
    """

    max_new_tokens: int
    tool_s: float = 30.0
    reward_s: float = 30.0
    max_failures: int = 100
    threads: int = 8


class Task(Protocol):
    """Problems by split and number, and the reward of a response.

    A task may have more: ``step`` or ``episode`` for several turns (`MultiTurnTask`, `EpisodeTask`);
    ``stop_ids``, the tokens at which a turn of the model ends (the tokenizer's ``eos_ids`` unless it says
    so); ``max_given_tokens``, the most that all answers to a response can have; ``expert(problem)``, the
    texts of a good dialogue in turns, model first, to warm up on (``answer`` alone unless it says so);
    ``is_quick``, True where a reward is no more than a comparison: it is then computed between two tokens,
    without a limit.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokens that texts are written in."""
        ...

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt, of all splits."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens of the longest response, with those that end its turns, without the answers in it."""
        ...

    def num_problems(self, split: Split) -> int:
        """Return how many different problems a split has."""
        ...

    def problem(self, split: Split, index: int) -> Problem:
        """Return a problem, 0 <= index < num_problems(split)."""
        ...

    @property
    def reward(self) -> Callable[..., Any]:
        """``reward(problem, response)`` returns the reward of a response, a text without special tokens.

        Of several turns the response is the last one. It may be ``async def``, and take the `Dialogue` as a
        third argument. One that raises, takes too long or is not finite leaves the response out.
        """
        ...


@runtime_checkable
class MultiTurnTask(Protocol):
    """A task that answers the model's turns. A response goes on from its last turn after a crash."""

    def step(self, dialogue: Dialogue) -> Turn | Awaitable[Turn]:
        """Answer the last turn; it depends on the dialogue alone. It may be ``async def``."""
        ...


class Reply(NamedTuple):
    """A turn of the model for an `EpisodeTask`; ``end`` is ``eos`` or ``stop`` unless it was cut short."""

    ids: tuple[int, ...]
    text: str
    end: str


class Chat(Protocol):
    """The side of the model in an episode."""

    @property
    def seed(self) -> int:
        """The seed of the response, for whatever is to be drawn."""
        ...

    async def generate(self, text: str = "") -> Reply:
        """Append a text that the model has not made, and return its next turn.

        The first turn answers ``problem.prompt``, without a text. After one with an ``end`` other than
        ``eos`` and ``stop`` there is no other.
        """
        ...


@runtime_checkable
class EpisodeTask(Protocol):
    """A task that talks to the model in a coroutine.

    An open episode starts again from its prompt after a crash.
    """

    async def episode(self, chat: Chat, problem: Problem) -> float:
        """Generate turns with ``await chat.generate(...)``; return the reward."""
        ...


def stop_ids_of(task: Task) -> tuple[int, ...]:
    """Return the tokens that end a turn of the model."""
    return tuple(getattr(task, "stop_ids", task.tokenizer.eos_ids))


def has_turns(task: Task) -> bool:
    """Return True if a response may have several turns."""
    return isinstance(task, MultiTurnTask | EpisodeTask)


def expert_of(task: Task, problem: Problem) -> tuple[str, ...]:
    """Return the texts of a good dialogue in turns, model first."""
    expert = getattr(task, "expert", None)
    return (problem.answer,) if expert is None else tuple(expert(problem))


def most_tokens(task: Task, max_new_tokens: int) -> int:
    """Return the most tokens after a prompt, answers included."""
    return max_new_tokens + int(getattr(task, "max_given_tokens", 0))
