"""Record what a run does, as plain JSON, through nothing but public calls and the files of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import offbeat
from offbeat.observe.callbacks import (
    CheckpointInfo,
    EvalInfo,
    FinishInfo,
    RoundInfo,
    RunInfo,
    WorkerLostInfo,
)
from tests.net.small import overrides

Record = dict[str, Any]

TIMED = re.compile(
    r"^time/"  # durations
    r"|_per_s$|_time_s$|/time_s$|_age_s$"  # rates and durations
    r"|idle|bottleneck|overlap"  # shares of durations
    r"|^system/(rss|cpu|gpu)"  # what the machine is doing
)
"""Metrics that are times, rates or follow from them: their names are kept, their values are not."""

JOURNAL_FIELDS: dict[str, tuple[str, ...]] = {
    "health": ("component", "state"),
    "worker_lost": ("lane",),
    "start": ("version",),
    "resume": ("version",),
    "round": ("version",),
    "eval": ("version",),
    "checkpoint": ("version",),
    "restart": ("version", "attempt"),
    "rollback": ("version", "attempt"),
    "finish": ("version", "failed"),
}
"""Fields of the journal's records that are kept; the rest are texts, times and metrics."""

_MASKS = (
    (re.compile(r"\b(pid|process) \d+"), r"\1 N"),
    (re.compile(r"\b\d+(\.\d+)? s\b"), "N s"),
    (re.compile(r"0x[0-9a-f]+"), "0xN"),
)


class Witness(offbeat.Callback):
    """Writes down every call with its fields: no times, paths by their names.

    Metrics are compared by round already, so that only their names are kept, once for each hook.
    """

    def __init__(self) -> None:
        self.calls: list[Record] = []
        self.names: dict[str, set[str]] = {}
        self._directory = ""

    def on_start(self, info: RunInfo) -> None:
        summary = info.summary
        self._directory = str(summary.directory)
        fields = ("name", "algorithm", "env_id", "runtime", "num_workers", "rounds", "off_policy_degree")
        self._note("on_start", **{name: getattr(summary, name) for name in fields})
        self.calls[-1].update(stop_return=summary.stop_return, resumed_from=info.resumed_from)

    def on_round(self, info: RoundInfo) -> None:
        self._note("on_round", info.metrics, version=info.version)

    def on_eval(self, info: EvalInfo) -> None:
        self._note("on_eval", info.metrics, version=info.version)

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        self._note("on_checkpoint", version=info.version, path=info.path.name, score=info.score)

    def on_worker_lost(self, info: WorkerLostInfo) -> None:
        self._note("on_worker_lost", lane=info.lane, restarts=info.restarts, reason=self._text(info.reason))

    def on_notice(self, text: str) -> None:
        self._note("on_notice", text=self._text(text))

    def on_finish(self, info: FinishInfo) -> None:
        error = None if info.error is None else type(info.error).__name__
        restart = None if info.restart is None else self._text(info.restart)
        reason = self._text(info.reason)
        self._note(
            "on_finish", info.metrics, version=info.version, reason=reason, error=error, restart=restart
        )

    def _note(self, hook: str, metrics: Iterable[str] = (), **fields: Any) -> None:
        self.calls.append({"hook": hook, **fields})
        self.names.setdefault(hook, set()).update(metrics)

    def _text(self, text: str) -> str:
        return masked(text.replace(self._directory, "RUN"))


def masked(text: str) -> str:
    """The first line of a text, without numbers of processes, addresses and durations."""
    line = text.strip().partition("\n")[0]
    for pattern, instead in _MASKS:
        line = pattern.sub(instead, line)
    return line


def record_recipe(
    recipe: str, directory: Path, kind: str = "inline", changes: Mapping[str, Any] | None = None
) -> Record:
    """Train a recipe, small, and record all that can be observed."""
    witness = Witness()
    settings = {**overrides(recipe), "runtime.kind": kind, "run.dir": str(directory), **(changes or {})}
    offbeat.train(recipe, overrides=settings, callbacks=[witness])
    return record_of(directory, witness)


def record_of(directory: Path, witness: Witness) -> Record:
    """All that a run directory and the calls of a run tell."""
    events = read_lines(directory / "events.jsonl")
    return {
        "digest": offbeat.digest(directory),
        "schedule": (directory / "schedule.jsonl").read_text().splitlines(),
        "metrics": values(events, "round"),
        "evals": values(events, "eval"),
        "callbacks": plain(witness.calls),
        "names": {hook: sorted(names) for hook, names in witness.names.items() if names},
        "journal": [journal_entry(event) for event in events],
    }


def read_lines(path: Path) -> list[Record]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(events: Iterable[Record], kind: str) -> dict[str, Record]:
    """Metrics by version, without times and rates; counts of tickets are metrics too. NaN is None."""
    found = {}
    for event in events:
        if event["kind"] == kind:
            counts = {f"counts/{name}": value for name, value in event.get("counts", {}).items()}
            metrics = {**event["metrics"], **counts}
            found[str(event["version"])] = {n: v for n, v in metrics.items() if not TIMED.search(n)}
    return found


def journal_entry(event: Record) -> Record:
    """The kind of a record, with the fields that belong to the kind."""
    fields = JOURNAL_FIELDS.get(event["kind"], ())
    return {"kind": event["kind"], **{name: event[name] for name in fields if name in event}}


def plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))
