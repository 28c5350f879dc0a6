"""UniZero: planning with a transformer as world model. Imports no torch."""

from offbeat.algorithms.base import Algorithm
from offbeat.algorithms.muzero.parts import check, startup_notes
from offbeat.algorithms.unizero.build import build
from offbeat.algorithms.unizero.config import UniZeroConfig
from offbeat.envs.judged import probe_env

ALGORITHM = Algorithm(
    name="unizero",
    config_model=UniZeroConfig,
    build=build,
    check=check,
    startup_notes=startup_notes,
    probe_env=probe_env,
)

__all__ = ["ALGORITHM", "UniZeroConfig", "build"]
