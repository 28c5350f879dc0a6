"""The settings of GRPO. No torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from offbeat.config.models import AlgorithmConfig, RunConfig, Section
from offbeat.errors import ConfigError
from offbeat.llm.tasks.base import Limits
from offbeat.ops.group_advantages import Normalisation


class DecoderConfig(Section):
    """The network: a folder in the layout of Hugging Face, or a new one of these sizes."""

    folder: str | None = Field(default=None, description="Folder of the model to train; null: a new one.")
    width: int = Field(default=96, ge=8, description="Size of hidden states of a new model.")
    num_layers: int = Field(default=4, ge=1, description="Transformer layers of a new model.")
    num_heads: int = Field(default=6, ge=1, description="Attention heads of a new model.")
    num_kv_heads: int = Field(default=2, ge=1, description="Heads of keys and values of a new model.")
    ff_width: int = Field(default=256, ge=8, description="Size of the inner layer of a new model.")


class WarmupConfig(Section):
    """Supervised training on the task's answers before the first round: RL needs some right answers."""

    accuracy: float | None = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="Ends when greedy responses to held-out problems have this mean reward; null: none.",
    )
    check_steps: int = Field(default=25, ge=1, description="Optimizer steps between two looks at it.")
    most_tokens: int | None = Field(
        default=None, ge=2, description="Longest answer to train on, in tokens with the end; null: any."
    )
    most_steps: int = Field(default=4_000, ge=1, description="Optimizer steps after which it ends anyway.")
    batch_size: int = Field(default=64, ge=1, description="Problems of one step.")
    lr: float = Field(default=1e-3, gt=0, description="Learning rate.")


class EngineConfig(Section):
    """The engine that generates, one in each collector."""

    slots: int | None = Field(
        default=None,
        ge=1,
        description="Responses with memory at a time; null: all that the dial lets be outstanding.",
    )
    bucket: int = Field(default=64, ge=8, description="Attention looks at multiples of so many positions.")
    on_swap: Literal["keep", "recompute"] = Field(
        default="keep", description="What becomes of caches when new weights come in the middle of responses."
    )


class RewardConfig(Section):
    """How responses are rewarded."""

    function: str | None = Field(
        default=None,
        description="`module:function` of a reward function of yours, with our parameters, verl's or TRL's; "
        "null: the task's.",
    )
    timeout_s: float = Field(
        default=30.0, gt=0, description="A reward that takes longer is given up, and its response left out."
    )
    max_failures: int = Field(
        default=100, ge=1, description="The run ends when so many rewards, or tools, have failed in a row."
    )
    threads: int = Field(
        default=8, ge=1, description="Rewards and tools that run at a time, where they are no coroutines."
    )


class ToolConfig(Section):
    """How turns of the model are answered."""

    timeout_s: float = Field(
        default=30.0, gt=0, description="A tool that takes longer is given up, and its response left out."
    )


class GRPOConfig(AlgorithmConfig):
    """Group relative policy optimisation of a language model. One ticket is one prompt with its group.

    Example: ``algorithm: {name: grpo, group_size: 8, segments_per_round: 16}``.
    """

    has_envs: ClassVar[bool] = False

    name: str = Field("grpo", description="Which algorithm trains; `grpo` here.")
    group_size: int = Field(8, ge=2, description="Responses to each prompt. Default of TRL.")
    temperature: float = Field(1.0, gt=0, description="Of the softmax that tokens are drawn from.")
    max_new_tokens: int | None = Field(None, ge=1, description="Longest response; null: what the task says.")
    lr: float = Field(
        2e-4, gt=0, description="Learning rate of AdamW. Default of this project for 0.4 M parameters."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients longer than this are shortened to it.")
    clip_low: float = Field(
        0.2, gt=0, lt=1, description="How far below 1 a token's ratio is rewarded. DAPO's."
    )
    clip_high: float = Field(0.28, gt=0, description="How far above 1 a token's ratio is rewarded. DAPO's.")
    norm_adv: Normalisation = Field(
        "group", description="Divide centred rewards by the group's deviation (GRPO), or not (Dr. GRPO)."
    )
    tokens_per_batch: int = Field(8_192, ge=1, description="Tokens that are differentiated at once.")
    model: DecoderConfig = Field(DecoderConfig(), description="The language model.")
    warmup: WarmupConfig = Field(WarmupConfig(), description="Supervised training before the first round.")
    engine: EngineConfig = Field(EngineConfig(), description="What generates.")
    reward: RewardConfig = Field(RewardConfig(), description="How responses are rewarded.")
    tool: ToolConfig = Field(ToolConfig(), description="How turns of the model are answered.")

    def limits(self, max_new_tokens: int) -> Limits:
        """Return the limits of a response."""
        reward = self.reward
        seconds = {"tool_s": self.tool.timeout_s, "reward_s": reward.timeout_s}
        return Limits(max_new_tokens, **seconds, max_failures=reward.max_failures, threads=reward.threads)

    def slots(self, config: RunConfig) -> int:
        """Responses with memory in each collector."""
        most = config.max_outstanding_segments * self.group_size
        return self.engine.slots or max(self.group_size, -(-most // config.runtime.num_workers))


def grpo_config(config: RunConfig) -> GRPOConfig:
    """Return the resolved settings of a run."""
    if not isinstance(config.algorithm, GRPOConfig):
        raise ConfigError(f"algorithm.name is {config.algorithm.name!r}; GRPO's roles need GRPO's settings")
    return config.algorithm.resolved(config)
