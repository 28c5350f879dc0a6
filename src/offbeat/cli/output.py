"""Output of every verb: a message and an exit code for errors, one JSON object when asked, tables."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import typer

from offbeat.errors import ConfigError, EnvError, OffbeatError, RunNotFound

JsonFlag = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object as the last line of stdout; the rest goes to stderr."),
]
"""The ``--json`` option that every verb takes."""

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
_MISTAKES = (ConfigError, EnvError, RunNotFound)


@dataclass(slots=True)
class Report:
    """Output of a verb for programs: the values of its JSON object, and its exit code.

    A verb with many results has one object for each of ``records``, before that of an error if there is one.
    """

    values: dict[str, object] = field(default_factory=dict)
    records: list[dict[str, object]] = field(default_factory=list)
    exit_code: int = 0

    def fail(self, error: OffbeatError) -> None:
        """Record an error that ended the verb."""
        self.exit_code = EXIT_CONFIG if isinstance(error, _MISTAKES) else EXIT_FAILED
        self.values["error"] = str(error)
        problems = getattr(error, "problems", ())
        if problems:
            names = ("where", "key", "given", "message")
            self.values["problems"] = [{name: getattr(one, name) for name in names} for one in problems]

    def json_lines(self) -> list[str]:
        """The JSON objects, each on one line; numbers that JSON cannot hold become null."""
        found = [{"ok": True, **record} for record in self.records]
        if not found or self.exit_code:
            found.append({"ok": self.exit_code == 0, **self.values})
        return [json.dumps(_jsonable(values), allow_nan=False) for values in found]


@contextlib.contextmanager
def reporting(as_json: bool) -> Iterator[Report]:
    """Run a verb: errors become a message on stderr and an exit code, never a traceback."""
    report = Report()
    with _stdout_to_stderr() if as_json else contextlib.nullcontext():
        try:
            yield report
        except OffbeatError as error:
            print(f"error: {error}", file=sys.stderr)
            report.fail(error)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            report.exit_code = EXIT_INTERRUPTED
            report.values["error"] = "interrupted"
        except OSError as error:
            _refuse_full_disk(error, report, is_stdout=not as_json)
    if as_json:
        try:
            print("\n".join(report.json_lines()), flush=True)
        except OSError as error:
            _refuse_full_disk(error, report, is_stdout=True)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _refuse_full_disk(error: OSError, report: Report, is_stdout: bool) -> None:
    """Report that no space is left, also for what is printed; raise every other error again."""
    if error.errno != errno.ENOSPC:
        raise error
    where = f" for {error.filename}" if error.filename else ""
    found = OffbeatError(f"no space is left on the disk{where}: make room, and run the command again")
    print(f"error: {found}", file=sys.stderr)
    report.fail(found)
    if is_stdout:
        # The interpreter writes what is left in the buffer when it ends, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send stdout to stderr, also that of child processes, so that only the JSON line reaches stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _jsonable(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def show_table(title: str, rows: Mapping[str, str]) -> None:
    """Print names and values: a framed table on a terminal, plain aligned lines elsewhere."""
    if sys.stdout.isatty():
        _show_rich(title, rows)
        return
    width = max(map(len, rows), default=0)
    print(title)
    for name, text in rows.items():
        first, *others = text.splitlines() or [""]
        print(f"  {name:<{width}}  {first}".rstrip())
        for line in others:
            print(f"  {'':<{width}}  {line}".rstrip())


def _show_rich(title: str, rows: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, Text(text))
    Console().print(table)
