"""Connect Four by self-play: how strong is it after training here?

Trains ``connect4-muzero``, then plays its last weights against opponents that know the rules: any column,
and minimax of growing depth. Games begin after four random stones, players take turns at going first. Of
equal moves minimax takes any (``random``), or the one nearest the centre (``centre``), which plays better:
both are told.

Bars: more than 60 % of 200 games won against minimax of depth 3 with ``random`` ties, more than 98 % against
random columns; training took at most 90 minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from common import ONE_THREAD, conclude, offbeat_command, parser, say

from offbeat.checkpoint import CheckpointManager
from offbeat.envs.connect4.baselines import play_games
from offbeat.observe.events import read_rounds
from offbeat.run import start

BAR_MINIMAX, BAR_RANDOM, BAR_MINUTES = 0.6, 0.98, 90.0
OPPONENTS = ("random", *(f"minimax:{depth}" for depth in range(1, 7)))
TIES: tuple[Literal["random", "centre"], ...] = ("random", "centre")


def train(run_dir: Path, settings: list[str]) -> None:
    """Train as a user would."""
    command = [*offbeat_command(), "train", "connect4-muzero", f"run.dir={run_dir}"]
    quiet = ["observe.console=none", "observe.tensorboard=false"]
    subprocess.run([*command, *quiet, *settings], env={**os.environ, **ONE_THREAD}, check=True)


def play(run_dir: Path, games: int) -> dict[str, dict[str, dict[str, float]]]:
    """Shares of games won and drawn, by opponent and by how it decides between equal moves."""
    weights = CheckpointManager(run_dir / "checkpoints").load().weights
    player = start.make_roles(start.load_for_resume(run_dir, ())).policy(weights)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for opponent in OPPONENTS:
        found[opponent] = {}
        for ties in TIES if opponent != "random" else TIES[:1]:
            results = play_games(player, opponent, games, ties=ties, seed=1)
            won, drawn = float((results > 0).mean()), float((results == 0).mean())
            found[opponent][ties] = {"won": won, "drawn": drawn}
            say(f"against {opponent:10} (ties: {ties:6}): won {won:6.1%}, drawn {drawn:5.1%}")
    return found


def main() -> int:
    options_of = parser(__doc__)
    options_of.add_argument("--games", type=int, default=200)
    options_of.add_argument("--run", type=Path, help="play this run's weights instead of training")
    options_of.add_argument("--set", action="append", metavar="KEY=VALUE", help="a setting of the run")
    options = options_of.parse_args()
    settings = options.set or []
    if options.quick:
        settings, options.games = [*settings, "run.rounds=3", "eval.interval_rounds=null"], 8
    with tempfile.TemporaryDirectory(prefix="offbeat-connect4-") as scratch:
        run_dir = options.run or Path(scratch) / "run"
        if options.run is None:
            train(run_dir, settings)
        last = read_rounds(run_dir / "events.jsonl")[-1]["metrics"]
        minutes = last["time/elapsed_s"] / 60
        games = play(run_dir, options.games)
    holds = (
        games["minimax:3"]["random"]["won"] > BAR_MINIMAX
        and games["random"]["random"]["won"] > BAR_RANDOM
        and minutes <= BAR_MINUTES
    )
    figures = {"minutes": minutes, "env_steps": last["rollout/total_env_steps"], "games": games}
    return conclude(figures, options.quick or holds, options)


if __name__ == "__main__":
    sys.exit(main())
