"""Connect Four, many games at once in compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from offbeat.envs.connect4 import kernels
from offbeat.envs.connect4.env import OBS_SHAPE, RENDER_MODES, Columns, Info, Obs, observation_space
from offbeat.envs.connect4.rules import NO_OPPONENT, NUM_COLUMNS, BeginsName, TiesName, read_options
from offbeat.envs.games import checked_actions, from_all_games, new_streams
from offbeat.errors import EnvError

Bools = NDArray[np.bool_]


class Connect4VectorEnv(VectorEnv[Obs, NDArray[np.int64], NDArray[Any]]):
    """N games of Connect Four, each starting again at the step after its end; see `env.Connect4Env`.

    ``reset(seed=s)`` gives lane i the stream of random numbers that ``reset(seed=s + i)`` gives a single
    game, so that under ``begins="alternate"`` agent and opponent begin in every other lane; a sequence of
    seeds gives each lane its own. Without numba it works, and slowly.
    """

    metadata = {  # noqa: RUF012
        "render_modes": RENDER_MODES,
        "render_fps": 2,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        opponent: str = "none",
        begins: BeginsName = "alternate",
        random_plies: int = 0,
        ties: TiesName = "random",
        render_mode: str | None = None,
    ) -> None:
        if num_envs < 1:
            raise EnvError(f"{num_envs} games of Connect Four; there must be at least 1")
        options = read_options(opponent, begins, random_plies, ties)
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_observation_space = observation_space()
        self.single_action_space = Columns(2 if options.opponent == NO_OPPONENT else 1)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._options = options
        self._stones = np.zeros((num_envs, 2), np.int64)
        self._plies = np.zeros(num_envs, np.int64)
        self._last = np.full(num_envs, -1, np.int64)
        self._agents = np.zeros(num_envs, np.int64)
        self._is_agents_turn = np.ones(num_envs, np.bool_)
        self._streams = np.zeros(num_envs, np.uint64)
        self._is_over = np.zeros(num_envs, np.bool_)
        self._is_seeded = False

    @property
    def to_play(self) -> NDArray[np.int64]:
        """Whose view the observations are ``[N]``: 0 for the first player, 1 for the second."""
        return self._plies % 2 if self._options.opponent == NO_OPPONENT else self._agents.copy()

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: Info | None = None
    ) -> tuple[Obs, Info]:
        """Start a game everywhere; without a seed, the streams of random numbers go on."""
        super().reset(seed=int(seed) if isinstance(seed, (int, np.integer)) else None)
        if seed is not None or not self._is_seeded:
            self._streams = new_streams(seed, self.num_envs, self.np_random)
            self._is_agents_turn = self._streams % np.uint64(2) == 0
            self._is_seeded = True
        self._is_over[:] = False
        with np.errstate(over="ignore"):  # random numbers wrap around, which plain numpy warns of
            kernels.reset_all(
                self._stones,
                self._plies,
                self._last,
                self._agents,
                self._is_agents_turn,
                self._streams,
                self._options.opponent,
                self._options.begins,
                self._options.random_plies,
                self._options.centre_first,
            )
        return self._show(np.zeros(self.num_envs, np.bool_))

    def step(self, actions: NDArray[np.int64]) -> tuple[Obs, NDArray[np.float64], Bools, Bools, Info]:
        """Drop a stone in each game; where one has ended, start the next."""
        actions = self._checked(actions)
        rewards, illegal = np.empty(self.num_envs), np.empty(self.num_envs, np.bool_)
        with np.errstate(over="ignore"):
            kernels.step_all(
                self._stones,
                self._plies,
                self._last,
                self._agents,
                self._is_agents_turn,
                self._streams,
                self._is_over,
                actions,
                rewards,
                illegal,
                self._options.opponent,
                self._options.begins,
                self._options.random_plies,
                self._options.centre_first,
            )
        obs, infos = self._show(illegal)
        return obs, rewards, self._is_over.copy(), np.zeros(self.num_envs, np.bool_), infos

    def action_masks(self) -> Bools:
        """The columns ``[N, 7]`` that have room, under the name by which sb3-contrib asks for them."""
        return Columns().legal(self._show(self._is_over)[0])

    def render(self) -> tuple[Any, ...] | None:
        """One text or picture per game."""
        from offbeat.envs.connect4 import rendering  # most games are played unseen

        lasts = [None if column < 0 else column for column in self._last.tolist()]
        if self.render_mode == "ansi":
            has_opponent = self._options.opponent != NO_OPPONENT
            agents = self._agents.tolist() if has_opponent else [None] * self.num_envs
            return tuple(map(rendering.text, *self._stones.T.tolist(), lasts, agents))
        if self.render_mode == "rgb_array":
            return tuple(map(rendering.picture, *self._stones.T.tolist(), lasts))
        return None

    def _show(self, illegal: Bools) -> tuple[Obs, Info]:
        obs = np.empty((self.num_envs, *OBS_SHAPE), np.float32)
        masks = np.empty((self.num_envs, NUM_COLUMNS), np.int8)
        to_play = np.empty(self.num_envs, np.int64)
        kernels.show_all(self._stones, self._plies, self._agents, self._options.opponent, obs, masks, to_play)
        infos = {"action_mask": masks, "to_play": to_play, "illegal": illegal}
        return obs, from_all_games(infos, self.num_envs)

    def _checked(self, actions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._is_seeded:
            raise EnvError("Connect Four was stepped before a game had started; call reset() first")
        return checked_actions(actions, self._is_over, NUM_COLUMNS, "Connect Four")
