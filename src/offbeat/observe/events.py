"""A run's two journals: ``events.jsonl`` (what happened, for people) and ``schedule.jsonl`` (for replay).

Each line is one JSON object and is handed to the system in one write, so a killed run keeps every line it
wrote. Only a machine that loses power can leave a torn last line: readers pass over it, writers cut it off.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.errors import CheckpointError, OffbeatError

Record = dict[str, Any]
"""One line of a journal."""


class EventLog:
    """Appends to ``events.jsonl``: ``{"kind": "round", "time": 1763193600.5, "version": 12, …}``.

    Kinds in use: start, resume, round, eval, checkpoint, worker_lost, dial, notice, finish. Records that
    belong to a version carry it as ``version``; rounds and evaluations carry their numbers as ``metrics``.
    ``time`` is in seconds since 1970.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._journal = _Journal(Path(path))
        self._clock = clock

    def append(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        """Write one event. NaN and infinities become null; numpy values and paths become plain ones."""
        self._journal.append({"kind": kind, "time": round(self._clock(), 3), **(fields or {})})

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._journal.close()


class ScheduleLog:
    """Appends to ``schedule.jsonl``, from which a run can be repeated bit for bit.

    A checkpoint keeps `offset`; a resumed run first goes back to it with `truncate`, so that the file always
    tells one story without repetition.
    """

    def __init__(self, path: str | Path) -> None:
        self._journal = _Journal(Path(path))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        self._journal.append(record)

    def offset(self) -> int:
        """Length of the file in bytes, once the disk has all of it: what a checkpoint may rely on."""
        return self._journal.sync()

    def truncate(self, offset: int) -> None:
        """Forget everything written after `offset` was taken."""
        length = self._journal.sync()
        if not 0 <= offset <= length:
            raise CheckpointError(
                f"{self._journal.path} has {length} bytes, the checkpoint knows of {offset}: it was cut or "
                "replaced. Put the right file back, or start the run anew with `offbeat train`"
            )
        self._journal.truncate(offset)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._journal.close()


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


class _Journal:
    """A file of JSON lines that only grows, except when it is told to go back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._cut_torn_line()

    def append(self, record: Mapping[str, Any]) -> None:
        line = _to_json(record) + b"\n"
        written = self._file.write(line)
        while written < len(line):
            written += self._file.write(line[written:])

    def sync(self) -> int:
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def truncate(self, length: int) -> None:
        os.ftruncate(self._file.fileno(), length)

    def close(self) -> None:
        self._file.close()

    def _cut_torn_line(self) -> None:
        with self.path.open("rb") as file:
            torn = _length_of_torn_line(file.read())
        if torn:
            self.truncate(self.path.stat().st_size - torn)


def _length_of_torn_line(data: bytes) -> int:
    return len(data) - (data.rfind(b"\n") + 1)


def _read_lines(path: Path) -> Iterator[Record]:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise OffbeatError(
            f"there is no {path.name} in {path.parent}: give the directory of a run"
        ) from error
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise OffbeatError(
                f"{path}:{number} is not a line of JSON ({error}); delete that line to read the rest"
            ) from error


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
