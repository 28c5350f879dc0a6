"""Group relative policy optimisation of language models (GRPO). Imports no torch."""

from offbeat.algorithms.base import Algorithm
from offbeat.algorithms.grpo.build import build, check
from offbeat.algorithms.grpo.config import GRPOConfig

ALGORITHM = Algorithm(name="grpo", config_model=GRPOConfig, build=build, check=check)

__all__ = ["ALGORITHM", "GRPOConfig", "build"]
