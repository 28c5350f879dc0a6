"""Planning with a large transformer on a GPU: how much faster is it with the dial open?

Trains ``unizero`` with a model that fills a GPU (768 wide), collectors and learner as processes on the same
one, at several k. At k = 0 they take turns, which gives the time C to collect a round and T to train it with
the GPU to themselves. No schedule takes less than max(C, T) per round; two processes that share one GPU
only come near it where each alone leaves it idle in between. Told for each k: updates per second, the steps
that they stand for (rounds differ in what has come by then, updates per step do not), and max(C, T) over the
time of a round's updates.

Wants a machine with a GPU; elsewhere it says so and ends. Bar: k = 1 is faster than k = 0 for every size.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import conclude, median, parser, say

import offbeat
from offbeat.observe.events import read_rounds

RECIPE = "cartpole-unizero"
NUM_STEPS = 8
WARM_UP = 6
QUIET = {"observe.console": "none", "observe.tensorboard": False, "checkpoint.interval_s": None}


@dataclass(frozen=True, slots=True)
class Size:
    """A model, how many environments it serves, and how it is trained."""

    layers: int
    num_envs: int
    batch_size: int
    updates_per_round: int


SIZES = (Size(2, 256, 1024, 12), Size(8, 64, 512, 12), Size(8, 256, 1024, 10))
DEGREES = (0, 1, 4)


def train(size: Size, degree: int, rounds: int, precision: str, width: int) -> dict[str, float]:
    """One run, from the end of its warm-up on."""
    steps = size.num_envs * NUM_STEPS
    with tempfile.TemporaryDirectory() as directory:
        overrides: dict[str, Any] = {
            **QUIET,
            "run.dir": f"{directory}/run",
            "run.rounds": rounds,
            "run.seed": 1,
            "async_training.off_policy_degree": degree,
            "env.num_envs": size.num_envs,
            "eval.interval_rounds": None,
            "eval.at_end": False,
            "trainer.device": "cuda",
            "rollout.device": "cuda",
            "algorithm.num_steps": NUM_STEPS,
            "algorithm.batch_size": size.batch_size,
            "algorithm.replay_ratio": size.updates_per_round / steps,
            "algorithm.network.layers": size.layers,
            "algorithm.network.latent": width,
            "algorithm.network.hidden": width,
            "algorithm.network.heads": max(2, width // 64),
            "algorithm.network.precision": precision,
            "algorithm.network.compiled": width > 128,
        }
        offbeat.train(RECIPE, overrides=overrides)
        found = [event["metrics"] for event in read_rounds(Path(directory) / "run" / "events.jsonl")]
    later, before = found[WARM_UP:], found[WARM_UP - 1]
    span_s = later[-1]["time/elapsed_s"] - before["time/elapsed_s"]
    updates = sum(metrics["learn/gradient_steps"] for metrics in later)
    return {
        "round_s": span_s * size.updates_per_round / updates,
        "collect_s": median([metrics["time/collect_s"] for metrics in later]),
        "train_s": median([metrics["time/train_s"] for metrics in later]),
        "publish_s": median([metrics["time/publish_s"] for metrics in later]),
        "env_steps_per_s": updates / size.updates_per_round * steps / span_s,
        "updates_per_s": updates / span_s,
        "max_lag": max(metrics["pace/lag"] for metrics in later),
    }


def main() -> int:
    options_of = parser(__doc__)
    options_of.add_argument("--rounds", type=int, default=16)
    options_of.add_argument("--precision", default="bfloat16", choices=("float32", "tf32", "bfloat16"))
    options = options_of.parse_args()
    if not torch.cuda.is_available():
        say("no GPU here: nothing to measure")
        return 0
    sizes = SIZES[:1] if options.quick else SIZES
    width, rounds = (128, 10) if options.quick else (768, options.rounds)
    found, holds = [], True
    for size in sizes:
        runs = {degree: train(size, degree, rounds, options.precision, width) for degree in DEGREES}
        limit_s = max(runs[0]["collect_s"], runs[0]["train_s"])
        for degree, run in runs.items():
            run["share_of_limit"] = limit_s / run["round_s"]
            say(
                f"{size.layers} layers, {size.num_envs:3} environments, k = {degree}:"
                f" {run['env_steps_per_s']:7.0f} steps/s {run['updates_per_s']:6.1f} updates/s,"
                f" round {run['round_s']:.3f} s (collect {run['collect_s']:.3f}, train {run['train_s']:.3f},"
                f" publish {run['publish_s']:.3f}), {run['share_of_limit']:.2f} of the limit"
            )
        holds = holds and runs[1]["round_s"] < runs[0]["round_s"]
        found.append({**asdict(size), "runs": {str(degree): run for degree, run in runs.items()}})
    figures = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "width": width,
        "precision": options.precision,
        "sizes": found,
    }
    return conclude(figures, options.quick or holds, options)


if __name__ == "__main__":
    raise SystemExit(main())
