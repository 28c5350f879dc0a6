"""MuZero: planning with a learned model, its targets searched anew. Imports no torch."""

from offbeat.algorithms.base import Algorithm
from offbeat.algorithms.muzero.build import build
from offbeat.algorithms.muzero.config import MuZeroConfig
from offbeat.algorithms.muzero.parts import check, startup_notes
from offbeat.envs.judged import probe_env

ALGORITHM = Algorithm(
    name="muzero",
    config_model=MuZeroConfig,
    build=build,
    check=check,
    startup_notes=startup_notes,
    probe_env=probe_env,
)

__all__ = ["ALGORITHM", "MuZeroConfig", "build"]
