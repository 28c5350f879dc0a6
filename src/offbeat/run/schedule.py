"""The schedule of a run as an observer: a line per segment and round in ``schedule.jsonl``, for replay."""

from __future__ import annotations

from offbeat.observe.events import ScheduleLog
from offbeat.pacing.events import Handlers, Published, RoundTrained, SegmentArrived, Started
from offbeat.run.collectors import Collectors
from offbeat.types import StateTree


class ScheduleRecorder:
    """Formats the lines of a `ScheduleLog`."""

    def __init__(self, log: ScheduleLog, collectors: Collectors) -> None:
        self._log, self._add = log, log.lines.append
        self._collectors = collectors
        self._end = ""
        self._weights = ""

    def handlers(self) -> Handlers:
        """Return the handlers of a run's events."""
        return {
            Started: self._started,
            SegmentArrived: self._arrived,
            RoundTrained: self._trained,
            Published: self._published,
        }

    def state_dict(self) -> dict[str, StateTree]:
        """Return what a checkpoint relies on of the file; CheckpointError when the disk does not take it."""
        return {"schedule_offset": self._log.offset(), "schedule_gap": self._log.gap}

    def _started(self, event: Started, now_s: float) -> None:
        self._end = f',"rollbacks":{self._collectors.rollbacks}}}\n'

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        ticket = event.segment.ticket
        incarnation = self._collectors.rows[ticket.collector].start.incarnation
        self._add(
            f'{{"kind":"segment","ticket":{ticket.number},"lane":{ticket.collector},"version":{ticket.version},'
            f'"deadline":{ticket.deadline},"incarnation":{incarnation}{self._end}'
        )

    def _published(self, event: Published, now_s: float) -> None:
        if event.checksum is not None:
            self._weights = f',"weights":[{event.version},{event.checksum}]'

    def _trained(self, event: RoundTrained, now_s: float) -> None:
        """Write a round with the newest published version and its checksum."""
        batch = event.batch
        tickets = ",".join([str(segment.ticket.number) for segment in batch.segments])
        self._add(
            f'{{"kind":"round","version":{batch.version},"tickets":[{tickets}],'
            f'"degree":{batch.off_policy_degree}{self._weights}}}\n'
        )
