"""Learners that crash, diverge or stand still."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat import Batch, Callback, PerWorker, Pipeline, Ticket
from offbeat.config.models import AsyncTrainingConfig, CheckpointConfig, RunSection, RuntimeConfig
from offbeat.errors import DivergedError, StallError, TrainError
from offbeat.observe.callbacks import FinishInfo
from offbeat.observe.events import read_events, read_rounds
from offbeat.pipeline import Settings

CHECKPOINTS = CheckpointConfig(interval_rounds=2, interval_s=None)


class Sum:
    """A learner that adds up what it is given; ``fault(version)`` may raise or say what its loss is."""

    def __init__(self, fault: Callable[[int], float] = lambda version: 0.0) -> None:
        self._fault = fault
        self._total = np.zeros(1)

    def train(self, batch: Batch) -> dict[str, float]:
        loss = self._fault(batch.version)
        self._total = self._total + sum(float(s.data["x"][0]) for s in batch.segments)
        return {"learn/loss": loss}

    def weights(self) -> dict[str, Any]:
        return {"total": self._total.copy()}

    def state_dict(self) -> Any:
        return {"total": self._total.copy()}

    def load_state_dict(self, state: Any) -> None:
        self._total = state["total"].copy()


class Draw:
    """A collector with a state that starts at random and goes on."""

    def __init__(self, seed: int) -> None:
        self._x = np.array([seed % 1000], np.float64)

    def collect(self, ticket: Ticket, weights: Any) -> Any:
        from offbeat import Segment

        self._x = self._x + (ticket.seed % 7) + weights["total"] * 1e-3
        return Segment(ticket, {"x": self._x.copy()}, np.array([ticket.version]), {"env_steps": 1})

    def state_dict(self) -> Any:
        return {"x": self._x.copy()}

    def load_state_dict(self, state: Any) -> None:
        self._x = state["x"].copy()


def once(path: Path, version: int, act: Callable[[], float]) -> Callable[[int], float]:
    """Do something in one round, once for all learners of a run."""

    def fault(at: int) -> float:
        if at == version and not path.exists():
            path.touch()
            return act()
        return 0.0

    return fault


def pipeline(
    run_dir: Path | None,
    fault: Callable[[int], float],
    run: RunSection | None = None,
    *,
    runtime: Any = "threads",
    degree: int = 0,
    callbacks: Any = (),
) -> Pipeline:
    settings = Settings(
        async_training=AsyncTrainingConfig(off_policy_degree=degree),
        runtime=RuntimeConfig(kind=runtime, num_workers=2),
        checkpoint=CHECKPOINTS,
        run=run or RunSection(restart_delay_s=0.0),
    )
    return Pipeline(
        collect=PerWorker(lambda context: Draw(context.seed)),
        train=PerWorker(lambda context: Sum(fault)),
        settings=settings,
        run_dir=run_dir,
        callbacks=callbacks,
    )


def crash() -> float:
    raise RuntimeError("the learner's driver reset itself")


class Ends(Callback):
    """Keeps how each start of a run ended."""

    def __init__(self) -> None:
        self.ends: list[FinishInfo] = []

    def on_finish(self, info: FinishInfo) -> None:
        self.ends.append(info)


@pytest.mark.parametrize("runtime", ["inline", "threads", "processes"])
def test_learner_that_crashes_once_goes_on_from_its_checkpoint(runtime: str, tmp_path: Path) -> None:
    healthy = pipeline(tmp_path / "healthy", lambda version: 0.0, runtime=runtime).run(12)
    ends = Ends()
    fault = once(tmp_path / "crashed", 7, crash)
    report = pipeline(tmp_path / "run", fault, runtime=runtime, callbacks=[ends]).run(12)
    assert report.restarts == 1
    assert report.version == 12
    assert report.digest == healthy.digest, "at k = 0 a crash changes nothing"
    assert [loss.component for loss in report.losses] == ["learner"]
    events = read_events(tmp_path / "run" / "events.jsonl")
    (restart,) = [event for event in events if event["kind"] == "restart"]
    assert (restart["version"], restart["attempt"]) == (6, 1)
    assert "the learner's driver reset itself" in restart["reason"]
    assert [end.restart is None for end in ends.ends] == [False, True]
    assert len(read_rounds(tmp_path / "run" / "events.jsonl")) == 12
    assert pipeline(tmp_path / "run", fault, runtime=runtime).replay().identical


def test_learner_that_raises_in_the_same_round_again_ends_the_run(tmp_path: Path) -> None:
    tries: list[int] = []

    def fault(version: int) -> float:
        if version == 7:
            tries.append(version)
            crash()
        return 0.0

    with pytest.raises(TrainError, match="the learner's driver reset itself"):
        pipeline(tmp_path / "run", fault).run(12)
    assert len(tries) == 2


@pytest.mark.parametrize("kept", [True, False])
def test_without_a_checkpoint_or_a_budget_the_error_comes_at_once(kept: bool, tmp_path: Path) -> None:
    run = RunSection(max_restarts=0 if kept else 3, restart_delay_s=0.0)
    fault = once(tmp_path / "crashed", 7 if kept else 1, crash)
    with pytest.raises(TrainError, match="driver reset"):
        pipeline(tmp_path / "run", fault, run).run(12)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_nan_halts_the_run_and_is_never_saved(loss: float, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"(?s)round 7 diverged: learn/loss is.*run.on_nan=rollback"):
        pipeline(tmp_path / "run", lambda version: loss if version == 7 else 0.0).run(12)
    saved = [
        e["version"] for e in read_events(tmp_path / "run" / "events.jsonl") if e["kind"] == "checkpoint"
    ]
    assert max(saved) == 6


@pytest.mark.parametrize("degree", [0, 2])
def test_rollback_goes_back_and_collects_other_samples(degree: int, tmp_path: Path) -> None:
    run = RunSection(on_nan="rollback", restart_delay_s=0.0)
    fault = once(tmp_path / "diverged", 7, lambda: float("nan"))
    report = pipeline(tmp_path / "run", fault, run, degree=degree).run(12)
    healthy = pipeline(tmp_path / "healthy", lambda version: 0.0, degree=0).run(12)
    assert report.version == 12 and report.restarts == 1
    assert report.max_staleness <= degree
    assert report.digest != healthy.digest, "the samples after the rollback are others"
    (event,) = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["kind"] == "rollback"]
    assert event["version"] == 6
    assert pipeline(tmp_path / "run", fault, run, degree=degree).replay().identical


def test_run_that_keeps_diverging_goes_further_back_and_ends(tmp_path: Path) -> None:
    run = RunSection(on_nan="rollback", restart_delay_s=0.0, max_restarts=2)
    with pytest.raises(DivergedError):
        pipeline(tmp_path / "run", lambda version: float("nan") if version == 7 else 0.0, run).run(12)
    back = [e["version"] for e in read_events(tmp_path / "run" / "events.jsonl") if e["kind"] == "rollback"]
    assert back == [6, 4]


def test_exploding_loss_counts_as_divergence(tmp_path: Path) -> None:
    run = RunSection(explosion_factor=100.0)
    with pytest.raises(DivergedError, match=r"run.explosion_factor"):
        pipeline(tmp_path / "run", lambda version: 1e6 if version == 9 else 1.0, run).run(12)


def test_stalled_run_tells_who_waits_for_whom_and_where_it_stands(tmp_path: Path) -> None:
    def sleep_in_training(version: int) -> float:
        if version == 3:
            time.sleep(2.0)
        return 0.0

    stalled = pipeline(tmp_path / "run", sleep_in_training)
    limits = RuntimeConfig(kind="threads", num_workers=2, train_timeout_s=0.3)
    stalled.settings = Settings(runtime=limits, checkpoint=CHECKPOINTS)
    with pytest.raises(StallError) as caught:
        stalled.run(12)
    text = str(caught.value)
    assert "round 3 waits for learner since" in text
    assert "runtime.train_timeout_s" in text
    assert "sleep_in_training" in text, "the stack of the learner is there"
    (event,) = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["kind"] == "stall"]
    assert event["waits"][0]["who"] == "round 3"
    assert any("sleep_in_training" in stack for stack in event["stacks"].values())


def test_health_of_every_part_is_in_the_events(tmp_path: Path) -> None:
    pipeline(tmp_path / "run", lambda version: 0.0, runtime="processes").run(4)
    told: dict[str, list[str]] = {}
    for event in read_events(tmp_path / "run" / "events.jsonl"):
        if event["kind"] == "health":
            told.setdefault(event["component"], []).append(event["state"])
    assert told == {
        "collector_0": ["starting", "up", "stopped"],
        "collector_1": ["starting", "up", "stopped"],
        "learner": ["up", "stopped"],
    }
