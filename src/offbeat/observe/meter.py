"""The meter: turns what happens in a run into its metrics.

It has no clock of its own; times come in with every call, in seconds of one monotonic clock. A *window* is
the wall time from the end of one round to the end of the next; idle shares, rates and times of a round are
those of its window. Counters are totals since the run's first round and survive a resume.

*Samples* are counted in the first unit that a segment names of ``env_steps``, ``tokens``, ``agent_steps``;
a segment that names none of them is one sample.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from offbeat.observe.callbacks import MetricValue
from offbeat.observe.lanes import Lane
from offbeat.pacing.events import Signals
from offbeat.types import Batch, Metrics, Segment, StateTree, Ticket

_UNITS = ("env_steps", "tokens", "agent_steps")
_EPISODES_AVERAGED = 100
_ROUNDS_AVERAGED = 50
_ROUNDS_TRUSTED = 5  # so many of its own, and a start no longer believes in the speed of the one before
_BALANCED_WITHIN = 0.1
_NO_SYSTEM = {"system/rss_bytes": math.nan, "system/cpu_percent": math.nan, "system/gpu_mem_bytes": math.nan}


@dataclass(frozen=True, slots=True)
class PaceView:
    """Where the coordinator stands: tickets by fate, versions, and lag in rounds.

    ``rounds`` is how many the run is to train; ``workers_alive`` None means all.
    """

    off_policy_degree: int
    version: int
    published_version: int
    running: int
    ready: int
    trained: int
    dropped: int
    lost: int
    issued: int
    segments_per_round: int
    rounds: int
    lag: float
    workers_alive: int | None = None


@dataclass(slots=True)
class _Totals:
    """Since the run's first round."""

    arrived: int = 0
    samples: int = 0
    env_steps: int = 0
    episodes: int = 0
    trained_samples: int = 0
    global_steps: float = 0.0
    dropped_samples: int = 0
    dropped_stale_samples: int = 0
    publishes: int = 0
    publish_failures: int = 0
    eval_skipped: int = 0
    worker_restarts: int = 0
    generation_errors: int = 0
    elapsed_s: float = 0.0


@dataclass(slots=True)
class _Window:
    """What has happened since the last round ended."""

    start_s: float | None = None
    samples: int = 0
    publish_s: float = 0.0
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Ages:
    """Staleness of what a round trained, in versions, weighted by samples."""

    mean: float = 0.0
    oldest: float = 0.0
    p95: float = 0.0
    stale_share: float = 0.0


@dataclass(frozen=True, slots=True)
class _Round:
    """What the last round measured. ``collect_s``: all collectors together, working side by side."""

    round_s: float = 0.0
    active_s: float = 0.0
    collect_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    collect_idle: float = 0.0
    train_idle: float = 0.0
    samples: int = 0
    trained_samples: int = 0
    ages: _Ages = field(default_factory=_Ages)
    learned: Metrics = field(default_factory=dict)


class PaceMeter:
    """Measures a run of ``num_lanes`` collectors. Not safe to share between threads."""

    def __init__(self, num_lanes: int, staleness_threshold: int = 0) -> None:
        self._lanes = [Lane() for _ in range(num_lanes)]
        self._threshold = staleness_threshold
        self._totals = _Totals()
        self._window = _Window()
        self._round = _Round()
        self._training: Batch | None = None
        self._train_started_s = 0.0
        self._collect_s: dict[int, float] = {}  # ticket -> seconds its segment took
        self._queued_bytes: dict[int, int] = {}
        self._recent_returns: deque[float] = deque(maxlen=_EPISODES_AVERAGED)
        self._recent_rounds_s: deque[float] = deque(maxlen=_ROUNDS_AVERAGED)
        self._rounds_here = 0
        self._first_ticket_s = 0.0
        self._return_mean = math.nan
        self._length_mean = math.nan
        self._sync_time_s = 0.0

    # ------------------------------------------------------------ collecting

    def issued(self, ticket: Ticket, now_s: float) -> None:
        """A ticket went to its lane, which is at work from now until its segment arrives."""
        self._start_window(now_s)
        self._first_ticket_s = self._first_ticket_s or now_s
        if ticket.attempt:
            for lane in self._lanes:
                lane.forget(ticket.number)
        self._lanes[ticket.collector].issue(ticket.number, now_s)

    def arrived(self, segment: Segment, num_bytes: int, now_s: float) -> None:
        """A segment is in the store, where it takes ``num_bytes``."""
        self._start_window(now_s)
        ticket, samples = segment.ticket, _num_samples(segment)
        lane = self._lanes[ticket.collector]
        seconds = lane.arrive(ticket.number, segment.collect_s, self._window_start(), now_s)
        lane.samples += samples
        self._collect_s[ticket.number] = seconds
        self._queued_bytes[ticket.number] = num_bytes
        self._window.samples += samples
        self._totals.arrived += 1
        self._totals.samples += samples
        self._totals.env_steps += segment.units.get("env_steps", 0)

    def dropped(self, segment: Segment, stale: bool) -> None:
        """A segment that had arrived was thrown away, for its age or for another reason."""
        samples = _num_samples(segment)
        self._totals.dropped_samples += samples
        self._totals.dropped_stale_samples += samples if stale else 0
        self._forget_segment(segment.ticket.number)

    def worker_lost(self, lane: int | None = None, now_s: float | None = None) -> None:
        """A collector died and is being replaced; with its lane and the time, it counts as idle from now."""
        self._totals.worker_restarts += 1
        if lane is not None and now_s is not None:
            self._lanes[lane].lose(self._window_start(), now_s)

    def generation_error(self) -> None:
        """A collector raised."""
        self._totals.generation_errors += 1

    # ------------------------------------------------------------ training

    def train_started(self, batch: Batch, now_s: float) -> None:
        """The learner begins a round."""
        self._start_window(now_s)
        self._training, self._train_started_s = batch, now_s

    def train_ended(self, now_s: float, metrics: Metrics) -> None:
        """The learner finished its round; ``metrics`` is what it reports. Ends the window.

        A learner that takes several optimizer steps per round reports how many as ``learn/gradient_steps``.
        """
        assert self._training is not None, "train_ended without train_started"
        batch, self._training = self._training, None
        self._round = self._measure(batch, now_s, metrics)
        self._totals.elapsed_s += self._round.round_s
        self._totals.trained_samples += self._round.trained_samples
        self._totals.global_steps += metrics.get("learn/gradient_steps", 1.0)
        self._remember_speed(now_s)
        for segment in batch.segments:
            self._forget_segment(segment.ticket.number)
        self._count_episodes(batch)
        self._end_window(now_s)

    def _remember_speed(self, now_s: float) -> None:
        """Keep how long the round took, without the start of the collectors before the first one."""
        self._recent_rounds_s.append(now_s - max(self._window_start(), self._first_ticket_s))
        self._rounds_here += 1
        if self._rounds_here == _ROUNDS_TRUSTED:
            for _ in range(len(self._recent_rounds_s) - _ROUNDS_TRUSTED):
                self._recent_rounds_s.popleft()

    def _count_episodes(self, batch: Batch) -> None:
        """Episodes count with the round that trains them: in an order that does not depend on timing."""
        returns = [value for segment in batch.segments for value in segment.episodes.returns]
        lengths = [value for segment in batch.segments for value in segment.episodes.lengths]
        self._recent_returns.extend(returns)
        self._totals.episodes += len(returns)
        if returns:
            self._return_mean, self._length_mean = _mean(returns), _mean(lengths)

    def _measure(self, batch: Batch, now_s: float, metrics: Metrics) -> _Round:
        start_s = self._window_start()
        round_s, train_s = max(now_s - start_s, 1e-9), now_s - self._train_started_s
        active_s = max(round_s - self._window.paused_s, 1e-9)
        busy_s = sum(lane.busy_until(now_s, start_s) for lane in self._lanes)
        collect_s = sum(self._seconds_of(segment) for segment in batch.segments)
        weights = [_num_samples(segment) for segment in batch.segments]
        return _Round(
            round_s=round_s,
            collect_s=collect_s / len(self._lanes),
            train_s=train_s,
            publish_s=self._window.publish_s,
            active_s=active_s,
            collect_idle=_share(active_s - busy_s / len(self._lanes), active_s),
            train_idle=_share(active_s - train_s, active_s),
            samples=self._window.samples,
            trained_samples=sum(weights),
            ages=_measure_ages(batch.staleness(), weights, self._threshold),
            learned=metrics,
        )

    def _seconds_of(self, segment: Segment) -> float:
        return self._collect_s.get(segment.ticket.number, segment.collect_s)

    def _forget_segment(self, number: int) -> None:
        self._collect_s.pop(number, None)
        self._queued_bytes.pop(number, None)

    def _start_window(self, now_s: float) -> None:
        if self._window.start_s is None:
            self._window.start_s = now_s

    def _window_start(self) -> float:
        return self._window.start_s or 0.0

    def _end_window(self, now_s: float) -> None:
        self._window = _Window(start_s=now_s)
        for lane in self._lanes:
            lane.busy_s = 0.0

    # ------------------------------------------------------------ weights and evaluation

    def published(self, version: int, seconds: float, now_s: float) -> None:
        """Collectors can get ``version``; making it available took ``seconds``."""
        self._start_window(now_s)
        self._totals.publishes += 1
        self._window.publish_s += seconds
        self._sync_time_s = seconds

    def publish_failed(self) -> None:
        """Publishing did not work and is tried again."""
        self._totals.publish_failures += 1

    def evaluated(self, version: int, metrics: Metrics, seconds: float) -> Metrics:
        """Complete an evaluation's metrics: version judged, seconds taken, evaluations skipped so far."""
        own = {
            "eval/version": float(version),
            "eval/time_s": seconds,
            "eval/skipped": float(self._totals.eval_skipped),
        }
        return {**metrics, **own}

    def paused(self, seconds: float) -> None:
        """Everything stood still for a blocking evaluation or a checkpoint: nobody's idleness."""
        self._window.paused_s += seconds

    def eval_skipped(self, num_skipped: int = 1) -> None:
        """A slow evaluator passed over so many evaluations."""
        self._totals.eval_skipped += num_skipped

    # ------------------------------------------------------------ results

    def signals(self) -> Signals:
        """What the last round measured, for the tuner of ``off_policy_degree``."""
        last = self._round
        return Signals(
            round_s=last.active_s,
            collect_s=last.collect_s,
            train_s=last.train_s,
            collect_idle=last.collect_idle,
            train_idle=last.train_idle,
            ess=_finite_or_none(last.learned.get("learn/ess")),
            behaviour_kl=_finite_or_none(last.learned.get("learn/behaviour_kl")),
        )

    @property
    def env_steps(self) -> int:
        """Environment steps that arrived since the run's first round."""
        return self._totals.env_steps

    @property
    def return_mean_100(self) -> float:
        """Mean return of the last 100 training episodes; NaN before the first ended."""
        return _mean(self._recent_returns)

    def round_metrics(
        self, now_s: float, view: PaceView, system: Metrics | None = None
    ) -> dict[str, MetricValue]:
        """All metrics of the round that `train_ended` closed; ``system`` is what a SystemMonitor read.

        What the learner reported is in it under its own names, and wins over ours.
        """
        result: dict[str, MetricValue] = {}
        result.update(self._pace_metrics(view))
        result.update(self._rollout_metrics())
        result.update(self._queue_metrics(view))
        result.update(self._learn_metrics())
        result.update(self._weights_metrics(view))
        result.update(self._time_metrics(now_s, view))
        result.update(_NO_SYSTEM if system is None else system)
        result["system/workers_alive"] = _or_else(view.workers_alive, len(self._lanes))
        result["system/worker_restarts"] = self._totals.worker_restarts
        result.update(self._round.learned)
        return result

    def _pace_metrics(self, view: PaceView) -> dict[str, MetricValue]:
        last, totals = self._round, self._totals
        return {
            "pace/off_policy_degree": view.off_policy_degree,
            "pace/collect_count": totals.arrived,
            "pace/train_count": view.version,
            "pace/lag": view.lag,
            "pace/avg_sample_age": last.ages.mean,
            "pace/max_sample_age": last.ages.oldest,
            "pace/p95_sample_age": last.ages.p95,
            "pace/stale_samples_ratio": last.ages.stale_share,
            "pace/dropped_stale_samples": totals.dropped_stale_samples,
            "pace/dropped_samples": totals.dropped_samples,
            "pace/collect_idle_ratio": last.collect_idle,
            "pace/train_idle_ratio": last.train_idle,
            "pace/bottleneck": _bottleneck(last.collect_idle, last.train_idle),
            "pace/overlap_efficiency": _ratio(last.active_s, max(last.collect_s, last.train_s)),
        }

    def _rollout_metrics(self) -> Metrics:
        by_lane = [lane.samples for lane in self._lanes]
        return {
            "rollout/return_mean": self._return_mean,
            "rollout/return_mean_100": self.return_mean_100,
            "rollout/length_mean": self._length_mean,
            "rollout/steps_per_s": _ratio(self._round.samples, self._round.round_s),
            "rollout/total_generated_samples": self._totals.samples,
            "rollout/total_env_steps": self._totals.env_steps,
            "rollout/total_episodes": self._totals.episodes,
            "rollout/generation_errors": self._totals.generation_errors,
            # The environments of a lane step together, so lanes are the finest balance there is to see.
            "rollout/samples_by_env_min": min(by_lane),
            "rollout/samples_by_env_max": max(by_lane),
        }

    def _queue_metrics(self, view: PaceView) -> Metrics:
        for number in sorted(self._queued_bytes)[: max(0, len(self._queued_bytes) - view.ready)]:
            self._forget_segment(number)  # the store gave it up without a word
        return {
            "queue/size": view.ready,
            "queue/total_produced": self._totals.arrived,
            "queue/total_consumed": view.trained,
            "queue/bytes": sum(self._queued_bytes.values()),
        }

    def _learn_metrics(self) -> Metrics:
        return {
            "learn/global_steps": self._totals.global_steps,
            "learn/processed_samples": self._totals.trained_samples,
            "learn/samples_per_s": _ratio(self._round.trained_samples, self._round.round_s),
        }

    def _weights_metrics(self, view: PaceView) -> Metrics:
        totals = self._totals
        return {
            "weights/current_param_version": view.version,
            "weights/published_version": view.published_version,
            "weights/publish_lag": view.version - view.published_version,
            "weights/param_sync_count": totals.publishes,
            "weights/param_sync_requests": totals.publishes + totals.publish_failures,
            "weights/sync_failures": totals.publish_failures,
            "weights/sync_time_s": self._sync_time_s,
        }

    def _time_metrics(self, now_s: float, view: PaceView) -> Metrics:
        last = self._round
        since_s = max(0.0, now_s - (self._window.start_s if self._window.start_s is not None else now_s))
        return {
            "time/round_s": last.round_s,
            "time/collect_s": last.collect_s,
            "time/train_s": last.train_s,
            "time/publish_s": last.publish_s,
            "time/wait_s": max(0.0, last.round_s - last.train_s - last.publish_s),
            "time/elapsed_s": self._totals.elapsed_s + since_s,
            "time/eta_s": _mean(self._recent_rounds_s) * max(0, view.rounds - view.version),
        }

    # ------------------------------------------------------------ state

    def state_dict(self) -> StateTree:
        """Counters and running means; what is under way belongs to the attempt and is left out."""
        return {
            "totals": asdict(self._totals),
            "samples_by_lane": [lane.samples for lane in self._lanes],
            "recent_returns": list(self._recent_returns),
            "recent_rounds_s": list(self._recent_rounds_s),
            "return_mean": self._return_mean,
            "length_mean": self._length_mean,
            "queued_bytes": dict(self._queued_bytes),
            "collect_s": dict(self._collect_s),
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state; the first window begins with the next call that has a time."""
        self._totals = _Totals(**state["totals"])
        for lane, samples in zip(self._lanes, state["samples_by_lane"], strict=False):
            lane.samples = samples
        self._recent_returns.clear()
        self._recent_returns.extend(state["recent_returns"])
        self._recent_rounds_s.clear()
        self._recent_rounds_s.extend(state["recent_rounds_s"])
        self._return_mean, self._length_mean = state["return_mean"], state["length_mean"]
        self._queued_bytes, self._collect_s = dict(state["queued_bytes"]), dict(state["collect_s"])
        self._window = _Window()
        self._rounds_here, self._first_ticket_s = 0, 0.0


def _num_samples(segment: Segment) -> int:
    return next((segment.units[unit] for unit in _UNITS if unit in segment.units), 1)


def _measure_ages(ages: Sequence[int], weights: Sequence[int], threshold: int) -> _Ages:
    total = sum(weights)
    if not total:
        return _Ages()
    weighted = sorted(zip(ages, weights, strict=True))
    seen, p95 = 0, weighted[-1][0]
    for age, weight in weighted:
        seen += weight
        if seen >= 0.95 * total:
            p95 = age
            break
    mean = sum(age * weight for age, weight in weighted) / total
    stale = sum(weight for age, weight in weighted if age > threshold)
    return _Ages(mean, float(weighted[-1][0]), float(p95), stale / total)


def _bottleneck(collect_idle: float, train_idle: float) -> str:
    """The side that idles less holds the other up."""
    if abs(collect_idle - train_idle) <= _BALANCED_WITHIN:
        return "balanced"
    return "collect" if collect_idle < train_idle else "train"


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _or_else(value: int | None, default: int) -> int:
    return default if value is None else value
