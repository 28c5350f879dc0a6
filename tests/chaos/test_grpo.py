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
from offbeat.checkpoint import CheckpointManager
from offbeat.observe.events import read_answers, read_events, read_schedule
from tests.integration.test_grpo import SMALL
from tests.unit.talk_fakes import CALLS

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


@pytest.mark.slow
@pytest.mark.parametrize("degree", [0, 2])
def test_run_killed_in_the_middle_of_dialogues_goes_on(degree: int, tmp_path: Path) -> None:
    """A checkpoint holds dialogues that tools have answered; what is answered there is not asked again."""
    path, rounds = tmp_path / "run", 24
    more: dict[str, object] = {
        "env.id": "tests.unit.talk_fakes:Steady",
        "env.kwargs": "{wait_s: 0.1}",
        "run.rounds": rounds,
        "run.max_restarts": 0,
        "runtime.kind": "processes",
        "async_training.off_policy_degree": degree,
        "async_training.open_rounds": 0,
        "algorithm.engine.slots": 12,
        "checkpoint.interval_rounds": 4,
        "checkpoint.interval_s": "null",
    }
    command = [sys.executable, "-m", "offbeat", "train", "calculator-grpo", *words(path, **more)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as run:
        give_up_s = time.monotonic() + LIMIT_S
        while rounds_of(path) < 10:
            assert time.monotonic() < give_up_s, "the run does not come to round 10"
            assert run.poll() is None, "the run ended by itself"
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)
    if degree:
        work = CheckpointManager(path / "checkpoints").load().parts.get("work", {})
        trees = [tree for group in work.values() for tree in group.values()]
        assert any(tree["answers"] and not tree["end"] for tree in trees), (
            "no dialogue was saved in its middle"
        )
    offbeat.resume(path, overrides={"observe.console": "none"})
    lines = [line for line in read_schedule(path / "schedule.jsonl") if line["kind"] == "segment"]
    assert sum(sum(line["answers"]) for line in lines) == len(read_answers(path))
    trained = [
        ticket
        for line in read_schedule(path / "schedule.jsonl")
        if line["kind"] == "round"
        for ticket in line["tickets"]
    ]
    assert len(trained) == len(set(trained)) == rounds * 6
    before = CALLS.copy()
    assert offbeat.replay_run(path).identical
    assert before == CALLS
    if degree == 0:
        whole = tmp_path / "whole"
        offbeat.train("calculator-grpo", overrides=[*words(whole, **more), "observe.console=none"])
        assert offbeat.digest(path) == offbeat.digest(whole)
