"""Tickets say how far the run has come, the same wherever it runs and however often it is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat import Callback, Pipeline, Segment
from offbeat.observe.callbacks import RoundInfo
from offbeat.observe.events import read_schedule


class Remembers:
    """A learner whose weights hold what tickets said, so that a digest shows when one says another thing."""

    def __init__(self) -> None:
        self.told: list[list[int]] = []

    def train(self, batch: Any) -> dict[str, float]:
        self.told += [segment.data["told"].tolist() for segment in batch.segments]
        return {}

    def weights(self) -> Any:
        return {"told": np.array(self.told, np.int64).reshape(-1, 4)}

    def state_dict(self) -> Any:
        return self.weights()

    def load_state_dict(self, state: Any) -> None:
        self.told = state["told"].tolist()


def collect(ticket: Any, weights: Any) -> Segment:
    """Segments of 10 steps, and one of 13 now and then."""
    told = np.array([ticket.number, ticket.version, ticket.steps_collected, ticket.steps_trained])
    units = {"env_steps": 10 + 3 * (ticket.number % 4 == 0)}
    return Segment(ticket, {"told": told}, np.array([ticket.version]), units)


class EndAt(Callback):
    def on_start(self, info: Any) -> None:
        self.stop = info.stop

    def on_round(self, info: RoundInfo) -> None:
        if info.version == 3:
            self.stop("enough")


def run(
    directory: Path, degree: int, kind: str, mode: Any = "stream", **options: Any
) -> tuple[Any, Remembers]:
    learner = Remembers()
    pipeline = Pipeline(
        collect=collect,
        train=learner,
        off_policy_degree=degree,
        runtime=kind,  # type: ignore[arg-type]
        num_workers=2,
        segments_per_round=4,
        run_dir=directory,
        mode=mode,
        **options,
    )
    return pipeline, learner


def test_steps_are_those_of_the_rounds_trained_and_the_mean_of_the_rest(tmp_path: Path) -> None:
    pipeline, learner = run(tmp_path / "run", 0, "inline")
    pipeline.run(rounds=3)
    assert learner.told[:4] == [[number, 0, 0, 0] for number in range(4)]
    assert learner.told[4:8] == [[4, 1, 43, 43], [5, 1, 53, 43], [6, 1, 64, 43], [7, 1, 75, 43]]
    assert learner.told[8] == [8, 2, 86, 86]


@pytest.mark.parametrize("mode", ["stream", "replay"])
def test_every_runtime_tells_the_same_at_k_0_also_after_a_resume(mode: Any, tmp_path: Path) -> None:
    told = []
    for kind in ("inline", "threads", "processes"):
        pipeline, learner = run(tmp_path / kind, 0, kind, mode)
        pipeline.run(rounds=6)
        told.append(learner.told)
    pipeline, _ = run(tmp_path / "stopped", 0, "threads", mode, callbacks=[EndAt()])
    assert pipeline.run(rounds=6).version < 6
    pipeline, learner = run(tmp_path / "stopped", 0, "threads", mode)
    pipeline.resume(rounds=6)
    assert [*told, learner.told] == [told[0]] * 4
    assert told[0][-1][3] == 215


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_replay_tells_what_the_run_told(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    pipeline, _ = run(directory, 3, kind, callbacks=[EndAt()])
    pipeline.run(rounds=12)
    pipeline, learner = run(directory, 3, kind)
    pipeline.resume(rounds=12)
    report = run(directory, 3, kind)[0].replay()
    assert report.identical
    assert report.rounds == 12
    lines = [line for line in read_schedule(directory / "schedule.jsonl") if line["kind"] == "segment"]
    recorded = {line["ticket"]: [line["steps_collected"], line["steps_trained"]] for line in lines}
    assert {row[0]: row[2:] for row in learner.told} == {n: recorded[n] for n, *_ in learner.told}
    assert max(row[3] for row in learner.told) > 300
