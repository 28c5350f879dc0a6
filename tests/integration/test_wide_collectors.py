"""Collectors that hold many tickets, in whole runs: the same at k = 0, mixed versions above, repeated."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offbeat import PerWorker, Pipeline
from offbeat.pacing.events import Handlers, Issued, RoundTrained, SegmentArrived
from offbeat.run.driver import Driver
from offbeat.run.restarts import Report
from offbeat.testing import TokenLearner, TokenMachine
from offbeat.types import Piece

KINDS = ("inline", "threads", "processes")


@dataclass
class Log:
    """What happened in a run, in order."""

    issued: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    most_outstanding: int = 0

    def handlers(self, driver: Driver) -> Handlers:
        return {Issued: self._issued, SegmentArrived: self._arrived, RoundTrained: self._round_trained}

    def _issued(self, event: Issued, now_s: float) -> None:
        self.issued.append(event.ticket.number)
        open_now = set(self.issued) - set(self.trained)
        self.most_outstanding = max(self.most_outstanding, len(open_now))

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        self.arrived.append(event.segment.ticket.number)
        self.pieces[event.segment.ticket.number] = event.segment.pieces

    def _round_trained(self, event: RoundTrained, now_s: float) -> None:
        self.trained += [segment.ticket.number for segment in event.batch.segments]
        self.ages += event.batch.staleness()

    def most_versions(self) -> int:
        """Most versions in one response."""
        return max(
            len({span.version for span in piece.spans}) for group in self.pieces.values() for piece in group
        )


def pipeline(
    kind: str,
    num_collectors: int = 1,
    degree: int = 0,
    size: int = 6,
    run_dir: Path | None = None,
    train_s: float = 0.0,
    settings: Any = None,
    **machine: Any,
) -> Pipeline:
    return Pipeline(
        collect=PerWorker(partial(TokenMachine, **machine)),
        train=PerWorker(lambda context: TokenLearner(train_s=train_s)),
        off_policy_degree=degree,
        runtime=kind,  # type: ignore[arg-type]
        num_workers=num_collectors,
        segments_per_round=size,
        run_dir=run_dir,
        settings=settings,
    )


def run(made: Pipeline, rounds: int, resumed: bool = False) -> tuple[Report, Log]:
    log = Log()
    with made.open(rounds, resumed=resumed, handlers=log.handlers) as one:
        return one.complete(), log


# ---------------------------------------------------------------- k = 0


@pytest.fixture(scope="module")
def digest() -> str:
    """The weights after 8 rounds of 6 tickets at k = 0."""
    report, log = run(pipeline("inline", slots=64), 8)
    assert log.trained == list(range(48))
    assert report.digest is not None
    return report.digest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_collectors", "slots"), [(1, 2), (2, 8), (3, 1)])
def test_at_zero_weights_do_not_depend_on_collectors_slots_or_runtime(
    kind: str, num_collectors: int, slots: int, digest: str
) -> None:
    report, log = run(pipeline(kind, num_collectors, slots=slots, capacity=1), 8)
    assert report.digest == digest
    assert log.most_outstanding == 6, "more tickets than slots, and than the collectors ask for"
    assert set(log.ages) == {0}
    assert log.most_versions() == 1


# ---------------------------------------------------------------- k = 2


@pytest.mark.parametrize("kind", KINDS)
def test_above_zero_segments_mix_versions_and_come_in_any_order(kind: str) -> None:
    _, log = run(pipeline(kind, 2, degree=2, slots=8, step_s=0.001), 20)
    assert_mixed(log)


def assert_mixed(log: Log) -> None:
    assert log.most_versions() > 1
    assert log.most_outstanding > 6, "more than one round is open at once"
    assert log.arrived != sorted(log.arrived)
    assert sorted(log.trained) == list(range(120))
    assert 0 < max(log.ages) <= 2
