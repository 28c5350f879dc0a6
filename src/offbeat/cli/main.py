"""The console script: verbs and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

from offbeat.cli.check import check
from offbeat.cli.digest import digest
from offbeat.cli.doctor import doctor
from offbeat.cli.evaluate import evaluate
from offbeat.cli.listing import list_all
from offbeat.cli.replay import replay
from offbeat.cli.resume import resume
from offbeat.cli.train import train

VERBS: Mapping[str, Callable[..., None]] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "replay": replay,
    "check": check,
    "list": list_all,
    "digest": digest,
    "doctor": doctor,
}
"""Every verb of the command, in the order of its help."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``offbeat`` command; ends in ``SystemExit`` with 0, 1, 2 (configuration, usage) or 130."""
    # As with `python -m offbeat`: environments and plugins of the working directory are found.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    # Plain help: rich would triple the time of `offbeat --help`.
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
    )
    app.callback()(_about)
    for name, verb in VERBS.items():
        app.command(name)(verb)
    app(args=arguments, prog_name="offbeat")


def _show_version(wanted: bool) -> None:
    if wanted:
        import offbeat

        print(offbeat.__version__)
        raise typer.Exit()


def _about(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Reinforcement learning on one dial, from strictly synchronous to fully asynchronous."""
