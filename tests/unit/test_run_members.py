"""Collectors that join a run and leave it, as the driver sees them."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from offbeat import Pipeline
from offbeat.errors import ConfigError
from offbeat.pacing.events import (
    CollectorDown,
    CollectorLeft,
    CollectorRemoved,
    CollectorsAdded,
    CollectorUp,
    DialTurned,
    GatesSet,
    HealthChanged,
    Issued,
    Request,
)
from offbeat.run.driver import StartPoint
from tests.unit.run_fakes import FakeRun


def collectors_of(run: FakeRun) -> list[int]:
    return [event.ticket.collector for event in run.of(Issued)]


def fake_run(*, silent: tuple[str, ...] = (), rounds: int = 40, degree: int = 2) -> FakeRun:
    requests: deque[Request] = deque()
    return FakeRun(
        silent=silent,
        requests=requests,
        rounds=rounds,
        off_policy_degree=degree,
        limits={"async_training": {"off_policy_degree": degree}},
    ).start()


def test_collector_joins_gets_tickets_and_leaves() -> None:
    run = fake_run()
    run.step_until(lambda: run.pace.version >= 3)
    run.requests.append(CollectorsAdded(2))
    run.step_until(lambda: {2, 3} <= set(collectors_of(run)))
    assert run.pace.present == [0, 1, 2, 3]
    run.requests.append(CollectorRemoved())
    run.requests.append(CollectorRemoved(0))
    run.step_until(lambda: len(run.of(CollectorLeft)) == 2)
    assert [event.collector for event in run.of(CollectorLeft)] == [0, 3]
    issued = len(run.of(Issued))
    run.complete()
    assert set(collectors_of(run)[issued:]) == {1, 2}
    assert ("end_collector", 3) in run.runtime.calls
    left = [event for event in run.of(HealthChanged) if event.state == "stopped"]
    assert [event.component for event in left] == ["collector_0", "collector_3"]


def test_collector_that_dies_while_it_leaves_is_not_replaced() -> None:
    run = fake_run(silent=("collect",))
    run.step_until(lambda: 0 in collectors_of(run))
    run.requests.append(CollectorRemoved(0))
    run.steps(3)
    assert not run.of(CollectorLeft), "it still holds a ticket"
    started = len([call for call in run.runtime.calls if call[0] == "start_collector"])
    run.runtime.events.append(CollectorDown(0, "killed by SIGKILL"))
    run.step_until(lambda: bool(run.of(CollectorLeft)))
    assert len([call for call in run.runtime.calls if call[0] == "start_collector"]) == started
    assert run.driver.pace.counts().lost + run.driver.pace.counts().running > 0, "another one takes it"


def test_refused_requests_become_notices() -> None:
    run = fake_run(degree=1)
    run.requests.append(CollectorRemoved(7))
    run.steps(1)
    assert "there is no collector 7 that could leave" in run.notices()[-1]
    run.requests.extend([CollectorRemoved(), CollectorRemoved()])
    run.steps(2)
    assert "it is the last one" in run.notices()[-1]


def test_pipeline_refuses_at_zero_with_the_reason() -> None:
    pipeline = Pipeline(
        collect=lambda ticket, weights: 0, train=lambda segments: None, weights=np.zeros(1).copy
    )
    with pytest.raises(ConfigError, match="order of experience"):
        pipeline.add_collector()
    with pytest.raises(ConfigError, match="Turn the dial to 1 or more"):
        pipeline.remove_collector()


def test_a_restart_takes_up_what_its_checkpoint_does_not_know() -> None:
    run = fake_run()
    run.steps(2)
    run.requests.append(CollectorsAdded(1))
    run.steps(1)
    assert run.driver.requests_since(0) == [], "no checkpoint was asked for before it"
    run.driver.saving.requested = 4
    run.requests.append(CollectorRemoved())
    run.steps(1)
    assert run.driver.requests_since(4) == [CollectorRemoved(2)]
    assert run.driver.requests_since(5) == []


def test_table_of_collectors_saves_who_has_left() -> None:
    run = fake_run()
    run.requests.append(CollectorsAdded(1))
    run.step_until(lambda: 2 in collectors_of(run))
    run.requests.append(CollectorRemoved(1))
    run.step_until(lambda: bool(run.of(CollectorLeft)))
    state = run.driver.collectors.state_dict()
    assert state["gone"] == [1]
    other = fake_run()
    other.driver.collectors.load_state_dict(state)
    assert list(other.driver.collectors.starts) == [0, 2]


def test_second_restart_from_the_same_checkpoint_has_those_who_joined() -> None:
    run = fake_run()
    parts = {**run.driver.saving.capture(), "learner": {}}
    again = FakeRun(rounds=40, off_policy_degree=2, limits={"async_training": {"off_policy_degree": 2}})
    again.start(StartPoint(4, parts, resumed=True))
    again.requests.extend([CollectorsAdded(1), DialTurned(3), GatesSet(collect=False), GatesSet()])
    again.steps(1)
    assert again.driver.requests_since(4) == [CollectorsAdded(1), DialTurned(3), GatesSet()]
    assert again.driver.requests_since(5) == [GatesSet()], "that checkpoint knows of the others"


def test_requests_of_members_after_the_end_change_nothing() -> None:
    run = fake_run(rounds=2, silent=("snapshot",))
    run.step_until(lambda: run.driver.finish is not None)
    run.requests.extend([CollectorsAdded(1), CollectorRemoved(0), CollectorRemoved(1)])
    run.steps(1)
    assert len(run.driver.collectors.starts) == 2
    assert not run.of(CollectorRemoved)


def test_saved_members_do_not_change_with_who_leaves_later() -> None:
    run = fake_run()
    saved = run.pace.state_dict()
    run.requests.append(CollectorRemoved(0))
    run.steps(1)
    assert run.pace.present == [1]
    assert saved["members"]["present"] == [0, 1]


def test_collector_that_leaves_before_it_came_up_is_not_counted() -> None:
    run = fake_run(silent=("start_collector",))
    run.requests.append(CollectorsAdded(2))
    run.steps(1)
    run.runtime.events.append(CollectorUp(3))
    run.steps(2)
    assert run.driver.meter.num_collectors == 3
    run.requests.extend([CollectorRemoved(2), CollectorRemoved(3), CollectorRemoved(0)])
    run.step_until(lambda: len(run.of(CollectorLeft)) == 3)
    assert run.driver.meter.num_collectors == 1


def test_a_dial_is_not_turned_once_the_run_has_finished() -> None:
    run = fake_run(rounds=3)
    run.complete()
    run.requests.append(DialTurned(1))
    run.steps(1)
    assert not run.of(DialTurned) and run.pace.degree == 2
