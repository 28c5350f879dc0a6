"""The child's side of supervision: reports to its guard, and continuing the run of a killed child."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import typer

from offbeat.checkpoint import CheckpointManager
from offbeat.checkpoint.lock import RunLock
from offbeat.cli.history import read_history
from offbeat.cli.output import reporting
from offbeat.cli.summary import finish
from offbeat.cli.supervise import ChildContext, Death, show_cursor
from offbeat.config.models import RunSection
from offbeat.observe.callbacks import Callback, RunInfo
from offbeat.observe.events import EventLog
from offbeat.observe.logs import close_log, open_log
from offbeat.run.restarts import LONGEST_PAUSE_S

_NONE = -1


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Report of a child: its run, and for a child that followed another, how far that one had come.

    Example: ``RunProgress("runs/x", checkpoint=25, round=37)``.
    """

    directory: str
    checkpoint: int = _NONE
    round: int = _NONE

    def to_text(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    def is_before(self, later: RunProgress) -> bool:
        """Return True if the later one got further: to a newer checkpoint or a higher round."""
        return later.checkpoint > self.checkpoint or later.round > self.round


class ReportToSupervisor(Callback):
    """Reports the run directory to the guard, as soon as there is something to resume."""

    def __init__(self, child: ChildContext) -> None:
        self._child = child

    def on_start(self, info: RunInfo) -> None:
        """Report the directory."""
        if info.summary.directory is not None:
            self._child.send(RunProgress(str(info.summary.directory)).to_text())


class LimitStop(Callback):
    """Tells the guard how long an end may take that a signal asks for."""

    def __init__(self, child: ChildContext) -> None:
        self._child = child

    def on_start(self, info: RunInfo) -> None:
        """Tell it the limit of this run."""
        if info.summary.stop_within_s is not None:
            self._child.limit_stop(info.summary.stop_within_s)


def callbacks_for(child: object) -> tuple[Callback, ...]:
    """Return the callbacks of a run for the context of its command; none without a guard."""
    return (ReportToSupervisor(child), LimitStop(child)) if isinstance(child, ChildContext) else ()


def continue_run(child: ChildContext, death: Death, as_json: bool) -> NoReturn:
    """Continue the run of a killed child from its newest good checkpoint, or print why not."""
    show_cursor()
    before = RunProgress(**json.loads(death.message))
    directory = Path(before.directory)
    history = read_history(directory / "events.jsonl")
    if history.finish is not None:  # its last words may be out already, so no others follow
        print(f"killed by {death.signal_name} after the run had ended; nothing is lost", file=sys.stderr)
        sys.exit(128 + death.number)
    versions = CheckpointManager(directory / "checkpoints").versions()
    reached = RunProgress(before.directory, max(versions, default=_NONE), history.version)
    try:
        with reporting(as_json) as report:
            import offbeat

            settings = offbeat.load_config(directory / "config.yaml").run
            how = f"killed by {death.signal_name} at round {reached.round}"
            if refusal := _why_not(settings, death.attempt, before, reached):
                text = f"{how}{refusal} Go on by hand with: offbeat resume {shlex.quote(str(directory))}"
                print(f"error: {text}", file=sys.stderr)
                _write_down(directory, "finish", {"version": history.version, "reason": text, "failed": True})
                report.values.update(run_dir=str(directory), error=text)
                report.exit_code = 128 + death.number
            else:
                child.send(reached.to_text())
                _announce(directory, how, reached, death.attempt, settings)
                finish(offbeat.resume(directory, callbacks=[LimitStop(child)]), report)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    sys.exit(0)


def _why_not(settings: RunSection, attempt: int, before: RunProgress, reached: RunProgress) -> str:
    """Return why the run does not continue by itself; empty when it does."""
    if attempt > settings.max_restarts:
        return f", and run.max_restarts = {settings.max_restarts} allows no further restart."
    if attempt > 1 and not before.is_before(reached):
        return f", no further than before restart {attempt - 1}: another restart would be no use."
    return ""


def _announce(directory: Path, how: str, reached: RunProgress, attempt: int, settings: RunSection) -> None:
    """Record the restart, print it, and wait as long as the settings want."""
    start = "the beginning" if reached.checkpoint == _NONE else f"checkpoint {reached.checkpoint}"
    count = f"restart {attempt} of {settings.max_restarts}"
    print(f"{how}; going on from {start} ({count})", file=sys.stderr, flush=True)
    fields = {"version": max(reached.checkpoint, 0), "reason": how, "attempt": attempt}
    _write_down(directory, "restart", fields)
    time.sleep(min(settings.restart_delay_s * 2.0 ** (attempt - 1), LONGEST_PAUSE_S))


def _write_down(directory: Path, kind: str, fields: dict[str, object]) -> None:
    """Record in the run's own files the end of a process that could not do so itself."""
    lock, events = RunLock(directory), EventLog(directory / "events.jsonl")
    log = open_log(directory / "logs", "run")
    try:
        events.append(kind, fields)
        log.warning("%s: %s", kind, fields["reason"])
    finally:
        close_log(log)
        events.close()
        lock.release()
