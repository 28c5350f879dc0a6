import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.observe import (
    SystemMonitor,
    close_log,
    component_statistics,
    debug_ticket,
    open_log,
)
from offbeat.types import Ticket


@pytest.fixture
def run_log(tmp_path: Path) -> Iterator[logging.Logger]:
    logger = open_log(tmp_path / "logs", "run")
    yield logger
    close_log(logger)


def text_of(directory: Path, role: str) -> str:
    return (directory / "logs" / f"{role}.log").read_text(encoding="utf-8")


def test_each_role_writes_to_its_own_file(tmp_path: Path, run_log: logging.Logger) -> None:
    worker = open_log(tmp_path / "logs", "worker_0")
    run_log.info("from the run")
    worker.info("from the worker")
    close_log(worker)
    assert text_of(tmp_path, "run").count("from the") == 1
    assert text_of(tmp_path, "run").endswith("INFO    from the run\n")
    assert text_of(tmp_path, "worker_0").endswith("INFO    from the worker\n")


def test_the_run_log_also_takes_what_modules_say(tmp_path: Path, run_log: logging.Logger) -> None:
    logging.getLogger("offbeat.some.module").warning("odd")
    assert text_of(tmp_path, "run").endswith("WARNING odd\n")


def test_opening_twice_writes_once(tmp_path: Path, run_log: logging.Logger) -> None:
    open_log(tmp_path / "logs", "run").info("once")
    assert text_of(tmp_path, "run").count("once") == 1


def test_a_second_run_in_one_process_gets_its_own_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        open_log(tmp_path / name / "logs", "run").info("run %s", name)
    close_log(logging.getLogger("offbeat.role.run"))
    close_log(logging.getLogger("offbeat.role.run"))
    logging.getLogger("offbeat.some.module").warning("too late")
    assert text_of(tmp_path / "a", "run").endswith("run a\n")
    assert text_of(tmp_path / "b", "run").endswith("run b\n")
    assert not logging.getLogger("offbeat").handlers


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_costs_lines_and_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    logger = open_log(tmp_path, "worker_0", on_fault=told.append)
    (handler,) = logger.handlers
    assert isinstance(handler, logging.FileHandler)
    before = handler.setStream(FULL.open("a"))
    assert before is not None
    before.close()
    logger.info("one")
    logger.info("two")
    close_log(logger)
    (text,) = told
    assert "worker_0.log cannot be written" in text and "No space left" in text
    assert capsys.readouterr().err == ""


def test_a_tickets_life(tmp_path: Path, run_log: logging.Logger) -> None:
    ticket = Ticket(number=17, collector=1, version=3, deadline=5, seed=0, attempt=2)
    debug_ticket(run_log, "issued", ticket, version=3)
    debug_ticket(run_log, "trained", ticket, version=5, seconds=0.25)
    lines = [line.split("INFO    ")[1] for line in text_of(tmp_path, "run").splitlines()]
    assert lines == [
        "ticket 17 issued   lane 1 version 3 deadline 5 attempt 2 age 0",
        "ticket 17 trained  lane 1 version 3 deadline 5 attempt 2 age 2 after 0.250 s",
    ]


def test_statistics_name_every_component(tmp_path: Path, run_log: logging.Logger) -> None:
    metrics = {
        "learn/global_steps": 12_000,
        "time/train_s": 0.0424,
        "rollout/steps_per_s": 48_200.0,
        "queue/bytes": 2.5e6,
        "weights/sync_failures": 0,
    }
    block = component_statistics(metrics, "train")
    heads = [line.split()[0] for line in block.splitlines()]
    assert heads == ["Component", "learner", "collectors", "queue", "weights", "pace"]
    assert "rounds take – times the pipeline limit" in block and "overlap" not in block
    for text in ("12.0k steps", "train 0.042 s", "48.2k/s", "2 MB", "bottleneck train", "published –"):
        assert text in block


def test_system_figures_cover_this_process_and_its_workers() -> None:
    monitor = SystemMonitor(interval_s=2.0)
    alone = monitor.read(0.0)
    assert set(alone) == {"system/rss_bytes", "system/cpu_percent", "system/gpu_mem_bytes"}
    assert alone["system/rss_bytes"] > 1e6
    assert monitor.read(1.9, lambda: [os.getppid()]) == alone
    together = monitor.read(2.0, lambda: [os.getppid()])
    assert together["system/rss_bytes"] != alone["system/rss_bytes"]
    assert together["system/cpu_percent"] >= 0.0


@pytest.mark.parametrize("library", ["there", "missing"])
def test_the_use_of_a_gpu_is_told_where_torch_can_tell(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def utilization() -> int:
        if library == "missing":
            raise ModuleNotFoundError("pynvml")
        return 43

    cuda = SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda: 7, utilization=utilization)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    figures = SystemMonitor().read(0.0)
    assert figures["system/gpu_mem_bytes"] == 7.0
    assert figures.get("system/gpu_percent") == (43.0 if library == "there" else None)


def test_the_system_is_only_asked_for_processes_when_they_are_measured() -> None:
    asked: list[float] = []
    monitor = SystemMonitor(interval_s=2.0)
    for now_s in (0.0, 0.5, 1.9, 2.0):
        monitor.read(now_s, lambda now_s=now_s: asked.append(now_s) or [])  # type: ignore[misc]
    assert asked == [0.0, 2.0]


def test_a_worker_that_died_is_left_out() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    figures = SystemMonitor().read(0.0, lambda: [process.pid])
    assert figures["system/rss_bytes"] > 1e6


HEAVY = "torch tensorboard wandb rich offbeat.runtime offbeat.algorithms"


def test_importing_loads_nothing_heavy() -> None:
    code = f"""
import sys
import offbeat.checkpoint, offbeat.observe
loaded = [name for name in {HEAVY.split()!r} if name in sys.modules]
assert not loaded, loaded
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
