"""The sections of a configuration that every run has, whatever its algorithm and environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.config.models import (
    AsyncTrainingConfig,
    CheckpointConfig,
    EvalConfig,
    LearnerConfig,
    ObserveConfig,
    RolloutConfig,
    RunSection,
    RuntimeConfig,
    TensorBoardConfig,
    TrainerConfig,
)

_QUIET = ObserveConfig(console="none", tensorboard=TensorBoardConfig(enabled=False))


@dataclass(frozen=True, slots=True)
class Settings:
    """The sections of a configuration that are not about one algorithm or environment."""

    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    runtime: RuntimeConfig = field(default_factory=lambda: RuntimeConfig(kind="threads", num_workers=1))
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=lambda: _QUIET)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    run: RunSection = field(default_factory=RunSection)
