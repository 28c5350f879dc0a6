"""Players of Connect Four to compare with: they look at the board, know the rules and learn nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.envs.connect4 import ENV_ID, kernels
from offbeat.envs.connect4.env import OBS_SHAPE
from offbeat.envs.connect4.rules import MAX_DEPTH, RANDOM_OPPONENT, BeginsName, TiesName
from offbeat.errors import EnvError

Actions = NDArray[np.int64]


class Player(Protocol):
    """Whatever chooses columns: a baseline, or a trained network."""

    def act(self, obs: NDArray[Any]) -> Actions:
        """Choose a column ``[...]`` for each of the observations ``[..., 3, 6, 7]``."""
        ...


class RandomColumns:
    """Plays any column that has room with equal chance, from a stream of random numbers of its own."""

    def __init__(self, seed: int = 0) -> None:
        self._stream = np.array([seed], np.uint64)
        self._depth = RANDOM_OPPONENT
        self._centre_first = False

    def act(self, obs: NDArray[Any]) -> Actions:
        """Choose a column with room ``[...]`` for each observation ``[..., 3, 6, 7]``; 0 on a full board."""
        boards = np.ascontiguousarray(obs.reshape(-1, *OBS_SHAPE), np.float32)
        actions = np.zeros(len(boards), np.int64)
        with np.errstate(over="ignore"):  # random numbers wrap around, which plain numpy warns of
            kernels.choose_all(boards, self._depth, self._centre_first, self._stream, actions)
        return actions.reshape(obs.shape[:-3])


class Minimax(RandomColumns):
    """Plays the column that `minimax.best_moves` scores highest; of equal ones any, or the centre-most."""

    def __init__(self, seed: int = 0, depth: int = 3, centre_first: bool = False) -> None:
        super().__init__(seed)
        if not 1 <= depth <= MAX_DEPTH:
            raise EnvError(f"a minimax of depth {depth} was asked for; give a depth from 1 to {MAX_DEPTH}")
        self._depth = depth
        self._centre_first = centre_first


BASELINES: dict[str, Callable[[int], Player]] = {
    "random": RandomColumns,
    "minimax": Minimax,
    **{f"minimax:{depth}": partial(Minimax, depth=depth) for depth in range(1, MAX_DEPTH + 1)},
}
"""What makes each baseline from a seed."""


def play_games(
    player: Player,
    opponent: str,
    num_games: int,
    *,
    random_plies: int = 4,
    begins: BeginsName = "alternate",
    ties: TiesName = "random",
    seed: int = 0,
) -> NDArray[np.float64]:
    """Let a player play games side by side against an opponent; return their results ``[num_games]``.

    A game is won (1), drawn (0) or lost (-1). The rest is as in `env.Connect4Env`.

    Example: ``(play_games(Minimax(depth=3), "random", 200) > 0).mean()`` is the share of games won.
    """
    kwargs: dict[str, Any] = {"random_plies": random_plies, "begins": begins, "ties": ties}
    games = gymnasium.make_vec(ENV_ID, num_games, opponent=opponent, **kwargs)
    obs, _ = games.reset(seed=seed)
    results = np.zeros(num_games)
    is_playing = np.ones(num_games, np.bool_)
    while is_playing.any():  # a game has at most 42 stones
        actions = np.zeros(num_games, np.int64)
        actions[is_playing] = player.act(obs[is_playing])
        obs, rewards, terminated, _, _ = games.step(actions)
        has_ended = is_playing & terminated
        results[has_ended] = rewards[has_ended]
        is_playing &= ~has_ended
    games.close()
    return results
