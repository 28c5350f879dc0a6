"""``offbeat train``."""

from __future__ import annotations

from typing import Annotated

import typer

from offbeat.cli.output import JsonFlag, reporting

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings by dotted key, such as run.seed=3.", show_default=False
    ),
]
"""Settings on the command line, which win over every file."""


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|FILE", help="A recipe's name or a YAML file.")],
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Train an agent from a recipe or a YAML file."""
    from offbeat.cli.summary import finish

    with reporting(as_json) as report:
        from offbeat import api
        from offbeat.cli.recover import callbacks_for

        finish(api.train(recipe, overrides=overrides or [], callbacks=callbacks_for(context.obj)), report)
