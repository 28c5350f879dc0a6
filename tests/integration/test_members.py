"""Collectors that join and leave a run, on every runtime; the run is repeated afterwards."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat import PerWorker, Pipeline
from offbeat.observe.callbacks import Callback, RoundInfo
from offbeat.roles import WorkerContext
from offbeat.types import Batch, Metrics, Segment, Ticket

ROUNDS = 100_000


class Sums:
    """Adds up what was collected, so that each ticket and its version leave a trace."""

    def __init__(self) -> None:
        self.w = np.zeros(3)

    def train(self, batch: Batch) -> Metrics:
        for segment in batch.segments:
            self.w = 0.9 * self.w + segment.data["x"]
        return {}

    def weights(self) -> Any:
        return {"w": self.w.copy()}

    def state_dict(self) -> Any:
        return {"w": self.w.copy()}

    def load_state_dict(self, state: Any) -> None:
        self.w = state["w"].copy()


class Draws:
    """Draws numbers; the third collector is killed while it joins, where it has a process of its own."""

    def __init__(self, context: WorkerContext, killed: Path | None) -> None:
        if killed is not None and context.collector == 2 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def collect(self, ticket: Ticket, weights: Any) -> Any:
        x = 0.1 * weights["w"] + np.random.default_rng(ticket.seed).normal(size=3)
        return Segment(ticket, {"x": x}, np.array([ticket.version]), {"env_steps": 1})


class Members(Callback):
    """Has two collectors join, then two leave, then ends the run; each once the step before is done."""

    def __init__(self) -> None:
        self.pipeline: Pipeline
        self.steps = iter(((2, self.join), (4, self.leave), (2, self.stop)))
        self.next = next(self.steps)
        self.rounds = 0

    def join(self) -> None:
        self.pipeline.add_collector(2)

    def leave(self) -> None:
        self.pipeline.remove_collector(0)
        self.pipeline.remove_collector()

    def stop(self) -> None:
        self.pipeline.stop("done")

    def on_round(self, info: RoundInfo) -> None:
        num_alive, step = self.next
        self.rounds += info.metrics["system/workers_alive"] == num_alive
        if self.rounds == 10:
            self.rounds, self.next = 0, next(self.steps, (-1, step))
            step()


def run_of(kind: str, directory: Path, killed: Path | None = None, *callbacks: Callback) -> Pipeline:
    return Pipeline(
        collect=PerWorker(partial(Draws, killed=killed)),
        train=Sums(),
        off_policy_degree=2,
        segments_per_round=3,
        runtime=kind,  # type: ignore[arg-type]
        num_workers=2,
        run_dir=directory,
        callbacks=callbacks,
    )


@pytest.mark.parametrize("kind", ["inline", "threads", "processes", "ray"])
def test_collectors_join_and_leave_under_the_same_bound(kind: str, tmp_path: Path) -> None:
    members = Members()
    killed = tmp_path / "killed" if kind in ("processes", "ray") else None
    members.pipeline = pipeline = run_of(kind, tmp_path / "run", killed, members)
    report = pipeline.run(ROUNDS)
    assert report.stopped and report.max_staleness <= 2
    assert [loss.component for loss in report.losses] == (["collector_2"] if killed else [])
    records = [json.loads(line) for line in (tmp_path / "run" / "schedule.jsonl").read_text().splitlines()]
    lanes = [record["lane"] for record in records if record["kind"] == "segment"]
    assert set(lanes) == {0, 1, 2, 3}
    assert set(lanes[-6:]) <= {1, 2}, "those that left collect no longer"
    repeated = run_of("inline", tmp_path / "run").replay()
    assert repeated.identical, repeated.difference
