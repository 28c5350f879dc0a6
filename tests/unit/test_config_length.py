"""The length of a run in rounds or in environment steps, whichever was written last or ends first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.algorithms.ppo.config import PPOConfig
from offbeat.cli.main import main
from offbeat.config.loader import dump_yaml
from offbeat.config.models import EnvConfig, RunConfig, RunSection
from offbeat.config.plan import plan
from offbeat.errors import ConfigError
from offbeat.observe.events import read_rounds

ROUND = 3072
"""Steps of a round of the recipe cartpole-ppo."""


def load(*overrides: str, source: Any = "cartpole-ppo") -> RunConfig:
    return offbeat.load_config(source, overrides)


@pytest.mark.parametrize(
    ("overrides", "rounds"),
    [
        (["total_timesteps=200000"], 66),
        (["run.total_timesteps=1e6"], 326),
        ([f"total_timesteps={5 * ROUND}"], 5),
        ([f"total_timesteps={5 * ROUND + 1}"], 6),
        (["total_timesteps=1"], 1),
        (["total_timesteps=200000", "rounds=10"], 10),
        (["total_timesteps=200000", "rounds=1000"], 66),
        (["total_timesteps=null"], 45),
    ],
)
def test_steps_come_to_whole_rounds_and_the_shorter_of_two_holds(overrides: list[str], rounds: int) -> None:
    assert load().run.rounds == 45
    config = load(*overrides)
    assert config.run.rounds == rounds
    assert config.resolved().algorithm.schedule_rounds == rounds  # type: ignore[attr-defined]


def test_what_is_written_on_top_drops_the_other_that_was_inherited(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("extends: cartpole-ppo\nrun: {total_timesteps: 300000}\n")
    assert load(source=path).run.rounds == 98
    assert load("run.rounds=7", source=path).run == load(source=path).run.model_copy(
        update={"rounds": 7, "total_timesteps": None}
    )
    (tmp_path / "config.yaml").write_text(dump_yaml(load(source=path)))
    again = load(source=tmp_path / "config.yaml")
    assert (again.run.rounds, again.run.total_timesteps) == (98, 300000)
    assert load("total_timesteps=600000", source=tmp_path / "config.yaml").run.rounds == 196


def test_configs_made_in_python_have_no_number_of_rounds_that_nobody_chose() -> None:
    def made(**run: Any) -> RunConfig:
        algorithm, env = PPOConfig(name="ppo"), EnvConfig(id="CartPole-v1")
        return load(source=RunConfig(algorithm=algorithm, env=env, run=RunSection(**run)))

    assert made(total_timesteps=1_000_000).run.rounds == 977
    assert made(total_timesteps=1_000_000, rounds=100).run.rounds == 100
    assert made().run.rounds == 100


@pytest.mark.parametrize("recipe", ["cartpole-ppo-per", "cartpole-muzero", "cartpole-unizero-async"])
def test_steps_before_the_first_round_of_a_replay_count(recipe: str) -> None:
    config = load(source=recipe).resolved()
    steps = config.steps_of(config.run.rounds)
    assert steps is not None
    assert steps > config.run.rounds * (config.steps_of(2) or 0) - config.run.rounds * (
        config.steps_of(1) or 0
    )
    assert load(f"total_timesteps={steps}", source=recipe).run.rounds == config.run.rounds
    assert load(f"total_timesteps={steps + 1}", source=recipe).run.rounds == config.run.rounds + 1


def test_check_shows_the_rounds() -> None:
    assert plan(load("total_timesteps=200000"))["run"].startswith(
        "66 rounds = 202,752 samples (total_timesteps 200,000), "
    )


def test_algorithms_whose_rounds_differ_are_told_to_count_rounds() -> None:
    with pytest.raises(
        ConfigError, match=r"run.total_timesteps = 1000\s+the steps of a round of mappo are not"
    ):
        load("total_timesteps=1000", "algorithm.batch_rule=linear", source="alice-bob-mappo")


def test_resume_may_raise_it(small_run: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    few = {"runtime.kind": "inline", "run.stop_return": None, "run.rounds": 99, "run.total_timesteps": 256}
    result = small_run(few)
    assert result.rounds == 2, "128 steps each"
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["resume", str(result.run_dir), "total_timesteps=600", "--json"])
    assert not ended.value.code
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["rounds"] == 5
    records = read_rounds(result.run_dir / "events.jsonl")
    assert [record["version"] for record in records] == [1, 2, 3, 4, 5]
    assert offbeat.load_config(result.run_dir / "config.yaml").run.total_timesteps == 600


def test_a_conflict_that_leaves_the_steps_of_a_round_unknown_is_told_alone() -> None:
    overrides = ("total_timesteps=500000", "algorithm.reanalyse.segments_per_round=1")
    with pytest.raises(ConfigError) as caught:
        load(*overrides, source="cartpole-unizero")
    assert "leaves nothing to collect" in str(caught.value)
    assert "not known before" not in str(caught.value)
    config = load(*overrides, "algorithm.segments_per_round=2", source="cartpole-unizero")
    assert config.resolved().rounds_of(500_000) == config.run.rounds
