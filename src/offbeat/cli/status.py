"""``offbeat status``."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offbeat.cli.continuing import Goals, last_metrics, resume_command
from offbeat.cli.history import (
    REPLAY_METRIC,
    Component,
    Loss,
    Restart,
    RunHistory,
    failures,
    read_history,
)
from offbeat.cli.output import EXIT_FAILED, JsonFlag, reporting, show_table
from offbeat.cli.resume import RunDirectory
from offbeat.reading import CONFIG_BYTES, DESCRIPTION_BYTES, open_file, parse_json, read_file

State = Literal["running", "restarting", "stuck", "finished", "stopped", "failed", "killed"]
_WELL = ("running", "restarting", "finished", "stopped")
_LEAST_STUCK_S = 60.0
_STUCK_ROUNDS = 10
_HUGE = 1e300
_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of a run: versions with ages in seconds, oldest first, and which one resume takes.

    ``is_verified`` False: the run is writing, and may retire what we would read.
    """

    ages_s: dict[int, float] = field(default_factory=dict)
    resume_from: int | None = None
    damaged: tuple[str, ...] = ()
    is_verified: bool = True


@dataclass(frozen=True, slots=True)
class Status:
    """State of a run at a time, from its directory. ``quiet_s``: age of the last event."""

    run_dir: str
    name: str
    state: State
    reason: str
    pid: int | None
    rounds: int | None
    quiet_s: float | None
    history: RunHistory
    checkpoints: Checkpoints
    now_s: float
    stop_return: float | None = None
    stop_eval_return: float | None = None

    @property
    def is_well(self) -> bool:
        """True when the run needs no attention."""
        return self.state in _WELL

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last round, at the speed of the last ones; None unless it runs.

        With ``stop_return`` or ``stop_eval_return`` the run may end before.
        """
        rate = self.history.rounds_per_s
        if self.state != "running" or self.rounds is None or rate is None:
            return None
        return max(0, self.rounds - self.history.version) / rate

    @property
    def next_commands(self) -> tuple[str, ...]:
        """Commands that the user may want to run next."""
        if self.state in ("running", "restarting"):
            verbs: tuple[str, ...] = ("status",)
        elif self.state == "stuck":
            verbs = ("status", "resume")
        elif not self.checkpoints.ages_s:
            verbs = ("resume",)
        elif self.checkpoints.is_verified and self.checkpoints.resume_from is None:
            verbs = ()
        elif self.state == "finished":
            verbs = ("eval", "replay", "resume")
        else:
            verbs = ("resume", "eval", "replay")
        return tuple(map(self._command, verbs))

    def _command(self, verb: str) -> str:
        if verb != "resume" or self.state != "finished":
            return f"offbeat {verb} {shlex.quote(self.run_dir)}"
        history, goals = self.history, Goals(self.rounds, self.stop_return, self.stop_eval_return)
        return resume_command(self.run_dir, last_metrics(history), history.version, goals)


def status(
    run: RunDirectory,
    stuck_after: Annotated[
        float | None,
        typer.Option(
            "--stuck-after",
            min=0,
            metavar="SECONDS",
            help="Call a running run stuck after so long without an event; 60 s or ten rounds if not given.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the state of a run.

    Exit code 1 when it failed, was killed or seems stuck.
    """
    with reporting(as_json) as report:
        found = read_status(Path(run), time.time(), stuck_after)
        for title, rows in tables(found):
            show_table(title, rows)
        report.values.update(to_json(found))
        report.exit_code = 0 if found.is_well else EXIT_FAILED


# ---------------------------------------------------------------- looking


def check_is_run(directory: Path) -> None:
    """Raise RunNotFound for a directory that holds nothing of a run."""
    if not (directory / "manifest.json").exists() and not (directory / "events.jsonl").exists():
        from offbeat.run.directory import not_found

        raise not_found(directory, "it has neither manifest.json nor events.jsonl")


def read_status(directory: Path, now_s: float, stuck_after_s: float | None = None) -> Status:
    """Read a run directory and judge the run as of ``now_s``, in unix seconds. Changes nothing of a run."""
    check_is_run(directory)
    pid = lock_owner(directory / "lock")  # first: a run that ends meanwhile is then told by its events
    is_held = pid is not None
    has_events = (directory / "events.jsonl").exists()
    history = read_history(directory / "events.jsonl") if has_events else RunHistory()
    settings = read_settings(directory)
    quiet_s = None if history.last_s is None else max(0.0, now_s - history.last_s)
    limit_s = _stuck_limit_s(history) if stuck_after_s is None else stuck_after_s
    state, reason = _judge(history, is_held, quiet_s, limit_s)
    return Status(
        run_dir=str(directory),
        name=str(setting(settings, "run", "name") or _manifest_name(directory)),
        state=state,
        reason=reason,
        pid=pid or None,
        rounds=rounds if type(rounds := setting(settings, "run", "rounds")) is int else None,
        quiet_s=quiet_s,
        history=history,
        checkpoints=_checkpoints(directory / "checkpoints", now_s, is_held),
        now_s=now_s,
        stop_return=_number(setting(settings, "run", "stop_return")),
        stop_eval_return=_number(setting(settings, "run", "stop_eval_return")),
    )


def lock_owner(path: Path) -> int | None:
    """Return the process that holds the lock of a run directory: 0 if unknown, None if the lock is free."""
    try:
        import fcntl

        with open_file(path, DESCRIPTION_BYTES) as file:
            try:
                # Shared and for an instant: it hinders nobody but a run that begins in this very moment.
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                text = file.read().decode(errors="replace").strip()
                return int(text) if text.isdigit() else 0
    except (ImportError, OSError):  # no such locks on this system, or no lock yet
        return None
    return None


def _judge(history: RunHistory, is_held: bool, quiet_s: float | None, limit_s: float) -> tuple[State, str]:
    is_quiet = quiet_s is not None and quiet_s > limit_s
    if history.last_kind in ("restart", "rollback") and not is_quiet:
        return "restarting", _first_line(history.restarts[-1].reason)
    if is_held:
        if is_quiet:
            return "stuck", f"it runs, but its last event ({history.last_kind}) is {_span(quiet_s)} old"
        return "running", ""
    if history.finish is not None:
        reason = str(history.finish.get("reason", ""))
        if history.finish.get("failed"):
            return "failed", reason
        return ("stopped" if history.finish.get("stopped") else "finished"), reason
    if history.num_starts == 0:
        return "killed", "before it began: it has no events"
    return "killed", f"at round {history.version}: nobody runs it and it never said how it ended"


def _stuck_limit_s(history: RunHistory) -> float:
    rate = history.rounds_per_s
    return _LEAST_STUCK_S if rate is None else max(_LEAST_STUCK_S, _STUCK_ROUNDS / rate)


def read_settings(directory: Path) -> Mapping[str, Any]:
    """The settings of a run as they were written; empty for a pipeline of one's own, which writes none."""
    path = directory / "resolved.yaml"
    if not path.exists():
        return {}
    from offbeat.config.layers import parse_yaml

    try:
        layer, _ = parse_yaml(read_file(path, CONFIG_BYTES).decode(), path.name)
    except (OSError, ValueError):
        return {}
    return {} if layer is None else layer.values


def _manifest_name(directory: Path) -> str:
    try:
        return str(parse_json(read_file(directory / "manifest.json", DESCRIPTION_BYTES))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return directory.name


def setting(settings: Mapping[str, Any], section: str, key: str) -> Any:
    """Return a setting of a run; None when it is not known."""
    values = settings.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _checkpoints(directory: Path, now_s: float, is_held: bool) -> Checkpoints:
    ages_s = dict(sorted(_ages_s(directory, now_s)))
    if is_held or not ages_s:
        newest = max(ages_s, default=None)
        return Checkpoints(ages_s, newest, is_verified=not is_held)
    from offbeat.checkpoint import CheckpointManager
    from offbeat.errors import CheckpointError

    try:
        saved = CheckpointManager(directory).load()
    except CheckpointError as error:
        return Checkpoints(ages_s, None, tuple(line.strip() for line in str(error).splitlines()[1:-1]))
    return Checkpoints(ages_s, saved.version, saved.warnings)


def _ages_s(directory: Path, now_s: float) -> Iterator[tuple[int, float]]:
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if match := _STEP.fullmatch(path.name):
            try:
                yield int(match[1]), max(0.0, now_s - path.stat().st_mtime)
            except OSError:  # retired in this moment
                continue


# ---------------------------------------------------------------- telling people


def tables(found: Status) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield title and rows of each table."""
    yield f"{found.name}: {_headline(found)}", dict(_run_rows(found))
    if found.history.components:
        yield (
            "health",
            {part.name: _health_line(part, found) for _, part in sorted(found.history.components.items())},
        )
    if found.history.losses:
        title = f"lost and replaced ({found.history.num_losses} in all)"
        yield title, _numbered(found.history.num_losses, map(_loss_line, found.history.losses))
    if found.history.restarts:
        title = f"restarts of the whole run ({found.history.num_restarts} in all)"
        yield title, _numbered(found.history.num_restarts, map(_restart_line, found.history.restarts))
    if found.history.stall is not None:
        yield f"last stall, {_clock(found.history.stall['time'])}", dict(_stall_rows(found.history.stall))
    yield "checkpoints", dict(_checkpoint_rows(found.checkpoints))
    yield "next", {command.split()[1]: command for command in found.next_commands}


def _headline(found: Status) -> str:
    word = "stuck?" if found.state == "stuck" else found.state
    pid = f" (pid {found.pid})" if found.pid is not None else ""
    reason = f": {_first_line(found.reason)}" if found.reason else ""
    return f"{word}{pid}{reason}"


def _run_rows(found: Status) -> Iterator[tuple[str, str]]:
    history, metrics = found.history, found.history.metrics
    yield "directory", found.run_dir
    yield "round", f"{history.version:,}" + (f" of {found.rounds:,}" if found.rounds is not None else "")
    if (rate := history.rounds_per_s) is not None:
        steps = _number(metrics.get("learn/samples_per_s"))
        yield "speed", f"{rate:.3g} rounds/s" + (f", {steps:,.0f} samples/s" if steps is not None else "")
    if found.eta_s is not None:
        may_end = found.stop_return is not None or found.stop_eval_return is not None
        yield "left", f"at most {_span(found.eta_s)}" if may_end else _span(found.eta_s)
    if (degree := _number(metrics.get("pace/off_policy_degree"))) is not None:
        worst = f"at most {history.worst_staleness or 0:g} so far"
        is_replay = REPLAY_METRIC in metrics
        yield "staleness", f"{worst}{', replayed' if is_replay else ''}, k = {degree:g} now"
    if counts := _counts(history):
        yield "tickets", ", ".join(f"{value:,.0f} {name}" for name, value in counts.items())
    if history.evaluation is not None:
        mean = _number(history.evaluation.get("metrics", {}).get("eval/return_mean"))
        shown = "unknown" if mean is None else f"{mean:.1f}"
        yield "evaluation", f"return {shown} of version {history.evaluation.get('version')}"
    yield from failures(history).items()
    if found.quiet_s is not None:
        yield "last event", f"{history.last_kind}, {_span(found.quiet_s)} ago"
    if history.num_unreadable:
        yield "note", f"{history.num_unreadable} lines of events.jsonl cannot be read"


def _health_line(part: Component, found: Status) -> str:
    is_past = found.state in ("killed", "failed") and part.state not in ("stopped", "down", "unknown")
    pieces = [f"was {part.state}" if is_past else part.state]
    if part.since_s is not None:
        pieces.append(f"since {_clock(part.since_s)} ({_span(found.now_s - part.since_s)})")
    if part.restarts:
        pieces.append(f"{part.restarts} restart{'s' if part.restarts > 1 else ''}")
    if part.detail and part.detail != part.reason:
        pieces.append(_first_line(part.detail))
    if part.reason:
        pieces.append(f"last lost: {_first_line(part.reason)}")
    return ", ".join(pieces)


def _loss_line(loss: Loss) -> str:
    again = f"up again after {loss.seconds:.1f} s" if loss.seconds is not None else "not seen up since"
    return f"{_clock(loss.time_s)} {loss.component}: {_first_line(loss.reason) or 'no reason known'}; {again}"


def _restart_line(restart: Restart) -> str:
    how = "back to" if restart.kind == "rollback" else "on from"
    reason = _first_line(restart.reason)
    return (
        f"{_clock(restart.time_s)} went {how} version {restart.version} (attempt {restart.attempt}): {reason}"
    )


def _stall_rows(stall: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for number, wait in enumerate(stall.get("waits", ()), start=1):
        since, limit = _number(wait.get("since_s")), _number(wait.get("limit_s"))
        spent = "" if since is None else f" for {since:.1f} s"
        key = f", {wait['limit_key']}" if wait.get("limit_key") else ""
        allowed = "" if limit is None else f" (limit {limit:g} s{key})"
        yield f"{number}.", f"{wait.get('who')} waited{spent} for {wait.get('for')}{allowed}"
    if stacks := stall.get("stacks"):
        yield "stacks", f"of {', '.join(stacks)}: in events.jsonl"


def _checkpoint_rows(checkpoints: Checkpoints) -> Iterator[tuple[str, str]]:
    if not checkpoints.ages_s:
        yield "none", "a resume begins at round 0"
        return
    ages = (f"{version} ({_span(age)} old)" for version, age in checkpoints.ages_s.items())
    yield "versions", ", ".join(ages)
    if checkpoints.resume_from is None:
        yield "resume", "impossible: none of them is whole"
    else:
        trust = "" if checkpoints.is_verified else " (not verified while the run writes)"
        yield "resume", f"takes {checkpoints.resume_from}{trust}"
    for number, text in enumerate(checkpoints.damaged, start=1):
        yield f"damaged {number}", _first_line(text)


def _numbered(total: int, lines: Iterator[str]) -> dict[str, str]:
    """Rows for the newest of ``total`` things, numbered from the first there ever was."""
    kept = list(lines)
    return {f"{total - len(kept) + i}.": line for i, line in enumerate(kept, start=1)}


def _counts(history: RunHistory) -> dict[str, float]:
    """Return the numbers of tickets by state, as of the last round."""
    told = history.last_round.get("counts")
    if not isinstance(told, dict):
        names = {
            "collected": "queue/total_produced",
            "trained": "queue/total_consumed",
            "ready": "queue/size",
        }
        told = {name: history.metrics.get(metric) for name, metric in names.items()}
        told["dropped samples"] = history.metrics.get("pace/dropped_samples")
    numbers = {name: _number(value) for name, value in told.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and abs(value) < _HUGE  # not NaN, not infinite
    return float(value) if is_number else None  # type: ignore[arg-type]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _clock(time_s: float) -> str:
    """``2026-03-01 17:02:11``, local."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _span(seconds: float | None) -> str:
    """``0.4 s``, ``46 s``, ``3:05 min``, ``1:02 h``, ``3.2 days``."""
    if seconds is None:
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h" if hours < 48 else f"{seconds / 86400:.1f} days"


# ---------------------------------------------------------------- telling programs


def to_json(found: Status) -> dict[str, object]:
    """The same for ``--json``: times in unix seconds, spans in seconds."""
    history = found.history
    return {
        "run_dir": found.run_dir,
        "name": found.name,
        "state": found.state,
        "reason": found.reason,
        "pid": found.pid,
        "round": history.version,
        "rounds": found.rounds,
        "rounds_per_s": history.rounds_per_s,
        "eta_s": found.eta_s,
        "last_event": {"kind": history.last_kind, "age_s": found.quiet_s},
        "off_policy_degree": _number(history.metrics.get("pace/off_policy_degree")),
        "worst_staleness": history.worst_staleness,
        "tickets": _counts(history),
        "evaluation": history.evaluation,
        "health": [asdict(part) for _, part in sorted(history.components.items())],
        "losses": {"count": history.num_losses, "newest": [_loss_json(loss) for loss in history.losses]},
        "restarts": {"count": history.num_restarts, "newest": [asdict(one) for one in history.restarts]},
        "stall": history.stall,
        "failed_evaluations": {
            "count": history.num_failed_evaluations,
            "newest": history.failed_evaluation,
        },
        "failed_checkpoints": {
            "count": history.num_failed_checkpoints,
            "newest": history.failed_checkpoint,
        },
        "skipped_checkpoints": {
            "count": history.num_skipped_checkpoints,
            "newest": history.skipped_checkpoint,
        },
        "checkpoints": asdict(found.checkpoints),
        "next": found.next_commands,
    }


def _loss_json(loss: Loss) -> dict[str, object]:
    return {
        "time_s": loss.time_s,
        "component": loss.component,
        "reason": loss.reason,
        "restored_after_s": loss.seconds,
    }
