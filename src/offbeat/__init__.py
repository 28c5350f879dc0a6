"""Reinforcement learning on one dial, from strictly synchronous to fully asynchronous.

Names are imported when they are first used, so that ``import offbeat`` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.algorithms import register
    from offbeat.api import Result, digest, evaluate, play, replay_run, resume, train
    from offbeat.config.code import env_factory, token_loss
    from offbeat.config.loader import ConfigSource
    from offbeat.config.models import RunConfig
    from offbeat.observe.callbacks import Callback
    from offbeat.pipeline import Pipeline
    from offbeat.roles import PerWorker
    from offbeat.run.playing import PlayResult
    from offbeat.run.stepwise import SyncRun
    from offbeat.types import Batch, Segment, Ticket

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Callback",
    "PerWorker",
    "Pipeline",
    "PlayResult",
    "Result",
    "Segment",
    "SyncRun",
    "Ticket",
    "__version__",
    "digest",
    "env_factory",
    "evaluate",
    "load_config",
    "play",
    "register",
    "replay_run",
    "resume",
    "token_loss",
    "train",
]

_HOMES = {
    "Batch": "offbeat.types",
    "Callback": "offbeat.observe.callbacks",
    "PerWorker": "offbeat.roles",
    "Pipeline": "offbeat.pipeline",
    "PlayResult": "offbeat.run.playing",
    "Result": "offbeat.api",
    "Segment": "offbeat.types",
    "SyncRun": "offbeat.run.stepwise",
    "Ticket": "offbeat.types",
    "digest": "offbeat.api",
    "env_factory": "offbeat.config.code",
    "evaluate": "offbeat.api",
    "play": "offbeat.api",
    "register": "offbeat.algorithms",
    "replay_run": "offbeat.api",
    "resume": "offbeat.api",
    "token_loss": "offbeat.config.code",
    "train": "offbeat.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_config(source: ConfigSource, overrides: Mapping[str, object] | Sequence[str] = ()) -> RunConfig:
    """Load and check a configuration: a recipe's name, a YAML file or a ``RunConfig``, with overrides.

    Raises ``offbeat.errors.ConfigError`` with every mistake, its place and its fix.

    Example: ``load_config("cartpole-ppo", ["async_training.off_policy_degree=1"])``.
    """
    from offbeat.algorithms import BUILTIN, config_model
    from offbeat.config import loader

    return loader.load_config(source, overrides, algorithm_model=config_model, algorithms=BUILTIN)
