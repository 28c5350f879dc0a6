"""Learning with the dial open: what k = 4 and k = 8 cost per sample, on CartPole and Acrobot.

Trains ``cartpole-ppo`` (45 rounds, k = 0, 4, 8) and the same on Acrobot-v1 (40 rounds, k = 0, 4) in
processes, each with the seeds 201, 202, ... Told of each run: AUC, the mean over rounds of the mean return of
the last 100 episodes; that return at the end (of samples that are up to k versions old); the last evaluation,
20 episodes with the most likely actions and 20 with drawn ones; the largest KL to the policy that acted, and
the least effective sample size, of a round. It counts samples, not time: the machine's load changes little.

To compare, and without a bar: settings with -before open the dial at once and do not bound the way from the
policy that acted; those with -gae clip against that policy instead, and are trained with ``--only`` alone.

Bars: every CartPole run evaluates at 475 or more; mean AUC at k = 4 is at least 0.8 of that at k = 0. On
Acrobot at k = 4 median AUC is at most 25 lower than at k = 0, at most one more seed is slow (AUC below -300),
and at most one seed less evaluates at -120 or more with drawn actions.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import conclude, median, parser, say
from seeds import Figures, Finished, add_options, measured

FIRST_SEED = 201
COMMON = ("run.stop_return=null", "runtime.kind=processes", "eval.episodes=20", "checkpoint.enabled=false")
CARTPOLE = ("cartpole-ppo", "run.rounds=45", *COMMON)
ACROBOT = ("cartpole-ppo", "env.id=Acrobot-v1", "run.rounds=40", *COMMON)
BEFORE = ("async_training.open_rounds=0", "algorithm.behaviour_clip=null")
GAE = ("algorithm.correction=gae", "algorithm.clip_coef=0.4")
JUDGED = {
    **{f"cartpole-{k}": (*CARTPOLE, f"async_training.off_policy_degree={k}") for k in (0, 4, 8)},
    **{f"acrobot-{k}": (*ACROBOT, f"async_training.off_policy_degree={k}") for k in (0, 4)},
}
COMPARED = {
    f"{name}-{other}": (*JUDGED[name], *changes)
    for name in ("cartpole-4", "cartpole-8", "acrobot-4")
    for other, changes in (("before", BEFORE), ("gae", GAE))
}
BAR_RETURN, BAR_AUC = 475.0, 0.8
BAR_LOWER, BAR_SLOW, BAR_DRAWN = 25.0, -300.0, -120.0


def judge(run: Finished) -> Figures:
    """What a run came to."""
    rounds, evaluation = run.rounds(), run.evaluations()[-1]
    returns = [found["rollout/return_mean_100"] for found in rounds]
    known = [value for value in returns if value is not None and value == value]
    figures = {
        "auc": sum(known) / len(known),
        "last_100": known[-1],
        "return": evaluation["eval/return_mean"],
        "return_drawn": evaluation["eval/return_mean_sampled"],
        "largest_kl": max(found["learn/behaviour_kl"] for found in rounds),
        "least_ess": min(found["learn/ess"] for found in rounds),
        "mean_age": sum(found["pace/avg_sample_age"] for found in rounds) / len(rounds),
    }
    say(
        f"{run.name:20} seed {run.seed}: "
        + ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
    )
    return figures


def summary(results: Sequence[Figures]) -> dict[str, float]:
    """The figures of a setting's seeds."""

    def values(name: str) -> list[float]:
        return [result[name] for result in results]

    auc = values("auc")
    return {
        "auc_mean": sum(auc) / len(auc),
        "auc_median": median(auc),
        "auc_least": min(auc),
        "slow_seeds": sum(value < BAR_SLOW for value in auc),
        "last_100_least": min(values("last_100")),
        "evaluate_at_475": sum(value >= BAR_RETURN for value in values("return")),
        "return_least": min(values("return")),
        "drawn_at_minus_120": sum(value >= BAR_DRAWN for value in values("return_drawn")),
        "largest_kl": max(values("largest_kl")),
        "least_ess": min(values("least_ess")),
    }


def bars(found: Mapping[str, Mapping[str, float]], seeds: int) -> dict[str, bool]:
    """Which bars hold, of those whose settings were trained."""
    held = {}
    for k in (4, 8):
        if f"cartpole-{k}" in found:
            held[f"cartpole, k = {k}: 475 with every seed"] = (
                found[f"cartpole-{k}"]["evaluate_at_475"] == seeds
            )
    if {"cartpole-0", "cartpole-4"} <= found.keys():
        strict, opened = found["cartpole-0"], found["cartpole-4"]
        held["cartpole, k = 4: AUC"] = opened["auc_mean"] >= BAR_AUC * strict["auc_mean"]
    if {"acrobot-0", "acrobot-4"} <= found.keys():
        strict, opened = found["acrobot-0"], found["acrobot-4"]
        held["acrobot: median AUC"] = opened["auc_median"] >= strict["auc_median"] - BAR_LOWER
        held["acrobot: slow seeds"] = opened["slow_seeds"] <= strict["slow_seeds"] + 1
        held["acrobot: drawn actions"] = opened["drawn_at_minus_120"] >= strict["drawn_at_minus_120"] - 1
    return held


def main() -> int:
    options_of = parser(__doc__)
    add_options(options_of, [*JUDGED, *COMPARED])
    options_of.set_defaults(seeds=8)
    options = options_of.parse_args()
    if options.quick:
        options.seeds = 1
        options.set = [*(options.set or []), "run.rounds=12", "eval.episodes=2"]
        options.only = options.only or ["cartpole-4", "acrobot-4"]
    chosen = options.only or [name for name in (*JUDGED, *COMPARED) if not name.endswith("-gae")]
    settings = {name: {**JUDGED, **COMPARED}[name] for name in chosen}
    with tempfile.TemporaryDirectory(prefix="offbeat-dial-") as scratch:
        runs = measured(settings, options, options.keep or Path(scratch), judge, FIRST_SEED)
    found: dict[str, Any] = {name: summary(results) for name, results in runs.items()}
    for name, figures in found.items():
        say(f"{name:20} " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    held = bars(found, options.seeds)
    for bar, holds in held.items():
        say(f"{bar}: {'holds' if holds else 'does not hold'}")
    figures = {"seeds": options.seeds, "first_seed": FIRST_SEED, "bars": held, "summary": found, "runs": runs}
    return conclude(figures, options.quick or all(held.values()), options)


if __name__ == "__main__":
    sys.exit(main())
