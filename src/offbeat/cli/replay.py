"""``offbeat replay``."""

from __future__ import annotations

from offbeat.cli.output import EXIT_FAILED, JsonFlag, reporting, show_table
from offbeat.cli.resume import RunDirectory


def replay(run: RunDirectory, as_json: JsonFlag = False) -> None:
    """Repeat a run serially and compare the weights."""
    with reporting(as_json) as report:
        from offbeat import api

        outcome = api.replay_run(run)
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
