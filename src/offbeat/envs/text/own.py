"""Somebody's own text game: a class with a few plain attributes that change, and three methods."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence

from offbeat.envs.text.game import Scene
from offbeat.errors import EnvError


class OwnGame(ABC):
    """Base of own games. `begin` sets attributes to plain values (numbers, text, lists, mappings); these are
    the state, which is saved and put back without another line.

    Class attributes ``max_score`` and ``goal`` say what is to be reached. `command` changes the attributes,
    may raise ``self.score`` or set ``self.done``, and returns the answer.

    Example: see docs/text-games.md.
    """

    max_score: float = 1.0
    goal: str = ""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.start()

    @abstractmethod
    def begin(self, seed: int) -> str:
        """Set the attributes of the first state, and return the opening text."""

    @abstractmethod
    def look(self) -> str:
        """Describe what is in view."""

    @abstractmethod
    def actions(self) -> Sequence[str]:
        """Return the valid actions, each once."""

    @abstractmethod
    def command(self, text: str) -> str:
        """Carry a command out and return the answer."""

    # ------------------------------------------------------------ the protocol of games

    @property
    def name(self) -> str:
        """The class and the seed."""
        return f"{type(self).__module__}:{type(self).__qualname__}:{self._seed}"

    def start(self) -> Scene:
        """Begin anew."""
        for one in [one for one in vars(self) if one != "_seed"]:
            delattr(self, one)
        self.score, self.done = 0.0, False
        self._answer = self.begin(self._seed)
        self._check_state()
        return self.scene()

    def step(self, command: str) -> Scene:
        """Carry a command out, unless the game is over."""
        if not self.done:
            self._answer = self.command(command)
        return self.scene()

    def scene(self) -> Scene:
        """Return the present scene."""
        view = self.look()
        key = hashlib.blake2b("\n".join((view, *self.actions())).encode(), digest_size=16).hexdigest()
        return Scene(self._answer, view, "", self.goal, float(self.score), self.done, key)

    def save(self) -> bytes:
        """Return all attributes as JSON."""
        return json.dumps(vars(self)).encode()

    def restore(self, state: bytes) -> None:
        """Put attributes back."""
        try:
            kept = json.loads(state)
            is_right = kept.keys() == vars(self).keys()
        except (ValueError, AttributeError):
            is_right = False
        if not is_right:
            raise EnvError(f"a state of {self.name} was expected: restore what it saved")
        vars(self).update(kept)

    def close(self) -> None:  # noqa: B027 - most games hold nothing
        """Give back what the game holds."""

    def _check_state(self) -> None:
        """Refuse attributes that a saved state could not give back as they are."""
        for name, value in vars(self).items():
            try:
                is_plain = json.loads(json.dumps(value)) == value
            except (TypeError, ValueError):
                is_plain = False
            if not is_plain:
                raise EnvError(
                    f"{type(self).__name__}.{name} is {value!r:.60}, which a saved state cannot give back: "
                    "use numbers, text, lists and mappings with text as keys"
                )
