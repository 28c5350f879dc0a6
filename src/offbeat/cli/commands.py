"""The command line that typer makes of the verbs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from typer.main import get_group

from offbeat.cli.settings import with_settings
from offbeat.cli.supervise import ChildContext


def run(verbs: Mapping[str, str], arguments: Sequence[str] | None, child: ChildContext | None) -> None:
    """Run one of the verbs, given by name as ``module:function``; ends in ``SystemExit``."""
    # Plain help: rich would triple the time of `offbeat --help`.
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
    )
    app.callback()(_about)
    for name, place in verbs.items():
        module, _, function = place.partition(":")
        verb = getattr(importlib.import_module(module), function)
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name)
        else:
            app.command(name)(verb)
    group = get_group(app)
    given = with_settings(group, sys.argv[1:] if arguments is None else arguments)
    group(args=given, prog_name="offbeat", obj=child)


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
