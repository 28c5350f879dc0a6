"""Finding the valid actions of a story: commands are tried from a saved state, and kept if the world differs.

Candidates are frames of verbs, those the story's dictionary knows, over the things in view, by the story's
own names for them. The budget counts candidates, never seconds, so that the same state has the same actions
on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

NAME = "frames-1"
"""Name and version of the finder: a change of what it finds changes this."""
BUDGET = 3000
_ALONE = "north|south|east|west|northeast|northwest|southeast|southwest|up|down|in|out|wait"
_ONE = (
    "take _|drop _|open _|close _|push _|pull _|turn _|turn on _|turn off _|move _|raise _|lower _|climb _"
    "|enter _|read _|eat _|drink _|wear _|remove _|wave _|rub _|ring _|wind _|light _|extinguish _|attack _"
    "|break _|dig _|fill _|board _|unlock _|untie _|inflate _|deflate _|burn _|launch _|search _|look in _"
    "|look under _|talk to _|sit on _|stand on _|get in _|get off _|jump over _|insult _|point at _|buy _"
    "|touch _|knock on _"
)
_TWO = (
    "put _ in _|put _ on _|give _ to _|unlock * with +|open * with +|attack * with +|tie _ to _|turn * with +"
    "|cut * with +|light * with +|dig * with +|throw _ at _|inflate * with +|fill + with *|show _ to _"
    "|pour _ on _|ask * about +"
)
"""Frames of two things: the held one is the + or comes first."""
_BASELINES = ("look", "wait", "inventory")
_WORD = re.compile(r"[a-z][a-z'-]*")
_DULL = "all it them him her me self one and the of to in on at here there you your north south east west"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words of a story's dictionary, cut to ``length`` letters: all of them, verbs, and nouns."""

    length: int
    words: frozenset[str]
    verbs: tuple[str, ...]
    nouns: frozenset[str]

    def knows(self, word: str) -> bool:
        """Return True if the parser knows this word."""
        return word[: self.length] in self.words


@dataclass(frozen=True, slots=True)
class Sight:
    """Things in view: names of things, which of them are held, and the text."""

    things: tuple[str, ...]
    held: tuple[str, ...]
    text: str


class Trial(Protocol):
    """A story whose commands can be tried."""

    def outcome(self, command: str) -> bytes:
        """Carry a command out from the state at hand, return what the world is then, and undo it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Labels of the valid actions, and how many candidates were tried, and left over by the budget."""

    labels: tuple[str, ...]
    num_tried: int
    num_left: int


def find(trial: Trial, vocabulary: Vocabulary, sight: Sight, budget: int = BUDGET) -> Found:
    """Return the candidates that change the world, the first of each change; waiting is always one."""
    nothing = {trial.outcome(command) for command in ("", *_BASELINES)}
    found: dict[bytes, str] = {}
    tried = left = 0
    for command in dict.fromkeys(candidates(vocabulary, sight)):
        if tried == budget:
            left += 1
            continue
        tried += 1
        outcome = trial.outcome(command)
        if outcome not in nothing:
            found.setdefault(outcome, command)
    waiting = ("wait",) if vocabulary.knows("wait") else ()
    return Found((*found.values(), *waiting), tried, left)


def candidates(vocabulary: Vocabulary, sight: Sight) -> Iterator[str]:
    """Yield commands, likely ones first."""
    yield from _known(_ALONE, vocabulary)
    nouns = [*sight.things, *text_nouns(vocabulary, sight)]
    ones = list(_known(_ONE, vocabulary))
    yield from (frame.replace("_", noun) for noun in nouns for frame in ones)
    for frame in _known(_TWO, vocabulary):
        for held in sight.held:
            for thing in sight.things:
                if thing != held:
                    yield _fill(frame, held, thing)
    yield from vocabulary.verbs


def _fill(frame: str, held: str, thing: str) -> str:
    """Put both names into a frame: the held one first, or where the + is."""
    if "_" in frame:
        return frame.replace("_", held, 1).replace("_", thing, 1)
    return frame.replace("+", held).replace("*", thing)


def _known(frames: str, vocabulary: Vocabulary) -> Iterator[str]:
    """Yield the frames whose words the story's parser knows."""
    for frame in frames.split("|"):
        if all(vocabulary.knows(word) for word in frame.split() if word.isalpha()):
            yield frame


def text_nouns(vocabulary: Vocabulary, sight: Sight) -> Iterator[str]:
    """Yield nouns of the text that are no name of a thing in view: scenery, for the most part."""
    last = {thing.split()[-1][: vocabulary.length] for thing in sight.things}
    seen = set(_DULL.split())
    for word in _WORD.findall(sight.text.lower()):
        short = word[: vocabulary.length]
        if short in vocabulary.nouns and short not in last | seen and len(word) > 2:
            seen.add(short)
            yield word


def name_of(short_name: str, names: Sequence[str], length: int, text: str) -> str:
    """Return a word for a thing: of its short name if the parser knows it, else its first noun in full.

    Example: ``name_of("small mailbox", ["mailbo", "box"], 6, "")`` is ``"mailbox"``.
    """
    own: list[str] = _WORD.findall(short_name.lower())
    for word in reversed(own):
        if word[:length] in names:
            return word
    seen: list[str] = _WORD.findall(text.lower())
    whole = {word[:length]: word for word in reversed(seen)}
    return whole.get(names[0], names[0])
