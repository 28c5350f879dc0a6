"""Older public names that code of users and plugins may still use."""

from __future__ import annotations

from offbeat.observe.callbacks import Callback, CollectorLostInfo, WorkerLostInfo, check_hooks
from offbeat.pacing.events import CollectorDown
from offbeat.roles import WorkerContext
from offbeat.types import Ticket
from tests.unit.run_fakes import FakeRun


def test_a_ticket_has_a_lane() -> None:
    assert Ticket(number=7, collector=3, version=1, deadline=2, seed=5).lane == 3


def test_a_worker_has_a_lane_of_so_many() -> None:
    context = WorkerContext(collector=3, num_collectors=8, seed=5)
    assert (context.lane, context.num_lanes) == (3, 8)


def test_a_lost_worker_names_its_lane_and_its_collector() -> None:
    assert WorkerLostInfo is CollectorLostInfo
    info = WorkerLostInfo(3, "killed", 1)
    assert (info.lane, info.collector) == (3, 3)


class Lost(Callback):
    def __init__(self) -> None:
        self.lanes: list[int] = []

    def on_worker_lost(self, info: WorkerLostInfo) -> None:
        self.lanes.append(info.lane)


def test_the_hook_of_a_lost_worker_is_called_by_that_name() -> None:
    callback = Lost()
    check_hooks([callback])
    run = FakeRun(callbacks=[callback])
    run.write_files()
    run.start().steps(2)
    run.runtime.events.append(CollectorDown(1, "killed"))
    run.step_until(lambda: bool(callback.lanes))
    assert callback.lanes == [1]
