"""Text games: story files, TextWorld, a generated family of tiny games, and somebody's own.

A game is asked with words and answers with words (`offbeat.envs.text.game`). A family makes games from seeds,
in disjoint sets (`offbeat.envs.text.families`). No torch.
"""

from __future__ import annotations

from offbeat.envs.text.families import FAMILIES, PARTS, Family, Part, find_family
from offbeat.envs.text.game import Game, Scene, SolvedGame
from offbeat.envs.text.opening import open_game
from offbeat.envs.text.own import OwnGame
from offbeat.envs.text.remote import RemoteGame
from offbeat.envs.text.table import ActionTable, ValidActions

__all__ = [
    "FAMILIES",
    "PARTS",
    "ActionTable",
    "Family",
    "Game",
    "OwnGame",
    "Part",
    "RemoteGame",
    "Scene",
    "SolvedGame",
    "ValidActions",
    "find_family",
    "open_game",
]
