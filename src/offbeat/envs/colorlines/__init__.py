"""Color Lines (Lines 98): move balls on a 9 x 9 board, five of a colour in a line vanish.

The game exists twice: `env` is the plain version, one game in readable Python, and `vector` plays many at
once in compiled code. Both make the same games from the same seeds. `moves` is their action space, which
knows the legal moves, `symmetry` holds what the game does not care about, and `baselines` players to
compare with.
"""

from __future__ import annotations

import gymnasium
from gymnasium.envs.registration import registry

from offbeat.ops.compiled import numba_is_wanted

ENV_ID = "offbeat/ColorLines-v0"
MAX_EPISODE_STEPS = 1000
"""Steps after which a game is cut off, unless told otherwise."""


def register_color_lines() -> None:
    """Make the game known to Gymnasium as ``offbeat/ColorLines-v0``; a second call changes nothing.

    The vector version is there only where numba is installed and not turned off with ``OFFBEAT_NUMBA=0``;
    elsewhere the plain one is looped over.
    """
    if ENV_ID in registry:
        return
    vector = "offbeat.envs.colorlines.vector:ColorLinesVectorEnv"
    gymnasium.register(
        ENV_ID,
        entry_point="offbeat.envs.colorlines.env:ColorLinesEnv",
        vector_entry_point=vector if numba_is_wanted() else None,
        max_episode_steps=MAX_EPISODE_STEPS,
    )
