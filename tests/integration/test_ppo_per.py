"""PPO with prioritized replay, whole runs: the same weights everywhere, repeatable, never too far ahead."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.algorithms.ppo_per.learner import Draw, PPOPERLearner
from offbeat.checkpoint import CheckpointManager
from offbeat.config.models import AsyncTrainingConfig
from offbeat.errors import ConfigError, StallError
from offbeat.observe.events import read_rounds, read_schedule
from offbeat.pipeline import Pipeline, Settings
from tests.callbacks import EndAt

Run = Callable[..., Any]
SMALL = {
    "env.num_envs": 8,
    "algorithm.num_steps": 8,
    "algorithm.batch_size": 12,
    "algorithm.buffer_capacity": 40,
    "algorithm.minibatch_size": 48,
    "run.rounds": 8,
    "run.stop_return": None,
    "runtime.num_workers": 2,
    "async_training.off_policy_degree": 0,
    "async_training.enable_async_eval": False,
    "eval.episodes": 2,
    "eval.num_envs": 2,
    "observe.console": "none",
    "observe.tensorboard": False,
}
"""Two workers of four environments each; a round takes eight new replay segments in and draws twelve."""


@pytest.fixture
def per_run(tmp_path: Path) -> Run:
    """Train a small CartPole run with replay; keyword ``name`` is its directory, the rest are overrides."""

    def run(overrides: dict[str, Any] | None = None, name: str = "run", **options: Any) -> Any:
        settings = {**SMALL, "run.dir": str(tmp_path / name), **(overrides or {})}
        return offbeat.train("cartpole-ppo-per", overrides=settings, **options)

    return run


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The inline run at k = 0 that others are compared with."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    settings = {**SMALL, "run.dir": str(directory), "runtime.kind": "inline"}
    return offbeat.train("cartpole-ppo-per", overrides=settings)


def versions_of(run_dir: Path) -> list[int]:
    """The weights that each segment was collected with, by ticket."""
    records = [record for record in read_schedule(run_dir / "schedule.jsonl") if record["kind"] == "segment"]
    return [record["version"] for record in sorted(records, key=lambda record: record["ticket"])]


# ---------------------------------------------------------------- k = 0


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_every_runtime_reaches_the_same_weights(kind: str, per_run: Run, reference: Any) -> None:
    assert per_run({"runtime.kind": kind}).digest == reference.digest


def test_strict_rounds_take_turns(reference: Any) -> None:
    rounds = read_rounds(reference.run_dir / "events.jsonl")
    # The first round waits for three segments, so that twelve can be drawn; each later one for its own two.
    assert versions_of(reference.run_dir) == [0, 0, 0, *(v for v in range(1, 8) for _ in range(2))]
    assert max(record["metrics"]["learn/first_ratio_max_dev"] for record in rounds) < 1e-5
    assert rounds[-1]["metrics"]["learn/replay_size"] == 40, "the oldest made room"
    assert [record["metrics"]["learn/per_beta"] for record in rounds[:: len(rounds) - 1]] == [0.4, 1.0]


def test_digest_depends_on_the_seed(per_run: Run, reference: Any) -> None:
    assert per_run({"runtime.kind": "inline"}, seed=7).digest != reference.digest


def test_the_replay_is_in_the_checkpoint(reference: Any) -> None:
    learner = CheckpointManager(reference.run_dir / "checkpoints").load().parts["learner"]
    items = learner["replay"]["items"]
    assert items["obs"].shape == (40, 9, 4) and items["rewards"].shape == (40, 8)
    assert np.all(learner["replay"]["leaves"] > 0)


def test_stopped_and_resumed_run_ends_where_the_other_does(per_run: Run, reference: Any) -> None:
    stopped = per_run({"runtime.kind": "processes"}, name="stopped", callbacks=[EndAt(3)])
    assert stopped.rounds == 3
    assert offbeat.resume(stopped.run_dir).digest == reference.digest


KILLED = """
import json, os, signal, sys
import offbeat

class KillOnceSaved(offbeat.Callback):
    def on_checkpoint(self, info):
        if info.version == 4:
            os.kill(os.getpid(), signal.SIGKILL)

offbeat.train("cartpole-ppo-per", overrides=json.loads(sys.argv[1]), callbacks=[KillOnceSaved()])
"""


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_killed_and_resumed_run_ends_where_the_other_does(kind: str, tmp_path: Path, reference: Any) -> None:
    """Killed once version 4 is saved, with the replay of that moment, whatever was trained meanwhile."""
    settings = {**SMALL, "run.dir": str(tmp_path / "killed"), "runtime.kind": kind}
    settings |= {"checkpoint.interval_rounds": 4}  # none before it, whose writing could leave it out
    done = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(settings)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert CheckpointManager(tmp_path / "killed" / "checkpoints").load().version == 4
    resumed = offbeat.resume(tmp_path / "killed")
    assert resumed.rounds == 8
    assert resumed.digest == reference.digest


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm.updates_per_round": 2, "algorithm.max_age": 2, "algorithm.per_for": "both"},
        {"algorithm.explore_epsilon": 0.3, "algorithm.explore_temperature": 2.0},
        {
            "algorithm.normalize_obs": True,
            "algorithm.normalize_reward": True,
            "algorithm.network.kind": "gru",
        },
    ],
    ids=["both", "exploring", "gru"],
)
def test_other_settings_are_the_same_everywhere_too(settings: dict[str, Any], per_run: Run) -> None:
    digests = {
        per_run({**settings, "runtime.kind": kind, "run.rounds": 4}, name=kind).digest
        for kind in ("inline", "processes")
    }
    assert len(digests) == 1


def test_weights_may_be_published_every_third_round(per_run: Run) -> None:
    settings = {"async_training.weight_sync_interval": 3}
    results = [per_run({**settings, "runtime.kind": kind}, name=kind) for kind in ("inline", "threads")]
    assert results[0].digest == results[1].digest
    assert versions_of(results[0].run_dir) == [0] * 7 + [3] * 6 + [6] * 4
    assert offbeat.replay_run(results[1].run_dir).identical


def test_streams_cannot_publish_that_rarely(small_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)weight_sync_interval = 3.*every k \+ 1 rounds"):
        small_run({"async_training.weight_sync_interval": 3})
    assert not (tmp_path / "run").exists()


def test_two_ranks_train_as_one_does(per_run: Run, reference: Any) -> None:
    two = per_run({"runtime.kind": "inline", "learner.num_ranks": 2})
    parameters = [
        CheckpointManager(result.run_dir / "checkpoints").load().parts["learner"]["parameters"]
        for result in (two, reference)
    ]
    for name, array in parameters[0].items():
        np.testing.assert_allclose(array, parameters[1][name], rtol=1e-3, atol=1e-4)


def test_a_strict_round_replays_only_what_earlier_rounds_brought(
    per_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, draw = [], PPOPERLearner._draw

    def watched(self: PPOPERLearner, fresh: Any, version: int, rng: np.random.Generator) -> Draw:
        draws.append((version, draw(self, fresh, version, rng)))
        return draws[-1][1]

    monkeypatch.setattr(PPOPERLearner, "_draw", watched)
    per_run({"runtime.kind": "inline", "algorithm.updates_per_round": 2})
    assert [version for version, _ in draws] == [version for version in range(8) for _ in range(2)]
    # The first round has twelve fresh segments and nothing else; later ones have six, and six of before.
    for version, found in draws:
        num_fresh = 6 if version else 12
        assert len(set(found.chosen)) == num_fresh
        assert (found.versions[:num_fresh] == version).all()
        assert (found.versions[num_fresh:] < version).all()
        assert len(found.versions) == 12


# ---------------------------------------------------------------- above k = 0


@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_a_replay_that_is_filled_first_does_not_live_on_it(kind: str, per_run: Run) -> None:
    """Sixteen rounds' worth are collected before the first round, and let go of four rounds later."""
    settings = {
        "algorithm.min_buffer_size": 128,
        "algorithm.buffer_capacity": 160,
        "algorithm.max_age": 4,
        "runtime.num_workers": 1,
        "runtime.kind": kind,
        "run.rounds": 12,
    }
    result = per_run(settings, off_policy_degree=1)
    assert result.rounds == 12
    records = read_schedule(result.run_dir / "schedule.jsonl")
    taken = [record["tickets"] for record in records if record["kind"] == "round"]
    assert len(taken) == 12 and len(taken[0]) >= 16
    arrived = np.cumsum([len(tickets) for tickets in taken])
    assert (arrived >= np.arange(16, 28)).all(), "a new segment for every round"
    for record in read_rounds(result.run_dir / "events.jsonl"):
        assert record["metrics"]["pace/max_replayed_age"] <= 4
        assert record["counts"]["issued"] <= 15 + min(record["version"] + 2, 12)


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("ratio", ["auto", None, 2.0])
def test_asynchronous_run_can_be_repeated_bit_for_bit(kind: str, ratio: Any, per_run: Run) -> None:
    settings = {"runtime.kind": kind, "run.rounds": 15, "algorithm.replay_ratio": ratio}
    result = per_run(settings, off_policy_degree=2)
    report = offbeat.replay_run(result.run_dir)
    assert report.identical
    assert report.digest == result.digest
    assert report.rounds == 15


def test_asynchronous_run_that_was_resumed_can_be_repeated(per_run: Run) -> None:
    stopped = per_run({"run.rounds": 15}, off_policy_degree=2, callbacks=[EndAt(7)])
    assert stopped.rounds < 15
    finished = offbeat.resume(stopped.run_dir)
    assert finished.rounds == 15
    assert offbeat.replay_run(finished.run_dir).identical


@pytest.mark.parametrize("degree", [0, 1, 3])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_nothing_is_lost_and_collection_is_at_most_k_rounds_ahead(
    degree: int, kind: str, per_run: Run
) -> None:
    result = per_run({"runtime.kind": kind, "run.rounds": 20}, off_policy_degree=degree)
    records = read_rounds(result.run_dir / "events.jsonl")
    assert len(records) == 20
    for record in records:
        counts, version = record["counts"], record["version"]
        parts = ("running", "ready", "trained", "dropped", "lost")
        assert counts["issued"] == sum(counts[part] for part in parts)
        # Two segments a round, and one round more than k is under way; the first waits for one more.
        assert counts["issued"] <= 2 * min(version + degree + 1, 20) + 1
        assert counts["trained"] >= 2 * version + 1, "no round without its share of new segments"
    if degree == 0:
        assert records[-1]["counts"]["trained"] == 41


def test_ages_are_told_and_bounded_by_max_age(per_run: Run) -> None:
    """With one collector: rounds go on without a second one, whose segments are then as late as it is."""
    settings = {"run.rounds": 20, "algorithm.max_age": 3, "runtime.num_workers": 1}
    result = per_run(settings, off_policy_degree=1)
    rounds = [record["metrics"] for record in read_rounds(result.run_dir / "events.jsonl")]
    replayed = max(metrics["pace/max_replayed_age"] for metrics in rounds)
    assert 1 < replayed <= 3
    assert max(metrics["pace/max_sample_age"] for metrics in rounds) <= 2, "new: k, and the round under way"
    assert result.max_staleness == replayed


def test_rounds_without_new_segments_train_on_what_is_there(per_run: Run) -> None:
    """Tickets are issued so rarely that the learner would have to wait for them, were it to wait."""
    settings = {"algorithm.replay_ratio": None, "async_training.batch_generation_interval": 0.3}
    result = per_run({**settings, "runtime.kind": "threads", "run.rounds": 30}, off_policy_degree=1)
    records = read_schedule(result.run_dir / "schedule.jsonl")
    taken = [record["tickets"] for record in records if record["kind"] == "round"]
    assert len(taken) == 30
    assert taken[0] and not all(taken)
    assert offbeat.replay_run(result.run_dir).identical


# ---------------------------------------------------------------- warming up


def warming_up(kind: str, collect: Callable[..., Any], rounds: int = 3) -> tuple[Any, list[int]]:
    """A run that warms up for longer than it may stand still; also how many segments each round had."""
    taken: list[int] = []

    def train(segments: Any) -> dict[str, float]:
        taken.append(len(segments))
        return {}

    pipeline = Pipeline(
        collect=collect,
        train=train,
        weights=dict,
        runtime=kind,
        mode="replay",
        replay_ratio=1.0,
        warmup_s=2.0,
        off_policy_degree=1,
        settings=Settings(async_training=AsyncTrainingConfig(batch_timeout=1.0)),
    )
    return pipeline.run(rounds=rounds), taken


@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_a_warm_up_longer_than_batch_timeout_is_no_stall(kind: str) -> None:
    report, taken = warming_up(kind, lambda ticket, weights: ticket.number)
    assert report.version == 3
    assert taken == [1, 1, 1], "what was collected meanwhile is for the rounds that it is due in"


def test_a_run_that_stands_still_after_its_warm_up_is_told() -> None:
    released = threading.Event()

    def hang(ticket: Any, weights: Any) -> Any:
        released.wait(timeout=20)

    try:
        with pytest.raises(StallError, match=r"batch_timeout\): round 0 waits for segments .0 ready"):
            warming_up("threads", hang)
    finally:
        released.set()


# ---------------------------------------------------------------- Color Lines


LINES = {
    "env.num_envs": 8,
    "env.kwargs": {"reward": "shaped"},
    "eval.env_kwargs": {"reward": "score"},
    "algorithm.num_steps": 8,
    "algorithm.batch_size": 12,
    "algorithm.buffer_capacity": 64,
    "algorithm.minibatch_size": 64,
    "run.rounds": 4,
    "eval.interval_rounds": 2,
    "eval.episodes": 3,
    "eval.num_envs": 3,
    "observe.console": "none",
    "observe.tensorboard": False,
}


def train_lines(directory: Path, overrides: dict[str, Any] | None = None, **options: Any) -> Any:
    settings = {**LINES, "run.dir": str(directory), **(overrides or {})}
    return offbeat.train("colorlines-ppo-per", overrides=settings, **options)


def test_color_lines_trains_and_is_judged_by_its_score(tmp_path: Path) -> None:
    """Games are trained on shaped rewards, which are not whole; points come in twos."""
    result = train_lines(tmp_path / "run", {"runtime.kind": "processes"})
    assert result.rounds == 4
    metrics = offbeat.evaluate(result.run_dir, episodes=4, seed=3)
    total = 4 * metrics["eval/return_mean"]
    assert total == pytest.approx(round(total)) and round(total) % 2 == 0
    assert metrics["eval/return_min"] >= 0
    records = read_rounds(result.run_dir / "events.jsonl")
    assert records[-1]["metrics"]["learn/replay_size"] == 8 * records[-1]["counts"]["trained"]
    assert offbeat.replay_run(result.run_dir).identical


@pytest.mark.parametrize("network", ["lines", pytest.param("board", marks=pytest.mark.slow)])
def test_color_lines_gives_the_same_weights_everywhere(network: str, tmp_path: Path) -> None:
    settings = {"algorithm.network.kind": network, "async_training.enable_async_eval": False}
    if network == "board":
        settings["algorithm.network.hidden"] = [8]
    digests = {
        train_lines(
            tmp_path / kind, {**settings, "runtime.kind": kind, "run.rounds": 3}, off_policy_degree=0
        ).digest
        for kind in ("inline", "processes")
    }
    assert len(digests) == 1


# ---------------------------------------------------------------- Ray


@pytest.mark.slow
def test_ray_gives_the_same_weights(per_run: Run, reference: Any, shared_ray: None) -> None:
    assert per_run({"runtime.kind": "ray"}).digest == reference.digest


@pytest.mark.slow
def test_asynchronous_run_on_ray_can_be_repeated(per_run: Run, shared_ray: None) -> None:
    settings = {"runtime.kind": "ray", "run.rounds": 12, "async_training.enable_async_eval": True}
    result = per_run(settings, off_policy_degree=2)
    for record in read_rounds(result.run_dir / "events.jsonl"):
        assert record["counts"]["issued"] <= 2 * min(record["version"] + 3, 12) + 1
    report = offbeat.replay_run(result.run_dir)
    assert report.identical and report.digest == result.digest
