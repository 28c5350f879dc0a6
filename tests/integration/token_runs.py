"""Runs of `TokenMachine`s whose events are written down, for tests; as a program, one that kills itself."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from offbeat import Callback, PerWorker, Pipeline
from offbeat.config.models import AsyncTrainingConfig, CheckpointConfig, RayConfig, RuntimeConfig
from offbeat.config.settings import Settings
from offbeat.pacing.events import (
    CollectorDown,
    Handlers,
    Issued,
    Notice,
    RoundTrained,
    Saved,
    SegmentArrived,
)
from offbeat.run.driver import Driver
from offbeat.run.restarts import Report
from offbeat.testing import TokenLearner, TokenMachine
from offbeat.types import Piece


@dataclass
class Log:
    """What happened in a run, in order. ``held`` are tickets by collector, ``lost`` those of lost ones."""

    issued: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    by_collector: list[int] = field(default_factory=list)
    pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    held: dict[int, set[int]] = field(default_factory=dict)
    lost: list[set[int]] = field(default_factory=list)
    most_outstanding: int = 0
    pids: Callable[[], dict[str, int]] = dict

    def handlers(self, driver: Driver) -> Handlers:
        self.pids = driver._runtime.pids  # type: ignore[assignment]
        return {
            Issued: self.on_issued,
            SegmentArrived: self.on_arrived,
            RoundTrained: self.on_trained,
            CollectorDown: self.on_down,
            Saved: self.on_saved,
            Notice: lambda event, now_s: self.notices.append(event.text),
        }

    def on_issued(self, event: Issued, now_s: float) -> None:
        ticket = event.ticket
        self.issued.append(ticket.number)
        self.held.setdefault(ticket.collector, set()).add(ticket.number)
        self.most_outstanding = max(self.most_outstanding, len(set(self.issued)) - len(self.trained))

    def on_arrived(self, event: SegmentArrived, now_s: float) -> None:
        segment = event.segment
        self.arrived.append(segment.ticket.number)
        self.by_collector.append(segment.ticket.collector)
        self.held[segment.ticket.collector].remove(segment.ticket.number)
        self.pieces[segment.ticket.number] = segment.pieces
        if isinstance(segment.data, dict):  # on Ray it lies elsewhere
            self.tokens[segment.ticket.number] = segment.data["tokens"].tolist()

    def on_trained(self, event: RoundTrained, now_s: float) -> None:
        self.trained += [segment.ticket.number for segment in event.batch.segments]
        self.ages += event.batch.staleness()

    def on_down(self, event: CollectorDown, now_s: float) -> None:
        self.lost.append(self.held.pop(event.collector, set()))

    def on_saved(self, event: Saved, now_s: float) -> None:
        """Nothing to note."""

    def most_versions(self) -> int:
        """Most versions in one response."""
        pieces = [piece for group in self.pieces.values() for piece in group]
        return max(len({span.version for span in piece.spans}) for piece in pieces)


def pipeline(
    kind: str,
    num_collectors: int = 1,
    degree: int = 0,
    size: int = 6,
    run_dir: Path | None = None,
    train_s: float = 0.0,
    callbacks: tuple[Callback, ...] = (),
    dial: dict[str, Any] | None = None,
    checkpoint_every: int | None = None,
    address: str | None = None,
    machine: type[TokenMachine] = TokenMachine,
    **options: Any,
) -> Pipeline:
    """A pipeline of machines with these options; ``dial`` is for `AsyncTrainingConfig`."""
    return Pipeline(
        collect=PerWorker(partial(machine, **options)),
        train=PerWorker(partial(_learner, train_s)),
        off_policy_degree=degree,
        runtime=kind,  # type: ignore[arg-type]
        num_workers=num_collectors,
        segments_per_round=size,
        run_dir=run_dir,
        callbacks=callbacks,
        settings=Settings(
            async_training=AsyncTrainingConfig(open_rounds=0, **(dial or {})),
            runtime=RuntimeConfig(ray=RayConfig(address=address)),
            checkpoint=CheckpointConfig(interval_rounds=checkpoint_every, interval_s=None),
        ),
    )


def _learner(train_s: float, context: Any) -> TokenLearner:
    return TokenLearner(train_s=train_s)


def run(made: Pipeline, rounds: int, log: Log | None = None, resumed: bool = False) -> tuple[Report, Log]:
    """Run to the end; return what happened, too."""
    log = Log() if log is None else log
    with made.open(rounds, resumed=resumed, handlers=log.handlers) as one:
        return one.complete(), log


# ---------------------------------------------------------------- the program

KILLED = {"num_collectors": 2, "degree": 8, "size": 40, "slots": 150, "step_s": 0.03, "checkpoint_every": 1}
"""The run that kills itself: up to 360 tickets are open."""


class KillsItself(Log):
    """Kills this process some segments after its tenth checkpoint, while at least 100 tickets are open."""

    num_saved = 0
    at = sys.maxsize

    def on_saved(self, event: Saved, now_s: float) -> None:
        self.num_saved += 1
        if self.num_saved == 10:
            self.at = len(self.arrived) + 20

    def on_arrived(self, event: SegmentArrived, now_s: float) -> None:
        super().on_arrived(event, now_s)
        num_open = sum(map(len, self.held.values()))
        if len(self.arrived) >= self.at and num_open >= 100:
            print(num_open, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    kind, directory, *address = sys.argv[1:]
    made = pipeline(kind, run_dir=Path(directory), address=next(iter(address), None), **KILLED)
    run(made, 100, KillsItself())  # type: ignore[arg-type]
