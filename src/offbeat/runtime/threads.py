"""Roles in threads of one process: for work that releases the GIL (GPU, native environments)."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from offbeat.errors import OffbeatError, StallError
from offbeat.pacing.events import (
    Broken,
    EvalDone,
    Event,
    HealthChanged,
)
from offbeat.runtime.base import keep_progress, thread_stacks
from offbeat.runtime.learning import JobThread, LazyEvaluator, LearnerExecutor
from offbeat.runtime.serial import make_collector
from offbeat.runtime.serve import serve, start
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.types import Batch, StateTree, Ticket

_CLOSE_TIMEOUT_S = 2.0
_LEARNER_TIMEOUT_S = 5.0


class QueueInbox:
    """Tickets on their way to another thread; None stops it."""

    def __init__(self) -> None:
        self.tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._is_closed = False

    def close(self) -> None:
        """Stop the reader after what it is doing now, whatever waits."""
        self._is_closed = True
        self.tickets.put(None)

    def receive(self, timeout_s: float | None) -> Sequence[Ticket] | None:
        """Return the next ticket if one comes in time."""
        try:
            ticket = self.tickets.get(timeout=timeout_s)
        except queue.Empty:
            return ()
        return None if ticket is None or self._is_closed else (ticket,)


class ThreadRuntime:
    """One thread per collector, one for the learner, one for asynchronous evaluation."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}
        self._inboxes: dict[int, QueueInbox] = {}
        self._published: tuple[int, Any] = (-1, None)
        self._evaluator: LazyEvaluator | None = None
        self._eval_thread: JobThread | None = None
        self._eval_progress: dict[str, str] = {}
        self._spec: RunSpec
        self._executor: LearnerExecutor
        self._learner_thread: JobThread

    def start(
        self, spec: RunSpec, collectors: Sequence[CollectorState], learner_state: StateTree | None
    ) -> None:
        """Make the learner here and each collector in its own thread."""
        self._spec = spec
        post = self._events.put
        for index, state in enumerate(collectors):
            self.start_collector(index, state)
        learner = spec.make_learner(learner_state)
        self._executor = LearnerExecutor(spec, learner, self._keep_weights, post)
        post(HealthChanged("learner", "up"))
        self._learner_thread = JobThread("learner", post)

    def _keep_weights(self, version: int, weights: Any) -> None:
        self._published = (version, weights)  # one assignment: readers see the old pair or the new one

    def start_collector(self, index: int, state: CollectorState) -> None:
        """Start a collector's thread."""
        if index in self._inboxes:
            self._inboxes[index].close()
        assignment, post = self._spec.collector(index, state), self._events.put
        inbox = self._inboxes[index] = QueueInbox()

        def run() -> None:
            try:
                server = start(index, lambda: make_collector(assignment), self._newest, post)
                if server is not None:
                    serve(server, inbox)
            except BaseException as error:  # such as SystemExit, which would end this thread without a word
                post(Broken(OffbeatError(f"collector {index} raised:\n{error!r}")))

        self._threads[index] = threading.Thread(target=run, name=f"collector-{index}", daemon=True)
        self._threads[index].start()

    def _newest(self, at_least: int) -> tuple[int, Any]:
        return self._published

    def kill_collector(self, index: int, reason: str) -> None:
        """End the run: a thread cannot be killed."""
        text = f"collector {index} {reason}; threads cannot be killed, runtime.kind=processes can replace it"
        self._events.put(Broken(StallError(text)))

    def collect(self, ticket: Ticket) -> None:
        """Queue the ticket for its collector."""
        self._inboxes[ticket.collector].tickets.put(ticket)

    def train(self, batch: Batch) -> None:
        """Line the round up for the learner."""
        self._learner_thread.submit(lambda: self._executor.train(batch))

    def release(self, tickets: Sequence[int]) -> None:
        """Nothing to free: segments go by reference."""

    def publish(self, version: int) -> None:
        """Publish when the learner comes to it."""
        self._learner_thread.submit(lambda: self._executor.publish(version))

    def snapshot(self) -> None:
        """Copy the learner when it comes to it."""
        self._learner_thread.submit(self._executor.snapshot)

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate a snapshot in a thread of its own."""
        thread = self._eval_thread or JobThread("evaluator", self._events.put)
        evaluator = self._evaluator or LazyEvaluator(self._spec.evaluator())
        self._eval_thread, self._evaluator = thread, evaluator

        progress = self._eval_progress

        def run(weights: Any) -> None:
            with keep_progress(progress, "evaluator"):
                done = evaluator.run(weights, version, seed)
            self._events.put(done)

        def send(weights: Any) -> None:
            thread.submit(partial(run, weights))

        self._learner_thread.submit(lambda: self._executor.send_weights(send))

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """A thread cannot be killed: the next evaluation gets another one."""
        self._eval_thread, self._evaluator, self._eval_progress = None, None, {}
        self._events.put(EvalDone(version, None, 0.0, reason))

    def wait(self, timeout_s: float) -> list[Event]:
        """Return everything that events, or nothing after the time-out."""
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=max(0.0, timeout_s)))
            while True:
                events.append(self._events.get_nowait())
        return events

    def stacks(self) -> dict[str, str]:
        """Return the stack of each thread of this process and of the learner's other ranks."""
        return thread_stacks() | self._executor.stacks()

    def pids(self) -> dict[str, int]:
        """The learner's other ranks, if it has any."""
        return self._executor.pids()

    @property
    def progress(self) -> Mapping[str, str]:
        """Newest reports of the learner's and the evaluator's threads."""
        return self._executor.progress | self._eval_progress

    def close(self) -> None:
        """Let each thread finish what it is doing, within limits."""
        give_up_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for inbox in self._inboxes.values():
            inbox.close()
        for thread in self._threads.values():
            thread.join(max(0.0, give_up_s - time.monotonic()))
        if self._eval_thread is not None:
            self._eval_thread.close(max(0.0, give_up_s - time.monotonic()))
        if hasattr(self, "_learner_thread"):
            self._learner_thread.close(_LEARNER_TIMEOUT_S)
        if hasattr(self, "_executor"):
            self._executor.close()
