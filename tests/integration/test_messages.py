"""Messages between a runtime and its wide collectors, on all runtimes but Ray: see test_ray_messages.py."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import pytest

from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    CollectorWaits,
    CollectorWorked,
    OpenWork,
    Published,
    SegmentArrived,
)
from offbeat.runtime.messages import Begun
from offbeat.runtime.spec import CollectorState
from offbeat.types import Part, Piece, Progress, Span, Ticket
from tests.integration.test_collectors import KINDS, running, wait_for
from tests.integration.test_runtimes import ChecksSlots
from tests.integration.wide_fakes import Counting, Tools

LONG = 10**9


def ticket(number: int, version: int = 0, collector: int = 0) -> Ticket:
    return Ticket(number, collector, version, 9, seed=number)


def tokens_of(arrived: list[SegmentArrived]) -> dict[int, list[int]]:
    return {event.segment.ticket.number: event.segment.data["tokens"].tolist() for event in arrived}


@pytest.mark.parametrize("kind", KINDS)
def test_collector_holds_more_tickets_than_fit_into_a_pipe(kind: str) -> None:
    class Whole(Counting):
        """Finishes all of its tickets together, when it holds them all."""

        def advance(self) -> Progress:
            return super().advance() if len(self._open) == self.capacity else Progress(idle=True)

    with running(kind, partial(Whole, length=1, capacity=500)) as runtime:
        for number in range(500):
            runtime.collect(ticket(number))
        arrived = wait_for(runtime, SegmentArrived, 500)
    assert sorted(tokens_of(arrived)) == list(range(500))


@pytest.mark.parametrize("kind", KINDS)
def test_begun_work_and_scripts_reach_the_collector(kind: str) -> None:
    script = (Piece((Span(0, 2),), "stop"), Piece((Span(0, 7),), "eos"))
    with running(kind, Counting) as runtime:
        runtime.collect(ticket(0))
        runtime.collect(ticket(1), Begun({"tokens": np.array([-3, -2, -1])}))
        runtime.collect(ticket(2), None, script)
        for number in range(3, 300):  # blocks must not stop the pipe
            runtime.collect(ticket(number), Begun({"tokens": np.arange(4)}), ())
        found = tokens_of(wait_for(runtime, SegmentArrived, 300))
    assert found[0] == [0] * 5
    assert found[1] == [-3, -2, -1, 0, 0]
    assert found[2] == [0] * 9
    assert found[299] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_tickets_are_cut_where_they_are(kind: str) -> None:
    with running(kind, partial(Counting, length=LONG), num_collectors=2) as runtime:
        held = [ticket(number, collector=number % 2) for number in range(200)]
        for one in held:
            runtime.collect(one)
        runtime.cut(held[50:])
        arrived = wait_for(runtime, SegmentArrived, 150)
    assert sorted(tokens_of(arrived)) == list(range(50, 200))
    assert {event.segment.pieces[0].end for event in arrived} == {"cut"}


def test_driver_does_not_wait_for_a_stopped_worker_whatever_is_to_be_cut() -> None:
    held = [ticket(number) for number in range(60_000)]  # more than a pipe holds, as one message
    with running("processes", Counting) as runtime:
        (pid,) = runtime.pids().values()
        os.kill(pid, signal.SIGSTOP)
        driver = Thread(target=runtime.cut, args=(held,), daemon=True)
        driver.start()
        driver.join(20.0)
        is_waiting = driver.is_alive()
        os.kill(pid, signal.SIGCONT)
        assert not is_waiting


@pytest.mark.parametrize("kind", KINDS)
def test_begun_work_can_be_asked_for_again_and_again(kind: str) -> None:
    with running(kind, partial(Counting, length=LONG, pause_s=0.001), num_collectors=2) as runtime:
        for number in range(4):
            runtime.collect(ticket(number, collector=number % 2))
        before = 0
        for _ in range(3):
            assert sorted(runtime.ask_work()) == [0, 1]
            found = wait_for(runtime, OpenWork, 2)
            assert [event.version for event in found] == [0, 0]
            answers = {event.collector: event.work for event in found}
            assert sorted(answers[0]) == [0, 2] and sorted(answers[1]) == [1, 3]
            assert len(answers[0][0]["tokens"]) >= before
            before = len(answers[0][0]["tokens"])


@pytest.mark.parametrize("kind", KINDS)
def test_collectors_of_one_segment_at_a_time_are_not_asked_for_begun_work(kind: str) -> None:
    with running(kind, lambda context: lambda ticket, weights: 1.0) as runtime:
        assert list(runtime.ask_work()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_collector_says_which_version_its_scripts_wait_for(kind: str) -> None:
    with running(kind, Counting) as runtime:
        for number in range(2):
            runtime.collect(ticket(number), None, (Piece((Span(0, 2), Span(1, 3)), "eos"),))
        waiting: set[int] = set()
        while waiting != {0, 1}:
            for waits in wait_for(runtime, CollectorWaits):
                assert waits.version == 1
                waiting = set(waits.tickets)
        runtime.publish(1)
        arrived = wait_for(runtime, SegmentArrived, 2, then=Published)
    assert tokens_of(arrived) == {0: [0, 0, 1, 1, 1], 1: [0, 0, 1, 1, 1]}


@pytest.mark.parametrize("kind", KINDS)
def test_collector_that_waits_for_tools_is_woken(kind: str) -> None:
    with running(kind, partial(Tools, tool_s=0.2)) as runtime:
        began_s = time.monotonic()
        for number in range(3):
            runtime.collect(ticket(number))
        arrived = wait_for(runtime, SegmentArrived, 3)
        took_s = time.monotonic() - began_s
    assert took_s < 0.9, "it was advanced when its second was over, not when it was woken"
    assert max(event.segment.data["turns"] for event in arrived) < 20, "it was asked all the time"


@pytest.mark.parametrize("kind", KINDS)
def test_busy_time_is_reported_while_nothing_is_finished(kind: str) -> None:
    with running(kind, partial(Counting, length=LONG, pause_s=0.01)) as runtime:
        runtime.collect(ticket(0))
        (worked,) = wait_for(runtime, CollectorWorked)[:1]
    assert worked.collector == 0 and worked.units["tokens"] > 1
    assert worked.busy_s == pytest.approx(1e-6 * worked.units["tokens"])


class Shrinks(Counting):
    """Wants to hold fewer tickets after its first."""

    def advance(self) -> Progress:
        progress = super().advance()
        self.capacity = 3 if progress.segments else self.capacity
        return progress


@pytest.mark.parametrize("kind", KINDS)
def test_capacity_may_change(kind: str) -> None:
    ups: list[CollectorUp] = []
    with running(kind, partial(Shrinks, capacity=8)) as runtime:
        runtime.collect(ticket(0))
        ups += wait_for(runtime, CollectorUp, then=SegmentArrived)
        runtime.collect(ticket(1))
        wait_for(runtime, SegmentArrived)
    assert [(up.collector, up.capacity, up.is_wide) for up in ups] == [(0, 3, True)]
    assert (ups[0].pid is not None) == (kind in ("processes", "ray"))


class Adapts(ChecksSlots):
    """Publishes a base that does not change, and an adapter that does."""

    def __init__(self) -> None:
        super().__init__()
        self.version = -1

    def weights(self) -> Any:
        self.version += 1
        adapter = Part(self.version, {"w": np.full(10, self.version)})
        return {"base": Part(0, np.arange(50_000.0)), "adapter": adapter}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_weights_travel_when_they_have_changed(kind: str) -> None:
    def collect(ticket: Ticket, weights: Any) -> Any:
        base, adapter = weights["base"], weights["adapter"]
        return base.version, base.data.sum(), adapter.version, adapter.data["w"].tolist()

    total, sizes = np.arange(50_000.0).sum(), []
    with running(kind, lambda context: collect, learn=Adapts) as runtime:
        for version in range(1, 4):
            runtime.publish(version)
            sizes += [event.num_bytes for event in wait_for(runtime, Published)]
            runtime.collect(ticket(version, version))
            (arrived,) = wait_for(runtime, SegmentArrived)
            assert arrived.segment.data == (0, total, version, [version] * 10)
    if kind in ("processes", "ray"):
        assert all(0 < size < 2000 for size in sizes), "the base was sent before"
    else:
        assert sizes == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_collectors_join_and_leave(kind: str) -> None:
    with running(kind, Counting) as runtime:
        for index in (1, 4):
            runtime.start_collector(index, CollectorState())
        ups = wait_for(runtime, CollectorUp, 2)
        assert sorted(up.collector for up in ups) == [1, 4]
        for number in range(9):
            runtime.collect(ticket(number, collector=(0, 1, 4)[number % 3]))
        arrived = wait_for(runtime, SegmentArrived, 9)
        assert {event.segment.data["collector"] for event in arrived} == {0, 1, 4}
        num_processes = len(runtime.pids())
        runtime.end_collector(0)
        runtime.end_collector(4)
        runtime.end_collector(9)  # there is none
        assert len(runtime.pids()) == num_processes - (2 if kind in ("processes", "ray") else 0)
        assert list(runtime.ask_work()) == [1]
        assert runtime.working_s(4) is None
        runtime.collect(ticket(9, collector=1))
        assert [type(event) for event in wait_for(runtime, SegmentArrived)] == [SegmentArrived]
        runtime.start_collector(4, CollectorState())
        wait_for(runtime, CollectorUp)


def test_a_collector_that_left_is_not_reported_as_lost() -> None:
    with running("processes", Counting, num_collectors=2) as runtime:
        runtime.end_collector(1)
        give_up_s = time.monotonic() + 1.0
        while time.monotonic() < give_up_s:
            assert not [event for event in runtime.wait(0.2) if isinstance(event, CollectorDown)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors as Linux shows them")
def test_killed_worker_leaves_no_block_behind() -> None:
    class Stuck(Counting):
        def accept(self, ticket: Ticket, begun: Any = None, script: Any = ()) -> None:
            time.sleep(60)

    counts = []
    with running("processes", Stuck) as runtime:
        for number in range(3):
            for one in range(100):
                runtime.collect(ticket(one), Begun({"tokens": np.arange(1000)}))
            runtime.kill_collector(0, "was killed")
            runtime.start_collector(0, CollectorState(number))
            wait_for(runtime, CollectorUp)
            counts.append(len(os.listdir("/proc/self/fd")))
    assert len(set(counts)) == 1
