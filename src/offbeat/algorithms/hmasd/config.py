"""The settings of hierarchical multi-agent skill discovery. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from offbeat.algorithms.mappo.config import MAPPOConfig, envs_per_round
from offbeat.config.models import RunConfig, Section
from offbeat.errors import ConfigError

Straddle = Literal["align", "cut", "carry"]


class DiscriminatorConfig(Section):
    """How the discriminators are trained."""

    lr: float | None = Field(
        default=None, gt=0, description="Learning rate of Adam; null: that of the policies."
    )
    layers: int = Field(
        default=2,
        ge=0,
        description="Hidden layers of `hidden` units. With 0 they are linear: places then have to lie far"
        " apart to be told apart.",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Share of their weights that a step of learning rate 1 takes away: keeps them from being"
        " sure too soon.",
    )
    num_updates: int = Field(
        default=15, ge=1, description="Optimiser steps of a round. The paper does not say; as many as epochs."
    )
    batch_size: int = Field(
        default=3200,
        ge=1,
        description="Samples of one step, at most as many as there are. The paper does not say.",
    )
    data: Literal["cleared", "kept"] = Field(
        default="cleared",
        description="What they train on: this round's samples, `cleared` after it like all buffers, or"
        " the newest `capacity` ones, `kept` over rounds.",
    )
    capacity: int = Field(default=32_000, ge=1, description="Samples that are `kept`.")


class HMASDConfig(MAPPOConfig):
    """Hierarchical multi-agent skill discovery, NeurIPS 2023 (OpenReview xMgO04HDOS).

    Defaults are those that the paper's tables share; skills and weights of rewards belong to a task.
    Example: ``algorithm: {name: hmasd, skill_interval: 50, num_team_skills: 2, num_skills: 4}``.
    """

    name: str = Field("hmasd", description="Which algorithm trains; `hmasd` here.")
    skill_interval: int = Field(
        32, ge=1, description="Steps for which skills are kept: k of the paper, 10 to 50 there."
    )
    num_team_skills: int = Field(3, ge=1, description="Team skills to choose from: nZ, 2 or 3 in the paper.")
    num_skills: int = Field(3, ge=1, description="Skills of an agent: nz, 2 to 5 in the paper.")
    straddle: Straddle = Field(
        "align",
        description="What becomes of a skill period that a round's end would cut: `align` goes on until it"
        " is over, `cut` ends it short and chooses anew, `carry` goes on in the next round and trains it"
        " there, as old as it is.",
    )
    high_ent_coef: float = Field(
        0.01, ge=0, description="Weight of the entropy bonus of skills: lambda_h, 0.001 to 0.1 in the paper."
    )
    extrinsic_coef: float = Field(
        1.0, ge=0, description="Weight of the team's reward for the low level: lambda_e."
    )
    team_intrinsic_coef: float = Field(
        0.1, ge=0, description="Weight of log q(Z | s'), lambda_D: 0.1 to 1 in the paper."
    )
    skill_intrinsic_coef: float = Field(
        0.2, ge=0, description="Weight of log q(z | o', Z), lambda_d: 0.1 to 1 in the paper."
    )
    intrinsic_baseline: bool = Field(
        False,
        description="Add log nZ and log nz to the intrinsic rewards, which are never above 0 without: else"
        " every step costs, and ending an episode early pays.",
    )
    intrinsic: Literal["stamped", "recomputed"] = Field(
        "stamped",
        description="Which discriminators judge: those that the collector had, or the learner's own.",
    )
    high_gamma: float = Field(
        0.99, ge=0, le=1, description="Discount per skill period. Default of the paper."
    )
    high_gae_lambda: float = Field(
        0.95, ge=0, le=1, description="Decay of the advantage trace over skill periods."
    )
    high_adv_floor: float = Field(
        1e-8,
        gt=0,
        description="Advantages of skills are divided by their deviation over a round, or by this where it"
        " is larger: before the first rewards they are no more than the noise of values.",
    )
    high_num_epochs: int | None = Field(
        None, ge=1, description="Passes over a round's skill periods; null: num_epochs."
    )
    blocks: int = Field(
        1, ge=1, description="Transformer blocks of encoder and decoder. Default of MAT's code."
    )
    heads: int = Field(1, ge=1, description="Attention heads; must divide hidden. Default of MAT's code.")
    reset_memory: Literal["episode", "skill"] = Field(
        "episode", description="When memories are emptied: at the start of episodes, or at each new skill."
    )
    discriminator: DiscriminatorConfig = Field(
        DiscriminatorConfig(), description="Training of the discriminators."
    )

    def problems(self, config: RunConfig) -> list[tuple[str, str]]:
        """Find settings that contradict each other or the run."""
        found = super().problems(config)
        if self.hidden % self.heads:
            found.append(("heads", f"must divide hidden ({self.hidden})"))
        if self.straddle == "carry" and config.async_training.smallest_degree == 0:
            found.append(
                (
                    "straddle",
                    "carry trains skill periods a round late, and off_policy_degree may be 0: choose align"
                    " or cut, or open the dial",
                )
            )
        num_steps = self.steps_of(self.sync_batch_size, envs_per_round(config), 1)
        if self.straddle == "align" and self.sync_unit == "env_steps" and num_steps < self.skill_interval:
            whole = self.skill_interval * envs_per_round(config)
            found.append(
                (
                    "sync_batch_size",
                    f"gives rounds of {num_steps} steps, and skills are kept for {self.skill_interval}: raise"
                    f" it to {whole}, lower skill_interval, or let periods be cut (straddle: cut)",
                )
            )
        return found


def hmasd_config(config: RunConfig) -> HMASDConfig:
    """The resolved settings of a run."""
    if not isinstance(config.algorithm, HMASDConfig):
        raise ConfigError(f"algorithm.name is {config.algorithm.name!r}; these roles need HMASD's settings")
    return config.algorithm.resolved(config)
