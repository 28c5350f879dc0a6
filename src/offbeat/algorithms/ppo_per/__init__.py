"""PPO that replays segments by priority, each corrected for its age. Imports no torch."""

from offbeat.algorithms.base import Algorithm
from offbeat.algorithms.ppo_per.build import build, check, startup_notes
from offbeat.algorithms.ppo_per.config import PPOPERConfig
from offbeat.envs.judged import probe_env

ALGORITHM = Algorithm(
    name="ppo_per",
    config_model=PPOPERConfig,
    build=build,
    check=check,
    startup_notes=startup_notes,
    probe_env=probe_env,
)

__all__ = ["ALGORITHM", "PPOPERConfig", "build"]
