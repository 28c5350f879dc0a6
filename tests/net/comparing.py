"""Compare a record with a kept one. What later versions add (fields, metrics) is left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tests.net.recording import Record

TOLERANCE = 1e-3
"""Relative and absolute, for floats of another machine."""

ORDER_FREE = re.compile(
    r"^(learn|eval|counts)/"
    r"|^pace/(off_policy_degree|collect_count|train_count|lag|.*_age|stale_.*_ratio|dropped_.*)$"
    r"|^rollout/(return_.*|length_mean|total_.*|generation_errors|samples_by_env_.*)$"
    r"|^queue/(size|total_.*)$"
    r"|^weights/(current_param_version|published_version|publish_lag|param_sync_.*|sync_failures)$"
    r"|^system/(workers_alive|worker_restarts)$"
)
"""Metrics that the order of arrival cannot move where k is 0: compared between runtimes.

The rest: ``queue/bytes`` depends on how a runtime keeps segments.
"""


def differences(kept: Record, now: Record, exact: bool = True) -> list[str]:
    """Lines that say what is not as it was; ``exact`` False: no digests, floats to `TOLERANCE`."""
    kept, now = dict(kept), dict(now)
    found = [
        f"schedule[{number}]: {line!r} is not compact"
        for number, line in enumerate(now.get("schedule", []))
        if line != _compact(json.loads(line))
    ]
    if not exact:
        kept.pop("digest", None)
    if _writes_beside(kept):
        kept, now = _checkpoints_last(kept), _checkpoints_last(now)
    for record in (kept, now):
        if "schedule" in record:
            record["schedule"] = [json.loads(line) for line in record["schedule"]]
    _compare("", kept, now, exact, found)
    if not found and exact and _lines(kept, kept) != _lines(kept, now):
        found.append("schedule: not the same bytes")
    return found


def unordered(record: Record) -> Record:
    """The part of a record that is the same in every runtime, whatever arrives first."""
    record = _checkpoints_last(record)
    return {
        "digest": record["digest"],
        "schedule": _sorted_between(record["schedule"], _is_round, _ticket),
        "metrics": {version: _order_free(metrics) for version, metrics in record["metrics"].items()},
        "evals": record["evals"],
        "names": record["names"],
        "callbacks": _by_round([_anywhere(call) for call in record["callbacks"]], "hook", "on_round"),
        "journal": _by_round(
            [entry for entry in record["journal"] if _is_everywhere(entry)], "kind", "round"
        ),
    }


def _writes_beside(record: Record) -> bool:
    """True for a run whose checkpoints are written while rounds go on: all but those in one thread."""
    starts = [call for call in record.get("callbacks", []) if isinstance(call, dict) and "runtime" in call]
    return any(start["runtime"] != "inline" for start in starts)


def _checkpoints_last(record: Record) -> Record:
    """The record with its checkpoints behind the rest: the disk decides after which round they came."""
    parts = [(part, key) for part, key in (("callbacks", "hook"), ("journal", "kind")) if part in record]
    return {**record, **{part: _apart(record[part], key) for part, key in parts}}


def _apart(entries: list[Record], key: str) -> list[Record]:
    return sorted(entries, key=lambda entry: "checkpoint" in entry[key])


def _lines(kept: Record, record: Record) -> list[str]:
    """The schedule as it would be written with the fields, in their order, that the kept one has."""
    lines = []
    for before, now in zip(kept.get("schedule", []), record.get("schedule", []), strict=True):
        fields = {name: value for name, value in now.items() if name in before}
        lines.append(_compact(fields))
    return lines


def _compact(record: Record) -> str:
    """The line of a schedule as it is written: without blanks."""
    return json.dumps(record, separators=(",", ":"))


def _compare(where: str, kept: Any, now: Any, exact: bool, found: list[str]) -> None:
    if isinstance(kept, dict) and isinstance(now, dict):
        for name, value in kept.items():
            if name not in now:
                found.append(f"{where}/{name}: missing")
            elif where == "/names":
                lost = sorted(set(value) - set(now[name]))
                found += [f"{where}/{name}: {metric} missing" for metric in lost]
            else:
                _compare(f"{where}/{name}", value, now[name], exact, found)
    elif isinstance(kept, list) and isinstance(now, list):
        if len(kept) != len(now):
            found.append(f"{where}: {len(now)} entries instead of {len(kept)}")
        for number, (before, after) in enumerate(zip(kept, now, strict=False)):
            _compare(f"{where}[{number}]", before, after, exact, found)
    elif not _same(kept, now, exact):
        found.append(f"{where}: {now!r} instead of {kept!r}")


def _same(kept: Any, now: Any, exact: bool) -> bool:
    if exact or not (isinstance(kept, float) and isinstance(now, int | float)):
        return bool(kept == now)
    return math.isclose(kept, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _order_free(metrics: Mapping[str, Any]) -> Record:
    return {name: value for name, value in metrics.items() if ORDER_FREE.search(name)}


def _anywhere(call: Record) -> Record:
    """A call without the name of the runtime, and without a score, which the evaluation may be late for."""
    return {name: value for name, value in call.items() if name not in ("runtime", "score")}


def _is_everywhere(entry: Record) -> bool:
    """Only some runtimes give the evaluator and the learner a process of its own, which has to start."""
    return str(entry.get("component", "collector")).startswith("collector")


def _by_round(records: list[Record], key: str, divider: str) -> list[list[Record]]:
    """Records in the rounds between dividers, each round in an order of its own."""
    rounds: list[list[Record]] = [[]]
    for record in records:
        if record[key] == divider:
            rounds.append([])
        rounds[-1].append(record)
    return [sorted(part, key=lambda record: json.dumps(record, sort_keys=True)) for part in rounds]


def _is_round(line: str) -> bool:
    return bool(json.loads(line)["kind"] == "round")


def _ticket(line: str) -> int:
    return int(json.loads(line).get("ticket", -1))


def _sorted_between(lines: list[str], is_divider: Any, key: Any) -> list[str]:
    """Lines in the order of their tickets between two rounds."""
    result: list[str] = []
    part: list[str] = []
    for line in lines:
        if is_divider(line):
            result += [*sorted(part, key=key), line]
            part = []
        else:
            part.append(line)
    return [*result, *sorted(part, key=key)]
