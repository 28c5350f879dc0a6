"""Connect Four, one game at a time, in plain Python."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.envs.colorlines.rules import Stream
from offbeat.envs.connect4.rules import (
    BEGINS,
    LOSS_REWARD,
    NO_OPPONENT,
    NUM_COLUMNS,
    NUM_ROWS,
    RANDOM_OPPONENT,
    STRIDE,
    WIN_REWARD,
    BeginsName,
    Game,
    TiesName,
    read_options,
)
from offbeat.errors import EnvError

Obs = NDArray[np.float32]
Info = dict[str, Any]
OBS_SHAPE = (3, NUM_ROWS, NUM_COLUMNS)
RENDER_MODES = ["ansi", "rgb_array"]

_CELLS = [[STRIDE * column + row for column in range(NUM_COLUMNS)] for row in reversed(range(NUM_ROWS))]


class Columns(gymnasium.spaces.Discrete[np.int64]):
    """The columns 0 to 6 from left to right; the space knows which of them have room.

    ``num_players`` is 2 where the players take turns at the actions, 1 where an opponent answers each.

    Example: ``Columns().legal(obs)`` is ``[N, 7]`` for observations ``[N, 3, 6, 7]``.
    """

    def __init__(self, num_players: int = 2, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(NUM_COLUMNS, seed)
        self.num_players = num_players

    def legal(self, obs: NDArray[Any]) -> NDArray[np.bool_]:
        """Which columns ``[..., 7]`` have room on the boards of observations ``[..., 3, 6, 7]``.

        A full board gets all True: whoever chooses needs something to choose.
        """
        if obs.shape[-3:] != OBS_SHAPE:
            raise EnvError(f"observations of Connect Four are [..., 3, 6, 7], these are {list(obs.shape)}")
        legal: NDArray[np.bool_] = (obs[..., 0, 0, :] + obs[..., 1, 0, :]) < 0.5
        return legal | ~legal.any(axis=-1, keepdims=True)

    def __repr__(self) -> str:
        return f"Columns(num_players={self.num_players})"


def observation_space() -> gymnasium.spaces.Box[np.float32]:
    """Three planes of 6 rows, the top one first, and 7 columns: own stones, the other's, and who one is.

    The last is all 1 for the first player and all 0 for the second: a network of small filters cannot count
    the stones, and who has the last word on the cells that are left depends on it.
    """
    return gymnasium.spaces.Box(0.0, 1.0, OBS_SHAPE, np.float32)


class Connect4Env(gymnasium.Env[Obs, np.int64]):
    """Connect Four for two players who take turns, or against an ``opponent``.

    With ``opponent="none"`` every step is one stone. Observations are those of the player to move, and the
    reward is that of the player who moved: 1 for a win, else 0, so that what the one wins the other loses.

    With "random" or "minimax:D" (D plies ahead) the agent's stone is answered within the step; observations
    are always the agent's, and the reward is 1 for a game won, -1 for one lost, else 0. ``begins`` says who
    has the first move: "agent", "opponent", "random", or "alternate": the agent in the first game after an
    even seed, the opponent after an odd one, then in turn. ``ties`` is how a minimax chooses among equal
    columns: at "random", or the one nearest to the "centre".

    ``random_plies`` stones are dropped at random before anyone's move, so that games differ. To choose a full
    column loses the game at once: reward -1, the board stays as it is.

    Infos hold ``action_mask`` (the columns that have room), ``to_play`` (0 or 1: the player whose view the
    observation is) and ``illegal``.
    """

    metadata = {"render_modes": RENDER_MODES, "render_fps": 2}  # noqa: RUF012

    def __init__(
        self,
        opponent: str = "none",
        begins: BeginsName = "alternate",
        random_plies: int = 0,
        ties: TiesName = "random",
        render_mode: str | None = None,
    ) -> None:
        self._options = read_options(opponent, begins, random_plies, ties)
        self.observation_space = observation_space()
        self.action_space = Columns(2 if self._options.opponent == NO_OPPONENT else 1)
        self.render_mode = render_mode
        self._game = Game()
        self._stream = Stream(0)
        self._is_seeded = False
        self._agent = 0
        self._is_agents_turn = True
        self._last: int | None = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        """Start a game; with a seed from its stream of random numbers, else going on with the present one."""
        super().reset(seed=seed)
        if seed is not None or not self._is_seeded:
            seed = int(self.np_random.integers(1 << 63)) if seed is None else int(seed)
            self._stream = Stream(seed)
            self._is_agents_turn = seed % 2 == 0
            self._is_seeded = True
        self._game.start()
        self._last = None
        for _ in range(self._options.random_plies):
            self._play(self._random_column())
        if self._options.opponent != NO_OPPONENT:
            self._begin()
        return self._observe(), self._info(False)

    def step(self, action: int | np.int64) -> tuple[Obs, float, bool, bool, Info]:
        """Drop a stone, and let the opponent drop his if there is one."""
        if not self._is_seeded:
            raise EnvError("Connect Four was stepped before a game had started; call reset() first")
        if not 0 <= action < NUM_COLUMNS:
            raise EnvError(f"{action} is no action of Connect Four; give one of 0 to {NUM_COLUMNS - 1}")
        if action not in self._game.open_columns():
            return self._observe(), LOSS_REWARD, True, False, self._info(True)
        reward = WIN_REWARD if self._play(int(action)) else 0.0
        has_opponent = self._options.opponent != NO_OPPONENT
        if not reward and has_opponent and not self._game.is_full and self._play(self._reply()):
            reward = LOSS_REWARD
        is_over = reward != 0.0 or self._game.is_full
        return self._observe(), reward, is_over, False, self._info(False)

    def action_masks(self) -> NDArray[np.bool_]:
        """The columns ``[7]`` that have room, under the name by which sb3-contrib asks for them."""
        return Columns().legal(self._observe())

    def render(self) -> Any:
        """The board as text ("ansi") or as a picture ``[364, 424, 3]`` of bytes ("rgb_array")."""
        from offbeat.envs.connect4 import rendering  # most games are played unseen

        first, second = self._game.stones
        if self.render_mode == "ansi":
            has_opponent = self._options.opponent != NO_OPPONENT
            return rendering.text(first, second, self._last, self._agent if has_opponent else None)
        if self.render_mode == "rgb_array":
            return rendering.picture(first, second, self._last)
        gymnasium.logger.warn(f"render() needs a render_mode: make the game with one of {RENDER_MODES}")
        return None

    def _begin(self) -> None:
        begins = BEGINS[self._options.begins]
        is_first = begins == "agent"
        if begins == "alternate":
            is_first = self._is_agents_turn
            self._is_agents_turn = not is_first
        elif begins == "random":
            is_first = self._stream.below(2) == 0
        self._agent = self._game.to_play if is_first else 1 - self._game.to_play
        if not is_first:
            self._play(self._reply())

    def _play(self, column: int) -> bool:
        self._last = column
        return self._game.play(column)

    def _random_column(self) -> int:
        columns = self._game.open_columns()
        return columns[self._stream.below(len(columns))]

    def _reply(self) -> int:
        """The opponent's choice."""
        if self._options.opponent == RANDOM_OPPONENT:
            return self._random_column()
        from offbeat.envs.connect4.minimax import best_moves, centre_most  # it imports numba

        player, stones = self._game.to_play, self._game.stones
        scores = best_moves(stones[player], stones[1 - player], self._options.opponent)
        if self._options.centre_first:
            return centre_most(scores)
        best = np.flatnonzero(scores == scores.max())
        return int(best[self._stream.below(len(best))])

    def _view(self) -> int:
        return self._game.to_play if self._options.opponent == NO_OPPONENT else self._agent

    def _observe(self) -> Obs:
        player = self._view()
        obs = np.empty(OBS_SHAPE, np.float32)
        for plane, stones in enumerate((self._game.stones[player], self._game.stones[1 - player])):
            obs[plane] = [[stones >> cell & 1 for cell in row] for row in _CELLS]
        obs[2] = 1 - player
        return obs

    def _info(self, is_illegal: bool) -> Info:
        columns = self._game.open_columns() or list(range(NUM_COLUMNS))
        mask = np.zeros(NUM_COLUMNS, np.int8)
        mask[columns] = 1
        return {"action_mask": mask, "to_play": self._view(), "illegal": is_illegal}
