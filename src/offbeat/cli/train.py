"""``offbeat train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.output import JsonFlag, Report, reporting
from offbeat.errors import ConfigError

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings by dotted key, such as run.seed=3 or --run.seed 3.",
        show_default=False,
    ),
]
"""Settings on the command line, which win over every file."""

EvalOnly = Annotated[
    bool,
    typer.Option(
        "--eval-only", help="Train nothing: evaluate the run's newest checkpoint, as `offbeat eval`."
    ),
]
"""The option of verbs that would train."""


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|FILE", help="A recipe's name or a YAML file.")],
    overrides: Overrides = None,
    eval_only: EvalOnly = False,
    as_json: JsonFlag = False,
) -> None:
    """Train an agent from a recipe or a YAML file."""
    from offbeat.cli.summary import finish

    with reporting(as_json) as report:
        if eval_only:
            _judge_run_of(recipe, overrides or [], report)
            return
        from offbeat import api
        from offbeat.cli.recover import callbacks_for

        finish(api.train(recipe, overrides=overrides or [], callbacks=callbacks_for(context.obj)), report)


def _judge_run_of(recipe: str, overrides: Sequence[str], report: Report) -> None:
    """Evaluate the run in ``run.dir``, by its own settings and the section ``eval`` as it is given here."""
    import offbeat
    from offbeat.cli.evaluate import evaluate_run
    from offbeat.config.code import announced_imports
    from offbeat.run.directory import settings_of

    given = offbeat.load_config(recipe, overrides)
    directory = given.run.dir
    if directory is None:
        raise ConfigError(
            "--eval-only evaluates a run that is there: name its directory with run.dir=RUN, "
            "or use `offbeat eval RUN`"
        )
    if not (Path(directory) / "manifest.json").exists():
        raise ConfigError(
            f"--eval-only evaluates a run that is there, but run.dir {directory} holds none: train it "
            "without --eval-only first, or name another run.dir"
        )
    with announced_imports():
        own = offbeat.load_config(settings_of(directory))
    if (given.algorithm.name, given.env.id) != (own.algorithm.name, own.env.id):
        raise ConfigError(
            f"run.dir {directory} holds a run of {own.algorithm.name} on {own.env.id}, not of "
            f"{given.algorithm.name} on {given.env.id}: name another one, or use `offbeat eval {directory}`"
        )
    before, now = own.eval.model_dump(), given.eval.model_dump()
    evaluate_run(
        directory, report, overrides={f"eval.{key}": now[key] for key in now if now[key] != before[key]}
    )
