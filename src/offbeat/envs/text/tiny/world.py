"""Making the worlds of the tiny family: which rooms, things and errands a seed stands for."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.envs.text.tiny.words import HOME, KEY, ROOMS, TOOLS, names_of
from offbeat.seeding import derive_seed

NUM_KEYS = 3
_OPENS = {tool.noun: tool.opens for tool in TOOLS}


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the worlds. The defaults are those of the family, and were fixed before it was used.

    ``rooms`` are those without the hall, ``extra_ways`` connect them beyond a tree, ``tools_per_room`` and
    ``trinkets_per_room`` (which are good for nothing) lie in them. ``closed`` counts what tools open, with
    the twin that each errand's closed thing has: the same noun, another name.
    """

    rooms: int = 5
    extra_ways: int = 3
    tools_per_room: int = 3
    trinkets_per_room: int = 2
    closed: int = 9
    errands: int = 3


@dataclass(frozen=True, slots=True)
class Thing:
    """A thing one can carry: its name in commands, its noun, and the room where it is kept."""

    name: str
    noun: str
    room: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A thing that a tool opens: its whole name, its room, and which of the things fits (none: -1)."""

    name: str
    room: int
    tool: int


@dataclass(frozen=True, slots=True)
class Errand:
    """A treasure to bring to the hall, by its place among the things, and what it lies in."""

    treasure: int
    closed: int


@dataclass(frozen=True, slots=True)
class World:
    """A world that does not change: what changes is where one is, what one holds and what is open.

    ``exits[a]`` are the neighbours of room a, ``ways[a][b]`` the one on the signposted shortest path to b,
    ``distance[a][b]`` counts moves. Room 0 is the hall.
    """

    rooms: tuple[str, ...]
    owners: tuple[str, ...]
    host: str
    exits: tuple[tuple[int, ...], ...]
    ways: tuple[dict[int, int], ...]
    distance: tuple[tuple[int, ...], ...]
    things: tuple[Thing, ...]
    closed: tuple[Closed, ...]
    errands: tuple[Errand, ...]


def make_world(seed: int, part: int, size: Size) -> World:
    """Return the world of a seed, with names of one set of games (`words.names_of`)."""
    rng = random.Random(derive_seed(seed, "tiny"))
    names = iter(rng.sample(names_of(part), 80))
    rooms = [HOME, *rng.sample(ROOMS, size.rooms)]
    owners = tuple(next(names) for _ in rooms)
    host = next(names)
    exits = _make_exits(len(rooms), size.extra_ways, rng)
    ways, distance = _find_ways(exits)
    things, closed, errands = _furnish(rooms, names, size, rng)
    return World(tuple(rooms), owners, host, exits, ways, distance, things, closed, errands)


def _make_exits(num_rooms: int, extra: int, rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Connect the rooms by a random tree and some doors more; return the neighbours of each room."""
    pairs = {(rng.randrange(room), room) for room in range(1, num_rooms)}
    others = [(a, b) for b in range(num_rooms) for a in range(b) if (a, b) not in pairs]
    pairs |= set(rng.sample(others, min(extra, len(others))))
    return tuple(
        tuple(sorted({a + b - room for a, b in pairs if room in (a, b)})) for room in range(num_rooms)
    )


def _find_ways(
    exits: tuple[tuple[int, ...], ...],
) -> tuple[tuple[dict[int, int], ...], tuple[tuple[int, ...], ...]]:
    """Find the first room on the way from each room to each other one, and how far it is."""
    ways: list[dict[int, int]] = []
    distances: list[tuple[int, ...]] = []
    for start in range(len(exits)):
        distance, first = {start: 0}, dict[int, int]()
        queue = deque([start])
        while queue:
            room = queue.popleft()
            for near in exits[room]:
                if near not in distance:
                    distance[near] = distance[room] + 1
                    first[near] = first.get(room, near)
                    queue.append(near)
        ways.append(dict(sorted(first.items())))
        distances.append(tuple(distance[room] for room in range(len(exits))))
    return tuple(ways), tuple(distances)


def _furnish(
    rooms: list[str], names: Iterator[str], size: Size, rng: random.Random
) -> tuple[tuple[Thing, ...], tuple[Closed, ...], tuple[Errand, ...]]:
    """Put tools, trinkets, closed things and treasures into the rooms."""
    things = _make_tools(rooms, names, size, rng)
    closed: list[Closed] = []
    for number, tool in enumerate(rng.sample(range(len(things)), size.closed - size.errands)):
        room = rng.choice([at for at in range(1, len(rooms)) if at != things[tool].room])
        closed.append(_make_closed(things, tool, room, names))
        if number < size.errands:
            # The same kind under another name, and every other time beside it: the noun alone does not do.
            twin_room = room if rng.random() < 0.5 else rng.randrange(1, len(rooms))
            closed.append(_make_twin(things[tool], tool, twin_room, names))
    things += [Thing(next(names), "", at) for at in range(len(rooms)) for _ in range(size.trinkets_per_room)]
    errands = [Errand(len(things) + number, 2 * number) for number in range(size.errands)]
    things += [Thing(next(names), "", closed[errand.closed].room) for errand in errands]
    return tuple(things), tuple(closed), tuple(errands)


def _make_tools(rooms: list[str], names: Iterator[str], size: Size, rng: random.Random) -> list[Thing]:
    """Choose the tools of each room; of keys there are several, each with a name."""
    found: list[Thing] = []
    for at, room in enumerate(rooms):
        kept = [tool.noun for tool in TOOLS if tool.room == room]
        for noun in rng.sample(kept, min(size.tools_per_room, len(kept))):
            count = NUM_KEYS if noun == KEY else 1
            found += [Thing(f"{next(names)} {KEY}" if noun == KEY else noun, noun, at) for _ in range(count)]
    return found


def _make_closed(things: list[Thing], tool: int, room: int, names: Iterator[str]) -> Closed:
    """Return a thing that this tool opens; one for a key has the key's name."""
    noun = things[tool].noun
    name = things[tool].name.split()[0] if noun == KEY else next(names)
    return Closed(f"{name} {_OPENS[noun]}", room, tool)


def _make_twin(thing: Thing, tool: int, room: int, names: Iterator[str]) -> Closed:
    return Closed(f"{next(names)} {_OPENS[thing.noun]}", room, -1 if thing.noun == KEY else tool)
