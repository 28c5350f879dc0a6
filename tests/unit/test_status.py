from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.checkpoint import CheckpointManager
from offbeat.checkpoint.lock import RunLock
from offbeat.cli.history import read_history
from offbeat.cli.main import main
from offbeat.cli.status import Status, read_status, tables, to_json
from offbeat.errors import OffbeatError

NOW_S = 1_800_000_000.0
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Makes a run directory of events, given as (seconds ago, kind, fields)."""

    def make(*events: tuple[float, str, dict[str, Any]]) -> Path:
        with (tmp_path / "events.jsonl").open("a") as file:
            for ago_s, kind, fields in events:
                record = {"kind": kind, "time": NOW_S - ago_s, **fields}
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
        return tmp_path

    return make


def trained(ago_s: float, version: int, age: float = 0, **metrics: Any) -> tuple[float, str, dict[str, Any]]:
    values = {"pace/off_policy_degree": 2, "pace/max_sample_age": age, **metrics}
    return ago_s, "round", {"version": version, "metrics": values}


def health(ago_s: float, component: str, state: str, detail: str = "") -> tuple[float, str, dict[str, Any]]:
    return ago_s, "health", {"component": component, "state": state, **({"detail": detail} if detail else {})}


BEGUN = (100.0, "start", {"version": 0})


@pytest.fixture
def held(tmp_path: Path) -> Iterator[None]:
    lock = RunLock(tmp_path)
    yield
    lock.release()


def shown(found: Status) -> str:
    return "\n".join(
        f"{title}\n" + "\n".join(f"{k} {v}" for k, v in rows.items()) for title, rows in tables(found)
    )


# ---------------------------------------------------------------- the state of a run


@pytest.mark.parametrize(
    ("ending", "state", "reason", "is_well"),
    [
        ([], "killed", "at round 7", False),
        (
            [(1.0, "finish", {"reason": "all rounds trained", "failed": False})],
            "finished",
            "all rounds",
            True,
        ),
        (
            [(1.0, "finish", {"reason": "interrupted by SIGINT", "failed": False, "stopped": True})],
            "stopped",
            "interrupted by SIGINT",
            True,
        ),
        ([(1.0, "finish", {"reason": "NaN\nTraceback", "failed": True})], "failed", "NaN", False),
        (
            [(1.0, "restart", {"version": 5, "reason": "SIGKILL", "attempt": 1})],
            "restarting",
            "SIGKILL",
            True,
        ),
        ([(99.0, "restart", {"version": 5, "reason": "SIGKILL", "attempt": 1})], "killed", "round 7", False),
        (
            [(2.0, "finish", {"reason": "done", "failed": False}), (1.0, "resume", {"version": 6})],
            "killed",
            "at round 6",
            False,
        ),
    ],
)
def test_state_of_a_run_nobody_runs(
    write: Write, ending: list[Any], state: str, reason: str, is_well: bool
) -> None:
    found = read_status(write(BEGUN, trained(9, 7), *ending), NOW_S)
    assert (found.state, found.is_well, found.pid) == (state, is_well, None)
    assert reason in found.reason
    assert "Traceback" not in shown(found)


def test_failed_checkpoints_and_evaluations_are_named(write: Write) -> None:
    raised = "Traceback (most recent call last):\n  File x\nValueError: no board"
    found = read_status(
        write(
            BEGUN,
            (9.0, "checkpoint_failed", {"version": 2, "reason": "disk full"}),
            (8.0, "eval_failed", {"version": 3, "reason": raised}),
            (7.5, "checkpoint_skipped", {"version": 5, "reason": "the one before was not written yet"}),
            (7.0, "checkpoint_failed", {"version": 4, "reason": "learner['x'] is a set\nmore"}),
            trained(3.0, 7),
            (1.0, "finish", {"reason": "done", "failed": False}),
        ),
        NOW_S,
    )
    text = shown(found)
    assert "failed checkpoints 2, the last one of version 4: learner['x'] is a set\n" in text
    assert "skipped checkpoints 1, the last one of version 5: the one before was not written yet\n" in text
    assert "failed evaluations 1, the last one of version 3: ValueError: no board\n" in text
    told = to_json(found)
    assert told["failed_evaluations"]["count"] == 1  # type: ignore[index]
    assert told["skipped_checkpoints"]["count"] == 1  # type: ignore[index]
    assert told["failed_checkpoints"]["newest"]["version"] == 4  # type: ignore[index]


def test_run_that_holds_its_directory_and_starts_again_is_restarting(write: Write, held: None) -> None:
    restart = {"version": 5, "reason": "SIGKILL", "attempt": 1}
    found = read_status(write(BEGUN, trained(3.0, 7), (1.0, "restart", restart)), NOW_S)
    assert (found.state, found.is_well) == ("restarting", True)


def test_nothing_is_offered_where_no_checkpoint_is_whole(write: Write) -> None:
    directory = write(BEGUN, trained(3.0, 7), (1.0, "finish", {"reason": "done", "failed": False}))
    manager = CheckpointManager(directory / "checkpoints")
    path = manager.save(7, {"learner": {"w": np.zeros(2)}}, {"w": np.zeros(2)})
    assert read_status(directory, NOW_S).next_commands
    (path / "manifest.json").write_bytes(b"{}")
    assert read_status(directory, NOW_S).next_commands == ()


def test_running_run_tells_pid_speed_and_what_is_left(write: Write, held: None) -> None:
    directory = write(BEGUN, *(trained(20 - 2 * i, i + 1, age=i % 3) for i in range(10)))
    (directory / "resolved.yaml").write_text("run:\n  rounds: 110\n  name: pole\n")
    found = read_status(directory, NOW_S)
    assert (found.state, found.pid, found.is_well) == ("running", os.getpid(), True)
    assert found.history.rounds_per_s == pytest.approx(0.5)
    assert found.eta_s == pytest.approx(200.0)
    assert found.history.worst_staleness == 2
    replayed = trained(1, 11, age=1, **{"pace/max_replayed_age": 40.0})
    assert read_status(write(BEGUN, replayed), NOW_S).history.worst_staleness == 40
    text = shown(found)
    assert f"pole: running (pid {os.getpid()})" in text
    assert "10 of 110" in text
    assert "at most 2 so far, k = 2 now" in text
    assert "3:20 min" in text
    assert "at most 3:20 min" not in text


def test_what_is_left_of_a_run_with_a_goal_is_a_bound(write: Write, held: None) -> None:
    directory = write(BEGUN, *(trained(20 - 2 * i, i + 1) for i in range(10)))
    (directory / "resolved.yaml").write_text("run:\n  rounds: 110\n  stop_return: 475.0\n")
    assert "at most 3:20 min" in shown(read_status(directory, NOW_S))


def test_looking_leaves_the_lock_to_others(write: Write) -> None:
    directory = write(BEGUN)
    RunLock(directory).release()
    assert read_status(directory, NOW_S).pid is None
    with (directory / "lock").open() as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("quiet_s", "limit_s", "state"),
    [(30, None, "running"), (90, None, "stuck"), (30, 20.0, "stuck"), (90, 100.0, "running")],
)
def test_run_without_news_may_be_stuck(
    write: Write, held: None, quiet_s: float, limit_s: float | None, state: str
) -> None:
    found = read_status(write(BEGUN, trained(quiet_s, 1)), NOW_S, limit_s)
    assert found.state == state
    assert found.is_well is (state == "running")
    assert (f"last event (round) is {quiet_s:.0f} s old" in shown(found)) is (state == "stuck")


def test_slow_rounds_are_not_stuck(write: Write, held: None) -> None:
    assert read_status(write(BEGUN, trained(500, 1), trained(300, 2)), NOW_S).state == "running"


def test_run_that_never_began(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "pole"}')
    found = read_status(tmp_path, NOW_S)
    assert (found.state, found.name) == ("killed", "pole")
    assert found.next_commands == (f"offbeat resume {tmp_path}",)


def test_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match="is not a run directory"):
        read_status(tmp_path, NOW_S)


# ---------------------------------------------------------------- what happened


def test_loss_is_told_once_with_the_time_until_it_was_mended(write: Write) -> None:
    directory = write(
        BEGUN,
        health(90, "collector_0", "up"),
        health(50, "collector_0", "down", "killed by SIGKILL"),
        (50.0, "worker_lost", {"lane": 0, "reason": "killed by SIGKILL\nstack", "restored": True}),
        health(49, "collector_0", "starting"),
        health(47.5, "collector_0", "up"),
        (40.0, "worker_lost", {"lane": 0, "reason": "hung", "restored": True}),
        health(40, "collector_0", "down", "hung"),
        (39.0, "worker_lost", {"lane": 0, "reason": "hung again", "restored": True}),
        health(30, "evaluator", "down", "exit 1"),
        health(20, "learner", "up"),
    )
    history = read_status(directory, NOW_S).history
    losses = [(loss.component, loss.reason, loss.seconds) for loss in history.losses]
    assert losses == [
        ("collector_0", "killed by SIGKILL", 2.5),
        ("collector_0", "hung", None),
        ("collector_0", "hung again", None),
        ("evaluator", "exit 1", None),
    ]
    part = history.components["collector_0"]
    assert (part.state, part.restarts, part.reason) == ("down", 1, "hung again")
    text = shown(read_status(directory, NOW_S))
    assert "collector_0: killed by SIGKILL; up again after 2.5 s" in text
    assert "evaluator: exit 1; not seen up since" in text
    assert "learner was up, since" in text, "of a killed run"


def test_run_without_health_events_tells_what_it_can(write: Write) -> None:
    lost = (50.0, "worker_lost", {"lane": 1, "reason": "killed\nstack", "restored": True})
    found = read_status(write(BEGUN, lost, trained(9, 7), (8.0, "something new", {"x": 1})), NOW_S)
    assert found.history.components["collector_1"].state == "unknown"
    assert "collector_1: killed; not seen up since" in shown(found)


def test_restarts_and_stalls_are_told(write: Write) -> None:
    waits = [
        {
            "who": "round 7",
            "for": "collector 1, ticket 14",
            "since_s": 12.5,
            "limit_s": 120.0,
            "limit_key": "k",
        }
    ]
    directory = write(
        BEGUN,
        (60.0, "restart", {"version": 40, "reason": "killed by SIGKILL\nmore", "attempt": 1}),
        (59.0, "resume", {"version": 40}),
        (50.0, "rollback", {"version": 35, "reason": "loss is NaN", "attempt": 2}),
        (20.0, "stall", {"waits": waits, "stacks": {"collector_1": "File x"}}),
        (19.0, "finish", {"reason": "stalled", "failed": True}),
    )
    text = shown(read_status(directory, NOW_S))
    assert "went on from version 40 (attempt 1): killed by SIGKILL" in text
    assert "went back to version 35 (attempt 2): loss is NaN" in text
    assert "round 7 waited for 12.5 s for collector 1, ticket 14 (limit 120 s, k)" in text
    assert "of collector_1: in events.jsonl" in text


def test_counts_and_evaluation(write: Write) -> None:
    counts = {"issued": 20, "running": 2, "ready": 1, "trained": 16, "dropped": 0, "lost": 1}
    ago_s, kind, fields = trained(9, 7)
    judged = (8.0, "eval", {"version": 5, "metrics": {"eval/return_mean": 487.5}})
    found = read_status(write(BEGUN, (ago_s, kind, {**fields, "counts": counts}), judged), NOW_S)
    assert "20 issued, 2 running, 1 ready, 16 trained, 0 dropped, 1 lost" in shown(found)
    assert "return 487.5 of version 5" in shown(found)
    assert to_json(found)["tickets"] == counts


def test_rounds_given_up_by_a_resume_do_not_count(write: Write) -> None:
    found = read_status(
        write(BEGUN, trained(50, 37), (40.0, "resume", {"version": 25}), trained(30, 26)), NOW_S
    )
    assert found.history.version == 26
    assert found.history.num_starts == 2


def test_torn_and_foreign_lines_are_passed_over(write: Write) -> None:
    directory = write(BEGUN, trained(9, 7))
    with (directory / "events.jsonl").open("a") as file:
        file.write('[1]\n{"kind":"round","time":1800000000.0,"version":8,"metr')
    found = read_status(directory, NOW_S)
    assert found.history.version == 7
    assert "2 lines of events.jsonl cannot be read" in shown(found)


def test_memory_does_not_grow_with_the_run(write: Write) -> None:
    many = (event for i in range(500) for event in (
        trained(1000 - i, i + 1),
        (1000.0 - i, "worker_lost", {"lane": i % 3, "reason": f"reason {i}", "restored": True}),
    ))  # fmt: skip
    history = read_history(write(BEGUN, *many) / "events.jsonl")
    assert (history.version, history.num_losses) == (500, 500)
    assert len(history.losses) == len(history.round_times) == 20
    assert history.losses[-1].reason == "reason 499"


# ---------------------------------------------------------------- checkpoints


def save(directory: Path, *versions: int) -> CheckpointManager:
    manager = CheckpointManager(directory / "checkpoints", keep=9)
    for version in versions:
        manager.save(version, {"learner": {"w": np.ones(3)}}, {"w": np.ones(3)})
    return manager


def test_damaged_checkpoint_is_named_and_resume_takes_another(write: Write) -> None:
    directory = write(BEGUN, trained(9, 12))
    manager = save(directory, 5, 10)
    (manager.path(10) / "learner.safetensors").write_bytes(b"torn")
    found = read_status(directory, NOW_S).checkpoints
    assert list(found.ages_s) == [5, 10]
    assert found.resume_from == 5
    (damaged,) = found.damaged
    assert damaged.startswith("checkpoint 10 was not used: ")


def test_no_whole_checkpoint_is_said(write: Write) -> None:
    directory = write(BEGUN, trained(9, 12))
    (save(directory, 5).path(5) / "manifest.json").unlink()
    found = read_status(directory, NOW_S)
    assert found.checkpoints.resume_from is None
    assert found.checkpoints.damaged[0].startswith("checkpoint 5 was not used: ")
    assert "impossible: none of them is whole" in shown(found)


def test_checkpoints_of_a_running_run_are_not_touched(write: Write, held: None) -> None:
    directory = write(BEGUN, trained(9, 12))
    leftover = save(directory, 5).directory / ".writing-999999999-step_00000006"
    leftover.mkdir()
    found = read_status(directory, NOW_S).checkpoints
    assert (found.resume_from, found.is_verified) == (5, False)
    assert leftover.exists(), "its writer may live on another machine"


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(("failed", "code"), [(False, 0), (True, 1)])
def test_exit_code_lets_scripts_watch_a_run(
    write: Write, capsys: pytest.CaptureFixture[str], failed: bool, code: int
) -> None:
    directory = write(BEGUN, trained(9, 7), (1.0, "finish", {"reason": "why", "failed": failed}))
    with pytest.raises(SystemExit) as ended:
        main(["status", str(directory), "--json"])
    assert ended.value.code == code
    values = json.loads(capsys.readouterr().out)
    assert values["ok"] is not failed
    assert values["round"] == 7
    assert values["reason"] == "why"
