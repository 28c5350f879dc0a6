"""A learner on a GPU that feeds collectors on CPUs: does it train as on the CPU?

Trains a recipe with ``trainer.device`` cuda in each runtime of this machine, at k = 0 and k = 1, and once
with two ranks that share the GPU (gloo). Wants a machine with a GPU; elsewhere it says so and ends.

Bars: every run evaluates at 475 or more; the digest of ``processes`` equals that of ``inline`` at k = 0;
staleness at most 1 at k = 1.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import conclude, parser, say

import offbeat

RECIPE = "cartpole-ppo"
QUIET = {"observe.console": "none", "observe.tensorboard": False, "trainer.device": "cuda"}


def train(directory: Path, name: str, **settings: Any) -> dict[str, Any]:
    """One run and what it came to."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    started_s = time.perf_counter()
    result = offbeat.train(
        RECIPE, overrides={**QUIET, **dotted, "run.dir": str(directory / name), "run.seed": 1}
    )
    figures = {
        "eval_return": result.eval_return,
        "wall_s": round(time.perf_counter() - started_s, 2),
        "rounds": result.rounds,
        "max_staleness": result.max_staleness,
        "digest": result.digest,
    }
    say(f"{name}: {figures}")
    return figures


def main() -> int:
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        say("no GPU here: nothing to measure")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        found = {
            "cpu": train(directory, "cpu", trainer__device="cpu", runtime__kind="processes"),
            "inline": train(directory, "inline", runtime__kind="inline"),
            "processes": train(directory, "processes", runtime__kind="processes"),
            "threads": train(directory, "threads", runtime__kind="threads"),
            "async": train(directory, "async", async_training__off_policy_degree=1),
            "two ranks": train(directory, "ranks", learner__num_ranks=2),
        }
        on_gpu = torch.cuda.get_device_name(0)
    bars = {
        "every run evaluates at 475 or more": all(run["eval_return"] >= 475 for run in found.values()),
        "processes equal inline at k = 0": found["processes"]["digest"] == found["inline"]["digest"],
        "staleness at most 1": found["async"]["max_staleness"] <= 1,
    }
    figures = {"gpu": on_gpu, "torch": torch.__version__, "runs": found, "bars": bars}
    return conclude(figures, all(bars.values()), options)


if __name__ == "__main__":
    raise SystemExit(main())
