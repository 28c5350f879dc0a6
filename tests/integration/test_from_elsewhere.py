"""Commands and loops as users of other projects type them: they work, or are answered with what does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.cli.main import main
from offbeat.observe.events import read_events
from tests.conftest import SMALL

QUIET = "--console none --tensorboard.enabled=false --eval.at_end=false --checkpoint.enabled=false"


def offbeat_command(line: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_color_lines_command_is_told_why_it_learns_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba")
    flags = (
        "--num_workers 4 --batch_size 128 --buffer_capacity 100000 --per_alpha 0.6 --lr 3e-4 --num_epochs 4"
    )
    assert offbeat_command(f"check colorlines-ppo-per-ray {flags} --weight_sync_interval 10") == 0
    shown = capsys.readouterr().out
    assert "learning rate  0.0003 is far below 0.05, the default for network.kind lines" in shown
    assert "128 replay segments of 32 steps = 4,096 samples in 4 passes" in shown
    assert "102 of the segments are new, of 256 that arrive a round" in shown
    assert "4 in Ray actors" in shown
    assert offbeat_command("check colorlines-ppo-per-ray") == 0
    shown = capsys.readouterr().out
    assert "learning rate" not in shown
    assert "4 in Ray actors" in shown


def test_without_a_learning_rate_that_of_the_network_is_taken(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    settings = {**SMALL, "run.dir": str(tmp_path / "run"), "runtime.kind": "inline", "env.num_envs": 8}
    more = {"algorithm.lr": None, "algorithm.batch_size": 8, "async_training.enable_async_eval": False}
    settings |= {**more, "algorithm.minibatch_size": 64, "eval.at_end": False}
    result = offbeat.train("colorlines-ppo-per", rounds=1, overrides=settings)
    assert result.metrics["learn/learning_rate"] == 0.05


def test_a_run_tuned_by_itself_tells_where_it_settled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    small = "--env.num_envs 4 --num_steps 8 --minibatch_size 16 --num_epochs 1 --num_workers 2"
    assert offbeat_command(
        f"train cartpole-ppo --off_policy_degree -1 --num_iterations 20 --run.dir {directory}"
        f" --runtime.kind threads {small} {QUIET}"
    ) in (0, 130)
    assert "settled at k = " in capsys.readouterr().out
    dials = [event for event in read_events(directory / "events.jsonl") if event["kind"] == "dial"]
    assert dials[0]["reason"] == "tuned while running"
    assert all(dial["reason"] for dial in dials)
    assert "round 0: began with" in (directory / "logs" / "run.log").read_text()


def test_a_planners_pair_of_dicts_is_refused_and_a_mapping_trains(tmp_path: Path) -> None:
    main_config: dict[str, Any] = {"exp_name": "x", "policy": {"off_policy_degree": 5}}
    create_config: dict[str, Any] = {"env": {"type": "cartpole_lightzero"}}
    with pytest.raises(offbeat.errors.ConfigError, match="start from a recipe"):
        offbeat.train([main_config, create_config])  # type: ignore[arg-type]
    settings = {**SMALL, "run.dir": str(tmp_path / "run"), "runtime.kind": "inline", "run.rounds": 1}
    assert offbeat.train({"extends": "cartpole-ppo", **settings}).rounds == 1
    again = offbeat.resume(tmp_path / "run", overrides={"run.rounds": 2})
    assert again.rounds == 2


def test_a_fully_asynchronous_script_is_answered_key_by_key(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "train cartpole-ppo trainer.nnodes=1 trainer.total_epochs=10 trainer.test_freq=20 rollout.nnodes=1"
        " rollout.total_rollout_steps=1000 async_training.trigger_parameter_sync_step=4"
        " async_training.require_batches=1 async_training.partial_rollout=True"
    )
    assert offbeat_command(line) == 2
    told = capsys.readouterr().err
    for key, answer in {
        "trainer.total_epochs = 10": "use run.",
        "trainer.test_freq = 20": "use eval.interval_rounds",
        "rollout.total_rollout_steps = 1000": "use run.",
        "async_training.trigger_parameter_sync_step = 4": "use async_training.weight_sync_interval",
        "async_training.require_batches = 1": "use algorithm.segments_per_round",
        "async_training.partial_rollout = true": "leave it out: a publication",
    }.items():
        assert f"{key}\n    unknown key; {answer}" in told
    assert "6 problems" in told
