"""Tasks for language models: problems, rewards, and the tokens that they are written in. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from offbeat.config.code import import_named
from offbeat.config.errors import did_you_mean
from offbeat.errors import ConfigError, OffbeatError
from offbeat.llm.tasks.arithmetic import Arithmetic
from offbeat.llm.tasks.base import (
    Chat,
    Dialogue,
    EpisodeTask,
    MultiTurnTask,
    Problem,
    Reply,
    Split,
    Task,
    Turn,
    expert_of,
    has_turns,
    stop_ids_of,
)
from offbeat.llm.tasks.calculator import Calculator
from offbeat.llm.tasks.reverse import Reverse
from offbeat.llm.tasks.slow_reward import SlowReward

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": Arithmetic,
    "calculator": Calculator,
    "reverse": Reverse,
    "slow_reward": SlowReward,
}
"""Tasks by the name that ``env.id`` gives."""

__all__ = [
    "TASKS",
    "Chat",
    "Dialogue",
    "EpisodeTask",
    "MultiTurnTask",
    "Problem",
    "Reply",
    "Split",
    "Task",
    "Turn",
    "check_expert",
    "make_task",
]

_WANTED = ("tokenizer", "max_prompt_tokens", "max_new_tokens", "num_problems", "problem", "reward")
_TRIED = 3


def make_task(name: str, kwargs: dict[str, Any]) -> Task:
    """Make a task by its name, or by ``module:Class``; ConfigError when there is none, or it is no task."""
    make = _task_class(name) if ":" in name else TASKS.get(name)
    if make is None:
        raise ConfigError(f"env.id: there is no task {name!r}; {did_you_mean(name, list(TASKS))}")
    try:
        task = make(**kwargs)
    except TypeError as error:
        raise ConfigError(f"env.kwargs does not fit the task {name}: {error}") from error
    if ":" in name:
        _check(name, task)
    return task


def _task_class(name: str) -> Callable[..., Task]:
    """Import the class of a task; a configuration can come from anywhere, so it must look like one."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_named(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"env.id: {name!r} cannot be imported ({error})") from error
    methods = ("num_problems", "problem")
    if not (inspect.isclass(found) and all(hasattr(found, method) for method in methods)):
        raise ConfigError(f"env.id: {name!r} is no class of a task: it needs {', '.join(_WANTED)}")
    return cast("Callable[..., Task]", found)


def _check(name: str, task: Any) -> None:
    """Raise ConfigError with what a task of a user lacks."""
    wanted = [one for one in _WANTED if one != "reward" or not hasattr(task, "episode")]
    if missing := [one for one in wanted if not hasattr(task, one)]:
        raise ConfigError(f"env.id: the task {name} has no {', no '.join(missing)}")
    if hasattr(task, "step") and hasattr(task, "episode"):
        raise ConfigError(f"env.id: the task {name} has step and episode: give it one of them")
    if hasattr(task, "episode") and not inspect.iscoroutinefunction(task.episode):
        raise ConfigError(f"env.id: episode of the task {name} must be `async def`")
    for split in ("train", "held_out"):
        if task.num_problems(split) < 1:
            raise ConfigError(f"env.id: the task {name} has no problems of the split {split!r}")
    trained = {task.problem("train", index).prompt for index in range(min(1000, task.num_problems("train")))}
    for index in range(min(1000, task.num_problems("held_out"))):
        if (prompt := task.problem("held_out", index).prompt) in trained:
            raise ConfigError(
                f"env.id: the task {name} trains on {prompt!r:.80}, which is held out: keep apart"
            )
    if has_turns(task) and not getattr(task, "max_given_tokens", 0):
        raise ConfigError(
            f"env.id: the task {name} has turns: give it max_given_tokens, the most tokens of all answers to "
            "a response"
        )


def check_expert(task: Task) -> None:
    """Raise ConfigError if answers to warm up on cannot be written in the task's tokens, or are too long."""
    for index in range(min(_TRIED, task.num_problems("train"))):
        problem = task.problem("train", index)
        try:
            texts = expert_of(task, problem)
            sizes = [len(task.tokenizer.encode_more(text)) + 1 for text in texts[::2]]
        except OffbeatError as error:
            raise ConfigError(
                f"the answer to {problem.prompt!r:.80} cannot be warmed up on: {error}"
            ) from None
        if sum(sizes) > task.max_new_tokens + len(sizes) - 1:
            raise ConfigError(
                f"the answer to {problem.prompt!r:.80} has {sum(sizes)} tokens, and max_new_tokens is "
                f"{task.max_new_tokens}: raise it"
            )
        if not stop_ids_of(task):
            raise ConfigError("the tokenizer has no eos_ids: turns of the model would never end")
