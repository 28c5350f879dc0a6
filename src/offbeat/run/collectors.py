"""The table of collectors: who holds which tickets since when, state, incarnation, losses, restarts due."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.checkpoint import check_data, check_state
from offbeat.config.settings import Settings
from offbeat.errors import CollectError
from offbeat.pacing.events import (
    CollectorDown,
    CollectorLeft,
    CollectorRemoved,
    CollectorUp,
    CollectorWorked,
    Handlers,
    Issued,
    LearnerStateless,
    RoundTrained,
    SegmentArrived,
)
from offbeat.run.waits import STARTING, Wait, Waits
from offbeat.runtime.spec import CollectorState
from offbeat.types import RemoteData

_MOST_FAILURES = 3
_WORK_LIMIT = "async_training.generation_timeout"


@dataclass(frozen=True, slots=True)
class Loss:
    """A component that was lost, and the seconds until another one was in its place.

    ``replaced_s`` is None when none was before the run ended.
    Example: ``Loss("collector_1", "killed by SIGKILL", version=14, replaced_s=0.7)``.
    """

    component: str
    reason: str
    version: int
    replaced_s: float | None = None


@dataclass(slots=True)
class Collector:
    """One row. ``since_s``: start of the work on its first ticket; ``busy_s``: time at work in this round.

    A wide one reports its time at work, the last time at ``since_s``. Until it does so again, it is taken to
    be at work for its ``share`` of the time; ``assumed_s`` is what rounds that ended since then counted so.
    ``is_used``: a segment of its present incarnation has arrived.
    """

    name: str
    start: CollectorState = field(default_factory=CollectorState)
    tickets: dict[int, float] = field(default_factory=dict)  # number -> issued at
    since_s: float = 0.0
    busy_s: float = 0.0
    is_wide: bool = False
    share: float = 1.0
    assumed_s: float = 0.0
    is_up: bool = False
    is_leaving: bool = False  # or has left
    has_worked: bool = False
    has_given_work: bool = False
    is_used: bool = False
    losses_in_a_row: int = 0
    open_losses: dict[int, float] = field(default_factory=dict)  # place in the list of losses -> lost at

    @property
    def is_restorable(self) -> bool:
        """True when another process continues where this one was: with its state, or from the start."""
        return self.start.state is not None or not self.is_used

    def restart(self) -> None:
        """Continue in another process: where this one was, or as a new incarnation."""
        if not self.is_restorable:
            self.start, self.is_used = CollectorState(self.start.incarnation + 1), False


class Collectors:
    """Rows of all collectors, updated by the events of a run.

    ``start``, ``kill`` and ``working_s`` are the runtime's; the deadlines of rows are `Waits`.
    ``version`` returns the round. ``saves``: states and segments go into checkpoints, so the first of each
    collector are tried.
    """

    def __init__(
        self,
        settings: Settings,
        waits: Waits,
        start: Callable[[int], None],
        kill: Callable[[int, str], None],
        version: Callable[[], int],
        start_limit_s: float,
        saves: bool = False,
        *,
        working_s: Callable[[int], float | None],
        clock: Callable[[], float],
    ) -> None:
        runtime = settings.runtime
        self.rows: list[Collector] = []
        self.losses: list[Loss] = []
        self._runtime = runtime
        self._settings = settings
        self._waits = waits
        self._start, self._kill, self._version = start, kill, version
        self._working_s, self._clock = working_s, clock
        self._start_limit_s = start_limit_s  # infinite where a late start would only end the run
        self._phase = STARTING  # of the run; not of one whose collectors are replaced
        self._saves = saves
        self._window_s = 0.0
        self._lost_at_s: deque[float] = deque()
        self._failures: dict[int, int] = {}  # ticket still out -> collectors that were lost with it
        self._deadly: int | None = None  # ticket that took the last of several collectors down alone
        self._work: list[Wait] = []
        self.extend(runtime.num_workers)

    def handlers(self) -> Handlers:
        """Return the handlers of a run's events."""
        return {
            CollectorUp: self._up,
            CollectorDown: self._down,
            Issued: self._issued,
            SegmentArrived: self._arrived,
            CollectorWorked: self._worked,
            RoundTrained: self._round_trained,
            LearnerStateless: self._learner_stateless,
            CollectorRemoved: self._leaving,
            CollectorLeft: self._left,
        }

    def _learner_stateless(self, event: LearnerStateless, now_s: float) -> None:
        self._saves = False

    @property
    def starts(self) -> dict[int, CollectorState]:
        """Return the state that each collector starts or continues from, by number."""
        return {index: row.start for index, row in enumerate(self.rows) if not row.is_leaving}

    # ------------------------------------------------------------ joining and leaving

    def extend(self, num_rows: int) -> range:
        """Add rows until there are so many; return the numbers of the new ones."""
        added = range(len(self.rows), num_rows)
        for index in added:
            self.rows.append(row := Collector(f"collector_{index}"))
            self._work.append(self._work_of(index, row))
        return added

    def _leaving(self, event: CollectorRemoved, now_s: float) -> None:
        assert event.collector is not None, "the driver chooses a collector"
        self.rows[event.collector].is_leaving = True

    def _left(self, event: CollectorLeft, now_s: float) -> None:
        row = self.rows[event.collector]
        row.is_leaving, row.is_up = True, False
        for key in (row.name, (row.name, "start"), (row.name, "pause")):
            self._waits.end(key)

    def _round(self) -> str:
        return f"round {self._version()}"

    # ------------------------------------------------------------ work

    def _issued(self, event: Issued, now_s: float) -> None:
        ticket = event.ticket
        row = self.rows[ticket.collector]
        if not row.tickets:
            row.since_s = now_s
            self._waits.begin(self._work[ticket.collector], now_s)
        row.tickets[ticket.number] = now_s

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        segment, index = event.segment, event.segment.ticket.collector
        row, collect_s = self.rows[index], segment.collect_s + event.state_s
        del row.tickets[segment.ticket.number]
        if self._failures:
            self._failures.pop(segment.ticket.number, None)
            if self._deadly == segment.ticket.number:
                self._deadly = None
        # An arrival may be noticed late, after the learner's turn: the segment says how long it took.
        ended_s = min(now_s, row.since_s + collect_s) if collect_s > 0 else now_s
        if not row.is_wide:
            row.busy_s += max(0.0, ended_s - max(row.since_s, self._window_s))
        elif event.busy_s > 0.0:  # one report for all segments of a piece of work
            self._count(row, event.busy_s + event.state_s, now_s)
        if not row.has_worked and self._saves:
            check_state(event.state, f"{row.name}.state_dict()")
            data = segment.data.fetch() if isinstance(segment.data, RemoteData) else segment.data
            check_data(data, f"segment.data of {row.name}")
        row.has_worked, row.is_used, row.losses_in_a_row = True, True, 0
        if event.state is not row.start.state:
            row.start = CollectorState(row.start.incarnation, event.state)
        if row.tickets:
            if not row.is_wide:
                row.since_s = max(ended_s, next(iter(row.tickets.values())))
            self._waits.begin(self._work[index], now_s)
        else:
            self._waits.end(row.name)

    def _work_of(self, index: int, row: Collector) -> Wait:
        """Return the wait for a report of a collector, however many tickets it holds.

        It hangs when one piece of work takes too long: one that waits for tools or environments does not.
        """
        limit_s, setting = self._settings.async_training.generation_timeout, _WORK_LIMIT

        def first() -> int:
            return next(iter(row.tickets), -1)

        def whom() -> str:
            return f"{row.name} (ticket {first()})"

        def expire() -> None:
            left_s = limit_s - (self._working_s(index) or 0.0)
            if left_s > 0.0:
                self._waits.begin(wait._replace(limit_s=left_s), self._clock())
            else:
                self._kill(index, f"hung: ticket {first()} took more than {limit_s:g} s ({setting})")

        wait = Wait(row.name, self._round, whom, limit_s, setting, expire)
        return wait

    def _worked(self, event: CollectorWorked, now_s: float) -> None:
        row = self.rows[event.collector]
        if row.is_wide:
            self._count(row, event.busy_s, now_s)
        if row.tickets:
            self._waits.begin(self._work[event.collector], now_s)

    def _count(self, row: Collector, busy_s: float, now_s: float) -> None:
        """Count a report of the time at work since the one before, without what was assumed of it."""
        past_s = now_s - row.since_s
        if past_s > 0.0:  # the share is that of about the last second
            row.share += min(1.0, past_s) * (min(1.0, busy_s / past_s) - row.share)
        row.busy_s += busy_s - row.assumed_s
        row.since_s, row.assumed_s = now_s, 0.0

    def _busy_s(self, row: Collector, now_s: float) -> float:
        """Return the time at work of a collector that holds tickets."""
        if row.is_wide:
            return row.busy_s + row.share * (now_s - row.since_s) - row.assumed_s
        return row.busy_s + max(0.0, now_s - max(row.since_s, self._window_s))

    def busy_s(self, now_s: float) -> float:
        """Return the seconds that all collectors together were at work since the last round ended."""
        return sum([self._busy_s(row, now_s) if row.tickets else row.busy_s for row in self.rows])

    def _round_trained(self, event: RoundTrained, now_s: float) -> None:
        self._window_s = event.ended_s
        for row in self.rows:
            row.busy_s = 0.0
            row.assumed_s = row.share * (event.ended_s - row.since_s) if row.is_wide and row.tickets else 0.0

    # ------------------------------------------------------------ starts and losses

    def starting(self, index: int, now_s: float) -> None:
        """Start to wait for a collector to come up."""
        row, limit_s, setting = self.rows[index], self._start_limit_s, "runtime.start_timeout_s"
        key, whom = (row.name, "start"), f"{row.name} to start"

        def kill() -> None:
            self._kill(index, f"did not start within {limit_s:g} s ({setting})")

        self._waits.begin(Wait(key, self._round, whom, limit_s, setting, kill, self._phase), now_s)

    def _up(self, event: CollectorUp, now_s: float) -> None:
        row = self.rows[event.collector]
        row.is_up, self._phase = True, ""
        row.is_wide |= event.is_wide or event.capacity > 1
        self._waits.end((row.name, "start"))
        for place, lost_s in row.open_losses.items():
            self.losses[place] = replace(self.losses[place], replaced_s=now_s - lost_s)
        row.open_losses.clear()

    def _down(self, event: CollectorDown, now_s: float) -> None:
        row = self.rows[event.collector]
        if row.tickets:
            row.busy_s, row.assumed_s = self._busy_s(row, now_s), 0.0
            self._blame(row)
            row.tickets.clear()
        row.is_up = False
        self._waits.end(row.name)
        self._waits.end((row.name, "start"))
        row.open_losses[len(self.losses)] = now_s
        self.losses.append(Loss(row.name, event.reason, self._version()))
        row.restart()

    def _blame(self, row: Collector) -> None:
        """Count the loss for each ticket of a collector; one that is lost again and again is tried alone."""
        for number in row.tickets:
            self._failures[number] = self._failures.get(number, 0) + 1
        first = next(iter(row.tickets))
        if len(row.tickets) == 1 and self._failures[first] >= _MOST_FAILURES:
            self._deadly = first

    def schedule_restart(self, index: int, reason: str, now_s: float) -> float:
        """Return the pause before a collector is started again, and start to wait for its end.

        The first replacement comes at once, from the caller; one that is lost again before it made a segment
        waits, longer each time. CollectError when none may be started: the budget is spent, or one ticket
        kills them all.
        """
        self._check_budget(reason, now_s)
        row, limits = self.rows[index], self._runtime
        row.losses_in_a_row += 1
        longer_s = limits.restart_backoff_s * 2.0 ** (row.losses_in_a_row - 2)
        pause_s = 0.0 if row.losses_in_a_row == 1 else min(longer_s, limits.restart_backoff_max_s)
        if pause_s == 0:
            return 0.0
        key = (row.name, "pause")

        def start() -> None:
            self._waits.end(key)
            self._start(index)

        owner, setting = self._round, "runtime.restart_backoff_s"
        self._waits.begin(Wait(key, owner, f"{row.name} to restart", pause_s, setting, start), now_s)
        return pause_s

    def _check_budget(self, reason: str, now_s: float) -> None:
        limits = self._runtime
        self._lost_at_s.append(now_s)
        while self._lost_at_s[0] < now_s - limits.restart_window_s:
            self._lost_at_s.popleft()
        if self._deadly is not None:
            text = f"ticket {self._deadly} took {self._failures[self._deadly]} collectors down"
            raise CollectError(f"{text} and would take more; the last one: {reason}")
        if len(self._lost_at_s) > limits.max_worker_restarts:
            raise CollectError(
                f"more than {limits.max_worker_restarts} collectors were lost within "
                f"{limits.restart_window_s:g} s (runtime.max_worker_restarts, restart_window_s); "
                f"the last one: {reason}"
            )

    # ------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """Return the state that each collector continues from, and which have left."""
        starts: list[dict[str, Any]] = []
        for row in self.rows:
            starts.append({"incarnation": row.start.incarnation, "state": row.start.state})
            if row.start.state is None and not row.is_used:
                starts[-1]["used"] = False
        gone = [index for index, row in enumerate(self.rows) if row.is_leaving]
        configured = self._runtime.num_workers
        changed = gone or len(starts) != configured
        return {"starts": starts} | ({"configured": configured, "gone": gone} if changed else {})

    def load_state_dict(self, state: dict[str, Any], rollback: int = 0) -> None:
        """Continue from saved states; with ``rollback`` (its number) start again, with other seeds."""
        if state.get("configured") == self._runtime.num_workers:
            self.extend(len(state["starts"]))
            for index in state["gone"]:
                self.rows[index].is_leaving = True
        for row, saved in zip(self.rows, state["starts"], strict=False):
            incarnation = operator.index(saved["incarnation"])
            row.start, row.is_used = CollectorState(incarnation, saved["state"]), saved.get("used", True)
            if rollback:
                row.start, row.is_used = CollectorState(incarnation + rollback), False
            else:
                row.restart()
