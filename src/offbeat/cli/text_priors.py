"""``offbeat text pretrain`` and ``offbeat text prior-table``."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.output import JsonFlag, reporting, show_table
from offbeat.errors import ConfigError
from offbeat.progress import progress_to

if TYPE_CHECKING:
    from offbeat.algorithms.priorzero.prompts import Prompts
    from offbeat.envs.text import RemoteGame, Scene, ValidActions

MOST_VIEWS = 2000
Shown = Annotated[str, typer.Option(help="view, view+last:N or history:N: what of a game a prompt shows.")]


def pretrain(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="Whose pretraining games to learn from.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the model.")],
    games: Annotated[int, typer.Option(min=1, help="Games to learn from.")] = 200,
    checks: Annotated[int, typer.Option(min=1, help="Other such games, which stop the training.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Most training steps.")] = 6000,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
    shows: Shown = "view+last:1",
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Train a small language model on a family's pretraining games.

    It learns which valid action the family's expert takes, and nothing from any other game.
    """
    with reporting(as_json) as report:
        from offbeat.envs.text import find_family

        if folder.exists():
            raise ConfigError(f"{folder} exists: give a new folder, or remove it first")
        chosen = find_family(family)
        from offbeat.algorithms.priorzero.pretraining import PretrainConfig, pretrain_folder, set_threads
        from offbeat.algorithms.priorzero.prompts import Prompts

        set_threads(threads)
        config = PretrainConfig(games=games, checks=checks, steps=steps, seed=seed, prompts=Prompts(shows))
        with progress_to(_tell):
            manifest = pretrain_folder(chosen, config, folder)
        best = max(manifest["looks"], key=lambda look: look["log_prob"])
        rows = {
            "learned from": f"{manifest['examples']:,} states of {games} games, {best['step']} steps",
            "other games": f"top-1 {best['top_1']:.2f} (chance {best['chance']:.2f}), log-prob "
            f"{best['log_prob']:.2f} (chance {best['chance_log_prob']:.2f})",
            "took": f"{manifest['cpu_s']:.0f} CPU-seconds",
        }
        show_table(str(folder), rows)
        report.values.update(folder=str(folder), **manifest)


class Advice:
    """A model's probabilities of the valid actions, for a person who plays."""

    def __init__(self, folder: Path) -> None:
        from offbeat.algorithms.priorzero.priors import read_prior
        from offbeat.algorithms.priorzero.prompts import Prompts, Turn

        self._prior, self._prompts, self._turns = read_prior(folder), Prompts(), list[Turn]()

    def shares(self, scene: Scene, actions: Sequence[str]) -> list[str]:
        """Return the probability of each action, as it is shown."""
        (found,) = self._prior.log_probs([self._prompts.of(scene, self._turns)], [actions])
        return [f"{100 * math.exp(log_prob):3.0f} %  " for log_prob in found.tolist()]

    def took(self, before: Scene, command: str, after: Scene) -> None:
        """Note a step of the game."""
        from offbeat.algorithms.priorzero.prompts import Turn

        self._turns.append(Turn(before, command, after.answer))


def prior_table(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder in the layout of Hugging Face.")],
    game: Annotated[str, typer.Argument(metavar="FILE|FAMILY", help="A game, as in offbeat text play.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The table; continued where it is there.")],
    views: Annotated[int, typer.Option(min=1, max=MOST_VIEWS, help="Most states to score.")] = MOST_VIEWS,
    steps: Annotated[int, typer.Option(min=1, help="Most steps of random play that look for them.")] = 5000,
    seed: Annotated[int | None, typer.Option(min=0, help="Which game, and the random play.")] = None,
    shows: Shown = "view",
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Compute a frozen prior beforehand: what a model makes of the valid actions of a game's states."""
    with reporting(as_json) as report:
        from offbeat.algorithms.priorzero.pretraining import set_threads
        from offbeat.algorithms.priorzero.priors import read_scores
        from offbeat.algorithms.priorzero.prompts import EMPTY, Prompts
        from offbeat.algorithms.priorzero.score_table import TableScores, fill
        from offbeat.envs.text import ActionTable, RemoteGame, ValidActions

        set_threads(threads)
        table = TableScores(out, read_scores(model))
        valid = ValidActions(ActionTable())
        opened = RemoteGame(game, seed)
        try:
            states = _states(opened, valid, Prompts(shows), views, steps, random.Random(seed or 0))
            with progress_to(_tell):
                fill(table, list(states), list(states.values()), EMPTY)
        finally:
            opened.close()
            valid.table.close()
            table.close()
        show_table(str(out), {"states": str(len(states)), "entries": str(len(table)), "model": table.version})
        report.values.update(table=str(out), states=len(states), entries=len(table), model=table.version)


def _tell(progress: str) -> None:
    if progress:
        print(progress, file=sys.stderr, flush=True)


def _states(
    game: RemoteGame, valid: ValidActions, prompts: Prompts, views: int, steps: int, rng: random.Random
) -> dict[str, tuple[str, ...]]:
    """Return prompts and valid actions that random play meets."""
    from offbeat.algorithms.priorzero.prompts import Turn

    found: dict[str, tuple[str, ...]] = {}
    scene, turns = game.start(), list[Turn]()
    for _ in range(steps):
        actions = tuple(valid.of(game, scene)) if not scene.done else ()
        if not actions:
            scene, turns = game.start(), []
            continue
        found.setdefault(prompts.of(scene, turns), actions)
        if len(found) == views:
            break
        command = rng.choice(actions)
        after = game.step(command)
        turns.append(Turn(scene, command, after.answer))
        scene = after
    return found
