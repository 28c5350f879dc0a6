"""Players of Color Lines to compare with: they look at the board, know the rules and learn nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.envs.colorlines import ENV_ID, kernels
from offbeat.envs.colorlines.rules import OBS_SIZE, RulesName

Actions = NDArray[np.int64]
WINDOW_WORTH = (0.0, 1.0, 5.0, 25.0, 125.0, 2000.0)
"""What `Windows` gives for a window of five cells with so many balls of one colour; the last is a line's.

Each ball more is worth five times as much. Factors from 4 to 10 play alike, 3 plays worse."""
_NO_WORTH = np.zeros(6)


class Player(Protocol):
    """Whatever chooses moves: a baseline, or a trained network."""

    def act(self, obs: NDArray[Any]) -> Actions:
        """Choose a move ``[...]`` for each of the observations ``[..., 84]``."""
        ...


class _Baseline:
    """A player with a stream of random numbers of its own, so that its games can be repeated."""

    def __init__(self, seed: int = 0) -> None:
        self._stream = np.array([seed], np.uint64)

    def act(self, obs: NDArray[Any]) -> Actions:
        """Choose a legal move ``[...]`` for each of the observations ``[..., 84]``; 0 on a full board."""
        rows = np.ascontiguousarray(obs.reshape(-1, OBS_SIZE), np.int8)
        actions = np.zeros(len(rows), np.int64)
        with np.errstate(over="ignore"):  # random numbers wrap around, which plain numpy warns of
            self._choose(rows, actions)
        return actions.reshape(obs.shape[:-1])

    def _choose(self, rows: NDArray[np.int8], actions: Actions) -> None:
        raise NotImplementedError


class RandomMoves(_Baseline):
    """Plays any legal move with equal chance."""

    def _choose(self, rows: NDArray[np.int8], actions: Actions) -> None:
        kernels.choose_random(rows, self._stream, actions)


class LongestLine(_Baseline):
    """Plays the move with most points now, without points the one that makes the longest row."""

    def _choose(self, rows: NDArray[np.int8], actions: Actions) -> None:
        kernels.choose_best(rows, False, _NO_WORTH, self._stream, actions)


class Windows(_Baseline):
    """Plays the move after which most windows of five cells are well on their way to a line.

    ``worth`` values a window with 0 to 4 balls of one colour and no other; its last entry is what
    the ten points of a line are worth on that scale.
    """

    def __init__(self, seed: int = 0, worth: tuple[float, ...] = WINDOW_WORTH) -> None:
        super().__init__(seed)
        self._worth = np.array(worth, np.float64)

    def _choose(self, rows: NDArray[np.int8], actions: Actions) -> None:
        kernels.choose_best(rows, True, self._worth, self._stream, actions)


BASELINES: dict[str, Callable[[int], Player]] = {
    "random": RandomMoves,
    "greedy": LongestLine,
    "windows": Windows,
}
"""What makes each baseline from a seed."""


def play_games(player: Player, rules: RulesName, num_games: int, seed: int = 0) -> NDArray[np.int64]:
    """Let a player play whole games side by side; return their scores ``[num_games]``.

    Example: ``play_games(LongestLine(seed=1), "classic", 100).mean()``.
    """
    games = gymnasium.make_vec(ENV_ID, num_games, rules=rules)
    obs, _ = games.reset(seed=seed)
    scores = np.zeros(num_games, np.int64)
    is_playing = np.ones(num_games, np.bool_)
    while is_playing.any():  # a game is cut off after so many steps at the latest
        actions = np.zeros(num_games, np.int64)
        actions[is_playing] = player.act(obs[is_playing])
        obs, _, terminated, truncated, infos = games.step(actions)
        has_ended = is_playing & (terminated | truncated)
        scores[has_ended] = infos["score"][has_ended]
        is_playing &= ~has_ended
    games.close()
    return scores
