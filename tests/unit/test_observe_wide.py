"""What table and meter say of collectors that hold hundreds of tickets."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.observe.lengths import Lengths
from offbeat.pacing.events import CollectorDown, CollectorUp, CollectorWorked, SegmentArrived, SegmentDropped
from offbeat.types import End, Piece, Segment, Span
from tests.unit.test_observe_meter import NAMES, Run, through_a_checkpoint, ticket


def wide(num_tickets: int = 300, num_collectors: int = 1) -> Run:
    """Collectors that take hundreds of tickets each, and have as many."""
    run = Run(num_collectors)
    for collector in range(num_collectors):
        run.tell(CollectorUp(collector, capacity=num_tickets), 0.0)
        for number in range(num_tickets):
            run.issue(collector * num_tickets + number, 0.0, collector)
    return run


def made(number: int, versions: list[int], *ends: End) -> Segment:
    pieces = tuple(Piece((Span(versions[0], 1),), end) for end in ends)
    return Segment(ticket(number), {}, np.array(versions), {"tokens": len(versions)}, pieces=pieces)


def work(run: Run, begin_s: float, end_s: float, share: float, every_s: float = 1.0) -> None:
    """Have collector 0 at work for this share of the time, which it reports."""
    for now_s in np.arange(begin_s + every_s, end_s + 1e-9, every_s):
        run.tell(CollectorWorked(0, share * every_s, {"tokens": 10}), float(now_s))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_idle_share_is_that_of_the_machine_not_of_its_tickets(share: float) -> None:
    run = wide()
    work(run, 0.0, 10.0, share)
    metrics = run.train(8.0, 10.0)
    assert metrics["pace/collect_idle_ratio"] == pytest.approx(1.0 - share)
    assert metrics["time/collect_s"] == pytest.approx(share * 10.0)
    assert run.signals.collect_idle == pytest.approx(1.0 - share)
    assert run.signals.collect_s == pytest.approx(share * 10.0)


def test_busy_time_comes_with_segments_too_once_for_all_of_a_piece() -> None:
    run = wide()
    for second in range(10):
        for place in range(20):
            segment = made(20 * second + place, [0, 0])
            busy_s = 0.5 if place == 0 else 0.0
            run.tell(SegmentArrived(segment, 0, {}, 0.1 if place == 0 else 0.0, busy_s), second + 1.0)
    metrics = run.train(10.0, 10.0)
    assert metrics["pace/collect_idle_ratio"] == pytest.approx(0.4), "saving environments is no waiting"


def test_several_collectors_share_the_round() -> None:
    run = wide(num_collectors=4)
    work(run, 0.0, 8.0, 1.0)
    for collector in (1, 2, 3):
        run.tell(CollectorWorked(collector, 2.0), 8.0)
    metrics = run.train(8.0, 8.0)
    assert metrics["pace/collect_idle_ratio"] == pytest.approx(1.0 - (8.0 + 3 * 2.0) / 32.0)
    assert metrics["time/collect_s"] == pytest.approx(14.0 / 4)


def test_rounds_shorter_than_a_report_share_what_it_says() -> None:
    run = wide()
    work(run, 0.0, 10.0, 0.5)
    run.train(10.0, 10.0)
    shares = []
    for number in range(40):
        end_s = 10.25 + number * 0.25
        if number % 4 == 3:
            run.tell(CollectorWorked(0, 0.5), end_s)
        shares.append(run.train(end_s, end_s, version=number + 1)["pace/collect_idle_ratio"])
    assert shares == pytest.approx([0.5] * 40)


def test_a_report_may_correct_what_was_assumed_of_the_round_before() -> None:
    run = wide()
    assert run.train(1.0, 1.0)["pace/collect_idle_ratio"] == 0.0, "it has tickets, and no report has come"
    run.tell(CollectorWorked(0, 0.0), 1.25)
    metrics = run.train(1.5, 1.5, version=1)
    assert (metrics["pace/collect_idle_ratio"], metrics["time/collect_s"]) == (1.0, 0.0)


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0.0, 1.0), st.booleans()), min_size=1, max_size=30))
def test_reported_time_is_neither_lost_nor_counted_twice(steps: list[tuple[float, float, bool]]) -> None:
    run, now_s, reported_s, counted_s = wide(), 0.0, 0.0, 0.0
    last_s = 0.0
    for past_s, share, ends_round in steps:
        now_s += past_s
        if ends_round:
            counted_s += run.collectors.busy_s(now_s)
            run.train(now_s, now_s)
        else:
            reported_s += share * (now_s - last_s)
            run.tell(CollectorWorked(0, share * (now_s - last_s)), now_s)
            last_s = now_s
    run.tell(CollectorWorked(0, 0.0), now_s)
    assert counted_s + run.collectors.busy_s(now_s) == pytest.approx(reported_s)


def test_without_tickets_nothing_is_at_work() -> None:
    run = wide(1)
    run.tell(SegmentArrived(made(0, [0]), 0, {}, 0.0, 1.0), 1.0)
    assert run.train(4.0, 10.0)["pace/collect_idle_ratio"] == pytest.approx(0.9)
    run.issue(1, 15.0)
    run.tell(CollectorWorked(0, 2.0), 17.0)
    assert run.train(20.0, 20.0, version=1)["pace/collect_idle_ratio"] == pytest.approx(1.0 - 0.5)


def test_a_lost_collector_was_at_work_until_then() -> None:
    run = wide()
    work(run, 0.0, 4.0, 1.0)
    run.tell(CollectorDown(0, "killed"), 5.0)
    assert run.train(10.0, 10.0)["pace/collect_idle_ratio"] == pytest.approx(0.5)


@pytest.mark.parametrize(("is_wide", "idle"), [(False, 0.5), (True, 1.0 - 0.25 / 8.0)])
def test_a_collector_with_one_ticket_is_at_work_while_it_has_it_unless_it_is_wide(
    is_wide: bool, idle: float
) -> None:
    run = Run()
    run.tell(CollectorUp(0, is_wide=is_wide), 0.0)
    run.issue(0, 0.0)
    run.tell(SegmentArrived(made(0, [0]), 0, {}, 0.0, busy_s=0.25), 4.0)
    assert run.train(8.0, 8.0)["pace/collect_idle_ratio"] == pytest.approx(idle)


# ---------------------------------------------------------------- ages


def test_ages_count_every_token_by_the_version_that_made_it() -> None:
    run = Run(staleness_threshold=1)
    batch = [made(0, [8] * 60 + [7] * 30), made(1, [5] * 4 + [6] * 6)]
    metrics = run.train(0.0, 1.0, *batch, version=8)
    assert metrics["pace/avg_sample_age"] == pytest.approx((30 * 1 + 4 * 3 + 6 * 2) / 100)
    assert metrics["pace/max_sample_age"] == 3
    assert metrics["pace/p95_sample_age"] == 2
    assert metrics["pace/stale_samples_ratio"] == pytest.approx(0.1)


def test_versions_weigh_what_their_samples_do() -> None:
    run = Run()
    one = Segment(ticket(0), {}, np.array([1, 2]), {"env_steps": 300})  # a version for half of its steps each
    two = Segment(ticket(1), {}, np.array([2]), {"env_steps": 100})
    assert run.train(0.0, 1.0, one, two, version=2)["pace/avg_sample_age"] == pytest.approx(150 / 400)


# ---------------------------------------------------------------- ends


def test_pieces_are_counted_by_their_end_where_there_are_any() -> None:
    run = wide()
    run.arrive(made(0, [0], "eos", "cut", "cut"), 1.0)
    run.arrive(made(1, [0], "timeout", "", "error"), 1.0)
    run.tell(SegmentDropped(1, "no spread"), 1.0)
    metrics = run.train(1.0, 2.0)
    ends = {f"rollout/ended_{end}" for end in ("cut", "timeout", "error")}
    assert set(metrics) == NAMES | ends | {"pace/lockstep_until"}  # a limit of time ended some at k = 0
    assert [metrics[name] for name in sorted(ends)] == [2, 1, 1]
    resumed = Run()
    resumed.meter.load_state_dict(through_a_checkpoint(run.meter), ready=[])
    resumed.arrive(made(2, [0], "cut"), 3.0)
    assert resumed.train(3.0, 4.0)["rollout/ended_cut"] == 3


def test_lengths_of_dispatched_pieces_are_counted_in_the_order_of_issue() -> None:
    """Ticket 1 is long: until it has ended, those after it say nothing of what was dispatched."""
    lengths, sizes = Lengths(), {0: 2, 1: 30, 2: 4, 3: 6}
    segments = {number: made(number, [0] * size, "eos", "eos") for number, size in sizes.items()}
    for number in (0, 3, 2):
        lengths.arrived(segments[number])
    lengths.trained([segments[0], segments[3]])
    found = lengths.metrics()
    assert found == {"rollout/dispatched_length_mean": 1.0, "rollout/trained_length_mean": 2.0}
    other = Lengths()
    other.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    other.arrived(segments[1])
    other.trained([segments[1], segments[2]])
    means = set(other.metrics().values())
    assert means == {sum(sizes.values()) / 8}


def test_lengths_of_a_run_that_began_without_them_are_left_out() -> None:
    lengths = Lengths()
    lengths.load_state_dict(None)
    lengths.arrived(made(70, [0, 0], "eos"))
    lengths.trained([made(70, [0, 0], "eos")])
    assert lengths.metrics() == {}
    assert lengths.state_dict() is None
