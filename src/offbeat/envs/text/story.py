"""Story files of the Z-machine, played by Jericho's interpreter; imports jericho.

Score, moves and the end come from Jericho where it knows the file. Of other files those of version 3 are
played: room, score and moves are the first global variables there.
"""

from __future__ import annotations

import hashlib
import re
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.envs.text.finding import BUDGET, NAME, Found, Sight, Vocabulary, find, name_of
from offbeat.envs.text.game import Scene
from offbeat.envs.text.memory import Memory, Story, read_story
from offbeat.errors import ConfigError, EnvError

_HEADER = struct.Struct("<4sd?5iqiiII")
_MAGIC = b"zst1"
_ENDED = re.compile(r"\*{2,}\s*(you have (died|won)|the end)|would you like to restart", re.IGNORECASE)
_DARK = re.compile(r"pitch black|pitch dark|too dark|^darkness", re.IGNORECASE | re.MULTILINE)
_TOTAL = re.compile(r"(?:total of|out of a possible|out of a total of|out of)\s+(\d+)", re.IGNORECASE)
_STATUS = re.compile(r"^>.*(Score|Moves|Time):.*$", re.MULTILINE)
"""The line above the text, which the interpreter prints into it: it changes with every move."""
_META = re.compile(
    r"save|restor|restar|quit|q$|undo|oops|again|g$|script|unscri|transc|notran|verif|record|replay|comman|brief"
)
"""Words for the interpreter, not for the world."""
_FILES = re.compile(r"\s*#?(save|restor|script|unscri|transc|notran|record|replay|comman)", re.IGNORECASE)
_REFUSED = "That would read or write a file, and is not done here."
_WAYS = ("north", "south", "east", "west", "up", "down", "out")


class StoryGame:
    """A story file with a seed of its interpreter, at least 1; ``budget`` bounds the finder's candidates.

    Example: ``StoryGame(Path("zork1-r119.z3"), seed=12)``.
    """

    def __init__(self, path: Path, seed: int = 1, budget: int = BUDGET) -> None:
        if seed < 1:
            raise ConfigError(
                f"the seed of a story is at least 1, not {seed}: 0 would be drawn from the clock"
            )
        jericho = _jericho()
        self._story = read_story(path)
        self._check_score(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not know a file is no news here
            self._env = jericho.FrotzEnv(str(path), seed=seed)
        self.is_known = bool(self._env.is_fully_supported)
        if not self.is_known and self._story.layout.version != 3:
            raise EnvError(
                f"{path}: Jericho does not know this file, and the score of version "
                f"{self._story.layout.version} is not known: use a file it knows, or one of version 3"
            )
        self.md5 = hashlib.md5(self._story.data).hexdigest()
        self.finder, self.budget = NAME, budget
        self.name = f"{path.name}:{seed}"
        self._words, self._vocabulary = _read_words(self._env, self._story)
        self._answer, self._is_done, self._score = "", False, 0.0
        self._env.reset()
        self._player = int(self._env.player_obj_num) if self.is_known else self._find_player()
        self.max_score = self._find_max_score()

    def _check_score(self, path: Path) -> None:
        if self._story.is_timed:
            raise EnvError(
                f"{path} shows the time instead of a score: there is nothing to reach, use another"
            )

    # ------------------------------------------------------------ the game

    def start(self) -> Scene:
        """Begin anew, with the same seed."""
        answer, _ = self._env.reset()
        self._answer, self._is_done, self._score = _clean(answer), False, 0.0
        return self.scene()

    def step(self, command: str) -> Scene:
        """Carry a command out."""
        if self._is_done:
            return self.scene()
        if _FILES.match(command):
            self._answer = _REFUSED
            return self.scene()
        answer, _, is_over, _ = self._env.step(command)
        self._answer = _clean(answer)
        self._score = self._read_score()
        self._is_done = bool(is_over) or self._env._emulator_halted()
        if not self.is_known:
            self._is_done |= _ENDED.search(answer) is not None
        return self.scene()

    def scene(self) -> Scene:
        """Return the present scene; room and inventory are asked for, and the asking is undone."""
        if self._is_done:
            return Scene(self._answer, "", "", "", self._score, True, "")
        state = self._env.get_state()
        key = self._key(self._memory(state))
        texts = []
        for command in ("look", "inventory"):
            texts.append(_clean(self._env.step(command)[0]))
            self._env.set_state(state)
        dark = b"dark" if _DARK.search(texts[0]) else b""
        digest = hashlib.blake2b(key + dark, digest_size=16).hexdigest()
        return Scene(self._answer, texts[0], texts[1], "", self._score, False, digest)

    def actions(self) -> Sequence[str]:
        """Look for the valid actions (`offbeat.envs.text.finding`)."""
        return self.find().labels

    def find(self) -> Found:
        """Look for the valid actions, and count candidates."""
        if self._is_done:
            return Found((), 0, 0)
        state = self._env.get_state()
        found = find(_Trials(self, state), self._vocabulary, self._sight(state), self.budget)
        self._env.set_state(state)
        return found

    def reaches(self, labels: Sequence[str], command: str) -> bool:
        """Return True if one of some actions does to the world what a command does."""
        trials = _Trials(self, self._env.get_state())
        target = trials.outcome(command)
        return command.lower() in labels or any(trials.outcome(label) == target for label in labels)

    def save(self) -> bytes:
        """Return the interpreter's state, its random numbers included, and the last answer."""
        ram, stack, pc, sp, fp, frames, opcode, rng, narrative = self._env.get_state()
        answer = self._answer.encode()
        head = _HEADER.pack(
            _MAGIC,
            self._score,
            self._is_done,
            pc,
            sp,
            fp,
            frames,
            opcode,
            *map(int, rng),
            len(answer),
            len(narrative),
        )
        parts: list[bytes] = [head, ram.tobytes(), stack.tobytes(), answer, narrative]
        return b"".join(parts)

    def restore(self, state: bytes) -> None:
        """Put a saved state back."""
        ram_size, stack_size = (len(part) for part in self._env.get_state()[:2])
        size = _HEADER.size + ram_size + stack_size
        if len(state) < size or state[:4] != _MAGIC:
            raise EnvError(f"a state of {self.name} was expected: restore what it saved")
        _, score, is_done, pc, sp, fp, frames, opcode, *rng, len_answer, len_narrative = _HEADER.unpack_from(
            state
        )
        if len(state) != size + len_answer + len_narrative:
            raise EnvError(f"a state of {self.name} was expected: restore what it saved")
        ram = np.frombuffer(state, np.uint8, ram_size, _HEADER.size).copy()
        stack = np.frombuffer(state, np.uint8, stack_size, _HEADER.size + ram_size).copy()
        texts = state[size:]
        self._env.set_state((ram, stack, pc, sp, fp, frames, opcode, tuple(rng), texts[len_answer:]))
        self._answer, self._score, self._is_done = texts[:len_answer].decode(), score, is_done

    def close(self) -> None:
        """Free the interpreter."""
        self._env.close()

    # ------------------------------------------------------------ memory

    def _memory(self, state: Any = None) -> Memory:
        return Memory(self._story, (self._env.get_state() if state is None else state)[0])

    def _read_score(self) -> float:
        return float(self._env.get_score()) if self.is_known else float(self._memory().signed_global(1))

    def _room(self, memory: Memory) -> int:
        """Return the object that is the room: a global of version 3, else what is around the player."""
        if self._story.layout.version == 3:
            return memory.global_word(0)
        room = self._player
        while memory.parents[room]:
            room = int(memory.parents[room])
        return room

    def _key(self, memory: Memory) -> bytes:
        """Return room, things below it and in hand with their attributes and parents, the vehicle among them.

        Things that belong to several rooms, such as doors, lie in objects that are no rooms: they count, too.
        """
        room = self._room(memory)
        return memory.rows([room, *memory.below(room), *self._shared(memory, room)])

    def _shared(self, memory: Memory, room: int) -> list[int]:
        """Return things that a property of the room lists, all of which lie in one object that is no room."""
        rooms = memory.parents[room]
        found: set[int] = set()
        if rooms:
            for value in memory.properties(room):
                holders = {memory.holder(number) for number in value}
                if len(holders) == 1 and holders.isdisjoint((0, rooms)):
                    (holder,) = holders
                    if memory.parents[holder] != rooms:
                        found.update(value)
        return sorted(found)

    def _world(self) -> bytes:
        state = self._env.get_state()
        memory = self._memory(state)
        score = self._env.get_score() if self.is_known else memory.global_word(1)
        return struct.pack("<hh", self._room(memory) & 0x7FFF, score & 0x7FFF) + memory.world()

    def _find_player(self) -> int:
        """Return the object that goes along when the room changes; 0 where no way leads out of it."""
        state = self._env.get_state()
        before = self._memory(state)
        inside = set(before.below(self._room(before)))
        for way in _WAYS:
            self._env.step(way)
            after = self._memory()
            self._env.set_state(state)
            if self._room(after) != self._room(before):
                moved = [number for number in after.below(self._room(after)) if number in inside]
                return next((one for one in moved if after.parents[one] == self._room(after)), 0)
        return 0

    def _find_max_score(self) -> float:
        if self.is_known:
            return float(self._env.get_max_score())
        state = self._env.get_state()
        found = _TOTAL.search(self._env.step("score")[0])
        self._env.set_state(state)
        return float(found[1]) if found else float("nan")

    def _sight(self, state: Any) -> Sight:
        memory = self._memory(state)
        scene = self.scene()
        text = f"{scene.room} {scene.inventory}"
        room = self._room(memory)
        held = set(memory.below(self._player)) if self._player else set()
        things: dict[str, int] = {}
        for number in [*memory.below(room), *self._shared(memory, room)]:
            names = memory.names(number, self._words)
            if number != self._player and names:
                short, length = memory.short_name(number), self._vocabulary.length
                noun = name_of(short, names, length, text)
                if noun in things and short:  # such as the trap door beside a wooden door
                    noun = " ".join(short.lower().split()[-2:])
                things.setdefault(noun, number)
        return Sight(
            tuple(things),
            tuple(noun for noun, number in things.items() if number in held or not self._player),
            text,
        )


class _Trials:
    """Commands tried from one state."""

    def __init__(self, game: StoryGame, state: Any) -> None:
        self._game, self._state = game, state

    def outcome(self, command: str) -> bytes:
        env = self._game._env
        if command:
            env.step(command)
        world = self._game._world()
        env.set_state(self._state)
        return world


def walkthrough(name: str) -> tuple[str, ...]:
    """Return the walkthrough that the installed Jericho has of a game, such as ``zork1``."""
    from jericho import game_info

    commands: str = getattr(game_info, name)["walkthrough"]
    return tuple(commands.split("/"))


def _clean(text: str) -> str:
    """Return a text without the status line and blanks around it."""
    return _STATUS.sub("", text).strip()


def _jericho() -> Any:
    try:
        import jericho
    except ImportError:
        raise ConfigError("story files need the package jericho: pip install 'offbeat[text]'") from None
    return jericho


def _read_words(env: Any, story: Story) -> tuple[dict[int, str], Vocabulary]:
    """Return the names among the dictionary's words by address, and the vocabulary for the finder."""
    words = env.get_dictionary()
    nouns = {
        at: word.word for at, word in zip(story.words, words, strict=True) if word.is_noun or word.is_adj
    }
    vocabulary = Vocabulary(
        6 if story.layout.version == 3 else 9,
        frozenset(word.word for word in words),
        tuple(
            word.word for word in words if word.is_verb and word.word.isalpha() and not _META.match(word.word)
        ),
        frozenset(word.word for word in words if word.is_noun),
    )
    return nouns, vocabulary
