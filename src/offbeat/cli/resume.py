"""``offbeat resume``."""

from __future__ import annotations

from typing import Annotated

import typer

from offbeat.cli.output import JsonFlag, reporting
from offbeat.cli.train import EvalOnly, Overrides

RunDirectory = Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")]
"""The run that a verb works on."""


def resume(
    context: typer.Context,
    run: RunDirectory,
    overrides: Overrides = None,
    eval_only: EvalOnly = False,
    as_json: JsonFlag = False,
) -> None:
    """Continue a run from its last checkpoint."""
    from offbeat.cli.summary import finish

    with reporting(as_json) as report:
        if eval_only:
            from offbeat.cli.evaluate import evaluate_run

            evaluate_run(run, report, overrides=overrides or [])
            return
        from offbeat import api
        from offbeat.cli.continuing import refuse_if_done
        from offbeat.cli.recover import callbacks_for
        from offbeat.config.code import announced_imports

        with announced_imports():
            refuse_if_done(run, overrides or [])
            finish(api.resume(run, overrides=overrides or [], callbacks=callbacks_for(context.obj)), report)
