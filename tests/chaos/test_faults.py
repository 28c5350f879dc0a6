"""Faults that really happen: killed, hanging and raising parts, signals, a whole run killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import offbeat
from offbeat.errors import CollectError, OffbeatError
from offbeat.observe.events import read_events, read_rounds
from tests.conftest import SMALL

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


@pytest.mark.parametrize("degree", [0, 3])
def test_killing_workers_from_outside_keeps_every_promise(degree: int, tmp_path: Path) -> None:
    directory = tmp_path / "chaos"
    process = start(directory, "run.rounds=150", f"async_training.off_policy_degree={degree}")
    for round_number in (20, 50, 80):
        wait_for_rounds(directory, round_number, process)
        workers = psutil.Process(process.pid).children()
        os.kill(workers[round_number % len(workers)].pid, signal.SIGKILL)
    assert process.wait(timeout=90) == 0
    rounds = read_rounds(directory / "events.jsonl")
    assert len(rounds) == 150
    assert len(lost(directory)) == 3
    assert max(record["metrics"]["pace/max_sample_age"] for record in rounds) <= degree
    assert rounds[-1]["metrics"]["pace/dropped_samples"] == 0
    assert offbeat.replay_run(directory).identical


def test_stopped_evaluator_never_stops_training(tmp_path: Path) -> None:
    directory = tmp_path / "evaluator"
    overrides = ["run.rounds=150", "async_training.enable_async_eval=true", "eval.interval_rounds=10"]
    process = start(directory, *overrides)
    wait_for_rounds(directory, 30, process)
    for child in psutil.Process(process.pid).children():
        if len(psutil.Process(process.pid).children()) > 2:
            newest = max(psutil.Process(process.pid).children(), key=lambda c: c.create_time())
            newest.kill()
            break
    assert process.wait(timeout=90) == 0
    rounds = read_rounds(directory / "events.jsonl")
    assert len(rounds) == 150
