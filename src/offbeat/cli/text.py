"""``offbeat text``: commands for text games."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.output import JsonFlag, reporting, show_table
from offbeat.cli.text_priors import Advice, pretrain, prior_table
from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from offbeat.envs.text import RemoteGame, Scene, ValidActions

# Plain help, as everywhere: see `offbeat.cli.commands`.
text = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Text games. Its commands take --json.")

_GAME = typer.Argument(
    metavar="FILE|FAMILY",
    help="A story file, tiny, tiny:SEED, cooking, or module:Class of your own.",
)
_SEED = typer.Option(min=0, help="Which game of a family, or the random numbers of a story (at least 1).")
_QUIT = ("quit", "exit")
text.command("pretrain")(pretrain)
text.command("prior-table")(prior_table)


@text.command("play")
def play(
    game: Annotated[str, _GAME],
    seed: Annotated[int | None, _SEED] = None,
    table: Annotated[
        Path | None, typer.Option(help="Keep valid actions that were found in this file.")
    ] = None,
    prior: Annotated[
        Path | None, typer.Option(help="A model's folder: show how likely it holds each action.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Play a text game yourself.

    Type a command, or the number of a valid action; quit ends the game.
    """
    with reporting(as_json) as report:
        from offbeat.envs.text import ActionTable, RemoteGame, ValidActions

        valid = ValidActions(ActionTable(table))
        opened = RemoteGame(_found(game), seed)
        try:
            scene, num_steps = _play(opened, valid, None if prior is None else Advice(prior))
        finally:
            opened.close()
            valid.table.close()
        show_table(f"{opened.name} after {num_steps} steps", {"result": _score(scene, opened)})
        report.values.update(
            game=opened.name, score=scene.score, max_score=opened.max_score, steps=num_steps, done=scene.done
        )


def _play(game: RemoteGame, valid: ValidActions, advice: Advice | None) -> tuple[Scene, int]:
    """Ask for commands until the game or the input ends."""
    scene, num_steps = game.start(), 0
    print(scene.answer)
    while not scene.done:
        actions = valid.of(game, scene)
        print(f"\n{scene.view}\n[{_score(scene, game)}]\n")
        shares = [""] * len(actions) if advice is None else advice.shares(scene, actions)
        lines = (f"{number:3} {share}{actions[number - 1]}" for number, share in enumerate(shares, 1))
        print("\n".join(lines))
        command = _ask()
        if command is None:
            break
        if command.isdecimal() and 1 <= int(command) <= len(actions):
            command = actions[int(command) - 1]
        before, scene, num_steps = scene, game.step(command), num_steps + 1
        if advice is not None:
            advice.took(before, command, scene)
        print(f"\n{scene.answer}")
    return scene, num_steps


def _ask() -> str | None:
    """Return the next command; None at the end of the input or of the player's wish."""
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip().lower() in _QUIT:
            return None
        if line.strip():
            return line.strip()


@text.command("actions")
def actions(
    game: Annotated[str, _GAME],
    steps: Annotated[int, typer.Option(min=1, help="Steps of play at random among valid actions.")] = 500,
    seed: Annotated[int | None, _SEED] = None,
    budget: Annotated[int, typer.Option(min=1, help="Candidates tried in one state of a story.")] = 3000,
    max_actions: Annotated[int | None, typer.Option(min=1, help="Cut longer lists, and count.")] = None,
    table: Annotated[Path | None, typer.Option(help="A file to keep found valid actions in.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure valid actions along random play."""
    with reporting(as_json) as report:
        from offbeat.envs.text import ActionTable, RemoteGame, ValidActions
        from offbeat.envs.text.measuring import measure

        valid = ValidActions(ActionTable(table), max_actions)
        opened = RemoteGame(_found(game), seed, budget)
        try:
            measured = measure(opened, valid, steps, random.Random(0 if seed is None else seed))
        finally:
            opened.close()
            valid.table.close()
        show_table(opened.name, measured.rows())
        report.values.update(game=opened.name, **measured.values())


def _found(game: str) -> str:
    """Refuse a file that is not there before a process is started for it."""
    if game.lower().endswith((".z3", ".z4", ".z5", ".z8")) and not Path(game).is_file():
        raise ConfigError(f"{game} does not exist: give the path of a story file")
    return game


def _score(scene: Scene, game: RemoteGame) -> str:
    most = "" if game.max_score != game.max_score else f" of {game.max_score:g}"
    return f"score {scene.score:g}{most}"
