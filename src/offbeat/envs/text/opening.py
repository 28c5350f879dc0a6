"""Opening a game by what it is called on a command line: a family, a story file, or a class of one's own."""

from __future__ import annotations

import re
from pathlib import Path

from offbeat.config.code import import_named
from offbeat.envs.text.families import FAMILIES, find_family
from offbeat.envs.text.finding import BUDGET
from offbeat.envs.text.game import Game
from offbeat.envs.text.own import OwnGame
from offbeat.errors import ConfigError

_STORY = re.compile(r"\.(z\d|dat)$", re.IGNORECASE)
_CLASS = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


def open_game(what: str, seed: int | None = None, budget: int = BUDGET) -> Game:
    """Open a game that is not started yet.

    Args:
        what: ``tiny``, ``tiny:7`` (family and seed), ``zork1.z3`` (a story file) or ``module:Class``.
        seed: of the game; a family's first seed for training and 1 for a story when not given.
        budget: candidates that the finder tries in one state of a story.
    """
    family, _, number = what.partition(":")
    if family in FAMILIES and (not number or number.isdecimal()):
        found = find_family(family)
        chosen = int(number) if number else seed
        return found.make(found.seeds("train")[0] if chosen is None else chosen)
    path = Path(what)
    if _STORY.search(what) or path.exists():
        from offbeat.envs.text.story import StoryGame

        return StoryGame(path, 1 if seed is None else seed, budget)
    if _CLASS.match(what):
        return _open_own(what, 0 if seed is None else seed)
    raise ConfigError(
        f"{what} is no file and no family of text games: give a story file (.z3, .z5, .z8), one of "
        f"{', '.join(FAMILIES)}, or module:Class"
    )


def _open_own(what: str, seed: int) -> Game:
    module, _, name = what.partition(":")
    try:
        kind = getattr(import_named(module), name)
    except ImportError as error:
        raise ConfigError(f"{what}: {error}; it is looked for here, too") from error
    except AttributeError:
        raise ConfigError(f"{what}: {module} has no class {name}") from None
    if not isinstance(kind, type) or not issubclass(kind, OwnGame):
        raise ConfigError(f"{what} is no text game: derive it from offbeat.envs.text.OwnGame")
    return kind(seed)
