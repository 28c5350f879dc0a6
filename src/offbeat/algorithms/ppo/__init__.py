"""Proximal policy optimisation, on-policy or corrected for stale samples. Imports no torch."""

from offbeat.algorithms.base import Algorithm
from offbeat.algorithms.ppo.build import build, check
from offbeat.algorithms.ppo.config import PPOConfig

ALGORITHM = Algorithm(name="ppo", config_model=PPOConfig, build=build, check=check)

__all__ = ["ALGORITHM", "PPOConfig", "build"]
