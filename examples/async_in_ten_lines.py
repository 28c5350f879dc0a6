"""Show what turns sync_loop.py into async_loop.py, then run both and compare what they reach and how fast."""

import argparse
import difflib
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
LOOPS = ("sync_loop.py", "async_loop.py")


def show_difference():
    before, after = ((HERE / name).read_text().splitlines() for name in LOOPS)
    lines = list(difflib.unified_diff(before, after, *LOOPS, n=0, lineterm=""))
    print("\n".join(lines))
    print(f"\n{sum(line.startswith('+') for line in lines) - 1} lines are new or changed\n")


def run(name, rounds):
    started_s = time.perf_counter()
    command = [sys.executable, str(HERE / name), "--rounds", str(rounds)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    returns = [float(number) for number in re.findall(r"mean return ([\d.]+)", output)]
    seconds = time.perf_counter() - started_s
    best = max(returns)
    print(
        f"{name:14} {len(returns)} rounds in {seconds:5.1f} s, best round {best:.0f}, last {returns[-1]:.0f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=80)
    rounds = parser.parse_args().rounds
    show_difference()
    for loop in LOOPS:
        run(loop, rounds)
