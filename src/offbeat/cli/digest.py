"""``offbeat digest``."""

from __future__ import annotations

from offbeat.cli.output import JsonFlag, reporting
from offbeat.cli.resume import RunDirectory


def digest(run: RunDirectory, as_json: JsonFlag = False) -> None:
    """Print the digest of a run's weights."""
    with reporting(as_json) as report:
        from offbeat import api

        text = api.digest(run)
        print(text)
        report.values.update(run_dir=run, digest=text)
