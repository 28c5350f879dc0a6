"""Every wait of a run, with its deadline: the only timers of the driver, and of the pause between two.

A row says who waits for whom, since when, how long at most and by which setting, and what happens at the end.
Hang detection, the report of a stall and the phase on the display read these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, KeysView, Mapping, Sequence
from typing import Any, NamedTuple

_SUSPENDED_S = 2.0
STARTING = "starting"
"""The phase of a run until its roles are there."""
Text = str | Callable[[], str]
"""A text, or a function that returns it when the row is read."""


class Wait(NamedTuple):
    """One row. ``expire`` runs when the limit is over: it replaces what can be replaced, or raises.

    ``whom`` begins with the name of a component if it is one: ``collector_0 to start``. ``phase`` is the text
    for the display while this lasts; empty: none.
    Example: ``Wait("train", "round 7", "learner", 600.0, "runtime.train_timeout_s", stall)``.
    """

    key: Hashable
    owner: Text
    whom: Text
    limit_s: float
    limit_key: str
    expire: Callable[[], None]
    phase: str = ""


class Pending(NamedTuple):
    """A row as it stands: the wait, and the seconds it has lasted."""

    wait: Wait
    waited_s: float

    def to_record(self) -> dict[str, Any]:
        """Return the row as an event holds it."""
        wait = self.wait
        record = {"who": _text(wait.owner), "for": _text(wait.whom), "since_s": round(self.waited_s, 3)}
        return {**record, "limit_s": wait.limit_s, "limit_key": wait.limit_key}

    def __str__(self) -> str:
        wait = self.wait
        since = f"{_text(wait.owner)} waits for {_text(wait.whom)} since {self.waited_s:.1f} s"
        return f"{since} ({_limit(wait)})"


def _limit(wait: Wait) -> str:
    return "no limit" if math.isinf(wait.limit_s) else f"limit {wait.limit_s:g} s, {wait.limit_key}"


def _text(text: Text) -> str:
    return text if isinstance(text, str) else text()


class Waits:
    """The open rows. Those of one limit are in order of their start: a look at the first is enough."""

    def __init__(self) -> None:
        # Limit -> key -> wait, start; only limits of open rows, since each look goes over all of them.
        self._by_limit: dict[float, dict[Hashable, tuple[Wait, float]]] = {}
        self._limits: dict[Hashable, float] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._limits

    def keys(self) -> KeysView[Hashable]:
        """Return the keys of the open rows."""
        return self._limits.keys()

    def begin(self, wait: Wait, now_s: float) -> None:
        """Open a row; one of the same key starts again."""
        key, limit_s = wait.key, wait.limit_s
        before = self._limits.get(key)
        if before == limit_s:
            del self._by_limit[limit_s][key]
        elif before is not None:
            self.end(key)
        self._limits[key] = limit_s
        rows = self._by_limit.get(limit_s)
        if rows is None:
            rows = self._by_limit[limit_s] = {}
        rows[key] = (wait, now_s)

    def end(self, key: Hashable) -> None:
        """Close a row, if it is open."""
        limit_s = self._limits.pop(key, None)
        if limit_s is not None:
            rows = self._by_limit[limit_s]
            del rows[key]
            if not rows:
                del self._by_limit[limit_s]

    def shift(self, by_s: float, now_s: float) -> None:
        """Extend every deadline by time in which this process was suspended, as far as a row saw it."""
        for rows in self._by_limit.values():
            for key, (wait, since_s) in rows.items():
                rows[key] = (wait, min(since_s + by_s, now_s))

    def extend_if_suspended(self, expected_s: float, now_s: float) -> None:
        """Shift every deadline if this process runs much later than it expected: it was suspended."""
        if (suspended_s := now_s - expected_s) > _SUSPENDED_S:
            self.shift(suspended_s, now_s)

    def expired(self, now_s: float) -> list[Wait]:
        """Return the rows whose limit is over. Each is returned once, and stays open without a limit."""
        found: list[Wait] = []
        for limit_s, rows in self._by_limit.items():
            for wait, since_s in rows.values():
                if now_s - since_s <= limit_s:
                    break
                found.append(wait)
        for wait in found:
            _, since_s = self._by_limit[self._limits[wait.key]][wait.key]
            self.end(wait.key)
            self._limits[wait.key] = math.inf
            self._by_limit.setdefault(math.inf, {})[wait.key] = (wait, since_s)
        return found

    def deadline_s(self, key: Hashable) -> float:
        """Return when a row expires; infinity when it is not open or has expired."""
        limit_s = self._limits.get(key, math.inf)
        return math.inf if math.isinf(limit_s) else self._by_limit[limit_s][key][1] + limit_s

    def next_s(self) -> float:
        """Return the earliest deadline; infinity when no row has one."""
        soonest_s = math.inf
        for limit_s, rows in self._by_limit.items():
            for _, since_s in rows.values():
                soonest_s = min(soonest_s, since_s + limit_s)
                break
        return soonest_s

    def rows(self, now_s: float) -> list[Pending]:
        """Return all open rows, the longest wait first."""
        rows = (row for rows in self._by_limit.values() for row in rows.values())
        return sorted(
            (Pending(wait, now_s - since_s) for wait, since_s in rows), key=lambda row: -row.waited_s
        )

    def phase(self, progress: Mapping[str, str] | None = None) -> str:
        """Return the phase of the run: the text of the newest row that has one, empty when it collects.

        ``progress``: reports by component. Appended are those of all that rows of this phase wait for.
        """
        rows = (row for rows in self._by_limit.values() for row in rows.values())
        phases = [(since_s, wait.phase, wait.whom) for wait, since_s in rows if wait.phase]
        _, phase = max([(since_s, phase) for since_s, phase, _ in phases], default=(0.0, ""))
        components = [_text(whom).partition(" ")[0] for _, other, whom in phases if other == phase]
        reports = {(progress or {}).get(component, "") for component in components}
        return ": ".join([phase, *sorted(reports - {""})])


def describe_stall(headline: str, waits: Sequence[Pending], stacks: Mapping[str, str]) -> str:
    """Return the report of a stalled run: who waits for whom, and the stack of each component."""
    lines = [headline]
    if waits:
        lines.append("who waits for whom:")
        lines += [f"  {row}" for row in waits]
    for name, stack in stacks.items():
        lines += [f"{name} was here:", *(f"  {line}" for line in stack.splitlines())]
    return "\n".join(lines)
