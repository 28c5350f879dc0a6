"""What whole programs cost before and after a change: processor seconds of all their processes.

``before_after.py OLD NEW`` runs `cartpole.py` and `pipeline_limit.py` of two source trees in turns, each in
processes of its own, and compares the processor seconds pair by pair. OLD and NEW are checkouts, such as git
worktrees. What the scripts themselves judge does not count here.

Bar: for each program the median ratio NEW / OLD is at most 1.02, or its 95 % interval holds 1.00 and ends
below 1.05. The interval is that of the median: the second smallest and second largest of ten ratios.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common import ONE_THREAD, ProcessTree, conclude, median, parser, say

PROGRAMS = {
    "cartpole.py": ("--peers", "--seeds", "1"),
    "pipeline_limit.py": ("--repeats", "1", "--rounds", "15"),
}
BAR, BAR_UNSURE = 1.02, 1.05
LIMIT_S = 300.0


def cpu_s(tree: Path, program: str, options: tuple[str, ...]) -> float:
    """Processor seconds of one program of a source tree, with all processes that it starts."""
    words = (sys.executable, str(tree / "benchmarks" / program), *options)
    shell = ("sh", "-c", '"$@"; exit 0', "sh", *words)  # 1: a bar was missed
    environment = {**ONE_THREAD, "PYTHONPATH": str(tree / "src")}
    with tempfile.TemporaryDirectory() as place:
        run = ProcessTree(shell, environment, Path(place) / "log")
        run.start()
        return run.finish(LIMIT_S).cpu_s


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of a median of ten, or of as many: by the sign test, from order statistics."""
    ordered = sorted(ratios)
    left_out = 1 if len(ordered) >= 9 else 0
    return ordered[left_out], ordered[-1 - left_out]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("old", type=Path, help="checkout of the version before")
    made.add_argument("new", type=Path, help="checkout of the version after")
    made.add_argument("--pairs", type=int, default=10, help="how many (10)")
    made.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="these programs")
    options = made.parse_args()
    trees = (options.old.resolve(), options.new.resolve())
    figures, holds = {}, True
    for program in options.only:
        pairs = []
        for pair in range(1 if options.quick else options.pairs):
            order = trees if pair % 2 == 0 else trees[::-1]
            found = {tree: cpu_s(tree, program, PROGRAMS[program]) for tree in order}
            pairs.append([found[tree] for tree in trees])
            say(f"{program} pair {pair}: {pairs[-1][0]:.2f} and {pairs[-1][1]:.2f} CPU-s")
        ratios = [new / old for old, new in pairs]
        middle, (low, high) = median(ratios), interval(ratios)
        good = middle <= BAR or (low <= 1.0 <= high < BAR_UNSURE)
        holds &= good
        judged = "ok" if good else "MISS"
        say(f"{program}: ratio {middle:.3f} (95 % interval {low:.3f} to {high:.3f}) {judged}")
        figures[program] = {"cpu_s": pairs, "ratio": middle, "interval": [low, high]}
    return conclude(figures, holds, options)


if __name__ == "__main__":
    sys.exit(main())
