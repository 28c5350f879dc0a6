"""Replays of pipelines that rolled back, were resumed, or have other weights or observers than recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat import PerWorker, Pipeline, Segment
from offbeat.config.models import (
    AsyncTrainingConfig,
    CheckpointConfig,
    ObserveConfig,
    RunSection,
    RuntimeConfig,
    TensorBoardConfig,
)
from offbeat.config.settings import Settings
from offbeat.observe import journal
from offbeat.observe.events import read_schedule
from offbeat.replay import StreamStore
from offbeat.run import restarts
from offbeat.types import Batch, Ticket

INLINE = Settings(
    runtime=RuntimeConfig(kind="inline", num_workers=2),
    checkpoint=CheckpointConfig(interval_rounds=2, keep=10),
)


class Collects:
    def __init__(self, context: Any) -> None:
        pass

    def collect(self, ticket: Ticket, weights: Any) -> Segment:
        x = np.random.default_rng(ticket.seed).normal(size=4) + weights["w"][0] * 0.1
        return Segment(ticket, {"x": x}, np.array([ticket.version]), {"env_steps": 1})

    def state_dict(self) -> Any:
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        pass


class Adds:
    """Adds up its data; ``loss_of`` gives the loss of a round."""

    def __init__(self, loss_of: Callable[[int], float] = lambda version: 1.0, start: float = 0.0) -> None:
        self.w = np.zeros(4) + start
        self.loss_of = loss_of

    def train(self, batch: Batch) -> Any:
        for segment in batch.segments:
            self.w = self.w + segment.data["x"]
        return {"learn/loss": self.loss_of(batch.version)}

    def weights(self) -> Any:
        return {"w": self.w.copy()}

    def state_dict(self) -> Any:
        return {"w": self.w.copy()}

    def load_state_dict(self, state: Any) -> None:
        self.w = state["w"].copy()


def pipeline(
    directory: Path, learner: Callable[[], Adds] = Adds, settings: Settings = INLINE, degree: int = 0
) -> Pipeline:
    return Pipeline(
        collect=PerWorker(Collects),
        train=PerWorker(lambda context: learner()),
        settings=settings,
        run_dir=directory,
        off_policy_degree=degree,
    )


@pytest.mark.parametrize("degree", [0, 2])
def test_replay_of_a_run_that_rolled_back_leaves_a_run_like_it(degree: int, tmp_path: Path) -> None:
    losses = {5: math.nan}
    settings = replace(INLINE, run=RunSection(on_nan="rollback", restart_delay_s=0.0))

    def at(directory: Path) -> Pipeline:
        return pipeline(directory, lambda: Adds(lambda version: losses.pop(version, 1.0)), settings, degree)

    result = at(tmp_path / "run").run(rounds=10)
    assert result.restarts == 1
    assert at(tmp_path / "run").replay(until=8, directory=tmp_path / "out").identical
    lines, recorded = (read_schedule(tmp_path / name / "schedule.jsonl") for name in ("out", "run"))
    expected = {one["ticket"]: one["rollbacks"] for one in recorded if one["kind"] == "segment"}
    found = {one["ticket"]: one["rollbacks"] for one in lines if one["kind"] == "segment"}
    assert found == {ticket: expected[ticket] for ticket in found}
    assert set(found.values()) == {0, 1}
    assert at(tmp_path / "out").replay().identical
    resumed = at(tmp_path / "out").resume(rounds=10)
    assert resumed.digest == result.digest or degree > 0
    assert at(tmp_path / "out").replay().identical


def test_losses_that_a_resumed_run_accepted_do_not_end_its_replay(tmp_path: Path) -> None:
    settings = replace(INLINE, run=RunSection(explosion_factor=10.0))

    def at_run() -> Pipeline:
        return pipeline(tmp_path, lambda: Adds(lambda version: 1.0 if version < 8 else 50.0), settings)

    at_run().run(rounds=8)
    at_run().resume(rounds=12)
    assert at_run().replay().identical


def test_other_weights_at_the_start_are_said_to_be_so(tmp_path: Path) -> None:
    pipeline(tmp_path).run(rounds=4)
    report = pipeline(tmp_path, lambda: Adds(start=1.0)).replay()
    assert not report.identical
    assert str(report.difference).startswith("the learner starts with other weights than recorded")


def test_a_difference_lies_in_the_rounds_since_weights_were_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(INLINE, async_training=AsyncTrainingConfig(weight_sync_interval=4))
    pipeline(tmp_path, settings=settings, degree=4).run(rounds=12)
    rounds = [one for one in read_schedule(tmp_path / "schedule.jsonl") if one["kind"] == "round"]
    changed = rounds[5]["tickets"][0]
    hand_over = StreamStore.next

    def changing(store: StreamStore, tickets: Any) -> Any:
        return tuple(
            replace(one, data={"x": one.data["x"] * 2}) if one.ticket.number == changed else one
            for one in hand_over(store, tickets)
        )

    monkeypatch.setattr(StreamStore, "next", changing)
    report = pipeline(tmp_path, settings=settings, degree=4).replay()
    assert not report.identical
    assert report.difference is not None
    assert report.difference.last is not None
    assert report.difference.round <= 5 <= report.difference.last
    assert changed in report.difference.tickets
    assert str(report.difference).startswith("one of rounds ")


def test_a_replay_starts_no_observers_outside_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline(tmp_path / "run").run(rounds=4)
    asked: list[bool] = []
    make_sinks = journal.make_sinks

    def noting(directory: Path, *, use_wandb: bool, **options: Any) -> Any:
        asked.append(use_wandb)
        return make_sinks(directory, use_wandb=False, **options)

    def serve(directory: Path, port: int) -> None:
        raise AssertionError("TensorBoard was started")

    monkeypatch.setattr(journal, "make_sinks", noting)
    monkeypatch.setattr(restarts, "TensorBoardServer", serve)
    observe = ObserveConfig(
        console="none", use_wandb=True, tensorboard=TensorBoardConfig(enabled=True, serve=True)
    )
    watched = pipeline(tmp_path / "run", settings=replace(INLINE, observe=observe))
    assert watched.replay(until=4, directory=tmp_path / "out").identical
    assert asked == [False]
