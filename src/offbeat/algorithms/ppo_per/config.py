"""The settings of PPO with prioritized replay, under the names that scripts of its kind use. No torch."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field

from offbeat.algorithms.ppo.config import Correction, PPOConfig, Schedule
from offbeat.config.models import RunConfig
from offbeat.errors import ConfigError
from offbeat.ops.schedules import linear_schedule


class PPOPERConfig(PPOConfig):
    """PPO on segments drawn from a prioritized replay.

    A *replay segment* is ``num_steps`` steps of one environment with the observation after them: advantages
    and value targets are computed anew whenever it is drawn, with the network of that moment.
    Example: ``algorithm: {name: ppo_per, batch_size: 128, buffer_capacity: 4096}``.
    """

    mode: ClassVar[Literal["stream", "replay"]] = "replay"

    name: str = Field("ppo_per", description="Which algorithm trains; `ppo_per` here.")
    num_steps: int = Field(
        32, ge=2, description="Steps of a replay segment. Default of this project, from the usual 16 to 32."
    )
    batch_size: int = Field(
        128,
        ge=2,
        description="Replay segments of one update, num_steps samples each: 128 of 32 steps are 4,096"
        " samples. Default of color_gomoku_rl, there of single samples.",
    )
    updates_per_round: int = Field(
        1, ge=1, description="Batches drawn and trained in one round, each num_epochs times."
    )
    buffer_capacity: int = Field(
        8192,
        ge=1,
        description="Replay segments that are kept, num_steps samples each; the oldest make room for new"
        " ones.",
    )
    min_buffer_size: int | None = Field(
        None,
        ge=1,
        description="Replay segments collected before the first round, num_steps samples each; null:"
        " batch_size.",
    )
    warmup_seconds: float = Field(
        0.0,
        ge=0,
        description="The first round waits so many seconds; meanwhile min_buffer_size and k bound what is"
        " collected.",
    )
    replay_ratio: float | Literal["auto"] | None = Field(
        "auto",
        description="Rounds per segment that a worker collects, at most; `auto`: 1 / segments_per_round, a"
        " round for each set of new segments; null: above k = 0 as fast as the learner can.",
    )
    behaviour_clip: float | None = Field(
        None,
        gt=0,
        description="Largest change of an action's probability since it was taken that is rewarded; null: no"
        " bound, for what is drawn from a replay may be of any age.",
    )
    per_alpha: float = Field(
        0.6,
        ge=0,
        le=1,
        description="How much priorities count in the draw; 0: uniform. Default of arXiv:1511.05952.",
    )
    per_beta_start: float = Field(
        0.4,
        ge=0,
        le=1,
        description="Power of the importance weights at the first round; rises to 1 over schedule_rounds."
        " Default of arXiv:1511.05952.",
    )
    per_eta: float = Field(
        0.9,
        ge=0,
        le=1,
        description="A segment's priority is this share of its largest |TD error| and the rest of the mean."
        " Default of R2D2 (openreview r1lyTjAqYX).",
    )
    correction: Correction = Field(
        "auto",
        description="How the age of samples is corrected: `decoupled` (arXiv:2110.00641) or `vtrace`"
        " (arXiv:1802.01561); `auto` is `decoupled` at any dial, for replayed samples are always stale.",
    )
    per_for: Literal["critic", "both"] = Field(
        "critic",
        description="What trains on segments drawn by priority: the `critic` only, with as many drawn evenly"
        " for the policy (arXiv:2209.00532), or `both`.",
    )
    fresh_fraction: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of each batch taken from the segments that have just arrived. Default of IMPALA's"
        " replay, arXiv:1802.01561.",
    )
    max_age: int | None = Field(
        None, ge=0, description="Segments older than this many versions are never trained; null: no limit."
    )
    explore_epsilon: float = Field(
        0.0, ge=0, lt=1, description="Share of actions drawn evenly from the legal ones, at the first round."
    )
    explore_schedule: Schedule = Field(
        "linear", description="`linear` takes explore_epsilon to 0 over schedule_rounds."
    )
    explore_temperature: float = Field(
        1.0, gt=0, description="Divides the logits of discrete actions when acting; 1: the policy itself."
    )
    shared_buffer: bool = Field(
        False,
        description="Keep the replay in a Ray actor of its own, which all ranks of the learner share; needs"
        " runtime.kind=ray.",
    )

    def resolved(self, config: RunConfig) -> Self:
        """Fill in what depends on the run; `auto` corrects replayed samples, which are stale at any dial."""
        whole = super().resolved(config)
        ratio = 1 / config.segments_per_round if self.replay_ratio == "auto" else self.replay_ratio
        changes = {
            "correction": "decoupled" if self.correction == "auto" else self.correction,
            "min_buffer_size": self.min_buffer_size or self.batch_size,
            "replay_ratio": ratio,
        }
        return whole.model_copy(update=changes)

    def problems(self, config: RunConfig) -> list[tuple[str, str]]:
        """Find settings that contradict each other or the run."""
        found = super().problems(config)
        needed = self.min_buffer_size or self.batch_size
        if needed > self.buffer_capacity:
            found.append(
                (
                    "buffer_capacity",
                    f"holds {self.buffer_capacity} segments, but the first round waits for {needed}"
                    " (min_buffer_size, or batch_size): raise it",
                )
            )
        per_round = config.segments_per_round * config.envs_per_worker
        if per_round > self.buffer_capacity:
            found.append(
                ("buffer_capacity", f"cannot hold the {per_round} segments of one round: raise it to that")
            )
        if isinstance(self.replay_ratio, float) and self.replay_ratio <= 0:
            found.append(("replay_ratio", "must be above 0; null trains as fast as the learner can"))
        dial = config.async_training
        # Above k = 0 tickets are issued while newer weights are still being published.
        oldest_new = dial.largest_degree + dial.weight_sync_interval - (dial.largest_degree == 0)
        if self.max_age is not None and self.max_age < oldest_new:
            found.append(
                (
                    "max_age",
                    f"is less than the {oldest_new} versions by which segments may be behind although they"
                    " come in time (off_policy_degree + weight_sync_interval, at k = 0 one less): raise it to"
                    " that, or to more where they are to be replayed",
                )
            )
        if self.correction == "gae":
            found.append(("correction", "gae takes replayed actions for fresh ones; use decoupled or vtrace"))
        if self.shared_buffer and config.runtime.kind != "ray":
            found.append(("shared_buffer", "is a Ray actor: set runtime.kind=ray, or shared_buffer=false"))
        return found

    def update(self, config: RunConfig) -> str:
        """Describe one update: its segments and samples, and the number of them that are new."""
        arriving = config.segments_per_round * config.envs_per_worker
        new = min(round(self.fresh_fraction * self.batch_size), arriving)
        passes = f"{self.num_epochs} pass" + ("" if self.num_epochs == 1 else "es")
        updates = "" if self.updates_per_round == 1 else f", {self.updates_per_round} updates a round"
        return (
            f"{self.batch_size:,} replay segments of {self.num_steps} steps ="
            f" {self.batch_size * self.num_steps:,} samples in {passes}; {new:,} of the segments are new, of"
            f" {arriving:,} that arrive a round{updates}"
        )

    def min_segments(self, config: RunConfig) -> int:
        """Segments of a worker that make ``min_buffer_size`` replay segments."""
        return -(-(self.min_buffer_size or self.batch_size) // config.envs_per_worker)

    def needed_segments(self, config: RunConfig) -> int:
        """Segments that the first round waits for."""
        return max(config.segments_per_round, self.min_segments(config))

    def beta_at(self, version: int) -> float:
        """Power of the importance weights in the round that starts at ``version``."""
        last_round = max(1, (self.schedule_rounds or 1) - 1)
        return linear_schedule(self.per_beta_start, 1.0, step=version, num_steps=last_round)

    def epsilon_at(self, version: int) -> float:
        """Share of random actions of a collector that acts with ``version``."""
        return self._scheduled(self.explore_epsilon, self.explore_schedule, version)


def per_config(config: RunConfig) -> PPOPERConfig:
    """The resolved settings of a run."""
    if not isinstance(config.algorithm, PPOPERConfig):
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name!r}; these roles need the settings of ppo_per"
        )
    return config.algorithm.resolved(config)
