"""The meter, driven by events: what each metric of a run means."""

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.checkpoint import pack, unpack
from offbeat.config.models import RuntimeConfig
from offbeat.config.settings import Settings
from offbeat.observe import Meter
from offbeat.pacing.events import (
    CollectorDown,
    DialTurned,
    EvalDone,
    Event,
    Issued,
    Published,
    PublishFailed,
    RoundTrained,
    Saved,
    SegmentArrived,
    SegmentDropped,
    Signals,
    SnapshotTaken,
    TrainStarted,
)
from offbeat.pacing.ledger import Counts
from offbeat.run.collectors import Collectors
from offbeat.run.waits import Waits
from offbeat.types import Batch, Episodes, Metrics, Piece, Segment, Span, StateTree, Ticket

NAMES = {
    *("pace/off_policy_degree", "pace/collect_count", "pace/train_count", "pace/lag"),
    *("pace/avg_sample_age", "pace/max_sample_age", "pace/p95_sample_age", "pace/stale_samples_ratio"),
    *("pace/dropped_stale_samples", "pace/dropped_samples", "pace/collect_idle_ratio"),
    *("pace/train_idle_ratio", "pace/overlap_efficiency"),
    *("rollout/return_mean", "rollout/return_mean_100", "rollout/length_mean", "rollout/steps_per_s"),
    *("rollout/total_generated_samples", "rollout/total_env_steps", "rollout/total_episodes"),
    *("rollout/generation_errors", "rollout/samples_by_env_min", "rollout/samples_by_env_max"),
    *("queue/size", "queue/total_produced", "queue/total_consumed", "queue/bytes"),
    *("learn/global_steps", "learn/processed_samples", "learn/samples_per_s"),
    *("weights/current_param_version", "weights/published_version", "weights/publish_lag"),
    *("weights/param_sync_count", "weights/param_sync_requests", "weights/sync_failures"),
    *(
        "weights/sync_time_s",
        "weights/sent_bytes",
        "time/round_s",
        "time/collect_s",
        "time/train_s",
        "time/publish_s",
    ),
    *("time/wait_s", "time/eta_s", "time/elapsed_s", "time/overlap_s", "time/state_s"),
    *("system/rss_bytes", "system/cpu_percent", "system/gpu_mem_bytes"),
    *("system/workers_alive", "system/worker_restarts"),
}


class FakePace:
    """What the meter reads of a pace."""

    def __init__(self) -> None:
        self.version, self.rounds, self.degree, self.published = 1, 10, 1, 1
        self.num_up, self.eval_skipped = 2, 0
        self.ready, self.trained, self.outstanding = 0, 2, 0.0

    def counts(self) -> Counts:
        return Counts(issued=2, running=0, ready=self.ready, trained=self.trained, dropped=0, lost=0)

    def lag(self) -> float:
        return self.outstanding


class Run:
    """A meter with the table of collectors that it asks for busy time, driven as the driver does it."""

    def __init__(self, num_collectors: int = 1, **options: Any) -> None:
        settings = Settings(runtime=RuntimeConfig(num_workers=num_collectors))
        self.pace = FakePace()
        self.collectors = Collectors(
            settings,
            Waits(),
            lambda index: None,
            lambda index, why: None,
            lambda: self.pace.version,
            60.0,
            working_s=lambda index: None,
            clock=lambda: 0.0,
        )
        self.meter = Meter(num_collectors, self.pace, self.collectors.busy_s, **options)  # type: ignore[arg-type]
        self.signals = Signals()
        self._observers = (self.collectors.handlers(), self.meter.handlers())

    def tell(self, event: Event, now_s: float) -> None:
        for handlers in self._observers:
            if type(event) in handlers:
                handlers[type(event)](event, now_s)

    def issue(self, number: int, now_s: float, collector: int = 0) -> None:
        self.tell(Issued(ticket(number, collector)), now_s)

    def arrive(self, segment: Segment, now_s: float, num_bytes: int = 0) -> None:
        row = self.collectors.rows[segment.ticket.collector]
        if segment.ticket.number not in row.tickets:
            self.tell(Issued(segment.ticket), now_s)
        self.tell(SegmentArrived(segment, num_bytes), now_s)

    def train(
        self, start_s: float, end_s: float, *segments: Segment, version: int = 0, **learned: float
    ) -> Metrics:
        """Train a round; return its metrics."""
        batch = Batch(version, segments, 1)
        self.tell(TrainStarted(batch), start_s)
        metrics = {f"learn/{name}": value for name, value in learned.items()}
        event = RoundTrained(version + 1, batch, metrics, start_s, end_s)
        self.signals = self.meter.measure(event)
        self.tell(event, end_s)
        return self.meter.metrics  # type: ignore[return-value]


def ticket(number: int, collector: int = 0, version: int = 0, attempt: int = 0) -> Ticket:
    return Ticket(number, collector, version, deadline=version + 1, seed=0, attempt=attempt)


def segment(
    number: int,
    collector: int = 0,
    version: int = 0,
    steps: int = 100,
    collect_s: float = 0.0,
    returns: tuple[float, ...] = (),
) -> Segment:
    lengths = tuple(int(value) for value in returns)
    return Segment(
        ticket(number, collector, version),
        {},
        np.array([version]),
        {"env_steps": steps},
        Episodes(returns, lengths),
        collect_s,
    )


def two_collectors(prepare: Callable[[Run], None] = lambda run: None) -> Run:
    """Collector 0 works 0-2 s, collector 1 works 0-4 s, the learner 4-10 s."""
    run = Run(2)
    run.issue(0, 0.0, 0)
    run.issue(1, 0.0, 1)
    first, second = segment(0, 0, returns=(10.0, 20.0)), segment(1, 1, steps=300, returns=(60.0,))
    run.arrive(first, 2.0, 1000)
    run.arrive(second, 4.0, 3000)
    prepare(run)
    run.train(4.0, 10.0, first, second, ess=0.9, behaviour_kl=0.01)
    return run


def test_every_promised_name_is_there_and_none_besides() -> None:
    metrics = two_collectors().meter.metrics
    assert set(metrics) == NAMES | {"learn/ess", "learn/behaviour_kl"}
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_there_are_no_metrics_before_the_first_round() -> None:
    run = Run()
    run.issue(0, 0.0)
    run.arrive(segment(0), 1.0)
    assert run.meter.metrics == run.meter.eval_metrics == {}


def test_shares_and_times_of_a_round_by_hand() -> None:
    meter = two_collectors().meter
    metrics = meter.metrics
    expected = {
        "pace/collect_idle_ratio": 1 - (2 + 4) / 20,
        "pace/train_idle_ratio": 0.4,
        "pace/overlap_efficiency": 10 / 6,
        "time/round_s": 10.0,
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
    assert meter.bottleneck == "train"


def test_collecting_takes_what_the_collectors_needed_side_by_side() -> None:
    run = Run(2)
    batch = [segment(0, 0, collect_s=2.0), segment(1, 1, collect_s=4.0)]
    for item in batch:
        run.arrive(item, 5.0)
    assert run.train(5.0, 6.0, *batch)["time/collect_s"] == pytest.approx((2 + 4) / 2)


def test_counters_by_hand() -> None:
    def happen(run: Run) -> None:
        run.arrive(segment(9, 0, steps=7), 4.0)
        run.arrive(segment(8, 1, steps=5), 4.0)
        run.tell(SegmentDropped(9, "stale"), 4.0)
        run.tell(SegmentDropped(8, "queue full"), 4.0)
        run.tell(Published(1, 0.25, None, 64), 4.0)
        run.tell(PublishFailed(1, "no room"), 4.0)
        run.tell(CollectorDown(1, "killed"), 4.0)
        run.tell(CollectorDown(0, "its own mistake", raised=True), 4.0)
        run.pace.version, run.pace.num_up, run.pace.outstanding = 3, 1, 0.5

    metrics = two_collectors(happen).meter.metrics
    expected = {
        **{"pace/collect_count": 4, "pace/train_count": 3, "pace/lag": 0.5, "pace/dropped_samples": 12},
        **{"pace/dropped_stale_samples": 7, "rollout/total_generated_samples": 412},
        **{"rollout/total_env_steps": 412, "rollout/total_episodes": 3, "rollout/generation_errors": 1},
        **{"rollout/samples_by_env_min": 107, "rollout/samples_by_env_max": 305},
        **{"queue/total_produced": 4, "queue/total_consumed": 2, "learn/global_steps": 1},
        **{"learn/processed_samples": 400, "weights/current_param_version": 3, "weights/publish_lag": 2},
        **{"weights/param_sync_count": 1, "weights/param_sync_requests": 2, "weights/sync_failures": 1},
        **{
            "weights/sync_time_s": 0.25,
            "weights/sent_bytes": 64,
            "system/workers_alive": 1,
            "system/worker_restarts": 2,
        },
        **{"pace/off_policy_degree": 1, "weights/published_version": 1, "queue/size": 0, "queue/bytes": 0},
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_tickets_that_are_issued_with_begun_work_are_counted_once_there_are_any() -> None:
    run = Run()
    run.arrive(segment(0), 1.0)
    assert not [name for name in run.train(1.0, 2.0, segment(0)) if "begun" in name]
    for number, keeps_all in enumerate((True, False, True, None), 1):
        run.tell(Issued(ticket(number), keeps_all), 2.0)
    run.arrive(segment(1), 3.0)
    metrics = run.train(3.0, 4.0, segment(1), version=1)
    assert metrics["rollout/begun_tickets_kept"] == 2
    assert metrics["rollout/begun_tickets_cut_back"] == 1


def test_publishing_counts_in_the_window_it_happens_in() -> None:
    run = two_collectors()
    assert run.meter.metrics["time/publish_s"] == 0.0
    run.tell(Published(1, 0.5), 10.5)
    metrics = run.train(12.0, 13.0)
    assert metrics["time/publish_s"] == 0.5
    assert metrics["time/wait_s"] == pytest.approx(3.0 - 1.0 - 0.5)
    assert run.train(13.0, 14.0)["time/publish_s"] == 0.0


def test_a_round_that_is_noticed_late_ended_when_the_learner_ended_it() -> None:
    run = Run()
    run.issue(0, 0.0)
    run.arrive(segment(0), 2.0)
    run.tell(TrainStarted(Batch(0, (), 1)), 2.0)
    event = RoundTrained(1, Batch(0, (segment(0),), 1), {}, started_s=2.0, ended_s=8.0)
    run.signals = run.meter.measure(event)
    run.tell(event, 12.0)
    assert (run.signals.round_s, run.signals.train_s) == (8.0, 6.0)
    assert run.meter.metrics["time/elapsed_s"] == pytest.approx(12.0), "and the clock went on since"
    assert run.train(12.0, 13.0)["time/round_s"] == pytest.approx(5.0)


def test_ages_are_weighted_by_samples() -> None:
    run = Run(staleness_threshold=1)
    batch = [segment(0, version=5, steps=90), segment(1, version=4, steps=6), segment(2, version=2, steps=4)]
    metrics = run.train(0.0, 1.0, *batch, version=5)
    assert metrics["pace/avg_sample_age"] == pytest.approx((6 * 1 + 4 * 3) / 100)
    assert (metrics["pace/max_sample_age"], metrics["pace/p95_sample_age"]) == (3, 1)
    assert metrics["pace/stale_samples_ratio"] == pytest.approx(0.04)


def test_age_counts_from_the_oldest_version_in_a_segment() -> None:
    mixed = Segment(ticket(0), {}, np.array([7, 4, 6]), {"env_steps": 3})
    run = Run()
    assert run.train(0.0, 1.0, mixed, version=8)["pace/max_sample_age"] == 4


def test_the_oldest_age_of_the_run_is_kept() -> None:
    run = Run()
    run.train(0.0, 1.0, segment(0, version=2), version=5)
    run.train(1.0, 2.0, segment(1, version=6), version=6)
    assert run.meter.max_staleness == 3
    run.tell(TrainStarted(Batch(7, (), 1)), 2.0)
    run.meter.measure(RoundTrained(8, Batch(7, (), 1), {"pace/max_replayed_age": 5.0}, 2.0, 3.0))
    assert run.meter.max_staleness == 5, "a learner with a replay of its own reports what it drew"


def test_new_and_replayed_samples_have_ages_of_their_own() -> None:
    run = Run()
    run.tell(TrainStarted(batch := Batch(5, (segment(0, version=3),), 1)), 0.0)
    event = RoundTrained(6, batch, {"pace/max_replayed_age": 40.0, "pace/avg_replayed_age": 9.0}, 0.0, 1.0)
    run.meter.measure(event)
    run.tell(event, 1.0)
    ages = {name: value for name, value in run.meter.metrics.items() if name.endswith("_age")}
    assert ages == {
        **{f"pace/{kind}_sample_age": 2 for kind in ("avg", "p95", "max")},
        "pace/max_replayed_age": 40,
        "pace/avg_replayed_age": 9,
    }


def by_env(number: int, collector: int, *steps: int) -> Segment:
    units = {"env_steps": sum(steps)}
    return Segment(ticket(number, collector), {}, np.array([0]), units, steps_by_env=steps)


def balance(metrics: Metrics) -> tuple[float, float]:
    return metrics["rollout/samples_by_env_min"], metrics["rollout/samples_by_env_max"]


def test_samples_are_counted_by_environment() -> None:
    run = Run(2)
    batch = [by_env(0, 0, 5, 7), by_env(1, 1, 6, 2), by_env(2, 0, 1, 1)]
    for item in batch:
        run.arrive(item, 0.5)
    assert balance(run.train(1.0, 2.0, *batch[:2])) == (2, 8)
    assert run.meter.round_by_env == [[5, 7], [6, 2]]
    assert balance(run.train(2.0, 3.0, batch[2])) == (2, 8)
    assert run.meter.round_by_env == [[1, 1], []], "of the round, and not of the run"
    resumed = Run(2)
    resumed.meter.load_state_dict(through_a_checkpoint(run.meter), ready=[])
    resumed.arrive(by_env(3, 1, 0, 9), 0.5)
    assert balance(resumed.train(1.0, 2.0)) == (6, 11)


def test_collectors_that_do_not_name_their_environments_count_as_one() -> None:
    run = Run(2)
    batch = [segment(0, 0, steps=30), by_env(1, 1, 6, 2)]
    for item in batch:
        run.arrive(item, 0.5)
    assert balance(run.train(1.0, 2.0, *batch)) == (2, 30)
    assert run.meter.round_by_env == []


def test_very_many_environments_are_not_written_down() -> None:
    run = Run(1)
    many = by_env(0, 0, *[3] * 300)
    run.arrive(many, 0.5)
    assert balance(run.train(1.0, 2.0, many)) == (3, 3)
    assert run.meter.round_by_env == []


def test_returns_are_repeated_while_no_episode_ends() -> None:
    run = Run()
    before = dict(run.train(0.0, 1.0))
    assert math.isnan(before["rollout/return_mean"])
    assert math.isnan(before["rollout/return_mean_100"])
    run.train(1.5, 2.0, segment(0, returns=(4.0, 8.0)))
    after = run.train(2.5, 3.0)
    assert (after["rollout/return_mean"], after["rollout/length_mean"]) == (6.0, 6.0)


def test_the_rolling_mean_forgets_all_but_the_last_hundred_episodes() -> None:
    run = Run()
    last = segment(1, returns=tuple(float(i) for i in range(100)))
    run.train(0.0, 1.0, segment(0, returns=(1000.0,) * 50), last)
    assert run.meter.return_mean_100 == pytest.approx(49.5)


def test_episodes_count_in_the_order_of_training_not_of_arrival() -> None:
    first, second = segment(0, returns=(1.0,)), segment(1, returns=(2.0,) * 100)
    means = []
    for arrivals in ((first, second), (second, first)):
        run = Run()
        for item in arrivals:
            run.arrive(item, 0.0)
        run.train(0.0, 1.0, first, second)
        means.append(run.meter.return_mean_100)
    assert means == [2.0, 2.0]


@pytest.mark.parametrize(
    "pause",
    [
        EvalDone(0, {"eval/return_mean": 1.0}, 90.0),
        Saved(0, Path("x"), 99.0, paused_s=90.0),
        SnapshotTaken({}, {}, 90.0),
    ],
)
def test_pauses_are_nobodys_idleness(pause: Event) -> None:
    run = Run()
    run.issue(0, 0.0)
    run.arrive(segment(0), 5.0)
    run.tell(pause, 95.0)
    metrics = run.train(95.0, 100.0, segment(0))
    assert run.signals.round_s == pytest.approx(10.0)
    assert run.signals.collect_idle == pytest.approx(0.5)
    assert run.signals.train_idle == pytest.approx(0.5)
    assert metrics["time/round_s"] == 100.0


def test_what_goes_on_beside_the_training_is_no_pause() -> None:
    run = Run(pauses_for_eval=False)
    run.issue(0, 0.0)
    run.tell(EvalDone(0, {"eval/return_mean": 1.0}, 90.0), 95.0)
    run.tell(Saved(0, Path("x"), 90.0), 95.0)
    run.train(95.0, 100.0)
    assert run.signals.round_s == pytest.approx(100.0)


def test_samples_are_counted_in_the_first_unit_known() -> None:
    run = Run()
    for number, units in enumerate([{"env_steps": 5, "agent_steps": 15}, {"tokens": 70}, {"games": 3}, {}]):
        run.arrive(Segment(ticket(number), {}, np.array([0]), units), 0.0)
    metrics = run.train(0.0, 1.0)
    assert metrics["rollout/total_generated_samples"] == 5 + 70 + 1 + 1
    assert metrics["rollout/total_env_steps"] == run.meter.env_steps == 5


def test_queue_bytes_are_those_that_wait() -> None:
    run = Run()
    waiting = [segment(number) for number in range(4)]
    for item in waiting:
        run.arrive(item, 0.0, 10**item.ticket.number)
    assert run.train(0.0, 1.0)["queue/bytes"] == 1111
    assert run.train(1.0, 2.0, waiting[2])["queue/bytes"] == 1011
    run.tell(SegmentDropped(0, "stale"), 2.0)
    assert run.train(2.0, 3.0)["queue/bytes"] == 1010
    assert run.train(3.0, 4.0, waiting[1], waiting[3])["queue/bytes"] == 0


def test_the_queue_is_that_of_the_ledger() -> None:
    run = Run()
    run.pace.ready, run.pace.trained = 3, 8
    metrics = run.train(0.0, 1.0)
    assert (metrics["queue/size"], metrics["queue/total_consumed"]) == (3, 8)


def test_the_learner_names_its_own_metrics_and_counts_its_own_steps() -> None:
    run = Run()
    run.train(0.0, 1.0, gradient_steps=16.0, loss=0.5)
    metrics = run.train(1.0, 2.0, gradient_steps=16.0, loss=0.25)
    assert (metrics["learn/global_steps"], metrics["learn/loss"]) == (32.0, 0.25)
    assert run.train(2.0, 3.0, processed_samples=7.0)["learn/processed_samples"] == 7.0, "its own name wins"


def test_system_figures_are_taken_as_given() -> None:
    asked: list[float] = []

    def system(now_s: float) -> Metrics:
        asked.append(now_s)
        return {"system/rss_bytes": 5.0, "system/cpu_percent": 99.0}

    run = Run(3, system=system)
    run.pace.num_up = 3
    metrics = run.train(0.0, 1.0)
    assert (metrics["system/rss_bytes"], metrics["system/workers_alive"], asked) == (5.0, 3, [1.0])
    assert math.isnan(Run(3).train(0.0, 1.0)["system/rss_bytes"])


def test_signals_for_the_tuner() -> None:
    run = Run(2)
    first, second = segment(0, 0, collect_s=2.0), segment(1, 1, collect_s=4.0)
    run.issue(0, 0.0, 0)
    run.issue(1, 0.0, 1)
    run.arrive(first, 2.0)
    run.arrive(second, 4.0)
    run.train(4.0, 10.0, first, second, ess=0.9, behaviour_kl=0.01)
    signals = run.signals
    assert (signals.round_s, signals.collect_s, signals.train_s) == (10.0, 3.0, 6.0)
    assert signals.collect_idle == pytest.approx(0.7)
    assert signals.train_idle == pytest.approx(0.4)
    assert (signals.ess, signals.behaviour_kl, signals.search_kl) == (0.9, 0.01, None)
    run = Run()
    run.train(0.0, 1.0, ess=math.nan)
    assert (run.signals.ess, run.signals.behaviour_kl) == (None, None)
    run.train(1.0, 2.0, search_kl=0.3)
    assert run.signals.search_kl == 0.3


def test_signals_are_there_before_the_round_is_told() -> None:
    run = Run()
    run.tell(TrainStarted(Batch(0, (), 1)), 0.0)
    run.meter.measure(RoundTrained(1, Batch(0, (), 1), {}, 0.0, 1.0))
    assert run.meter.metrics == {}


def test_evaluations_carry_their_version_time_and_skips() -> None:
    run = Run()
    run.pace.eval_skipped = 2
    run.tell(EvalDone(7, {"eval/return_mean": 3.0}, 1.5), 1.0)
    assert run.meter.eval_metrics == {
        **{"eval/return_mean": 3.0, "eval/version": 7.0, "eval/time_s": 1.5, "eval/skipped": 2.0},
    }


def test_an_evaluation_that_failed_leaves_the_last_one() -> None:
    run = Run()
    run.tell(EvalDone(7, {"eval/return_mean": 3.0}, 1.5), 1.0)
    before = dict(run.meter.eval_metrics)
    run.tell(EvalDone(8, None, 90.0, "broken"), 2.0)
    assert run.meter.eval_metrics == before


def test_skipped_evaluations_add_up_across_starts_of_a_run() -> None:
    run = Run()
    run.pace.eval_skipped = 2
    run.train(0.0, 1.0)
    resumed = Run()
    resumed.pace.eval_skipped = 2  # the pace continues from its own saved state
    resumed.meter.load_state_dict(run.meter.state_dict(), ())
    resumed.pace.eval_skipped = 3
    resumed.tell(EvalDone(7, {"eval/return_mean": 3.0}, 1.5), 1.0)
    assert resumed.meter.eval_metrics["eval/skipped"] == 3.0


def through_a_checkpoint(meter: Meter) -> StateTree:
    skeleton, arrays = pack(meter.state_dict())
    return unpack(json.loads(json.dumps(skeleton)), arrays)


def test_counters_survive_a_checkpoint() -> None:
    run = two_collectors(lambda run: run.tell(CollectorDown(1, "killed"), 4.0))
    waiting = segment(2, returns=(5.0,))
    run.arrive(waiting, 11.0, 777)
    state = through_a_checkpoint(run.meter)
    resumed = Run(2)
    resumed.meter.load_state_dict(state, ready=[2])
    assert resumed.meter.return_mean_100 == run.meter.return_mean_100
    assert resumed.meter.env_steps == run.meter.env_steps == 500
    before, after = dict(run.train(11.0, 12.0)), dict(resumed.train(511.0, 512.0))
    kept = [name for name in NAMES if name.split("/")[0] in ("queue", "rollout") and "per_s" not in name]
    kept += ["pace/collect_count", "learn/global_steps", "learn/processed_samples"]
    kept += ["system/worker_restarts", "weights/param_sync_count"]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert after["queue/bytes"] == 777
    assert after["time/elapsed_s"] == pytest.approx(11.0), (
        "the ten seconds before count, the time between not"
    )
    resumed.issue(3, 512.0)
    assert resumed.train(513.0, 514.0, waiting)["queue/bytes"] == 0
    assert resumed.meter.metrics["time/round_s"] == pytest.approx(2.0)


@pytest.mark.parametrize(("dial", "turned", "told"), [(0, None, True), (2, None, False), (2, 0, True)])
def test_a_limit_of_time_is_told_where_k_was_chosen_as_zero(
    dial: int, turned: int | None, told: bool
) -> None:
    """A dial that is still opening is at 0, too, and such a run comes to other weights in any case."""
    run = Run(dial=dial)
    run.pace.degree = 0
    if turned is not None:
        run.tell(DialTurned(turned), 0.0)
    late = Piece((Span(0, 5),), "timeout")
    run.arrive(replace(segment(0), pieces=(late,)), 0.5)
    metrics = run.train(0.0, 1.0)
    assert ("pace/lockstep_until" in metrics) == told


def test_segments_that_were_not_restored_leave_the_queue() -> None:
    run = two_collectors()
    run.arrive(segment(2), 11.0, 777)
    run.arrive(segment(3), 11.0, 23)
    resumed = Run(2)
    resumed.meter.load_state_dict(through_a_checkpoint(run.meter), ready=[3])
    assert resumed.train(0.0, 1.0)["queue/bytes"] == 23


def test_steps_per_second_are_those_of_this_start() -> None:
    run = two_collectors()
    assert run.meter.steps_per_s == pytest.approx(400 / 10)
    resumed = Run(2)
    resumed.meter.load_state_dict(run.meter.state_dict(), ())
    assert resumed.meter.steps_per_s == 0.0
    resumed.issue(2, 500.0)
    resumed.arrive(segment(2, steps=60), 501.0)
    resumed.train(501.0, 502.0)
    assert resumed.meter.steps_per_s == pytest.approx(60 / 2)


def test_time_in_which_collecting_and_training_went_on_at_once_adds_up() -> None:
    assert two_collectors().meter.metrics["time/overlap_s"] == 0.0, "one after the other"
    run = Run(2)
    for number, collector in ((0, 0), (1, 1)):
        run.issue(number, 0.0, collector)
    run.arrive(segment(0, 0), 2.0)
    run.issue(2, 2.0, 0)
    run.arrive(segment(1, 1), 4.0)
    run.tell(TrainStarted(Batch(0, (), 1)), 4.0)
    run.arrive(segment(2, 0), 7.0)
    event = RoundTrained(1, Batch(0, (segment(0, 0), segment(1, 1)), 1), {}, 4.0, 10.0)
    run.meter.measure(event)
    run.tell(event, 10.0)
    assert run.meter.metrics["time/overlap_s"] == pytest.approx(1.5), "3 s of one of two collectors"
    resumed = Run(2)
    resumed.meter.load_state_dict(run.meter.state_dict(), ())
    resumed.issue(3, 500.0)
    resumed.tell(TrainStarted(Batch(1, (), 1)), 501.0)
    resumed.meter.measure(RoundTrained(2, Batch(1, (segment(2, 0),), 1), {}, 501.0, 503.0))
    assert resumed.meter.state_dict()["totals"]["overlap_s"] == pytest.approx(1.5 + 1.0)


def test_saving_environments_is_time_at_work_with_a_metric_of_its_own() -> None:
    run = Run(2)
    run.issue(0, 0.0, 0)
    run.tell(SegmentArrived(segment(0, 0, collect_s=1.0), state_s=3.0), 4.0)
    metrics = run.train(4.0, 8.0, segment(0, 0, collect_s=1.0))
    assert metrics["time/state_s"] == pytest.approx(1.5), "per collector"
    assert metrics["time/collect_s"] == pytest.approx(0.5)
    assert metrics["pace/collect_idle_ratio"] == pytest.approx(1 - 4 / 16)


def test_the_last_metrics_are_not_those_of_rounds_without_anything_collected() -> None:
    run = two_collectors()
    before, held_up_by = dict(run.meter.metrics), run.meter.bottleneck
    run.train(10.0, 12.0, segment(1, 1, steps=300), version=1)
    assert run.meter.metrics["rollout/steps_per_s"] == 0.0
    run.meter.finish()
    for name in ("rollout/steps_per_s", "pace/collect_idle_ratio"):
        assert run.meter.metrics[name] == before[name]
    assert run.meter.bottleneck == held_up_by
    assert run.meter.metrics["time/round_s"] == pytest.approx(2.0)


def test_the_parts_of_a_start_are_told_apart() -> None:
    run = Run()
    assert (run.meter.first_ticket_s, run.meter.rounds_s) == (None, 0.0)
    run.tell(Published(0, 0.1), 1.0)
    run.issue(0, 6.0)
    run.arrive(segment(0), 7.0)
    run.train(7.0, 8.5, segment(0))
    assert (run.meter.first_ticket_s, run.meter.rounds_s) == (6.0, 2.5)


def test_the_last_version_is_published_once_the_run_is_over() -> None:
    run = two_collectors()
    run.pace.version = 2
    assert run.train(10.0, 12.0)["weights/publish_lag"] == 1
    run.pace.published = 2
    run.tell(Published(2, 0.25), 12.5)
    run.meter.finish()
    assert run.meter.metrics["weights/published_version"] == 2
    assert run.meter.metrics["weights/publish_lag"] == 0


def test_nothing_is_left_to_do_once_the_run_is_over() -> None:
    run = two_collectors()
    assert run.meter.metrics["time/eta_s"] > 0
    run.meter.finish()
    assert run.meter.metrics["time/eta_s"] == 0.0
    empty = Run()
    empty.meter.finish()
    assert empty.meter.metrics == {}


def rounds_of(run: Run, seconds: list[float], begin_s: float = 0.0, first: int = 0) -> float:
    """Train rounds that take so long one after the other; return when the last one ends."""
    for number, took_s in enumerate(seconds, start=first):
        run.arrive(segment(number), begin_s)
        run.train(begin_s, begin_s + took_s)
        begin_s += took_s
    return begin_s


def eta_s(run: Run, rounds_left: int) -> float:
    """Return what the meter says with so many rounds left, after another round of no length."""
    run.pace.version, run.pace.rounds = 3, 3 + rounds_left
    event = RoundTrained(3, Batch(2, (), 1))
    run.meter.handlers()[RoundTrained](event, 0.0)
    value = run.meter.metrics["time/eta_s"]
    assert isinstance(value, float)
    return value


def test_the_time_left_is_that_of_as_many_rounds_as_are_left() -> None:
    run = Run()
    rounds_of(run, [2.0, 4.0])
    assert eta_s(run, rounds_left=10) == pytest.approx(30.0)
    assert eta_s(run, rounds_left=0) == 0.0


def test_the_start_of_the_collectors_is_no_part_of_the_speed() -> None:
    run = Run()
    run.tell(Published(0, 0.1), 1.0)
    rounds_of(run, [2.0, 2.0], begin_s=101.0)
    assert run.meter.metrics["time/elapsed_s"] == pytest.approx(104.0)
    assert eta_s(run, rounds_left=10) == pytest.approx(20.0)


def test_a_resumed_run_believes_in_its_own_speed_after_a_few_rounds() -> None:
    before = Run()
    rounds_of(before, [10.0] * 50)
    run = Run()
    run.meter.load_state_dict(before.meter.state_dict(), ())
    run.tell(Published(50, 0.1), 1000.0)
    assert eta_s(run, rounds_left=10) == pytest.approx(100.0), "all it knows yet"
    now_s = rounds_of(run, [1.0] * 4, begin_s=1030.0, first=50)
    assert eta_s(run, rounds_left=10) > 90.0
    now_s = rounds_of(run, [1.0], begin_s=now_s, first=54)
    assert eta_s(run, rounds_left=10) == pytest.approx(10.0)
    rounds_of(run, [3.0] * 3, begin_s=now_s, first=55)
    assert eta_s(run, rounds_left=10) == pytest.approx(20.0)


def test_the_first_rounds_that_compile_are_soon_no_part_of_the_speed() -> None:
    run = Run()
    now_s = rounds_of(run, [3.0, 9.0, 0.1, 0.1])
    assert eta_s(run, rounds_left=10) > 10.0, "all it knows yet"
    rounds_of(run, [0.1], begin_s=now_s, first=4)
    assert eta_s(run, rounds_left=10) == pytest.approx(1.0)


def test_the_speed_is_that_of_the_last_fifty_rounds() -> None:
    run = Run()
    now_s = rounds_of(run, [100.0] * 3)
    rounds_of(run, [2.0] * 50, begin_s=now_s, first=3)
    assert eta_s(run, rounds_left=1) == pytest.approx(2.0)


@given(
    collectors=st.lists(
        st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=6),
        min_size=1,
        max_size=3,
    ),
    cuts=st.lists(st.floats(0.1, 4), min_size=1, max_size=10),
)
def test_busy_time_is_neither_lost_nor_counted_twice(
    collectors: list[list[tuple[float, float]]], cuts: list[float]
) -> None:
    happenings: list[tuple[float, int, str, Segment]] = []
    number, worked_s, end_s = 0, 0.0, 0.0
    for collector, work in enumerate(collectors):
        now_s = 0.0
        for gap_s, took_s in work:
            begin_s, now_s = now_s + gap_s, now_s + gap_s + took_s
            item = segment(number, collector)
            happenings += [(begin_s, 1, "issue", item), (now_s, 2, "arrive", item)]
            number, worked_s, end_s = number + 1, worked_s + took_s, max(end_s, now_s)
    cut_s = np.cumsum([0.0, *cuts])[1:]
    ends_s = deque(float(cut) for cut in (*cut_s, max(end_s, cut_s[-1]) + 1.0))
    happenings += [(cut, 3, "train", segment(0)) for cut in ends_s]
    run, busy_s, last_s = Run(len(collectors)), 0.0, 0.0
    run.tell(Published(0, 0.0), 0.0)
    for now_s, _, kind, item in sorted(happenings, key=lambda entry: entry[:2]):
        if kind == "issue":
            run.tell(Issued(item.ticket), now_s)
        elif kind == "arrive":
            run.tell(SegmentArrived(item), now_s)
        else:
            metrics = run.train(now_s, now_s)
            busy_s += (1 - metrics["pace/collect_idle_ratio"]) * (now_s - last_s) * len(collectors)
            last_s = now_s
    assert busy_s == pytest.approx(worked_s, abs=1e-6)
