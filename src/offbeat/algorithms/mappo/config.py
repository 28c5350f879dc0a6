"""The settings of multi-agent PPO, those of a team without skills. No torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from offbeat.config.models import AlgorithmConfig, RunConfig
from offbeat.errors import ConfigError
from offbeat.models.spec import Activation
from offbeat.ops.schedules import linear_schedule

SampleUnit = Literal["env_steps", "agent_steps"]
TeamCorrection = Literal["auto", "gae", "decoupled"]
BatchRule = Literal["fixed", "linear", "noise_scale"]


class MAPPOConfig(AlgorithmConfig):
    """Multi-agent PPO with a central critic, https://arxiv.org/abs/2103.01955.

    Defaults named HMASD are those of tables 1 to 3 of that paper (OpenReview xMgO04HDOS).
    Example: ``algorithm: {name: mappo, sync_batch_size: 3200}``.
    """

    name: str = Field("mappo", description="Which algorithm trains; `mappo` here.")
    sync_batch_size: int = Field(
        1024,
        ge=1,
        description="Samples of one round, over all environments, counted in sync_unit.",
    )
    sync_unit: SampleUnit = Field(
        "env_steps",
        description="What sync_batch_size counts: steps of an environment, or those of its agents; a round"
        " goes on to the end of the step in which it is reached.",
    )
    batch_rule: BatchRule = Field(
        "fixed",
        description="How sync_batch_size changes: `fixed`; `linear` to batch_size_end over schedule_rounds;"
        " `noise_scale` follows the measured gradient noise (arXiv:1812.06162) up to batch_size_end.",
    )
    batch_size_end: int | None = Field(
        None, ge=1, description="Largest batch of a batch_rule; null: sync_batch_size."
    )
    num_epochs: int = Field(15, ge=1, description="Passes over a round's samples. Default of HMASD.")
    num_minibatches: int = Field(
        1, ge=1, description="Optimiser steps of one pass, at most one for each chunk. Default of HMASD."
    )
    grad_accumulation: int = Field(
        1,
        ge=1,
        description="Parts a minibatch is differentiated in, to save memory; the update stays the same. For"
        " actor and critic; what chooses skills and tells them apart is small.",
    )
    chunk_length: int = Field(
        10,
        ge=1,
        description="Steps that gradients go back through a memory. Default of MAPPO's code.",
    )
    lr: float = Field(5e-4, gt=0, description="Learning rate of Adam at the first round. Default of HMASD.")
    lr_schedule: Literal["constant", "linear"] = Field(
        "constant", description="`linear` takes the learning rate to 0 over schedule_rounds."
    )
    schedule_rounds: int | None = Field(
        None, ge=1, description="Rounds a linear schedule takes; null: run.rounds."
    )
    adam_eps: float = Field(1e-5, gt=0, description="Adam's epsilon. Default of HMASD.")
    max_grad_norm: float = Field(
        10.0, gt=0, description="Gradients longer than this are shortened to it. Default of MAPPO's code."
    )
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step. Default of HMASD.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Decay of the advantage trace. Default of HMASD.")
    ends_at_time_limit: bool = Field(
        False,
        description="Whether an episode that is cut off is over, as in MAPPO's code, or has the value of its"
        " last state. Where success ends it, that value makes success now worth little more than later.",
    )
    clip_coef: float = Field(
        0.2, gt=0, description="Largest change of a probability that is rewarded. Default of HMASD."
    )
    clip_vloss: bool = Field(
        True, description="Also clip the change of values by clip_coef. Default of MAPPO's code."
    )
    huber_delta: float | None = Field(
        10.0, gt=0, description="Value errors above this count linearly; null: squared. Default of HMASD."
    )
    value_norm: bool = Field(
        True, description="Train values in units of their running deviation. Default of HMASD."
    )
    vf_coef: float = Field(1.0, ge=0, description="Weight of the value loss. Default of HMASD.")
    ent_coef: float = Field(
        0.01, ge=0, description="Weight of the entropy bonus of actions. Default of HMASD."
    )
    norm_adv: bool = Field(True, description="Normalise advantages over the valid samples of a round.")
    correction: TeamCorrection = Field(
        "auto",
        description="How stale samples are corrected: `gae` not at all, or `decoupled` (arXiv:2110.00641);"
        " `auto` is `gae` in rounds whose samples are all fresh, else `decoupled`.",
    )
    c_bar: float = Field(1.0, gt=0, description="Bound on ratios in off-policy traces. Default of IMPALA.")
    behaviour_cap: float = Field(
        2.0, gt=0, description="Bound on the weight of a stale sample in the decoupled loss."
    )
    hidden: int = Field(64, ge=1, description="Units of dense layers and memories. Default of HMASD.")
    layers: int = Field(1, ge=1, description="Dense layers before and after the memory.")
    recurrent: bool = Field(True, description="Give actor and critic a memory (a gated recurrent unit).")
    activation: Activation = Field("relu", description="Activation of dense layers.")
    feature_norm: bool = Field(
        True, description="Normalise the inputs of each sample (LayerNorm). Default of MAPPO's code."
    )
    agent_id: bool = Field(
        False, description="Show each agent which one it is; needed where agents must differ by themselves."
    )
    max_first_ratio_dev: float | None = Field(
        1e-5,
        gt=0,
        description="Where all samples of a round are fresh, as always with off_policy_degree 0, end the"
        " run when a ratio before the first step is further from 1 than this: they would not be on-policy."
        " null: report only.",
    )

    def resolved(self, config: RunConfig) -> Self:
        """Fill in the length of schedules, by that of the run, and the largest batch."""
        return self.model_copy(
            update={
                "schedule_rounds": self.schedule_rounds or config.run.rounds,
                "batch_size_end": self.batch_size_end or self.sync_batch_size,
            }
        )

    def problems(self, config: RunConfig) -> list[tuple[str, str]]:
        """Find settings that contradict each other or the run."""
        found: list[tuple[str, str]] = []
        largest = self.batch_size_end or self.sync_batch_size
        if largest < self.sync_batch_size and self.batch_rule == "noise_scale":
            found.append(("batch_size_end", "must be at least sync_batch_size, where the batch starts"))
        if self.batch_rule == "fixed" and largest != self.sync_batch_size:
            found.append(("batch_size_end", "needs batch_rule linear or noise_scale"))
        num_envs = envs_per_round(config)
        if self.sync_unit == "env_steps" and self.sync_batch_size % num_envs:
            whole = max(1, round(self.sync_batch_size / num_envs)) * num_envs
            found.append(
                ("sync_batch_size", f"must be a whole number of steps of {num_envs} environments: {whole} is")
            )
        return found

    def samples_per_segment(self, config: RunConfig) -> int | None:
        """Environment steps in one segment; None where they are not known beforehand."""
        if self.sync_unit == "agent_steps" or self.batch_rule != "fixed":
            return None
        return self.steps_of(self.sync_batch_size, envs_per_round(config), 1) * config.envs_per_worker

    def lr_at(self, version: int) -> float:
        """Learning rate of the round that starts at ``version``."""
        if self.lr_schedule == "constant" or self.schedule_rounds is None:
            return self.lr
        return linear_schedule(self.lr, 0.0, step=version, num_steps=self.schedule_rounds)

    def steps_of(self, batch_size: int, num_envs: int, num_agents: int) -> int:
        """Steps of each of ``num_envs`` environments, all together, that give at least ``batch_size``."""
        per_step = num_envs * (num_agents if self.sync_unit == "agent_steps" else 1)
        return -(-batch_size // per_step)


def envs_per_round(config: RunConfig) -> int:
    """Environments whose steps make up a round: those of all its segments."""
    return config.envs_per_worker * config.segments_per_round


def mappo_config(config: RunConfig) -> MAPPOConfig:
    """The resolved settings of a run."""
    if not isinstance(config.algorithm, MAPPOConfig):
        raise ConfigError(f"algorithm.name is {config.algorithm.name!r}; these roles need MAPPO's settings")
    return config.algorithm.resolved(config)
