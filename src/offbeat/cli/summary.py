"""End-of-run summary: what it reached, and the commands that continue from it."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from offbeat.cli.history import REPLAY_METRIC, Loss, RunHistory, read_history
from offbeat.cli.output import EXIT_INTERRUPTED, Report, show_table
from offbeat.errors import OffbeatError

_MOST_LOSSES = 8

if TYPE_CHECKING:
    from offbeat.api import Result


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
    history = _history(result)
    success = result.metrics.get("eval/success_rate")  # where the environment reports it
    dropped = result.metrics.get("pace/dropped_samples", 0)
    rows = {
        "rounds": f"{result.rounds:,}",
        "environment steps": f"{result.env_steps:,}",
        "wall time": _wall(result, history),
        "steps per second": f"{result.steps_per_s:,.0f}" if result.steps_per_s > 0 else "no round trained",
        "evaluation return": "not evaluated" if result.eval_return is None else f"{result.eval_return:.1f}",
        **({} if success is None else {"evaluation success": f"{success:.0%}"}),
        "max staleness": f"{result.max_staleness}{' (replayed)' if REPLAY_METRIC in result.metrics else ''}",
        "dropped samples": f"{dropped:,.0f}",
        **(_losses(history) if history is not None else {}),
        "digest": result.digest,
        "run directory": str(result.run_dir),
    }
    run = shlex.quote(str(result.run_dir))
    return rows | {verb: f"offbeat {verb} {run}" for verb in ("resume", "eval", "play", "replay")}


def _wall(result: Result, history: RunHistory | None) -> str:
    here = f"{result.wall_s:.1f} s"
    if history is None or history.num_starts < 2 or history.began_s is None or history.last_s is None:
        return here
    return f"{here} since the last start, {history.last_s - history.began_s:.1f} s since the first"


def _losses(history: RunHistory) -> dict[str, str]:
    """Return the losses and restarts of the whole run, a line each: the newest, and a count of the others."""
    shown = [_loss(loss) for loss in list(history.losses)[-_MOST_LOSSES:]]
    if (hidden := history.num_losses - len(shown)) > 0:
        shown.insert(0, f"{hidden} earlier ones: see `offbeat status`")
    rows = {"lost and replaced": "\n".join(shown)} if shown else {}
    if history.num_restarts:
        reason = history.restarts[-1].reason.partition("\n")[0]
        rows["restarts"] = f"{history.num_restarts}, from checkpoints; the last one: {reason}"
    return rows


def _history(result: Result) -> RunHistory | None:
    """Return the run's history, earlier starts included; None when there is none."""
    try:
        return read_history(result.run_dir / "events.jsonl")
    except OffbeatError:
        return None


def _loss(loss: Loss) -> str:
    reason = loss.reason.partition("\n")[0] or "for an unknown reason"
    again = "" if loss.seconds is None else f", replaced after {loss.seconds:.1f} s"
    return f"{loss.component}{again}: {reason}"
