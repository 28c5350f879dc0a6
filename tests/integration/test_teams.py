"""Teams of agents in whole runs: every runtime, resumed, repeated, with the dial open and turned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.observe.callbacks import Callback, RoundInfo, RunInfo
from offbeat.observe.events import read_rounds

SMALL: dict[str, Any] = {
    "env.num_envs": 4,
    "sync_batch_size": 40,
    "num_epochs": 2,
    "hidden": 16,
    "eval.episodes": 4,
    "eval.num_envs": 2,
    "eval.interval_rounds": None,
    "observe.console": "none",
    "observe.tensorboard": False,
    "runtime.kind": "inline",
}
SKILLS = {"skill_interval": 5, "env.kwargs": {"max_steps": 12}}


def settings(algorithm: str, **changes: Any) -> dict[str, Any]:
    skills = SKILLS if algorithm == "hmasd" else {"env.kwargs": {"max_steps": 12}}
    return {**SMALL, **skills, **changes}


def train(
    algorithm: str, directory: Path, rounds: int = 4, callbacks: tuple[Callback, ...] = (), **changes: Any
) -> Any:
    chosen = settings(algorithm, **{"run.dir": str(directory), **changes})
    recipe = f"alice-bob-{algorithm}"
    return offbeat.train(recipe, rounds=rounds, seed=3, overrides=chosen, callbacks=callbacks)


@pytest.mark.parametrize("algorithm", ["mappo", "hmasd"])
def test_every_runtime_reaches_the_same_weights(algorithm: str, tmp_path: Path) -> None:
    digests = {
        kind: train(algorithm, tmp_path / kind, **{"runtime.kind": kind}).digest
        for kind in ("inline", "threads", "processes")
    }
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("algorithm", ["mappo", "hmasd"])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(algorithm: str, tmp_path: Path) -> None:
    whole = train(algorithm, tmp_path / "whole", rounds=4)
    train(algorithm, tmp_path / "half", rounds=2)
    resumed = offbeat.resume(tmp_path / "half", overrides={"run.rounds": 4})
    assert resumed.digest == whole.digest


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("mappo", {}),
        ("hmasd", {"straddle": "cut"}),
        ("hmasd", {"straddle": "carry"}),
        ("hmasd", {"straddle": "align", "intrinsic": "recomputed"}),
        ("hmasd", {"discriminator.data": "kept", "reset_memory": "skill"}),
    ],
)
def test_an_asynchronous_run_is_bounded_and_can_be_repeated(
    algorithm: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    dial = {"async_training.off_policy_degree": 2, "runtime.kind": "threads"}
    result = train(algorithm, tmp_path / "run", rounds=6, **dial, **changes)
    assert result.max_staleness <= 2
    rounds = read_rounds(tmp_path / "run" / "events.jsonl")
    if algorithm == "hmasd":
        for name in ("high", "low", "discriminators"):
            assert max(found["metrics"][f"learn/max_age_{name}"] for found in rounds) <= 2
        assert rounds[-1]["metrics"]["learn/refused_samples"] == 0
    assert offbeat.replay_run(tmp_path / "run").identical


class TurnDown(Callback):
    """Turns the dial to 0 while older segments wait."""

    def on_start(self, info: RunInfo) -> None:
        self._turn = info.turn

    def on_round(self, info: RoundInfo) -> None:
        if info.version == 3:
            self._turn(0)


@pytest.mark.parametrize("algorithm", ["mappo", "hmasd"])
def test_turning_the_dial_down_throws_nothing_away(algorithm: str, tmp_path: Path) -> None:
    dial = {"async_training.off_policy_degree": 3, "runtime.kind": "threads"}
    result = train(algorithm, tmp_path / "run", rounds=10, callbacks=(TurnDown(),), **dial)
    assert result.rounds == 10
    last = read_rounds(tmp_path / "run" / "events.jsonl")[-1]["metrics"]
    assert last["pace/off_policy_degree"] == 0
    assert last.get("learn/refused_samples", 0) == 0
    assert result.metrics["pace/dropped_samples"] == 0
    assert offbeat.replay_run(tmp_path / "run").identical


def test_strict_rounds_are_on_policy_on_both_levels(tmp_path: Path) -> None:
    train("hmasd", tmp_path / "run", rounds=6)
    for found in read_rounds(tmp_path / "run" / "events.jsonl"):
        assert found["metrics"]["learn/first_ratio_max_dev"] <= 1e-5
        assert found["metrics"]["learn/high_first_ratio_max_dev"] <= 1e-5


def test_several_workers_and_rules_of_batch_size(tmp_path: Path) -> None:
    changes = {"runtime.num_workers": 2, "batch_rule": "linear", "batch_size_end": 80, "straddle": "align"}
    train("hmasd", tmp_path / "run", rounds=5, **changes)
    rounds = read_rounds(tmp_path / "run" / "events.jsonl")
    sizes = [found["metrics"]["learn/batch_size"] for found in rounds]
    assert sizes[0] == 40
    assert sizes == sorted(sizes)
    assert sizes[-1] > 60
    noisy = {"batch_rule": "noise_scale", "batch_size_end": 80, "grad_accumulation": 2, "num_minibatches": 2}
    train("mappo", tmp_path / "noisy", rounds=5, **noisy)
    metrics = read_rounds(tmp_path / "noisy" / "events.jsonl")[-1]["metrics"]
    assert 40 <= metrics["learn/batch_size"] <= 80
    assert metrics["learn/noise_scale"] >= 0


@pytest.mark.parametrize(
    ("recipe", "package"), [("lbf-coop-hmasd", "lbforaging"), ("mpe-spread-mappo", "mpe2")]
)
def test_environments_of_others(recipe: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    changes = {**SMALL, "run.dir": str(tmp_path / "run"), "sync_batch_size": 40}
    changes.pop("hidden")
    result = offbeat.train(recipe, rounds=2, overrides=changes)
    assert result.rounds == 2
    assert offbeat.evaluate(tmp_path / "run", episodes=2)["eval/episodes"] == 2


def test_what_cannot_be_is_refused_with_the_fix(tmp_path: Path) -> None:
    from offbeat.errors import ConfigError

    wrong = {
        "sync_batch_size": 42,
        "straddle": "carry",
        "heads": 3,
    }
    with pytest.raises(ConfigError) as caught:
        train("hmasd", tmp_path / "run", **wrong)
    text = str(caught.value)
    assert "40 is" in text
    assert "carry trains skill periods a round late" in text
    assert "must divide hidden" in text
    with pytest.raises(ConfigError, match="ppo"):
        train("mappo", tmp_path / "run", **{"env.id": "CartPole-v1", "env.kwargs": {}})


def test_a_team_can_be_watched_and_filmed(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    train("hmasd", tmp_path / "run", rounds=1)
    texts: list[str | None] = []
    result = offbeat.play(
        tmp_path / "run", against="random", episodes=2, watch=lambda moment: texts.append(moment.text)
    )
    assert result.lengths[0] <= 12
    assert result.file is not None
    assert result.num_frames == sum(result.lengths) + 2
    assert result.against is not None
    assert all(text for text in texts)
