"""The meter: an observer that turns the events of a run into its metrics.

It has no clock of its own; times come in with every event, in seconds of one monotonic clock. A *window* is
the wall time from the end of one round to the end of the next; idle shares, rates and times of a round are
those of its window. Counters are totals since the run's first round and survive a resume.

*Samples* are counted as `Segment.num_steps` does.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, zip_longest

import numpy as np

from offbeat.observe.callbacks import Bottleneck
from offbeat.observe.lengths import Lengths
from offbeat.pacing.actions import Pace
from offbeat.pacing.events import (
    CollectorDown,
    CollectorLeft,
    CollectorUp,
    DialTurned,
    EvalDone,
    Handlers,
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
from offbeat.reading import numbers
from offbeat.types import TIMEOUT, Batch, Metrics, Piece, Segment, StateTree

_EPISODES_AVERAGED = 100
_ROUNDS_AVERAGED = 50
_ROUNDS_TRUSTED = 5  # so many of its own, and a start no longer believes in the speed of the one before
_ROUNDS_SLOW = 2  # of those, the first ones compile kernels and fill caches
_BALANCED_WITHIN = 0.1
_RATES = (
    "pace/collect_idle_ratio",
    "pace/train_idle_ratio",
    "pace/overlap_efficiency",
    "rollout/steps_per_s",
)
_WAITS = {"tool_ms": "rollout/waiting_for_tool", "reward_ms": "rollout/waiting_for_reward"}
"""Units that are times of waiting: the mean number of pieces that waited follows from their sum."""
_NOTHING = (0, 0)
_MOST_ENVS = 256
"""With more environments than this, events do not name what each gave to a round."""
_NO_SYSTEM = {"system/rss_bytes": math.nan, "system/cpu_percent": math.nan, "system/gpu_mem_bytes": math.nan}


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
    overlap_s: float = 0.0
    pieces: int = 0  # of segments
    ended_cut: int = 0
    ended_timeout: int = 0
    ended_error: int = 0
    answers: int = 0  # that pieces got
    answers_failed: int = 0
    answers_timeout: int = 0
    lockstep_until: int = -1  # round from which weights at k = 0 depend on time
    begun_tickets_kept: int = 0
    begun_tickets_cut_back: int = 0


@dataclass(slots=True)
class _Window:
    """Since the last round ended."""

    start_s: float = math.inf
    samples: int = 0
    publish_s: float = 0.0
    paused_s: float = 0.0
    state_s: float = 0.0
    waits_ms: Counter[str] = field(default_factory=Counter)


class Meter:
    """Measures a run. ``metrics`` are those of its newest round, ``eval_metrics`` of its newest evaluation.

    ``bottleneck`` is the side that held the other up in that round; ``round_by_env`` the samples of each
    environment in it, by collector, as far as segments say so and there are not too many to write down.
    ``busy_s(now_s)`` is the time that all collectors together were at work since the last round ended;
    ``system(now_s)`` reads the machine's figures. ``pauses_for_eval``: training stands still meanwhile.
    ``dial`` is k as it was chosen.
    """

    def __init__(
        self,
        num_collectors: int,
        pace: Pace,
        busy_s: Callable[[float], float],
        *,
        staleness_threshold: int = 0,
        pauses_for_eval: bool = True,
        dial: int = 0,
        system: Callable[[float], Metrics] | None = None,
    ) -> None:
        self.metrics: Metrics = {}
        self.bottleneck: Bottleneck = "balanced"
        self.round_by_env: list[list[int]] = []
        self.eval_metrics: Metrics = {}
        self.max_staleness = 0
        self._pace = pace
        self._busy_s = busy_s
        self._dial = dial
        self._system = system
        self._threshold = staleness_threshold
        self._pauses_for_eval = pauses_for_eval
        self._present = set(range(num_collectors))
        self._samples_by_env = [[0] for _ in range(num_collectors)]  # of one that does not say, in a sum
        self._totals = _Totals()
        self._lengths = Lengths()
        self._window = _Window()
        self._measured: Metrics = {}  # metrics of the round that ended
        self._collecting: Metrics = {}  # rates of the last round that had something collected
        self._held_up_by: Bottleneck = "balanced"  # in that round
        self._train_started_s = self._busy_at_train_s = 0.0
        self._waiting: dict[int, tuple[int, int]] = {}  # ticket -> bytes and samples of its segment
        self._recent_returns: deque[float] = deque(maxlen=_EPISODES_AVERAGED)
        self._recent_rounds_s: deque[float] = deque(maxlen=_ROUNDS_AVERAGED)
        self._rounds_here = 0
        self._first_ticket_s = 0.0
        self._last_round_s = 0.0
        self._samples_before = 0
        self._unit = ""
        self._eval_skipped_before = 0
        self._return_mean = math.nan
        self._length_mean = math.nan
        self._sync_time_s, self._sent_bytes = 0.0, 0

    def handlers(self) -> Handlers:
        """Return the handlers of a run's events."""
        return {
            Issued: self._issued,
            SegmentArrived: self._arrived,
            SegmentDropped: self._dropped,
            CollectorDown: self._collector_down,
            CollectorUp: self._collector_up,
            CollectorLeft: self._collector_left,
            DialTurned: self._dial_turned,
            TrainStarted: self._train_started,
            RoundTrained: self._round_trained,
            Published: self._published,
            PublishFailed: self._publish_failed,
            EvalDone: self._evaluated,
            SnapshotTaken: self._snapshot_taken,
            Saved: self._saved,
        }

    def _dial_turned(self, event: DialTurned, now_s: float) -> None:
        self._dial = event.off_policy_degree

    # ------------------------------------------------------------ collecting

    def _issued(self, event: Issued, now_s: float) -> None:
        self._window.start_s = min(self._window.start_s, now_s)
        self._first_ticket_s = self._first_ticket_s or now_s
        if event.keeps_all is not None:
            self._totals.begun_tickets_kept += event.keeps_all
            self._totals.begun_tickets_cut_back += not event.keeps_all

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        self._window.start_s = min(self._window.start_s, now_s)
        segment, totals = event.segment, self._totals
        ticket, samples = segment.ticket, segment.num_steps
        by_env = self._samples_by_env[ticket.collector]
        if segment.steps_by_env:
            self._samples_by_env[ticket.collector] = _added(by_env, segment.steps_by_env)
        else:
            by_env[0] += samples
        self._waiting[ticket.number] = (event.num_bytes, samples)
        self._window.samples += samples
        self._window.state_s += event.state_s
        totals.arrived += 1
        totals.samples += samples
        totals.env_steps += segment.units.get("env_steps", 0)
        self._unit = self._unit or segment.unit
        self._window.waits_ms.update({unit: segment.units[unit] for unit in _WAITS if unit in segment.units})
        if segment.pieces:
            self._lengths.arrived(segment)
            self._count_pieces(segment.pieces)

    def _count_pieces(self, pieces: Sequence[Piece]) -> None:
        totals, ends = self._totals, [piece.end for piece in pieces]
        errors = [answer.error for piece in pieces for answer in piece.answers]
        totals.pieces += len(ends)
        totals.ended_cut += ends.count("cut")
        totals.ended_timeout += ends.count("timeout")
        totals.ended_error += ends.count("error")
        totals.answers += len(errors)
        totals.answers_timeout += errors.count(TIMEOUT)
        totals.answers_failed += len(errors) - errors.count("") - errors.count(TIMEOUT)
        is_late = TIMEOUT in errors or "timeout" in ends or "cut" in ends
        if is_late and self._dial == 0 and totals.lockstep_until < 0:
            totals.lockstep_until = self._pace.version

    def _dropped(self, event: SegmentDropped, now_s: float) -> None:
        _, samples = self._waiting.pop(event.ticket, _NOTHING)
        self._totals.dropped_samples += samples
        self._totals.dropped_stale_samples += samples if event.reason == "stale" else 0

    def _collector_down(self, event: CollectorDown, now_s: float) -> None:
        self._totals.worker_restarts += 1
        self._totals.generation_errors += event.raised

    def _collector_up(self, event: CollectorUp, now_s: float) -> None:
        if event.collector not in self._present:  # it has joined
            self.count({*self._present, event.collector}, event.collector + 1)

    def count(self, present: Collection[int], num_ever: int) -> None:
        """Count for these collectors, of ``num_ever`` that there were; others have left."""
        self._present = set(present)
        self._samples_by_env += [[0]] * (num_ever - len(self._samples_by_env))

    @property
    def num_collectors(self) -> int:
        """Number of collectors that belong to the run: one at least, though it may not have come up yet."""
        return max(1, len(self._present))

    def _collector_left(self, event: CollectorLeft, now_s: float) -> None:
        self._present.discard(event.collector)

    # ------------------------------------------------------------ training

    def _train_started(self, event: TrainStarted, now_s: float) -> None:
        self._window.start_s = min(self._window.start_s, now_s)
        self._train_started_s, self._busy_at_train_s = now_s, self._busy_s(now_s)

    def measure(self, event: RoundTrained) -> Signals:
        """Close the window of a round that was trained, before others see the event; return its signals.

        A learner that takes several optimizer steps per round reports how many as ``learn/gradient_steps``.
        """
        batch, metrics, ended_s, totals = event.batch, event.metrics, event.ended_s, self._totals
        start_s, self._last_round_s = self._window.start_s, ended_s
        weights = [
            self._waiting.pop(segment.ticket.number, _NOTHING)[1] or segment.num_steps
            for segment in batch.segments
        ]
        signals = self._measure(event, max(ended_s - start_s, 1e-9), weights)
        ages = (self._measured, metrics)
        oldest = max(one.get(f"pace/max_{kind}_age", 0) for one in ages for kind in ("sample", "replayed"))
        self.max_staleness = max(self.max_staleness, int(oldest))
        totals.global_steps += metrics.get("learn/gradient_steps", 1.0)
        totals.trained_samples += sum(weights)
        totals.elapsed_s += max(ended_s - start_s, 1e-9)
        # Without the start of the collectors before the first round.
        self._recent_rounds_s.append(ended_s - max(start_s, self._first_ticket_s))
        self._rounds_here += 1
        if self._rounds_here == _ROUNDS_TRUSTED:
            for _ in range(len(self._recent_rounds_s) - _ROUNDS_TRUSTED + _ROUNDS_SLOW):
                self._recent_rounds_s.popleft()
        self._lengths.trained(batch.segments)
        self._count_episodes(batch)
        self._count_environments(batch)
        self._window = _Window(start_s=ended_s)
        return signals

    def _measure(self, event: RoundTrained, round_s: float, weights: Sequence[int]) -> Signals:
        batch, window, num_collectors = event.batch, self._window, self.num_collectors
        train_s, active_s = event.ended_s - self._train_started_s, max(round_s - window.paused_s, 1e-9)
        busy_s = max(0.0, self._busy_s(event.ended_s))  # a report may correct what was assumed before
        # A segment that was made beside others does not say how long it took.
        collect_s = (sum([segment.collect_s for segment in batch.segments]) or busy_s) / num_collectors
        collect_idle = _share(active_s - busy_s / num_collectors, active_s)
        overlap_s = (busy_s - self._busy_at_train_s) / num_collectors
        self._totals.overlap_s += min(train_s, max(0.0, overlap_s))
        train_idle = _share(active_s - train_s, active_s)
        # The side that idles less holds the other up.
        slower: Bottleneck = "collect" if collect_idle < train_idle else "train"
        self.bottleneck = slower if abs(collect_idle - train_idle) > _BALANCED_WITHIN else "balanced"
        busiest_s = max(collect_s, train_s)
        self._measured = {
            **_ages(batch, weights, self._threshold),
            "pace/collect_idle_ratio": collect_idle,
            "pace/train_idle_ratio": train_idle,
            "pace/overlap_efficiency": active_s / busiest_s if busiest_s > 0 else math.nan,
            "rollout/steps_per_s": window.samples / round_s,
            **{_WAITS[unit]: ms / 1000.0 / round_s for unit, ms in window.waits_ms.items()},
            "learn/samples_per_s": sum(weights) / round_s,
            "time/round_s": round_s,
            "time/collect_s": collect_s,
            "time/state_s": window.state_s / num_collectors,
            "time/train_s": train_s,
            "time/publish_s": window.publish_s,
            "time/wait_s": max(0.0, round_s - train_s - window.publish_s),
        }
        if window.samples:
            self._collecting = {name: self._measured[name] for name in _RATES}
            self._held_up_by = self.bottleneck
        names = ("learn/ess", "learn/behaviour_kl", "learn/search_kl")
        found = [event.metrics.get(name) for name in names]
        costs = [value if value is not None and math.isfinite(value) else None for value in found]
        return Signals(active_s, collect_s, train_s, collect_idle, train_idle, *costs)

    def _count_episodes(self, batch: Batch) -> None:
        """Episodes count with the round that trains them: in an order that does not depend on timing."""
        returns: list[float] = []
        lengths: list[float] = []
        for segment in batch.segments:
            returns += segment.episodes.returns
            lengths += segment.episodes.lengths
        self._recent_returns.extend(returns)
        self._totals.episodes += len(returns)
        if returns:
            self._return_mean, self._length_mean = _mean(returns), _mean(lengths)

    def _count_environments(self, batch: Batch) -> None:
        """Add up what each environment gave to the round, where segments say so."""
        self.round_by_env = []
        are_many = sum(map(len, self._samples_by_env)) > _MOST_ENVS
        if are_many or not all(segment.steps_by_env for segment in batch.segments):
            return
        found: list[list[int]] = [[] for _ in self._samples_by_env]
        for segment in batch.segments:
            index = segment.ticket.collector
            found[index] = _added(found[index], segment.steps_by_env)
        self.round_by_env = found

    # ------------------------------------------------------------ weights, evaluation, checkpoints

    def _published(self, event: Published, now_s: float) -> None:
        self._window.start_s = min(self._window.start_s, now_s)
        self._totals.publishes += 1
        self._window.publish_s += event.seconds
        self._sync_time_s, self._sent_bytes = event.seconds, event.num_bytes

    def _publish_failed(self, event: PublishFailed, now_s: float) -> None:
        self._totals.publish_failures += 1

    def _evaluated(self, event: EvalDone, now_s: float) -> None:
        if self._pauses_for_eval:
            self._window.paused_s += event.seconds
        if event.metrics is None:
            return
        self._count_skipped()
        self.eval_metrics = {
            **event.metrics,
            "eval/version": float(event.version),
            "eval/time_s": event.seconds,
            "eval/skipped": float(self._totals.eval_skipped),
        }

    def _count_skipped(self) -> None:
        skipped = self._pace.eval_skipped
        self._totals.eval_skipped += max(0, skipped - self._eval_skipped_before)
        self._eval_skipped_before = skipped

    def pause(self, seconds: float) -> None:
        """Count time in which rounds stood still for a checkpoint."""
        self._window.paused_s += seconds

    def _snapshot_taken(self, event: SnapshotTaken, now_s: float) -> None:
        self.pause(event.seconds)

    def _saved(self, event: Saved, now_s: float) -> None:
        self.pause(event.paused_s)

    # ------------------------------------------------------------ results

    @property
    def env_steps(self) -> int:
        """Environment steps that arrived since the run's first round."""
        return self._totals.env_steps

    @property
    def samples(self) -> tuple[int, str]:
        """Samples that arrived since the run's first round, and their unit, such as ``tokens``."""
        return self._totals.samples, self._unit

    @property
    def first_ticket_s(self) -> float | None:
        """Time at which this start of the run began to collect; None before."""
        return self._first_ticket_s or None

    @property
    def rounds_s(self) -> float:
        """Seconds from the first ticket of this start of the run to the end of its last round."""
        return max(0.0, self._last_round_s - self._first_ticket_s) if self._last_round_s else 0.0

    @property
    def steps_per_s(self) -> float:
        """Samples per second of this start of the run, from its first ticket to its last round."""
        seconds = self.rounds_s
        return (self._totals.samples - self._samples_before) / seconds if seconds > 0 else 0.0

    @property
    def return_mean_100(self) -> float:
        """Mean return of the last 100 training episodes; NaN before the first ended."""
        return _mean(self._recent_returns)

    def finish(self) -> None:
        """Correct the metrics of a run that is over, also of one that ended before its last round.

        While the last rounds are trained, nothing is left to collect: rates are those of the round before.
        The last version is published after its round was told.
        """
        if self.metrics:
            self.metrics.update({**self._collecting, **self._published_metrics(), "time/eta_s": 0.0})
            self.bottleneck = self._held_up_by

    def _round_trained(self, event: RoundTrained, now_s: float) -> None:
        """Collect all metrics of the round; the learner's own names win over ours."""
        self._count_skipped()
        totals, pace, counts = self._totals, self._pace, self._pace.counts()
        self.metrics = {
            **self._measured,
            "pace/off_policy_degree": pace.degree,
            "pace/collect_count": totals.arrived,
            "pace/train_count": pace.version,
            "pace/lag": pace.lag(),
            "pace/dropped_stale_samples": totals.dropped_stale_samples,
            "pace/dropped_samples": totals.dropped_samples,
            "queue/size": counts.ready,
            "queue/total_produced": totals.arrived,
            "queue/total_consumed": counts.trained,
            "queue/bytes": sum([num_bytes for num_bytes, _ in self._waiting.values()]),
            "rollout/return_mean": self._return_mean,
            "rollout/return_mean_100": self.return_mean_100,
            "rollout/length_mean": self._length_mean,
            "rollout/total_generated_samples": totals.samples,
            "rollout/total_env_steps": totals.env_steps,
            "rollout/total_episodes": totals.episodes,
            "rollout/generation_errors": totals.generation_errors,
            **self._ends(),
            **self._lengths.metrics(),
            **self._begun(),
            "rollout/samples_by_env_min": min(chain(*self._samples_by_env)),
            "rollout/samples_by_env_max": max(chain(*self._samples_by_env)),
            "learn/global_steps": totals.global_steps,
            "learn/processed_samples": totals.trained_samples,
            "weights/current_param_version": pace.version,
            **self._published_metrics(),
            "weights/param_sync_count": totals.publishes,
            "weights/param_sync_requests": totals.publishes + totals.publish_failures,
            "weights/sync_failures": totals.publish_failures,
            "weights/sync_time_s": self._sync_time_s,
            "weights/sent_bytes": self._sent_bytes,
            "time/elapsed_s": totals.elapsed_s + max(0.0, now_s - self._window.start_s),
            "time/overlap_s": totals.overlap_s,
            "time/eta_s": _mean(self._recent_rounds_s) * max(0, pace.rounds - pace.version),
            **(_NO_SYSTEM if self._system is None else self._system(now_s)),
            "system/workers_alive": pace.num_up,
            "system/worker_restarts": totals.worker_restarts,
            **event.metrics,
        }

    def _ends(self) -> Metrics:
        """Return how many pieces of segments ended early, and answers did not come, where there are any."""
        totals = self._totals
        ends = ("ended_cut", "ended_timeout", "ended_error") if totals.pieces else ()
        failures = ("answers_failed", "answers_timeout") if totals.answers else ()
        found: Metrics = {f"rollout/{name}": getattr(totals, name) for name in (*ends, *failures)}
        return found if totals.lockstep_until < 0 else {**found, "pace/lockstep_until": totals.lockstep_until}

    def _begun(self) -> Metrics:
        """Return how many tickets were issued again with begun work, where there are any."""
        kept, cut_back = self._totals.begun_tickets_kept, self._totals.begun_tickets_cut_back
        if kept + cut_back == 0:
            return {}
        return {"rollout/begun_tickets_kept": kept, "rollout/begun_tickets_cut_back": cut_back}

    def _published_metrics(self) -> Metrics:
        published = self._pace.published
        return {
            "weights/published_version": published,
            "weights/publish_lag": self._pace.version - published,
        }

    # ------------------------------------------------------------ state

    def state_dict(self) -> StateTree:
        """Counters and running means; what is under way belongs to the attempt and is left out."""
        return {
            "totals": asdict(self._totals),
            "lengths": self._lengths.state_dict(),
            "samples_by_env": [list(by_env) for by_env in self._samples_by_env],
            "recent_returns": list(self._recent_returns),
            "recent_rounds_s": list(self._recent_rounds_s),
            "return_mean": self._return_mean,
            "length_mean": self._length_mean,
            "queued_bytes": {number: num_bytes for number, (num_bytes, _) in self._waiting.items()},
        }

    def load_state_dict(self, state: Mapping[str, StateTree], ready: Collection[int]) -> None:
        """Continue from a saved state; the first window starts with the next event that opens one.

        ``ready`` are the tickets whose segments were restored.
        """
        self._totals = _Totals(**state["totals"])
        numbers(asdict(self._totals).values())
        self._lengths.load_state_dict(state.get("lengths"))
        # Earlier versions counted the samples of each collector, without its environments.
        by_env = state.get("samples_by_env") or [[0] for _ in self._samples_by_env]
        for index, samples in enumerate(by_env[: len(self._samples_by_env)]):
            self._samples_by_env[index] = numbers(samples)
        self._recent_returns.clear()
        self._recent_returns.extend(numbers(state["recent_returns"]))
        self._recent_rounds_s.clear()
        self._recent_rounds_s.extend(numbers(state["recent_rounds_s"]))
        self._return_mean, self._length_mean = numbers((state["return_mean"], state["length_mean"]))
        sizes = state["queued_bytes"]
        queued = dict(zip(map(int, sizes), numbers(sizes.values()), strict=True))
        self._waiting = {number: (queued.get(number, 0), 0) for number in ready}
        self._window = _Window()
        self._rounds_here, self._first_ticket_s, self._last_round_s = 0, 0.0, 0.0
        self._samples_before = self._totals.samples
        self._eval_skipped_before = self._pace.eval_skipped


def _added(totals: Sequence[int], more: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip_longest(totals, more, fillvalue=0)]


def _ages(batch: Batch, weights: Sequence[int], threshold: int) -> Metrics:
    """Return the staleness of what a round trained, in versions, weighted by samples."""
    ages: list[tuple[int, float]] = []
    for segment, weight in zip(batch.segments, weights, strict=True):
        if segment.versions.size == 1:
            ages.append((batch.version - segment.versions.item(), weight))
        else:
            ages += [(batch.version - version, part) for version, part in _by_version(segment, weight)]
    total = sum(weights)
    age_sum = seen = stale = 0.0
    oldest = p95 = 0
    for age, part in sorted(ages):
        if seen < 0.95 * total:
            p95 = age
        oldest = age if total else 0
        seen += part
        age_sum += age * part
        stale += part if age > threshold else 0
    return {
        "pace/avg_sample_age": age_sum / max(total, 1),
        "pace/max_sample_age": float(oldest),
        "pace/p95_sample_age": float(p95),
        "pace/stale_samples_ratio": stale / max(total, 1),
    }


def _by_version(segment: Segment, samples: int) -> list[tuple[int, float]]:
    """Return the versions in a segment, each with its part of the samples."""
    versions, counts = np.unique(segment.versions, return_counts=True)
    share = samples / segment.versions.size
    return [
        (version, count * share) for version, count in zip(versions.tolist(), counts.tolist(), strict=True)
    ]


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values) if values else math.nan
