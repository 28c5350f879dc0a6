"""The gates of a coordinator: who may open them, and what goes on while they are closed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offbeat.errors import ConfigError
from offbeat.pacing import Coordinator
from offbeat.pacing.actions import Finish, Train
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    DialTurned,
    EvalDone,
    GatesSet,
    Published,
    StopRequested,
)

from .pacing_steps import all_up, arrive, begin, end_round, make, of_type, step, tickets


def stepwise(**changes: Any) -> Coordinator:
    """A run of two segments a round that begins with closed gates."""
    return make(**({"segments_per_round": 2, "num_collectors": 2, "stepwise": True} | changes))


def set_gates(coordinator: Coordinator, collect: bool, until: int | None) -> list[Any]:
    return step(coordinator, GatesSet(collect, until), 0.0)


def test_with_closed_gates_nothing_is_collected_before_somebody_asks() -> None:
    coordinator = stepwise()
    assert begin(coordinator) == []
    assert coordinator.is_paused
    assert not coordinator.can_train(0.0)
    held = "round 0 waits for enable_data_collection() (segments: 0 ready, none being collected)"
    assert coordinator.waiting_for() == held
    assert [ticket.number for ticket in tickets(set_gates(coordinator, True, 0))] == [0, 1]
    assert not coordinator.is_paused


def test_a_round_waits_for_its_gate_and_one_is_opened_at_a_time() -> None:
    coordinator = stepwise()
    begin(coordinator)
    set_gates(coordinator, True, 0)
    assert arrive(coordinator, 0, 1) == []
    assert coordinator.can_train(0.0)
    assert coordinator.is_paused
    assert coordinator.waiting_for() == "round 0 could be trained and waits for sync_update()"
    assert set_gates(coordinator, True, 1) == [Train(0, (0, 1), 0)]
    assert not coordinator.can_train(0.0)
    assert len(tickets(end_round(coordinator))) == 2
    assert arrive(coordinator, 2, 3) == []
    assert coordinator.can_train(0.0)


def test_closing_loses_nothing_that_is_under_way() -> None:
    coordinator = stepwise()
    begin(coordinator)
    set_gates(coordinator, True, 0)
    arrive(coordinator, 0)
    assert set_gates(coordinator, False, 0) == []
    assert not coordinator.is_paused, "a segment is still out"
    assert "still out: ticket 1 on collector 1" in coordinator.waiting_for()
    arrive(coordinator, 1)
    assert coordinator.can_train(0.0)


def test_a_lost_ticket_is_issued_again_while_the_gate_is_closed() -> None:
    coordinator = stepwise()
    begin(coordinator)
    set_gates(coordinator, True, 0)
    set_gates(coordinator, False, 0)
    step(coordinator, CollectorDown(1), 0.0)
    assert not coordinator.is_paused
    (again,) = tickets(step(coordinator, CollectorUp(1), 0.0))
    assert (again.number, again.attempt) == (1, 1)


def test_a_closed_gate_holds_the_next_tickets_until_it_is_opened() -> None:
    coordinator = stepwise()
    begin(coordinator)
    set_gates(coordinator, True, 0)
    arrive(coordinator, 0, 1)
    assert of_type(set_gates(coordinator, False, 1), Train) == [Train(0, (0, 1), 0)]
    assert tickets(end_round(coordinator)) == []
    assert coordinator.is_paused
    assert [ticket.version for ticket in tickets(set_gates(coordinator, True, 1))] == [1, 1]


def test_a_run_that_goes_back_collects_what_open_rounds_need_although_collecting_is_closed() -> None:
    coordinator = stepwise(checkpoint_interval=1)
    begin(coordinator)
    for version in range(2):
        set_gates(coordinator, True, version)
        arrive(coordinator, 2 * version, 2 * version + 1)
        set_gates(coordinator, False, version + 1)
        if version == 0:
            end_round(coordinator)
            saved = json.loads(json.dumps(coordinator.state_dict()))
    again = stepwise(checkpoint_interval=1)
    again.load_state_dict(saved)
    assert begin(again) == []
    assert [ticket.number for ticket in tickets(set_gates(again, False, 2))] == [2, 3]
    assert arrive(again, 2, 3) == [Train(1, (2, 3), 0)]
    assert tickets(end_round(again)) == [], "round 2 is nobody's wish"
    assert again.is_paused


def test_a_blocking_evaluation_and_a_publish_come_before_the_next_round() -> None:
    coordinator = stepwise(eval_interval=1)
    begin(coordinator)
    set_gates(coordinator, True, 0)
    arrive(coordinator, 0, 1)
    set_gates(coordinator, True, 1)
    end_round(coordinator, publish=False)
    assert coordinator.is_publishing
    step(coordinator, Published(1), 0.0)
    assert not coordinator.is_publishing
    assert not coordinator.is_paused
    assert len(tickets(step(coordinator, EvalDone(1), 0.0))) == 2


def test_the_first_round_waits_for_its_warm_up() -> None:
    coordinator = stepwise(warmup_s=5.0)
    begin(coordinator)
    set_gates(coordinator, True, 0)
    arrive(coordinator, 0, 1)
    assert not coordinator.can_train(4.9)
    assert coordinator.can_train(5.0)


def test_before_the_first_publish_a_run_is_not_held() -> None:
    coordinator = stepwise()
    coordinator.start(0.0)
    all_up(coordinator)
    assert not coordinator.is_paused
    assert not coordinator.can_train(0.0)


def test_a_held_run_that_is_stopped_finishes() -> None:
    coordinator = stepwise()
    begin(coordinator)
    assert not coordinator.is_ending
    assert step(coordinator, StopRequested("enough"), 0.0) == [Finish("enough")]
    assert coordinator.is_ending
    assert not coordinator.is_paused


@pytest.mark.parametrize("degree", [-1, 1])
def test_a_run_with_another_dial_cannot_go_step_by_step(degree: int) -> None:
    with pytest.raises(ConfigError, match=r"set async_training\.off_policy_degree to 0"):
        stepwise(off_policy_degree=degree)
    with pytest.raises(ConfigError, match="strictly synchronous"):
        step(stepwise(), DialTurned(degree), 0.0)


def test_gates_hold_at_any_k() -> None:
    coordinator = make(off_policy_degree=2, num_collectors=4)
    begin(coordinator)
    assert set_gates(coordinator, False, None) == []
    assert of_type(arrive(coordinator, 0), Train) == [Train(0, (0,), 2)], "rounds are free"
    assert tickets(end_round(coordinator)) == []
    assert len(tickets(set_gates(coordinator, True, None))) > 0
