"""``offbeat replay``."""

from __future__ import annotations

import sys
import time

from offbeat.cli.output import EXIT_FAILED, JsonFlag, reporting, show_table
from offbeat.cli.resume import RunDirectory

_INTERVAL_S = 5.0


class _Progress:
    """Says on the error stream, now and then, how far a repetition has come."""

    def __init__(self) -> None:
        self._begun_s = self._told_s = time.monotonic()

    def __call__(self, version: int, rounds: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _INTERVAL_S and version < rounds:
            self._told_s = now_s
            left_s = (now_s - self._begun_s) / version * (rounds - version)
            print(f"round {version:,} of {rounds:,}, about {left_s:.0f} s left", file=sys.stderr, flush=True)


def replay(run: RunDirectory, as_json: JsonFlag = False) -> None:
    """Repeat a run serially and compare the weights."""
    with reporting(as_json) as report:
        from offbeat import api

        outcome = api.replay_run(run, _Progress())
        verdict = "identical weights" if outcome.identical else "DIFFERENT weights"
        rows = {
            "rounds": f"{outcome.rounds:,}",
            "digest now": outcome.digest,
            "digest recorded": outcome.recorded_digest,
        }
        show_table(f"replay of {run}: {verdict}", rows)
        report.values.update(
            run_dir=run,
            identical=outcome.identical,
            digest=outcome.digest,
            recorded_digest=outcome.recorded_digest,
            rounds=outcome.rounds,
        )
        report.exit_code = 0 if outcome.identical else EXIT_FAILED
