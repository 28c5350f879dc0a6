"""Nothing walks over all collectors or tickets per event: a segment takes as much work in a run of any size.

Work is counted in bytecode instructions of offbeat, so a loop without calls counts, too. A runtime answers a
few requests at a time, so a walk per step of the loop is seen as well. A round may walk over all collectors.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing.actions import Action, Issue, Publish, Train
from offbeat.pacing.events import CollectorUp, Event, Published, RoundTrained, SegmentArrived
from offbeat.types import Batch, Segment, Ticket
from tests.unit.run_fakes import FakeRun, FakeRuntime

SOURCE = str(Path(offbeat.__file__).parent)
FEW, MANY = 100, 2_000
TOLERANCE = 1.1
AT_ONCE = 4


class Work:
    """Counts the instructions of offbeat that this thread executes in `counted`."""

    def __init__(self) -> None:
        self.instructions = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        self.instructions += event == "opcode"
        return self._count


def test_instructions_of_a_loop_without_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", __file__)
    counts = []
    for size in (10, 1_000):
        rows, work = list(range(size)), Work()
        with work.counted():
            walk(rows)
        counts.append(work.instructions)
    assert counts[1] > 50 * counts[0]


def walk(rows: Sequence[int]) -> None:
    for _ in rows:
        pass


# ---------------------------------------------------------------- the pace


class PacedRun:
    """Plays a runtime to a coordinator, ``AT_ONCE`` answers at a time."""

    def __init__(self, outstanding: int, collectors: int | None = None, **options: Any) -> None:
        self.size, collectors = outstanding // 10, collectors or outstanding
        config = {"segments_per_round": self.size, "off_policy_degree": 9, "open_rounds": 0, **options}
        self.pace = Coordinator(PaceConfig(rounds=10**6, num_collectors=collectors, **config))
        self.events: deque[Event] = deque()
        self.now_s = 0.0
        self.num_trained = 0
        self.perform(self.pace.start(0.0))
        self.events += [CollectorUp(index, outstanding // collectors) for index in range(collectors)]

    def step(self) -> None:
        events = [self.events.popleft() for _ in range(min(AT_ONCE, len(self.events)))]
        self.now_s += 0.01
        actions = [action for event in events for action in self.pace.apply(event, self.now_s)]
        actions += self.pace.decide(self.now_s)
        self.pace.wake_at_s(self.now_s)
        self.perform(actions)

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Issue(ticket):
                    self.events.append(SegmentArrived(segment_of(ticket)))
                case Train(version, tickets, degree):
                    self.num_trained += len(tickets)
                    self.events.appendleft(RoundTrained(version + 1, Batch(version, (), degree)))
                case Publish(version):
                    self.events.appendleft(Published(version, 0.0))

    def train(self, rounds: int) -> None:
        until = self.num_trained + rounds * self.size
        while self.num_trained < until:
            self.step()

    def instructions_per_segment(self) -> float:
        """Those of four rounds, after the first tickets of all collectors."""
        self.train(10)
        work, trained = Work(), self.num_trained
        with work.counted():
            self.train(4)
        return work.instructions / (self.num_trained - trained)


def segment_of(ticket: Ticket) -> Segment:
    return Segment(ticket, None, np.array([ticket.version]), {"env_steps": 1})


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "replay", "replay_ratio": 1.0}, {"collectors": 5, "straggler_policy": "cut"}],
    ids=["stream", "replay", "wide"],
)
def test_the_coordinator_does_the_same_work_per_segment_however_many_are_outstanding(
    options: dict[str, Any],
) -> None:
    few, many = (PacedRun(size, **options).instructions_per_segment() for size in (FEW, MANY))
    assert many <= TOLERANCE * few


# ---------------------------------------------------------------- the driver


class SlowRuntime(FakeRuntime):
    """Returns ``AT_ONCE`` answers at most from each `wait`."""

    def wait(self, timeout_s: float) -> list[Event]:
        events = super().wait(timeout_s)
        self.events.extendleft(reversed(events[AT_ONCE:]))
        self.calls.clear()
        return events[:AT_ONCE]


def instructions_per_segment(directory: Path, collectors: int, degree: int, monkeypatch: Any) -> float:
    """Those of one round, with every observer of a run, after the first rounds."""
    monkeypatch.setattr("tests.unit.run_fakes.FakeRuntime", SlowRuntime)
    run = FakeRun(directory, num_workers=collectors, off_policy_degree=degree, rounds=100)
    run.write_files()
    run.start()
    work, pace = Work(), run.pace
    while pace.version < degree + 2:
        run.driver.step()
    with work.counted():
        while pace.version < degree + 3:
            run.driver.step()
    return work.instructions / collectors


@pytest.mark.parametrize("degree", [0, 2])
def test_the_driver_does_the_same_work_per_segment_however_many_collectors_there_are(
    degree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (
        instructions_per_segment(tmp_path / str(size), size, degree, monkeypatch) for size in (FEW, MANY)
    )
    assert many <= TOLERANCE * few
