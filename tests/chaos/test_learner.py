"""Learners that crash, diverge or stand still."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat import Batch, Callback, PerWorker, Pipeline, Ticket
from offbeat.config.models import AsyncTrainingConfig, CheckpointConfig, RunSection, RuntimeConfig
from offbeat.errors import DivergedError, StallError, TrainError
from offbeat.observe.callbacks import FinishInfo, RoundInfo, RunInfo
from offbeat.observe.events import read_events, read_rounds
from offbeat.pipeline import Settings

Run = Callable[..., Any]
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
    checkpoint: CheckpointConfig | None = None,
    train_timeout_s: float = 3600.0,
) -> Pipeline:
    settings = Settings(
        async_training=AsyncTrainingConfig(off_policy_degree=degree),
        runtime=RuntimeConfig(kind=runtime, num_workers=2, train_timeout_s=train_timeout_s),
        checkpoint=checkpoint or CHECKPOINTS,
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
def test_rollback_goes_back_and_can_be_replayed(degree: int, tmp_path: Path) -> None:
    run = RunSection(on_nan="rollback", restart_delay_s=0.0)
    fault = once(tmp_path / "diverged", 7, lambda: float("nan"))
    report = pipeline(tmp_path / "run", fault, run, degree=degree).run(12)
    assert report.version == 12 and report.restarts == 1
    assert report.max_staleness <= degree
    (event,) = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["kind"] == "rollback"]
    assert event["version"] == 6
    assert pipeline(tmp_path / "run", fault, run, degree=degree).replay().identical


def diverge_at_7(version: int) -> float:
    return float("nan") if version == 7 else 0.0


def rollbacks(run_dir: Path) -> list[int]:
    """The versions that a run went back to."""
    return [e["version"] for e in read_events(run_dir / "events.jsonl") if e["kind"] == "rollback"]


def test_run_that_keeps_diverging_goes_further_back_and_ends(tmp_path: Path) -> None:
    run = RunSection(on_nan="rollback", restart_delay_s=0.0, max_restarts=2)
    with pytest.raises(DivergedError):
        pipeline(tmp_path / "run", diverge_at_7, run).run(12)
    assert rollbacks(tmp_path / "run") == [6, 4]


def test_going_further_back_passes_over_damaged_checkpoints(tmp_path: Path) -> None:
    directory = tmp_path / "run"

    class Damage(Callback):
        """Cuts the checkpoint before the newest when the run goes back for the first time."""

        def on_finish(self, info: FinishInfo) -> None:
            manifest = directory / "checkpoints" / "step_00000004" / "manifest.json"
            if manifest.exists():
                manifest.write_bytes(manifest.read_bytes()[:20])

    run = RunSection(on_nan="rollback", restart_delay_s=0.0, max_restarts=2)
    kept = CheckpointConfig(interval_rounds=2, interval_s=None, keep=3)
    damaged = pipeline(directory, diverge_at_7, run, callbacks=[Damage()], checkpoint=kept)
    with pytest.raises(DivergedError):
        damaged.run(12)
    assert rollbacks(directory) == [6, 2]


@pytest.mark.parametrize("plain", [True, False])
def test_every_rollback_collects_other_samples(plain: bool, tmp_path: Path) -> None:
    """Also from the same checkpoint again, and from functions that know only their ticket's seed."""
    drawn: list[float] = []

    class Diverges(Sum):
        def train(self, batch: Batch) -> dict[str, float]:
            if batch.version == 3:
                drawn.append(sum(float(segment.data["x"][0]) for segment in batch.segments))
                return {"learn/loss": float("nan")}
            return super().train(batch)

    def collect(ticket: Ticket, weights: Any) -> Any:
        return {"x": np.random.default_rng(ticket.seed).random(1)}

    settings = Settings(
        runtime=RuntimeConfig(kind="inline", num_workers=2),
        checkpoint=CHECKPOINTS,
        run=RunSection(on_nan="rollback", restart_delay_s=0.0, max_restarts=3),
    )
    role = collect if plain else PerWorker(lambda context: Draw(context.seed))
    run = Pipeline(
        collect=role,
        train=PerWorker(lambda context: Diverges()),
        settings=settings,
        run_dir=tmp_path / "run",
    )
    with pytest.raises(DivergedError):
        run.run(6)
    assert len(set(drawn)) == 4, "each try trains on samples of its own"


def test_stop_that_was_heard_is_not_undone_by_a_restart(tmp_path: Path) -> None:
    def stop_and_crash() -> float:
        run.stop("enough")
        time.sleep(0.6)  # the driver hears of it while this round is trained
        return crash()

    run = pipeline(tmp_path / "run", once(tmp_path / "crashed", 7, stop_and_crash))
    with pytest.raises(TrainError):
        run.run(12)
    assert not [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["kind"] == "restart"]


def test_stop_that_comes_during_a_restart_is_heard(tmp_path: Path) -> None:
    class StopBetween(Callback):
        def on_finish(self, info: FinishInfo) -> None:
            if info.restart is not None:
                run.stop("enough")

    settings = RunSection(restart_delay_s=30.0)
    fault = once(tmp_path / "crashed", 7, crash)
    run = pipeline(tmp_path / "run", fault, settings, callbacks=[StopBetween()])
    report = run.run(12)
    assert report.reason == "enough"
    assert report.restarts == 1 and report.version < 12


def test_dial_that_was_turned_stays_turned_after_a_restart(tmp_path: Path) -> None:
    class Turn(Callback):
        def on_start(self, info: RunInfo) -> None:
            self._turn = info.turn

        def on_round(self, info: RoundInfo) -> None:
            if info.version == 7:
                self._turn(0)

    fault = once(tmp_path / "crashed", 9, crash)
    settings_run = RunSection(restart_delay_s=0.0)
    saves = CheckpointConfig(interval_rounds=6, interval_s=None)
    turned = pipeline(tmp_path / "run", fault, settings_run, degree=3, callbacks=[Turn()], checkpoint=saves)
    assert turned.run(20).restarts == 1
    last = read_rounds(tmp_path / "run" / "events.jsonl")[-1]
    assert last["metrics"]["pace/off_policy_degree"] == 0


def test_settings_files_follow_a_run_that_goes_back(small_run: Run, tmp_path: Path) -> None:
    """A run resumed with other settings whose newest checkpoint is then lost is still repeatable."""
    settings = {"runtime.kind": "inline", "checkpoint.interval_rounds": 3, "checkpoint.keep": 4}
    result = small_run(settings, rounds=9)
    offbeat.resume(result.run_dir, overrides={"run.rounds": 12, "async_training.off_policy_degree": 1})
    for version in (9, 12):
        manifest = result.run_dir / "checkpoints" / f"step_{version:08d}" / "manifest.json"
        manifest.write_bytes(b"{}")
    again = offbeat.resume(result.run_dir)
    assert again.rounds == 12
    assert [path.name for path in result.run_dir.glob("config-until-*")] == ["config-until-00000006.yaml"]
    assert offbeat.replay_run(result.run_dir).identical


def test_how_to_recover_can_be_changed_on_resume(small_run: Run) -> None:
    result = small_run({"runtime.kind": "inline"})
    changed = {"run.rounds": 8, "run.on_nan": "rollback", "run.max_restarts": 1, "run.explosion_factor": 50.0}
    assert offbeat.resume(result.run_dir, overrides=changed).rounds == 8


def test_exploding_loss_counts_as_divergence(tmp_path: Path) -> None:
    run = RunSection(explosion_factor=100.0)
    with pytest.raises(DivergedError, match=r"run.explosion_factor"):
        pipeline(tmp_path / "run", lambda version: 1e6 if version == 9 else 1.0, run).run(12)


def test_stalled_run_tells_who_waits_for_whom_and_where_it_stands(tmp_path: Path) -> None:
    def sleep_in_training(version: int) -> float:
        if version == 3:
            time.sleep(2.0)
        return 0.0

    stalled = pipeline(tmp_path / "run", sleep_in_training, train_timeout_s=0.3)
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
