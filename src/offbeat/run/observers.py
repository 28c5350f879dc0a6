"""The observers of a run: meter, schedule, callbacks with the console, journal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.observe.callbacks import Callback, CallbackObserver, RunControl, RunSummary
from offbeat.observe.console import make_console
from offbeat.observe.events import ScheduleLog
from offbeat.observe.journal import Journal
from offbeat.run.driver import Driver, StartPoint
from offbeat.run.schedule import ScheduleRecorder


def attach(
    driver: Driver,
    point: StartPoint,
    summary: RunSummary,
    callbacks: Sequence[Callback],
    control: RunControl,
    *,
    quiet: bool = False,
) -> None:
    """Add the observers of a run to its driver; ``quiet``: without a console.

    Callbacks add metrics to a round before the journal writes it; all else is written first.
    """
    settings, directory, meter = driver.spec.settings, driver.spec.directory, driver.meter
    kind = "none" if quiet else settings.observe.console
    console = make_console(kind, summary, settings.observe.log_interval_s)
    everybody = (*callbacks, console)
    hooks = CallbackObserver(everybody, summary, control, lambda: meter.metrics, lambda: meter.eval_metrics)
    if directory is not None:
        _attach_files(driver, point, summary.name, directory, hooks)
    else:
        driver.observe(hooks.round_handlers())
    driver.observe(hooks.handlers(), flush=partial(console.refresh, driver.phase))


def _attach_files(
    driver: Driver, point: StartPoint, name: str, directory: Path, hooks: CallbackObserver
) -> None:
    """Open the files of a run; of one that continues, cut the schedule back to its checkpoint."""
    own, on_fault = point.parts.get("recorder", {}), driver.faults.append
    version = point.version if point.resumed else None
    try:
        log = ScheduleLog(directory / "schedule.jsonl", on_fault)
        if point.resumed:
            log.truncate(own.get("schedule_offset", 0), own.get("schedule_gap", False))
        journal = Journal(directory, name, driver.spec.settings, driver.meter, driver.pace, version, on_fault)
    except OSError as error:
        raise OffbeatError(
            f"the run directory {directory} cannot be written: {error}. "
            "Free disk space, make it writable or choose another run.dir"
        ) from error
    schedule = ScheduleRecorder(log, driver.collectors)
    driver.observe(schedule.handlers(), close=log.close, flush=log.flush, state=schedule.state_dict)
    driver.observe(hooks.round_handlers())
    driver.observe(journal.handlers(), close=journal.close)
