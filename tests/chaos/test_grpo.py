"""Runs of language models that are killed in the middle of sentences."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import offbeat
from offbeat.observe.events import read_events, read_schedule
from tests.integration.test_grpo import SMALL

LIMIT_S = 120.0


def words(path: Path, **more: object) -> list[str]:
    settings = {**SMALL, "run.dir": str(path), "observe.console": "plain", **more}
    return [f"{name}={'null' if value is None else value}" for name, value in settings.items()]


def rounds_of(path: Path) -> int:
    file = path / "schedule.jsonl"
    return file.read_text().count('"kind":"round"') if file.exists() else 0


@pytest.mark.parametrize("degree", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_run_killed_in_the_middle_of_sentences_goes_on(degree: int, tmp_path: Path) -> None:
    path, rounds = tmp_path / "run", 40
    more: dict[str, object] = {
        "run.rounds": rounds,
        "run.max_restarts": 0,
        "runtime.kind": "processes",
        "async_training.off_policy_degree": degree,
        "async_training.open_rounds": 0,
        "algorithm.max_new_tokens": 24,
        "algorithm.engine.slots": 16,
        "checkpoint.interval_rounds": 5,
        "checkpoint.interval_s": "null",
    }
    command = [sys.executable, "-m", "offbeat", "train", "arithmetic-grpo", *words(path, **more)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as run:
        give_up_s = time.monotonic() + LIMIT_S
        while rounds_of(path) < 12:
            assert time.monotonic() < give_up_s, "the run does not come to round 12"
            assert run.poll() is None, "the run ended by itself"
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)
    offbeat.resume(path, overrides={"observe.console": "none"})  # a change that a replay does not notice
    lines = [line for line in read_schedule(path / "schedule.jsonl") if line["kind"] == "round"]
    trained = [ticket for line in lines for ticket in line["tickets"]]
    assert len(lines) == rounds
    assert len(trained) == len(set(trained)) == rounds * 6
    ages = [
        event["metrics"]["pace/max_sample_age"]
        for event in read_events(path / "events.jsonl")
        if event["kind"] == "round"
    ]
    assert max(ages) <= degree
    assert offbeat.replay_run(path).identical
    if degree == 0:
        whole = tmp_path / "whole"
        offbeat.train("arithmetic-grpo", overrides=[*words(whole, **more), "observe.console=none"])
        assert offbeat.digest(path) == offbeat.digest(whole)
