"""The observers of a run: meter, schedule, callbacks with the console, journal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from offbeat.checkpoint import fitting
from offbeat.errors import OffbeatError
from offbeat.observe.advice import Advisor
from offbeat.observe.callbacks import Callback, CallbackObserver, RunControl, RunSummary
from offbeat.observe.console import make_console
from offbeat.observe.events import ANSWERS, ScheduleLog
from offbeat.observe.journal import Journal
from offbeat.pacing.actions import Pace
from offbeat.pacing.answers import lines_of
from offbeat.pacing.events import Handlers, Published, RoundTrained, SegmentArrived, SegmentDropped
from offbeat.run.collectors import Collectors
from offbeat.run.driver import Driver
from offbeat.run.parts import StartPoint
from offbeat.types import Piece, StateTree


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
    dial, is_parallel = settings.async_training.off_policy_degree, settings.runtime.kind != "inline"
    driver.observe(Advisor(dial, driver.faults.append, is_parallel=is_parallel).handlers())
    driver.observe(hooks.handlers(), close=console.close, flush=partial(console.refresh, driver.phase))
    console.open(point.version if point.resumed else None, driver.start_phase)


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
                log.truncate(own.get("schedule_offset", 0), bool(own.get("schedule_gap", False)))
        answers = AnswerRecorder(directory / ANSWERS, on_fault)
        if point.resumed:
            with fitting("this run's answers"):
                answers.truncate(own.get("answers_offset", 0), bool(own.get("answers_gap", False)))
        journal = Journal(directory, name, driver.spec.settings, driver.meter, driver.pace, version, on_fault)
    except OSError as error:
        raise OffbeatError(
            f"the run directory {directory} cannot be written: {error}. "
            "Free disk space, make it writable or choose another run.dir"
        ) from error
    schedule = ScheduleRecorder(log, driver.collectors, driver.pace, driver.spec.num_collectors)
    driver.observe(schedule.handlers(), close=log.close, flush=log.flush, state=schedule.state_dict)
    driver.observe(answers.handlers(), close=answers.close, flush=answers.flush, state=answers.state_dict)
    driver.observe(hooks.round_handlers())
    driver.observe(journal.handlers(), close=journal.close)


class ScheduleRecorder:
    """The schedule as an observer: lines for segments, drops and rounds in ``schedule.jsonl``, for replay.

    The first segment of a collector that joined, beyond ``num_collectors``, comes after a line that says so.
    """

    def __init__(self, log: ScheduleLog, collectors: Collectors, pace: Pace, num_collectors: int) -> None:
        self._log, self._add = log, log.lines.append
        self._collectors, self._pace = collectors, pace
        self._known = set(range(num_collectors))
        self._newest: Published | None = None

    def handlers(self) -> Handlers:
        return {
            SegmentArrived: self._arrived,
            SegmentDropped: self._dropped,
            RoundTrained: self._trained,
            Published: self._published,
        }

    def state_dict(self) -> dict[str, StateTree]:
        """Return what a checkpoint relies on of the file; CheckpointError when the disk does not take it."""
        return {"schedule_offset": self._log.offset(), "schedule_gap": self._log.gap}

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        ticket, pieces = event.segment.ticket, event.segment.pieces
        if ticket.collector not in self._known:
            self._known.add(ticket.collector)
            self._add(f'{{"kind":"join","lane":{ticket.collector}}}\n')
        incarnation = self._collectors.rows[ticket.collector].start.incarnation
        self._add(
            f'{{"kind":"segment","ticket":{ticket.number},"lane":{ticket.collector},"version":{ticket.version},'
            f'"deadline":{ticket.deadline},"incarnation":{incarnation},'
            f'"steps_collected":{ticket.steps_collected},"steps_trained":{ticket.steps_trained},'
            f'"rollbacks":{self._pace.rollbacks}{_pieces_field(pieces) if pieces else ""}}}\n'
        )

    def _dropped(self, event: SegmentDropped, now_s: float) -> None:
        reason = json.dumps(event.reason)
        fields = f'"version":{self._pace.version},"ticket":{event.ticket},"reason":{reason}'
        self._add(f'{{"kind":"drop",{fields}}}\n')

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


def _pieces_field(pieces: Sequence[Piece]) -> str:
    """Return pieces as a field of a segment's line: versions and sizes of their spans, and their ends."""
    rows = [
        [[[int(version), int(size), *[1] * rebuilt] for version, size, rebuilt in piece.spans], piece.end]
        for piece in pieces
    ]
    counts = [len(piece.answers) for piece in pieces]
    field = f',"pieces":{json.dumps(rows, separators=(",", ":"))}'
    return field + (f',"answers":{json.dumps(counts, separators=(",", ":"))}' if any(counts) else "")


class AnswerRecorder:
    """The answers that segments got, as an observer: lines in ``answers.jsonl``, which comes with the first.

    They come before the line of the segment in ``schedule.jsonl`` would be relied on: a checkpoint knows of
    both.
    """

    def __init__(self, path: Path, on_fault: Callable[[str], None]) -> None:
        self._path, self._on_fault = path, on_fault
        self._log = ScheduleLog(path, on_fault) if path.exists() else None
        self._gap = False  # answers were lost before there was a file

    def handlers(self) -> Handlers:
        return {SegmentArrived: self._arrived}

    def truncate(self, offset: int, gap: bool) -> None:
        """Forget what came after a checkpoint; CheckpointError when the file lacks what was before it."""
        self._gap = gap
        if self._log is None and offset:
            self._log = ScheduleLog(self._path, self._on_fault)
        if self._log is not None:
            self._log.truncate(offset, gap)

    def state_dict(self) -> dict[str, StateTree]:
        """Return what a checkpoint relies on of the file; CheckpointError when the disk does not take it."""
        log = self._log
        if log is None:
            return {"answers_gap": True} if self._gap else {}
        return {"answers_offset": log.offset(), "answers_gap": log.gap}

    def flush(self) -> None:
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        segment = event.segment
        if not any(piece.answers for piece in segment.pieces):
            return
        if self._log is None:
            try:
                self._log = ScheduleLog(self._path, self._on_fault)
            except OSError as error:
                if not self._gap:
                    self._on_fault(f"{self._path} cannot be written, the run cannot be replayed: {error}")
                self._gap = True
                return
            self._log.gap = self._gap
        self._log.lines.append(lines_of(segment.ticket.number, segment.pieces))
