"""The one contract of collectors, kept by every runtime; and what is left when their processes are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from offbeat import PerWorker, Pipeline
from offbeat.config.models import RuntimeConfig
from offbeat.config.settings import Settings
from offbeat.pacing.events import Broken, CollectorDown, CollectorUp, Published, SegmentArrived
from offbeat.runtime import RUNTIMES, make_runtime, serve
from offbeat.runtime.serve import CollectorServer
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.types import Progress, Segment, Ticket
from tests.integration.test_runtimes import ChecksSlots, InPlace, Saved

KINDS = ("inline", "threads", "processes")  # Ray: test_ray_collectors.py


class Reversed:
    """Takes all tickets it gets and finishes the newest one first; each needs two pieces of work."""

    capacity = 8

    def __init__(self, context: Any) -> None:
        self.tickets: list[list[int]] = []
        self.held: dict[int, Ticket] = {}
        self.version, self.made = -1, 0

    def accept(self, ticket: Ticket, begun: Any = None, script: Sequence[int] = ()) -> None:
        self.held[ticket.number] = ticket
        self.tickets.append([ticket.number, 2])

    def load(self, version: int, weights: Any) -> None:
        self.version = version
        self.w = weights["w"]

    def advance(self) -> Progress:
        if not self.tickets:
            return Progress(idle=True)
        self.tickets[-1][1] -= 1
        if self.tickets[-1][1] > 0:
            return Progress(busy_s=1e-6)
        number, _ = self.tickets.pop()
        self.made += 1
        x = np.random.default_rng(self.held[number].seed).normal(size=64)
        data = {"x": x + self.w, "version": self.version}
        segment = Segment(self.held.pop(number), data, np.array([self.version]), {"env_steps": 64})
        return Progress((segment,), 1e-6, {"env_steps": 64}, idle=not self.tickets)

    def state_dict(self) -> Any:
        return {"made": self.made}

    def load_state_dict(self, state: Any) -> None:
        self.made = state["made"]


@contextmanager
def running(kind: str, collect: Any, num_collectors: int = 1, learn: Any = ChecksSlots) -> Iterator[Any]:
    """A runtime whose collectors are up and have weights of version 0."""
    settings = Settings(runtime=RuntimeConfig(num_workers=num_collectors))
    spec = RunSpec(PerWorker(collect), PerWorker(lambda context: learn()), settings=settings)
    runtime = make_runtime(kind)
    try:
        runtime.start(spec, dict.fromkeys(range(num_collectors), CollectorState()), None)
        runtime.publish(0)
        ups = wait_for(runtime, CollectorUp, num_collectors, then=Published)
        assert sorted(up.collector for up in ups) == list(range(num_collectors))
        yield runtime
    finally:
        runtime.close()


def wait_for(runtime: Any, kind: Any, count: int = 1, then: type[Any] | None = None) -> list[Any]:
    """Wait for this many events of a kind (and for one of kind ``then``), at most a minute."""
    found: list[Any] = []
    is_missing = then is not None
    give_up_s = time.monotonic() + 60.0
    while time.monotonic() < give_up_s:
        for event in runtime.wait(0.25):
            found += [event] if isinstance(event, kind) else []
            is_missing = is_missing and not isinstance(event, then or kind)
        if len(found) >= count and not is_missing:
            return found
    raise AssertionError(f"{len(found)} of {count} {kind} came")


@pytest.mark.parametrize("kind", KINDS)
def test_collector_of_its_own_kind_holds_many_tickets(kind: str) -> None:
    class Weighted(Reversed):
        def load(self, version: int, weights: Any) -> None:
            self.version, self.w = version, 0.0

    with running(kind, Weighted) as runtime:
        for number in range(300):  # more than fit into a pipe
            runtime.collect(Ticket(number, 0, 0, 0, seed=number))
        arrived = wait_for(runtime, SegmentArrived, 300)
    assert sorted(event.segment.ticket.number for event in arrived) == list(range(300))
    assert [event.state["made"] for event in arrived] == list(range(1, 301))


class Elsewhere:
    """Finishes each ticket 0.2 s after it was accepted, and has nothing to compute until then."""

    capacity = 2

    def __init__(self, context: Any) -> None:
        self.due: list[tuple[float, Ticket]] = []
        self.turns = 0

    def accept(self, ticket: Ticket, begun: Any = None, script: Sequence[int] = ()) -> None:
        self.due.append((time.monotonic() + 0.2, ticket))

    def load(self, version: int, weights: Any) -> None:
        self.version = version

    def advance(self) -> Progress:
        self.turns += 1
        if not self.due or time.monotonic() < self.due[0][0]:
            return Progress(idle=True)
        _, ticket = self.due.pop(0)
        return Progress((Segment(ticket, self.turns, np.array([self.version])),), idle=not self.due)

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
def test_collector_may_wait_for_something_outside_of_it(kind: str) -> None:
    with running(kind, Elsewhere) as runtime:
        for number in range(2):
            runtime.collect(Ticket(number, 0, 0, 0, seed=number))
        arrived: list[SegmentArrived] = []
        give_up_s = time.monotonic() + 10.0
        while len(arrived) < 2 and time.monotonic() < give_up_s:
            arrived += [event for event in runtime.wait(5.0) if isinstance(event, SegmentArrived)]
    assert time.monotonic() < give_up_s, "it was not asked again in time"
    assert [event.segment.ticket.number for event in arrived] == [0, 1]
    assert arrived[0].segment.data < 100, "it was asked all the time"


def test_collector_that_has_ended_inline_may_be_killed() -> None:
    def raises(ticket: Ticket, weights: Any) -> Any:
        raise ValueError("no such level")

    with running("inline", lambda context: raises) as runtime:
        runtime.collect(Ticket(0, 0, 0, 0, seed=0))
        runtime.kill_collector(0, "took too long")
        (down,) = wait_for(runtime, CollectorDown)
    assert down.raised


@pytest.mark.parametrize("kind", KINDS)
def test_collector_of_its_own_kind_runs_in_a_pipeline(kind: str) -> None:
    pipeline = Pipeline(
        collect=PerWorker(Reversed),
        train=PerWorker(lambda context: Saved()),
        runtime=kind,  # type: ignore[arg-type]
        num_workers=2,
    )
    assert pipeline.run(rounds=10).counts.trained == 20


class Pair:
    """Makes its segments two at a time: it has to hold both tickets."""

    capacity = 2

    def __init__(self, context: Any) -> None:
        self.tickets: list[Ticket] = []
        self.version = -1

    def accept(self, ticket: Ticket, begun: Any = None, script: Sequence[int] = ()) -> None:
        self.tickets.append(ticket)

    def load(self, version: int, weights: Any) -> None:
        self.version = version

    def advance(self) -> Progress:
        if len(self.tickets) < 2:
            return Progress(idle=True)
        tickets, self.tickets = self.tickets[:2], self.tickets[2:]
        return Progress(tuple(Segment(one, one.number, np.array([self.version])) for one in tickets))

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
def test_collector_holds_as_many_tickets_as_it_wants(kind: str) -> None:
    with running(kind, Pair) as runtime:
        for number in range(4):
            runtime.collect(Ticket(number, 0, 0, 0, seed=0))
        arrived = wait_for(runtime, SegmentArrived, 4)
    assert [event.segment.data for event in arrived] == [0, 1, 2, 3]


class LeavesInAdvance(Pair):
    def advance(self) -> Progress:
        raise SystemExit(3)


@pytest.mark.parametrize("kind", ["processes"])
def test_collector_that_ends_its_process_is_reported(kind: str) -> None:
    with running(kind, LeavesInAdvance) as runtime:
        runtime.collect(Ticket(0, 0, 0, 0, seed=0))
        assert wait_for(runtime, CollectorDown)[0].collector == 0


def test_threads_wait_for_a_collector_that_takes_long_to_be_made() -> None:
    def slow(context: Any) -> Any:
        time.sleep(1.0)
        return lambda ticket, weights: 1.0

    limits = RuntimeConfig(kind="threads", num_workers=1, start_timeout_s=0.2)
    pipeline = Pipeline(
        collect=PerWorker(slow),
        train=lambda batch: None,
        weights=lambda: {"w": 1.0},
        settings=Settings(runtime=limits),
    )
    assert pipeline.run(rounds=2).version == 2


def test_collectors_without_tickets_are_not_looked_at_inline() -> None:
    class Steps(CollectorServer):
        def step(self) -> None:
            steps.append(self._index)
            super().step()

    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "CollectorServer", Steps)
        with running("inline", Elsewhere, num_collectors=3) as runtime:
            runtime.collect(Ticket(0, 1, 0, 0, seed=0))
            wait_for(runtime, SegmentArrived)
            runtime.wait(0.0)
    assert set(steps) == {1}


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors as Linux shows them")
def test_killed_workers_leave_nothing_behind() -> None:
    counts = []
    with running("processes", lambda context: InPlace()) as runtime:
        pid = runtime.pids()["worker_0"]
        for number in range(0, 12, 2):
            for ticket in (number, number + 1):
                runtime.collect(Ticket(ticket, 0, 0, 0, seed=0))
            arrived = wait_for(runtime, SegmentArrived, 2)
            os.kill(pid, signal.SIGKILL)
            (down,) = wait_for(runtime, CollectorDown)
            assert not down.raised
            assert "was killed by SIGKILL" in down.reason
            for event in arrived:
                assert (event.segment.data["x"] == event.segment.ticket.number).all(), (
                    "it outlives its worker"
                )
            runtime.release([number, number + 1])
            del arrived, event
            runtime.start_collector(0, CollectorState(number + 1))
            pid = wait_for(runtime, CollectorUp)[0].pid
            counts.append(num_descriptors())
    assert counts[-1] == counts[1]


def test_tickets_for_a_collector_that_died_are_lost_with_it() -> None:
    with running("processes", lambda context: InPlace()) as runtime:
        os.kill(runtime.pids()["worker_0"], signal.SIGKILL)
        for number in range(100):
            runtime.collect(Ticket(number, 0, 0, 0, seed=0))
        wait_for(runtime, CollectorDown)
        runtime.collect(Ticket(100, 0, 0, 0, seed=0))
        runtime.kill_collector(0, "hung")
        assert not any(isinstance(event, CollectorDown) for event in runtime.wait(0.0))


def test_weights_that_move_are_found() -> None:
    class Grows(ChecksSlots):
        size = 1

        def weights(self) -> Any:
            self.size *= 10
            return {"w": np.full(self.size, self.size)}

    def collect(ticket: Ticket, weights: Any) -> Any:
        return len(weights["w"])

    settings = Settings(runtime=RuntimeConfig(num_workers=1))
    make = PerWorker(lambda context: collect)
    spec = RunSpec(make, PerWorker(lambda context: Grows()), settings=settings)
    runtime = make_runtime("processes")
    try:
        runtime.start(spec, {0: CollectorState()}, None)
        sizes = []
        wait_for(runtime, CollectorUp)
        for version in range(6):
            runtime.publish(version)
            wait_for(runtime, Published)
            runtime.collect(Ticket(version, 0, version, version, seed=0))
            sizes.append(wait_for(runtime, SegmentArrived)[0].segment.data)
    finally:
        runtime.close()
    assert sizes == [10, 100, 1000, 10_000, 100_000, 1_000_000]


@pytest.mark.parametrize("kind", KINDS)
def test_runtime_that_was_not_started_holds_nothing_and_can_be_closed(kind: str) -> None:
    make_runtime(kind).close()  # everything is imported
    before = len(os.listdir("/proc/self/fd"))
    runtime = make_runtime(kind)
    assert len(os.listdir("/proc/self/fd")) == before
    runtime.close()
    runtime.close()


@pytest.mark.parametrize("first", ["plain", "in place"])
def test_collectors_whose_segments_differ_in_kind_are_refused(first: str) -> None:
    def make(context: Any) -> Any:
        is_plain = (context.collector == 0) == (first == "plain")
        return (lambda ticket, weights: 1.0) if is_plain else InPlace()

    settings = Settings(runtime=RuntimeConfig(num_workers=2))
    spec = RunSpec(PerWorker(make), PerWorker(lambda context: ChecksSlots()), settings=settings)
    runtime = make_runtime("processes")
    try:
        runtime.start(spec, {0: CollectorState()}, None)
        wait_for(runtime, CollectorUp)
        runtime.start_collector(1, CollectorState())
        (broken,) = wait_for(runtime, (Broken, CollectorUp))
    finally:
        runtime.close()
    assert isinstance(broken, Broken)
    assert "collector 1 makes segments of" in str(broken.error)


def test_another_kind_of_runtime_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make_mine() -> Any:
        made.append("mine")
        return make_runtime("inline")

    monkeypatch.setitem(RUNTIMES, "mine", make_mine)
    make_runtime("mine").close()
    assert made == ["mine"]


class MadeElsewhere:
    """Cannot be unpickled, as if its module were not there."""

    def __reduce__(self) -> Any:
        return _fail_to_load, ()


def _fail_to_load() -> None:
    raise ModuleNotFoundError("no module named 'simulator'")


def test_segment_that_cannot_be_read_is_its_collectors_fault() -> None:
    with running("processes", lambda context: lambda ticket, weights: MadeElsewhere()) as runtime:
        runtime.collect(Ticket(0, 0, 0, 0, seed=0))
        (down,) = wait_for(runtime, CollectorDown)
        assert (down.collector, down.raised) == (0, True)
        assert "a segment of worker_0 could not be read" in down.reason
        assert "no module named 'simulator'" in down.reason


def test_each_report_of_stacks_has_the_current_ones_only() -> None:
    with running("processes", Elsewhere) as runtime:
        for _ in range(2):
            assert runtime.stacks()["collector_0"].count("Current thread") == 1
