"""Proximal policy optimisation, on-policy or corrected for stale samples. Imports no torch."""

from offbeat.algorithms.base import Algorithm
from offbeat.algorithms.ppo.build import build, check, startup_notes
from offbeat.algorithms.ppo.config import PPOConfig
from offbeat.envs.judged import probe_env

ALGORITHM = Algorithm(
    name="ppo",
    config_model=PPOConfig,
    build=build,
    check=check,
    startup_notes=startup_notes,
    probe_env=probe_env,
)

__all__ = ["ALGORITHM", "PPOConfig", "build"]
