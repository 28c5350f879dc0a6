"""``offbeat replay``."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, cast

import typer

from offbeat.cli.output import EXIT_FAILED, JsonFlag, reporting, show_table
from offbeat.cli.resume import RunDirectory
from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from offbeat.config.models import RuntimeKind

_INTERVAL_S = 5.0
_VERDICTS = {True: "identical weights", False: "DIFFERENT weights", None: "nothing to compare with"}
_KINDS = ("inline", "threads", "processes", "ray")


class _Progress:
    """Says on the error stream, now and then, how far a repetition has come."""

    def __init__(self) -> None:
        self._started_s = self._told_s = time.monotonic()

    def __call__(self, version: int, rounds: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _INTERVAL_S and version < rounds:
            self._told_s = now_s
            left_s = (now_s - self._started_s) / version * (rounds - version)
            print(f"round {version:,} of {rounds:,}, about {left_s:.0f} s left", file=sys.stderr, flush=True)


def replay(
    run: RunDirectory,
    to: Annotated[
        int | None,
        typer.Option("--to", min=1, metavar="ROUND", help="Stop there, and leave a run that can be resumed."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Directory of the run that --to leaves; RUN-to-ROUND if not given.")
    ] = None,
    runtime: Annotated[str, typer.Option(help="Runtime: inline, threads, processes or ray.")] = "inline",
    call: Annotated[
        bool, typer.Option("--call", help="Call tools and rewards again; end at the first other answer.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Repeat a run and compare the weights."""
    with reporting(as_json) as report:
        from offbeat import api

        kind = _checked(runtime)
        outcome = api.replay_run(run, _Progress(), runtime=kind, until=to, out=out, call=call)
        verdict = _VERDICTS[outcome.identical]
        rows = {"rounds": f"{outcome.rounds:,}", "digest now": outcome.digest}
        if outcome.recorded_digest:
            rows["digest recorded"] = outcome.recorded_digest
        if outcome.changed is not None:
            verdict = "a tool or a reward gives ANOTHER answer"
            rows["first other answer"] = str(outcome.changed)
        if outcome.difference is not None:
            rows["first difference"] = str(outcome.difference)
        if to is not None:
            rows["left in"] = out or f"{run.rstrip('/')}-to-{to}"
        show_table(f"replay of {run}: {verdict}", rows)
        report.values.update(
            run_dir=run,
            identical=outcome.identical,
            digest=outcome.digest,
            recorded_digest=outcome.recorded_digest,
            rounds=outcome.rounds,
            first_difference=None if outcome.difference is None else asdict(outcome.difference),
            first_other_answer=None if outcome.changed is None else asdict(outcome.changed),
        )
        report.exit_code = 0 if outcome.identical else EXIT_FAILED


def _checked(runtime: str) -> RuntimeKind:
    if runtime not in _KINDS:
        raise ConfigError(f"--runtime must be one of {', '.join(_KINDS)}, not {runtime!r}")
    return cast("RuntimeKind", runtime)
