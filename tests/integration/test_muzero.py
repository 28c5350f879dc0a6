"""MuZero and UniZero, whole runs: the same everywhere, nothing lost, targets searched anew, repeatable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import offbeat
from offbeat.algorithms.muzero.config import reanalysis_turn
from offbeat.algorithms.muzero.fitting import fit_environment
from offbeat.algorithms.muzero.steps import step_spec
from offbeat.checkpoint import CheckpointManager
from offbeat.observe.callbacks import RoundInfo
from offbeat.observe.events import read_events, read_rounds, read_schedule
from offbeat.replay.streams import StreamReplay
from tests.callbacks import EndAt
from tests.conftest import is_worker

SMALL = {
    "algorithm.num_steps": 4,
    "algorithm.batch_size": 16,
    "algorithm.num_unroll": 4,
    "algorithm.td_steps": 2,
    "algorithm.replay_ratio": 0.1,
    "algorithm.buffer_capacity": 400,
    "algorithm.search.num_simulations": 4,
    "algorithm.network.latent": 8,
    "algorithm.network.hidden": 8,
    "env.num_envs": 8,
    "runtime.num_workers": 2,
    "run.rounds": 6,
    "eval.episodes": 2,
    "eval.num_envs": 2,
    "eval.interval_rounds": None,
    "async_training.enable_async_eval": False,
    "observe.console": "none",
    "observe.tensorboard": False,
}
CONTEXT = {"muzero": {}, "unizero": {"algorithm.context_length": 2}}
ANEW = {"algorithm.segments_per_round": 3, "algorithm.reanalyse.segments_per_round": 1}


def train(algorithm: str, directory: Path, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    settings = {**SMALL, **CONTEXT[algorithm], "run.dir": str(directory), **(changes or {})}
    return offbeat.train(f"cartpole-{algorithm}", overrides=settings, **options)


def learner_state(result: Any) -> Any:
    return CheckpointManager(result.run_dir / "checkpoints").load().parts["learner"]


@pytest.mark.slow  # tests/net runs both in one thread and on processes
@pytest.mark.parametrize("algorithm", ["muzero", "unizero"])
def test_every_runtime_reaches_the_same_weights(algorithm: str, tmp_path: Path) -> None:
    digests = {
        train(algorithm, tmp_path / kind, {**ANEW, "runtime.kind": kind}).digest
        for kind in ("inline", "threads", "processes")
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_ray_reaches_the_same_weights(tmp_path: Path, shared_ray: None) -> None:
    digests = {
        train("unizero", tmp_path / kind, {**ANEW, "runtime.kind": kind}).digest for kind in ("inline", "ray")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("algorithm", ["muzero", "unizero"])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(algorithm: str, tmp_path: Path) -> None:
    changes = {**ANEW, "runtime.kind": "inline", "algorithm.per_alpha": 0.6}
    whole = train(algorithm, tmp_path / "whole", changes)
    stopped = train(algorithm, tmp_path / "stopped", changes, callbacks=[EndAt(3)])
    assert stopped.rounds < 6
    assert offbeat.resume(stopped.run_dir).digest == whole.digest


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("muzero", "threads"), pytest.param("unizero", "processes", marks=pytest.mark.slow)],
)
def test_an_asynchronous_run_can_be_repeated_bit_for_bit(algorithm: str, kind: str, tmp_path: Path) -> None:
    changes = {**ANEW, "runtime.kind": kind, "run.rounds": 10}
    result = train(algorithm, tmp_path / "run", changes, off_policy_degree=2)
    report = offbeat.replay_run(result.run_dir)
    assert report.identical and report.digest == result.digest


@pytest.mark.parametrize("degree", [0, 3])
def test_no_step_is_lost_and_updates_keep_to_their_ratio(degree: int, tmp_path: Path) -> None:
    changes = {**ANEW, "runtime.kind": "threads", "run.rounds": 12, "algorithm.buffer_capacity": 1600}
    result = train("muzero", tmp_path / "run", changes, off_policy_degree=degree)
    rounds = read_rounds(result.run_dir / "events.jsonl")
    state, counts = learner_state(result), rounds[-1]["counts"]
    assert counts["dropped"] == counts["lost"] == 0
    schedule = read_schedule(result.run_dir / "schedule.jsonl")
    produced = {entry["ticket"] for entry in schedule if entry["kind"] == "segment"}
    trained = [ticket for entry in schedule if entry["kind"] == "round" for ticket in entry["tickets"]]
    assert len(trained) == len(set(trained)) == counts["trained"]
    sizes = [len(entry["tickets"]) for entry in schedule if entry["kind"] == "round"]
    assert sizes[0] > 3 and sizes[1:] == [3] * 11, "every round has its share, however early segments came"
    assert set(trained) == produced
    config = offbeat.load_config(result.run_dir / "config.yaml")
    collected = sum(reanalysis_turn(ticket, config) is None for ticket in trained) * 4 * 4
    assert collected == state["replay"]["written"].sum()
    # After an episode's end comes a row that shows its last observation: no step was taken there.
    steps = int(state["replay"]["items"]["valid"].sum())
    assert collected > steps == state["num_collected"]
    assert int(state["num_updates"]) == int(np.floor(0.1 * steps + 1e-9))
    assert int(state["num_updates"]) == sum(r["metrics"]["learn/gradient_steps"] for r in rounds)


def faulty(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"env.id": f"offbeat.testing.envs:offbeat-test/{name}-v0", "env.kwargs": {"at_step": 9, **kwargs}}


@pytest.mark.slow
def test_a_killed_collector_changes_nothing(tmp_path: Path) -> None:
    whole = train("muzero", tmp_path / "whole", {**ANEW, **faulty("Healthy"), "runtime.kind": "inline"})
    once = str(tmp_path / "happened")
    changes = {**ANEW, **faulty("Kill", once=once), "runtime.kind": "processes"}
    hit = train("muzero", tmp_path / "hit", changes)
    assert Path(once).exists() and hit.digest == whole.digest


class KillAt(offbeat.Callback):
    """Kills a collector's process after some rounds."""

    def __init__(self, *rounds: int) -> None:
        self._rounds = rounds

    def on_round(self, info: RoundInfo) -> None:
        if info.version in self._rounds:
            next(child for child in psutil.Process().children() if is_worker(child)).kill()


@pytest.mark.slow
def test_steps_are_joined_rightly_when_collectors_are_killed_with_the_dial_open(tmp_path: Path) -> None:
    changes = {**ANEW, "runtime.kind": "processes", "run.rounds": 24, "algorithm.buffer_capacity": 1600}
    result = train("muzero", tmp_path / "run", changes, off_policy_degree=3, callbacks=[KillAt(5, 9, 14)])
    assert len([e for e in read_events(result.run_dir / "events.jsonl") if e["kind"] == "worker_lost"]) == 3
    state = learner_state(result)
    assert state["num_collected"] == state["replay"]["items"]["valid"].sum()
    settings = state["replay"]["settings"]
    spec = step_spec(fit_environment(offbeat.load_config(result.run_dir / "config.yaml")))
    sizes = {name: settings[name] for name in ("after", "alpha", "eps")}
    replay = StreamReplay(spec, settings["num_streams"], settings["length"], **sizes)
    replay.load_state_dict(state["replay"])
    steps = replay.sample(np.random.default_rng(0), 2000).items
    obs, follows = steps["obs"], steps["valid"][:, :-1]
    moved = obs[:, :-1, 0] + 0.02 * obs[:, :-1, 1]  # the cart goes on as fast as it was
    np.testing.assert_allclose(obs[:, 1:, 0][follows], moved[follows], atol=1e-5)
    assert offbeat.replay_run(result.run_dir).identical


def test_targets_are_searched_anew_with_newer_weights(tmp_path: Path) -> None:
    result = train("muzero", tmp_path / "run", {**ANEW, "runtime.kind": "inline", "run.rounds": 12})
    state = learner_state(result)
    versions, refreshed = state["replay"]["versions"], state["replay"]["refreshed"]
    assert (refreshed >= versions).all() and (refreshed > versions).any()
    assert int(state["num_refreshed"]) >= 8 * 16
    last = read_rounds(result.run_dir / "events.jsonl")[-1]["metrics"]
    assert last["learn/target_age_mean"] < last["pace/avg_replayed_age"]


def test_a_game_for_two_is_trained_and_judged_against_somebody(tmp_path: Path) -> None:
    changes = {
        "env.id": "offbeat/Connect4-v0",
        "eval.env_kwargs": {"opponent": "minimax:1", "random_plies": 2},
        "runtime.kind": "inline",
        "run.rounds": 2,
        "algorithm.search.kind": "gumbel",
        "algorithm.discount": 1.0,
    }
    result = train("muzero", tmp_path / "run", changes)
    judged = [event for event in read_events(result.run_dir / "events.jsonl") if event["kind"] == "eval"][-1]
    won, lost = judged["metrics"]["eval/win_rate"], judged["metrics"]["eval/loss_rate"]
    assert lost > 0, "minimax takes what is open; who has not learned anything does not see it"
    assert won - lost == judged["metrics"]["eval/return_mean"]


def test_actions_may_be_continuous(tmp_path: Path) -> None:
    changes = {"env.id": "Pendulum-v1", "runtime.kind": "inline", "algorithm.search.num_samples": 5}
    result = train("muzero", tmp_path / "run", changes)
    replay = learner_state(result)["replay"]["items"]
    assert replay["candidates"].shape[2:] == (5, 1)
    assert np.abs(replay["actions"]).max() <= 1
    action = result.policy.act(np.zeros(3, np.float32))
    assert action.shape == (1,) and abs(action[0]) <= 2
