"""Collectors that hold many tickets: capacity, drops, stragglers, suspects, and who joins or leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.pacing import Coordinator
from offbeat.pacing.actions import Action, Cut, Finish, Issue, Retire, Train
from offbeat.pacing.events import (
    CollectorDown,
    CollectorRemoved,
    CollectorsAdded,
    CollectorUp,
    DialTurned,
    Published,
    RoundTrained,
    SegmentArrived,
    SegmentDropped,
)
from offbeat.types import Batch, Segment, Ticket

from .pacing_steps import arrive, arrived, end_round, make, of_type, step, tickets


def begin_wide(coordinator: Coordinator, *capacities: int) -> list[Action]:
    """Bring collectors up that want to hold so many tickets, then publish; return what follows."""
    coordinator.start(0.0)
    for collector, capacity in enumerate(capacities):
        step(coordinator, CollectorUp(collector, capacity))
    return step(coordinator, Published(coordinator.version))


def placed(actions: list[Action]) -> list[tuple[int, int]]:
    return [(ticket.number, ticket.collector) for ticket in tickets(actions)]


def drop(coordinator: Coordinator, number: int, reason: str = "") -> list[Action]:
    """Let a segment arrive that is not worth training."""
    coordinator.apply(arrived(number, coordinator.ledger.ticket(number).version), 0.0)
    return step(coordinator, SegmentDropped(number, reason))


# ---------------------------------------------------------------- capacity


def test_most_free_capacity_takes_the_next_ticket_and_equals_take_turns() -> None:
    coordinator = make(segments_per_round=8, num_collectors=3, off_policy_degree=1)
    issued = placed(begin_wide(coordinator, 2, 4, 3))
    assert [collector for _, collector in issued] == [1, 1, 2, 0, 1, 2, 0, 1, 2]
    assert placed(step(coordinator, CollectorUp(0, 4))) == [(9, 0), (10, 0)]
    assert placed(arrive(coordinator, 1)) == [(11, 1)]


def test_a_collector_that_wants_to_hold_fewer_gets_no_more_until_it_does() -> None:
    coordinator = make(segments_per_round=8, num_collectors=1, off_policy_degree=3)
    begin_wide(coordinator, 5)
    assert step(coordinator, CollectorUp(0, 2)) == []
    assert placed(arrive(coordinator, 0, 1, 2)) == []
    assert placed(arrive(coordinator, 3)) == [(5, 0)]


@pytest.mark.parametrize("capacity", [1, 2, 600])
def test_at_zero_a_ticket_goes_to_its_collector_whatever_that_wants_to_hold(capacity: int) -> None:
    coordinator = make(segments_per_round=5, num_collectors=2)
    assert placed(begin_wide(coordinator, capacity, 1)) == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]


# ---------------------------------------------------------------- tickets for life


def test_work_begun_with_old_weights_is_trained_after_its_ticket_was_lost() -> None:
    """Ticket 0 begins with version 0 and is issued again three versions later, with its first tokens."""
    coordinator = make(num_collectors=2, off_policy_degree=4)
    begin_wide(coordinator, 1, 1)
    for number in (1, 2, 3):
        arrive(coordinator, number)
        end_round(coordinator)
    before = coordinator.ledger.ticket(0)
    assert (coordinator.version, before.version, before.deadline) == (3, 0, 4)
    step(coordinator, CollectorDown(0))
    assert tickets(step(coordinator, CollectorUp(0))) == [replace(before, attempt=1)]
    segment = Segment(before, None, np.array([0, 0, 3]))
    (train,) = of_type(step(coordinator, SegmentArrived(segment)), Train)
    assert (train.version, train.tickets) == (3, (0,))


# ---------------------------------------------------------------- suspects


def lose_three_times(coordinator: Coordinator, collector: int) -> list[Action]:
    """Lose a collector until its tickets are suspects."""
    actions: list[Action] = []
    for _ in range(3):
        step(coordinator, CollectorDown(collector))
        actions = step(coordinator, CollectorUp(collector, 3))
    return actions


def test_a_ticket_that_was_lost_three_times_is_tried_alone() -> None:
    coordinator = make(segments_per_round=4, num_collectors=1, off_policy_degree=1)
    begin_wide(coordinator, 3)
    assert placed(lose_three_times(coordinator, 0)) == [(0, 0)]
    assert placed(arrive(coordinator, 0)) == [(1, 0)]
    step(coordinator, CollectorDown(0))
    assert placed(step(coordinator, CollectorUp(0, 3))) == [(1, 0)], "again alone"
    assert placed(arrive(coordinator, 1)) == [(2, 0)]
    assert placed(arrive(coordinator, 2)) == [(3, 0), (4, 0), (5, 0)], "that was the last one"


def test_other_collectors_work_while_suspects_are_tried() -> None:
    coordinator = make(segments_per_round=20, num_collectors=2, off_policy_degree=1)
    begin_wide(coordinator, 3, 2)
    held = [t.number for t in coordinator.ledger.outstanding() if t.collector == 0]
    for _ in range(2):
        step(coordinator, CollectorDown(0))
        step(coordinator, CollectorUp(0, 3))
    step(coordinator, CollectorDown(0))
    assert coordinator.counts().lost == 3
    assert placed(step(coordinator, CollectorUp(0, 3))) == [(held[0], 0)]
    others = [t.number for t in coordinator.ledger.outstanding() if t.collector == 1]
    assert [collector for _, collector in placed(arrive(coordinator, others[0]))] == [1]
    assert placed(arrive(coordinator, held[0])) == [(held[1], 0)]


def test_a_collector_is_kept_free_for_a_suspect() -> None:
    coordinator = make(segments_per_round=20, num_collectors=2, off_policy_degree=1)
    begin_wide(coordinator, 1, 2)
    (suspect,) = [t.number for t in coordinator.ledger.outstanding() if t.collector == 0]
    for _ in range(2):
        step(coordinator, CollectorDown(0))
        step(coordinator, CollectorUp(0))
    step(coordinator, CollectorDown(0))
    first, second = [t.number for t in coordinator.ledger.outstanding() if t.collector == 1]
    assert placed(arrive(coordinator, first)) == [], "nothing new while it still holds another"
    assert placed(arrive(coordinator, second)) == [(suspect, 1)]


def test_at_zero_suspects_keep_their_collector_and_their_order() -> None:
    coordinator = make(segments_per_round=6, num_collectors=2)
    begin_wide(coordinator, 600, 600)
    assert placed(lose_three_times(coordinator, 0)) == [(0, 0)]
    assert placed(arrive(coordinator, 0)) == [(2, 0)]
    assert placed(drop(coordinator, 1)) == [], "ticket 6 belongs to a collector that tries suspects"
    assert placed(arrive(coordinator, 2)) == [(4, 0)]
    assert placed(arrive(coordinator, 4)) == [(6, 0)]


# ---------------------------------------------------------------- drops


def test_dropped_segments_are_made_up_for_and_counted() -> None:
    coordinator = make(segments_per_round=2, num_collectors=2, off_policy_degree=1)
    begin_wide(coordinator, 2, 2)
    assert placed(drop(coordinator, 0)) == [(4, 0)]
    counts = coordinator.counts()
    assert (counts.issued, counts.dropped, counts.running) == (5, 1, 4)
    assert of_type(arrive(coordinator, 1, 4), Train) == [Train(0, (1, 4), 1)]


def test_too_many_drops_end_the_run_as_failed_and_say_why() -> None:
    coordinator = make(segments_per_round=2, num_collectors=1, max_drops_per_round=3)
    begin_wide(coordinator, 9)
    for number, reason in enumerate(["no_signal", "no_signal", "reward_failed"]):
        assert of_type(drop(coordinator, number, reason), Finish) == []
    (finish,) = of_type(drop(coordinator, 3, "no_signal"), Finish)
    assert finish.failed
    assert "4 segments were dropped for a round of 2 and at most 3 may be" in finish.reason
    assert "async_training.max_drops_per_round): 3 for 'no_signal', 1 for 'reward_failed'" in finish.reason
    assert "pace/dropped_samples" in finish.reason


def test_by_default_ten_times_a_round_may_be_dropped() -> None:
    coordinator = make(segments_per_round=2)
    begin_wide(coordinator, 1)
    assert [of_type(drop(coordinator, number), Finish) for number in range(20)] == [[]] * 20
    assert of_type(drop(coordinator, 20), Finish)


def test_drops_are_counted_anew_for_each_round_of_segments_that_are_kept() -> None:
    """Above k = 0 collectors may fill several rounds while the learner trains one."""
    coordinator = make(segments_per_round=2, off_policy_degree=3, max_drops_per_round=2)
    begin_wide(coordinator, 1)
    number = 0
    for _ in range(4):
        for _ in range(2):
            assert of_type(drop(coordinator, number), Finish) == []
            arrive(coordinator, number + 1)
            number += 2
    assert coordinator.counts().dropped == 8
    assert coordinator.version == 0


def test_a_run_that_is_to_end_is_not_failed_by_drops() -> None:
    coordinator = make(rounds=1, max_drops_per_round=0, mode="replay", num_collectors=2, eval_at_end=True)
    begin_wide(coordinator, 1, 1)
    coordinator.apply(DialTurned(1), 0.0)
    coordinator.decide(0.0)
    arrive(coordinator, 0)
    step(coordinator, RoundTrained(1, Batch(0, (), 1)))
    while running := coordinator.ledger.running_on.get(1):
        assert of_type(drop(coordinator, min(running)), Finish) == []


def kept_in(order: Random, worth: list[bool], size: int, num_collectors: int) -> list[tuple[int, ...]]:
    """Rounds of a run at k = 0 whose segments arrive in random order; ``worth`` says which are kept."""
    coordinator = make(
        rounds=3, segments_per_round=size, num_collectors=num_collectors, max_drops_per_round=10**6
    )
    begin_wide(coordinator, *(order.randint(1, 9) for _ in range(num_collectors)))
    rounds: list[tuple[int, ...]] = []
    steps: dict[int, int] = {}
    while len(rounds) < 3:
        running = [ticket for held in coordinator.ledger.running_on.values() for ticket in held]
        number = order.choice(sorted(running))
        ticket = coordinator.ledger.ticket(number)
        steps[number] = ticket.steps_collected
        if not worth[number]:
            drop(coordinator, number)
            continue
        for train in of_type(arrive(coordinator, number), Train):
            rounds.append(train.tickets)
            made = [
                Segment(Ticket(n, 0, 0, 0, 0), None, np.array([0]), {"tokens": 10 + n}) for n in rounds[-1]
            ]
            version = coordinator.version + 1
            step(coordinator, RoundTrained(version, Batch(version - 1, tuple(made), 0)))
            step(coordinator, Published(version))
    rounds.append(tuple(steps[number] for number in sorted(steps)))
    return rounds


@settings(max_examples=80, deadline=None, database=None)
@given(
    worth=st.lists(st.booleans(), max_size=30),
    size=st.integers(1, 5),
    num_collectors=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_at_zero_the_smallest_prefix_with_enough_kept_is_trained_whatever_arrives_first(
    worth: list[bool], size: int, num_collectors: int, seed: int
) -> None:
    fates = [*worth, *[True] * 15]
    kept = [number for number, is_kept in enumerate(fates) if is_kept]
    one, other = (kept_in(Random(f"{seed} {n}"), fates, size, num_collectors) for n in range(2))
    assert one[:3] == [tuple(kept[first : first + size]) for first in range(0, 3 * size, size)]
    assert one == other, "the steps that tickets name do not depend on timing, either"


# ---------------------------------------------------------------- stragglers


def blocked(**changes: Any) -> Coordinator:
    """Two collectors, k = 1, a round of 1: ticket 1 holds round 1 up while ticket 2 is there."""
    coordinator = make(num_collectors=2, off_policy_degree=1, **changes)
    begin_wide(coordinator, 1, 1)
    arrive(coordinator, 0)
    end_round(coordinator)
    return coordinator


def test_a_ticket_that_holds_a_round_up_is_cut_once() -> None:
    coordinator = blocked(straggler_policy="cut")
    straggler = coordinator.ledger.ticket(1)
    assert of_type(arrive(coordinator, 2), Cut) == [Cut((straggler,))]
    assert coordinator.decide(1.0) == []
    assert of_type(arrive(coordinator, 1), Train) == [Train(1, (1,), 1)]


def test_a_ticket_that_was_lost_after_it_was_cut_is_cut_again() -> None:
    coordinator = blocked(straggler_policy="cut")
    straggler = coordinator.ledger.ticket(1)
    arrive(coordinator, 2)
    again = replace(straggler, collector=0, attempt=1)
    assert step(coordinator, CollectorDown(1)) == [Issue(again), Cut((again,))]


def test_nobody_is_cut_by_default_or_while_segments_are_missing() -> None:
    assert of_type(arrive(blocked(), 2), Cut) == []
    coordinator = make(segments_per_round=2, num_collectors=4, off_policy_degree=1, straggler_policy="cut")
    begin_wide(coordinator, 1, 1, 1, 1)
    assert [of_type(arrive(coordinator, number), Cut) for number in (1, 0)] == [[], []]


def test_no_more_are_cut_than_hold_the_round_up() -> None:
    coordinator = make(segments_per_round=2, num_collectors=1, off_policy_degree=1, straggler_policy="cut")
    begin_wide(coordinator, 9)
    arrive(coordinator, 0, 1)
    end_round(coordinator)
    assert of_type(arrive(coordinator, 4), Cut) == []
    (cut,) = of_type(arrive(coordinator, 5), Cut)
    assert [ticket.number for ticket in cut.tickets] == [2, 3]
    assert of_type(arrive(coordinator, 3), Cut) == []
    assert of_type(arrive(coordinator, 2), Train) == [Train(1, (2, 3), 1)]


# ---------------------------------------------------------------- who joins and leaves


def test_a_collector_that_joins_takes_tickets() -> None:
    coordinator = make(segments_per_round=9, num_collectors=2, off_policy_degree=1)
    begin_wide(coordinator, 1, 1)
    assert step(coordinator, CollectorsAdded(2)) == []
    assert coordinator.members.present == [0, 1, 2, 3]
    assert placed(step(coordinator, CollectorUp(3, 2))) == [(2, 3), (3, 3)]


def test_a_collector_that_leaves_finishes_what_it_holds_and_gets_nothing_new() -> None:
    coordinator = make(segments_per_round=9, num_collectors=2, off_policy_degree=1)
    begin_wide(coordinator, 2, 2)
    held = sorted(coordinator.ledger.running_on[1])
    assert step(coordinator, CollectorRemoved(1)) == []
    assert placed(arrive(coordinator, held[0])) == []
    assert of_type(arrive(coordinator, held[1]), Retire) == [Retire(1)]
    assert coordinator.members.present == [0]
    assert step(coordinator, CollectorUp(1, 5)) == [], "too late"
    assert coordinator.num_up == 1


def test_tickets_of_a_leaving_collector_that_is_lost_go_to_others() -> None:
    coordinator = make(segments_per_round=9, num_collectors=3, off_policy_degree=1)
    begin_wide(coordinator, 1, 1, 1)
    step(coordinator, CollectorRemoved(1))
    assert step(coordinator, CollectorDown(1)) == [Retire(1)]
    assert coordinator.counts().lost == 1
    assert placed(arrive(coordinator, 0)) == [(1, 0)]


def test_an_idle_collector_leaves_at_once_and_the_last_one_stays() -> None:
    coordinator = make(segments_per_round=1, num_collectors=2, off_policy_degree=1)
    coordinator.start(0.0)
    assert step(coordinator, CollectorRemoved(0)) == [Retire(0)]
    assert step(coordinator, CollectorRemoved(1)) == []
    assert coordinator.members.present == [1]


def test_when_the_dial_is_turned_to_zero_tickets_belong_to_the_members_in_order() -> None:
    coordinator = make(rounds=99, segments_per_round=4, num_collectors=2, off_policy_degree=1)
    coordinator.start(0.0)
    step(coordinator, CollectorsAdded(1))
    step(coordinator, CollectorRemoved(0))
    step(coordinator, DialTurned(0))
    for collector in (1, 2):
        step(coordinator, CollectorUp(collector))
    assert placed(step(coordinator, Published(0))) == [(0, 1), (1, 2), (2, 1), (3, 2)]


def test_at_zero_a_lost_ticket_of_one_that_left_belongs_to_another() -> None:
    coordinator = make(segments_per_round=3, num_collectors=3, off_policy_degree=1)
    begin_wide(coordinator, 1, 1, 1)
    step(coordinator, DialTurned(0))
    step(coordinator, CollectorDown(1))
    assert placed(step(coordinator, CollectorRemoved(1))) == [(4, 0), (1, 2)]


def test_at_zero_nobody_may_join_or_leave() -> None:
    with pytest.raises(ConfigError, match=r"at off_policy_degree 0: .* the order of experience\. Turn"):
        make(num_collectors=2).check_members()
    coordinator = make(num_collectors=2, off_policy_degree=1)
    coordinator.check_members()
    coordinator.check_members(leaving=1)
    with pytest.raises(ConfigError, match="there is no collector 2 that could leave"):
        coordinator.check_members(leaving=2)
    with pytest.raises(ConfigError, match="it is the last one"):
        make(off_policy_degree=1).check_members(leaving=0)
    make(num_collectors=2, off_policy_degree=-1).check_members()


def resumed(coordinator: Coordinator, **changes: Any) -> Coordinator:
    again = make(**changes)
    again.load_state_dict(json.loads(json.dumps(coordinator.state_dict())))
    return again


def test_members_are_saved_and_numbers_are_not_given_twice() -> None:
    config = {"segments_per_round": 9, "num_collectors": 3, "off_policy_degree": 1}
    coordinator = make(**config)
    begin_wide(coordinator, 1, 1, 1)
    step(coordinator, CollectorsAdded(1))
    step(coordinator, CollectorRemoved(3))
    step(coordinator, CollectorRemoved(1))
    again = resumed(coordinator, **config)
    assert again.members.present == [0, 2]
    step(again, CollectorsAdded(1))
    assert again.members.present == [0, 2, 4]
    assert again.ledger.ticket(1).collector != 1, "its ticket belongs to another one"
    fewer = resumed(coordinator, **{**config, "num_collectors": 2})
    assert fewer.members.present == [0, 1], "the configuration says otherwise"


def test_a_state_from_before_members_is_read() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=1)
    begin_wide(coordinator, 1, 1)
    state = coordinator.state_dict()
    del state["members"]
    again = make(num_collectors=2, off_policy_degree=1)
    again.load_state_dict(state)
    assert again.members.present == [0, 1]
    assert again.counts().lost == 2
