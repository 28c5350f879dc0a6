"""Color Lines: what PPO and PPO with prioritized replay learn in the same wall time, seed by seed.

``python benchmarks/colorlines.py --minutes 6 --seeds 3`` trains these in turn, each run for so many minutes
with nothing else on the machine, plays ``--games`` games with the last weights of each, and prints the scores
beside those of the baselines:

  ppo          ``colorlines-ppo``: no replay
  per          ``colorlines-ppo-per``: replayed segments train policy and value function
  per-critic   the same with ``per_for=critic``: they train the value function alone

Learning rates fall to 0 over the time there is: how many rounds that is, a short run of each tells first.

``--only per --seeds 1 --minutes 60`` is one long run. With ``--out FILE`` the figures and curves are kept;
``benchmarks/figures.py --only colorlines`` draws them.

Bar: every contestant's median beats the one-step greedy baseline.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import conclude, median, offbeat_command, parser, say

from offbeat.observe.events import read_events, read_rounds

CONTESTANTS = {
    "ppo": ("colorlines-ppo",),
    "per": ("colorlines-ppo-per",),
    "per-critic": ("colorlines-ppo-per", "algorithm.per_for=critic"),
}
"""What each is trained with: a recipe, and settings of its own."""
UNLIMITED = 1_000_000
STOP_S = 30.0


def train(name: str, run_dir: Path, seconds: float, *overrides: str) -> float:
    """Train for so many seconds, then stop as Ctrl-C does; return the seconds it really took."""
    settings = (f"run.dir={run_dir}", "observe.console=none", *overrides)
    command = [*offbeat_command(), "train", *CONTESTANTS[name], *settings]
    started_s = time.perf_counter()
    with open(run_dir.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=seconds)
            took_s = time.perf_counter() - started_s
            stop(process)
        finally:
            end(process)
    if not (run_dir / "checkpoints").exists():
        raise SystemExit(f"{name} left no checkpoint:\n{run_dir.with_suffix('.log').read_text()[-2000:]}")
    return took_s


def stop(process: subprocess.Popen[bytes], timeout_s: float = STOP_S) -> None:
    """Let a run save itself and end, as Ctrl-C does."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        say(f"the run did not end within {timeout_s:g} s of Ctrl-C and is killed")


def end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind: kill what is left of a run, its workers included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rounds_in(name: str, run_dir: Path, seconds: float, probe_s: float) -> int:
    """How many rounds a contestant makes in so many seconds, from a short run."""
    train(name, run_dir, probe_s, f"run.rounds={UNLIMITED}", "eval.at_end=false")
    elapsed_s = [float(found["metrics"]["time/elapsed_s"]) for found in read_rounds(run_dir / "events.jsonl")]
    half = len(elapsed_s) // 2  # the first rounds compile, and play short games
    return max(1, round(seconds * (len(elapsed_s) - 1 - half) / (elapsed_s[-1] - elapsed_s[half])))


def curve(run_dir: Path) -> list[dict[str, float]]:
    """Evaluations of a run: minutes, environment steps and mean score."""
    spent = {
        int(found["metrics"]["pace/train_count"]): (
            float(found["metrics"]["time/elapsed_s"]) / 60,
            float(found["metrics"]["rollout/total_env_steps"]),
        )
        for found in read_rounds(run_dir / "events.jsonl")
    }
    events = [event for event in read_events(run_dir / "events.jsonl") if event["kind"] == "eval"]
    found = [(int(event["metrics"]["eval/version"]), event["metrics"]) for event in events]
    return [
        {
            "minutes": spent[version][0],
            "env_steps": spent[version][1],
            "score": metrics["eval/return_mean"],
        }
        for version, metrics in found
        if version in spent
    ]


def judge(run_dir: Path, games: int) -> dict[str, float]:
    """Play the last weights of a run on so many games."""
    command = [*offbeat_command(), "eval", str(run_dir), "--episodes", str(games), "--seed", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    metrics = json.loads(done.stdout.splitlines()[-1])
    metrics = metrics.get("metrics", metrics)
    spread = metrics["eval/return_std"] / games**0.5
    return {
        "score": metrics["eval/return_mean"],
        "standard_error": spread,
        "length": metrics["eval/length_mean"],
    }


def baselines(games: int, rules: str) -> dict[str, float]:
    """Mean scores of the policies to compare with."""
    import numpy as np

    from offbeat.envs.colorlines.baselines import BASELINES, play_games

    return {
        name: float(np.mean(play_games(policy(seed=1), rules, games, seed=1)))
        for name, policy in BASELINES.items()
    }


def measure(options: Any, runs: Path) -> dict[str, Any]:
    """Train all runs in turn, and judge them."""
    seconds, overrides = options.minutes * 60, tuple(options.set or ())
    names = tuple(options.only or CONTESTANTS)
    planned = {name: rounds_in(name, runs / f"{name}-probe", seconds, options.probe_s) for name in names}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(1, options.seeds + 1):
        for name in names if seed % 2 else names[::-1]:
            run_dir = runs / f"{name}-{seed}"
            took_s = train(
                name,
                run_dir,
                seconds,
                f"run.seed={seed}",
                f"run.rounds={UNLIMITED}",
                f"algorithm.schedule_rounds={planned[name]}",
                "eval.at_end=false",
                *overrides,
            )
            last = read_rounds(run_dir / "events.jsonl")[-1]["metrics"]
            result = {
                "seed": seed,
                "minutes": took_s / 60,
                "rounds": int(last["pace/train_count"]),
                "env_steps": float(last["rollout/total_env_steps"]),
                **judge(run_dir, options.games),
                "curve": curve(run_dir),
            }
            found[name].append(result)
            say(
                f"{name:10} seed {seed}  {result['minutes']:5.1f} min"
                f"  {result['env_steps'] / 1e6:5.1f} M steps"
                f"  score {result['score']:6.1f} ± {result['standard_error']:.1f}"
            )
    return {"planned_rounds": planned, "runs": found}


def main() -> int:
    options_of = parser(__doc__)
    options_of.add_argument("--minutes", type=float, default=6.0, help="wall time of each run")
    options_of.add_argument("--seeds", type=int, default=3)
    options_of.add_argument("--games", type=int, default=200, help="games that judge the last weights")
    options_of.add_argument(
        "--probe-s", type=float, default=45.0, help="length of the run that counts rounds"
    )
    options_of.add_argument(
        "--only", action="extend", nargs="+", choices=CONTESTANTS, help="leave the others out"
    )
    options_of.add_argument("--set", action="append", metavar="KEY=VALUE", help="a setting of every run")
    options_of.add_argument("--keep", type=Path, help="keep the run directories here")
    options = options_of.parse_args()
    if options.quick:
        options.minutes, options.seeds, options.games, options.probe_s = 0.15, 1, 8, 8.0
    with tempfile.TemporaryDirectory(prefix="offbeat-colorlines-") as scratch:
        runs = options.keep or Path(scratch)
        runs.mkdir(parents=True, exist_ok=True)
        figures = measure(options, runs)
    figures["baselines"] = baselines(options.games, "classic")
    means = {name: [run["score"] for run in runs_of] for name, runs_of in figures["runs"].items()}
    for name, scores in means.items():
        say(f"{name:10} median {median(scores):.1f} of {[round(score, 1) for score in scores]}")
    say("baselines  " + "  ".join(f"{name} {score:.1f}" for name, score in figures["baselines"].items()))
    figures["medians"] = {name: median(scores) for name, scores in means.items()}
    worst = min(figures["medians"].values())
    return conclude(figures, options.quick or worst > figures["baselines"]["greedy"], options)


if __name__ == "__main__":
    sys.exit(main())
