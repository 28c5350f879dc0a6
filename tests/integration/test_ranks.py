"""Learners of several ranks in real processes: same weights everywhere, and nothing left when one is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import offbeat
from offbeat import Callback, PerWorker, Pipeline, algorithms
from offbeat.algorithms.base import Algorithm
from offbeat.checkpoint import CheckpointManager
from offbeat.config.models import LearnerConfig, RuntimeConfig
from offbeat.errors import ConfigError, LearnerLost, TrainError
from offbeat.observe.callbacks import RoundInfo
from offbeat.observe.events import read_events
from offbeat.pipeline import Settings
from offbeat.roles import Ranks, WorkerContext
from offbeat.types import Batch

Run = Callable[..., Any]
TWO = {"learner.num_ranks": 2}
KINDS = ("inline", "processes")


def parameters(run_dir: Path) -> Any:
    learner = CheckpointManager(run_dir / "checkpoints").load().parts["learner"]
    return np.concatenate([array.ravel() for array in learner["parameters"].values()])


def test_two_ranks_give_the_same_weights_in_every_runtime(small_run: Run) -> None:
    results = [small_run({**TWO, "runtime.kind": kind}, name=kind) for kind in KINDS]
    assert len({result.digest for result in results}) == 1
    alone = small_run({"runtime.kind": "inline"}, name="alone")
    assert alone.digest != results[0].digest, "sums are made in another order"
    np.testing.assert_allclose(
        parameters(results[0].run_dir), parameters(alone.run_dir), rtol=1e-3, atol=1e-4
    )
    assert results[0].metrics["learn/loss"] == pytest.approx(alone.metrics["learn/loss"], rel=1e-2)


@pytest.mark.slow
def test_three_ranks_of_a_network_with_memory(small_run: Run) -> None:
    gru = {"algorithm.network.kind": "gru", "runtime.kind": "inline", "run.rounds": 3}
    alone = small_run(gru, name="alone")
    three = small_run({**gru, "learner.num_ranks": 3}, name="three")
    np.testing.assert_allclose(parameters(three.run_dir), parameters(alone.run_dir), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_an_asynchronous_run_with_ranks_can_be_resumed_and_repeated(small_run: Run) -> None:
    result = small_run({**TWO, "runtime.kind": "threads"}, off_policy_degree=1)
    offbeat.resume(result.run_dir, overrides={"run.rounds": 9})
    assert offbeat.replay_run(result.run_dir).identical


def test_a_run_can_be_resumed_with_another_number_of_ranks(small_run: Run) -> None:
    result = small_run({"runtime.kind": "inline"})
    offbeat.resume(result.run_dir, overrides={"run.rounds": 9, **TWO})
    assert offbeat.replay_run(result.run_dir).identical


# ---------------------------------------------------------------- ranks that fail


def ranks_of_this_process() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "offbeat.runtime.worker" in " ".join(child.cmdline())
    ]


class SignalRank(Callback):
    """Sends a signal to the rank, which is the only worker of an inline run, after a round."""

    def __init__(self, number: int, after: int = 4) -> None:
        self._number = number
        self._after = after
        self.sent_s = 0.0

    def on_round(self, info: RoundInfo) -> None:
        if info.version == self._after and not self.sent_s:
            (rank,) = ranks_of_this_process()
            os.kill(rank.pid, self._number)
            self.sent_s = time.monotonic()


INLINE = {**TWO, "runtime.kind": "inline", "run.max_restarts": 0, "checkpoint.interval_rounds": 2}


def test_a_killed_rank_ends_the_run_and_is_named(small_run: Run, tmp_path: Path) -> None:
    with pytest.raises(LearnerLost, match=r"lost a rank in round 4: learner_rank_1 \(pid \d+\) .*SIGKILL"):
        small_run(INLINE, callbacks=[SignalRank(signal.SIGKILL)])
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "health"]
    states = [event["state"] for event in events if event["component"] == "learner_rank_1"]
    assert states == ["up", "down"]


def test_a_run_goes_on_after_a_rank_was_killed(small_run: Run) -> None:
    settings = {**INLINE, "run.max_restarts": 1, "run.restart_delay_s": 0.0}
    undisturbed = small_run(settings, name="undisturbed")
    result = small_run(settings, callbacks=[SignalRank(signal.SIGKILL)])
    assert result.digest == undisturbed.digest


def test_a_stopped_rank_is_noticed_by_its_missing_signs_of_life(small_run: Run) -> None:
    settings = {**INLINE, "runtime.heartbeat_timeout_s": 1.5, "runtime.heartbeat_interval_s": 0.2}
    with pytest.raises(LearnerLost, match=r"round 4: learner_rank_1 .*no sign of life within .*1.5 s"):
        small_run(settings, callbacks=[SignalRank(signal.SIGSTOP)])


class Summing:
    """A learner that adds what its ranks computed, and whose rank 1 misbehaves in round 2 as it is told."""

    def __init__(self, ranks: Ranks, fault: str) -> None:
        import torch

        self._ranks, self._fault = ranks, fault
        self._w = torch.zeros(4, dtype=torch.float64)

    def train(self, batch: Batch) -> dict[str, float]:
        import torch

        data = torch.from_numpy(np.stack([segment.data for segment in batch.segments]))
        if self._ranks.rank == 1 and batch.version == 2:
            self._misbehave()
        total = data[self._ranks.rank :: self._ranks.size].sum(0)
        self._ranks.sum_(total)
        self._w += total + (1e-9 if self._fault == "differ" and self._ranks.rank == 1 else 0.0)
        return {"learn/loss": float(total.sum())}

    def _misbehave(self) -> None:
        if self._fault == "raise":
            raise ArithmeticError("only this rank cannot")
        if self._fault == "hang":
            time.sleep(600)
        if self._fault == "exit":
            os._exit(7)

    def weights(self) -> dict[str, Any]:
        return {"w": self._w.numpy().copy()}

    def state_dict(self) -> Any:
        return self.weights()

    def load_state_dict(self, state: Any) -> None:
        self._w[:] = self._w.new_tensor(state["w"])


def sum_up(fault: str, ranks: int = 2, runtime: Any = "threads", rounds: int = 5) -> Any:
    def collect(ticket: Any, weights: Any) -> Any:
        return np.full(4, float(ticket.number))

    def make(context: WorkerContext) -> Summing:
        if fault == "start" and context.ranks.rank == 1:
            raise OSError("this rank has no room")
        return Summing(context.ranks, fault)

    settings = Settings(
        learner=LearnerConfig(num_ranks=ranks, timeout_s=2.0),
        runtime=RuntimeConfig(kind=runtime, num_workers=2),
    )
    pipeline = Pipeline(collect=collect, train=PerWorker(make), segments_per_round=4, settings=settings)
    return pipeline.run(rounds=rounds)


def test_ranks_of_any_learner_add_up() -> None:
    report = sum_up("none", ranks=3)
    np.testing.assert_array_equal(report.weights["w"], np.full(4, sum(range(20))))


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (
            "raise",
            LearnerLost,
            r"(?s)round 2: learner_rank_1 raised:.*ArithmeticError: only this rank cannot",
        ),
        ("exit", LearnerLost, r"round 2: learner_rank_1 \(pid \d+\) exited with code 7"),
        ("hang", LearnerLost, r"(?s)round 2: learner_rank_1 did not answer within 2 s.*_misbehave"),
        ("differ", TrainError, r"came apart in round 0: learner_rank_1 has checksum"),
        ("start", TrainError, r"(?s)learner_rank_1 of the learner raised while starting:.*no room"),
    ],
)
def test_a_rank_that_misbehaves_ends_the_run(fault: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        sum_up(fault, ranks=3 if fault == "exit" else 2)


# ---------------------------------------------------------------- refusals


def test_a_plain_learner_cannot_have_ranks() -> None:
    settings = Settings(learner=LearnerConfig(num_ranks=2))
    with pytest.raises(ConfigError, match=r"learner.num_ranks above 1 needs .*train=PerWorker\(make\)"):
        Pipeline(collect=print, train=print, weights=dict, settings=settings)


def test_an_algorithm_without_ranks_is_refused_before_anything_is_written(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    ppo = algorithms.find("ppo")
    serial = Algorithm(
        "ppo", ppo.config_model, lambda config: replace(ppo.build(config), data_parallel=False)
    )
    monkeypatch.setattr(algorithms, "find", lambda name: serial)
    with pytest.raises(ConfigError, match=r"learner.num_ranks is 2, but the algorithm 'ppo' does not train"):
        small_run(TWO)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"trainer.nnodes": 2, "learner.num_ranks": 2}, "2 nodes need Ray: set runtime.kind to ray"),
        ({"rollout.nnodes": 3}, "3 nodes need Ray"),
        ({"trainer.nnodes": 2, "learner.num_ranks": 3, "runtime.kind": "ray"}, "set learner.num_ranks to 4"),
        ({"learner.backend": "nccl"}, "set trainer.device to cuda"),
        (
            {"trainer.device": "cuda", "trainer.n_gpus_per_node": 2, "learner.num_ranks": 3},
            "3 ranks on a node cannot share 2 GPUs evenly: set learner.num_ranks to 2",
        ),
        (
            {
                "trainer.device": "cuda",
                "trainer.n_gpus_per_node": 2,
                "learner.num_ranks": 4,
                "learner.backend": "nccl",
            },
            "a node has 4 ranks and 2 GPUs",
        ),
        ({"algorithm.device": "cuda"}, "did you mean trainer.device"),
    ],
)
def test_settings_that_cannot_run_together(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        offbeat.load_config("cartpole-ppo", settings)


def test_settings_of_several_nodes_and_gpus_that_fit() -> None:
    fitting = {"runtime.kind": "ray", "trainer.nnodes": 2, "trainer.n_gpus_per_node": 2}
    cuda = {**fitting, "trainer.device": "cuda", "learner.num_ranks": 4, "learner.backend": "nccl"}
    assert offbeat.load_config("cartpole-ppo", cuda).learner.num_ranks == 4
