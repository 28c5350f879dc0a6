"""Reward functions with the signatures that people have: ours, verl's and TRL's. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from offbeat.config.code import import_named
from offbeat.errors import ConfigError
from offbeat.llm.calls import is_async
from offbeat.llm.tasks.base import Dialogue, Task

Reward = Callable[[Dialogue], Any]
"""Returns the reward of a dialogue that is over, or a coroutine that does."""

_FORMS = (
    "reward(problem, response), verl's compute_score(data_source, solution_str, ground_truth, extra_info) or "
    "TRL's reward(prompts, completions, **columns)"
)


def task_reward(task: Task) -> Reward:
    """Return the reward of a task as a function of the dialogue; an episode returns its own."""
    return _ours(task.reward) if hasattr(task, "reward") else _none


def named_reward(name: str) -> Reward:
    """Return the reward function that ``module:function`` names; ConfigError for anything else.

    A configuration can come from anywhere, so it must have the parameters of a reward.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(import_named(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm.reward.function: {name!r} cannot be imported ({error})") from error
    if not inspect.isfunction(function):
        raise ConfigError(f"algorithm.reward.function: {name!r} is no function; it takes {_FORMS}")
    return as_reward(function)


def as_reward(function: Callable[..., Any]) -> Reward:
    """Adapt a function by the names of its parameters."""
    names = list(inspect.signature(function).parameters)
    if names[:3] == ["data_source", "solution_str", "ground_truth"]:
        return _verl(function)
    if "completions" in names:
        return _trl(function)
    if names[:2] == ["problem", "response"]:
        return _ours(function)
    raise ConfigError(
        f"algorithm.reward.function: {getattr(function, '__name__', function)} takes ({', '.join(names)}): "
        f"a reward is {_FORMS}"
    )


def _none(dialogue: Dialogue) -> float:
    raise TypeError("the task has no reward beside what its episodes return")


def _ours(function: Callable[..., Any]) -> Reward:
    takes_dialogue = len(_positional(function)) > 2

    def arguments(dialogue: Dialogue) -> tuple[Any, ...]:
        own = (dialogue.problem, dialogue.turns[-1])
        return (*own, dialogue) if takes_dialogue else own

    return _adapted(function, lambda dialogue: (arguments(dialogue), {}), _number)


def _verl(function: Callable[..., Any]) -> Reward:
    wanted = _wanted(function)

    def arguments(dialogue: Dialogue) -> tuple[tuple[Any, ...], dict[str, Any]]:
        problem = dialogue.problem
        whole = {
            "data_source": problem.source,
            "solution_str": dialogue.turns[-1],
            "ground_truth": problem.answer,
            "extra_info": dict(problem.extra),
        }
        return (), wanted(whole)

    return _adapted(function, arguments, _score)


def _trl(function: Callable[..., Any]) -> Reward:
    wanted = _wanted(function)

    def arguments(dialogue: Dialogue) -> tuple[tuple[Any, ...], dict[str, Any]]:
        problem = dialogue.problem
        columns = {"answer": problem.answer, **problem.extra}
        whole = {
            "prompts": [problem.prompt],
            "completions": [dialogue.turns[-1]],
            **{name: [value] for name, value in columns.items()},
        }
        return (), wanted(whole)

    return _adapted(function, arguments, _first)


def _adapted(
    function: Callable[..., Any],
    arguments: Callable[[Dialogue], tuple[tuple[Any, ...], Mapping[str, Any]]],
    read: Callable[[Any], float],
) -> Reward:
    if is_async(function):

        async def later(dialogue: Dialogue) -> float:
            own, named = arguments(dialogue)
            return read(await function(*own, **named))

        return later

    def now(dialogue: Dialogue) -> float | Awaitable[float]:
        own, named = arguments(dialogue)
        value = function(*own, **named)
        return _after(value, read) if inspect.isawaitable(value) else read(value)

    return now


async def _after(value: Awaitable[Any], read: Callable[[Any], float]) -> float:
    return read(await value)


def _wanted(function: Callable[..., Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what leaves out the arguments that a function does not take."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return lambda whole: {name: one for name, one in whole.items() if takes_all or name in parameters}


def _positional(function: Callable[..., Any]) -> Sequence[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind in kinds]


def _number(value: Any) -> float:
    return float(value)


def _score(value: Any) -> float:
    """Read what verl's functions return: a number, or a dict with its ``score``."""
    return float(value["score"] if isinstance(value, Mapping) else value)


def _first(value: Any) -> float:
    """Read what TRL's functions return: a list with a number, or None for no reward."""
    (reward,) = value
    return float("nan") if reward is None else float(reward)
