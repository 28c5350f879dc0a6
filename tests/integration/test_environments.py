"""Environments that need something done before they can be trained, in whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import offbeat
from offbeat.cli.main import main

Run = Callable[..., Any]
HERE = "tests.integration.test_environments"
FEW = {"runtime.kind": "inline", "env.num_envs": 4}


class Notices(offbeat.Callback):
    """Remembers what the run had to say."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_notice(self, text: str) -> None:
        self.texts.append(text)


class Endless(gymnasium.Env[Any, Any]):
    """Never ends."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Last(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows only the last ``size`` numbers."""

    def __init__(self, env: Any, size: int = 1) -> None:
        super().__init__(env)
        self.size = size
        space = env.observation_space
        self.observation_space = gymnasium.spaces.Box(space.low[-size:], space.high[-size:])

    def observation(self, observation: Any) -> Any:
        return observation[-self.size :]


def cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_blackjack_trains_and_says_what_became_of_its_observations(small_run: Run) -> None:
    heard = Notices()
    result = small_run({**FEW, "env.id": "Blackjack-v1"}, rounds=3, callbacks=[heard])
    assert result.rounds == 3
    assert sum("are flattened into vectors of 45 numbers" in text for text in heard.texts) == 1


def test_minigrid_trains(small_run: Run) -> None:
    pytest.importorskip("minigrid", reason="needs offbeat[minigrid]")
    heard = Notices()
    changes = {"env.id": "minigrid:MiniGrid-Empty-5x5-v0", "algorithm.num_steps": 64}
    result = small_run({**FEW, **changes}, rounds=3, callbacks=[heard])
    assert result.rounds == 3
    assert sum("text is left out: mission" in text for text in heard.texts) == 1


def test_wrappers_hold_in_training_evaluation_play_and_doctor(
    small_run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrappers = [{"wrapper": f"{HERE}:Last", "kwargs": {"size": 3}}, f"{HERE}:Last"]
    result = small_run({**FEW, "env.wrappers": wrappers, "env.num_envs": 16}, rounds=2)
    assert result.policy.act(np.zeros((5, 1), np.float32)).shape == (5,)
    assert offbeat.evaluate(result.run_dir)["eval/episodes"] == 2
    assert len(offbeat.play(result.run_dir, video=False).returns) == 1
    assert offbeat.replay_run(result.run_dir).identical
    capfd.readouterr()
    assert cli("doctor", "--env", str(result.run_dir / "config.yaml"), "--json") == 0
    assert cli("check", str(result.run_dir / "config.yaml"), "env.wrappers=[os:system]") == 2
    assert "os is a module of Python itself" in capfd.readouterr().err
    assert (result.run_dir / "checkpoints").exists()


def test_another_environment_drops_inherited_wrappers(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(f"extends: cartpole-ppo\nenv:\n  wrappers: ['{HERE}:Last']\n")
    (tmp_path / "next.yaml").write_text("extends: base.yaml\nenv: {id: Pendulum-v1}\n")
    assert [one.wrapper for one in offbeat.load_config(tmp_path / "base.yaml").env.wrappers] == [
        f"{HERE}:Last"
    ]
    assert offbeat.load_config(tmp_path / "next.yaml").env.wrappers == ()


@pytest.mark.parametrize("given", ["[Last]", "[{kwargs: {}}]", "[3]", "{wrapper: a:b}"])
def test_wrappers_that_cannot_be_meant_are_refused(given: str) -> None:
    with pytest.raises(offbeat.errors.ConfigError, match=r"must be a list of wrappers, each `module:Class`"):
        offbeat.load_config("cartpole-ppo", [f"env.wrappers={given}"])


def test_evaluation_without_an_end_is_one_line_everywhere(
    small_run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offbeat.algorithms.judging.MAX_EPISODE_STEPS", 50)
    heard = Notices()
    result = small_run({**FEW, "env.id": f"{HERE}:Endless"}, rounds=1, callbacks=[heard])
    told = "an episode has not ended after 50 steps; set env.max_episode_steps to a limit"
    assert f"the evaluation of version 1 failed: {told}" in heard.texts
    assert result.eval_return is None
    assert cli("status", str(result.run_dir)) == 0
    assert f"1, the last one of version 1: {told}" in capfd.readouterr().out
    assert cli("status", str(result.run_dir), "--json") == 0
    failed = json.loads(capfd.readouterr().out)["failed_evaluations"]
    assert (failed["count"], failed["newest"]["reason"]) == (1, told)
    assert cli("resume", str(result.run_dir), "run.rounds=2", "--json") == 0
    said = capfd.readouterr()
    assert f"the last one of version 2: {told}" in said.err
    assert "Traceback" not in said.err
