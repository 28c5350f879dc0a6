"""Checkpoints that are written beside training: what waits for them, and what does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.checkpoint import CheckpointManager, files
from offbeat.errors import StallError
from offbeat.pacing.events import (
    EvalDone,
    Finished,
    LearnerDown,
    Saved,
    SaveFailed,
    SaveSkipped,
    SnapshotTaken,
)
from offbeat.run import writing
from tests.unit.run_fakes import FakeRun

PATIENCE_S = 30.0


class Disk:
    """Holds the thread that writes until it is let go; `writes` counts checkpoints that were begun."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate, self.writes, self.threads = threading.Event(), 0, set[threading.Thread]()
        self.error: Exception | None = None
        save = CheckpointManager.save

        def held(manager: CheckpointManager, *args: Any) -> Path:
            self.writes += 1
            self.threads.add(threading.current_thread())
            assert self.gate.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
            return save(manager, *args)

        patch.setattr(CheckpointManager, "save", held)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(writing, "_SOON_S", 0.0)
    disk = Disk(monkeypatch)
    yield disk
    disk.gate.set()


def beside(directory: Path, **settings: Any) -> FakeRun:
    run = FakeRun(directory, takes_turns=False, **{"checkpoint_interval": 1, "rounds": 20, **settings})
    run.write_files()
    return run.start()


def step_until(run: FakeRun, is_there: Callable[[], bool]) -> None:
    """Step until something is there that another thread makes."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_there():
        assert time.monotonic() < give_up_s, run.seen[-5:]
        run.driver.step()
        time.sleep(0.0005)


def versions(run: FakeRun, kind: type = Saved) -> list[int]:
    return [event.version for event in run.of(kind)]


def test_rounds_go_on_while_a_checkpoint_is_written(tmp_path: Path, disk: Disk) -> None:
    run = beside(tmp_path, rounds=50)
    step_until(run, lambda: run.pace.version == 5)
    assert (versions(run), disk.writes) == ([], 1)
    assert versions(run, SaveSkipped) == [2, 3, 4, 5], "those that come due meanwhile"
    assert len(run.runtime.named("snapshot")) == 1, "its memory is not written over"
    assert run.notices() == [notice for notice in run.notices() if "skipped and counted" in notice][:1]
    disk.gate.set()
    step_until(run, lambda: len(versions(run)) == 2)
    assert versions(run)[0] == 1
    assert [thread.name for thread in disk.threads] == ["checkpoints"]


def test_short_rounds_wait_for_a_short_write(tmp_path: Path) -> None:
    run = beside(tmp_path, rounds=6)
    step_until(run, lambda: run.driver.finished)
    assert (versions(run), run.of(SaveSkipped)) == ([1, 2, 3, 4, 5, 6], [])


def test_write_is_not_waited_for_long(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_SOON_S", 0.05)
    run = beside(tmp_path)
    step_until(run, lambda: bool(run.of(SaveSkipped)))
    run.clock.now_s += 1.0
    writer = run.driver.saving.writer
    assert writer.is_writing and writer.await_soon() == 0.0


def test_run_ends_when_its_last_checkpoint_is_written(tmp_path: Path, disk: Disk) -> None:
    run = beside(tmp_path, rounds=3)
    run.step_until(lambda: run.driver.finish is not None)
    run.steps(3)
    assert not run.driver.finished
    assert run.driver.waits.phase() == "saving"
    rows = map(str, run.driver.waits.rows(run.clock.now_s))
    assert any("the end of the run waits for the disk" in row for row in rows)
    disk.gate.set()
    step_until(run, lambda: run.driver.finished)
    run.driver.close(None)
    assert versions(run) == [1, 3], "the last one waited for the first"
    assert run.kinds()[-1] == "Finished"
    saved = CheckpointManager(tmp_path / "checkpoints").load()
    assert (saved.version, saved.parts["coordinator"]["version"]) == (3, 3)


def test_last_checkpoint_that_is_never_written_stalls_the_run(tmp_path: Path, disk: Disk) -> None:
    limits = {"runtime": {"train_timeout_s": 60.0}, "run": {}}
    run = beside(tmp_path, rounds=1, limits=limits)
    run.step_until(lambda: run.driver.finish is not None)
    with pytest.raises(StallError, match=r"the last checkpoint was not written in 60 s"):
        run.pass_time(120.0)


def test_scores_wait_for_the_writer(tmp_path: Path, disk: Disk) -> None:
    run = beside(tmp_path, rounds=2, checkpoint_interval=2, eval_interval=2)
    run.step_until(lambda: bool(run.of(EvalDone)) and run.driver.finish is not None)
    run.steps(3)
    assert not run.driver.finished
    disk.gate.set()
    step_until(run, lambda: run.driver.finished)
    assert CheckpointManager(tmp_path / "checkpoints").load().score == 1.0


def test_write_that_fails_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = files.write_arrays, list[Path]()

    def full(path: Path, *args: Any) -> None:
        if "step_00000001" in str(path):
            failed.append(path)
            raise OSError(28, "No space left on device")
        real(path, *args)

    monkeypatch.setattr(files, "write_arrays", full)
    run = beside(tmp_path, rounds=60, checkpoint_interval=20)
    run.driver.saving.begin(1)
    step_until(run, lambda: bool(run.of(SaveFailed)))
    assert failed and "No space left" in run.of(SaveFailed)[0].reason
    assert any("checkpoint of version 1 failed" in notice for notice in run.notices())
    step_until(run, lambda: run.driver.finished)
    assert versions(run)[-1] == 60
    assert run.driver.saving.writer.loss == ""


def test_error_of_the_thread_that_writes_ends_the_run(tmp_path: Path, disk: Disk) -> None:
    disk.error = RuntimeError("a bug")
    disk.gate.set()
    run = beside(tmp_path)
    with pytest.raises(RuntimeError, match="a bug"):
        step_until(run, lambda: run.driver.finished)
    run.driver.close(RuntimeError("a bug"))
    assert versions(run) == []


def test_run_that_goes_back_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, disk: Disk
) -> None:
    run = beside(tmp_path)
    step_until(run, lambda: disk.writes == 1)
    threading.Timer(0.1, disk.gate.set).start()
    run.driver.settle()
    assert CheckpointManager(tmp_path / "checkpoints").load().version == 1
    assert versions(run) == [1]


def test_end_waits_for_what_is_being_written_and_tells_it_before(tmp_path: Path, disk: Disk) -> None:
    run = beside(tmp_path)
    step_until(run, lambda: disk.writes == 1)
    threading.Timer(0.1, disk.gate.set).start()
    run.driver.close(OSError("another error"))
    assert versions(run) == [1]
    assert isinstance(run.seen[-1], Finished)


def test_run_that_is_ended_at_once_gives_up_what_is_being_written(tmp_path: Path, disk: Disk) -> None:
    run = beside(tmp_path)
    step_until(run, lambda: disk.writes == 1)
    (thread,) = disk.threads
    run.driver.close(KeyboardInterrupt())
    disk.gate.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_write_that_takes_too_long_is_given_up_at_the_end(tmp_path: Path, disk: Disk) -> None:
    run = beside(tmp_path, limits={"runtime": {"train_timeout_s": 0.05}})
    step_until(run, lambda: disk.writes == 1)
    run.driver.close(OSError("another error"))
    assert any("a checkpoint was given up" in notice for notice in run.notices())
    assert versions(run) == []


def test_time_in_which_rounds_stand_still_is_told_apart_from_the_time_of_writing(tmp_path: Path) -> None:
    for takes_turns in (True, False):
        run = FakeRun(tmp_path / str(takes_turns), takes_turns=takes_turns, rounds=1, checkpoint_at_end=True)
        clock = run.clock

        def slow(manager: Any, *args: Any, clock: Any = clock) -> Path:
            clock.now_s += 5.0
            return Path("there")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointManager, "save", slow)
            run.start()
            step_until(run, lambda run=run: run.driver.finished)  # type: ignore[misc]
        (saved,) = run.of(Saved)
        assert saved.seconds >= 5.0
        assert (saved.paused_s >= 5.0) is takes_turns


class Ring:
    """A learner's memory: the same arrays in each snapshot, as from kept copies."""

    def __init__(self) -> None:
        self.w = np.zeros(300_000)

    def snapshot(self, version: int) -> SnapshotTaken:
        self.w[:] = version
        return SnapshotTaken({"w": self.w}, {"w": self.w[:10]})


@contextmanager
def slow_files(patch: pytest.MonkeyPatch) -> Iterator[None]:
    real = files.write_arrays

    def slow(path: Path, *args: Any) -> None:
        time.sleep(0.01)
        real(path, *args)

    patch.setattr(files, "write_arrays", slow)
    yield


def test_no_checkpoint_holds_the_memory_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_SOON_S", 0.0)
    ring = Ring()
    run = FakeRun(tmp_path, takes_turns=False, checkpoint_interval=1, rounds=300, off_policy_degree=1)
    run.runtime.snapshot = lambda: run.runtime.events.append(ring.snapshot(run.pace.version))  # type: ignore[method-assign]
    seen: dict[int, Mapping[str, Any]] = {}
    load = CheckpointManager(tmp_path / "checkpoints").load
    run.driver.observe({Saved: lambda event, _: seen.update({event.version: load(event.version).parts})})
    with slow_files(monkeypatch):
        run.start()
        step_until(run, lambda: run.driver.finished)
    assert len(seen) > 1 and run.of(SaveSkipped)
    for version, parts in seen.items():
        assert np.unique(parts["learner"]["w"]).tolist() == [version]
    run.driver.close(None)


def test_learner_that_is_lost_ends_the_driver_beside_a_write(tmp_path: Path, disk: Disk) -> None:
    run = beside(tmp_path)
    step_until(run, lambda: disk.writes == 1)
    run.runtime.events.append(LearnerDown("killed"))
    with pytest.raises(Exception, match="killed"):
        run.driver.step()
    disk.gate.set()
    run.driver.close(None)
    assert versions(run) == [1]
