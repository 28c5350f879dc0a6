"""MAPPO of offbeat on MPE's simple_spread: prints environment steps per processor second, imports left out.

Usage: ``offbeat_mappo.py ROUNDS NUM_ENVS FRAMES EPOCHS``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import offbeat
from offbeat.observe.callbacks import Callback, RoundInfo


class Clock(Callback):
    """Notes the processor time after each round."""

    def __init__(self) -> None:
        self.spent_s: list[float] = []

    def on_round(self, info: RoundInfo) -> None:
        self.spent_s.append(time.process_time())


def main() -> None:
    rounds, num_envs, frames, epochs = map(int, sys.argv[1:])
    clock = Clock()
    settings = {
        "env.num_envs": num_envs,
        "sync_batch_size": frames,
        "num_epochs": epochs,
        "recurrent": False,
        "runtime.kind": "inline",
        "runtime.num_workers": 1,
        "eval.interval_rounds": None,
        "eval.at_end": False,
        "checkpoint.enabled": False,
        "observe.console": "none",
        "observe.tensorboard": False,
    }
    with tempfile.TemporaryDirectory() as directory:
        chosen = {**settings, "run.dir": f"{directory}/run"}
        offbeat.train("mpe-spread-mappo", rounds=rounds, seed=1, overrides=chosen, callbacks=[clock])
    spent_s = clock.spent_s[-1] - clock.spent_s[0]
    print(json.dumps({"steps_per_cpu_s": (len(clock.spent_s) - 1) * frames / spent_s}))


if __name__ == "__main__":
    main()
