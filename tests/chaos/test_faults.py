"""Faults that really happen: killed, hanging and raising parts, signals, a whole run killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import offbeat
from offbeat.checkpoint import files
from offbeat.config.models import EvalConfig
from offbeat.errors import CollectError, OffbeatError, ReplayError
from offbeat.observe.callbacks import RoundInfo
from offbeat.observe.events import read_events, read_rounds, read_schedule
from offbeat.pipeline import Settings
from tests.conftest import SMALL, is_worker

Run = Callable[..., Any]


def faulty(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"env.id": f"offbeat.testing.envs:offbeat-test/{name}-v0", "env.kwargs": kwargs}


def lost(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["kind"] == "worker_lost"]


@pytest.mark.parametrize("fault", ["Kill", "Exit"])
def test_killed_collector_changes_nothing(fault: str, small_run: Run, tmp_path: Path) -> None:
    healthy = small_run({**faulty("Healthy", at_step=40), "runtime.kind": "inline"}, name="healthy")
    once = str(tmp_path / "happened")
    result = small_run({**faulty(fault, at_step=40, once=once), "runtime.kind": "processes"})
    assert Path(once).exists()
    assert len(lost(result.run_dir)) == 1
    assert result.digest == healthy.digest


def test_hanging_collector_is_named_killed_and_replaced(small_run: Run, tmp_path: Path) -> None:
    once = str(tmp_path / "happened")
    settings = {**faulty("Hang", at_step=40, once=once), "async_training.generation_timeout": 2.0}
    result = small_run(settings, off_policy_degree=1)
    assert result.rounds == 6
    (event,) = lost(result.run_dir)
    assert "hung: ticket" in event["reason"]
    assert "_hang" in event["reason"], "the report has the stack of the environment"


def test_collectors_that_keep_dying_end_the_run(small_run: Run) -> None:
    settings = {**faulty("Kill", at_step=3), "runtime.max_worker_restarts": 2}
    with pytest.raises(CollectError, match=r"(?s)runtime.max_worker_restarts.*SIGKILL"):
        small_run(settings)


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_raising_environment_stops_the_run_with_its_own_traceback(kind: str, small_run: Run) -> None:
    with pytest.raises(CollectError, match=r"(?s)FaultError: asked to raise at step 40"):
        small_run({**faulty("Raise", at_step=40), "runtime.kind": kind})


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_environment_that_raises_once_is_replaced(kind: str, small_run: Run, tmp_path: Path) -> None:
    healthy = small_run({**faulty("Healthy", at_step=40), "runtime.kind": "inline"}, name="healthy")
    once = str(tmp_path / "happened")
    result = small_run({**faulty("Raise", at_step=40, once=once), "runtime.kind": kind})
    assert Path(once).exists()
    (event,) = lost(result.run_dir)
    assert "FaultError: asked to raise at step 40" in event["reason"]
    assert result.metrics["rollout/generation_errors"] == 1
    assert result.digest == healthy.digest


def test_environment_that_raises_at_once_ends_the_run_without_another_try(
    small_run: Run, tmp_path: Path
) -> None:
    with pytest.raises(CollectError, match="FaultError: asked to raise at step 3"):
        small_run(faulty("Raise", at_step=3))
    assert not lost(tmp_path / "run")


@pytest.mark.parametrize(("fault", "step"), [("NaN", 1), ("WrongShape", 1), ("NaN", 40), ("NaNReward", 40)])
def test_environment_that_returns_nonsense_stops_the_run(fault: str, step: int, small_run: Run) -> None:
    with pytest.raises(OffbeatError, match=r"(?i)nan|shape|finite"):
        small_run({**faulty(fault, at_step=step), "runtime.kind": "inline"})


def start(directory: Path, *overrides: str) -> subprocess.Popen[bytes]:
    settings = [f"{key}={json.dumps(value)}" for key, value in {**SMALL, "run.dir": str(directory)}.items()]
    command = [sys.executable, "-m", "offbeat", "train", "cartpole-ppo", *settings, *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for_rounds(directory: Path, rounds: int, process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            raise AssertionError((process.stdout.read() if process.stdout else b"").decode())
        if (directory / "events.jsonl").exists():
            if sum(e["kind"] == "round" for e in read_events(directory / "events.jsonl")) >= rounds:
                return
        time.sleep(0.02)
    raise AssertionError(f"the run did not reach round {rounds}")


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The worker processes of a run, which are not children of the command: that is the run's guard."""
    family = psutil.Process(process.pid).children(recursive=True)
    return [one for one in family if is_worker(one)]


def test_run_killed_half_way_ends_with_the_same_weights(small_run: Run, tmp_path: Path) -> None:
    reference = small_run({"runtime.kind": "inline"}, rounds=120)
    directory = tmp_path / "killed"
    process = start(directory, "run.rounds=120", "checkpoint.interval_rounds=7")
    wait_for_rounds(directory, 30, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(timeout=10)
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert len(gone) >= 2 and not alive, "workers die with their driver"
    assert offbeat.resume(directory).digest == reference.digest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_checkpoints_and_says_how_to_resume(number: int, tmp_path: Path) -> None:
    directory = tmp_path / "stopped"
    process = start(directory, "run.rounds=100000")
    wait_for_rounds(directory, 5, process)
    process.send_signal(number)
    output = process.communicate(timeout=15)[0].decode()
    assert f"offbeat resume {directory}" in output
    assert "Traceback" not in output
    events = read_events(directory / "events.jsonl")
    assert events[-1]["kind"] == "finish"
    saved = [event["version"] for event in events if event["kind"] == "checkpoint"]
    assert saved[-1] == read_rounds(directory / "events.jsonl")[-1]["version"]


@pytest.mark.parametrize("degree", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_killing_workers_from_outside_keeps_every_promise(degree: int, tmp_path: Path) -> None:
    directory = tmp_path / "chaos"
    process = start(directory, "run.rounds=150", f"async_training.off_policy_degree={degree}")
    for round_number in (20, 50, 80):
        wait_for_rounds(directory, round_number, process)
        workers = workers_of(process)
        os.kill(workers[round_number % len(workers)].pid, signal.SIGKILL)
    assert process.wait(timeout=90) == 0
    rounds = read_rounds(directory / "events.jsonl")
    assert len(rounds) == 150
    assert len(lost(directory)) == 3
    assert max(record["metrics"]["pace/max_sample_age"] for record in rounds) <= degree
    assert rounds[-1]["metrics"]["pace/dropped_samples"] == 0
    assert offbeat.replay_run(directory).identical


def kill_evaluator(process: subprocess.Popen[bytes]) -> psutil.Process:
    """Wait for a worker beside the two collectors and kill it; return it."""
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        workers = workers_of(process)
        if len(workers) > 2:
            newest = max(workers, key=lambda worker: worker.create_time())
            newest.kill()
            return newest
        assert process.poll() is None, "the run ended without an evaluator"
        time.sleep(0.005)
    raise AssertionError("no evaluator came up")


def test_killed_evaluator_never_stops_training(tmp_path: Path) -> None:
    directory = tmp_path / "evaluator"
    slow = ["eval.episodes=60", "eval.num_envs=1", "eval.interval_rounds=10"]
    process = start(directory, "run.rounds=100", "async_training.enable_async_eval=true", *slow)
    wait_for_rounds(directory, 5, process)
    evaluator = kill_evaluator(process)
    assert process.wait(timeout=90) == 0
    assert not evaluator.is_running()
    events = read_events(directory / "events.jsonl")
    failed = [
        i for i, e in enumerate(events) if e["kind"] == "notice" and "evaluation of version" in e["text"]
    ]
    assert len(failed) == 1
    assert "SIGKILL" in events[failed[0]]["text"]
    assert any(event["kind"] == "eval" for event in events[failed[0] :]), "the next one has a new process"
    assert not lost(directory), "no collector was hit"
    assert len(read_rounds(directory / "events.jsonl")) == 100


def test_evaluation_that_kills_its_process_costs_itself_only(tmp_path: Path) -> None:
    """Also where training waits for the evaluation."""

    def evaluate(weights: Any) -> float:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0

    class Keep(offbeat.Callback):
        def __init__(self) -> None:
            self.notices: list[str] = []

        def on_notice(self, text: str) -> None:
            self.notices.append(text)

    keep = Keep()
    report = offbeat.Pipeline(
        collect=lambda ticket, weights: ticket.seed,
        train=lambda batch: None,
        weights=lambda: 0,
        evaluate=evaluate,
        runtime="processes",
        settings=Settings(eval=EvalConfig(interval_rounds=2)),
        callbacks=[keep],
    ).run(rounds=4)
    assert report.version == 4
    assert len(keep.notices) == 2
    assert all("SIGSEGV" in text for text in keep.notices)


@pytest.mark.slow
def test_asynchronous_run_killed_half_way_can_be_resumed_and_replayed(tmp_path: Path) -> None:
    directory = tmp_path / "killed"
    dial = "async_training.off_policy_degree=3"
    process = start(directory, "run.rounds=120", "checkpoint.interval_rounds=7", dial)
    wait_for_rounds(directory, 30, process)
    process.kill()
    process.wait(timeout=10)
    result = offbeat.resume(directory)
    assert result.rounds == 120
    assert result.max_staleness <= 3
    report = offbeat.replay_run(directory)
    assert report.identical and report.digest == result.digest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(where)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], timeout=20, check=True)


class FullForAWhile(offbeat.Callback):
    """Fills the disk after round 5 and frees it after round 40."""

    def __init__(self, disk: Path) -> None:
        self._filler = disk / "filler"
        self.notices: list[str] = []

    def on_round(self, info: RoundInfo) -> None:
        if info.version == 5:
            self._fill()
        elif info.version == 40:
            self._filler.unlink()

    def _fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def on_notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_full_disk_does_not_end_a_run(kind: str, small_run: Run, small_disk: Path) -> None:
    pytest.importorskip("tensorboard")
    directory, watch = small_disk / "run", FullForAWhile(small_disk)
    settings = {
        "run.dir": str(directory),
        "runtime.kind": kind,
        "observe.tensorboard": True,
        "checkpoint.interval_rounds": 4,
        "eval.interval_rounds": 4,
    }
    result = small_run(settings, rounds=60, off_policy_degree=1, callbacks=[watch])
    assert result.rounds == 60
    said = "\n".join(watch.notices)
    for what in (
        "events.jsonl cannot",
        "schedule.jsonl cannot",
        "TensorBoardSink gets no more",
        "checkpoint",
    ):
        assert what in said, said
    assert said.count("events.jsonl cannot be written") == 1
    kinds = [event["kind"] for event in read_events(directory / "events.jsonl")]
    assert "gap" in kinds and kinds[-1] == "finish"
    assert read_rounds(directory / "events.jsonl")[-1]["version"] == 60
    assert {"kind": "gap"} in read_schedule(directory / "schedule.jsonl")
    assert offbeat.digest(directory) == result.digest, "checkpoints are written again once there is room"
    with pytest.raises(ReplayError):
        offbeat.replay_run(directory)


def test_score_that_cannot_be_saved_does_not_end_a_run(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_bytes = files.replace_bytes

    def full(path: Path, data: bytes) -> None:
        if "checkpoints" in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        replace_bytes(path, data)

    monkeypatch.setattr(files, "replace_bytes", full)
    watch = FullForAWhile(tmp_path)
    settings = {"runtime.kind": "inline", "eval.interval_rounds": 1, "checkpoint.interval_rounds": 1}
    result = small_run(settings, rounds=3, callbacks=[watch])
    assert result.rounds == 3
    assert any("the score of version" in text and "No space left" in text for text in watch.notices)


def test_ticket_that_always_kills_its_collector_ends_the_run_early(small_run: Run) -> None:
    settings = {**faulty("Kill", at_step=3), "runtime.num_workers": 1}
    with pytest.raises(CollectError, match=r"(?s)ticket 0 took 3 collectors down.*SIGKILL"):
        small_run(settings)
