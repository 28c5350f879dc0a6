"""Hierarchical multi-agent skill discovery. Imports no torch."""

from offbeat.algorithms.base import Algorithm
from offbeat.algorithms.hmasd.build import build, check
from offbeat.algorithms.hmasd.config import HMASDConfig
from offbeat.envs.judged import probe_team
from offbeat.envs.teams import make_shown_team

ALGORITHM = Algorithm(
    name="hmasd",
    config_model=HMASDConfig,
    build=build,
    check=check,
    probe_env=probe_team,
    make_render_env=make_shown_team,
)

__all__ = ["ALGORITHM", "HMASDConfig", "build"]
