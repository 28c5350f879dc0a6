"""The examples, as a user runs them, with few rounds; and, marked slow, that they learn."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.observe.events import read_events, read_rounds

EXAMPLES = Path(__file__).parents[2] / "examples"
needs_sb3 = pytest.mark.skipif(
    importlib.util.find_spec("stable_baselines3") is None,
    reason="stable-baselines3 is not installed: pip install 'offbeat[sb3]'",
)


def run(name: str, rounds: int, directory: Path, timeout_s: float = 120.0) -> str:
    command = [sys.executable, str(EXAMPLES / name), "--rounds", str(rounds)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


def the_run(directory: Path) -> Path:
    (found,) = (directory / "runs").iterdir()
    return found


def test_loop_becomes_asynchronous_by_a_handful_of_lines(tmp_path: Path) -> None:
    output = run("async_in_ten_lines.py", 2, tmp_path)
    assert int(re.findall(r"(\d+) lines are new or changed", output)[0]) <= 16
    assert len(re.findall(r"sync_loop.py +2 rounds", output)) == 2


def test_environment_of_ones_own_is_trained_and_played(tmp_path: Path) -> None:
    output = run("custom_env.py", 2, tmp_path)
    assert re.search(r"at speed -?[\d.]+ after \d+ steps, return -?[\d.]+", output)
    assert len(read_rounds(the_run(tmp_path) / "events.jsonl")) == 2
    given = (the_run(tmp_path) / "config.yaml").read_text()
    assert "custom_env:Landing" in given
    assert "gravity: 1.2" in given


def test_callback_adds_a_metric_and_turns_the_dial(tmp_path: Path) -> None:
    output = run("callback.py", 5, tmp_path)
    assert "turning off_policy_degree from 0 to 2" in output
    assert "dial at 1" in output  # in so few rounds it opens by one step
    journal = the_run(tmp_path) / "events.jsonl"
    assert [event["off_policy_degree"] for event in read_events(journal) if event["kind"] == "dial"] == [2]
    assert all("mine/best_return" in record["metrics"] for record in read_rounds(journal))


def test_slow_environments_do_not_wait_for_each_other(tmp_path: Path) -> None:
    output = run("slow_environments.py", 3, tmp_path)
    assert re.search(r"\d+ steps/s; 270 is the most if every step waits for the slowest", output)


@needs_sb3
@pytest.mark.parametrize("name", ["sb3_ppo.py", "sb3_dqn.py"])
def test_sb3_is_collected_and_trained_by_its_own_machinery(name: str, tmp_path: Path) -> None:
    assert "3 rounds in" in run(name, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sync_loop.py", "async_loop.py"])
def test_loop_learns(name: str, tmp_path: Path) -> None:
    output = run(name, 80, tmp_path, timeout_s=280.0)
    returns = [float(number) for number in re.findall(r"mean return ([\d.]+)", output)]
    assert len(returns) == 80
    assert returns[0] < 60
    assert max(returns) > 300


@pytest.mark.slow
@needs_sb3
def test_sb3_learns_asynchronously(tmp_path: Path) -> None:
    output = run("sb3_ppo.py", 390, tmp_path, timeout_s=280.0)
    assert float(re.findall(r"evaluation ([\d.]+)", output)[0]) > 400


@pytest.mark.slow
@needs_sb3
def test_sb3_learns_from_a_replay(tmp_path: Path) -> None:
    output = run("sb3_dqn.py", 120, tmp_path, timeout_s=280.0)
    # Over many episodes: single policies of DQN differ widely from one update to the next.
    assert float(re.findall(r"training episodes ([\d.]+)", output)[0]) > 60
