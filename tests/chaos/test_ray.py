"""Faults on Ray: killed, stopped and hanging actors, a lost node."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import offbeat
from offbeat import PerWorker, Pipeline
from offbeat.config.models import AsyncTrainingConfig, EvalConfig, RuntimeConfig
from offbeat.observe.callbacks import RoundInfo
from offbeat.observe.events import read_events, read_rounds
from offbeat.pipeline import Settings
from tests.chaos import test_wide_workers as wide
from tests.chaos.test_faults import faulty, lost, start, wait_for_rounds

ray = pytest.importorskip("ray")

Run = Callable[..., Any]
RAY = {"runtime.kind": "ray"}


def actors(kind: str) -> list[psutil.Process]:
    """Processes of actors of a kind, by what Ray calls them."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.name().startswith(f"ray::{kind}"[:15])]


class Strike(offbeat.Callback):
    """Sends a signal to an actor of a kind, once, after some round; waits for the actor if it must."""

    def __init__(self, kind: str, number: signal.Signals, after: int = 3) -> None:
        self._kind, self._number, self._after = kind, number, after
        self.pid: int | None = None

    def on_round(self, info: RoundInfo) -> None:
        if info.version == self._after and self.pid is None:
            give_up_s = time.monotonic() + 60
            while not (found := actors(self._kind)):
                assert time.monotonic() < give_up_s, f"no {self._kind} came up"
                time.sleep(0.01)
            self.pid = found[0].pid
            os.kill(self.pid, self._number)


def notices(run_dir: Path) -> list[str]:
    return [event["text"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "notice"]


def states(run_dir: Path, component: str) -> list[str]:
    events = read_events(run_dir / "events.jsonl")
    return [e["state"] for e in events if e["kind"] == "health" and e["component"] == component]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_lost_collector_changes_nothing(number: signal.Signals, small_run: Run, shared_ray: None) -> None:
    healthy = small_run({"runtime.kind": "inline"}, name="healthy")
    strike = Strike("CollectorActor", number)
    settings = {**RAY, "runtime.heartbeat_timeout_s": 4.0, "runtime.heartbeat_interval_s": 0.2}
    result = small_run(settings, callbacks=[strike])
    (event,) = lost(result.run_dir)
    assert f"(pid {strike.pid} on" in event["reason"]
    assert ("ended unexpectedly" if number == signal.SIGKILL else "no sign of life") in event["reason"]
    assert event["restored"]
    assert result.digest == healthy.digest


@pytest.mark.slow
def test_hanging_collector_is_named_killed_and_replaced(
    small_run: Run, tmp_path: Path, shared_ray: None
) -> None:
    hangs = faulty("Hang", at_step=40, once=str(tmp_path / "happened"))
    settings = {**RAY, **hangs, "async_training.generation_timeout": 2.0}
    result = small_run(settings, off_policy_degree=1)
    (event,) = lost(result.run_dir)
    assert "hung: ticket" in event["reason"]
    assert "_hang" in event["reason"], "the report has the stack of the environment"
    assert offbeat.replay_run(result.run_dir).identical


def test_run_survives_the_loss_of_its_learner(small_run: Run, shared_ray: None) -> None:
    reference = small_run({"runtime.kind": "inline"}, rounds=12, name="reference")
    strike = Strike("LearnerActor", signal.SIGKILL, after=7)
    settings = {**RAY, "checkpoint.interval_rounds": 3, "run.restart_delay_s": 0.0}
    result = small_run(settings, rounds=12, callbacks=[strike])
    assert strike.pid is not None
    assert "down" in states(result.run_dir, "learner")
    assert result.digest == reference.digest


@pytest.mark.slow
def test_killed_evaluator_never_stops_training(small_run: Run, shared_ray: None) -> None:
    strike = Strike("EvaluatorActor", signal.SIGKILL, after=6)
    settings = {
        **RAY,
        "async_training.enable_async_eval": True,
        "eval.interval_rounds": 5,
    }
    result = small_run(settings, rounds=20, callbacks=[strike])
    assert result.rounds == 20
    assert [text for text in notices(result.run_dir) if re.search("evaluator.*ended unexpectedly", text)]
    health = states(result.run_dir, "evaluator")
    assert health[-3:] == ["starting", "up", "stopped"], "the next one has a new actor"
    assert "down" in health
    assert result.eval_return is not None
    assert not lost(result.run_dir)


@pytest.mark.parametrize("how", ["sleeps", "computes"])
def test_work_that_holds_the_gil_is_found_killed_and_named(
    how: str, tmp_path: Path, shared_ray: None
) -> None:
    collect = partial(wide.Hangs, how=how, marker=tmp_path / "happened")
    limits = {"generation_timeout": 2.0, "heartbeat_interval_s": 0.2}
    (reason,) = wide.run("ray", collect, 20, **limits).reasons
    assert "hung: ticket 0 took more than 2 s (async_training.generation_timeout)" in reason
    found = re.search(r"pid (\d+) on", reason)
    assert found is not None and not psutil.pid_exists(int(found[1]))


def test_sleep_that_holds_the_gil_is_a_missing_sign_of_life(tmp_path: Path, shared_ray: None) -> None:
    collect = partial(wide.Hangs, how="sleeps", marker=tmp_path / "happened")
    (reason,) = wide.run("ray", collect, 20, heartbeat_timeout_s=2.0, heartbeat_interval_s=0.2).reasons
    assert "no sign of life" in reason


def test_collector_whose_tickets_all_wait_for_tools_is_not_killed(shared_ray: None) -> None:
    wide.test_collector_whose_tickets_all_wait_for_tools_is_not_killed("ray")


class Dies:
    """An evaluator that takes its process along, the first time."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def evaluate(self, weights: Any, seed: int) -> dict[str, float]:
        if not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"eval/return_mean": 1.0, "eval/pid": float(os.getpid())}


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
def test_evaluator_that_dies_at_work_costs_one_evaluation(
    is_async: bool, tmp_path: Path, shared_ray: None
) -> None:
    settings = Settings(
        async_training=AsyncTrainingConfig(enable_async_eval=is_async),
        eval=EvalConfig(interval_rounds=3),
        runtime=RuntimeConfig(kind="ray", num_workers=1),
    )
    report = Pipeline(
        collect=lambda ticket, weights: {"x": 1.0},
        train=lambda batch: {"learn/pid": float(os.getpid())},
        weights=lambda: 0,
        evaluate=PerWorker(lambda context: Dies(tmp_path / "died")),
        settings=settings,
        run_dir=tmp_path / "run",
    ).run(rounds=6)
    assert report.version == 6
    assert [text for text in notices(tmp_path / "run") if re.search("evaluator.*ended unexpectedly", text)]
    assert report.eval_metrics["eval/version"] == 6, "the next one has a new actor"
    assert report.eval_metrics["eval/pid"] != report.metrics["learn/pid"]
    assert "down" not in states(tmp_path / "run", "learner")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster of two nodes on this machine; a run joins it by its address."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        found.second = found.add_node(num_cpus=2)
        yield found
    finally:
        found.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("degree", [0, 3])
def test_run_survives_the_loss_of_a_node(degree: int, cluster: Any, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = (f"runtime.ray.address={cluster.address}", "runtime.kind=ray", "rollout.nnodes=2")
    dial = f"async_training.off_policy_degree={degree}"
    process = start(directory, *settings, dial, "run.rounds=150")
    wait_for_rounds(directory, 20, process)
    cluster.remove_node(cluster.second, allow_graceful=False)
    assert process.wait(timeout=90) == 0
    assert {event["lane"] for event in lost(directory)} == {1}
    rounds = read_rounds(directory / "events.jsonl")
    assert len(rounds) == 150
    assert max(record["metrics"]["pace/max_sample_age"] for record in rounds) <= degree
    assert offbeat.replay_run(directory).identical


@pytest.mark.slow
def test_ranks_on_two_nodes_train_as_on_one_and_are_lost_with_their_node(
    cluster: Any, small_run: Run, tmp_path: Path
) -> None:
    ranks = {"learner.num_ranks": 2, "run.rounds": 40}
    reference = small_run({**ranks, "runtime.kind": "inline"}, name="reference")
    settings = ("learner.num_ranks=2", "trainer.nnodes=2", "runtime.kind=ray")
    directory = tmp_path / "run"
    address = f"runtime.ray.address={cluster.address}"
    process = start(directory, *settings, address, "run.rounds=40", "checkpoint.interval_rounds=5")
    wait_for_rounds(directory, 12, process)
    cluster.add_node(num_cpus=2)
    cluster.remove_node(cluster.second, allow_graceful=False)
    assert process.wait(timeout=120) == 0
    assert "down" in states(directory, "learner_rank_1")
    assert offbeat.digest(directory) == reference.digest


@pytest.mark.slow
def test_killed_driver_takes_its_ray_along(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = start(directory, "runtime.kind=ray", "run.rounds=100000")
    wait_for_rounds(directory, 5, process)
    family = psutil.Process(process.pid).children(recursive=True)
    for victim in [psutil.Process(process.pid), *[p for p in family if "offbeat" in " ".join(p.cmdline())]]:
        victim.kill()
    process.wait(timeout=10)
    workers = [member for member in family if "Actor" in member.name()]
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive, "actors end with their driver"
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive, "Ray's own agents wait a minute for their cluster before they end"
