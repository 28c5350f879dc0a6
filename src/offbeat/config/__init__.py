"""Configuration: models, loader and error messages. Imports no torch."""

from offbeat.config.errors import ConfigProblems, Problem
from offbeat.config.loader import dump_yaml, load_config
from offbeat.config.models import (
    AlgorithmConfig,
    AsyncTrainingConfig,
    CheckpointConfig,
    EnvConfig,
    EvalConfig,
    ObserveConfig,
    RunConfig,
    RunSection,
    RuntimeConfig,
    Section,
)
from offbeat.config.plan import describe
from offbeat.config.recipes import RecipeBook

__all__ = [
    "AlgorithmConfig",
    "AsyncTrainingConfig",
    "CheckpointConfig",
    "ConfigProblems",
    "EnvConfig",
    "EvalConfig",
    "ObserveConfig",
    "Problem",
    "RecipeBook",
    "RunConfig",
    "RunSection",
    "RuntimeConfig",
    "Section",
    "describe",
    "dump_yaml",
    "load_config",
]
