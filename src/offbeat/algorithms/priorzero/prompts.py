"""Prompts: what a language model is shown of a text game before it scores the valid actions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.envs.text import Scene
from offbeat.errors import ConfigError

EMPTY = ">"
"""The prompt without a state."""
_SHOWS = re.compile(r"view|view\+last:([1-9][0-9]?)|history:([1-9][0-9]?)")


class Turn(NamedTuple):
    """One step of a game: the scene before it, the command, and what was answered."""

    scene: Scene
    command: str
    answer: str


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts. All show the goal, what one holds and the room, and end where the command goes.

    ``view``: nothing else; ``view+last:n``: the last n commands with their answers; ``history:n``: the last n
    steps with their rooms, so that a prompt hardly ever comes twice.

    Example: ``Prompts("view+last:1").of(scene, turns)``.
    """

    shows: str = "view+last:1"

    def __post_init__(self) -> None:
        if not _SHOWS.fullmatch(self.shows):
            raise ConfigError(
                f"prompt.shows is {self.shows!r}; use view, view+last:N or history:N with N from 1 to 99"
            )

    def of(self, scene: Scene, turns: Sequence[Turn]) -> str:
        """Return the prompt for a scene after these turns of the game, the last one last."""
        last, history = _SHOWS.fullmatch(self.shows).groups()  # type: ignore[union-attr]
        earlier = "".join(f"{turn.scene.room}\n{_exchange(turn)}" for turn in _last(turns, history))
        exchanges = "".join(map(_exchange, _last(turns, last)))
        view = "\n".join(part for part in (scene.goal, scene.inventory, scene.room) if part)
        return f"{earlier}{view}\n{exchanges}{EMPTY}"


def label(action: str) -> str:
    """Return the text that continues a prompt when this action is taken: its end is part of it."""
    return f" {action}\n"


def _last(turns: Sequence[Turn], count: str | None) -> Sequence[Turn]:
    return turns[-int(count) :] if count else ()


def _exchange(turn: Turn) -> str:
    return f"{EMPTY} {turn.command}\n{turn.answer}\n"
