"""The settings of MuZero, and what all that plan with a learned model have in common. No torch."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import Field

from offbeat.config.models import AlgorithmConfig, RunConfig, Section
from offbeat.errors import ConfigError
from offbeat.models.world_spec import Computing, Precision
from offbeat.ops.schedules import linear_schedule
from offbeat.search import SearchConfig


class SearchSettings(Section):
    """The tree search behind every action."""

    kind: Literal["puct", "gumbel"] = Field(
        default="puct",
        description="How trees grow: `puct` (arXiv:1911.08265) or `gumbel` (openreview bERaNdoegnO).",
    )
    num_simulations: int = Field(
        default=25, ge=1, description="Steps of the model for each action while collecting."
    )
    eval_simulations: int | None = Field(
        default=None, ge=1, description="The same while evaluating; null: num_simulations."
    )
    pb_c_init: float = Field(
        default=1.25, ge=0, description="Weight of the policy in puct. Default of MuZero."
    )
    dirichlet_alpha: float = Field(default=0.3, gt=0, description="Shape of the noise at the root of puct.")
    root_noise_weight: float = Field(
        default=0.25, ge=0, le=1, description="Share of that noise in the root's policy. Default of MuZero."
    )
    max_considered: int = Field(default=16, ge=1, description="Actions that gumbel begins with.")
    num_samples: int | None = Field(
        default=None,
        ge=2,
        description="Actions drawn from the policy at each node, for a tree to choose among"
        " (arXiv:2104.06303); null: 20 where they are continuous, else all there are.",
    )
    temperature: float = Field(
        default=0.25,
        ge=0,
        description="Actions of puct are drawn from visits ^ (1 / this). Default of LightZero.",
    )


class WorldSettings(Section):
    """The networks."""

    kind: Literal["auto", "mlp", "conv"] = Field(
        default="auto", description="`conv` for planes, `mlp` for features; `auto` looks at the observations."
    )
    latent: int = Field(
        default=64,
        ge=2,
        description="Size of what stands for an observation: features, or channels of planes.",
    )
    hidden: int = Field(default=128, ge=1, description="Units of dense layers.")
    blocks: int = Field(
        default=1, ge=1, description="Hidden layers, or residual blocks, of encoder and dynamics."
    )
    value_support: int = Field(
        default=50, ge=1, description="Values are distributions over -this to this, after MuZero's transform."
    )
    reward_support: int = Field(default=50, ge=1, description="The same for rewards.")
    precision: Precision = Field(
        default="float32",
        description="How exactly matrices are multiplied: `tf32` is for GPUs, `bfloat16` for these and for"
        " processors that can do it (AVX512-BF16, AMX; elsewhere it is slow).",
    )
    compiled: bool = Field(
        default=False,
        description="Compile networks that run on a GPU: a minute at the start, then faster steps. It pays"
        " for large networks.",
    )

    @property
    def computing(self) -> Computing:
        """How they compute."""
        return Computing(self.precision, self.compiled)


class ReanalyseSettings(Section):
    """What refreshes the targets in the replay."""

    segments_per_round: int = Field(
        default=0,
        ge=0,
        description="Segments of a round that are not collected but reanalysed: steps of the replay are"
        " searched again with the newest weights; 0: none.",
    )
    oldest: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Share of the replay, the oldest, that these steps are drawn from.",
    )


class PlanningConfig(AlgorithmConfig):
    """Planning with a learned model."""

    mode: ClassVar[Literal["stream", "replay"]] = "replay"
    acts_anywhere: ClassVar[bool] = True

    num_steps: int = Field(default=8, ge=1, description="Steps of each environment in one segment.")
    search: SearchSettings = Field(default=SearchSettings(), description="The tree search.")
    network: WorldSettings = Field(default=WorldSettings(), description="The networks.")
    reanalyse: ReanalyseSettings = Field(
        default=ReanalyseSettings(), description="Targets that are reanalysed."
    )
    discount: float = Field(default=0.997, gt=0, le=1, description="Worth of a value one step later.")
    num_unroll: int = Field(default=5, ge=1, description="Steps that the model is trained to see ahead: H.")
    td_steps: int = Field(
        default=5, ge=1, description="Real rewards in a value target, before a value is added."
    )
    td_steps_min: int | None = Field(
        default=None,
        ge=1,
        description="Shorten td_steps to this with the age of a step, as EfficientZero does; null: never.",
    )
    td_age: int = Field(
        default=200, ge=1, description="Versions after which td_steps is one less, where td_steps_min is set."
    )
    bootstrap: Literal["target", "search"] = Field(
        default="target",
        description="The value at the end of a value target: what the `target` network says now, or what the"
        " last `search` there found.",
    )
    replay_ratio: float = Field(
        default=0.25,
        gt=0,
        description="Updates for each step of an environment, whatever the dial. As LightZero's.",
    )
    batch_size: int = Field(
        default=256, ge=1, description="Steps drawn for one update, each with those after it."
    )
    buffer_capacity: int = Field(
        default=100_000, ge=1, description="Steps that are kept, over all environments; the oldest make room."
    )
    min_buffer_size: int | None = Field(
        default=None, ge=1, description="Steps collected before the first round; null: batch_size."
    )
    per_alpha: float = Field(
        default=0.0, ge=0, le=1, description="How much priorities count in the draw; 0: uniform."
    )
    per_beta: float = Field(default=0.4, ge=0, le=1, description="Power of the importance weights.")
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of Adam.")
    lr_schedule: Literal["constant", "linear"] = Field(
        default="constant", description="`linear` takes the learning rate to 0 over schedule_rounds."
    )
    schedule_rounds: int | None = Field(
        default=None, ge=1, description="Rounds a linear schedule takes; null: run.rounds."
    )
    weight_decay: float = Field(
        default=1e-4, ge=0, description="Share of the weights that a step of 1 takes away."
    )
    max_grad_norm: float = Field(default=5.0, gt=0, description="Longest gradient.")
    value_coef: float = Field(
        default=0.5, ge=0, description="Weight of the value loss. As LightZero's UniZero."
    )
    reward_coef: float = Field(default=1.0, ge=0, description="Weight of the reward loss.")
    ent_coef: float = Field(
        default=0.005, ge=0, description="Weight of the policy's entropy. As LightZero's UniZero."
    )
    target_tau: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Share of the network that the target network takes over at each update.",
    )

    def resolved(self, config: RunConfig) -> Self:
        """Fill in the length of schedules, by that of the run."""
        return self.model_copy(update={"schedule_rounds": self.schedule_rounds or config.run.rounds})

    def lr_at(self, version: int) -> float:
        """Learning rate of the round that starts at ``version``."""
        if self.lr_schedule == "constant" or self.schedule_rounds is None:
            return self.lr
        return linear_schedule(self.lr, 0.0, step=version, num_steps=self.schedule_rounds)

    def problems(self, config: RunConfig) -> list[tuple[str, str]]:
        """Find settings that contradict each other or the run."""
        found: list[tuple[str, str]] = []
        streams = num_streams(config)
        length = self.buffer_capacity // streams
        needed = self.window + self.num_steps
        if length < needed:
            found.append(
                (
                    "buffer_capacity",
                    f"is {length} steps for each of {streams} environments, a window and a segment take"
                    f" {needed}: raise it to {streams * needed}, or lower num_unroll ({self.num_unroll}),"
                    f" td_steps ({self.td_steps}) or num_steps ({self.num_steps})",
                )
            )
        if self.reanalyse.segments_per_round >= config.segments_per_round:
            found.append(
                (
                    "algorithm.reanalyse.segments_per_round",
                    f"leaves nothing to collect of the {config.segments_per_round} segments of a round: raise"
                    f" algorithm.segments_per_round to {self.reanalyse.segments_per_round + 1} or more",
                )
            )
        if self.td_steps_min is not None and self.td_steps_min > self.td_steps:
            found.append(("td_steps_min", f"is more than td_steps, {self.td_steps}: lower it"))
        if self.needed_steps > self.buffer_capacity:
            found.append(
                (
                    "buffer_capacity",
                    f"is less than the {self.needed_steps} steps that are waited for: raise it to that, or"
                    " lower min_buffer_size",
                )
            )
        if config.learner.num_ranks > 1:
            found.append(("learner.num_ranks", "must be 1: this learner has no ranks"))
        return found

    @property
    def compares_latents(self) -> bool:
        """Whether networks have what latents of the same moment are compared by."""
        return False

    @property
    def context(self) -> int:
        """Observations that a search begins with, the newest included."""
        return 1

    @property
    def window(self) -> int:
        """Steps that a draw takes, those before and after included."""
        return self.context + self.num_unroll + self.td_steps

    @property
    def needed_steps(self) -> int:
        """Steps collected before the first round."""
        return self.min_buffer_size or self.batch_size

    def min_segments(self, config: RunConfig) -> int:
        """Segments before the first round: those with enough steps, whose windows are whole."""
        steps = max(self.needed_steps, (self.window + 1) * num_streams(config))
        collected = -(-steps // (self.num_steps * config.envs_per_worker))
        whole = collected_per_round(config)
        return math.ceil(collected / whole) * config.segments_per_round

    def needed_segments(self, config: RunConfig) -> int:
        """Segments that the first round waits for."""
        return max(config.segments_per_round, self.min_segments(config))

    def new_segments(self, config: RunConfig) -> int:
        """Those that a round takes: `replay_ratio` is in updates per step here."""
        return config.segments_per_round

    def samples_per_round(self, config: RunConfig) -> int:
        """New steps of a round: what is searched anew is none."""
        return collected_per_round(config) * self.num_steps * config.envs_per_worker

    def search_config(self, *, two_player: bool, is_eval: bool = False) -> SearchConfig:
        """The search as the trees want it."""
        settings = self.search
        wanted = settings.eval_simulations if is_eval else None
        return SearchConfig(
            settings.kind,
            num_simulations=wanted or settings.num_simulations,
            discount=self.discount,
            pb_c_init=settings.pb_c_init,
            dirichlet_alpha=settings.dirichlet_alpha,
            root_noise_weight=settings.root_noise_weight,
            two_player=two_player,
            max_considered=settings.max_considered,
        )


class MuZeroConfig(PlanningConfig):
    """Planning with a learned model (https://arxiv.org/abs/1911.08265).

    Example: ``algorithm: {name: muzero, search: {num_simulations: 25}}``.
    """

    name: str = Field(default="muzero", description="Which algorithm trains; `muzero` here.")
    consistency_coef: float = Field(
        default=2.0,
        ge=0,
        description="Weight of how far imagined latents are from real ones; 0: none. EfficientZero.",
    )

    @property
    def compares_latents(self) -> bool:
        """Whether networks have what latents of the same moment are compared by."""
        return self.consistency_coef > 0


def num_streams(config: RunConfig) -> int:
    """Environments of all workers."""
    return config.envs_per_worker * config.runtime.num_workers


def collected_per_round(config: RunConfig) -> int:
    """Segments of a round that are collected; the others are searched anew."""
    return config.segments_per_round - planning_config(config).reanalyse.segments_per_round


def reanalysis_turn(number: int, config: RunConfig) -> int | None:
    """Which of all searches anew a ticket is for; None: it is for collecting.

    Their places among a round's tickets move on from round to round, and once more when places and lanes meet
    as they did before, so that every lane collects.
    """
    per_round, collected = config.segments_per_round, collected_per_round(config)
    rounds, place = divmod(number, per_round)
    place = (place + rounds + rounds // math.lcm(per_round, config.runtime.num_workers)) % per_round
    return None if place < collected else rounds * (per_round - collected) + place - collected


def planning_config(config: RunConfig) -> PlanningConfig:
    """The resolved settings of a run."""
    if not isinstance(config.algorithm, PlanningConfig):
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name!r}; these roles need settings of planning"
        )
    return config.algorithm.resolved(config)
