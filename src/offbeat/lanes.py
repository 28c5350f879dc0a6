"""The collectors of a run as its driver knows them: where they stand, what they do, what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from offbeat.config.models import AsyncTrainingConfig, RuntimeConfig
from offbeat.errors import CollectError
from offbeat.runtime.base import LaneStart
from offbeat.runtime.supervision import RestartBudget, Wait
from offbeat.types import StateTree

_MOST_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of a run that was lost, and after how many seconds another one was in its place.

    ``replaced_s`` is None when none came before the run ended.
    Example: ``Loss("collector_1", "killed by SIGKILL", version=14, replaced_s=0.7)``.
    """

    component: str
    reason: str
    version: int
    replaced_s: float | None = None


def collector_name(lane: int) -> str:
    """What a lane is called in health records and reports."""
    return f"collector_{lane}"


class Lanes:
    """Keeps the books of the collectors; times come in from the caller."""

    def __init__(self, runtime: RuntimeConfig, dial: AsyncTrainingConfig) -> None:
        self._runtime = runtime
        self._dial = dial
        self._budget = RestartBudget(runtime)
        self.starts = [LaneStart() for _ in range(runtime.num_workers)]
        self.rollbacks = 0  # times the run went back to collect other samples
        self.losses: list[Loss] = []
        self._tickets: dict[int, list[int]] = {}  # lane -> tickets it has, in order
        self._busy_since_s: dict[int, float] = {}  # lane -> since when the first of them runs
        self._failures: dict[int, int] = {}  # ticket -> collectors that were lost over it
        self._open_losses: dict[int, dict[int, float]] = {}  # lane -> losses not made good, and since when
        self._start_at_s: dict[int, float] = {}  # lane -> when it is to be started again
        self._have_worked: set[int] = set()

    # ------------------------------------------------------------ work

    def issued(self, lane: int, ticket: int, now_s: float) -> None:
        """A ticket goes to a lane, behind those it has."""
        tickets = self._tickets.setdefault(lane, [])
        if not tickets:
            self._busy_since_s[lane] = now_s
        tickets.append(ticket)

    def arrived(self, lane: int, ticket: int, state: StateTree | None, now_s: float) -> LaneStart:
        """A segment came back; return where the lane now stands."""
        self._tickets[lane].remove(ticket)
        self._busy_since_s[lane] = now_s
        self._budget.worked(lane)
        self._have_worked.add(lane)
        self.starts[lane] = LaneStart(self.starts[lane].incarnation, state)
        return self.starts[lane]

    def has_worked(self, lane: int) -> bool:
        """Whether a segment of this lane has come back since the driver started."""
        return lane in self._have_worked

    def hung(self, asked_s: float, now_s: float) -> list[tuple[int, str]]:
        """Lanes whose ticket takes too long, with what is to be said of them; each is named once."""
        limit_s = self._dial.generation_timeout
        found = []
        for lane, tickets in self._tickets.items():
            if tickets and asked_s - self._busy_since_s[lane] > limit_s:
                self._busy_since_s[lane] = now_s
                found.append((lane, f"hung: ticket {tickets[0]} took more than {limit_s:g} s"))
        return found

    # ------------------------------------------------------------ losses

    def lost(self, lane: int, reason: str, version: int, now_s: float) -> float:
        """A collector is gone and its tickets with it; return the pause before another one is started.

        CollectError when no other one may be started: the budget is spent, or one ticket kills them all.
        """
        self._open_losses.setdefault(lane, {})[len(self.losses)] = now_s
        self.losses.append(Loss(collector_name(lane), reason, version))
        self.starts[lane] = revived(self.starts[lane])
        self._blame_ticket(self._tickets.pop(lane, []), reason)
        pause_s = self._budget.lost(lane, now_s)
        if self._budget.is_spent:
            limits = self._runtime
            raise CollectError(
                f"more than {limits.max_worker_restarts} collectors were lost within "
                f"{limits.restart_window_s:g} s (runtime.max_worker_restarts, restart_window_s); "
                f"the last one: {reason}"
            )
        self._start_at_s[lane] = now_s + pause_s
        return pause_s

    def _blame_ticket(self, tickets: Sequence[int], reason: str) -> None:
        if not tickets:
            return
        failures = self._failures[tickets[0]] = self._failures.get(tickets[0], 0) + 1
        if failures >= _MOST_FAILURES:
            text = f"ticket {tickets[0]} took {failures} collectors down and would take more"
            raise CollectError(f"{text}; the last one: {reason}")

    def due(self, now_s: float) -> list[int]:
        """Lanes whose pause is over: they are to be started now."""
        lanes = [lane for lane, due_s in self._start_at_s.items() if now_s >= due_s]
        for lane in lanes:
            del self._start_at_s[lane]
        return lanes

    def next_due_s(self) -> float | None:
        """When the next lane is to be started again."""
        return min(self._start_at_s.values(), default=None)

    def up(self, lane: int, now_s: float) -> None:
        """A collector can take tickets: what was lost on its lane is made good."""
        for place, since_s in self._open_losses.pop(lane, {}).items():
            self.losses[place] = replace(self.losses[place], replaced_s=now_s - since_s)

    # ------------------------------------------------------------ waiting

    def waits(self, who: str, now_s: float) -> list[Wait]:
        """What ``who`` waits for among the collectors."""
        limit_s, key = self._dial.generation_timeout, "async_training.generation_timeout"
        waits = [
            Wait(who, f"{collector_name(lane)} (ticket {tickets[0]})", now_s - since_s, limit_s, key)
            for lane, tickets in self._tickets.items()
            if tickets and (since_s := self._busy_since_s[lane])
        ]
        for lane, since in self._open_losses.items():
            whom, limit_s = f"{collector_name(lane)} to start", self._runtime.start_timeout_s
            waits.append(Wait(who, whom, now_s - min(since.values()), limit_s, "runtime.start_timeout_s"))
        return waits

    def shift(self, by_s: float) -> None:
        """Nobody is to blame for time in which this process did not run."""
        self._busy_since_s = {lane: since_s + by_s for lane, since_s in self._busy_since_s.items()}

    # ------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """Where each lane goes on."""
        starts = [{"incarnation": start.incarnation, "state": start.state} for start in self.starts]
        return {"starts": starts, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: dict[str, Any], rollback: int) -> None:
        """Go on from saved states; with ``rollback`` (its number) anew, with other seeds than ever before."""
        self.rollbacks = state["rollbacks"] + rollback
        for lane, saved in enumerate(state["starts"][: len(self.starts)]):
            if rollback:
                self.starts[lane] = LaneStart(saved["incarnation"] + rollback)
            else:
                self.starts[lane] = revived(LaneStart(saved["incarnation"], saved["state"]))


def revived(start: LaneStart) -> LaneStart:
    """How a lane goes on after its process ended: where it was, or anew if it cannot."""
    return start if start.state is not None else LaneStart(start.incarnation + 1)
