import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.checkpoint import pack, unpack
from offbeat.observe import PaceMeter, PaceView
from offbeat.types import Batch, Episodes, Segment, Ticket

NAMES = {
    *("pace/off_policy_degree", "pace/collect_count", "pace/train_count", "pace/lag"),
    *("pace/avg_sample_age", "pace/max_sample_age", "pace/p95_sample_age", "pace/stale_samples_ratio"),
    *("pace/dropped_stale_samples", "pace/dropped_samples", "pace/collect_idle_ratio"),
    *("pace/train_idle_ratio", "pace/bottleneck", "pace/overlap_efficiency"),
    *("rollout/return_mean", "rollout/return_mean_100", "rollout/length_mean", "rollout/steps_per_s"),
    *("rollout/total_generated_samples", "rollout/total_env_steps", "rollout/total_episodes"),
    *("rollout/generation_errors", "rollout/samples_by_env_min", "rollout/samples_by_env_max"),
    *("queue/size", "queue/total_produced", "queue/total_consumed", "queue/bytes"),
    *("learn/global_steps", "learn/processed_samples", "learn/samples_per_s"),
    *("weights/current_param_version", "weights/published_version", "weights/publish_lag"),
    *("weights/param_sync_count", "weights/param_sync_requests", "weights/sync_failures"),
    *("weights/sync_time_s", "time/round_s", "time/collect_s", "time/train_s", "time/publish_s"),
    *("time/wait_s", "time/eta_s", "time/elapsed_s"),
    *("system/rss_bytes", "system/cpu_percent", "system/gpu_mem_bytes"),
    *("system/workers_alive", "system/worker_restarts"),
}


def view(**changes: float) -> PaceView:
    fields = {
        **{"off_policy_degree": 1, "version": 1, "published_version": 1, "running": 0, "ready": 0},
        **{"trained": 2, "dropped": 0, "lost": 0, "issued": 2, "segments_per_round": 2, "rounds": 10},
        "lag": 0.0,
    }
    return PaceView(**{**fields, **changes})


def ticket(number: int, lane: int = 0, version: int = 0, attempt: int = 0) -> Ticket:
    return Ticket(number, lane, version, deadline=version + 1, seed=0, attempt=attempt)


def segment(
    number: int,
    lane: int = 0,
    version: int = 0,
    steps: int = 100,
    collect_s: float = 0.0,
    returns: tuple[float, ...] = (),
) -> Segment:
    lengths = tuple(int(value) for value in returns)
    return Segment(
        ticket(number, lane, version),
        {},
        np.array([version]),
        {"env_steps": steps},
        Episodes(returns, lengths),
        collect_s,
    )


def train(
    meter: PaceMeter, start_s: float, end_s: float, *segments: Segment, version: int = 0, **kw: float
) -> None:
    meter.train_started(Batch(version, segments, 1), start_s)
    meter.train_ended(end_s, {f"learn/{name}": value for name, value in kw.items()})


def two_lanes() -> PaceMeter:
    """Lane 0 works 0-2 s, lane 1 works 0-4 s, the learner 4-10 s."""
    meter = PaceMeter(num_lanes=2)
    meter.issued(ticket(0, 0), 0.0)
    meter.issued(ticket(1, 1), 0.0)
    first, second = segment(0, 0, returns=(10.0, 20.0)), segment(1, 1, steps=300, returns=(60.0,))
    meter.arrived(first, 1000, 2.0)
    meter.arrived(second, 3000, 4.0)
    train(meter, 4.0, 10.0, first, second, ess=0.9, behaviour_kl=0.01)
    return meter


def test_every_promised_name_is_there_and_none_besides() -> None:
    metrics = two_lanes().round_metrics(10.0, view())
    assert set(metrics) == NAMES | {"learn/ess", "learn/behaviour_kl"}
    words = {name for name, value in metrics.items() if isinstance(value, str)}
    assert words == {"pace/bottleneck"}


def test_shares_and_times_of_a_round_by_hand() -> None:
    metrics = two_lanes().round_metrics(10.0, view())
    expected = {
        "pace/collect_idle_ratio": 1 - (2 + 4) / 20,
        "pace/train_idle_ratio": 0.4,
        "pace/overlap_efficiency": 10 / 6,
        "time/round_s": 10.0,
        "time/collect_s": (2 + 4) / 2,
        "time/train_s": 6.0,
        "time/wait_s": 4.0,
        "time/eta_s": 90.0,
        "time/elapsed_s": 10.0,
        "rollout/steps_per_s": 40.0,
        "learn/samples_per_s": 40.0,
        "rollout/return_mean": 30.0,
        "rollout/length_mean": 30.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["pace/bottleneck"] == "train"


def test_counters_by_hand() -> None:
    meter = two_lanes()
    meter.published(1, 0.25, 10.0)
    meter.publish_failed()
    meter.generation_error()
    meter.worker_lost()
    meter.dropped(segment(9, steps=7), stale=True)
    meter.dropped(segment(8, steps=5), stale=False)
    metrics = meter.round_metrics(10.5, view(version=3, published_version=1, workers_alive=1, lag=0.5))
    expected = {
        **{"pace/collect_count": 2, "pace/train_count": 3, "pace/lag": 0.5, "pace/dropped_samples": 12},
        **{"pace/dropped_stale_samples": 7, "rollout/total_generated_samples": 400},
        **{"rollout/total_env_steps": 400, "rollout/total_episodes": 3, "rollout/generation_errors": 1},
        **{"rollout/samples_by_env_min": 100, "rollout/samples_by_env_max": 300},
        **{"queue/total_produced": 2, "queue/total_consumed": 2, "learn/global_steps": 1},
        **{"learn/processed_samples": 400, "weights/current_param_version": 3, "weights/publish_lag": 2},
        **{"weights/param_sync_count": 1, "weights/param_sync_requests": 2, "weights/sync_failures": 1},
        **{"weights/sync_time_s": 0.25, "system/workers_alive": 1, "system/worker_restarts": 1},
        "time/elapsed_s": 10.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_publishing_counts_in_the_window_it_happens_in() -> None:
    meter = two_lanes()
    meter.published(1, 0.5, 10.5)
    assert meter.round_metrics(10.5, view())["time/publish_s"] == 0.0
    train(meter, 12.0, 13.0)
    metrics = meter.round_metrics(13.0, view())
    assert metrics["time/publish_s"] == 0.5
    assert metrics["time/wait_s"] == pytest.approx(3.0 - 1.0 - 0.5)


def test_work_that_spans_two_rounds_counts_in_both() -> None:
    meter = PaceMeter(num_lanes=1)
    meter.issued(ticket(0), 0.0)
    first = segment(0)
    meter.arrived(first, 0, 4.0)
    meter.issued(ticket(1), 6.0)
    train(meter, 4.0, 10.0, first)
    assert meter.round_metrics(10.0, view())["pace/collect_idle_ratio"] == pytest.approx(0.2)
    second = segment(1)
    meter.arrived(second, 0, 15.0)
    train(meter, 15.0, 20.0, second)
    metrics = meter.round_metrics(20.0, view())
    assert metrics["pace/collect_idle_ratio"] == pytest.approx(0.5)
    assert metrics["time/collect_s"] == pytest.approx(9.0)
    assert metrics["pace/bottleneck"] == "balanced"


def test_an_arrival_noticed_late_does_not_make_the_collector_look_busy() -> None:
    meter = PaceMeter(num_lanes=1)
    meter.issued(ticket(0), 0.0)
    late = segment(0, collect_s=2.0)
    meter.arrived(late, 0, 8.0)
    train(meter, 8.0, 10.0, late)
    metrics = meter.round_metrics(10.0, view())
    assert metrics["pace/collect_idle_ratio"] == pytest.approx(0.8)
    assert metrics["time/collect_s"] == pytest.approx(2.0)


def test_tickets_that_wait_on_one_lane_are_worked_on_one_after_the_other() -> None:
    meter = PaceMeter(num_lanes=1)
    meter.issued(ticket(0), 0.0)
    meter.issued(ticket(1), 0.0)
    first, second = segment(0, collect_s=1.0), segment(1, collect_s=3.0)
    meter.arrived(first, 0, 6.0)
    meter.arrived(second, 0, 6.0)
    train(meter, 6.0, 8.0, first, second)
    assert meter.round_metrics(8.0, view())["pace/collect_idle_ratio"] == pytest.approx(0.5)


def test_a_lost_collector_idles_until_its_ticket_is_issued_again() -> None:
    meter = PaceMeter(num_lanes=2)
    meter.issued(ticket(0, lane=0), 0.0)
    meter.worker_lost(0, 2.0)
    meter.issued(ticket(0, lane=1, attempt=1), 6.0)
    again = segment(0, lane=1)
    meter.arrived(again, 0, 10.0)
    train(meter, 10.0, 10.0, again)
    assert meter.round_metrics(10.0, view())["pace/collect_idle_ratio"] == pytest.approx(1 - (2 + 4) / 20)


def test_a_ticket_issued_again_elsewhere_leaves_its_old_lane() -> None:
    meter = PaceMeter(num_lanes=2)
    meter.issued(ticket(0, lane=0), 0.0)
    meter.issued(ticket(0, lane=1, attempt=1), 4.0)
    again = segment(0, lane=1)
    meter.arrived(again, 0, 8.0)
    train(meter, 8.0, 8.0, again)
    assert meter.round_metrics(8.0, view())["pace/collect_idle_ratio"] == pytest.approx(1 - 4 / 16)


def test_ages_are_weighted_by_samples() -> None:
    meter = PaceMeter(num_lanes=1, staleness_threshold=1)
    batch = [segment(0, version=5, steps=90), segment(1, version=4, steps=6), segment(2, version=2, steps=4)]
    train(meter, 0.0, 1.0, *batch, version=5)
    metrics = meter.round_metrics(1.0, view())
    assert metrics["pace/avg_sample_age"] == pytest.approx((6 * 1 + 4 * 3) / 100)
    assert (metrics["pace/max_sample_age"], metrics["pace/p95_sample_age"]) == (3, 1)
    assert metrics["pace/stale_samples_ratio"] == pytest.approx(0.04)


def test_age_counts_from_the_oldest_version_in_a_segment() -> None:
    mixed = Segment(ticket(0), {}, np.array([7, 4, 6]), {"env_steps": 3})
    meter = PaceMeter(num_lanes=1)
    train(meter, 0.0, 1.0, mixed, version=8)
    assert meter.round_metrics(1.0, view())["pace/max_sample_age"] == 4


def test_returns_are_repeated_while_no_episode_ends() -> None:
    meter = PaceMeter(num_lanes=1)
    train(meter, 0.0, 1.0)
    before = meter.round_metrics(1.0, view())
    assert math.isnan(before["rollout/return_mean"])
    assert math.isnan(before["rollout/return_mean_100"])
    train(meter, 1.5, 2.0, segment(0, returns=(4.0, 8.0)))
    train(meter, 2.5, 3.0)
    after = meter.round_metrics(3.0, view())
    assert (after["rollout/return_mean"], after["rollout/length_mean"]) == (6.0, 6.0)


def test_the_rolling_mean_forgets_all_but_the_last_hundred_episodes() -> None:
    meter = PaceMeter(num_lanes=1)
    last = segment(1, returns=tuple(float(i) for i in range(100)))
    train(meter, 0.0, 1.0, segment(0, returns=(1000.0,) * 50), last)
    assert meter.return_mean_100 == pytest.approx(49.5)


def test_episodes_count_in_the_order_of_training_not_of_arrival() -> None:
    first, second = segment(0, returns=(1.0,)), segment(1, returns=(2.0,) * 100)
    means = []
    for arrivals in ((first, second), (second, first)):
        meter = PaceMeter(num_lanes=1)
        for item in arrivals:
            meter.arrived(item, 0, 0.0)
        train(meter, 0.0, 1.0, first, second)
        means.append(meter.return_mean_100)
    assert means == [2.0, 2.0]


def test_pauses_are_nobodys_idleness() -> None:
    meter = PaceMeter(num_lanes=1)
    meter.issued(ticket(0), 0.0)
    meter.arrived(segment(0), 0, 5.0)
    meter.paused(90.0)
    train(meter, 95.0, 100.0, segment(0))
    signals = meter.signals()
    assert signals.round_s == pytest.approx(10.0)
    assert signals.collect_idle == pytest.approx(0.5)
    assert signals.train_idle == pytest.approx(0.5)
    assert meter.round_metrics(100.0, view())["time/round_s"] == 100.0


def test_samples_are_counted_in_the_first_unit_known() -> None:
    meter = PaceMeter(num_lanes=1)
    for number, units in enumerate([{"env_steps": 5, "agent_steps": 15}, {"tokens": 70}, {"games": 3}, {}]):
        meter.arrived(Segment(ticket(number), {}, np.array([0]), units), 0, 0.0)
    metrics = meter.round_metrics(0.0, view())
    assert metrics["rollout/total_generated_samples"] == 5 + 70 + 1 + 1
    assert metrics["rollout/total_env_steps"] == 5


def test_queue_bytes_are_those_that_wait() -> None:
    meter = PaceMeter(num_lanes=1)
    waiting = [segment(number) for number in range(4)]
    for item in waiting:
        meter.arrived(item, 10**item.ticket.number, 0.0)
    assert meter.round_metrics(0.0, view(ready=4))["queue/bytes"] == 1111
    train(meter, 0.0, 1.0, waiting[2])
    assert meter.round_metrics(1.0, view(ready=3))["queue/bytes"] == 1011
    assert meter.round_metrics(1.0, view(ready=2))["queue/bytes"] == 1010
    assert meter.round_metrics(1.0, view(ready=0))["queue/bytes"] == 0


def test_the_learner_names_its_own_metrics_and_counts_its_own_steps() -> None:
    meter = PaceMeter(num_lanes=1)
    train(meter, 0.0, 1.0, gradient_steps=16.0, loss=0.5)
    train(meter, 1.0, 2.0, gradient_steps=16.0, loss=0.25)
    metrics = meter.round_metrics(2.0, view())
    assert (metrics["learn/global_steps"], metrics["learn/loss"]) == (32.0, 0.25)


def test_system_figures_are_taken_as_given() -> None:
    meter = PaceMeter(num_lanes=3)
    metrics = meter.round_metrics(0.0, view(), {"system/rss_bytes": 5.0, "system/cpu_percent": 99.0})
    assert (metrics["system/rss_bytes"], metrics["system/workers_alive"]) == (5.0, 3)
    assert math.isnan(meter.round_metrics(0.0, view())["system/rss_bytes"])


def test_signals_for_the_tuner() -> None:
    signals = two_lanes().signals()
    assert (signals.round_s, signals.collect_s, signals.train_s) == (10.0, 3.0, 6.0)
    assert signals.collect_idle == pytest.approx(0.7)
    assert signals.train_idle == pytest.approx(0.4)
    assert (signals.ess, signals.behaviour_kl) == (0.9, 0.01)
    meter = PaceMeter(num_lanes=1)
    train(meter, 0.0, 1.0, ess=math.nan)
    assert (meter.signals().ess, meter.signals().behaviour_kl) == (None, None)


def test_evaluations_carry_their_version_time_and_skips() -> None:
    meter = PaceMeter(num_lanes=1)
    meter.eval_skipped(2)
    assert meter.evaluated(7, {"eval/return_mean": 3.0}, 1.5) == {
        **{"eval/return_mean": 3.0, "eval/version": 7.0, "eval/time_s": 1.5, "eval/skipped": 2.0},
    }


def test_counters_survive_a_checkpoint() -> None:
    meter = two_lanes()
    meter.arrived(segment(2, returns=(5.0,)), 777, 11.0)
    meter.worker_lost()
    skeleton, arrays = pack(meter.state_dict())
    resumed = PaceMeter(num_lanes=2)
    resumed.load_state_dict(unpack(json.loads(json.dumps(skeleton)), arrays))
    before, after = meter.round_metrics(11.0, view(ready=1)), resumed.round_metrics(500.0, view(ready=1))
    kept = [name for name in NAMES if name.split("/")[0] in ("queue", "rollout") and "per_s" not in name]
    kept += ["pace/collect_count", "learn/global_steps", "learn/processed_samples", "time/eta_s"]
    kept += ["system/worker_restarts", "weights/param_sync_count"]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert resumed.return_mean_100 == meter.return_mean_100
    waiting = segment(2, returns=(5.0,))
    resumed.issued(ticket(3), 500.0)
    train(resumed, 501.0, 502.0, waiting)
    assert resumed.round_metrics(502.0, view())["time/elapsed_s"] == pytest.approx(12.0)
    assert resumed.round_metrics(502.0, view())["time/round_s"] == pytest.approx(2.0)


def rounds_of(meter: PaceMeter, seconds: list[float], begin_s: float = 0.0, first: int = 0) -> float:
    """Train rounds that take so long one after the other; return when the last one ends."""
    for number, took_s in enumerate(seconds, start=first):
        meter.issued(ticket(number), begin_s)
        train(meter, begin_s, begin_s + took_s)
        begin_s += took_s
    return begin_s


def eta_s(meter: PaceMeter, now_s: float, rounds_left: int) -> float:
    return meter.round_metrics(now_s, view(version=3, rounds=3 + rounds_left))["time/eta_s"]


def test_the_time_left_is_that_of_as_many_rounds_as_are_left() -> None:
    meter = PaceMeter(num_lanes=1)
    end_s = rounds_of(meter, [2.0, 4.0])
    assert eta_s(meter, end_s, rounds_left=10) == pytest.approx(30.0)
    assert eta_s(meter, end_s, rounds_left=0) == 0.0


def test_the_start_of_the_collectors_is_no_part_of_the_speed() -> None:
    meter = PaceMeter(num_lanes=1)
    meter.published(0, 0.1, 1.0)
    end_s = rounds_of(meter, [2.0, 2.0], begin_s=101.0)
    assert meter.round_metrics(end_s, view())["time/elapsed_s"] == pytest.approx(104.0)
    assert eta_s(meter, end_s, rounds_left=10) == pytest.approx(20.0)


def test_a_resumed_run_believes_in_its_own_speed_after_a_few_rounds() -> None:
    before = PaceMeter(num_lanes=1)
    rounds_of(before, [10.0] * 50)
    meter = PaceMeter(num_lanes=1)
    meter.load_state_dict(before.state_dict())
    meter.published(50, 0.1, 1000.0)
    assert eta_s(meter, 1000.0, rounds_left=10) == pytest.approx(100.0), "all it knows yet"
    now_s = rounds_of(meter, [1.0] * 4, begin_s=1030.0, first=50)
    assert eta_s(meter, now_s, rounds_left=10) > 90.0
    now_s = rounds_of(meter, [1.0], begin_s=now_s, first=54)
    assert eta_s(meter, now_s, rounds_left=10) == pytest.approx(10.0)
    now_s = rounds_of(meter, [3.0] * 5, begin_s=now_s, first=55)
    assert eta_s(meter, now_s, rounds_left=10) == pytest.approx(20.0)


@given(
    lanes=st.lists(
        st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=6),
        min_size=1,
        max_size=3,
    ),
    cuts=st.lists(st.floats(0.1, 4), min_size=1, max_size=10),
)
def test_busy_time_is_neither_lost_nor_counted_twice(
    lanes: list[list[tuple[float, float]]], cuts: list[float]
) -> None:
    happenings: list[tuple[float, int, str, Segment | None]] = [(0.0, 0, "start", None)]
    number, worked_s, end_s = 0, 0.0, 0.0
    for lane, work in enumerate(lanes):
        now_s = 0.0
        for gap_s, took_s in work:
            begin_s, now_s = now_s + gap_s, now_s + gap_s + took_s
            item = segment(number, lane)
            happenings += [(begin_s, 1, "issue", item), (now_s, 2, "arrive", item)]
            number, worked_s, end_s = number + 1, worked_s + took_s, max(end_s, now_s)
    cut_s = np.cumsum([0.0, *cuts])[1:]
    happenings += [(float(cut), 3, "train", None) for cut in (*cut_s, max(end_s, cut_s[-1]) + 1.0)]
    meter, busy_s, last_s = PaceMeter(num_lanes=len(lanes)), 0.0, 0.0
    for now_s, _, kind, item in sorted(happenings, key=lambda entry: entry[:2]):
        if kind == "start":
            meter.published(0, 0.0, 0.0)
        elif kind == "issue":
            meter.issued(item.ticket, now_s)
        elif kind == "arrive":
            meter.arrived(item, 0, now_s)
        else:
            train(meter, now_s, now_s)
            metrics = meter.round_metrics(now_s, view())
            busy_s += (1 - metrics["pace/collect_idle_ratio"]) * (now_s - last_s) * len(lanes)
            last_s = now_s
    assert busy_s == pytest.approx(worked_s, abs=1e-6)
