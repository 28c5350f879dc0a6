"""The configuration of a coordinator, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from offbeat.errors import ConfigError
from offbeat.pacing.presets import Preset

AUTO = -1


def not_stepwise(degree: int) -> str:
    """Return the error text for a dial with which a run cannot go step by step."""
    auto = " (auto)" if degree == AUTO else ""
    return (
        f"a run that goes step by step is strictly synchronous, but off_policy_degree is {degree}{auto}: "
        "set async_training.off_policy_degree to 0, or use offbeat.train"
    )


@dataclass(frozen=True, slots=True)
class PaceConfig:
    """The dial and its neighbours. Times in seconds, intervals in rounds, sizes in segments.

    ``mode`` "stream": each segment is trained once. "replay": segments go into the learner's replay and
    a round samples; then ``replay_ratio`` bounds rounds per segment (None: as fast as it can), and the
    first round waits ``warmup_s`` seconds. ``min_segments``: rounds of a stream wait for so many, as far as
    they can come, and a replay's first round does. ``straggler_policy`` says whether running tickets that
    hold a round up are waited for or cut short. ``max_drops_per_round``: segments that may be dropped for
    each ``segments_per_round`` that are kept (None: ten times as many). ``stepwise``: the gates are closed at
    first, and k stays 0. ``open_rounds``: rounds between two steps in which a stream's dial opens at the
    start; 0: at once. ``preset``: the rule of another project instead of the deadlines; k then says how many
    rounds ahead that is.
    """

    rounds: int
    segments_per_round: int
    num_collectors: int = 1
    off_policy_degree: int = 0
    open_rounds: int = 0
    auto_max: int = 8
    max_staleness: int | None = None
    mode: Literal["stream", "replay"] = "stream"
    replay_ratio: float | None = None
    min_segments: int = 0
    warmup_s: float = 0.0
    max_outstanding: int | None = None
    max_drops_per_round: int | None = None
    straggler_policy: Literal["wait", "cut"] = "wait"
    publish_interval: int = 1
    eval_interval: int | None = None
    eval_at_start: bool = False
    eval_at_end: bool = False
    async_eval: bool = False
    checkpoint_interval: int | None = None
    checkpoint_interval_s: float | None = None
    checkpoint_at_end: bool = False
    issue_interval_s: float = 0.0
    max_publish_retries: int = 3
    publish_retry_delay_s: float = 0.1
    seed: int = 0
    stepwise: bool = False
    preset: Preset | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        self.check_degree(self.off_policy_degree)
        if self.preset is not None:
            self._check_preset(self.preset)
        if self.max_outstanding is not None and self.max_outstanding < self.needed_at_once:
            raise ConfigError(
                f"max_queue_size {self.max_outstanding} is below the {self.needed_at_once} segments that a "
                "round can wait for, so it could never start: raise max_queue_size, or lower "
                f"segments_per_round{' or min_batch_count' if self.mode == 'replay' else ''}"
            )
        most = (self.largest_degree + 1) * self.segments_per_round
        allowed = min(most, self.max_outstanding or most)
        if self.mode == "stream" and self.min_segments > allowed:
            dial = "auto_max" if self.off_policy_degree == AUTO else "off_policy_degree"
            raise ConfigError(
                f"min_batch_count {self.min_segments} can never be met: with k = {self.largest_degree}, at "
                f"most {allowed} segments wait for training; lower it to that, or raise "
                f"{dial if allowed == most else 'max_queue_size'}"
            )

    def _check_ranges(self) -> None:
        positive = (
            "segments_per_round",
            "num_collectors",
            "publish_interval",
            "eval_interval",
            "checkpoint_interval",
        )
        natural = ("rounds", "open_rounds", "auto_max", "max_publish_retries", "max_drops_per_round")
        least = dict.fromkeys(positive, 1) | dict.fromkeys(natural, 0)
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, not {value}")
        if self.mode not in ("stream", "replay"):
            raise ConfigError(f"mode must be 'stream' or 'replay', not {self.mode!r}")
        if self.straggler_policy not in ("wait", "cut"):
            raise ConfigError(f"straggler_policy must be 'wait' or 'cut', not {self.straggler_policy!r}")
        if self.replay_ratio is not None and self.mode == "stream":
            raise ConfigError("replay_ratio is for mode='replay': a stream trains each segment once")
        if self.replay_ratio is not None and self.replay_ratio <= 0:
            raise ConfigError(
                f"replay_ratio must be above 0, not {self.replay_ratio}: it is rounds per segment; leave it "
                "out to train as fast as the learner can"
            )

    def _check_preset(self, preset: Preset) -> None:
        unlike = {
            "off_policy_degree": self.off_policy_degree == AUTO,
            "open_rounds": self.open_rounds > 0,
            "min_batch_count": self.min_segments > self.segments_per_round,
            "straggler_policy": self.straggler_policy != "wait",
            "max_staleness_allowed": self.max_staleness is not None and not self.is_bounded,
            "a replay": self.mode == "replay",
        }
        for name in [name for name, is_unlike in unlike.items() if is_unlike]:
            raise ConfigError(f"the preset {preset.name} cannot be had with {name}: leave one of them out")

    @property
    def is_bounded(self) -> bool:
        """True when no segment of a stream can be trained later than its deadline."""
        return self.preset is None or self.preset.is_bounded(self.publish_interval)

    @property
    def needed_at_once(self) -> int:
        """Most segments that have to be outstanding together before a round may start."""
        if self.mode == "stream":
            return self.segments_per_round * (1 if self.preset is None else self.preset.batches)
        return max(self.segments_per_round, self.min_segments, self._by_ratio(1))

    @property
    def smallest_degree(self) -> int:
        """The least k this run may use."""
        return 0 if self.off_policy_degree == AUTO else self.off_policy_degree

    @property
    def largest_degree(self) -> int:
        """The largest k this run may use, unless its dial is turned."""
        return self.auto_max if self.off_policy_degree == AUTO else self.off_policy_degree

    @property
    def most_drops(self) -> int:
        """Segments that may be dropped for each ``segments_per_round`` that are kept."""
        most = self.max_drops_per_round
        return 10 * self.segments_per_round if most is None else most

    def check_degree(self, degree: int) -> None:
        """Refuse a dial setting that this run cannot keep, naming the fix."""
        if degree < AUTO:
            raise ConfigError(f"off_policy_degree must be -1 (auto), 0 (synchronous) or more, not {degree}")
        if self.preset is not None and degree != self.off_policy_degree:
            raise ConfigError(
                f"the preset {self.preset.name} sets off_policy_degree to {self.off_policy_degree}, it "
                "cannot be turned: leave async_training.preset out for a dial that can"
            )
        if self.stepwise and degree != 0:
            raise ConfigError(not_stepwise(degree))
        least = 0 if degree == AUTO else degree
        if self.mode == "stream" and self.publish_interval > least + 1:
            raise ConfigError(
                f"weight_sync_interval {self.publish_interval} needs off_policy_degree >= "
                f"{self.publish_interval - 1}, not {degree}: weights must be published at least every k + 1 "
                f"rounds. Set weight_sync_interval to at most {least + 1}, or raise off_policy_degree"
            )
        most = self.auto_max if degree == AUTO else degree
        if self.max_staleness is not None and most > self.max_staleness:
            name = "auto_max" if degree == AUTO else "off_policy_degree"
            raise ConfigError(f"{name} {most} is above max_staleness_allowed {self.max_staleness}: lower it")

    def opened(self, degree: int, version: int) -> int:
        """k in force at ``version`` when the dial says ``degree``.

        A stream's dial opens step by step: otherwise rounds 0 to k would all train on what the initial policy
        collected, and learning would go on from a policy that is nearly deterministic by then.
        """
        if self.mode == "replay" or self.open_rounds == 0:
            return degree
        return min(degree, self.publish_interval - 1 + version // self.open_rounds)

    def replay_limit(self, rounds_done: int, degree: int) -> int:
        """Segments that may have been issued once ``rounds_done`` rounds are trained (replay mode)."""
        target = min(rounds_done + degree + 1, self.rounds)
        return self._prefill + max(target * self.segments_per_round, self._by_ratio(target))

    def replay_need(self, version: int) -> int:
        """Segments that must have arrived before round ``version`` (replay mode).

        What the first round waits for beyond its share does not count for later ones: each wants its own.
        """
        by_ratio = self._prefill + self._by_ratio(version + 1) if self.replay_ratio else 0
        return max(1, self.min_segments, by_ratio)

    @property
    def _prefill(self) -> int:
        """Segments that the first round waits for beyond its share."""
        return max(0, self.min_segments - max(self.segments_per_round, self._by_ratio(1)))

    def _by_ratio(self, rounds: int) -> int:
        """Segments that the ratio asks for so many rounds."""
        return math.ceil(rounds / self.replay_ratio - 1e-9) if self.replay_ratio else 0
