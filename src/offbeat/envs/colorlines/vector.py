"""Color Lines, many games at once in compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from offbeat.envs.colorlines import MAX_EPISODE_STEPS, kernels
from offbeat.envs.colorlines.env import RENDER_MODES, Info, observation_space
from offbeat.envs.colorlines.moves import Moves
from offbeat.envs.colorlines.rules import (
    NUM_ACTIONS,
    NUM_CELLS,
    OBS_SIZE,
    REWARDS,
    RULES,
    RewardName,
    RulesName,
    check_choices,
)
from offbeat.envs.games import checked_actions, from_all_games, new_streams
from offbeat.errors import EnvError

Obs = NDArray[np.int8]
Bools = NDArray[np.bool_]


class ColorLinesVectorEnv(VectorEnv[Obs, NDArray[np.int64], NDArray[Any]]):
    """N games of Color Lines, each starting again at the step after its end; see `env.ColorLinesEnv`.

    ``reset(seed=s)`` gives lane i the stream of random numbers that ``reset(seed=s + i)`` gives a single
    game; a sequence of seeds gives each lane its own. A game is cut off after ``max_episode_steps``.
    """

    metadata = {  # noqa: RUF012
        "render_modes": RENDER_MODES,
        "render_fps": 4,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        rules: RulesName = "classic",
        reward: RewardName = "score",
        gamma: float = 0.99,
        max_episode_steps: int = MAX_EPISODE_STEPS,
        render_mode: str | None = None,
    ) -> None:
        _check(num_envs, max_episode_steps)
        check_choices(rules, reward, gamma)
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_observation_space = observation_space()
        self.single_action_space = Moves()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._rules = RULES[rules]
        self._reward = REWARDS.index(reward)
        self._gamma = float(gamma)
        self._max_steps = max_episode_steps
        self._obs = np.zeros((num_envs, OBS_SIZE), np.int8)
        self._streams = np.zeros(num_envs, np.uint64)
        self._steps = np.zeros(num_envs, np.int64)
        self._scores = np.zeros(num_envs, np.int64)
        self._potentials = np.zeros(num_envs)
        self._is_over = np.zeros(num_envs, np.bool_)
        self._last_actions = np.full(num_envs, -1)
        self._is_seeded = False

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: Info | None = None
    ) -> tuple[Obs, Info]:
        """Start a game everywhere; without a seed, the streams of random numbers go on."""
        super().reset(seed=int(seed) if isinstance(seed, (int, np.integer)) else None)
        if seed is not None or not self._is_seeded:
            self._streams = new_streams(seed, self.num_envs, self.np_random)
            self._is_seeded = True
        kernels.reset_all(
            self._obs, self._streams, self._potentials, self._rules.num_start_balls, self._reward
        )
        self._steps[:] = 0
        self._scores[:] = 0
        self._is_over[:] = False
        self._last_actions[:] = -1
        return self._obs.copy(), self._info(np.zeros(self.num_envs, np.int64), self._falses())

    def step(self, actions: NDArray[np.int64]) -> tuple[Obs, NDArray[np.float64], Bools, Bools, Info]:
        """Make a move in each game; where one has ended, start the next."""
        actions = self._checked(actions)
        rewards, cleared = np.empty(self.num_envs), np.empty(self.num_envs, np.int64)
        terminated, truncated, illegal = self._falses(), self._falses(), self._falses()
        self._last_actions = np.where(self._is_over, -1, actions)
        kernels.step_all(
            self._obs,
            self._streams,
            actions,
            self._steps,
            self._scores,
            self._potentials,
            self._is_over,
            rewards,
            terminated,
            truncated,
            cleared,
            illegal,
            self._rules.num_start_balls,
            self._rules.clears_drops,
            self._rules.drops_what_fits,
            self._reward,
            self._gamma,
            self._max_steps,
        )
        self._last_actions[illegal] = -1
        return self._obs.copy(), rewards, terminated, truncated, self._info(cleared, illegal)

    def action_masks(self) -> Bools:
        """The legal moves ``[N, 6561]``, under the name by which sb3-contrib asks for them."""
        return Moves().legal(self._obs)

    def render(self) -> tuple[Any, ...] | None:
        """One text or picture per game."""
        from offbeat.envs.colorlines import rendering  # most games are played unseen

        draw = {"ansi": rendering.text, "rgb_array": rendering.picture}.get(self.render_mode or "")
        if draw is None:
            return None
        moves = [None if action < 0 else divmod(action, NUM_CELLS) for action in self._last_actions.tolist()]
        games = zip(self._obs, self._scores.tolist(), moves, strict=True)
        return tuple(draw(obs, score, move) for obs, score, move in games)

    def _checked(self, actions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._is_seeded:
            raise EnvError("Color Lines was stepped before a game had started; call reset() first")
        return checked_actions(actions, self._is_over, NUM_ACTIONS, "Color Lines")

    def _falses(self) -> Bools:
        return np.zeros(self.num_envs, np.bool_)

    def _info(self, cleared: NDArray[np.int64], illegal: Bools) -> Info:
        infos = {"score": self._scores.copy(), "cleared": cleared, "illegal": illegal}
        return from_all_games(infos, self.num_envs)


def _check(num_envs: int, max_episode_steps: int) -> None:
    if not kernels.IS_COMPILED:
        raise EnvError(
            "many games of Color Lines at once need numba: "
            'pip install "offbeat[numba]" and unset OFFBEAT_NUMBA, or set env.vectorize=loop'
        )
    if num_envs < 1 or max_episode_steps < 1:
        raise EnvError(
            f"{num_envs} games of at most {max_episode_steps} steps; both numbers must be at least 1"
        )
