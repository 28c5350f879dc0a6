"""Planning on CartPole: how soon it is solved, whether it stays so, and what the open dial changes.

Trains ``cartpole-muzero`` (100,000 environment steps), ``cartpole-unizero`` and ``cartpole-unizero-async``
(30,000 each, k = 4, with reanalysis) with several seeds. Told of each run: environment steps and processor
seconds until an evaluation reaches 475 of 500, the mean of its last three evaluations, updates per
environment step, the time it took. Processor seconds at an evaluation are those of the run, as far as it
was by then. ``--keep DIR`` goes on where it was interrupted, ``--jobs 2`` runs two at a time: then the time
of runs does not count.

``--only minatar --only pendulum`` trains these recipes instead, which have no bar: their curves show what is
learned.

Then collecting alone: environment steps per processor second of ``cartpole-unizero`` with 64 environments
and 25 simulations, in one thread.

Bars: at least four of five seeds reach 475 and stay above 450, for ``muzero``, ``unizero`` and ``async``
alike; ``async`` makes as many updates per step as ``unizero`` and, one run at a time, takes less time;
collecting reaches 600 steps per second.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import conclude, median, parser, say
from seeds import Figures, Finished, add_options, measured

import offbeat
from offbeat.roles import SingleRank, WorkerContext
from offbeat.run import start
from offbeat.types import Ticket

RECIPES = {
    "muzero": ("cartpole-muzero",),
    "unizero": ("cartpole-unizero",),
    "async": ("cartpole-unizero-async",),
}
OTHERS = {
    "minatar": ("minatar-breakout-muzero",),
    "pendulum": ("pendulum-sampled-muzero",),
}
"""Those without a bar."""
BAR_REACHED, BAR_STAYS, BAR_SHARE, BAR_RATE = 475.0, 450.0, 0.8, 600.0
NUM_ENVS, NUM_SIMULATIONS = 64, 25


def judge(run: Finished) -> Figures:
    """What a run came to."""
    rounds, evaluations = run.rounds(), run.evaluations()
    last = rounds[-1]
    reached = next((found for found in evaluations if found["eval/return_mean"] >= BAR_REACHED), None)
    final = [found["eval/return_mean"] for found in evaluations[-3:]]
    cpu_per_s = run.cpu_s / last["time/elapsed_s"]
    figures = {
        "reached_at_steps": reached and reached["env_steps"],
        "reached_at_cpu_s": reached and reached["elapsed_s"] * cpu_per_s,
        "last_three": sum(final) / len(final),
        "env_steps": last["rollout/total_env_steps"],
        "updates_per_step": last["learn/updates_per_step"],
        "cpu_s": run.cpu_s,
        "train_s": last["time/elapsed_s"],
        "max_lag": max(found["pace/lag"] for found in rounds),
        "curve": [(found["env_steps"], found["eval/return_mean"]) for found in evaluations],
    }
    at = "never" if reached is None else f"at {reached['env_steps']:6.0f} steps"
    say(
        f"{run.name:8} seed {run.seed}: {BAR_REACHED:g} {at:>15}, last three {figures['last_three']:5.1f},"
        f" {figures['updates_per_step']:.4f} updates/step, {run.cpu_s:4.0f} CPU-s,"
        f" {figures['train_s']:4.0f} s"
    )
    return figures


def collecting(seconds: float) -> float:
    """Environment steps per processor second of one collector."""
    torch.set_num_threads(1)
    config = offbeat.load_config(
        *RECIPES["unizero"],
        overrides={"env.num_envs": NUM_ENVS, "algorithm.search.num_simulations": NUM_SIMULATIONS},
    )
    roles = start.make_roles(config)
    weights = roles.learner(SingleRank()).weights()
    collector = roles.collect.make(WorkerContext(collector=0, num_collectors=1, seed=1))
    collector.collect(Ticket(0, 0, 0, 0, 0), weights)
    started_s, steps, number = time.process_time(), 0, 0
    while time.process_time() - started_s < seconds:
        number += 1
        segment = collector.collect(Ticket(number, 0, 0, 0, number), weights)
        steps += int(segment.units["env_steps"])
    return steps / (time.process_time() - started_s)


def good(results: list[Figures]) -> int:
    """Seeds that reach the bar and stay there."""
    return sum(
        result["reached_at_steps"] is not None and result["last_three"] >= BAR_STAYS for result in results
    )


def main() -> int:
    options_of = parser(__doc__)
    add_options(options_of, [*RECIPES, *OTHERS])
    options = options_of.parse_args()
    if options.quick:
        options.seeds = 1
        options.set = [*(options.set or []), "run.rounds=4", "eval.interval_rounds=2", "eval.episodes=2"]
    recipes = {name: {**RECIPES, **OTHERS}[name] for name in options.only or RECIPES}
    with tempfile.TemporaryDirectory(prefix="offbeat-planning-") as scratch:
        found = measured(recipes, options, options.keep or Path(scratch), judge)
    rate = collecting(1.0 if options.quick else 10.0)
    say(f"collecting: {rate:.0f} steps per processor second (bar {BAR_RATE:g})")
    summary: dict[str, Any] = {}
    for name, results in found.items():
        reached = [result for result in results if result["reached_at_steps"] is not None]
        summary[name] = {
            "good_seeds": good(results),
            "median_steps": median([result["reached_at_steps"] for result in reached]) if reached else None,
            "median_cpu_s": median([result["reached_at_cpu_s"] for result in reached]) if reached else None,
            "median_train_s": median([result["train_s"] for result in results]),
            "updates_per_step": median([result["updates_per_step"] for result in results]),
        }
        say(f"{name:8} {summary[name]}")
    holds = rate >= BAR_RATE and all(
        good(results) >= BAR_SHARE * len(results) for name, results in found.items() if name in RECIPES
    )
    if "unizero" in summary and "async" in summary:
        ratios = [summary[name]["updates_per_step"] for name in ("unizero", "async")]
        holds = holds and abs(ratios[0] - ratios[1]) <= 0.01 * ratios[0]
        if all(result["jobs"] == 1 for name in ("unizero", "async") for result in found[name]):
            share = summary["async"]["median_train_s"] / summary["unizero"]["median_train_s"]
            say(f"async takes {share:.2f} of the time of unizero (bar: less than 1)")
            holds = holds and share < 1
    figures = {"seeds": options.seeds, "collecting": rate, "summary": summary, "runs": found}
    return conclude(figures, options.quick or holds, options)


if __name__ == "__main__":
    sys.exit(main())
