"""A process in which a game runs: it can be killed at any time, its owner has the state.

Started by `offbeat.envs.text.remote`. Requests and replies are pickled; both ends are this program.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from offbeat.envs.text.finding import Found
from offbeat.envs.text.game import Game, Scene
from offbeat.envs.text.opening import open_game
from offbeat.envs.text.table import SearchedGame
from offbeat.errors import ConfigError, OffbeatError


class About(NamedTuple):
    """Constants of a game; ``md5``, ``finder`` and ``budget`` are empty without a finder."""

    name: str
    max_score: float
    md5: str
    finder: str
    budget: int


class Failure(NamedTuple):
    """An exception in the child: a mistake of ours or of the game's, or of the caller's."""

    is_config: bool
    is_ours: bool
    text: str


def serve(connection: Connection, what: str, seed: int | None, budget: int) -> None:
    """Open a game and answer requests until the owner closes the pipe."""
    game: Game | None = None
    while True:
        try:
            request, argument = connection.recv()
        except (EOFError, OSError):
            return
        started_s = time.process_time()
        try:
            if game is None:
                game = open_game(what, seed, budget)
            reply = _answer(game, request, argument)
        except Exception as error:
            text = str(error) if isinstance(error, OffbeatError) else traceback.format_exc()
            reply = Failure(isinstance(error, ConfigError), isinstance(error, OffbeatError), text)
        try:
            connection.send((reply, time.process_time() - started_s))
        except OSError:
            return


def _answer(game: Game, request: str, argument: Any) -> object:
    if request == "about":
        if isinstance(game, SearchedGame):
            return About(game.name, game.max_score, game.md5, game.finder, game.budget)
        return About(game.name, game.max_score, "", "", 0)
    if request in ("start", "step"):
        scene: Scene = game.start() if request == "start" else game.step(argument)
        return scene, game.save()
    if request == "restore":
        game.restore(argument)
        return game.scene()
    if request == "expert":
        expert = getattr(game, "expert", None)
        return None if expert is None else expert()
    return game.find() if isinstance(game, SearchedGame) else Found(tuple(game.actions()), 0, 0)


def _die_with_parent() -> None:
    """Ask Linux to end this process when its owner dies, even in the middle of a native call."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(arguments: Sequence[str]) -> None:
    """Serve the game of a command line: descriptor, game, seed (empty: its own), budget."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what it means
    descriptor, what, seed, budget = arguments
    serve(Connection(int(descriptor)), what, int(seed) if seed else None, int(budget))
