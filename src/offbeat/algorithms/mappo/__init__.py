"""Multi-agent PPO with a central critic. Imports no torch."""

from offbeat.algorithms.base import Algorithm
from offbeat.algorithms.mappo.build import build, check
from offbeat.algorithms.mappo.config import MAPPOConfig
from offbeat.envs.judged import probe_team
from offbeat.envs.teams import make_shown_team

ALGORITHM = Algorithm(
    name="mappo",
    config_model=MAPPOConfig,
    build=build,
    check=check,
    probe_env=probe_team,
    make_render_env=make_shown_team,
)

__all__ = ["ALGORITHM", "MAPPOConfig", "build"]
