"""How many environment steps a processor second takes through MAPPO, against BenchMARL's, on simple_spread.

Both collect with 32 environments of MPE's simple_spread (three agents, discrete actions, 25 steps each),
train 10 epochs on rounds of 3200 steps in one minibatch, and have networks of two layers of 64 units
without memory. Each is a process of its own with one thread; imports and the first round are left out,
evaluation is off. They take turns; medians over turns. The peer lives in a virtual environment of its own,
``.venvs/benchmarl``, with the release of PettingZoo whose environments it can still import.

Bar: at least 3 times as many steps per processor second as BenchMARL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from common import ONE_THREAD, conclude, median, parser, peer_python, say

HERE = Path(__file__).resolve().parent
REQUIREMENTS = ("benchmarl==1.5.2", "pettingzoo[mpe]==1.24.3", "pygame")
BAR = 3.0
SHAPE = (32, 3200, 10)
"""Environments, steps of a round, epochs."""


def rate(name: str, rounds: int) -> float:
    """Environment steps per processor second of one contestant, measured in a process of its own."""
    python = sys.executable if name == "offbeat" else peer_python("benchmarl", REQUIREMENTS)
    script = HERE / "peers" / f"{name}_mappo.py"
    command = [python, str(script), *map(str, (rounds, *SHAPE))]
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{name}: {done.stderr[-3000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["steps_per_cpu_s"])


def main() -> int:
    options_of = parser(__doc__)
    options_of.add_argument("--rounds", type=int, default=6)
    options_of.add_argument("--turns", type=int, default=3)
    options = options_of.parse_args()
    if options.quick:
        options.rounds, options.turns = 2, 1
    rates: dict[str, list[float]] = {"offbeat": [], "benchmarl": []}
    for _ in range(options.turns):
        for name, found in rates.items():
            found.append(rate(name, options.rounds))
            say(f"{name:10} {found[-1]:8,.0f} steps per CPU-second")
    medians = {name: median(found) for name, found in rates.items()}
    ratio = medians["offbeat"] / medians["benchmarl"]
    say(f"offbeat {ratio:.2f} x benchmarl   bar: >= {BAR:g}")
    return conclude({"rates": rates, "medians": medians, "ratio": ratio}, ratio >= BAR, options)


if __name__ == "__main__":
    sys.exit(main())
