"""Random numbers of games that are played side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import EnvError

_MASK = (1 << 64) - 1


def new_streams(
    seed: int | Sequence[int] | None, num_games: int, rng: np.random.Generator
) -> NDArray[np.uint64]:
    """The start ``[num_games]`` of each game's stream: one seed each, or one that is counted up.

    Without a seed it is drawn from ``rng``.
    """
    if seed is None:
        seed = int(rng.integers(1 << 63))
    if isinstance(seed, (int, np.integer)):
        seeds = [int(seed) + game for game in range(num_games)]
    else:
        seeds = list(seed)
    if len(seeds) != num_games:
        raise EnvError(f"{len(seeds)} seeds for {num_games} games; give one each, or a single number")
    return np.array([int(number) & _MASK for number in seeds], np.uint64)
