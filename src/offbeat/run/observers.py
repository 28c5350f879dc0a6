"""The observers of a run: meter, schedule, callbacks with the console, journal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from offbeat.checkpoint import fitting
from offbeat.errors import OffbeatError
from offbeat.observe.advice import Advisor
from offbeat.observe.callbacks import Callback, CallbackObserver, RunControl, RunSummary
from offbeat.observe.console import make_console
from offbeat.observe.events import ScheduleLog
from offbeat.observe.journal import Journal
from offbeat.pacing.actions import Pace
from offbeat.pacing.events import Handlers, Published, RoundTrained, SegmentArrived
from offbeat.run.collectors import Collectors
from offbeat.run.driver import Driver, StartPoint
from offbeat.types import StateTree


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
    settings, directory = driver.spec.settings, driver.spec.directory
    kind = "none" if quiet else settings.observe.console
    console = make_console(kind, summary, settings.observe.log_interval_s)
    everybody = (*callbacks, console)
    hooks = CallbackObserver(everybody, summary, control, driver.meter)
    if directory is not None:
        _attach_files(driver, point, summary.name, directory, hooks)
    else:
        driver.observe(hooks.round_handlers())
    if summary.algorithm:
        driver.observe({}, state=lambda: {"algorithm": summary.algorithm})
    driver.observe(Advisor(settings.async_training.off_policy_degree, driver.faults.append).handlers())
    driver.observe(hooks.handlers(), close=console.close, flush=partial(console.refresh, driver.phase))
    console.open(point.version if point.resumed else None)


def _attach_files(
    driver: Driver, point: StartPoint, name: str, directory: Path, hooks: CallbackObserver
) -> None:
    """Open the files of a run; of one that continues, cut the schedule back to its checkpoint."""
    own, on_fault = point.parts.get("recorder", {}), driver.faults.append
    version = point.version if point.resumed else None
    try:
        log = ScheduleLog(directory / "schedule.jsonl", on_fault)
        if point.resumed:
            with fitting("this run's schedule"):
                log.truncate(own.get("schedule_offset", 0), own.get("schedule_gap", False))
        journal = Journal(directory, name, driver.spec.settings, driver.meter, driver.pace, version, on_fault)
    except OSError as error:
        raise OffbeatError(
            f"the run directory {directory} cannot be written: {error}. "
            "Free disk space, make it writable or choose another run.dir"
        ) from error
    schedule = ScheduleRecorder(log, driver.collectors, driver.pace)
    driver.observe(schedule.handlers(), close=log.close, flush=log.flush, state=schedule.state_dict)
    driver.observe(hooks.round_handlers())
    driver.observe(journal.handlers(), close=journal.close)


class ScheduleRecorder:
    """The schedule as an observer: a line per segment and round in ``schedule.jsonl``, for replay."""

    def __init__(self, log: ScheduleLog, collectors: Collectors, pace: Pace) -> None:
        self._log, self._add = log, log.lines.append
        self._collectors, self._pace = collectors, pace
        self._newest: Published | None = None

    def handlers(self) -> Handlers:
        return {
            SegmentArrived: self._arrived,
            RoundTrained: self._trained,
            Published: self._published,
        }

    def state_dict(self) -> dict[str, StateTree]:
        """Return what a checkpoint relies on of the file; CheckpointError when the disk does not take it."""
        return {"schedule_offset": self._log.offset(), "schedule_gap": self._log.gap}

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        ticket = event.segment.ticket
        incarnation = self._collectors.rows[ticket.collector].start.incarnation
        self._add(
            f'{{"kind":"segment","ticket":{ticket.number},"lane":{ticket.collector},"version":{ticket.version},'
            f'"deadline":{ticket.deadline},"incarnation":{incarnation},'
            f'"steps_collected":{ticket.steps_collected},"steps_trained":{ticket.steps_trained},'
            f'"rollbacks":{self._pace.rollbacks}}}\n'
        )

    def _published(self, event: Published, now_s: float) -> None:
        self._newest = event

    def _weights(self) -> str:
        published = self._newest
        if published is None or published.checksum is None:
            return ""
        checksum = published.checksum.result()
        return "" if checksum is None else f',"weights":[{published.version},{checksum}]'

    def _trained(self, event: RoundTrained, now_s: float) -> None:
        """Write a round with the newest published version and its checksum."""
        batch = event.batch
        tickets = ",".join([str(segment.ticket.number) for segment in batch.segments])
        self._add(
            f'{{"kind":"round","version":{batch.version},"tickets":[{tickets}],'
            f'"degree":{batch.off_policy_degree}{self._weights()}}}\n'
        )
