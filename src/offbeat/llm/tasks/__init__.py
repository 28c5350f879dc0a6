"""Tasks for language models: problems, rewards, and the tokens that they are written in. No torch."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.config.errors import did_you_mean
from offbeat.errors import ConfigError
from offbeat.llm.tasks.arithmetic import Arithmetic
from offbeat.llm.tasks.base import Problem, Task
from offbeat.llm.tasks.reverse import Reverse

TASKS: dict[str, Callable[..., Task]] = {"arithmetic": Arithmetic, "reverse": Reverse}
"""Tasks by the name that ``env.id`` gives."""

__all__ = ["TASKS", "Problem", "Task", "make_task"]


def make_task(name: str, kwargs: dict[str, object]) -> Task:
    """Make a task by its name; ConfigError when there is none, or its arguments do not fit."""
    if name not in TASKS:
        raise ConfigError(f"env.id: there is no task {name!r}; {did_you_mean(name, list(TASKS))}")
    try:
        return TASKS[name](**kwargs)
    except TypeError as error:
        raise ConfigError(f"env.kwargs does not fit the task {name}: {error}") from error
