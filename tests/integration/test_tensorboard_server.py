"""TensorBoard that is started with a run is there while the run goes, and gone when it is not."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import offbeat
from offbeat.errors import ConfigError
from offbeat.observe import sinks
from offbeat.observe.events import read_events
from offbeat.observe.tensorboard_server import TensorBoardServer
from tests.chaos.test_faults import faulty
from tests.conftest import SMALL

pytest.importorskip("tensorboard")

Run = Callable[..., Any]
LIMIT_S = 90.0
SERVE = {
    **faulty("Slow", sleep_s=0.002, sleep_sigma=0.0),  # leaves the processor to the server
    "observe.tensorboard": {"serve": True},
    "runtime.kind": "inline",
    "run.stop_return": None,
    "run.rounds": 1_000_000,
    "eval.at_end": False,
    "checkpoint.interval_rounds": 50,
}


def fetch(address: str) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(address, timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def address_in(text: str) -> str:
    (found,) = re.findall(r"http://127\.0\.0\.1:\d+/", text)
    return str(found)


def servers(parent: int | None = None) -> list[psutil.Process]:
    """The servers among the descendants of a process."""
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        try:
            if "offbeat.observe.tensorboard_server" in child.cmdline():
                found.append(child)
        except psutil.Error:  # it ends in this moment
            continue
    return found


def are_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=LIMIT_S)[1]


def notices(directory: Path) -> list[str]:
    if not (directory / "events.jsonl").exists():
        return []
    events = read_events(directory / "events.jsonl")
    return [event["text"] for event in events if event["kind"] == "notice" and "TensorBoard" in event["text"]]


class Visit(offbeat.Callback):
    """Looks at the page when it is told the address, then does as it is told."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        self._then = then
        self.told: list[str] = []
        self.pages: list[str] = []
        self.found: list[psutil.Process] = []

    def on_start(self, info: Any) -> None:
        self.info = info

    def on_notice(self, text: str) -> None:
        if "TensorBoard" in text:
            self.told.append(text)
            self.found = servers()
            if "http" in text:
                self.pages.append(fetch(address_in(text)))
            self._then(self.info)


# ---------------------------------------------------------------- the server by itself


def news_of(server: TensorBoardServer) -> str:
    give_up_s = time.monotonic() + LIMIT_S
    while (status := server.poll_status()) is None:
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
    return status


def test_a_server_answers_once_it_says_so_and_tells_when_it_is_killed(tmp_path: Path) -> None:
    server = TensorBoardServer(tmp_path)
    assert "<title>TensorBoard</title>" in fetch(address_in(news_of(server)))
    assert server.poll_status() is None
    process = psutil.Process(server.pid)
    assert process.children(recursive=True) == []
    process.kill()
    assert "TensorBoard's server has ended" in news_of(server)
    assert server.poll_status() is None
    server.close()
    server.close()


def test_a_server_that_is_not_up_yet_ends_at_once(tmp_path: Path) -> None:
    server = TensorBoardServer(tmp_path)
    process = psutil.Process(server.pid)
    server.close()
    assert not process.is_running()


def test_a_port_that_is_taken_costs_the_server_and_not_the_run(small_run: Run) -> None:
    visit = Visit(lambda info: info.finish("seen"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        serve = {**SERVE, "observe.tensorboard": {"serve": True, "port": port}}
        result = small_run(serve, callbacks=[visit])
    assert result.reason == "seen"
    (told,) = visit.told
    assert told.startswith("TensorBoard could not be started: ")
    assert str(port) in told
    assert told.endswith("set observe.tensorboard.port to another one, or to null")


# ---------------------------------------------------------------- with a run


def test_the_page_is_there_while_the_run_goes_and_told_once(
    small_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    visit = Visit(lambda info: info.finish("seen"))
    result = small_run({**SERVE, "observe.console": "plain"}, callbacks=[visit])
    assert "<title>TensorBoard</title>" in visit.pages[0]
    assert len(visit.found) == 1
    assert are_gone(visit.found)
    assert notices(result.run_dir) == visit.told
    assert capsys.readouterr().out.count("TensorBoard shows this run at http://127.0.0.1:") == 1
    assert (result.run_dir / "tensorboard").is_dir()


def test_a_run_that_goes_on_from_a_checkpoint_keeps_its_server_and_an_error_ends_it(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offbeat.algorithms.ppo.learner import PPOLearner

    train, pages = PPOLearner.train, []
    visit = Visit(lambda info: None)

    def crash_once(self: PPOLearner, batch: Any) -> Any:
        if visit.told and not pages:
            pages.append("")
            raise RuntimeError("the learner's driver reset itself")
        return train(self, batch)

    class Look(offbeat.Callback):
        def on_round(self, info: Any) -> None:
            if pages:
                pages.append(fetch(address_in(visit.told[0])))
                raise ZeroDivisionError

    monkeypatch.setattr(PPOLearner, "train", crash_once)
    settings = {**SERVE, "run.restart_delay_s": 0, "checkpoint.interval_rounds": 1}
    with pytest.raises(ZeroDivisionError):
        small_run(settings, callbacks=[visit, Look()])
    assert "<title>TensorBoard</title>" in pages[1]
    assert len(visit.told) == len(notices(tmp_path / "run")) == 1
    assert are_gone(visit.found)


def start(directory: Path, *, guarded: bool) -> subprocess.Popen[bytes]:
    """A run in a process of its own, with the command's guard or without."""
    settings = {**SMALL, **SERVE, "run.dir": str(directory), "run.restart_delay_s": 0}
    lines = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    code = "import sys, offbeat; offbeat.train('cartpole-ppo', overrides=sys.argv[1:])"
    command = ["-m", "offbeat", "train", "cartpole-ppo"] if guarded else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *command, *lines], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_for_notices(directory: Path, count: int, process: subprocess.Popen[bytes]) -> list[str]:
    give_up_s = time.monotonic() + LIMIT_S
    while len(found := notices(directory)) < count:
        assert process.poll() is None
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGTERM))],
)
def test_a_signal_that_ends_the_run_ends_its_server(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path / "run", guarded=False)
    try:
        (told,) = wait_for_notices(tmp_path / "run", 1, process)
        found = servers(process.pid)
        assert len(found) == 1
        assert "<title>TensorBoard</title>" in fetch(address_in(told))
        process.send_signal(number)
        process.wait(LIMIT_S)
        assert are_gone(found)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="runs have a guard on Linux only")
def test_a_run_that_is_killed_and_begun_again_has_a_server_of_its_own(tmp_path: Path) -> None:
    process = start(tmp_path / "run", guarded=True)
    try:
        wait_for_notices(tmp_path / "run", 1, process)
        before = servers(process.pid)
        (child,) = psutil.Process(process.pid).children()
        child.kill()
        second = wait_for_notices(tmp_path / "run", 2, process)[1]
        assert are_gone(before)
        after = servers(process.pid)
        assert len(after) == 1
        assert "<title>TensorBoard</title>" in fetch(address_in(second))
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)
        assert are_gone(after)
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- without TensorBoard


def test_without_tensorboard_the_run_is_refused_before_it_begins(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = small_run({"runtime.kind": "inline"}, rounds=1, name="done")
    find_spec = sinks.importlib.util.find_spec
    monkeypatch.setattr(
        sinks.importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name)
    )
    with pytest.raises(ConfigError, match=r'pip install "offbeat\[tensorboard\]"'):
        small_run(SERVE)
    assert not (tmp_path / "run").exists()
    before = (done.run_dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r'pip install "offbeat\[tensorboard\]"'):
        offbeat.resume(done.run_dir, overrides=["observe.tensorboard={serve: true, enabled: null}"])
    assert (done.run_dir / "config.yaml").read_text() == before
