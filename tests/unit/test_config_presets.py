"""Presets in the configuration: the keys of other projects, and what they set of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.config.loader import dump_yaml
from offbeat.config.models import AsyncTrainingConfig, PresetConfig, RunConfig
from offbeat.config.plan import plan
from offbeat.errors import ConfigError
from offbeat.pipeline import Pipeline, Settings

KEY = "async_training.preset"


def load(*overrides: str, source: Any = "cartpole-ppo-async") -> RunConfig:
    return offbeat.load_config(source, overrides)


@pytest.mark.parametrize(
    ("overrides", "degree", "interval"),
    [
        ([f"{KEY}=one_step_off"], 1, 1),
        ([f"{KEY}=areal"], 2, 1),
        ([f"{KEY}.name=areal", f"{KEY}.max_head_offpolicyness=8"], 8, 1),
        ([f"{KEY}=verl_fully_async"], 4, 4),
        ([f"{KEY}.name=verl_fully_async", f"{KEY}.staleness_threshold=0.0"], 3, 4),
        (
            [
                f"{KEY}.name=verl_fully_async",
                f"{KEY}.staleness_threshold=0.5",
                f"{KEY}.trigger_parameter_sync_step=2",
                f"{KEY}.require_batches=3",
            ],
            8,
            6,
        ),
    ],
)
def test_a_preset_sets_its_neighbours_whatever_the_recipe_says(
    overrides: list[str], degree: int, interval: int
) -> None:
    dial = load(*overrides).async_training
    assert (dial.off_policy_degree, dial.weight_sync_interval, dial.open_rounds) == (degree, interval, 0)


def test_a_dial_on_top_drops_the_preset_and_a_dump_comes_back(tmp_path: Path) -> None:
    config = load(f"{KEY}=areal")
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    assert load(source=path) == config
    assert load("async_training.off_policy_degree=3", source=path).async_training.preset is None
    other = load(f"{KEY}=one_step_off", source=path).async_training
    assert (other.preset, other.off_policy_degree) == (PresetConfig(name="one_step_off"), 1)


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        ([f"{KEY}=areal", "async_training.off_policy_degree=5"], "off_policy_degree", "sets it to 2"),
        ([f"{KEY}=areal", "async_training.weight_sync_interval=2"], "weight_sync_interval", "sets it to 1"),
        ([f"{KEY}=areal", "async_training.straggler_policy=cut"], "straggler_policy", "sets it to wait"),
        ([f"{KEY}=areal", "async_training.min_batch_count=9"], "min_batch_count", "sets it to null"),
        ([f"{KEY}=areal", "async_training.max_staleness_allowed=9"], "max_staleness_allowed", "no age"),
        ([f"{KEY}.name=areal", f"{KEY}.require_batches=2"], "preset", "belongs to the preset verl_fully"),
        ([f"{KEY}=verl"], "preset.name", "must be one of one_step_off, verl_fully_async, areal"),
        ([f"{KEY}=areal", "algorithm.name=muzero"], "preset", "muzero replays its samples"),
    ],
)
def test_what_contradicts_a_preset_is_refused(overrides: list[str], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert f"async_training.{key}" in str(caught.value)
    assert text in str(caught.value)


def test_the_plan_says_what_is_bounded() -> None:
    said = {name: plan(load(f"{KEY}={name}"))["staleness"] for name in ("one_step_off", "areal")}
    assert said["one_step_off"].startswith("at most 1 version")
    assert said["areal"].startswith("no age is bounded by the rule areal: at most 3 segments")
    full = plan(load(f"{KEY}.name=verl_fully_async", f"{KEY}.staleness_threshold=0.0"))["staleness"]
    assert full.startswith("at most 3 versions")


def collect(ticket: Any, weights: Any) -> int:
    return int(ticket.version)


def test_a_pipeline_runs_under_a_preset_and_is_not_turned() -> None:
    settings = Settings(AsyncTrainingConfig(preset=PresetConfig(name="areal", max_head_offpolicyness=3)))
    options = {"collect": collect, "train": lambda _: None, "weights": lambda: None, "settings": settings}
    report = Pipeline(**options, segments_per_round=2, num_workers=2).run(rounds=8)  # type: ignore[arg-type]
    assert report.metrics["pace/off_policy_degree"] == 3
    with pytest.raises(ConfigError, match="the preset areal sets it to 3"):
        Pipeline(**options, off_policy_degree=1)  # type: ignore[arg-type]
