"""How fast Color Lines is, and how well its baselines play.

Speed. Games are played with random legal moves, many at once in the compiled version and one in the plain
one. Counted are the processor seconds of one thread for `step` and for the legal moves of every board as a
mask of 6561; choosing a move (a compiled draw among the legal ones) is counted apart. Blocks of both
versions and rule sets take turns; medians.

  Bar: at least 100,000 steps per CPU-second, masks included, on one core, for both rule sets.

Players. Each baseline plays games of both rule sets to their end, or to 1000 steps: mean score and its
standard error. For information.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from common import conclude, median, parser, say

from offbeat.envs.colorlines import ENV_ID
from offbeat.envs.colorlines.baselines import BASELINES, RandomMoves, play_games
from offbeat.envs.colorlines.env import ColorLinesEnv
from offbeat.envs.colorlines.moves import Moves
from offbeat.envs.colorlines.rules import RULES, RulesName
from offbeat.envs.colorlines.vector import ColorLinesVectorEnv

BAR = 100_000
Spent = dict[str, float]


class ManyGames:
    """The compiled version; a block is ``num_steps`` steps of all games."""

    def __init__(self, rules: RulesName, num_games: int, num_steps: int) -> None:
        self.num_games, self.num_steps = num_games, num_steps
        self._env = ColorLinesVectorEnv(num_games, rules=rules)
        self._obs, _ = self._env.reset(seed=0)
        self._moves, self._player = Moves(), RandomMoves(0)

    def time_block(self) -> Spent:
        """Processor seconds per step of one game, by part."""
        spent = {"step": 0.0, "mask": 0.0, "choose": 0.0}
        for _ in range(self.num_steps):
            started_s = time.thread_time()
            self._moves.legal(self._obs)
            masked_s = time.thread_time()
            actions = self._player.act(self._obs)
            chosen_s = time.thread_time()
            self._obs, *_ = self._env.step(actions)
            spent["mask"] += masked_s - started_s
            spent["choose"] += chosen_s - masked_s
            spent["step"] += time.thread_time() - chosen_s
        return {part: seconds / (self.num_steps * self.num_games) for part, seconds in spent.items()}


class OneGame:
    """The plain version; a block is ``num_steps`` steps."""

    def __init__(self, rules: RulesName, num_steps: int) -> None:
        self.num_steps = num_steps
        self._env = gymnasium.make(ENV_ID, rules=rules, disable_env_checker=True)
        self._obs, _ = self._env.reset(seed=0)
        self._player = RandomMoves(0)

    def time_block(self) -> Spent:
        """Processor seconds per step, by part."""
        game = self._env.unwrapped
        assert isinstance(game, ColorLinesEnv)
        spent = {"step": 0.0, "mask": 0.0}
        for _ in range(self.num_steps):
            action = self._player.act(self._obs)
            started_s = time.thread_time()
            game.action_masks()
            masked_s = time.thread_time()
            self._obs, _, terminated, truncated, _ = self._env.step(action)
            if terminated or truncated:
                self._obs, _ = self._env.reset()
            spent["mask"] += masked_s - started_s
            spent["step"] += time.thread_time() - masked_s
        return {part: seconds / self.num_steps for part, seconds in spent.items()}


def measure_speed(num_games: int, num_blocks: int, num_steps: int) -> dict[str, Any]:
    """Steps per CPU-second of each version and rule set, and what the parts of a step take."""
    contestants: dict[str, ManyGames | OneGame] = {}
    for rules in RULES:
        contestants[f"compiled, {rules}"] = ManyGames(rules, num_games, num_steps)
        contestants[f"plain, {rules}"] = OneGame(rules, 2 * num_steps)
    for contestant in contestants.values():
        contestant.time_block()  # compiles, and spreads the games over all stages
    blocks: dict[str, list[Spent]] = {name: [] for name in contestants}
    for _ in range(num_blocks):
        for name, contestant in contestants.items():
            blocks[name].append(contestant.time_block())
    return {name: _summary(spent) for name, spent in blocks.items()}


def _summary(blocks: list[Spent]) -> dict[str, float]:
    parts = {f"{part}_us": 1e6 * median([block[part] for block in blocks]) for part in blocks[0]}
    rate = median([1 / (block["step"] + block["mask"]) for block in blocks])
    return {"steps_per_cpu_s": rate, **parts}


def measure_players(num_games: int) -> dict[str, dict[str, float]]:
    """Mean score and standard error of each baseline under each rule set."""
    results = {}
    for rules in RULES:
        for name, make in BASELINES.items():
            scores = play_games(make(1), rules, num_games, seed=1)
            error = float(scores.std(ddof=1) / np.sqrt(num_games))
            results[f"{name}, {rules}"] = {"mean": float(scores.mean()), "standard_error": error}
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--games", type=int, default=256, help="games at once, when speed is measured (256)")
    made.add_argument("--score-games", type=int, default=200, help="games of each baseline (200)")
    options = made.parse_args(arguments)
    num_blocks, num_steps, score_games = (2, 10, 4) if options.quick else (15, 100, options.score_games)
    speed = measure_speed(options.games, num_blocks, num_steps)
    for name, figures in speed.items():
        parts = ", ".join(f"{part} {value:.2f}" for part, value in figures.items() if part.endswith("_us"))
        say(f"{name:20} {figures['steps_per_cpu_s']:>10,.0f} steps per CPU-s   ({parts})")
    scores = measure_players(score_games)
    for name, figures in scores.items():
        say(f"{name:20} {figures['mean']:>8.1f} +- {figures['standard_error']:.1f}")
    slowest = min(speed[f"compiled, {rules}"]["steps_per_cpu_s"] for rules in RULES)
    say(f"bar: {BAR:,} steps per CPU-s with masks; the slower rule set makes {slowest:,.0f}")
    figures = {"games": options.games, "score_games": score_games, "speed": speed, "scores": scores}
    return conclude(figures, slowest >= BAR, options)


if __name__ == "__main__":
    sys.exit(main())
