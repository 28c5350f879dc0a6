"""End-of-run summary: what it reached, and the commands that continue from it."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from offbeat.cli.continuing import Goals, resume_command
from offbeat.cli.history import REPLAY_METRIC, Loss, RunHistory, failures, read_history
from offbeat.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, Report, show_table
from offbeat.cli.status import read_settings, setting
from offbeat.errors import OffbeatError

_MOST_LOSSES = 8
_STEPS = "environment steps"

if TYPE_CHECKING:
    from offbeat.api import Result


def finish(result: Result, report: Report) -> None:
    """Show the summary of a run and fill in what ``--json`` prints."""
    state = "failed" if result.save_error else "stopped" if result.stopped else "finished"
    show_table(f"offbeat: {state}: {result.reason}", summary_rows(result))
    report.values.update(
        run_dir=str(result.run_dir),
        state=state,
        reason=result.reason,
        rounds=result.rounds,
        env_steps=result.env_steps,
        wall_s=result.wall_s,
        startup_s=result.startup_s,
        rounds_s=result.rounds_s,
        steps_per_s=result.steps_per_s,
        **_statistics(result),
        eval_return=result.eval_return,
        max_staleness=result.max_staleness,
        digest=result.digest,
        interrupted=result.interrupted,
        losses=[asdict(loss) for loss in result.losses],
        restarts=result.restarts,
        metrics=result.metrics,
    )
    if result.save_error:
        report.values["error"] = result.reason
        report.exit_code = EXIT_FAILED
    elif result.interrupted:
        report.exit_code = EXIT_INTERRUPTED


def summary_rows(result: Result) -> dict[str, str]:
    """The summary by line: counts, times, quality, then the next commands."""
    history = _history(result)
    success = result.eval_metrics.get("eval/success_rate")  # where the environment reports it
    dropped = result.metrics.get("pace/dropped_samples", 0)
    count, noun = _samples(result)
    rows = {
        "rounds": f"{result.rounds:,}",
        noun: f"{count:,}",
        "wall time": _wall(result, history),
        "steps per second" if noun == _STEPS else f"{noun} per second": _rate(result),
        **_statistics_rows(result),
        "evaluation return": _evaluation(result),
        **({} if success is None else {"evaluation success": f"{success:.0%}"}),
        "max staleness": f"{result.max_staleness}{' (replayed)' if REPLAY_METRIC in result.metrics else ''}",
        "dropped samples": f"{dropped:,.0f}",
        **_lockstep(result),
        **({} if history is None else _settled(history) | failures(history) | _losses(history)),
        "digest": result.digest,
        "run directory": str(result.run_dir),
    }
    if not result.digest or result.save_error:  # there is nothing that these commands could take up
        return rows
    run = shlex.quote(str(result.run_dir))
    rows["resume"] = _resume_command(result)
    verbs = {"eval": result.has_evaluator, "play": result.has_envs, "replay": True}
    return rows | {verb: f"offbeat {verb} {run}" for verb, is_there in verbs.items() if is_there}


def _lockstep(result: Result) -> dict[str, str]:
    """Say from which round on a run at k = 0 depended on time, if it did."""
    until = result.metrics.get("pace/lockstep_until")
    if until is None:
        return {}
    return {"lockstep": f"reproducible up to round {until:,.0f}, in which a time limit ended something"}


def _samples(result: Result) -> tuple[int, str]:
    """Return how many samples arrived, and their name."""
    count, unit = result.samples
    return count, _STEPS if unit in ("", "env_steps") else unit.replace("_", " ")


def _evaluation(result: Result) -> str:
    from offbeat.observe.text import evaluation

    if result.eval_return is None:
        return "not evaluated"
    return evaluation({"eval/return_mean": result.eval_return, **result.eval_metrics})


def _resume_command(result: Result) -> str:
    """Return the command that goes on: a run that ended before its goal needs no other settings."""
    known = {} if result.interrupted else read_settings(result.run_dir)
    goals = Goals(*(setting(known, "run", name) for name in ("rounds", "stop_return", "stop_eval_return")))
    metrics = {**result.metrics, **result.eval_metrics}
    return resume_command(str(result.run_dir), metrics, result.rounds, goals)


def _statistics(result: Result) -> dict[str, float | None]:
    """Return segments collected and trained, the rounds between them, and their share of time together."""
    metrics = {name: value for name, value in result.metrics.items() if isinstance(value, int | float)}
    elapsed_s, overlap_s = metrics.get("time/elapsed_s", 0.0), metrics.get("time/overlap_s")
    return {
        "segments_collected": metrics.get("queue/total_produced"),
        "segments_trained": metrics.get("queue/total_consumed"),
        "lag": metrics.get("pace/lag"),
        "overlap": overlap_s / elapsed_s if overlap_s is not None and elapsed_s > 0 else None,
    }


def _statistics_rows(result: Result) -> dict[str, str]:
    found = _statistics(result)
    collected, trained, lag, overlap = (
        found[name] for name in ("segments_collected", "segments_trained", "lag", "overlap")
    )
    rows = {}
    if collected is not None and trained is not None:
        behind = "" if lag is None else f", lag {lag:.1f} rounds"
        rows["segments"] = f"{collected:,.0f} collected, {trained:,.0f} trained{behind}"
    if overlap is not None:
        rows["overlap"] = f"{overlap:.0%} of the time collecting and training went on at once"
    return rows


def _wall(result: Result, history: RunHistory | None) -> str:
    """Return the time of this start by its parts; of earlier starts only what they trained."""
    rest_s = max(0.0, result.wall_s - result.startup_s - result.rounds_s)
    parts = f"start-up {result.startup_s:.1f} s, rounds {result.rounds_s:.1f} s, the rest {rest_s:.1f} s"
    here, total_s = f"{result.wall_s:.1f} s: {parts}", result.metrics.get("time/elapsed_s")
    if history is None or history.num_starts < 2 or not isinstance(total_s, int | float):
        return here
    return f"{here}; rounds of all {history.num_starts} starts {total_s:.1f} s"


def _rate(result: Result) -> str:
    if result.steps_per_s <= 0:
        return "no round trained"
    return f"{result.steps_per_s:,.0f}, start-up and the rest left out"


def _settled(history: RunHistory) -> dict[str, str]:
    """Return where a run whose k was tuned has settled, and why."""
    if history.dial is None or "reason" not in history.dial:
        return {}
    degree, version, reason = (history.dial.get(name) for name in ("off_policy_degree", "version", "reason"))
    why = f"moved {history.num_moves} times, last at version {version}: {reason}"
    return {"off_policy_degree": f"settled at k = {degree}" + (f" ({why})" if history.num_moves else "")}


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
