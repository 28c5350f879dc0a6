"""Connect Four: two players drop stones into seven columns, four of one's own in a line win.

Without an opponent it is a game for self-play: whoever is to move acts, sees the board from his own side and
is rewarded for his own move. With one (``opponent="minimax:3"``) the environment answers each move itself.

The game exists twice: `env` is the plain version, one game in readable Python, and `vector` plays many at
once in compiled code. Both make the same games from the same seeds. `minimax` looks ahead, and `baselines`
holds players to compare with.
"""

from __future__ import annotations

import gymnasium
from gymnasium.envs.registration import registry

from offbeat.ops.compiled import numba_is_wanted

ENV_ID = "offbeat/Connect4-v0"


def register_connect4() -> None:
    """Make the game known to Gymnasium as ``offbeat/Connect4-v0``; a second call changes nothing.

    The vector version is there only where numba is installed and not turned off with ``OFFBEAT_NUMBA=0``;
    elsewhere the plain one is looped over, which is faster than kernels that are not compiled.
    """
    if ENV_ID in registry:
        return
    vector = "offbeat.envs.connect4.vector:Connect4VectorEnv"
    gymnasium.register(
        ENV_ID,
        entry_point="offbeat.envs.connect4.env:Connect4Env",
        vector_entry_point=vector if numba_is_wanted() else None,
    )
