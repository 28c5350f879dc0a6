"""What it costs to get going: processor time and memory until the first round is trained, and of the command.

``offbeat train cartpole-ppo`` with two worker processes is watched from outside. When its events file shows
the first trained round, the processor seconds of all its processes are read (the starts of workers and all
imports included), then their memory as PSS (a page that n processes share counts as 1/n for each). Memory is
read once more after twenty rounds, for information. Beside it, in turns: ``python -c "import torch"``,
``python -c "import offbeat"`` and ``offbeat --help``. Medians.

Bars: first round at most 3 CPU-s beyond ``import torch`` and at most 350 MB; ``import offbeat`` and
``offbeat --help`` below 0.4 CPU-s each, and neither imports torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ONE_THREAD, Cost, ProcessTree, conclude, median, offbeat_command, parser, say

RECIPE = "cartpole-ppo"
BAR_FIRST_ROUND_S, BAR_BYTES, BAR_COMMAND_S = 3.0, 350e6, 0.4
LIMIT_S = 120.0
COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "import offbeat": [sys.executable, "-c", "import offbeat"],
    "offbeat --help": [*offbeat_command(), "--help"],
}
TORCH_CHECKS = {
    "import offbeat": "import sys, offbeat; print('torch' in sys.modules)",
    "offbeat --help": """
import contextlib, io, sys
from offbeat.cli.main import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(["--help"])
print("torch" in sys.modules)
""",
}


@dataclass(frozen=True, slots=True)
class Start:
    """A run at the end of its first round, and its memory some rounds later."""

    first: Cost
    later_bytes: int


def time_command(command: Sequence[str]) -> float:
    """Processor seconds of a whole process."""
    tree = ProcessTree(command, ONE_THREAD)
    tree.start()
    return tree.finish(LIMIT_S).cpu_s


def imports_torch(code: str) -> bool:
    """Whether torch is loaded after this code."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1] == "True"


def watch_start(directory: Path, num_workers: int, later_rounds: int) -> Start:
    """Start a run and read its cost at its first round and later."""
    run_dir = directory / "run"
    settings = (
        f"run.dir={run_dir}",
        f"run.rounds={10 * later_rounds}",
        "runtime.kind=processes",
        f"runtime.num_workers={num_workers}",
    )
    tree = ProcessTree([*offbeat_command(), "train", RECIPE, *settings], ONE_THREAD, directory / "log")
    tree.start()
    try:
        await_rounds(tree, run_dir / "events.jsonl", 1)
        first = tree.cost(with_memory=True)
        await_rounds(tree, run_dir / "events.jsonl", later_rounds)
        return Start(first, tree.cost(with_memory=True).pss_bytes)
    finally:
        tree.end()


def await_rounds(tree: ProcessTree, events: Path, count: int) -> None:
    """Wait until the events file shows so many trained rounds."""
    give_up_s = time.perf_counter() + LIMIT_S
    while not (events.exists() and events.read_bytes().count(b'"kind":"round"') >= count):
        if not tree.is_running or time.perf_counter() > give_up_s:
            raise SystemExit(f"the run did not train {count} rounds:\n{tree.log_tail()}")
        time.sleep(0.003)


def measure(repeats: int, num_workers: int) -> dict[str, float | bool]:
    """All figures, the kinds of runs interleaved."""
    cpu_s: dict[str, list[float]] = {name: [] for name in COMMANDS}
    starts = []
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            cpu_s[name].append(time_command(command))
        with tempfile.TemporaryDirectory(prefix="offbeat-startup-") as directory:
            starts.append(watch_start(Path(directory), num_workers, later_rounds=20))
    first_s, torch_s = median([start.first.cpu_s for start in starts]), median(cpu_s["import torch"])
    return {
        **{f"{name}, cpu_s": median(values) for name, values in cpu_s.items()},
        **{f"{name}, loads torch": imports_torch(code) for name, code in TORCH_CHECKS.items()},
        "first round, cpu_s": first_s,
        "first round, cpu_s beyond torch": first_s - torch_s,
        "first round, wall_s": median([start.first.wall_s for start in starts]),
        "first round, pss_mb": median([start.first.pss_bytes for start in starts]) / 1e6,
        "after 20 rounds, pss_mb": median([start.later_bytes for start in starts]) / 1e6,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5, help="runs of each kind, interleaved (5)")
    made.add_argument("--workers", type=int, default=2, help="worker processes (2)")
    options = made.parse_args(arguments)
    figures = measure(1 if options.quick else options.repeats, options.workers)
    for name, value in figures.items():
        say(f"{name:34} {value if isinstance(value, bool) else f'{value:.2f}'}")
    return conclude(figures, meets_bars(figures), options)


def meets_bars(figures: dict[str, float | bool]) -> bool:
    say(
        f"bars: beyond torch <= {BAR_FIRST_ROUND_S:g} CPU-s, first round <= {BAR_BYTES / 1e6:g} MB,"
        f" commands < {BAR_COMMAND_S:g} CPU-s and without torch"
    )
    light = all(
        figures[f"{name}, cpu_s"] < BAR_COMMAND_S and not figures[f"{name}, loads torch"]
        for name in TORCH_CHECKS
    )
    quick = figures["first round, cpu_s beyond torch"] <= BAR_FIRST_ROUND_S
    return light and quick and figures["first round, pss_mb"] <= BAR_BYTES / 1e6


if __name__ == "__main__":
    sys.exit(main())
