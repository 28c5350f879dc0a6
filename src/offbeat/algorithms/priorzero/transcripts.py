"""Transcripts: states of a family's games as prompts, with the action its expert takes in each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.algorithms.priorzero.prompts import Prompts, Turn
from offbeat.envs.text import Family, Part
from offbeat.errors import ConfigError
from offbeat.seeding import derive_seed


@dataclass(frozen=True, slots=True)
class Example:
    """A state: its prompt and the view alone, the valid actions, and which of these the expert takes."""

    prompt: str
    view: str
    actions: tuple[str, ...]
    label: str


@dataclass(frozen=True, slots=True)
class Play:
    """Settings of play for transcripts.

    The expert moves, except for a share ``random_moves`` of valid actions drawn at random: states that only
    a mistake leads to are seen, too. A game is played ``plays`` times, for at most ``limit`` times as many
    steps as the expert needs.
    """

    random_moves: float = 0.4
    plays: int = 1
    limit: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.random_moves < 1 or self.plays < 1 or self.limit < 1:
            raise ConfigError(f"{self}: random_moves is at least 0 and below 1, the others at least 1")


def transcripts(
    family: Family, part: Part, seeds: Sequence[int], play: Play, prompts: Prompts
) -> list[Example]:
    """Return the states met in games of one part of a family; any other seed is refused."""
    if strange := [seed for seed in seeds if family.part_of(seed) != part]:
        raise ConfigError(
            f"seed {strange[0]} of {family.name} is not one of {part} ({family.seeds(part)}): what is "
            "learned from and what is judged have to be different games"
        )
    return [
        example
        for seed in seeds
        for number in range(play.plays)
        for example in _play(family, seed, number, play, prompts)
    ]


def expert_length(family: Family, seed: int) -> int:
    """Return how many steps the expert needs for a game."""
    game = family.make(seed)
    scene, count = game.start(), 0
    while not scene.done and (action := game.expert()) is not None:
        scene, count = game.step(action), count + 1
    game.close()
    return count


def _play(family: Family, seed: int, number: int, play: Play, prompts: Prompts) -> list[Example]:
    rng = random.Random(derive_seed(seed, f"transcript-{number}"))
    game, found = family.make(seed), list[Example]()
    scene, turns = game.start(), list[Turn]()
    limit = play.limit * expert_length(family, seed)
    while not scene.done and len(turns) < limit and (label := game.expert()) is not None:
        actions = tuple(game.actions())
        found.append(Example(prompts.of(scene, turns), scene.view, actions, label))
        command = rng.choice(actions) if rng.random() < play.random_moves else label
        after = game.step(command)
        turns.append(Turn(scene, command, after.answer))
        scene = after
    game.close()
    return found


def dealt(examples: Sequence[Example], seed: int) -> list[Example]:
    """Return the same states and the same labels, dealt to other states: nothing about states is left."""
    order = np.random.default_rng(derive_seed(seed, "dealt")).permutation(len(examples))
    return [
        Example(one.prompt, one.view, one.actions, examples[other].label)
        for one, other in zip(examples, order.tolist(), strict=True)
    ]
