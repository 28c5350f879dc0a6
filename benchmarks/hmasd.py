"""Skills for teams: how often HMASD solves its tasks, seed by seed, and what MAPPO makes of the same.

``python benchmarks/hmasd.py --seeds 5`` trains ``alice-bob-hmasd`` with the settings of its paper (3 million
environment steps) once for each seed, and then plays ``--games`` episodes with the last weights. Runs end for
good or not at all, so what counts is how many seeds end well, not a mean. ``--also mappo``, ``--also async``,
``--also lbf-mappo`` train more beside it; ``--only`` trains others instead. ``--jobs 2`` runs two seeds at
a time. Processor time is that of a run with all its processes. Beside each stands what agents get that act
at random. With ``--out FILE`` the figures are kept; ``benchmarks/figures.py --only skills`` draws them.

Bars: with at least three of five seeds 90 % of the episodes are solved, and no seed takes more than 40
processor minutes; where foraging is trained, each seed gets 30 % of all food more than random actions do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import conclude, median, offbeat_command, parser, say
from seeds import Figures, Finished, add_options, measured

import offbeat
from offbeat.checkpoint import CheckpointManager
from offbeat.envs.teams import make_team, random_actions
from offbeat.roles import WorkerContext
from offbeat.run import start

RECIPES = {
    "hmasd": ("alice-bob-hmasd",),
    "async": ("alice-bob-hmasd-async",),
    "mappo": ("alice-bob-mappo",),
    "lbf-hmasd": ("lbf-coop-hmasd",),
    "lbf-mappo": ("lbf-coop-mappo",),
    "spread-mappo": ("mpe-spread-mappo",),
}
"""What each is trained with."""
BAR_SUCCESS, BAR_SHARE, BAR_CPU_MIN = 0.9, 0.6, 40.0
BAR_ABOVE_RANDOM = 0.3


def judge(run_dir: Path, games: int) -> dict[str, float]:
    """Play the last weights of a run."""
    command = [*offbeat_command(), "eval", str(run_dir), "--episodes", str(games), "--seed", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    metrics: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["metrics"]
    kept = ("return_mean", "success_rate", "length_mean", "skill_diversity", "skill_discriminator_accuracy")
    return {name: metrics[f"eval/{name}"] for name in kept if f"eval/{name}" in metrics}


def judge_drawn(run_dir: Path, games: int) -> float:
    """Mean return of the same weights when actions are drawn and not the most likely ones."""
    wanted = ("eval.deterministic=false", f"eval.episodes={games}")
    config = start.load(run_dir / "config.yaml", wanted)
    evaluator = start.make_roles(config).evaluate.make(WorkerContext(collector=0, num_collectors=1, seed=1))
    weights = CheckpointManager(run_dir / "checkpoints").load().weights
    return float(evaluator.evaluate(weights, 1)["eval/return_mean"])


def play_randomly(recipe: str, games: int) -> float:
    """Mean return of teams that take any legal action with equal probability."""
    rng, team = np.random.default_rng(1), make_team(offbeat.load_config(recipe).env, games)
    view = team.reset(1)
    total, is_on = 0.0, np.ones(games, np.bool_)
    while is_on.any():
        step = team.step(random_actions(team, view, rng), is_on)
        total += float(step.rewards[is_on].sum())
        is_on &= ~(step.terminated | step.truncated)
        view = step.view
    team.close()
    return total / games


def curve(run: Finished) -> list[dict[str, float]]:
    """Evaluations of a run: environment steps, return and share of successes."""
    return [
        {
            "env_steps": found["env_steps"],
            "return": found["eval/return_mean"],
            "success": found.get("eval/success_rate", float("nan")),
        }
        for found in run.evaluations()
    ]


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges finished runs."""

    games: int

    def __call__(self, run: Finished) -> Figures:
        rounds = run.rounds()
        figures: Figures = {
            "cpu_minutes": run.cpu_s / 60,
            "wall_minutes": run.wall_s / 60,
            "env_steps": rounds[-1]["rollout/total_env_steps"],
            "first_ratio_max_dev": max(found["learn/first_ratio_max_dev"] for found in rounds),
            "max_staleness": max(found["pace/max_sample_age"] for found in rounds),
            **judge(run.directory, self.games),
            "return_drawn": judge_drawn(run.directory, self.games),
            "curve": curve(run),
        }
        say(
            f"{run.name:13} seed {run.seed}  {figures['cpu_minutes']:5.1f} CPU-min"
            f"  {figures['env_steps'] / 1e6:4.1f} M steps  return {figures['return_mean']:7.3f}"
            f"  success {figures.get('success_rate', float('nan')):5.2f}"
            f"  first ratio within {figures['first_ratio_max_dev']:.1e}"
        )
        return figures


def main() -> int:
    options_of = parser(__doc__)
    add_options(options_of, list(RECIPES))
    options_of.add_argument("--games", type=int, default=100, help="episodes that judge the last weights")
    options_of.add_argument("--also", action="append", choices=RECIPES, help="train these, too")
    options = options_of.parse_args()
    if options.quick:
        options.seeds, options.games = 1, 8
        options.set = [*(options.set or []), "run.rounds=3"]
    names = list(options.only or ["hmasd", *(options.also or [])])
    with tempfile.TemporaryDirectory(prefix="offbeat-hmasd-") as scratch:
        wanted = {name: RECIPES[name] for name in names}
        found = measured(wanted, options, options.keep or Path(scratch), Judge(options.games))
    at_random = {name: play_randomly(*RECIPES[name], 10 * options.games) for name in names}
    for name, results in found.items():
        scores = [result["return_mean"] for result in results]
        say(
            f"{name:13} return: median {median(scores):.2f} of {[round(score, 2) for score in scores]},"
            f" at random {at_random[name]:.3f}"
        )
    holds = meets_bars(found.get("hmasd", [])) and forages(found, at_random)
    return conclude(
        {"seeds": options.seeds, "at_random": at_random, "runs": found}, options.quick or holds, options
    )


def forages(found: dict[str, list[dict[str, Any]]], at_random: dict[str, float]) -> bool:
    """Every team that was trained to forage is far above random actions."""
    return all(
        result["return_mean"] >= at_random[name] + BAR_ABOVE_RANDOM
        for name, results in found.items()
        if name.startswith("lbf")
        for result in results
    )


def meets_bars(results: list[dict[str, Any]]) -> bool:
    """Enough seeds end well, none takes too long; true where the task was not trained."""
    good = sum(result["success_rate"] >= BAR_SUCCESS for result in results)
    longest = max((result["cpu_minutes"] for result in results), default=0.0)
    if results:
        say(
            f"bars: {good} of {len(results)} seeds solve {BAR_SUCCESS:.0%} of the episodes (at least"
            f" {BAR_SHARE:.0%} of the seeds), {longest:.1f} CPU-minutes at most (bar {BAR_CPU_MIN:g})"
        )
    return good >= BAR_SHARE * len(results) and longest <= BAR_CPU_MIN


if __name__ == "__main__":
    sys.exit(main())
