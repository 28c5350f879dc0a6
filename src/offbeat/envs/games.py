"""What games that are played side by side share: random numbers, checks of actions, infos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


def checked_actions(
    actions: NDArray[Any], is_over: NDArray[np.bool_], num_actions: int, game: str
) -> NDArray[np.int64]:
    """One action ``[num_games]`` for each game, from 0 up to ``num_actions``; ended games take any."""
    found = np.ascontiguousarray(actions, np.int64)
    if found.shape != is_over.shape:
        raise EnvError(f"actions have shape {found.shape}; give one for each of {is_over.size} games")
    bad = ~is_over & ((found < 0) | (found >= num_actions))
    if bad.any():
        lane = int(bad.argmax())
        raise EnvError(
            f"{found[lane]} (game {lane}) is no action of {game}; give one of 0 to {num_actions - 1}"
        )
    return found


def from_all_games(infos: Mapping[str, Any], num_games: int) -> dict[str, Any]:
    """Infos as Gymnasium's wrappers want them: "_name" says which games gave a value, here all of them."""
    return {**infos, **{f"_{name}": np.ones(num_games, np.bool_) for name in infos}}
