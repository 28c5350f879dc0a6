"""The settings of GRPO. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from offbeat.algorithms.grpo.conflicts import problems
from offbeat.algorithms.grpo.losses import FIELDS, LOSSES, OWN, Advantage, Choices, Ratio
from offbeat.algorithms.grpo.terms import CorrectionConfig, KLConfig, OverlongConfig, ValueConfig
from offbeat.config.models import AUTO, AlgorithmConfig, RunConfig, Section
from offbeat.errors import ConfigError
from offbeat.llm.tasks.base import Limits
from offbeat.ops.aggregation import Aggregation
from offbeat.ops.group_advantages import Normalisation
from offbeat.ops.schedules import cosine_schedule, linear_schedule


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
    """Rewards of responses."""

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
    """Answers to turns of the model."""

    timeout_s: float = Field(
        default=30.0, gt=0, description="A tool that takes longer is given up, and its response left out."
    )


class GRPOConfig(AlgorithmConfig):
    """Policy optimisation of a language model, GRPO and its kin. One ticket is one prompt with its group.

    Example: ``algorithm: {name: grpo, group_size: 8, segments_per_round: 16}``.
    """

    has_envs: ClassVar[bool] = False

    name: str = Field("grpo", description="Which algorithm trains; `grpo` here.")
    group_size: int = Field(8, ge=1, description="Responses to each prompt. Default of TRL.")
    temperature: float = Field(1.0, gt=0, description="Of the softmax that tokens are drawn from.")
    max_new_tokens: int | None = Field(None, ge=1, description="Longest response; null: what the task says.")
    lr: float = Field(
        2e-4, gt=0, description="Learning rate of AdamW. Default of this project for 0.4 M parameters."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients longer than this are shortened to it.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate goes to 0 by the end of run.rounds."
    )
    lr_warmup_rounds: int = Field(0, ge=0, description="Rounds in which the learning rate rises evenly.")
    schedule_rounds: int | None = Field(
        None, ge=1, description="Rounds that lr_schedule takes; null: run.rounds."
    )
    loss: str = Field(
        "dapo",
        description="What the next six settings are, unless they are set: grpo, dr_grpo, rloo, dapo, gspo,"
        " cispo, ppo; or a function of your own, module:function. Default of TRL.",
    )
    loss_kwargs: dict[str, Any] = Field({}, description="Arguments of a function of your own.")
    advantage: Advantage | None = Field(
        None,
        description="What a reward is compared with: the mean of the `group`, that of its others"
        " (`leave_one_out`), or a value head (`gae`); null: what the loss says.",
    )
    norm_adv: Normalisation | None = Field(
        None,
        description="Divide advantages by the deviation of rewards in a `group`, whiten them over all tokens"
        " of a round (`batch`), or `none`; null: what the loss says.",
    )
    ratio: Ratio | None = Field(
        None,
        description="Ratios of each `token`, or their geometric mean over a response (`sequence`); null: what"
        " the loss says.",
    )
    clip_low: float | None = Field(
        None, gt=0, le=1, description="How far below 1 a ratio is rewarded; null: what the loss says."
    )
    clip_high: float | None = Field(
        None, gt=0, description="How far above 1 a ratio is rewarded; null: what the loss says."
    )
    aggregation: Aggregation | None = Field(
        None,
        description="Mean over tokens (`token_mean`), over responses of such means (`sequence_mean`), or over"
        " responses of sums divided by the longest length (`constant`); null: what the loss says.",
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Bound on the ratio of bad responses in the loss (arXiv:1912.09729); null: no bound.",
    )
    correction: CorrectionConfig = Field(CorrectionConfig(), description="Corrections for stale tokens.")
    kl: KLConfig = Field(KLConfig(), description="Penalty on leaving a reference model.")
    value: ValueConfig = Field(ValueConfig(), description="The value head, for `advantage: gae`.")
    overlong: OverlongConfig = Field(OverlongConfig(), description="Penalty on long responses.")
    mask_truncated: bool = Field(
        False, description="Leave responses that did not end by themselves out of the loss."
    )
    dynamic_sampling: bool = Field(
        False,
        description="Drop groups whose rewards are all the same, and collect others (DAPO);"
        " async_training.max_drops_per_round bounds it.",
    )
    num_minibatches: int = Field(
        1, ge=1, description="Parts of a round, in ticket order, with an optimizer step each."
    )
    num_epochs: int = Field(1, ge=1, description="Passes over a round.")
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

    @property
    def choices(self) -> Choices:
        """The parts of the loss: its own, unless a setting says otherwise."""
        chosen = {name: getattr(self, name) for name in FIELDS if getattr(self, name) is not None}
        return replace(LOSSES.get(self.loss, OWN), **chosen)

    @property
    def gradient_steps(self) -> int:
        """Optimizer steps of a round."""
        return self.num_minibatches * self.num_epochs

    def resolved(self, config: RunConfig) -> Self:
        """Fill in what the loss says, and the length of schedules."""
        parts = {name: getattr(self.choices, name) for name in FIELDS}
        rounds = self.schedule_rounds or config.run.rounds
        return self.model_copy(update={**parts, "schedule_rounds": rounds})

    def update(self, config: RunConfig) -> str:
        """Say how many optimizer steps old a token may be."""
        dial = config.async_training
        degree = dial.auto_max if dial.off_policy_degree == AUTO else dial.off_policy_degree
        steps, most = self.gradient_steps, degree * self.gradient_steps
        return (
            f"one version = {_count(steps, 'optimizer step')}; oldest token at most "
            f"{_count(degree, 'version')} = {_count(most, 'step')}"
        )

    def lr_at(self, version: int) -> float:
        """Learning rate of the round that starts at ``version``."""
        rise = min(1.0, (version + 1) / (self.lr_warmup_rounds + 1))
        if self.lr_schedule == "constant" or self.schedule_rounds is None:
            return self.lr * rise
        fall = linear_schedule if self.lr_schedule == "linear" else cosine_schedule
        return rise * fall(self.lr, 0.0, step=version, num_steps=self.schedule_rounds)

    def problems(self, config: RunConfig) -> list[tuple[str, str]]:
        """Find settings that contradict each other or the run."""
        return problems(self, config.segments_per_round)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def grpo_config(config: RunConfig) -> GRPOConfig:
    """Return the resolved settings of a run."""
    if not isinstance(config.algorithm, GRPOConfig):
        raise ConfigError(f"algorithm.name is {config.algorithm.name!r}; GRPO's roles need GRPO's settings")
    return config.algorithm.resolved(config)
