"""A game of the tiny family: fetch treasures out of closed things, each with the tool that fits it.

An errand names a treasure and the thing it lies in. What opens that thing, and where such a tool is kept,
is not said: it is the same in all games. A tool that is used on the wrong thing goes back to where it is
kept, so that nothing is ever lost and a mistake costs the way. With each treasure that is brought, everything
is closed and back in its place: errands are independent, and the shortest solution of the game is that of its
errands in a row.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from offbeat.envs.text.game import Scene
from offbeat.envs.text.tiny.words import HOME
from offbeat.envs.text.tiny.world import World
from offbeat.errors import EnvError

_OPENING = "You wake up from a nap."
_NOT_UNDERSTOOD = "That is not possible here."


class _State(NamedTuple):
    """Errands done, the room, and what is held and open as bits of things and closed things."""

    done: int = 0
    room: int = 0
    held: int = 0
    open: int = 0


class TinyGame:
    """One game: a `World` and what has changed in it.

    It scores 1 for opening what a treasure lies in, and 1 for bringing the treasure.
    """

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self._state = _State()
        self._answer = _OPENING
        self._commands: dict[str, Callable[[], str]] | None = None

    @property
    def max_score(self) -> float:
        """Two for each errand."""
        return 2.0 * len(self.world.errands)

    def start(self) -> Scene:
        """Begin anew."""
        self._set(_State(), _OPENING)
        return self.scene()

    def step(self, command: str) -> Scene:
        """Carry a valid action out; anything else is answered and changes nothing."""
        action = self._valid().get(command)
        self._answer = _NOT_UNDERSTOOD if action is None else action()
        return self.scene()

    def actions(self) -> Sequence[str]:
        """Return moves, then takes, uses and gifts."""
        return tuple(self._valid())

    def save(self) -> bytes:
        """Return four numbers and the last answer."""
        return f"{' '.join(map(str, self._state))}\n{self._answer}".encode()

    def restore(self, state: bytes) -> None:
        """Put a saved state back."""
        numbers, separator, answer = state.decode().partition("\n")
        found = [int(word) for word in numbers.split() if word.isdecimal()]
        limits = (len(self.world.errands) + 1, len(self.world.rooms), *self._bits())
        is_right = len(found) == len(limits) and all(map(operator.lt, found, limits))
        if not separator or not is_right:
            raise EnvError(f"a state of {self.name} was expected, not {numbers!r:.40}: restore what it saved")
        self._set(_State(*found), answer)

    def close(self) -> None:
        """Hold nothing."""

    def expert(self) -> str | None:
        """Return the next action of the shortest solution; among equally short ones the signposted way."""
        from offbeat.envs.text.tiny.solver import next_action

        return next_action(self)

    # ------------------------------------------------------------ what is where

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Errands done, the room, and what is held and open as bits."""
        return self._state

    def is_here(self, thing: int) -> bool:
        """Return True if a thing can be taken in this room."""
        state, world = self._state, self.world
        if state.held >> thing & 1 or world.things[thing].room != state.room:
            return False
        owner = thing - (len(world.things) - len(world.errands))
        return owner < 0 or (owner == state.done and bool(state.open >> world.errands[owner].closed & 1))

    def _bits(self) -> tuple[int, int]:
        return 1 << len(self.world.things), 1 << len(self.world.closed)

    def _set(self, state: _State, answer: str) -> None:
        self._state, self._answer, self._commands = state, answer, None

    def _held(self) -> list[int]:
        return self._sorted(i for i in range(len(self.world.things)) if self._state.held >> i & 1)

    def _here(self) -> list[int]:
        return self._sorted(i for i in range(len(self.world.things)) if self.is_here(i))

    def _closed_here(self) -> list[int]:
        return [i for i, one in enumerate(self.world.closed) if one.room == self._state.room]

    def _sorted(self, things: Iterable[int]) -> list[int]:
        return sorted(things, key=lambda i: self.world.things[i].name)

    # ------------------------------------------------------------ text

    def scene(self) -> Scene:
        """Describe the present state."""
        parts = self._describe_room(), self._describe_hands(), self._describe_goal()
        key = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
        done = self._state.done == len(self.world.errands)
        return Scene(self._answer, *parts, self._score(), done, key)

    def _score(self) -> float:
        state = self._state
        if state.done == len(self.world.errands):
            return self.max_score
        return 2.0 * state.done + float(state.open >> self.world.errands[state.done].closed & 1)

    def _describe_room(self) -> str:
        world, room = self.world, self._state.room
        near = ", ".join(world.rooms[at] for at in world.exits[room])
        far = "".join(
            f" To the {world.rooms[at]} by the {world.rooms[by]}."
            for at, by in world.ways[room].items()
            if at != by
        )
        closed = [
            f"the {world.closed[i].name} ({'open' if self._state.open >> i & 1 else 'closed'})"
            for i in self._closed_here()
        ]
        things = [_some(world.things[i].name) for i in self._here()]
        here = f" Here: {', '.join([*closed, *things])}." if closed or things else ""
        host = f" Old {world.host} is waiting." if room == 0 else ""
        return f"You are in the {world.rooms[room]} of {world.owners[room]}.{host}{here} Doors: {near}.{far}"

    def _describe_hands(self) -> str:
        held = ", ".join(_some(self.world.things[i].name) for i in self._held())
        return f"You carry {held or 'nothing'}."

    def _describe_goal(self) -> str:
        world, state = self.world, self._state
        if state.done == len(world.errands):
            return "All is done."
        errand = world.errands[state.done]
        closed = world.closed[errand.closed]
        is_open = "is open" if state.open >> errand.closed & 1 else "is closed"
        return (
            f"Old {world.host} in the {HOME} wants the {world.things[errand.treasure].name} "
            f"from the {closed.name} in the {world.rooms[closed.room]}, which {is_open}."
        )

    # ------------------------------------------------------------ rules

    def _valid(self) -> dict[str, Callable[[], str]]:
        if self._commands is None:
            self._commands = self._find_valid()
        return self._commands

    def _find_valid(self) -> dict[str, Callable[[], str]]:
        world, state = self.world, self._state
        if state.done == len(world.errands):
            return {}
        held = self._held()
        found: dict[str, Callable[[], str]] = {
            f"go {world.rooms[near]}": partial(self._go, near) for near in world.exits[state.room]
        }
        found |= {f"take {world.things[i].name}": partial(self._take, i) for i in self._here()}
        for at in self._closed_here():
            if not state.open >> at & 1:
                name = world.closed[at].name
                found |= {f"use {world.things[i].name} on {name}": partial(self._use, i, at) for i in held}
        if state.room == 0:
            found |= {f"give {world.things[i].name}": partial(self._give, i) for i in held}
        return found

    def _go(self, room: int) -> str:
        self._set(self._state._replace(room=room), "")
        return f"You walk to the {self.world.rooms[room]}."

    def _take(self, thing: int) -> str:
        self._set(self._state._replace(held=self._state.held | 1 << thing), "")
        return "Taken."

    def _lose(self, thing: int, answer: str) -> str:
        """Let a thing go: it returns to where it is kept."""
        self._set(self._state._replace(held=self._state.held & ~(1 << thing)), "")
        return f"{answer} Somebody carries the {self.world.things[thing].name} back to where it belongs."

    def _use(self, thing: int, at: int) -> str:
        name = self.world.closed[at].name
        if self.world.closed[at].tool != thing:
            return self._lose(thing, f"That does not open the {name}.")
        self._set(self._state._replace(open=self._state.open | 1 << at), "")
        errand = self.world.errands[self._state.done]
        return f"The {name} is open" + ("." if errand.closed == at else ", and empty.")

    def _give(self, thing: int) -> str:
        if self.world.errands[self._state.done].treasure != thing:
            return self._lose(thing, f"Old {self.world.host} shakes his head.")
        self._set(_State(self._state.done + 1, self._state.room), "")
        return "Thank you! Everything is closed and back in its place."


def _some(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
