"""Color Lines, one game at a time, in plain Python."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from offbeat.envs.colorlines.moves import Moves
from offbeat.envs.colorlines.rules import (
    ILLEGAL_REWARD,
    NUM_ACTIONS,
    NUM_CELLS,
    NUM_COLOURS,
    OBS_SIZE,
    RULES,
    STEP_REWARD,
    Game,
    RewardName,
    RulesName,
    Stream,
    can_move,
    check_choices,
    potential,
)
from offbeat.errors import EnvError

Obs = NDArray[np.int8]
Info = dict[str, Any]
RENDER_MODES = ["ansi", "rgb_array"]


def observation_space() -> gymnasium.spaces.Box[np.int8]:
    """81 cells row by row (0 empty, 1 to 7 a colour), then the three colours that come next."""
    return gymnasium.spaces.Box(0, NUM_COLOURS, (OBS_SIZE,), np.int8)


class ColorLinesEnv(gymnasium.Env[Obs, np.int64]):
    """Color Lines; the page color-lines in the documentation has its rules.

    ``rules`` are "classic" or "seed". ``reward`` is "score" (the points of the step), "seed" (points, or 0.1
    without) or "shaped" (points and the change of `rules.potential`, discounted with ``gamma``, which must be
    the algorithm's own: then it changes no optimal policy). An illegal move costs 10 and changes nothing.

    Infos hold ``score`` (of the game so far), ``cleared`` (balls that vanished in the step) and ``illegal``.
    """

    metadata = {"render_modes": RENDER_MODES, "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        rules: RulesName = "classic",
        reward: RewardName = "score",
        gamma: float = 0.99,
        render_mode: str | None = None,
    ) -> None:
        check_choices(rules, reward, gamma)
        self.observation_space = observation_space()
        self.action_space = Moves()
        self.render_mode = render_mode
        self._game = Game(RULES[rules], Stream(0))
        self._is_seeded = False
        self._reward = reward
        self._gamma = gamma
        self._potential = 0.0
        self._score = 0
        self._last_move: tuple[int, int] | None = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        """Start a game; with a seed from its stream of random numbers, else going on with the present one."""
        super().reset(seed=seed)
        if seed is not None or not self._is_seeded:
            self._game.stream = Stream(int(self.np_random.integers(1 << 63)) if seed is None else seed)
            self._is_seeded = True
        self._game.start()
        self._score = 0
        self._potential = self._measure()
        self._last_move = None
        return self._observe(), self._info(0, False)

    def step(self, action: int | np.int64) -> tuple[Obs, float, bool, bool, Info]:
        """Make a move; the game is over when the board is full."""
        if not 0 <= action < NUM_ACTIONS:
            raise EnvError(f"{action} is no action of Color Lines; give one of 0 to {NUM_ACTIONS - 1}")
        source, target = divmod(int(action), NUM_CELLS)
        is_legal = can_move(self._game.board, source, target)
        points, num_cleared = self._game.move(source, target) if is_legal else (0, 0)
        self._score += points
        self._last_move = (source, target) if is_legal else None
        reward = self._shape(self._base_reward(points) if is_legal else ILLEGAL_REWARD)
        return self._observe(), reward, self._game.is_over, False, self._info(num_cleared, not is_legal)

    def action_masks(self) -> NDArray[np.bool_]:
        """The legal moves ``[6561]``, under the name by which sb3-contrib asks for them."""
        return Moves().legal(self._observe())

    def render(self) -> Any:
        """The board as text ("ansi") or as a picture ``[460, 400, 3]`` of bytes ("rgb_array")."""
        from offbeat.envs.colorlines import rendering  # most games are played unseen

        if self.render_mode == "ansi":
            return rendering.text(self._observe(), self._score, self._last_move)
        if self.render_mode == "rgb_array":
            return rendering.picture(self._observe(), self._score, self._last_move)
        gymnasium.logger.warn(f"render() needs a render_mode: make the game with one of {RENDER_MODES}")
        return None

    def _base_reward(self, points: int) -> float:
        return STEP_REWARD if self._reward == "seed" and points == 0 else float(points)

    def _shape(self, reward: float) -> float:
        if self._reward != "shaped":
            return reward
        before, self._potential = self._potential, self._measure()
        return reward + self._gamma * self._potential - before

    def _measure(self) -> float:
        if self._reward != "shaped" or self._game.is_over:
            return 0.0
        return potential(self._game.board)

    def _observe(self) -> Obs:
        return np.array(self._game.board + self._game.coming, np.int8)

    def _info(self, num_cleared: int, is_illegal: bool) -> Info:
        return {"score": self._score, "cleared": num_cleared, "illegal": is_illegal}
