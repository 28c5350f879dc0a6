"""The last words of a training run: what it reached, and the commands that go on from it."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from offbeat.cli.output import EXIT_INTERRUPTED, Report, show_table

_MOST_LOSSES = 8

if TYPE_CHECKING:
    from offbeat.api import Result
    from offbeat.lanes import Loss


def finish(result: Result, report: Report) -> None:
    """Show the summary of a run and fill in what ``--json`` prints."""
    show_table(f"offbeat: {result.reason}", summary_rows(result))
    report.values.update(
        run_dir=str(result.run_dir),
        reason=result.reason,
        rounds=result.rounds,
        env_steps=result.env_steps,
        wall_s=result.wall_s,
        eval_return=result.eval_return,
        max_staleness=result.max_staleness,
        digest=result.digest,
        interrupted=result.interrupted,
        losses=[asdict(loss) for loss in result.losses],
        restarts=result.restarts,
        metrics=result.metrics,
    )
    if result.interrupted:
        report.exit_code = EXIT_INTERRUPTED


def summary_rows(result: Result) -> dict[str, str]:
    """The summary by line: counts, times, quality, then the next commands."""
    rows = {
        "rounds": f"{result.rounds:,}",
        "environment steps": f"{result.env_steps:,}",
        "wall time": f"{result.wall_s:.1f} s",
        "steps per second": _rate(result),
        "evaluation return": "not evaluated" if result.eval_return is None else f"{result.eval_return:.1f}",
        "max staleness": f"{result.max_staleness}",
        "dropped samples": _count(result, "pace/dropped_samples"),
        **_losses(result),
        "digest": result.digest,
        "run directory": str(result.run_dir),
    }
    run = shlex.quote(str(result.run_dir))
    return rows | {verb: f"offbeat {verb} {run}" for verb in ("resume", "eval", "replay")}


def _losses(result: Result) -> dict[str, str]:
    """What was lost and replaced, a line each: the newest ones, and how many there were before."""
    if not result.losses:
        return {}
    shown = [_loss(loss) for loss in result.losses[-_MOST_LOSSES:]]
    if (hidden := len(result.losses) - len(shown)) > 0:
        shown.insert(0, f"{hidden} earlier ones: see `offbeat status`")
    restarts = {"restarts": f"{result.restarts}, from checkpoints"} if result.restarts else {}
    return {"lost and replaced": "\n".join(shown), **restarts}


def _loss(loss: Loss) -> str:
    reason = loss.reason.splitlines()[0] if loss.reason else "for an unknown reason"
    again = "" if loss.replaced_s is None else f", replaced after {loss.replaced_s:.1f} s"
    return f"{loss.component} at round {loss.version}{again}: {reason}"


def _rate(result: Result) -> str:
    return f"{result.steps_per_s:,.0f}" if result.steps_per_s > 0 else "no round trained"


def _count(result: Result, name: str) -> str:
    value = result.metrics.get(name)
    return f"{value:,.0f}" if isinstance(value, int | float) else "0"
