"""Environments that misbehave do so on command, at the step asked for, once if asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
from offbeat.errors import EnvError
from offbeat.testing import envs
from offbeat.testing.envs import EXIT_CODE, FAULTS, FaultError


def world_of(name: str, num_envs: int = 1, **kwargs: Any):
    return make_world(EnvConfig(id=f"offbeat.testing.envs:offbeat-test/{name}-v0", kwargs=kwargs), num_envs)


def steps(world, num_steps: int) -> None:
    for _ in range(num_steps):
        world.step(np.zeros(world.num_envs, np.int64))


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("Raise", FaultError, "at step 7"),
        ("NaN", EnvError, r"nan at index \(1,\)"),
        ("WrongShape", EnvError, r"shape \(3,\)"),
        ("WrongDtype", EnvError, "float64"),
        ("NaNReward", EnvError, "reward nan"),
    ],
)
def test_the_fault_comes_at_its_step(name: str, error: type[Exception], words: str) -> None:
    world = world_of(name, at_step=7)
    world.reset(0)
    steps(world, 6)
    with pytest.raises(error, match=words):
        steps(world, 1)


def test_a_fault_happens_once_over_all_environments(tmp_path: Path) -> None:
    flag = str(tmp_path / "flag")
    world = world_of("Raise", 3, at_step=2, once=flag)
    world.reset(0)
    with pytest.raises(FaultError):
        steps(world, 2)
    again = world_of("Raise", 3, at_step=2, once=flag)
    again.reset(0)
    steps(again, 30)


@pytest.mark.parametrize(("name", "code"), [("Exit", EXIT_CODE), ("Kill", -signal.SIGKILL)])
def test_a_process_ends_once(name: str, code: int, tmp_path: Path) -> None:
    script = f"""
import numpy as np
from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
kwargs = {{"at_step": 3, "once": {str(tmp_path / "flag")!r}}}
world = make_world(EnvConfig(id="offbeat.testing.envs:offbeat-test/{name}-v0", kwargs=kwargs), 1)
world.reset(0)
for number in range(1, 6):
    print(number, flush=True)
    world.step(np.zeros(1, np.int64))
"""
    command = [sys.executable, "-c", script]
    first = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (first.returncode, first.stdout.split()) == (code, ["1", "2", "3"])
    second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (second.returncode, second.stdout.split()) == (0, ["1", "2", "3", "4", "5"])


def test_hanging_sleeps_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = iter([0.0, 1.0, 3599.0, 3601.0])
    monkeypatch.setattr(envs.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(envs.time, "sleep", slept.append)
    world = world_of("Hang", at_step=2)
    world.reset(0)
    steps(world, 1)
    assert slept == []
    steps(world, 1)
    assert len(slept) == 2


def test_slow_environments_sleep_by_their_seed_and_change_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    slow, healthy = world_of("Slow", sleep_s=0.5), world_of("Healthy")
    for _ in range(2):
        assert np.array_equal(slow.reset(3), healthy.reset(3))
        for _ in range(200):
            actions = np.zeros(1, np.int64)
            one, other = slow.step(actions), healthy.step(actions)
            assert np.array_equal(one.obs, other.obs)
            assert np.array_equal(one.rewards, other.rewards)
    times = [value for value in slept if value > 0]
    assert times[: len(times) // 2] == times[len(times) // 2 :]
    assert 0.35 < np.median(times) < 0.7
    assert max(times) > 1.5


def test_the_task_can_be_learned_by_looking_at_the_sign() -> None:
    world = world_of("Healthy", 4, length=5)
    obs = world.reset(0)
    for number in range(1, 19):
        step = world.step((obs[:, 0] > 0).astype(np.int64))
        is_restart = number % 6 == 0
        assert (step.rewards == (0 if is_restart else 1)).all()
        assert step.terminated.all() == (number % 6 == 5)
        obs = step.obs


def test_every_fault_has_an_id_and_unknown_ones_are_refused() -> None:
    envs.register_test_envs()
    for name, fault in FAULTS.items():
        assert gymnasium.spec(f"offbeat-test/{name}-v0").kwargs == {"fault": fault}
    with pytest.raises(ValueError, match="fault must be one of"):
        envs.FaultyEnv("explode")  # type: ignore[arg-type]
