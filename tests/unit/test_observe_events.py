import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.errors import CheckpointError, OffbeatError
from offbeat.observe import EventLog, ScheduleLog, read_events, read_rounds, read_schedule


def test_events_come_back_in_order_with_kind_and_time(tmp_path: Path) -> None:
    times = iter([1000.25, 1001.0])
    log = EventLog(tmp_path / "run" / "events.jsonl", clock=lambda: next(times))
    log.append("start", {"seed": 3})
    log.append("finish")
    log.close()
    log.close()
    assert read_events(tmp_path / "run" / "events.jsonl") == [
        {"kind": "start", "time": 1000.25, "seed": 3},
        {"kind": "finish", "time": 1001.0},
    ]


def test_values_that_json_does_not_know_become_plain(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 0.0)
    log.append(
        "round",
        {
            "metrics": {
                "a": float("nan"),
                "b": float("-inf"),
                "c": np.float32(0.5),
                "d": np.int64(2),
                3: True,
            },
            "path": Path("x/y"),
            "list": (np.array([1.0, np.nan]), {1}, None),
        },
    )
    text = (tmp_path / "events.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event["metrics"] == {"a": None, "b": None, "c": 0.5, "d": 2, "3": True}
    assert (event["path"], event["list"]) == ("x/y", [[1.0, None], [1], None])


def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"start","time":0}\n{"kind":"rou')
    assert [event["kind"] for event in read_events(path)] == ["start"]
    EventLog(path, clock=lambda: 1.0).append("resume")
    assert [event["kind"] for event in read_events(path)] == ["start", "resume"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"start"}\n\0\0\0\n{"kind":"finish"}\n')
    with pytest.raises(OffbeatError, match=r"events.jsonl:2 .*delete that line"):
        read_events(path)


def test_a_missing_journal_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match="directory of a run"):
        read_events(tmp_path / "events.jsonl")


def test_rounds_trained_again_after_a_resume_count_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for version, attempt in [(1, 0), (2, 0), (3, 0), (4, 0)]:
        log.append("round", {"version": version, "attempt": attempt})
    log.append("eval", {"version": 2})
    log.append("resume", {"version": 1})
    for version in (2, 3):
        log.append("round", {"version": version, "attempt": 1})
    rounds = read_rounds(tmp_path / "events.jsonl")
    assert [(record["version"], record["attempt"]) for record in rounds] == [(1, 0), (2, 1), (3, 1)]


def test_rounds_are_sorted_and_the_last_record_wins_without_a_resume_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for version, attempt in [(2, 0), (1, 0), (2, 1)]:
        log.append("round", {"version": version, "attempt": attempt})
    assert [(record["version"], record["attempt"]) for record in read_rounds(path)] == [(1, 0), (2, 1)]


KILLED = """
import os, signal, sys
from offbeat.observe import EventLog
log = EventLog(sys.argv[1])
for version in range(5):
    log.append("round", {"version": version})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_keeps_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], env=environment, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert [record["version"] for record in read_rounds(path)] == [0, 1, 2, 3, 4]


def add(log: ScheduleLog, record: dict[str, Any]) -> None:
    """Take a line and write it."""
    log.lines.append(json.dumps(record) + "\n")
    log.flush()


def test_a_schedule_goes_back_to_where_a_checkpoint_was_taken(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    log = ScheduleLog(path)
    add(log, {"train": 0, "tickets": [0, 1], "seed": 2**63 - 1})
    offset = log.offset()
    assert offset == path.stat().st_size
    add(log, {"train": 1})
    log.close()
    resumed = ScheduleLog(path)
    resumed.truncate(offset)
    assert resumed.offset() == offset
    add(resumed, {"train": 1, "again": True})
    assert read_schedule(path) == [
        {"train": 0, "tickets": [0, 1], "seed": 2**63 - 1},
        {"train": 1, "again": True},
    ]


def test_lines_of_a_step_are_written_together(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    log = ScheduleLog(path)
    log.lines.append('{"train":0}\n')
    log.lines.append('{"train":1}\n')
    assert path.read_bytes() == b""
    log.flush()
    assert read_schedule(path) == [{"train": 0}, {"train": 1}]
    log.flush()
    log.lines.append('{"train":2}\n')
    assert log.offset() == path.stat().st_size == 3 * len('{"train":0}\n'), "a checkpoint relies on all lines"
    log.lines.append('{"train":3}\n')
    log.close()
    assert [record["train"] for record in read_schedule(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("offset", [-1, 10_000])
def test_a_schedule_shorter_than_the_checkpoint_knows_is_refused(tmp_path: Path, offset: int) -> None:
    log = ScheduleLog(tmp_path / "schedule.jsonl")
    add(log, {"train": 0})
    with pytest.raises(CheckpointError, match="offbeat train"):
        log.truncate(offset)
    assert read_schedule(tmp_path / "schedule.jsonl") == [{"train": 0}]


def test_each_line_is_one_object(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append("notice", {"text": "two\nlines"})
    log.append("notice", {"text": "ü"})
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["two\nlines", "ü"]


class FullDisk:
    """A file that takes ``room`` bytes, then says that the disk is full."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 9])
def test_a_full_disk_leaves_a_gap_that_is_told_once(tmp_path: Path, room: int) -> None:
    told: list[str] = []
    path = tmp_path / "schedule.jsonl"
    log = ScheduleLog(path, told.append)
    add(log, {"train": 0})
    offset = log.offset()
    disk = log._file = FullDisk(log._file, room)
    for number in (1, 2, 3):
        add(log, {"train": number})
    assert log.gap
    assert log.offset() == offset, "half a line is not what a checkpoint may rely on"
    assert read_schedule(path) == [{"train": 0}]
    disk.room = 1000
    add(log, {"train": 4})
    assert not log.gap
    log.close()
    assert read_schedule(path) == [{"train": 0}, {"kind": "gap"}, {"train": 4}]
    (text,) = told
    assert "schedule.jsonl cannot be written, the run cannot be replayed" in text and "No space left" in text


def test_a_gap_is_noted_at_the_end_and_not_forgotten_by_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    log = ScheduleLog(path, lambda text: None)
    disk = log._file = FullDisk(log._file, 0)
    add(log, {"train": 0})
    offset, gap = log.offset(), log.gap
    disk.room = 1000
    log.close()
    assert read_schedule(path) == [{"kind": "gap"}]
    resumed = ScheduleLog(path)
    resumed.truncate(offset, gap)
    add(resumed, {"train": 1})
    assert read_schedule(path) == [{"kind": "gap"}, {"train": 1}]


def test_events_go_on_after_a_full_disk(tmp_path: Path) -> None:
    told: list[str] = []
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 1.0, on_fault=told.append)
    disk = log._file = FullDisk(log._file, 0)
    log.append("start")
    disk.room = 1000
    log.append("finish")
    assert read_events(tmp_path / "events.jsonl") == [
        {"kind": "gap", "time": 1.0},
        {"kind": "finish", "time": 1.0},
    ]
    assert len(told) == 1
