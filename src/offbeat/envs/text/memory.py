"""Reading a Z-machine's memory: objects, where they are, and the words that stand for them.

The layout is that of the Z-Machine Standards Document 1.1 (https://inform-fiction.org/zmachine/standards/z1point1/).
``ram`` is the dynamic memory of a state, all else comes from the story file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import EnvError
from offbeat.reading import read_file

Ram = NDArray[np.uint8]
STORY_BYTES = 1 << 20
VERSIONS = (3, 4, 5, 8)
_SMALLEST = 64
_TIMED = 0x02
"""Flag of version 3: the status line shows the time of day instead of score and moves."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of the memory; ``entry`` bytes for each object, ``attributes`` of them first."""

    version: int
    objects: int
    num_objects: int
    entry: int
    attributes: int
    globals: int

    @property
    def link(self) -> int:
        """Bytes of an object's number."""
        return 1 if self.version == 3 else 2


@dataclass(frozen=True, slots=True)
class Story:
    """A story file: its bytes, its layout, and the address of each dictionary word in their order."""

    data: bytes
    layout: Layout
    words: tuple[int, ...]

    @property
    def is_timed(self) -> bool:
        """A version 3 story without a score."""
        return self.layout.version == 3 and bool(self.data[1] & _TIMED)


_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    " \n0123456789.,!?_#'\"/\\-:()",
)


def decode(data: bytes | Ram, at: int, story: Story, is_whole: bool = True) -> str:
    """Return the text at an address, Z-characters in words of 16 bits; abbreviations hold none themselves."""
    codes: list[int] = []
    while True:
        word, at = _word(data, at), at + 2
        codes += [word >> 10 & 31, word >> 5 & 31, word & 31]
        if word & 0x8000:
            break
    text, shift, place = "", 0, 0
    while place < len(codes):
        code, place = codes[place], place + 1
        if code in (4, 5):
            shift = code - 3
            continue
        if code in (1, 2, 3) and is_whole and place < len(codes):
            number, place = 32 * (code - 1) + codes[place], place + 1
            text += decode(
                story.data, 2 * _word(story.data, _word(story.data, 0x18) + 2 * number), story, False
            )
        elif code == 0:
            text += " "
        elif code >= 6 and shift == 2 and code == 6:
            text, place = (
                text + chr(codes[place] << 5 | codes[place + 1]) if place + 1 < len(codes) else text,
                place + 2,
            )
        elif code >= 6:
            text += _ALPHABETS[shift][code - 6]
        shift = 0
    return text


def read_story(path: Path) -> Story:
    """Read a story file; EnvError for one that is none, or of a version that cannot be played."""
    try:
        data = read_file(path, STORY_BYTES)
    except OSError as error:
        raise EnvError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) < _SMALLEST or data[0] not in range(1, 9):
        raise EnvError(
            f"{path} is no story file of the Z-machine: give one that ends in .z3, .z4, .z5 or .z8"
        )
    if data[0] not in VERSIONS:
        raise EnvError(
            f"{path} is a story of version {data[0]}: versions {', '.join(map(str, VERSIONS))} are played"
        )
    try:
        return Story(data, _layout(data), tuple(_words(data)))
    except IndexError:
        raise EnvError(f"{path} is a story file that is cut off or damaged: fetch it again") from None


def _word(data: Sequence[int] | Ram, at: int) -> int:
    return int(data[at]) << 8 | int(data[at + 1])


def _layout(data: bytes) -> Layout:
    is_old = data[0] == 3
    entry, attributes = (9, 4) if is_old else (14, 6)
    first = _word(data, 10) + (62 if is_old else 126)
    # Property tables follow the objects: the lowest one ends them.
    end, at = len(data), first
    while at + entry <= end:
        end = min(end, _word(data, at + entry - 2))
        at += entry
    return Layout(data[0], first, (at - first) // entry, entry, attributes, _word(data, 12))


def _words(data: bytes) -> Iterator[int]:
    at = _word(data, 8)
    at += 1 + data[at]
    length, count = data[at], abs(int.from_bytes(data[at + 1 : at + 3], "big", signed=True))
    if not length or at + 3 + length * count > len(data):
        raise IndexError
    yield from range(at + 3, at + 3 + length * count, length)


class Memory:
    """Objects of one state: ``parents [N + 1]`` by number, and their ``attributes [N + 1, 4 or 6]``."""

    def __init__(self, story: Story, ram: Ram) -> None:
        self._story, self._ram = story, ram
        layout = story.layout
        size = layout.num_objects * layout.entry
        self.table = ram[layout.objects : layout.objects + size].reshape(layout.num_objects, layout.entry)
        links = self.table[:, layout.attributes :]
        if layout.link == 1:
            parents = links[:, 0].astype(np.int64)
        else:
            parents = links[:, 0].astype(np.int64) << 8 | links[:, 1]
        self.parents = np.concatenate([[0], parents])

    def global_word(self, number: int) -> int:
        """Return a global variable; in version 3 the first ones are room, score and moves."""
        return _word(self._ram, self._story.layout.globals + 2 * number)

    def signed_global(self, number: int) -> int:
        """Return a global variable as a number that may be negative."""
        value = self.global_word(number)
        return value - (value >> 15 << 16)

    def world(self) -> bytes:
        """Return attributes and parents of all objects: what a command has changed shows in it.

        Siblings and children only repeat the parents, in an order.
        """
        layout = self._story.layout
        return self.table[:, : layout.attributes + layout.link].tobytes()

    def below(self, top: int) -> list[int]:
        """Return the numbers of all objects in, on or held by one, at any depth, in ascending order."""
        inside = np.zeros(len(self.parents), bool)
        inside[top] = True
        while True:
            grown = inside | inside[self.parents]
            grown[0] = False
            if (grown == inside).all():
                break
            inside = grown
        inside[top] = False
        return [int(number) for number in np.flatnonzero(inside)]

    def holder(self, number: int) -> int:
        """Return what an object is in, on or held by; 0 for none, and for a number that is no object."""
        return int(self.parents[number]) if number < len(self.parents) else 0

    def rows(self, numbers: Sequence[int]) -> bytes:
        """Return attributes and parents of some objects, with their numbers."""
        layout = self._story.layout
        at = np.asarray(numbers, np.int64)
        kept = self.table[at - 1, : layout.attributes + layout.link]
        return at.astype(">u2").tobytes() + kept.tobytes()

    def properties(self, number: int) -> Iterator[bytes]:
        """Yield the values of an object's properties."""
        layout, ram = self._story.layout, self._ram
        at = _word(self.table[number - 1], layout.entry - 2)
        at += 1 + 2 * int(ram[at])
        while at < len(ram) and ram[at]:
            first, at = int(ram[at]), at + 1
            if layout.version == 3:
                length = (first >> 5) + 1
            elif first & 0x80:
                length, at = (int(ram[at]) & 0x3F) or 64, at + 1
            else:
                length = 2 if first & 0x40 else 1
            yield ram[at : at + length].tobytes()
            at += length

    def short_name(self, number: int) -> str:
        """Return what the game calls an object, such as ``small mailbox``; it may be empty."""
        at = _word(self.table[number - 1], self._story.layout.entry - 2)
        return decode(self._ram, at + 1, self._story) if self._ram[at] else ""

    def names(self, number: int, words: Mapping[int, str]) -> list[str]:
        """Return the dictionary words that stand for an object: a property that lists their addresses."""
        for value in self.properties(number):
            found = [_word(value, at) for at in range(0, len(value) - 1, 2)]
            if len(value) % 2 == 0 and found and all(address in words for address in found):
                return [words[address] for address in found]
        return []
