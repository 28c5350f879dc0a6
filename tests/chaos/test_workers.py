"""Workers that are stopped, slow, killed again and again, or return nonsense, in processes of their own."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

import offbeat
from offbeat.checkpoint import CheckpointManager
from offbeat.errors import OffbeatError
from offbeat.observe.callbacks import RoundInfo
from offbeat.observe.events import read_events, read_schedule
from offbeat.pacing.ledger import Ledger
from tests.chaos.test_faults import faulty, lost
from tests.conftest import is_worker

Run = Callable[..., Any]


def collectors() -> list[psutil.Process]:
    """The worker processes of the run in this process, oldest first."""
    found = [one for one in psutil.Process().children() if is_worker(one)]
    return sorted(found, key=lambda one: one.create_time())


class Hit(offbeat.Callback):
    """Sends a signal to random workers after certain rounds, or as soon after as all workers are up."""

    def __init__(self, rounds: set[int], number: int, at_once: int = 1) -> None:
        self._due = sorted(rounds, reverse=True)
        self._number = number
        self._at_once = at_once
        self._rng = Random(0)
        self.num_hits = 0

    def on_round(self, info: RoundInfo) -> None:
        if self._due and info.version >= self._due[-1] and info.metrics["system/workers_alive"] == 2:
            self._due.pop()
            targets = collectors()
            for victim in self._rng.sample(targets, min(self._at_once, len(targets))):
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(self._number)
                    self.num_hits += 1


def assert_promises(run_dir: Path, degree: int, rounds: int) -> None:
    """Bound, conservation and replay, from what the run wrote."""
    records = read_schedule(run_dir / "schedule.jsonl")
    made_by = {record["ticket"]: record["version"] for record in records if record["kind"] == "segment"}
    trained = [record for record in records if record["kind"] == "round"]
    assert [record["version"] for record in trained] == list(range(rounds))
    tickets = [ticket for record in trained for ticket in record["tickets"]]
    assert len(set(tickets)) == len(tickets), "no sample is trained twice"
    for record in trained:
        assert record["version"] - min(made_by[ticket] for ticket in record["tickets"]) <= degree
    ledger = Ledger()
    saved = CheckpointManager(run_dir / "checkpoints").load()
    ledger.load_state_dict(saved.parts["coordinator"]["ledger"])
    counts = ledger.check()
    assert (counts.trained, counts.dropped) == (len(tickets), 0)
    assert offbeat.replay_run(run_dir).identical


def states_of(run_dir: Path, component: str) -> list[str]:
    """The states that a part of the run went through."""
    events = read_events(run_dir / "events.jsonl")
    return [e["state"] for e in events if e["kind"] == "health" and e["component"] == component]


def test_stopped_collector_is_found_by_its_missing_heartbeat(small_run: Run) -> None:
    hit = Hit({20}, signal.SIGSTOP)
    settings = {"runtime.heartbeat_timeout_s": 1.5, "runtime.heartbeat_interval_s": 0.2}
    result = small_run(settings, rounds=60, off_policy_degree=2, callbacks=[hit])
    (event,) = lost(result.run_dir)
    assert "runtime.heartbeat_timeout_s" in event["reason"]
    wanted = ["starting", "up", "unresponsive", "down", "starting", "up", "stopped"]
    assert states_of(result.run_dir, f"collector_{event['lane']}") == wanted
    assert_promises(result.run_dir, 2, 60)


@pytest.mark.slow
def test_busy_collector_is_not_taken_for_a_dead_one(small_run: Run) -> None:
    slow = faulty("Slow", sleep_s=0.02, sleep_sigma=0.0)  # 64 steps: more than a second for each segment
    settings = {**slow, "runtime.heartbeat_timeout_s": 0.6, "runtime.heartbeat_interval_s": 0.1}
    result = small_run(settings, rounds=2, off_policy_degree=1)
    assert not lost(result.run_dir)


def test_one_slow_collector_breaks_no_promise(small_run: Run, tmp_path: Path) -> None:
    slow = faulty("Slow", once=str(tmp_path / "slow"), at_step=20, sleep_s=0.002, sleep_sigma=0.0)
    result = small_run({**slow, "runtime.num_workers": 4}, rounds=30, off_policy_degree=2)
    assert (tmp_path / "slow").exists()
    assert not lost(result.run_dir)
    records = read_schedule(result.run_dir / "schedule.jsonl")
    made = Counter(record["lane"] for record in records if record["kind"] == "segment")
    assert min(made.values()) < sorted(made.values())[1], "the slow one makes fewer segments than any other"
    assert_promises(result.run_dir, 2, 30)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("Raise", "FaultError: asked to raise at step 30"),
        ("NaN", "nan"),
        ("WrongShape", "shape"),
        ("WrongDtype", "float64"),
        ("NaNReward", "reward"),
    ],
)
def test_nonsense_from_a_worker_process_ends_the_run_in_words(fault: str, words: str, small_run: Run) -> None:
    with pytest.raises(OffbeatError, match=f"(?si)collector [01] raised in ticket.*{words}"):
        small_run({**faulty(fault, at_step=30), "runtime.kind": "processes"}, off_policy_degree=2)


@pytest.mark.slow
def test_collectors_killed_again_and_again_break_no_promise(small_run: Run) -> None:
    hit = Hit(set(range(20, 200, 20)), signal.SIGKILL)
    settings = {"runtime.max_worker_restarts": 100, "runtime.restart_backoff_s": 0.1}
    result = small_run(settings, rounds=200, off_policy_degree=2, callbacks=[hit])
    assert hit.num_hits >= 3
    assert len(lost(result.run_dir)) >= 3
    assert_promises(result.run_dir, 2, 200)


@pytest.mark.parametrize("degree", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_collectors_killed_at_once_come_back(degree: int, small_run: Run) -> None:
    hit = Hit({10}, signal.SIGKILL, at_once=2)
    result = small_run(rounds=30, off_policy_degree=degree, callbacks=[hit])
    assert sorted(event["lane"] for event in lost(result.run_dir)) == [0, 1]
    assert_promises(result.run_dir, degree, 30)
    if degree == 0:
        assert small_run({"runtime.kind": "inline"}, rounds=30, name="quiet").digest == result.digest


class KillTwice(offbeat.Callback):
    """Kills a worker and then its successor at birth, from a thread: no round may end meanwhile."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None

    def on_round(self, info: RoundInfo) -> None:
        if info.version >= 10 and info.metrics["system/workers_alive"] == 2 and self.thread is None:
            known = collectors()
            self.thread = threading.Thread(target=self._kill_next, args=({one.pid for one in known},))
            self.thread.start()
            known[-1].kill()

    def _kill_next(self, known: set[int]) -> None:
        give_up_s = time.monotonic() + 60
        while time.monotonic() < give_up_s:
            for one in collectors():
                if one.pid not in known:
                    one.kill()
                    return
            time.sleep(0.005)


def test_collector_killed_while_it_starts_waits_before_the_next_try(small_run: Run) -> None:
    twice = KillTwice()
    result = small_run({"runtime.restart_backoff_s": 0.2}, rounds=60, off_policy_degree=2, callbacks=[twice])
    assert twice.thread is not None
    twice.thread.join(60)
    lanes = [event["lane"] for event in lost(result.run_dir)]
    assert len(lanes) == 2 and lanes[0] == lanes[1]
    states = states_of(result.run_dir, f"collector_{lanes[0]}")
    assert states[:7] == ["starting", "up", "down", "starting", "down", "waiting", "starting"]
    assert states[7] in (
        "up",
        "stopped",
    )  # stopped: the other collector made the last rounds before it was up
    assert_promises(result.run_dir, 2, 60)
