"""Protocol of text games: what players, priors, searches and collectors are written against.

A program that plays at random::

    game = find_family("tiny").make(seed=7)
    scene = game.start()
    while not scene.done:
        scene = game.step(random.choice(game.actions()))
    print(scene.score / game.max_score)

A search goes back with ``game.restore(state)`` to any ``state = game.save()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Scene(NamedTuple):
    """The present state of a game in words.

    ``answer`` is what the game said to the last command, ``room`` where one is and what can be seen there,
    ``inventory`` what one holds, ``goal`` what is to be done (empty where a game does not say it). ``score``
    is all that was scored since the start, and ``done`` is True once nothing more can happen.

    ``key`` stands for what is in view: scenes with equal keys have the same valid actions. Neither the answer
    nor the score is part of it.

    Example: ``Scene("Taken.", "Mill. ...", "You carry a rope.", "", 0.0, False, "9f2c...")``.
    """

    answer: str
    room: str
    inventory: str
    goal: str
    score: float
    done: bool
    key: str

    @property
    def view(self) -> str:
        """Room, inventory and goal: the text without what was said last."""
        return "\n".join(part for part in (self.room, self.inventory, self.goal) if part)


@runtime_checkable
class Game(Protocol):
    """A text game: one world, which is started, changed by commands, saved and put back.

    ``name`` tells it from all others: a family with its seed, or a file. ``max_score`` is the most that can
    be scored. Everything a game does follows from its name and the commands since the start.
    """

    @property
    def name(self) -> str:
        """Such as ``tiny:7``."""

    @property
    def max_score(self) -> float:
        """The most that can be scored; NaN where nobody knows."""

    def start(self) -> Scene:
        """Begin anew."""

    def step(self, command: str) -> Scene:
        """Carry a command out. One that the game does not know is answered, and changes nothing."""

    def scene(self) -> Scene:
        """Return the present scene again."""

    def actions(self) -> Sequence[str]:
        """Return the valid actions of the present state, each one once and always in the same order.

        Empty when the game is over. Story files look for them, which takes as long as some thousand steps.
        """

    def save(self) -> bytes:
        """Return the whole state: what a game of the same name needs to go on from here."""

    def restore(self, state: bytes) -> None:
        """Put a state back that a game of the same name has saved, in whatever process."""

    def close(self) -> None:
        """Give back what the game holds, such as a process; it is not used after that."""


@runtime_checkable
class SolvedGame(Game, Protocol):
    """A game that knows its solution, from any state: a teacher, and an oracle for tests."""

    def expert(self) -> str | None:
        """Return the action the solution takes here; None when the game is over."""
