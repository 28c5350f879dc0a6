"""The command survives the death of the process that does its work."""

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

from offbeat.cli.recover import LimitStop, RunProgress
from offbeat.cli.supervise import ChildContext
from offbeat.observe.events import read_events, read_rounds
from tests.chaos.test_faults import faulty, start, wait_for_rounds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs have a guard on Linux only")

Run = Callable[..., Any]
FAST = "run.restart_delay_s=0"
WORK = """
import os, signal, subprocess, sys, time
from offbeat.cli import supervise
supervise._STOP_MARGIN_S = 0.5
child = supervise.supervise(as_json="--json" in sys.argv)
attempt = 0 if child.after is None else child.after.attempt
def say(text):
    print(text, flush=True)
"""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a small program whose child does what the code says."""
    started = []

    def run(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        path = tmp_path / "work.py"
        path.write_text(WORK + code)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen([sys.executable, str(path), *arguments], text=True, **options)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def child_of(process: subprocess.Popen[Any]) -> psutil.Process:
    """The process that does the work."""
    (child,) = psutil.Process(process.pid).children()
    return child


def restarts(directory: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(directory / "events.jsonl") if event["kind"] == "restart"]


# ---------------------------------------------------------------- whole runs


def test_killed_child_is_followed_by_one_that_reaches_the_same_weights(
    small_run: Run, tmp_path: Path
) -> None:
    reference = small_run({"runtime.kind": "inline"}, rounds=120)
    directory = tmp_path / "killed"
    process = start(directory, "run.rounds=120", "checkpoint.interval_rounds=7", FAST, "--json")
    wait_for_rounds(directory, 30, process)
    family = psutil.Process(process.pid).children(recursive=True)
    child_of(process).kill()
    output = process.communicate(timeout=90)[0].decode()
    assert process.returncode == 0, output
    result = json.loads(output.splitlines()[-1])
    assert result["digest"] == reference.digest
    assert output.count('{"ok"') == 1
    assert "(restart 1 of 3)" in output
    (event,) = restarts(directory)
    assert event["reason"].startswith("killed by SIGKILL at round ")
    assert len(read_rounds(directory / "events.jsonl")) == 120
    assert not psutil.wait_procs(family, timeout=10)[1], "nobody of the killed run is left"


@pytest.mark.slow
def test_run_that_dies_at_the_same_place_again_does_not_loop(tmp_path: Path) -> None:
    directory = tmp_path / "dies"
    settings = [f"{key}={json.dumps(value)}" for key, value in faulty("Kill", at_step=40).items()]
    process = start(directory, *settings, "runtime.kind=inline", "run.max_restarts=5", FAST, "--json")
    output = process.communicate(timeout=90)[0].decode()
    assert process.returncode == 128 + signal.SIGKILL, output
    assert len(restarts(directory)) == 1
    assert "no further than before restart 1" in json.loads(output.splitlines()[-1])["error"]
    assert f"offbeat resume {directory}" in output
    last = read_events(directory / "events.jsonl")[-1]
    assert (last["kind"], last["failed"]) == ("finish", True)
    assert "no further than before restart 1" in last["reason"]
    assert "no further than before restart 1" in (directory / "logs" / "run.log").read_text()


@pytest.mark.slow
def test_restarts_end_with_their_budget(tmp_path: Path) -> None:
    directory, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(
        "extends: cartpole-ppo\nrun:\n  max_restarts: 0\n  rounds: 100000\n  stop_return: null\n"
    )
    command = [sys.executable, "-m", "offbeat", "train", str(recipe), f"run.dir={directory}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for_rounds(directory, 1, process)
    child_of(process).kill()
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 128 + signal.SIGKILL
    assert "run.max_restarts = 0 allows no further restart" in output
    assert not restarts(directory)


def test_killed_guard_takes_everybody_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "guard"
    process = start(directory, "run.rounds=100000")
    wait_for_rounds(directory, 5, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    process.kill()
    process.communicate(timeout=10)
    assert not psutil.wait_procs(family, timeout=10)[1]


def test_stop_asked_of_the_whole_group_is_heard_once(tmp_path: Path) -> None:
    directory = tmp_path / "stopped"
    settings = ["run.rounds=100000", "observe.console=none", "observe.tensorboard=false"]
    command = [sys.executable, "-m", "offbeat", "train", "cartpole-ppo", f"run.dir={directory}", *settings]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    wait_for_rounds(directory, 5, process)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=30)[0].decode()
    assert process.returncode == 130, output
    events = read_events(directory / "events.jsonl")
    assert events[-1]["reason"] == "interrupted by SIGINT"
    saved = [event["version"] for event in events if event["kind"] == "checkpoint"]
    assert saved[-1] == read_rounds(directory / "events.jsonl")[-1]["version"]


# ---------------------------------------------------------------- the guard alone


def test_exit_code_of_the_child_is_that_of_the_command(guarded: Run) -> None:
    process = guarded("sys.exit(7)")
    assert process.wait(timeout=30) == 7


def test_guard_stays_small(guarded: Run) -> None:
    process = guarded("import torch; say('ready'); time.sleep(60)")
    assert process.stdout.readline() == "ready\n"
    own = psutil.Process(process.pid).memory_full_info()
    assert own.uss < 8e6, "it keeps no more than a bare interpreter"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on_once_each(guarded: Run, number: int) -> None:
    process = guarded(
        f"signal.signal({number:d}, lambda *_: say('heard'))\nsay('ready')\n"
        "while True:\n    time.sleep(0.01)\n"
    )
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):  # so soon after each other that they count as one
        process.send_signal(number)
        assert process.stdout.readline() == "heard\n"
    child_of(process).kill()
    assert process.stdout.read() == "", "no third time, and no restart: somebody had asked for an end"
    assert process.wait(timeout=10) == 128 + signal.SIGKILL


def test_second_signal_ends_a_child_that_does_not_answer_as_asked(guarded: Run) -> None:
    process = guarded(
        "for number in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(number, signal.SIG_IGN)\n"
        "child.send('x'); say('here'); time.sleep(60)",
        "--json",
    )
    assert process.stdout.readline() == "here\n"
    child = child_of(process)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert not child.is_running()
    assert json.loads(output) == {"ok": False, "error": "the run was stopped at once, as asked"}
    assert "SIGKILL" not in errors


def test_child_that_is_stopped_hears_that_it_is_to_end(guarded: Run) -> None:
    process = guarded(
        "signal.signal(signal.SIGTERM, lambda *_: (say('heard'), os._exit(5)))\n"
        "say('ready')\nwhile True:\n    time.sleep(0.01)\n"
    )
    assert process.stdout.readline() == "ready\n"
    child_of(process).suspend()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "heard\n"
    assert process.wait(timeout=10) == 5


@pytest.mark.parametrize(
    "answer",
    ["pass", "os.kill(os.getpid(), signal.SIGSTOP)"],
    ids=["does not answer", "is stopped again"],
)
def test_child_that_was_asked_once_ends_some_time_after_its_limit(guarded: Run, answer: str) -> None:
    process = guarded(
        f"def hear(*_):\n    say('heard')\n    {answer}\n"
        "signal.signal(signal.SIGTERM, hear)\nchild.send('x'); child.limit_stop(0.3); say('ready')\n"
        "while True:\n    time.sleep(0.01)\n",
        "--json",
    )
    assert process.stdout.readline() == "ready\n"
    child = child_of(process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL and not child.is_running()
    error = "asked to stop, the run did not end in time (run.stop_timeout_s) and was killed"
    heard, told = output.splitlines()
    assert (heard, json.loads(told)) == ("heard", {"ok": False, "error": error})
    assert errors == f"error: {error}\n"


def test_limit_of_a_stop_is_no_message(guarded: Run) -> None:
    process = guarded(
        "if attempt: say(child.after.message); sys.exit(3)\n"
        "child.send('x'); child.limit_stop(7.5); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert process.communicate(timeout=30)[0] == "b'x'\n"
    assert process.returncode == 3


def test_guard_of_a_run_is_told_how_long_its_end_may_take(small_run: Run) -> None:
    heard, line = os.pipe()
    limit = LimitStop(ChildContext(line, None))
    small_run({"run.rounds": 1, "run.stop_timeout_s": 7, "runtime.kind": "inline"}, callbacks=[limit])
    assert os.read(heard, 100) == b"stop within 7.000000\n"
    os.close(heard)
    os.close(line)


def test_hangup_that_is_ignored_stays_so(guarded: Run) -> None:
    process = guarded(
        "signal.signal(signal.SIGTERM, lambda *_: (say('term'), os._exit(5)))\n"
        "say('ready')\nwhile True:\n    time.sleep(0.01)\n",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "term\n"
    assert process.wait(timeout=10) == 5


def test_control_c_of_a_terminal_is_not_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "work.py"
    path.write_text(
        WORK
        + "signal.signal(signal.SIGINT, lambda *_: say('heard'))\n"
        + "signal.signal(signal.SIGTERM, lambda *_: (say('end'), os._exit(3)))\n"
        + "say('ready')\nwhile True:\n    time.sleep(0.01)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, str(path)])
    try:
        shown = read_until(terminal, "ready")
        os.write(terminal, b"\x03")
        shown += read_until(terminal, "heard")
        os.kill(pid, signal.SIGTERM)  # passed on after whatever the guard made of the first
        shown += read_until(terminal, "end")
        assert shown.count("heard") == 1
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    finally:
        os.close(terminal)


def read_until(terminal: int, word: str) -> str:
    shown = ""
    while word not in shown:
        shown += os.read(terminal, 4096).decode()
    return shown


def test_crashed_child_is_followed_by_one_that_knows(guarded: Run) -> None:
    process = guarded(
        "if attempt < 2:\n"
        "    child.send(f'told {attempt}')\n"
        "    os.kill(os.getpid(), signal.SIGSEGV if attempt else signal.SIGKILL)\n"
        "say(f'{attempt} {child.after.signal_name} {child.after.message}')\n"
    )
    assert process.stdout.read() == "2 SIGSEGV b'told 1'\n"
    assert process.wait(timeout=10) == 0


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", id="told nothing"),
        pytest.param("child.send('x'); os.kill(os.getpid(), signal.SIGUSR1)", id="asked to end"),
        pytest.param(
            "attempt or child.send('x'); os.kill(os.getpid(), signal.SIGKILL)", id="told nothing again"
        ),
    ],
)
def test_no_other_child_follows(guarded: Run, code: str) -> None:
    process = guarded(f"say('begun')\n{code}", "--json")
    *begun, last = process.stdout.read().splitlines()
    assert set(begun) == {"begun"} and len(begun) <= 2
    assert json.loads(last)["ok"] is False
    assert process.wait(timeout=10) > 128


def test_orphans_of_a_killed_child_are_ended(guarded: Run) -> None:
    process = guarded(
        "if attempt == 0:\n"
        '    nap = \'import subprocess, sys, time\\nsubprocess.Popen(["sleep", "600"])\\ntime.sleep(600)\'\n'
        "    made = subprocess.Popen([sys.executable, '-c', nap], start_new_session=True)\n"
        "    while not os.path.exists(f'/proc/{made.pid}/task/{made.pid}/children') or not open(\n"
        "        f'/proc/{made.pid}/task/{made.pid}/children'\n"
        "    ).read():\n"
        "        time.sleep(0.01)\n"
        "    say(made.pid)\n"
        "    sys.stdin.readline()\n"
        "    child.send('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        stdin=subprocess.PIPE,
    )
    orphan = psutil.Process(int(process.stdout.readline()))
    family = [orphan, *orphan.children()]
    assert len(family) == 2
    process.stdin.write("die\n")
    process.stdin.flush()
    assert process.wait(timeout=30) == 0
    assert not [one for one in family if one.is_running()]


# ---------------------------------------------------------------- progress


@pytest.mark.parametrize(
    ("later", "is_further"),
    [
        (RunProgress("x", 25, 37), False),
        (RunProgress("x", 25, 30), False),
        (RunProgress("x", 25, 38), True),
        (RunProgress("x", 30, 31), True),
    ],
)
def test_progress_is_a_newer_checkpoint_or_a_higher_round(later: RunProgress, is_further: bool) -> None:
    assert RunProgress("x", 25, 37).is_before(later) is is_further
