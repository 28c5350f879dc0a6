"""The coordinator beside tickets: publishing, evaluation, checkpoints, stopping, replay, resuming."""

from __future__ import annotations

import json

import pytest

from offbeat.pacing import AUTO, Coordinator, PaceConfig
from offbeat.pacing.actions import Action, Checkpoint, Evaluate, Finish, Issue, Publish, Train
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    DialTurned,
    EvalDone,
    GoalReached,
    Published,
    PublishFailed,
    RoundTrained,
    SegmentDropped,
    Signals,
    StopRequested,
)

from .pacing_steps import all_up, arrive, arrived, begin, end_round, make, of_type, step, tickets


def next_round(coordinator: Coordinator, now_s: float = 0.0) -> list[Action]:
    """Collect and train one round of a run with one segment a round at k = 0."""
    arrive(coordinator, coordinator.ledger.issued - 1, now_s=now_s)
    return end_round(coordinator, now_s)


# ---------------------------------------------------------------- publishing


def test_a_failed_publish_is_tried_again_after_the_delay() -> None:
    coordinator = make(publish_retry_delay_s=2.0)
    coordinator.start(0.0)
    all_up(coordinator)
    assert step(coordinator, PublishFailed(0, "disk"), 5.0) == []
    assert coordinator.wake_at_s(5.0) == 7.0
    assert coordinator.decide(6.9) == []
    assert coordinator.decide(7.0) == [Publish(0)]
    assert coordinator.wake_at_s(7.0) is None
    assert len(tickets(step(coordinator, Published(0), 7.5))) == 1


def test_publishing_is_given_up_after_the_last_retry() -> None:
    coordinator = make(max_publish_retries=2, publish_retry_delay_s=0.0)
    coordinator.start(0.0)
    for _ in range(2):
        assert step(coordinator, PublishFailed(0, "disk full"), 0.0) == [Publish(0)]
    finish = Finish("publishing weights failed 3 times: disk full", failed=True)
    assert step(coordinator, PublishFailed(0, "disk full"), 0.0) == [finish]
    assert coordinator.finished


def test_only_failures_in_a_row_count() -> None:
    coordinator = make(max_publish_retries=1, publish_retry_delay_s=0.0)
    begin(coordinator)
    for version in (1, 2, 3):
        arrive(coordinator, version - 1)
        end_round(coordinator, publish=False)
        assert step(coordinator, PublishFailed(version, "busy"), 0.0) == [Publish(version)]
        step(coordinator, Published(version), 0.0)
    assert not coordinator.finished


def test_what_failed_during_a_round_is_published_with_the_next_version() -> None:
    coordinator = make(num_collectors=4, off_policy_degree=3, publish_interval=4, publish_retry_delay_s=1.0)
    begin(coordinator)
    arrive(coordinator, 0, 1, 2, 3)
    for _ in range(3):
        end_round(coordinator, publish=False)
    assert of_type(end_round(coordinator, publish=False), Publish) == [Publish(4)]
    step(coordinator, PublishFailed(4, "late"), 0.0)
    assert of_type(coordinator.decide(1.0), Publish) == [Publish(4)]


def test_an_older_version_that_comes_late_changes_nothing() -> None:
    coordinator = make(num_collectors=4, off_policy_degree=3)
    begin(coordinator)
    arrive(coordinator, 0, 1)
    end_round(coordinator, publish=False)
    end_round(coordinator, publish=False)
    step(coordinator, Published(2), 0.0)
    step(coordinator, Published(1), 0.0)
    assert coordinator.published == 2


def test_weights_are_published_every_interval() -> None:
    coordinator = make(rounds=6, num_collectors=3, off_policy_degree=2, publish_interval=3)
    begin(coordinator)
    arrive(coordinator, 0, 1, 2)
    published = [of_type(end_round(coordinator, publish=False), Publish) for _ in range(3)]
    assert published == [[], [], [Publish(3)]]


# ---------------------------------------------------------------- evaluation


def test_synchronous_evaluation_blocks_training_and_tickets() -> None:
    coordinator = make(eval_interval=1)
    begin(coordinator)
    assert next_round(coordinator) == [Publish(1), Evaluate(1, blocking=True)]
    assert "evaluation of version 1" in coordinator.waiting_for()
    actions = step(coordinator, EvalDone(1), 0.0)
    assert [t.version for t in tickets(actions)] == [1]


def test_a_collector_replaced_during_an_evaluation_gets_its_ticket_after_it() -> None:
    coordinator = make(num_collectors=2, off_policy_degree=1, eval_interval=1)
    begin(coordinator)
    arrive(coordinator, 0)
    end_round(coordinator)
    step(coordinator, CollectorDown(1), 0.0)
    assert step(coordinator, CollectorUp(1), 0.0) == []
    assert 1 in [t.number for t in tickets(step(coordinator, EvalDone(1), 0.0))]


def test_a_slow_asynchronous_evaluator_goes_to_the_newest_version_and_counts_what_it_passed() -> None:
    coordinator = make(eval_interval=2, async_eval=True)
    begin(coordinator)
    evaluations = [of_type(next_round(coordinator), Evaluate) for _ in range(7)]
    assert evaluations == [[], [Evaluate(2, blocking=False)], [], [], [], [], []]
    assert coordinator.eval_skipped == 1
    assert step(coordinator, EvalDone(2), 0.0) == []
    assert of_type(next_round(coordinator), Evaluate) == [Evaluate(8, blocking=False)]
    assert coordinator.eval_skipped == 2


def test_the_run_ends_after_its_last_evaluation() -> None:
    coordinator = make(rounds=2, eval_interval=1, async_eval=True, eval_at_end=True)
    begin(coordinator)
    next_round(coordinator)
    assert of_type(next_round(coordinator), Finish) == []
    assert step(coordinator, EvalDone(1), 0.0) == [Evaluate(2, blocking=False)]
    assert step(coordinator, EvalDone(2), 0.0) == [Finish("all rounds trained")]


# ---------------------------------------------------------------- checkpoints and stopping


def test_checkpoints_come_every_interval_of_rounds() -> None:
    coordinator = make(checkpoint_interval=2)
    begin(coordinator)
    saved = [of_type(next_round(coordinator), Checkpoint) for _ in range(4)]
    assert saved == [[], [Checkpoint(2)], [], [Checkpoint(4)]]


def test_checkpoints_come_every_interval_of_time_from_a_clock_that_begins_at_zero() -> None:
    coordinator = make(checkpoint_interval_s=10.0)
    begin(coordinator, now_s=0.0)
    saved = [of_type(next_round(coordinator, now_s), Checkpoint) for now_s in (4.0, 11.0, 20.0, 21.0)]
    assert saved == [[], [Checkpoint(2)], [], [Checkpoint(4)]]


def test_a_stop_lets_the_round_end_saves_and_finishes_without_evaluating() -> None:
    coordinator = make(checkpoint_at_end=True, eval_interval=1)
    begin(coordinator)
    arrive(coordinator, 0)
    assert step(coordinator, StopRequested("enough"), 0.0) == []
    actions = end_round(coordinator, publish=False)
    assert actions == [Publish(1), Checkpoint(1), Finish("enough")]
    assert step(coordinator, Published(1), 0.0) == []


def test_a_stop_between_rounds_finishes_at_once() -> None:
    coordinator = make(checkpoint_at_end=True)
    begin(coordinator)
    assert step(coordinator, StopRequested("enough"), 0.0) == [Finish("enough")]


def test_a_finished_run_asks_for_nothing_more() -> None:
    coordinator = make(publish_retry_delay_s=1.0)
    begin(coordinator)
    step(coordinator, PublishFailed(0, "busy"), 0.0)
    step(coordinator, StopRequested("enough"), 0.0)
    assert coordinator.wake_at_s(0.0) is None
    assert coordinator.decide(2.0) == []


def test_a_run_of_no_rounds_is_finished_when_it_starts() -> None:
    assert make(rounds=0).start(0.0) == [Finish("all rounds trained")]


# ---------------------------------------------------------------- replay


def replay(**changes: object) -> Coordinator:
    return make(**({"mode": "replay", "segments_per_round": 2, "num_collectors": 2} | changes))


def test_replay_trains_what_has_arrived_within_its_ratio() -> None:
    coordinator = replay(off_policy_degree=2, replay_ratio=1.0, min_segments=2)
    begin(coordinator)
    assert of_type(arrive(coordinator, 0), Train) == []
    assert of_type(arrive(coordinator, 1), Train) == [Train(0, (0, 1), 2)]
    assert of_type(end_round(coordinator), Train) == [Train(1, (), 2)]
    assert of_type(end_round(coordinator), Train) == []
    assert of_type(arrive(coordinator, 2), Train) == [Train(2, (2,), 2)]


def test_replay_without_a_ratio_trains_as_fast_as_it_can() -> None:
    coordinator = replay(off_policy_degree=1)
    begin(coordinator)
    arrive(coordinator, 0)
    rounds = [of_type(end_round(coordinator), Train) for _ in range(3)]
    assert [train.version for (train,) in rounds] == [1, 2, 3]


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_replay_takes_no_more_than_a_rounds_share(ratio: float | None) -> None:
    """What came early is for later rounds: the last ones would have nothing new."""
    coordinator = replay(off_policy_degree=2, replay_ratio=ratio, min_segments=3, num_collectors=9)
    begin(coordinator)
    (first,) = of_type(arrive(coordinator, 0, 1, 2), Train)
    arrive(coordinator, 3, 4, 5, 6)
    later = [train.tickets for _ in range(2) for train in of_type(end_round(coordinator), Train)]
    assert [first.tickets, *later] == [(0, 1, 2), (3, 4), (5, 6)]


def test_replay_collects_at_most_k_rounds_ahead() -> None:
    coordinator = replay(off_policy_degree=1, replay_ratio=0.5)
    begin(coordinator)
    for number in range(4):
        arrive(coordinator, number)
    assert coordinator.ledger.issued == 4
    assert len(tickets(end_round(coordinator))) == 2


def test_replay_at_zero_goes_in_lockstep_with_learner_and_publisher() -> None:
    coordinator = replay()
    begin(coordinator)
    assert arrive(coordinator, 1, 0) == [Train(0, (0, 1), 0)]
    assert end_round(coordinator, publish=False) == [Publish(1)]
    assert [t.version for t in tickets(step(coordinator, Published(1), 0.0))] == [1, 1]


def test_replay_at_zero_waits_for_a_failed_publish() -> None:
    coordinator = replay(publish_retry_delay_s=1.0)
    begin(coordinator)
    arrive(coordinator, 0, 1)
    end_round(coordinator, publish=False)
    assert step(coordinator, PublishFailed(1, "busy"), 0.0) == []
    assert coordinator.decide(1.0) == [Publish(1)]
    assert len(tickets(step(coordinator, Published(1), 1.0))) == 2


def test_replay_makes_up_for_dropped_segments() -> None:
    coordinator = replay()
    begin(coordinator)
    arrive(coordinator, 0)
    assert [t.number for t in tickets(step(coordinator, SegmentDropped(0), 0.0))] == [2]


def test_a_full_queue_is_enough_when_the_dial_was_turned_to_zero_late() -> None:
    coordinator = replay(off_policy_degree=3, max_outstanding=2)
    begin(coordinator)
    arrive(coordinator, 0)
    for _ in range(2):
        end_round(coordinator)
    step(coordinator, DialTurned(0), 0.0)
    end_round(coordinator)
    assert of_type(arrive(coordinator, 1, 2), Train) == [Train(3, (1, 2), 0)]


# ---------------------------------------------------------------- checkpoints and weight_sync_interval


def seldom_published(**changes: object) -> Coordinator:
    """A replay run at k = 0 that publishes every third version."""
    return replay(**({"segments_per_round": 1, "num_collectors": 1, "publish_interval": 3} | changes))


def next_replay_round(coordinator: Coordinator, now_s: float = 0.0) -> list[Action]:
    """Collect and train one round; publish when that is asked for."""
    arrive(coordinator, coordinator.ledger.issued - 1, now_s=now_s)
    actions = end_round(coordinator, now_s, publish=False)
    for publish in of_type(actions, Publish):
        actions = actions + step(coordinator, Published(publish.version), now_s)
    return actions


def test_a_checkpoint_that_is_due_waits_for_a_version_that_is_published() -> None:
    coordinator = seldom_published(checkpoint_interval=2, rounds=12)
    begin(coordinator)
    rounds = [next_replay_round(coordinator) for _ in range(11)]
    assert [publish.version for round in rounds for publish in of_type(round, Publish)] == [3, 6, 9]
    assert [made.version for round in rounds for made in of_type(round, Checkpoint)] == [3, 6, 9]


def test_a_checkpoint_that_is_due_by_time_waits_for_a_version_that_is_published() -> None:
    coordinator = seldom_published(checkpoint_interval_s=10.0, rounds=12)
    begin(coordinator)
    times = (1.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 23.0, 24.0)
    rounds = [next_replay_round(coordinator, now_s) for now_s in times]
    assert [made.version for round in rounds for made in of_type(round, Checkpoint)] == [3, 9]


def test_the_last_checkpoint_waits_for_nothing() -> None:
    ends = seldom_published(checkpoint_at_end=True, rounds=4)
    begin(ends)
    last = [next_replay_round(ends) for _ in range(4)][-1]
    assert last == [Checkpoint(4), Finish("all rounds trained")]
    stops = seldom_published(checkpoint_interval=1, checkpoint_at_end=True)
    begin(stops)
    next_replay_round(stops)
    assert step(stops, StopRequested("enough"), 0.0) == [Checkpoint(1), Finish("enough")]


def test_a_run_resumed_from_a_checkpoint_collects_with_the_versions_it_would_have_collected_with() -> None:
    whole = seldom_published(checkpoint_interval=2, rounds=12)
    begin(whole)
    states = []
    for _ in range(4):
        if of_type(next_replay_round(whole), Checkpoint):
            states.append(whole.state_dict())
    again = seldom_published(checkpoint_interval=2, rounds=12)
    again.load_state_dict(states[-1])
    begin(again)
    next_replay_round(again)
    for _ in range(4):
        (expected,) = tickets(next_replay_round(whole))
        (found,) = tickets(next_replay_round(again))
        assert (found.number, found.version, found.seed) == (expected.number, expected.version, expected.seed)


# ---------------------------------------------------------------- resuming


def resumed(before: Coordinator, arrived: tuple[int, ...] | None = None) -> Coordinator:
    """A fresh coordinator that goes on from a state that went through JSON."""
    coordinator = Coordinator(before.config)
    coordinator.load_state_dict(json.loads(json.dumps(before.state_dict())), arrived)
    return coordinator


def test_what_was_running_is_lost_and_what_was_ready_is_not() -> None:
    before = make(num_collectors=3, off_policy_degree=2)
    begin(before)
    arrive(before, 0, 1)
    end_round(before)
    after = resumed(before)
    assert (after.version, after.published) == (1, -1)
    assert (after.counts().ready, after.counts().lost) == (1, before.counts().running)
    assert after.start(0.0) == [Publish(1)]
    assert all_up(after) == []
    actions = step(after, Published(1), 0.0)
    assert of_type(actions, Train) == [Train(1, (1,), 2)]
    again = tickets(actions)[0]
    assert (again.number, again.version, again.deadline, again.attempt) == (2, 0, 2, 1)


def test_segments_that_were_not_saved_are_collected_again() -> None:
    before = make(num_collectors=3, off_policy_degree=2)
    begin(before)
    arrive(before, 0, 1, 2)
    end_round(before)
    after = resumed(before, arrived=(2,))
    actions = begin(after)
    assert of_type(actions, Train) == [Train(1, (2,), 2)]
    assert 1 in [t.number for t in tickets(actions)]
    arrive(after, 1)
    assert of_type(end_round(after), Train) == [Train(2, (1,), 2)]


def test_a_round_under_way_counts_as_not_begun() -> None:
    before = make()
    begin(before)
    arrive(before, 0)
    after = resumed(before)
    assert begin(after) == [Train(0, (0,), 0)]


def test_counters_survive() -> None:
    before = make(eval_interval=1, async_eval=True)
    begin(before)
    for _ in range(3):
        next_round(before)
    after = resumed(before)
    assert after.eval_skipped == 2
    assert after.start(0.0) == [Publish(3), Evaluate(3, blocking=False)]


def test_a_dial_turned_live_stays_turned() -> None:
    before = make(off_policy_degree=1)
    step(before, DialTurned(4), 0.0)
    assert resumed(before).degree == 4


def test_what_the_tuner_found_survives() -> None:
    before = make(rounds=100, off_policy_degree=AUTO)
    begin(before)
    for number in range(8):
        arrive(before, number)
        end_round(before, signals=Signals(round_s=1.0, collect_idle=0.5, train_idle=0.5))
    assert before.degree == 1
    after = resumed(before)
    assert after.state_dict()["auto"] == before.state_dict()["auto"]
    assert after.degree == 1


def test_a_changed_configuration_overrules_a_turned_dial() -> None:
    before = make(off_policy_degree=1)
    step(before, DialTurned(4), 0.0)
    after = make(off_policy_degree=2)
    after.load_state_dict(before.state_dict())
    assert after.degree == 2


def test_a_complete_run_resumes_to_its_end() -> None:
    before = make(rounds=1, eval_at_end=True)
    begin(before)
    next_round(before)
    after = resumed(before)
    assert after.start(0.0) == [Evaluate(1, blocking=True)]
    assert step(after, EvalDone(1), 0.0) == [Finish("all rounds trained")]


@pytest.mark.parametrize("async_eval", [False, True])
def test_the_first_weights_are_evaluated_once_before_the_first_round(async_eval: bool) -> None:
    config = PaceConfig(rounds=2, segments_per_round=1, eval_at_start=True, async_eval=async_eval)
    coordinator = Coordinator(config)
    assert coordinator.start(0.0) == [Publish(0), Evaluate(0, blocking=not async_eval)]
    step(coordinator, CollectorUp(0), 0.0)
    issued = [step(coordinator, event, 0.0) for event in (Published(0), EvalDone(0))]
    assert [bool(of_type(actions, Issue)) for actions in issued] == [async_eval, not async_eval]
    after = resumed(coordinator)
    assert not of_type(after.start(0.0), Evaluate)


@pytest.mark.parametrize("at_end", [False, True])
def test_goal_ends_the_run_after_its_round_with_the_evaluation_due_at_the_end(at_end: bool) -> None:
    coordinator = Coordinator(PaceConfig(rounds=100, segments_per_round=1, eval_at_end=at_end))
    coordinator.start(0.0)
    step(coordinator, CollectorUp(0), 0.0)
    step(coordinator, Published(0), 0.0)
    assert of_type(step(coordinator, arrived(0, 0), 0.0), Train)
    assert step(coordinator, GoalReached("solved"), 0.0) == []
    actions = step(coordinator, RoundTrained(1), 0.0)
    if at_end:
        assert of_type(actions, Evaluate) == [Evaluate(1, blocking=True)]
        actions = step(coordinator, EvalDone(1), 0.0)
    assert of_type(actions, Finish) == [Finish("solved")]
    assert not of_type(actions, Train)
