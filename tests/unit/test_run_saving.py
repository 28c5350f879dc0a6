"""Checkpoints as the driver takes them: one at a time, with the begun work that came in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbeat.checkpoint import CheckpointManager
from offbeat.errors import ConfigError
from offbeat.observe.events import read_events
from offbeat.pacing.events import (
    CollectorDown,
    CollectorLeft,
    Issued,
    OpenWork,
    Saved,
    SaveSkipped,
    SnapshotTaken,
    StopRequested,
)
from offbeat.run.parts import StartPoint
from offbeat.run.restarts import start_point
from offbeat.runtime.messages import Begun
from tests.unit.run_fakes import FakeRun


def at_a_checkpoint(directory: Path, **settings: Any) -> FakeRun:
    """A run at k = 1 whose first checkpoint waits for the learner; collectors hold tickets 2 and 3."""
    settings = {"checkpoint_interval": 1, "off_policy_degree": 1, "rounds": 20, **settings}
    run = FakeRun(directory, silent=["snapshot"], **settings)
    run.write_files()
    run.start()
    run.step_until(lambda: len(run.runtime.named("collect")) >= 2)
    run.runtime.silent |= {"collect", "ask_work"}
    run.runtime.work = {index: {} for index in range(len(run.driver.collectors.rows))}
    run.step_until(lambda: run.driver.saving.is_pending)
    return run


def running(run: FakeRun) -> list[int]:
    return sorted(number for row in run.driver.collectors.rows for number in row.tickets)


def snapshot() -> SnapshotTaken:
    return SnapshotTaken({"w": [0.0]}, {})


def saved_work(run: FakeRun, version: int = 1) -> Any:
    assert run.directory is not None
    return CheckpointManager(run.directory / "checkpoints").load(version).parts.get("work")


def test_checkpoint_is_written_when_the_snapshot_and_all_answers_are_there(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    assert running(run) == [2, 3]
    run.runtime.events.append(OpenWork(0, {2: {"tokens": [7, 8]}}))
    run.driver.step()
    run.runtime.events.append(snapshot())
    run.driver.step()
    assert run.of(Saved) == []
    assert run.driver.waits.phase() == "", "training goes on"
    run.runtime.events.append(OpenWork(1, {3: {"tokens": [9]}, 99: "of a ticket that it does not hold"}))
    run.driver.step()
    assert [event.version for event in run.of(Saved)] == [1]
    assert saved_work(run) == {2: {"tokens": [7, 8]}, 3: {"tokens": [9]}}
    assert "work" not in run.driver.waits
    assert run.notices() == []


def test_collector_that_does_not_answer_is_left_out_two_seconds_after_the_snapshot(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.pass_time(100.0)
    run.runtime.events += [OpenWork(0, {2: "a"}), snapshot()]
    run.driver.step()
    run.pass_time(1.7)
    (row,) = [row for row in run.driver.waits.rows(run.clock.now_s) if row.wait.key == "work"]
    assert "checkpoint 1 waits for collector_1" in str(row)
    assert run.of(Saved) == []
    run.pass_time(0.6)
    assert [event.version for event in run.of(Saved)] == [1]
    assert saved_work(run) == {2: "a"}
    (notice,) = run.notices()
    assert (
        "checkpoint 1 has no new begun work of collector_1: no answer within 2 s (1 missing in all)" in notice
    )


def test_late_answer_is_kept_for_the_next_checkpoint(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.runtime.events += [OpenWork(0, {}), snapshot()]
    run.pass_time(2.5)
    run.runtime.events.append(OpenWork(1, {3: "late"}))
    run.runtime.work = {}
    run.driver.step()
    run.requests.append(StopRequested("enough"))
    run.driver.saving.begin(2)
    run.runtime.events.append(snapshot())
    run.driver.step()
    assert saved_work(run, 2) == {3: "late"}


@pytest.mark.parametrize("gone", [CollectorDown(1, "killed"), CollectorLeft(1)])
def test_collector_that_is_gone_is_not_waited_for(gone: Any, tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.runtime.events += [snapshot(), OpenWork(0, {}), gone]
    run.driver.step()
    assert [event.version for event in run.of(Saved)] == [1]
    assert saved_work(run) is None
    assert any("of collector_1: no answer" in notice for notice in run.notices())


def test_last_checkpoint_does_not_wait_for_a_collector_that_died_after_the_end(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path, checkpoint_at_end=True)
    run.requests.append(StopRequested("enough"))
    run.step_until(lambda: run.driver.finish is not None)
    run.runtime.events.append(snapshot())
    run.driver.step()
    assert not run.driver.finished
    assert run.driver.waits.phase() == "saving"
    run.runtime.events += [OpenWork(0, {}), CollectorDown(1, "killed")]
    run.driver.step()
    assert run.driver.finished
    assert run.of(CollectorDown) == []


def test_collector_that_is_down_is_not_asked(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.runtime.events += [OpenWork(0, {}), OpenWork(1, {}), snapshot()]
    run.driver.step()
    run.runtime.silent.add("start_collector")
    run.runtime.events.append(CollectorDown(1, "killed"))
    run.driver.step()
    run.driver.saving.begin(2)
    run.runtime.events += [snapshot(), OpenWork(0, {})]
    run.driver.step()
    assert [event.version for event in run.of(Saved)] == [1, 2]


def test_ticket_issued_after_the_checkpoint_has_no_work_in_it(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path, num_workers=1, off_policy_degree=3)
    (issued,) = running(run)
    run.driver.collectors.rows[0].tickets[issued + 1] = run.clock.now_s
    run.runtime.events += [OpenWork(0, {issued: "old", issued + 1: "new"}), snapshot()]
    run.driver.step()
    assert saved_work(run) == {issued: "old"}


def test_lost_tickets_take_their_begun_work_along_when_the_run_is_resumed(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.runtime.events += [OpenWork(0, {2: {"tokens": [7]}}), OpenWork(1, {}), snapshot()]
    run.driver.step()
    run.driver.close(None)
    saved = CheckpointManager(tmp_path / "checkpoints").load()
    again = FakeRun(off_policy_degree=1, rounds=20).start(start_point(saved))
    again.step_until(lambda: again.pace.version == 3)
    assert again.runtime.begun == {2: {"tokens": [7]}}
    back = FakeRun(off_policy_degree=1, rounds=20).start(start_point(saved, rollback=1))
    back.step_until(lambda: back.pace.version == 3)
    assert back.runtime.begun == {}, "a run that goes back collects other samples"


def test_begun_work_of_versions_after_a_checkpoint_is_for_its_version_only(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.runtime.events += [OpenWork(0, {2: "ahead"}, 2), OpenWork(1, {3: "whole"}, 1), snapshot()]
    run.driver.step()
    saved = CheckpointManager(tmp_path / "checkpoints").load(1)
    again = FakeRun(off_policy_degree=1, rounds=20).start(start_point(saved))
    assert again.driver.begun.of(2) == Begun("ahead", 1)
    assert again.driver.begun.of(3) == Begun("whole")
    assert set(again.driver.begun.parts(2, 9)["work"]) == {3}, "no later checkpoint has it"
    again.driver.begun.take(OpenWork(0, {}, 1))
    again.step_until(lambda: again.pace.version == 3)
    assert {event.ticket.number: event.keeps_all for event in again.of(Issued)[:3]} == {
        2: False,
        3: True,
        4: None,
    }


def test_run_saved_before_there_was_begun_work_can_be_resumed(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.runtime.events += [OpenWork(0, {}), OpenWork(1, {}), snapshot()]
    run.driver.step()
    saved = CheckpointManager(tmp_path / "checkpoints").load()
    assert "work" not in saved.parts
    again = FakeRun(off_policy_degree=1, rounds=2).start(StartPoint(saved.version, saved.parts, (), True))
    again.complete()
    assert again.runtime.begun == {}


def test_ticket_of_a_killed_collector_takes_its_begun_work_along_until_it_arrives(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.runtime.events += [OpenWork(0, {2: "begun"}), OpenWork(1, {3: "other"}), snapshot()]
    run.driver.step()
    run.runtime.silent.discard("collect")
    run.runtime.events.append(CollectorDown(0, "killed"))
    run.step_until(lambda: 2 in run.runtime.begun)
    run.driver.step()
    assert run.runtime.begun == {2: "begun"}
    assert run.driver.begun.trees.get(2) is None
    assert run.driver.begun.trees.get(3) == "other"


def test_new_answer_replaces_the_one_before(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.runtime.events += [OpenWork(0, {2: "begun"}), OpenWork(0, {})]
    run.driver.step()
    assert run.driver.begun.trees.get(2) is None


def test_begun_work_that_a_checkpoint_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    run = at_a_checkpoint(tmp_path)
    run.runtime.events.append(OpenWork(0, {2: {"cache": {1, 2}}}))
    with pytest.raises(ConfigError, match=r"collector_0\.open_work\(\)\[2\]\['cache'\] is a builtins\.set"):
        run.driver.step()


# ---------------------------------------------------------------- one at a time


def test_checkpoint_that_comes_due_meanwhile_is_skipped_counted_and_told_once(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, silent=["snapshot"], checkpoint_interval=1, rounds=20)
    run.write_files()
    run.start()
    run.step_until(lambda: run.pace.version == 4)
    assert [event.version for event in run.of(SaveSkipped)] == [2, 3, 4]
    assert len(run.notices()) == 1
    run.runtime.silent.clear()
    run.runtime.snapshot()
    run.step_until(lambda: len(run.of(Saved)) == 2)
    assert [event.version for event in run.of(Saved)] == [1, 5]
    run.driver.close(None)
    skipped = [one["version"] for one in read_events(tmp_path / "events.jsonl") if "skipped" in one["kind"]]
    assert skipped == [2, 3, 4]


@pytest.mark.parametrize("at_end", [True, False])
def test_last_checkpoint_waits_for_the_one_at_hand(at_end: bool, tmp_path: Path) -> None:
    due = {"checkpoint_at_end": True} if at_end else {"checkpoint_interval": 1}
    run = FakeRun(tmp_path, silent=["snapshot"], rounds=3, **{"checkpoint_interval": 2, **due})
    run.write_files()
    run.start()
    run.step_until(lambda: run.driver.finish is not None)
    assert not run.driver.finished
    run.runtime.silent.clear()
    run.runtime.snapshot()
    run.complete()
    first = 2 if at_end else 1
    assert [event.version for event in run.of(Saved)] == [first, 3]
    assert CheckpointManager(tmp_path / "checkpoints").load(3).parts["coordinator"]["version"] == 3


def test_skipped_checkpoint_is_taken_after_all_when_the_run_stops_there(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path,
        silent=["snapshot"],
        checkpoint_interval=1,
        checkpoint_at_end=True,
        rounds=20,
    ).start()
    run.step_until(lambda: run.pace.version == 2)
    run.requests.append(StopRequested("enough"))
    run.step_until(lambda: run.driver.finish is not None)
    run.runtime.silent.clear()
    run.runtime.snapshot()
    run.complete()
    assert [event.version for event in run.of(SaveSkipped)][:1] == [2]
    assert run.of(Saved)[-1].version == run.pace.version
