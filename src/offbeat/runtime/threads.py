"""Roles in threads of one process: for work that releases the GIL (GPU, native environments)."""

from __future__ import annotations

import contextlib
import queue
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from offbeat.errors import StallError
from offbeat.runtime.base import (
    Broken,
    CollectorDown,
    CollectorRunner,
    CollectorUp,
    EvalEnded,
    Happening,
    HealthChanged,
    LaneStart,
    LazyEvaluator,
    Plan,
    SegmentReady,
    make_runner,
    thread_stacks,
)
from offbeat.runtime.learning import JobThread, LearnerDesk
from offbeat.types import Batch, StateTree, Ticket

_CLOSE_TIMEOUT_S = 2.0
_LEARNER_TIMEOUT_S = 5.0


class ThreadRuntime:
    """One thread per collector, one for the learner, one for asynchronous evaluation."""

    def __init__(self) -> None:
        self._happened: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self._lanes: dict[int, JobThread] = {}
        self._runners: dict[int, CollectorRunner] = {}
        self._published: tuple[int, Any] = (-1, None)
        self._evaluator: LazyEvaluator | None = None
        self._eval_thread: JobThread | None = None
        self._plan: Plan
        self._desk: LearnerDesk
        self._learner_thread: JobThread

    def start(self, plan: Plan, lanes: Sequence[LaneStart], learner_state: StateTree | None) -> None:
        """Make the learner here and each collector in its own thread."""
        self._plan = plan
        post = self._happened.put
        for lane, start in enumerate(lanes):
            self.start_lane(lane, start)
        learner = plan.make_learner(learner_state)
        self._desk = LearnerDesk(plan, learner, self._keep_weights, post)
        post(HealthChanged("learner", "up"))
        self._learner_thread = JobThread("learner", post)

    def _keep_weights(self, version: int, weights: Any) -> None:
        self._published = (version, weights)  # one assignment: readers see the old pair or the new one

    def start_lane(self, lane: int, start: LaneStart) -> None:
        """Start a collector's thread."""

        def make() -> None:
            try:
                self._runners[lane] = make_runner(self._plan.lane(lane, start))
            except Exception:
                text = f"collector {lane} raised while starting:\n{traceback.format_exc()}"
                thread.forget()
                self._happened.put(CollectorDown(lane, text.rstrip(), raised=True))
            else:
                self._happened.put(CollectorUp(lane))

        thread = self._lanes[lane] = JobThread(f"collector-{lane}", self._happened.put)
        thread.submit(make)

    def kill_lane(self, lane: int, reason: str) -> None:
        """A thread cannot be killed: the run ends and says so."""
        text = f"collector {lane} {reason}; threads cannot be killed, runtime.kind=processes can replace it"
        self._happened.put(Broken(StallError(text)))

    def collect(self, ticket: Ticket) -> None:
        """Line the ticket up for its lane."""
        thread = self._lanes[ticket.collector]
        thread.submit(lambda: self._collect(ticket, thread))

    def _collect(self, ticket: Ticket, thread: JobThread) -> None:
        runner = self._runners[ticket.collector]
        version, weights = self._published
        ticket = replace(ticket, version=version)
        try:
            segment = runner.run(ticket, weights, None)
            state = runner.collector.state_dict()
        except Exception:
            text = f"collector {ticket.collector} raised in ticket {ticket.number}:\n{traceback.format_exc()}"
            thread.forget()  # its other tickets are lost with it
            self._happened.put(CollectorDown(ticket.collector, text.rstrip(), raised=True))
        else:
            self._happened.put(SegmentReady(segment, state, num_bytes=0))

    def train(self, batch: Batch) -> None:
        """Line the round up for the learner."""
        self._learner_thread.submit(lambda: self._desk.train(batch))

    def release(self, tickets: Sequence[int]) -> None:
        """Nothing to free: segments go by reference."""

    def publish(self, version: int) -> None:
        """Publish when the learner comes to it."""
        self._learner_thread.submit(lambda: self._desk.publish(version))

    def snapshot(self) -> None:
        """Copy the learner when it comes to it."""
        self._learner_thread.submit(self._desk.snapshot)

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate a snapshot in a thread of its own."""
        thread = self._eval_thread or JobThread("evaluator", self._happened.put)
        evaluator = self._evaluator or LazyEvaluator(self._plan.evaluator())
        self._eval_thread, self._evaluator = thread, evaluator

        def hand_over(weights: Any) -> None:
            thread.submit(lambda: self._happened.put(evaluator.run(weights, version, seed)))

        self._learner_thread.submit(lambda: self._desk.hand_weights(hand_over))

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """A thread cannot be killed: the next evaluation gets another one."""
        self._eval_thread, self._evaluator = None, None
        self._happened.put(EvalEnded(version, None, 0.0, reason))

    def wait(self, timeout_s: float) -> list[Happening]:
        """Return everything that happened, or nothing after the time-out."""
        happened: list[Happening] = []
        with contextlib.suppress(queue.Empty):
            happened.append(self._happened.get(timeout=max(0.0, timeout_s)))
            while True:
                happened.append(self._happened.get_nowait())
        return happened

    def stacks(self) -> dict[str, str]:
        """Where each thread of this process is, and the learner's other ranks."""
        return thread_stacks() | self._desk.stacks()

    def pids(self) -> dict[str, int]:
        """The learner's other ranks, if it has any."""
        return self._desk.pids()

    def close(self) -> None:
        """Let each thread finish what it is doing, within limits."""
        threads = [*self._lanes.values()]
        if self._eval_thread is not None:
            threads.append(self._eval_thread)
        give_up_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in threads:
            thread.close(max(0.0, give_up_s - time.monotonic()))
        if hasattr(self, "_learner_thread"):
            self._learner_thread.close(_LEARNER_TIMEOUT_S)
        if hasattr(self, "_desk"):
            self._desk.close()
