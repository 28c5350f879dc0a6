"""Signals to a run whose rounds take long: waited for, ended at once, heard when stopped or hung up."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from offbeat.checkpoint import CheckpointManager
from offbeat.cli.status import read_status
from offbeat.observe.events import read_events, read_rounds
from tests.chaos.test_supervisor import child_of
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs have a guard on Linux only")

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs of the torch learner whose rounds take so many seconds; wait until one is being trained."""
    recipe = tmp_path / "slow.yaml"
    recipe.write_text(
        'algorithm: {name: "tests.torch_a2c:ALGORITHM"}\n'
        "env: {id: CartPole-v1, num_envs: 4}\nrun: {rounds: 100}\neval: {at_end: false}\n"
        "runtime: {num_workers: 2}\nobserve: {tensorboard: false, console: none}\n"
    )
    started: list[subprocess.Popen[str]] = []

    def run(directory: Path, work_s: float, *overrides: str, **options: Any) -> subprocess.Popen[str]:
        settings = [f"run.dir={directory}", f"algorithm.work_s={work_s}", *overrides]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        command = [sys.executable, "-m", "offbeat", "train", str(recipe), *settings]
        process = subprocess.Popen(command, text=True, cwd=ROOT, **options)
        started.append(process)
        wait_for_training(directory, process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def wait_for_training(directory: Path, process: subprocess.Popen[str]) -> None:
    """Wait until both segments of round 0 are there, so that it is being trained."""
    give_up_s = time.monotonic() + 90
    while time.monotonic() < give_up_s:
        assert process.poll() is None, process.communicate()
        schedule = directory / "schedule.jsonl"
        if schedule.exists() and schedule.read_text().count('"segment"') >= 2:
            time.sleep(0.3)
            return
        time.sleep(0.05)
    raise AssertionError("no round was begun")


def saved(directory: Path) -> list[int]:
    return [one["version"] for one in read_events(directory / "events.jsonl") if one["kind"] == "checkpoint"]


def finish(directory: Path) -> dict[str, Any]:
    last = read_events(directory / "events.jsonl")[-1]
    assert last["kind"] == "finish"
    return last


@pytest.mark.parametrize(
    ("number", "work_s", "kind"),
    [
        (signal.SIGTERM, 2.5, "threads"),
        *(  # longer than any wait for a thread or process to end
            pytest.param(number, 10.0, "processes", marks=pytest.mark.slow)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        ),
    ],
)
def test_signal_waits_for_a_long_round_and_saves_it(
    number: int, work_s: float, kind: str, start: Start, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    process = start(directory, work_s, f"runtime.kind={kind}", "--json")
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    told = json.loads(output.splitlines()[-1])
    name = signal.Signals(number).name
    assert (told["state"], told["reason"], told["rounds"]) == ("stopped", f"interrupted by {name}", 1)
    assert f"stopped: interrupted by {name}" in errors
    assert saved(directory) == [1]
    assert (finish(directory)["failed"], finish(directory)["stopped"]) == (False, True)
    found = read_status(directory, time.time())
    assert (found.state, found.is_well) == ("stopped", True)


@pytest.mark.parametrize("kind", ["processes", pytest.param("threads", marks=pytest.mark.slow)])
def test_second_signal_ends_a_long_round_at_once(kind: str, start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = start(directory, 300.0, f"runtime.kind={kind}", "--json")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert json.loads(output.splitlines()[-1])["ok"] is False
    assert "SIGKILL" not in errors and "Traceback" not in errors
    assert (finish(directory)["reason"], finish(directory)["stopped"]) == ("stopped at once, as asked", True)
    assert read_status(directory, time.time()).state == "stopped"
    assert not psutil.wait_procs(family, timeout=10)[1]


@pytest.mark.slow
def test_second_signal_needs_no_guard(start: Start, tmp_path: Path) -> None:
    """The learner's thread is in the middle of its round, and is neither waited for nor aborted."""
    directory = tmp_path / "run"
    process = start(directory, 300.0, "run.max_restarts=0")
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert finish(directory)["reason"] == "stopped at once, as asked"


@pytest.mark.parametrize(
    ("guard", "kind"),
    [
        ("run.max_restarts=3", "threads"),
        pytest.param("run.max_restarts=3", "processes", marks=pytest.mark.slow),
        pytest.param("run.max_restarts=0", "processes", marks=pytest.mark.slow),
    ],
)
def test_round_past_the_limit_of_a_stop_ends_the_run_without_an_abort(
    guard: str, kind: str, start: Start, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    process = start(directory, 300.0, f"runtime.kind={kind}", "run.stop_timeout_s=1", guard)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "did not end in time" in errors and "run.stop_timeout_s" in errors


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_stopped_process_hears_that_it_is_to_end_and_saves(kind: str, start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = start(directory, 1.0, f"runtime.kind={kind}")
    child_of(process).suspend()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 130, errors
    assert saved(directory)[-1] == read_rounds(directory / "events.jsonl")[-1]["version"]


def test_closed_terminal_saves_the_run(start: Start, tmp_path: Path) -> None:
    """Nobody reads what it writes any more, which would raise in the middle of its end."""
    directory = tmp_path / "run"
    primary, secondary = pty.openpty()
    options = {"stdin": secondary, "stdout": secondary, "stderr": secondary}
    process = start(directory, 1.0, "observe.console=plain", start_new_session=True, **options)
    os.close(secondary)
    os.close(primary)
    os.killpg(process.pid, signal.SIGHUP)  # as a shell sends it, or the kernel to a terminal's own session
    assert process.wait(timeout=40) == 130
    assert finish(directory)["reason"] == "interrupted by SIGHUP"
    version = read_rounds(directory / "events.jsonl")[-1]["version"]
    assert CheckpointManager(directory / "checkpoints").load().version == version
