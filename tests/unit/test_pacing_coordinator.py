"""The coordinator, step by step: tickets, rounds, losses, collectors, the dial."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from offbeat.errors import ConfigError, PromiseBroken
from offbeat.pacing import AUTO, Coordinator, Counts
from offbeat.pacing.actions import Action, Checkpoint, Evaluate, Finish, Issue, Publish, Train
from offbeat.pacing.deadlines import BoundBroken
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    DialTurned,
    Event,
    GatesSet,
    HealthChanged,
    Issued,
    Notice,
    Published,
    RoundTrained,
    SegmentDropped,
    Signals,
    Started,
)
from offbeat.pacing.ledger import RUNNING
from offbeat.seeding import derive_seed, reseed
from offbeat.types import Ticket

from .pacing_steps import arrive, arrived, begin, end_round, make, of_type, step, tickets


def ticket(number: int, collector: int, version: int, degree: int = 0, attempt: int = 0) -> Ticket:
    seed = derive_seed(0, "collect", number)
    return Ticket(number, collector, version, version + degree, seed, attempt)


# ---------------------------------------------------------------- k = 0


def test_zero_is_one_fixed_sequence() -> None:
    coordinator = make(rounds=2, segments_per_round=2, num_collectors=2)
    assert coordinator.start(0.0) == [Publish(0)]
    assert step(coordinator, CollectorUp(1), 0.0) == []
    assert step(coordinator, CollectorUp(0), 0.0) == []
    assert step(coordinator, Published(0), 0.0) == [Issue(ticket(0, 0, 0)), Issue(ticket(1, 1, 0))]
    assert step(coordinator, arrived(1, 0), 0.0) == []
    assert step(coordinator, arrived(0, 0), 0.0) == [Train(0, (0, 1), 0)]
    assert step(coordinator, RoundTrained(1), 0.0) == [Publish(1)]
    assert step(coordinator, Published(1), 0.0) == [Issue(ticket(2, 0, 1)), Issue(ticket(3, 1, 1))]
    assert step(coordinator, arrived(2, 1), 0.0) == []
    assert step(coordinator, arrived(3, 1), 0.0) == [Train(1, (2, 3), 0)]
    assert step(coordinator, RoundTrained(2), 0.0) == [Publish(2), Finish("all rounds trained")]
    assert coordinator.finished
    assert coordinator.counts() == Counts(issued=4, running=0, ready=0, trained=4, dropped=0, lost=0)


def test_at_zero_a_ticket_waits_for_its_own_collector() -> None:
    coordinator = make(segments_per_round=4, num_collectors=2)
    coordinator.start(0.0)
    step(coordinator, CollectorUp(0), 0.0)
    assert [t.collector for t in tickets(step(coordinator, Published(0), 0.0))] == [0]
    assert [t.collector for t in tickets(step(coordinator, CollectorUp(1), 0.0))] == [1, 0, 1]


def test_above_zero_a_busy_collector_is_passed_over() -> None:
    coordinator = make(segments_per_round=4, num_collectors=2, off_policy_degree=1)
    assert [t.collector for t in tickets(begin(coordinator))] == [0, 1]
    assert [t.collector for t in tickets(arrive(coordinator, 1))] == [1]
    assert [t.collector for t in tickets(arrive(coordinator, 2))] == [1]
    assert [t.collector for t in tickets(arrive(coordinator, 0))] == [0]


# ---------------------------------------------------------------- deadlines


def test_a_straggler_makes_training_wait_when_its_round_has_come() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=1)
    assert tickets(begin(coordinator)) == [ticket(0, 0, 0, 1), ticket(1, 1, 0, 1)]
    assert of_type(arrive(coordinator, 0), Train) == [Train(0, (0,), 1)]
    assert tickets(end_round(coordinator)) == [ticket(2, 0, 1, 1)]
    assert of_type(arrive(coordinator, 2), Train) == []
    assert "ticket 1 on collector 1" in coordinator.waiting_for()
    assert of_type(arrive(coordinator, 1), Train) == [Train(1, (1,), 1)]


def test_collection_goes_at_most_k_rounds_ahead() -> None:
    coordinator = make(segments_per_round=2, num_collectors=9, off_policy_degree=2)
    assert len(tickets(begin(coordinator))) == 6
    assert coordinator.lag() == 3.0


def test_older_weights_leave_less_room() -> None:
    coordinator = make(num_collectors=9, off_policy_degree=2, publish_interval=3)
    assert len(tickets(begin(coordinator))) == 3
    arrive(coordinator, 0)
    assert tickets(end_round(coordinator, publish=False)) == []
    assert coordinator.published == 0


def test_a_segment_of_newer_weights_is_welcome() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=1)
    begin(coordinator)
    arrive(coordinator, 0)
    end_round(coordinator)
    actions = step(coordinator, arrived(1, 1), 0.0)
    assert of_type(actions, Train) == [Train(1, (1,), 1)]


def test_a_segment_older_than_its_ticket_allows_is_never_trained() -> None:
    coordinator = make()
    begin(coordinator)
    arrive(coordinator, 0)
    end_round(coordinator)
    with pytest.raises(BoundBroken, match="round 1 would train ticket 1 of version 0 with deadline 1"):
        step(coordinator, arrived(1, 0), 0.0)


def test_every_round_waits_for_min_batch_count() -> None:
    coordinator = make(num_collectors=4, off_policy_degree=3, min_segments=3)
    begin(coordinator)
    assert of_type(arrive(coordinator, 0, 1), Train) == []
    assert of_type(arrive(coordinator, 2), Train) == [Train(0, (0,), 3)]
    assert of_type(end_round(coordinator), Train) == []
    assert of_type(arrive(coordinator, 3), Train) == [Train(1, (1,), 3)]


def test_a_round_waits_for_no_more_than_can_still_come() -> None:
    coordinator = make(rounds=4, num_collectors=4, off_policy_degree=3, min_segments=4, publish_interval=3)
    begin(coordinator)
    assert of_type(arrive(coordinator, 0, 1, 2, 3), Train) == [Train(0, (0,), 3)]
    assert of_type(end_round(coordinator, publish=False), Train) == [Train(1, (1,), 3)], (
        "no newer weights yet"
    )


def test_a_round_does_not_wait_for_what_a_closed_gate_holds_back() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=3, min_segments=4)
    begin(coordinator)
    step(coordinator, GatesSet(collect=False))
    assert of_type(arrive(coordinator, 0), Train) == [], "the other one is still to come"
    assert of_type(arrive(coordinator, 1), Train) == [Train(0, (0,), 3)]


def test_a_round_does_not_wait_for_what_a_lowered_dial_forbids() -> None:
    coordinator = make(off_policy_degree=3, min_segments=3)
    begin(coordinator)
    step(coordinator, DialTurned(0), 0.0)
    assert of_type(arrive(coordinator, 0, 1), Train) == [Train(0, (1,), 0)]


def test_the_first_round_does_not_wait_for_more_than_the_run_has() -> None:
    coordinator = make(rounds=2, num_collectors=4, off_policy_degree=3, min_segments=4)
    assert len(tickets(begin(coordinator))) == 2
    assert of_type(arrive(coordinator, 0, 1), Train) == [Train(0, (0,), 3)]


def test_max_queue_size_limits_what_is_outstanding() -> None:
    coordinator = make(num_collectors=9, off_policy_degree=5, max_outstanding=2)
    assert len(tickets(begin(coordinator))) == 2
    actions = arrive(coordinator, 0)
    assert (len(of_type(actions, Train)), len(tickets(actions))) == (1, 1)


# ---------------------------------------------------------------- warming up


def test_the_first_round_waits_for_the_warm_up_and_no_other_does() -> None:
    coordinator = make(mode="replay", replay_ratio=1.0, off_policy_degree=1, warmup_s=5.0)
    begin(coordinator, now_s=10.0)
    assert coordinator.wake_at_s(10.0) == 15.0
    early = arrive(coordinator, 0, now_s=12.0)
    assert of_type(early, Train) == []
    assert len(tickets(early)) == 1, "collection goes on meanwhile"
    assert coordinator.decide(14.9) == []
    assert coordinator.wake_at_s(14.9) == 15.0
    assert of_type(coordinator.decide(15.0), Train) == [Train(0, (0,), 1)]
    assert coordinator.wake_at_s(15.0) is None
    end_round(coordinator, now_s=15.1)
    assert of_type(arrive(coordinator, 1, now_s=15.1), Train) == [Train(1, (1,), 1)]


def test_the_warm_up_waits_for_segments_too() -> None:
    coordinator = make(mode="replay", num_collectors=3, off_policy_degree=2, warmup_s=5.0, min_segments=3)
    begin(coordinator)
    arrive(coordinator, 0, 1, now_s=1.0)
    assert of_type(coordinator.decide(5.0), Train) == []
    assert of_type(arrive(coordinator, 2, now_s=6.0), Train) == [Train(0, (0, 1, 2), 2)]


def test_the_warm_up_collects_no_more_than_the_dial_allows() -> None:
    coordinator = make(mode="replay", off_policy_degree=1, warmup_s=60.0, min_segments=1)
    begin(coordinator)
    issued = [tickets(arrive(coordinator, number, now_s=1.0)) for number in range(2)]
    assert [len(found) for found in issued] == [1, 0]
    assert coordinator.counts().ready == 2


def test_a_run_that_has_trained_does_not_warm_up_again() -> None:
    coordinator = make(mode="replay", warmup_s=5.0)
    begin(coordinator)
    arrive(coordinator, 0, now_s=5.0)
    end_round(coordinator, now_s=5.0)
    again = make(mode="replay", warmup_s=5.0)
    again.load_state_dict(coordinator.state_dict())
    begin(again, now_s=100.0)
    assert again.wake_at_s(100.0) is None
    (issued,) = again.ledger.outstanding()
    assert of_type(arrive(again, issued.number, now_s=100.0), Train) == [Train(1, (issued.number,), 0)]


def test_a_run_that_has_not_trained_yet_warms_up_from_its_new_start() -> None:
    again = make(mode="replay", warmup_s=5.0)
    again.load_state_dict(make(mode="replay", warmup_s=5.0).state_dict())
    begin(again, now_s=100.0)
    assert again.wake_at_s(100.0) == 105.0


def test_who_waits_for_the_warm_up() -> None:
    coordinator = make(mode="replay", warmup_s=5.0)
    assert coordinator.warm_at_s == -math.inf, "before it begins"
    begin(coordinator, now_s=10.0)
    assert coordinator.warm_at_s == 15.0
    assert "still out: ticket 0" in coordinator.waiting_for()
    arrive(coordinator, 0, now_s=12.0)
    assert coordinator.waiting_for() == "round 0 waits until 5 s of warm-up are over"
    coordinator.decide(15.0)
    assert coordinator.waiting_for() == "round 0 is being trained by the learner"
    end_round(coordinator, now_s=16.0)
    assert coordinator.warm_at_s == -math.inf, "long ago"
    assert "warm-up" not in coordinator.waiting_for()


# ---------------------------------------------------------------- filling the replay first


def collect_until_trained(coordinator: Coordinator) -> tuple[int, Train]:
    """Let tickets arrive in order until a round begins: how many did, and that round."""
    for count in range(1, 1000):
        number = coordinator.ledger.with_status(RUNNING)[0].number
        if trains := of_type(arrive(coordinator, number), Train):
            return count, trains[0]
    raise AssertionError("no round began")


@pytest.mark.parametrize(
    ("ratio", "per_round", "min_segments", "first", "later"),
    [
        (0.5, 2, 9, 9, 2),  # far more than a round's share before the first
        (0.5, 2, 2, 2, 2),
        (0.25, 2, 9, 9, 4),  # the ratio asks for more than a round's share
        (0.25, 2, 3, 4, 4),
        (1 / 49, 49, 60, 60, 49),  # no segment too many by rounding
        (1 / 49, 49, 0, 49, 49),
    ],
)
@pytest.mark.parametrize("degree", [0, 1])
def test_every_later_round_waits_for_its_own_segments(
    ratio: float, per_round: int, min_segments: int, first: int, later: int, degree: int
) -> None:
    coordinator = make(
        mode="replay",
        replay_ratio=ratio,
        segments_per_round=per_round,
        min_segments=min_segments,
        off_policy_degree=degree,
    )
    begin(coordinator)
    for version in range(10):
        count, train = collect_until_trained(coordinator)
        assert (train.version, count) == (version, first if version == 0 else later)
        assert len(train.tickets) == count
        end_round(coordinator)


def test_without_a_ratio_rounds_wait_for_nothing_but_the_first_segments() -> None:
    coordinator = make(mode="replay", segments_per_round=2, min_segments=9, off_policy_degree=1)
    begin(coordinator)
    assert collect_until_trained(coordinator)[0] == 9
    assert of_type(end_round(coordinator), Train) == [Train(1, (), 1)]


def test_what_fills_the_replay_is_not_part_of_the_dial() -> None:
    """Collection is k rounds ahead of training, whatever the first round waited for."""
    coordinator = make(
        mode="replay",
        replay_ratio=0.5,
        segments_per_round=2,
        min_segments=9,
        off_policy_degree=1,
        num_collectors=99,
    )
    assert len(tickets(begin(coordinator))) == 11
    arrive(coordinator, *range(9))
    assert tickets(end_round(coordinator)) and coordinator.counts().issued == 13
    assert coordinator.counts().running == 4


def test_new_segments_of_a_replay_may_be_one_version_older_than_the_dial() -> None:
    """Tickets are issued while weights are being published; what they bring waits for its round."""
    coordinator = make(mode="replay", replay_ratio=1.0, off_policy_degree=2)
    begin(coordinator)
    ages: list[int] = []
    for version in range(8):
        actions: list[Action] = []
        while running := coordinator.ledger.with_status(RUNNING):
            actions += arrive(coordinator, running[0].number)
        if version == 0:
            (train,) = of_type(actions, Train)
        ages += [version - coordinator.ledger.ticket(number).version for number in train.tickets]
        (train,) = of_type(end_round(coordinator), Train)
    assert max(ages) == 3


# ---------------------------------------------------------------- losses


def test_a_lost_ticket_waits_for_its_own_collector_at_zero() -> None:
    coordinator = make(num_collectors=2, segments_per_round=2)
    _, lost = tickets(begin(coordinator))
    arrive(coordinator, 0)
    assert step(coordinator, CollectorDown(1), 0.0) == []
    assert coordinator.counts().lost == 1
    assert tickets(step(coordinator, CollectorUp(1), 0.0)) == [replace(lost, attempt=1)]


def test_a_lost_ticket_goes_to_a_free_collector_and_keeps_version_and_deadline() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=1)
    _, lost = tickets(begin(coordinator))
    arrive(coordinator, 0)
    again = tickets(step(coordinator, CollectorDown(1), 0.0))
    assert again == [replace(lost, collector=0, attempt=1)]
    assert coordinator.counts().lost == 0
    step(coordinator, CollectorDown(0), 0.0)
    assert coordinator.counts().lost == 1, "nobody is left to take it"
    end_round(coordinator)
    assert tickets(step(coordinator, CollectorUp(1), 0.0))[0] == replace(lost, collector=1, attempt=2)


def test_a_lost_ticket_waits_while_every_collector_is_busy() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=3)
    _, lost = tickets(begin(coordinator))
    assert step(coordinator, CollectorDown(1), 0.0) == []
    again = tickets(arrive(coordinator, 0))
    assert again[0] == replace(lost, collector=0, attempt=1), "it comes before any new ticket"


def test_rounds_of_a_replay_take_a_collectors_segments_in_the_order_it_made_them() -> None:
    coordinator = make(mode="replay", num_collectors=2, off_policy_degree=4)
    begin(coordinator)
    assert arrive(coordinator, 0)[0] == Train(0, (0,), 4), "collector 0 made it"
    arrive(coordinator, 2, 3)
    step(coordinator, CollectorDown(1), 0.0)
    arrive(coordinator, 4)
    assert coordinator.ledger.ticket(1).collector == 0
    arrive(coordinator, 1)
    saved = coordinator.state_dict()
    taken = [of_type(end_round(coordinator), Train)[0].tickets for _ in range(4)]
    assert taken == [(2,), (3,), (4,), (1,)]
    again = make(mode="replay", num_collectors=2, off_policy_degree=4)
    again.load_state_dict(saved)
    assert list(again.ledger.ready) == [0, 2, 3, 4, 1]


def test_a_ticket_may_be_lost_again_and_again() -> None:
    coordinator = make()
    begin(coordinator)
    for attempt in (1, 2, 3):
        step(coordinator, CollectorDown(0), 0.0)
        assert step(coordinator, CollectorUp(0), 0.0) == [Issue(ticket(0, 0, 0, attempt=attempt))]
    assert arrive(coordinator, 0) == [Train(0, (0,), 0)]


def test_all_tickets_in_line_on_a_lost_collector_come_back_in_order() -> None:
    coordinator = make(segments_per_round=4, num_collectors=2)
    begin(coordinator)
    step(coordinator, CollectorDown(0), 0.0)
    again = tickets(step(coordinator, CollectorUp(0), 0.0))
    assert again == [ticket(0, 0, 0, attempt=1), ticket(2, 0, 0, attempt=1)]


def test_a_dropped_segment_is_made_up_for() -> None:
    coordinator = make(rounds=2, segments_per_round=2)
    begin(coordinator)
    arrive(coordinator, 0)
    assert tickets(step(coordinator, SegmentDropped(0), 0.0)) == [ticket(2, 0, 0)]
    assert arrive(coordinator, 1, 2) == [Train(0, (1, 2), 0)]
    assert [t.number for t in tickets(end_round(coordinator))] == [3, 4]


# ---------------------------------------------------------------- the dial


def test_lowering_the_dial_keeps_what_was_promised_to_issued_tickets() -> None:
    coordinator = make(num_collectors=4, off_policy_degree=3)
    assert [t.deadline for t in tickets(begin(coordinator))] == [3, 3, 3, 3]
    assert step(coordinator, DialTurned(0), 0.0) == []
    assert coordinator.degree == 0
    trained = [of_type(arrive(coordinator, 0), Train)[0].version]
    for number in (1, 2):
        assert tickets(end_round(coordinator)) == []
        trained.append(of_type(arrive(coordinator, number), Train)[0].version)
    assert trained == [0, 1, 2]


def test_after_lowering_new_tickets_wait_until_the_old_ones_leave_room() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=1)
    begin(coordinator)
    step(coordinator, DialTurned(0), 0.0)
    arrive(coordinator, 0)
    assert tickets(end_round(coordinator)) == []
    arrive(coordinator, 1)
    assert [t.deadline for t in tickets(end_round(coordinator))] == [2]


def test_raising_the_dial_issues_at_once() -> None:
    coordinator = make(num_collectors=3)
    begin(coordinator)
    assert [t.deadline for t in tickets(step(coordinator, DialTurned(2), 0.0))] == [2, 2]


def test_a_setting_the_run_cannot_keep_is_refused_and_changes_nothing() -> None:
    coordinator = make(off_policy_degree=2, publish_interval=3)
    begin(coordinator)
    with pytest.raises(ConfigError, match="weight_sync_interval"):
        step(coordinator, DialTurned(1), 0.0)
    assert coordinator.degree == 2


def test_auto_moves_the_dial_from_what_rounds_measure() -> None:
    coordinator = make(rounds=100, off_policy_degree=AUTO)
    begin(coordinator)
    idle = Signals(round_s=2.0, collect_idle=0.5, train_idle=0.5)
    for number in range(20):
        arrive(coordinator, number)
        end_round(coordinator, signals=idle)
        if coordinator.degree:
            break
    assert coordinator.degree == 1
    step(coordinator, DialTurned(0), 0.0)
    assert coordinator.degree == 0


# ---------------------------------------------------------------- the dial opens


def degrees(coordinator: Coordinator, rounds: int) -> list[int]:
    """Train so many rounds on the tickets in their order; k with which each of them began."""
    found = []
    first = coordinator.counts().trained
    for number in range(first, first + rounds):
        found.append(coordinator.degree)
        assert coordinator.ledger.ticket(number).deadline >= coordinator.version
        arrive(coordinator, number)
        end_round(coordinator)
    return found


def test_a_stream_opens_by_one_every_few_rounds() -> None:
    coordinator = make(num_collectors=9, off_policy_degree=2, open_rounds=2)
    assert [t.deadline for t in tickets(begin(coordinator))] == [0]
    assert degrees(coordinator, 7) == [0, 0, 1, 1, 2, 2, 2]
    born = [ticket.deadline - ticket.version for ticket in coordinator.ledger.outstanding()]
    assert set(born) == {2}


def test_rounds_are_recorded_with_the_degree_in_force() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=4, open_rounds=1)
    begin(coordinator)
    trained = []
    for number in range(4):
        trained += of_type(arrive(coordinator, number), Train)
        trained += of_type(end_round(coordinator), Train)
    assert [train.off_policy_degree for train in trained] == [0, 1, 2, 3]


def test_a_stream_that_publishes_rarely_opens_from_what_that_needs() -> None:
    coordinator = make(num_collectors=9, off_policy_degree=3, publish_interval=3, open_rounds=2)
    assert len(tickets(begin(coordinator))) == 3
    assert coordinator.degree == 2


@pytest.mark.parametrize(
    ("changes", "degree"),
    [
        ({"mode": "replay", "off_policy_degree": 3}, 3),
        ({"off_policy_degree": 3, "open_rounds": 0}, 3),
        ({}, 0),
    ],
)
def test_replay_opens_at_once(changes: dict[str, Any], degree: int) -> None:
    assert make(**{"open_rounds": 3, **changes}).degree == degree


def test_the_tuner_opens_by_itself() -> None:
    coordinator = make(rounds=100, off_policy_degree=AUTO, open_rounds=50)
    begin(coordinator)
    idle, seen = Signals(round_s=2.0, collect_idle=0.5, train_idle=0.5), set()
    for number in range(20):
        arrive(coordinator, number)
        end_round(coordinator, signals=idle)
        seen.add(coordinator.degree)
    assert seen == {0, 1}


def test_a_dial_that_is_turned_opens_no_further_than_the_round_allows() -> None:
    coordinator = make(rounds=30, num_collectors=9, open_rounds=2)
    begin(coordinator)
    step(coordinator, DialTurned(2), 0.0)
    assert degrees(coordinator, 5) == [0, 0, 1, 1, 2]
    step(coordinator, DialTurned(1), 0.0)
    assert coordinator.degree == 1
    degrees(coordinator, 15)
    step(coordinator, DialTurned(7), 0.0)
    assert coordinator.degree == 7


def test_a_resumed_run_goes_on_opening() -> None:
    coordinator = make(num_collectors=9, off_policy_degree=4, open_rounds=2)
    begin(coordinator)
    degrees(coordinator, 3)
    again = make(num_collectors=9, off_policy_degree=4, open_rounds=2)
    again.load_state_dict(coordinator.state_dict())
    assert again.degree == coordinator.degree == 1
    other = make(num_collectors=9, off_policy_degree=5, open_rounds=1)
    other.load_state_dict(coordinator.state_dict())
    assert other.degree == 3
    begin(again)
    assert degrees(again, 4) == [1, 2, 2, 3]


# ---------------------------------------------------------------- pace of tickets


def test_tickets_keep_the_issue_interval_and_ask_to_be_woken() -> None:
    coordinator = make(num_collectors=3, off_policy_degree=4, issue_interval_s=0.5)
    assert len(tickets(begin(coordinator, now_s=10.0))) == 1
    assert coordinator.wake_at_s(10.0) == 10.5
    assert coordinator.decide(10.4) == []
    assert len(tickets(coordinator.decide(10.5))) == 1
    assert coordinator.wake_at_s(10.5) == 11.0


def test_nobody_is_woken_without_a_reason() -> None:
    coordinator = make(num_collectors=3, off_policy_degree=4)
    begin(coordinator)
    assert coordinator.wake_at_s(0.0) is None


# ---------------------------------------------------------------- what may not happen


def test_a_segment_arrives_once() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=1)
    begin(coordinator)
    arrive(coordinator, 0)
    with pytest.raises(PromiseBroken, match="ticket 0 cannot arrive: it is being trained"):
        step(coordinator, arrived(0, 0), 0.0)


@pytest.mark.parametrize("version", [0, 2])
def test_only_the_round_that_was_begun_can_end(version: int) -> None:
    coordinator = make()
    begin(coordinator)
    arrive(coordinator, 0)
    with pytest.raises(PromiseBroken, match="round 0 was due"):
        step(coordinator, RoundTrained(version), 0.0)


def test_a_round_that_was_not_begun_cannot_end() -> None:
    coordinator = make()
    begin(coordinator)
    with pytest.raises(PromiseBroken, match="round 0 was due"):
        step(coordinator, RoundTrained(1), 0.0)


def test_who_waits_for_whom() -> None:
    coordinator = make()
    coordinator.start(0.0)
    assert "wait for version 0 to be published" in coordinator.waiting_for()
    step(coordinator, Published(0), 0.0)
    assert coordinator.waiting_for() == "round 0 waits for collectors [0] to start"
    step(coordinator, CollectorUp(0), 0.0)
    assert "still out: ticket 0 on collector 0" in coordinator.waiting_for()
    arrive(coordinator, 0)
    assert coordinator.waiting_for() == "round 0 is being trained by the learner"


# ---------------------------------------------------------------- several events, one decision


def test_nothing_but_a_publish_comes_before_the_decision() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=1, checkpoint_interval=1, eval_interval=1)
    begin(coordinator)
    arrive(coordinator, 0)
    assert coordinator.apply(arrived(1, 0), 0.0) == ()
    assert list(coordinator.apply(RoundTrained(1), 0.0)) == [Publish(1)]
    assert coordinator.apply(Published(1), 0.0) == ()
    assert coordinator.decide(0.0) == [Checkpoint(1), Evaluate(1, blocking=True)]
    assert coordinator.decide(0.0) == []


def test_what_arrived_together_is_decided_about_together() -> None:
    coordinator = make(segments_per_round=2, num_collectors=4, off_policy_degree=1)
    begin(coordinator)
    for number in (3, 0, 2):
        assert coordinator.apply(arrived(number, 0), 0.0) == ()
    assert coordinator.decide(0.0) == [Train(0, (0, 2), 1)]


def test_events_that_change_no_decision_are_ignored() -> None:
    coordinator = make()
    begin(coordinator)
    before = coordinator.state_dict()
    ignored: list[Event] = [
        Notice("a line"),
        HealthChanged("learner", "up"),
        Issued(ticket(0, 0, 0)),
        Started(),
    ]
    assert [action for event in ignored for action in step(coordinator, event)] == []
    assert coordinator.state_dict() == before


def test_a_collector_holds_as_many_tickets_as_it_wants() -> None:
    coordinator = make(segments_per_round=8, num_collectors=2, off_policy_degree=1)
    coordinator.start(0.0)
    coordinator.apply(Published(0), 0.0)
    assert [t.collector for t in tickets(step(coordinator, CollectorUp(0, capacity=2)))] == [0, 0]
    assert [t.collector for t in tickets(step(coordinator, CollectorUp(1, capacity=3)))] == [1, 1, 1]
    assert [t.collector for t in tickets(step(coordinator, CollectorUp(0, capacity=4)))] == [0, 0]
    assert tickets(step(coordinator, CollectorUp(0, capacity=1))) == [], "sent again, with another number"
    assert tickets(arrive(coordinator, 0, 1, 5)) == []
    assert [t.collector for t in tickets(arrive(coordinator, 6))] == [0]


def test_a_run_that_went_back_gets_other_seeds_also_for_tickets_that_it_issues_again() -> None:
    coordinator = make(num_collectors=2, segments_per_round=2)
    first, second = tickets(begin(coordinator))
    again = make(num_collectors=2, segments_per_round=2)
    again.load_state_dict(coordinator.state_dict())
    again.rollbacks = 3
    issued = tickets(begin(again))
    assert [t.seed for t in issued] == [reseed(first.seed, 3), reseed(second.seed, 3)]
    arrive(again, 0, 1)
    assert [t.seed for t in tickets(end_round(again))] == [
        reseed(derive_seed(0, "collect", number), 3) for number in (2, 3)
    ]
