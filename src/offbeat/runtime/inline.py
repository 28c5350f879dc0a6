"""Everything in the calling thread, one thing after the other: for k = 0, debugging and replay."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from offbeat.runtime.base import (
    CollectorDown,
    CollectorRunner,
    CollectorUp,
    Happening,
    HealthChanged,
    LaneStart,
    Plan,
    SegmentReady,
    make_runner,
    thread_stacks,
)
from offbeat.runtime.learning import LearnerDesk
from offbeat.types import Batch, StateTree, Ticket


class InlineRuntime:
    """Carries out each action at once. Segments travel by reference."""

    def __init__(self) -> None:
        self._happened: deque[Happening] = deque()
        self._runners: dict[int, CollectorRunner] = {}
        self._published: tuple[int, Any] = (-1, None)
        self._plan: Plan
        self._desk: LearnerDesk

    def start(self, plan: Plan, lanes: Sequence[LaneStart], learner_state: StateTree | None) -> None:
        """Make all roles here."""
        self._plan = plan
        learner = plan.make_learner(learner_state)
        self._desk = LearnerDesk(plan, learner, self._keep_weights, self._happened.append)
        self._happened.append(HealthChanged("learner", "up"))
        for lane, start in enumerate(lanes):
            self.start_lane(lane, start)

    def _keep_weights(self, version: int, weights: Any) -> None:
        self._published = (version, weights)

    def start_lane(self, lane: int, start: LaneStart) -> None:
        """Make a collector."""
        try:
            self._runners[lane] = make_runner(self._plan.lane(lane, start))
        except Exception:
            text = f"collector {lane} raised while starting:\n{traceback.format_exc()}"
            self._happened.append(CollectorDown(lane, text.rstrip(), raised=True))
        else:
            self._happened.append(CollectorUp(lane))

    def kill_lane(self, lane: int, reason: str) -> None:
        """Forget a collector."""
        del self._runners[lane]
        self._happened.append(CollectorDown(lane, reason))

    def collect(self, ticket: Ticket) -> None:
        """Collect now."""
        runner = self._runners.get(ticket.collector)
        if runner is None:  # it raised, and its `CollectorDown` is on the way: the ticket is lost with it
            return
        version, weights = self._published
        try:
            segment = runner.run(replace(ticket, version=version), weights, None)
            state = runner.collector.state_dict()
        except Exception:
            text = f"collector {ticket.collector} raised in ticket {ticket.number}:\n{traceback.format_exc()}"
            del self._runners[ticket.collector]
            self._happened.append(CollectorDown(ticket.collector, text.rstrip(), raised=True))
        else:
            self._happened.append(SegmentReady(segment, state, num_bytes=0))

    def train(self, batch: Batch) -> None:
        """Train now."""
        self._desk.train(batch)

    def release(self, tickets: Sequence[int]) -> None:
        """Nothing to free: segments go by reference."""

    def publish(self, version: int) -> None:
        """Keep a reference to the weights."""
        self._desk.publish(version)

    def snapshot(self) -> None:
        """Copy the learner now."""
        self._desk.snapshot()

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate now."""
        self._desk.evaluate_here(version, seed)

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """Nothing to do: an evaluation is over before anybody could lose patience."""

    def wait(self, timeout_s: float) -> list[Happening]:
        """Return what happened; with nothing to do, wait for the clock."""
        if not self._happened:
            time.sleep(max(0.0, timeout_s))
        return [self._happened.popleft() for _ in range(len(self._happened))]

    def stacks(self) -> dict[str, str]:
        """Where each thread of this process is."""
        return thread_stacks()

    def pids(self) -> dict[str, int]:
        """The learner's other ranks, if it has any."""
        return self._desk.pids()

    def close(self) -> None:
        """Drop the roles."""
        self._runners.clear()
        if hasattr(self, "_desk"):
            self._desk.close()
