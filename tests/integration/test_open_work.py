"""Begun work of real collectors: asked for at checkpoints, given back with lost tickets."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat import PerWorker, Pipeline
from offbeat.checkpoint import CheckpointManager
from offbeat.config.models import CheckpointConfig
from offbeat.config.settings import Settings
from offbeat.observe.callbacks import Callback, CheckpointInfo, RoundInfo
from offbeat.observe.events import read_events
from offbeat.types import Batch, Piece, Progress, Segment, Ticket

KINDS = ("inline", "threads", "processes")
PIECES = 4
"""Pieces of work that a segment takes at least."""


class Counts:
    """Counts to `PIECES` for each ticket that it holds; says with which number it began."""

    capacity = 8

    def __init__(self, context: Any) -> None:
        self.counts: dict[Ticket, list[int]] = {}
        self.version = -1

    def accept(self, ticket: Ticket, begun: Any = None, script: Sequence[Piece] = ()) -> None:
        self.counts[ticket] = [0, 0] if begun is None else [begun["count"]] * 2

    def load(self, version: int, weights: Any) -> None:
        self.version = version

    def advance(self) -> Progress:
        time.sleep(0.002)
        for count in self.counts.values():
            count[1] += 1
        done = [ticket for ticket, (_, count) in self.counts.items() if count >= self.needed(ticket.number)]
        made = [self._segment(ticket) for ticket in done]
        return Progress(made, busy_s=0.002, idle=not self.counts)

    def needed(self, ticket: int) -> float:
        return PIECES * (1 + ticket % 9)

    def _segment(self, ticket: Ticket) -> Segment:
        first, _ = self.counts.pop(ticket)
        return Segment(ticket, {"first": np.array([first])}, np.array([self.version]), {"env_steps": 1})

    def cut(self, tickets: Sequence[int]) -> None:
        raise AssertionError

    def open_work(self) -> Mapping[int, Any]:
        return {ticket.number: {"count": count} for ticket, (_, count) in self.counts.items()}

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Sums:
    """Adds up with which numbers its segments began."""

    def __init__(self, context: Any) -> None:
        self.first = 0

    def train(self, batch: Batch) -> Any:
        self.first += sum(int(segment.data["first"][0]) for segment in batch.segments)
        return {"learn/first": float(self.first)}

    def weights(self) -> Any:
        return {"w": np.zeros(3)}

    def state_dict(self) -> Any:
        return {"first": self.first}

    def load_state_dict(self, state: Any) -> None:
        self.first = state["first"]


def pipeline(kind: str, run_dir: Path, collect: Any = Counts, **more: Any) -> Pipeline:
    return Pipeline(
        collect=PerWorker(collect),
        train=PerWorker(Sums),
        runtime=kind,  # type: ignore[arg-type]
        off_policy_degree=2,
        num_workers=2,
        segments_per_round=4,
        run_dir=run_dir,
        settings=Settings(checkpoint=CheckpointConfig(interval_rounds=1, interval_s=None)),
        **more,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_continues_what_was_begun(kind: str, tmp_path: Path) -> None:
    class NeverEnds(Counts):
        def needed(self, ticket: int) -> float:
            return math.inf if ticket >= 40 else super().needed(ticket)

    class Stop(Callback):
        def on_round(self, info: RoundInfo) -> None:
            if info.version == 10:  # there is nothing to train until ticket 40 ends, which was issued by now
                stopping.stop()

    stopping = pipeline(kind, tmp_path, NeverEnds, callbacks=[Stop()])
    assert stopping.run(rounds=20).metrics["learn/first"] == 0.0
    saved = CheckpointManager(tmp_path / "checkpoints").load()
    lost = {row[0] for row in saved.parts["coordinator"]["ledger"]["running"]}
    assert {40, 41, 42, 43} <= set(saved.parts["work"]) <= lost
    report = pipeline(kind, tmp_path).resume(rounds=20)
    begun = sum(tree["count"] for tree in saved.parts["work"].values())
    assert report.metrics["learn/first"] == begun
    given = [report.metrics.get(f"rollout/begun_tickets_{name}", 0) for name in ("kept", "cut_back")]
    assert sum(given) == len(saved.parts["work"])


@pytest.mark.parametrize("kind", KINDS)
def test_killed_collector_leaves_its_begun_work_to_the_next(kind: str, tmp_path: Path) -> None:
    class RaisesOnce(Counts):
        """Raises when it holds a ticket whose work it has given."""

        given: Mapping[int, Any] = {}

        def open_work(self) -> Mapping[int, Any]:
            self.given = super().open_work()
            return self.given

        def advance(self) -> Progress:
            held = {ticket.number for ticket in self.counts}
            if not flag.exists() and any(
                tree["count"] for number, tree in self.given.items() if number in held
            ):
                flag.touch()
                raise RuntimeError("once")
            return super().advance()

    flag = tmp_path / "raised"
    report = pipeline(kind, tmp_path / "run", RaisesOnce).run(rounds=20)
    assert flag.exists() and report.counts.trained == 80
    assert report.metrics["learn/first"] > 0


def test_busy_serial_collector_does_not_delay_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint is written while one of two collectors is busy, and nobody asked it."""
    is_busy, is_saved = threading.Event(), threading.Event()

    class Saved(Callback):
        def on_checkpoint(self, info: CheckpointInfo) -> None:
            if is_busy.is_set():
                is_saved.set()

    def collect(ticket: Ticket, weights: Any) -> Any:
        if ticket.number == 20:
            is_busy.set()
            assert is_saved.wait(60.0)
        return {"first": np.array([0])}

    report = pipeline("threads", tmp_path, lambda context: collect, callbacks=[Saved()]).run(rounds=20)
    assert report.counts.trained == 80
    events = read_events(tmp_path / "events.jsonl")
    assert not [one for one in events if one["kind"] == "notice" and "begun work" in one["text"]]
