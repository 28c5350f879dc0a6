"""``offbeat eval``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.output import JsonFlag, Report, reporting, show_table
from offbeat.cli.resume import RunDirectory
from offbeat.cli.train import Overrides


def evaluate(
    run: RunDirectory,
    overrides: Overrides = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Episodes to play; as configured when not given.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the episodes.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Evaluate the best checkpoint, not the last.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate the weights of a run."""
    with reporting(as_json) as report:
        evaluate_run(run, report, episodes=episodes, seed=seed, best=best, overrides=overrides)


def evaluate_run(
    run: str,
    report: Report,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    best: bool = False,
    overrides: Mapping[str, object] | Sequence[str] | None = None,
) -> None:
    """Evaluate the weights of a run, show what came of it and fill in what ``--json`` prints."""
    from offbeat import api
    from offbeat.checkpoint import CheckpointManager
    from offbeat.cli.waiting import telling_progress
    from offbeat.observe.advice import action_dependence

    with telling_progress("evaluating"):
        metrics = api.evaluate(run, episodes=episodes, seed=seed, best=best, overrides=overrides)
    notes: list[str] = []
    if best and CheckpointManager(Path(run) / "checkpoints").best() is None:
        notes.append(
            "no checkpoint of this run has a score (eval.interval_rounds), so the newest was evaluated"
        )
    if found := action_dependence(metrics):
        notes.append(found)
    for note in notes:
        print(f"note: {note}")
    if notes:
        report.values["note"] = "; ".join(notes)
    print(headline(metrics))
    show_table(f"evaluation of {run}", {name: f"{value:g}" for name, value in metrics.items()})
    report.values.update(run_dir=run, metrics=metrics, eval_return=metrics.get("eval/return_mean"))


def headline(metrics: Mapping[str, float]) -> str:
    """Return the result in a line: ``return 500.0 ± 0.0 over 10 episodes``."""
    from offbeat.observe.text import evaluation

    return f"return {evaluation(metrics)}"
