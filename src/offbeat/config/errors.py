"""Problems in a configuration: where, which key, what was given, what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offbeat.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake.

    ``where`` is ``file:line``, ``command line`` or another origin; ``key`` is dotted and empty when the
    mistake belongs to no key; ``given`` is the value as it would be written in YAML, None without one.

    Example: ``Problem("run.yaml:3", "env.num_env", "8", "unknown key; did you mean num_envs?")``.
    """

    where: str
    key: str
    given: str | None
    message: str

    def __str__(self) -> str:
        shown = self.key if self.given is None else f"{self.key} = {self.given}"
        return f"{self.where}: {shown}\n    {self.message}" if self.key else f"{self.where}: {self.message}"


class ConfigProblems(ConfigError):
    """Every mistake of a configuration at once; ``problems`` holds them one by one."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"{count} in the configuration:\n{lines}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` was probably meant to be, if any is close."""
    by_plain_form = {_plain_form(candidate): candidate for candidate in known}
    matches = difflib.get_close_matches(_plain_form(name), by_plain_form, n=1, cutoff=0.6)
    return by_plain_form[matches[0]] if matches else None


def _plain_form(name: str) -> str:
    return name.lower().replace("-", "_")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Complete a message about an unknown name: the nearest known one, or all of them.

    Example: ``did_you_mean("num_env", ["id", "num_envs"])`` is ``"did you mean num_envs?"``.
    """
    names = sorted(known)
    close = nearest(name, names)
    if close is not None:
        return f"did you mean {close}?"
    return f"known: {', '.join(names)}" if names else "there are none"


def shown(value: object, limit: int = 60) -> str:
    """A value as it would stand in YAML, cut to ``limit`` characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
