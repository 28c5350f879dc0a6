"""Proximal policy optimisation, on-policy or corrected for stale samples. Imports no torch."""

from offbeat.algorithms.base import Algorithm
from offbeat.algorithms.ppo.build import build
from offbeat.algorithms.ppo.config import PPOConfig

ALGORITHM = Algorithm(name="ppo", config_model=PPOConfig, build=build)

__all__ = ["ALGORITHM", "PPOConfig", "build"]
