"""Families of games: a seed makes a game, and sets of seeds keep training and judging apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from offbeat.envs.text.game import SolvedGame
from offbeat.errors import ConfigError

Part = Literal["pretrain", "train", "held_out"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True)
class Family:
    """Games that a seed makes, in three disjoint sets of seeds; invented names occur in one set only.

    Priors are trained on games of ``pretrain`` alone, a search learns on ``train``, and ``held_out`` is for
    judging: nothing has seen these.

    Example: ``find_family("tiny").make(seed=find_family("tiny").seeds("held_out")[0])``.
    """

    name: str
    about: str
    sizes: tuple[int, int, int]
    maker: Callable[[str, int, int], SolvedGame]
    """Makes a game of a name, a seed and the number of its set."""

    def seeds(self, part: Part) -> range:
        """Return the seeds of a set."""
        at = PARTS.index(part)
        first = sum(self.sizes[:at])
        return range(first, first + self.sizes[at])

    def part_of(self, seed: int) -> Part:
        """Return the set a seed belongs to; ConfigError for one that belongs to none."""
        for part in PARTS:
            if seed in self.seeds(part):
                return part
        raise ConfigError(f"{self.name} has the seeds 0 to {sum(self.sizes) - 1}, not {seed}")

    def make(self, seed: int) -> SolvedGame:
        """Make the game of a seed, not started yet."""
        return self.maker(f"{self.name}:{seed}", seed, PARTS.index(self.part_of(seed)))


def _make_tiny(name: str, seed: int, part: int) -> SolvedGame:
    from offbeat.envs.text.tiny import Size, TinyGame, make_world

    return TinyGame(name, make_world(seed, part, Size()))


def _make_cooking(rooms: int, name: str, seed: int, part: int) -> SolvedGame:
    from offbeat.envs.text.textworld import Cooking, make_cooking

    return make_cooking(Cooking(rooms), name, seed, part)


FAMILIES = {
    family.name: family
    for family in (
        Family("tiny", "fetch treasures with the tools that fit them", (6000, 2000, 2000), _make_tiny),
        Family(
            "cooking", "cook a recipe, one room (TextWorld)", (6000, 2000, 2000), partial(_make_cooking, 1)
        ),
        Family("cooking6", "the same with six rooms", (6000, 2000, 2000), partial(_make_cooking, 6)),
    )
}


def find_family(name: str) -> Family:
    """Return a family by its name; ConfigError names those there are."""
    if name not in FAMILIES:
        raise ConfigError(f"there is no family {name!r} of text games: choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]
