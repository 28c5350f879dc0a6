"""What a run's journal writes: log lines, their levels, and the moves of a tuned dial."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli.history import read_history
from offbeat.cli.summary import _settled
from offbeat.observe.events import Record, read_events
from offbeat.pacing.auto import AutoConfig, AutoDial
from offbeat.pacing.config import AUTO
from offbeat.pacing.events import CollectorDown, DialTurned, Signals
from tests.unit.run_fakes import FakeRun


def finished(directory: Path, **options: Any) -> FakeRun:
    run = FakeRun(directory, **options)
    run.write_files()
    run.start().complete()
    run.driver.close(None)
    return run


def log_lines(directory: Path) -> list[str]:
    """Level and text of each line of run.log, but for the blocks of statistics."""
    lines = (directory / "logs" / "run.log").read_text().splitlines()
    found = [re.fullmatch(r"\S+ \S+ (\w+) +(.*)", line) for line in lines]
    return [f"{match[1]} {match[2]}" for match in found if match is not None]


def test_the_log_shows_each_round_while_it_goes(tmp_path: Path) -> None:
    finished(tmp_path, rounds=2)
    text = "\n".join(log_lines(tmp_path))
    for line in (
        "INFO version 0 published in 0.000 s",
        "INFO round 0: began with 2 new samples",
        "INFO round 0: trained in 0.0000 s, version 1 made; samples 0.00 versions old on average, 0 at most",
        "INFO version 1 published in 0.000 s",
        "INFO round 1: began with 2 new samples",
    ):
        assert line in text
        text = text.partition(line)[2]


def test_the_log_takes_lines_of_its_level_and_above(tmp_path: Path) -> None:
    levels = {}
    for level in ("info", "warning", "error"):
        run = FakeRun(tmp_path / level, limits={"observe": {"log_level": level}})
        run.write_files()
        run.start()
        run.driver.notice("harmless")
        run.driver.notice("not so harmless", is_warning=True)
        run.driver.collectors.rows[0].is_used = True  # by a segment without a state after it
        run.runtime.events.append(CollectorDown(0, "killed by signal 9"))
        run.complete()
        run.driver.close(None)
        levels[level] = log_lines(tmp_path / level)
        assert (tmp_path / level / "logs" / "learner.log").read_text().count("INFO") == 3 * (level == "info")
    lost = "ERROR collector 0 lost: killed by signal 9"
    assert {"INFO harmless", "WARNING not so harmless", lost} <= set(levels["info"])
    anew = "WARNING collector 0 has no saved state: its running episodes restart"
    assert levels["warning"] == ["WARNING not so harmless", lost, anew]
    assert levels["error"] == [lost]


def test_statistics_are_written_when_due_and_at_the_end(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, rounds=7, limits={"observe": {"stats_interval_s": 30.0}})
    run.write_files()
    run.start()
    counts = []
    for version in range(1, 8):
        run.clock.now_s += 10.0
        run.step_until(lambda version=version: run.pace.version >= version)  # type: ignore[misc]
        counts.append(num_blocks(tmp_path))
    run.driver.close(None)
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    assert num_blocks(tmp_path) == 4


def num_blocks(directory: Path) -> int:
    return (directory / "logs" / "run.log").read_text().count("Component Statistics")


# ---------------------------------------------------------------- the tuned dial


def dial_records(directory: Path) -> list[Record]:
    records = [event for event in read_events(directory / "events.jsonl") if event["kind"] == "dial"]
    return [{name: value for name, value in one.items() if name != "time"} for one in records]


def test_every_move_of_a_tuned_dial_is_written_with_its_reason(tmp_path: Path) -> None:
    tuned = {"async_training": {"off_policy_degree": AUTO}}
    run = finished(tmp_path, rounds=20, limits=tuned, off_policy_degree=AUTO)
    first, *moves = dial_records(tmp_path)
    assert first == {
        "kind": "dial",
        "off_policy_degree": 0,
        "version": 0,
        "reason": "tuned while running",
    }
    rounds = [
        event["metrics"] for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "round"
    ]
    degrees = [0, *(metrics["pace/off_policy_degree"] for metrics in rounds)]
    moved = [version for version in range(1, 21) if degrees[version] != degrees[version - 1]]
    assert [one["version"] for one in moves] == moved != []
    assert [one["off_policy_degree"] for one in moves] == [degrees[version] for version in moved]
    assert "a larger k is tried" in moves[0]["reason"]
    assert f"INFO k = 1: {moves[0]['reason']}" in log_lines(tmp_path)
    settled = _settled(read_history(tmp_path / "events.jsonl"))["off_policy_degree"]
    assert settled == (
        f"settled at k = {run.pace.degree} (moved {len(moves)} times, last at version {moved[-1]}:"
        f" {moves[-1]['reason']})"
    )


def test_a_dial_that_is_chosen_settles_nowhere(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.write_files()
    run.requests.append(DialTurned(2))
    run.start().complete()
    run.driver.close(None)
    assert dial_records(tmp_path) == [{"kind": "dial", "off_policy_degree": 2}]
    assert _settled(read_history(tmp_path / "events.jsonl")) == {}


@pytest.mark.parametrize(
    ("signals", "reason"),
    [
        ({"ess": 0.3}, "effective sample size is 0.30, below 0.5"),
        ({"behaviour_kl": 0.25, "ess": 0.3}, "KL to the policy that acted is 0.250, above 0.1"),
        ({"collect_idle": 0.4, "train_idle": 0.2}, "collectors and learner idle 20% of the time or more"),
        ({}, "a smaller k is tried"),
    ],
)
def test_the_tuner_gives_the_reason_of_a_move(signals: dict[str, float], reason: str) -> None:
    dial = AutoDial(AutoConfig(), degree=4)
    while dial.degree == 4:
        dial.update(Signals(round_s=1.0, **signals))
    assert reason in dial.reason


def test_a_step_that_is_taken_back_says_by_what_times() -> None:
    dial = AutoDial(AutoConfig(), degree=2)
    seen = []
    for _ in range(60):
        before = dial.degree
        idle = 0.5 if dial.degree < 3 else 0.0
        if dial.update(Signals(1.0, collect_idle=idle, train_idle=idle)) != before:
            seen.append(dial.reason)
    assert "rounds were no faster: 1 s after 1 s" in seen
