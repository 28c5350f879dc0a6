"""A run's journals: ``events.jsonl`` (what happened, for people), and two for replay.

These are ``schedule.jsonl`` and, where segments have answers, ``answers.jsonl``.

Each line is one JSON object and is handed to the system in one write, so a killed run keeps every line it
wrote. Only a machine that loses power can leave a torn last line: readers pass over it, writers cut it off.
A disk that takes no more does not end the run: what cannot be written is left out, and once writing works
again a record of the kind ``gap`` says so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from offbeat.errors import CheckpointError, OffbeatError
from offbeat.reading import JOURNAL_BYTES, LINE_BYTES, open_file, open_to_append, parse_json, read_lines

Record = dict[str, Any]
"""One line of a journal."""

ANSWERS = "answers.jsonl"
_BLOCK_BYTES = 1 << 16
_log = logging.getLogger(__name__)


class _Journal:
    """A file of JSON lines that only grows, except when it is truncated.

    ``gap``: records are missing since the last one written, and the file does not say so yet.
    """

    def __init__(self, path: Path, consequence: str, on_fault: Callable[[str], None]) -> None:
        self.path = path
        self.gap = False
        self._consequence = consequence
        self._on_fault = on_fault
        self._has_told = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_to_append(path)
        self._length = 0  # of all whole lines, in bytes
        self._cut_torn_line()

    def _append_lines(self, lines: bytes, time: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Write whole lines; ``time`` is that of a gap before them."""
        try:
            self._note_gap(time)
            self._write(lines)
        except OSError as error:
            self.gap = True
            if not self._has_told:
                self._has_told = True
                self._on_fault(f"{self.path} cannot be written, {self._consequence}: {error}")

    def _sync(self) -> int:
        os.fsync(self._file.fileno())
        return self._length

    def _cut(self, length: int) -> None:
        os.ftruncate(self._file.fileno(), length)
        self._length = length

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):  # `on_fault` has been called by _append_lines
            self._note_gap({})
        with contextlib.suppress(OSError):
            self._file.close()

    def _note_gap(self, time: Mapping[str, Any]) -> None:
        if self.gap:
            self._cut(self._length)  # drops what the disk took of a line it had no room for
            self._write(_to_json({"kind": "gap", **time}) + b"\n")
            self.gap = False

    def _write(self, lines: bytes) -> None:
        written = self._file.write(lines)
        while written < len(lines):
            written += self._file.write(lines[written:])
        self._length += len(lines)

    def _cut_torn_line(self) -> None:
        with open_file(self.path, JOURNAL_BYTES) as file:
            size = start = file.seek(0, os.SEEK_END)
            self._length = 0
            while start > 0 and self._length == 0:
                if size - start > LINE_BYTES:
                    raise OSError(f"its last line has more than {LINE_BYTES:,} bytes")
                start = max(0, start - _BLOCK_BYTES)
                file.seek(start)
                found = file.read(_BLOCK_BYTES).rfind(b"\n")
                self._length = start + found + 1 if found >= 0 else 0
        if self._length < size:
            self._cut(self._length)


class EventLog(_Journal):
    """Appends to ``events.jsonl``: ``{"kind": "round", "time": 1763193600.5, "version": 12, …}``.

    Kinds in use: start, resume, round, eval, eval_failed, checkpoint, checkpoint_failed,
    checkpoint_skipped, worker_lost, health, stall, restart, rollback, dial, notice, gap, finish. Records
    that belong to a version carry it as ``version``; rounds and evaluations carry their numbers as
    ``metrics``. ``time`` is in seconds since 1970.
    ``on_fault`` is called, once, when the file cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        clock: Callable[[], float] = time.time,
        on_fault: Callable[[str], None] = _log.warning,
    ) -> None:
        super().__init__(Path(path), "events are missing there", on_fault)
        self._clock = clock

    def append(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        """Write one event. NaN and infinities become null; numpy values and paths become plain ones."""
        at = {"time": round(self._clock(), 3)}
        self._append_lines(_to_json({"kind": kind, **at, **(fields or {})}) + b"\n", at)


class ScheduleLog(_Journal):
    """Appends to ``schedule.jsonl`` or ``answers.jsonl``, from which a run can be repeated bit for bit.

    A checkpoint keeps `offset`; a resumed run first goes back to it with `truncate`, so that the file always
    holds one history without repetition. Lines are added to ``lines`` and written by `flush`. ``on_fault`` is
    called, once, when the file cannot be written.
    """

    def __init__(self, path: str | Path, on_fault: Callable[[str], None] = _log.warning) -> None:
        super().__init__(Path(path), "the run cannot be replayed", on_fault)
        self.lines: list[str] = []

    def flush(self) -> None:
        """Write the lines that were added since the last time, in one write."""
        if self.lines:
            lines = "".join(self.lines).encode()
            self.lines.clear()
            self._append_lines(lines)

    def offset(self) -> int:
        """Length of the file in bytes, once the disk has all of it: what a checkpoint may rely on.

        CheckpointError when the disk does not take it.
        """
        self.flush()
        try:
            return self._sync()
        except OSError as error:
            raise CheckpointError(f"{self.path} could not be written: {error}") from error

    def truncate(self, offset: int, gap: bool = False) -> None:
        """Forget everything written after `offset` was taken; ``gap`` is what the property was then."""
        length = self._sync()
        if not 0 <= offset <= length:
            raise CheckpointError(
                f"{self.path} has {length} bytes, the checkpoint knows of {offset}: it was cut or "
                "replaced. Put the right file back, or start the run anew with `offbeat train`"
            )
        self._cut(offset)
        self.gap = gap

    def close(self) -> None:
        """Write what was taken and close the file; a second call does nothing."""
        self.flush()
        super().close()


def read_events(path: str | Path) -> list[Record]:
    """All events of a run, in the order in which they were written."""
    return list(_read_lines(Path(path)))


def read_rounds(path: str | Path) -> list[Record]:
    """One record per round, by version: the last one written.

    A resumed run trains some rounds again, and writes them again. What an interrupted attempt wrote beyond
    the version it was resumed from is left out, also when the run did not get that far a second time.
    """
    rounds: dict[int, Record] = {}
    for event in _read_lines(Path(path)):
        if event.get("kind") == "round":
            rounds[event["version"]] = event
        elif event.get("kind") == "resume" and "version" in event:
            rounds = {version: record for version, record in rounds.items() if version <= event["version"]}
    return [rounds[version] for version in sorted(rounds)]


def read_schedule(path: str | Path) -> list[Record]:
    """All records of a schedule, in the order in which they were written."""
    return list(_read_lines(Path(path)))


def read_answers(directory: str | Path) -> list[Record]:
    """All records of a run's answers, in the order in which they were written; none without the file."""
    path = Path(directory) / ANSWERS
    return list(_read_lines(path)) if path.exists() else []


def _read_lines(path: Path) -> Iterator[Record]:
    try:
        lines = [line for line in read_lines(path) if line.endswith(b"\n")]
    except FileNotFoundError as error:
        raise OffbeatError(
            f"there is no {path.name} in {path.parent}: give the directory of a run"
        ) from error
    except OSError as error:
        raise OffbeatError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
        except ValueError as error:
            raise OffbeatError(
                f"{path}:{number} is not a line of JSON ({error}); delete that line to read the rest"
            ) from error
        if not isinstance(record, dict):
            raise OffbeatError(f"{path}:{number} is not a record; delete that line to read the rest")
        yield record


def _to_json(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError):  # rare enough that looking at every value first would be a waste
        return json.dumps(_plain(record), allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
