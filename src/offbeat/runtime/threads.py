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
from offbeat.pacing.events import Broken, EvalDone, Event
from offbeat.runtime.base import keep_progress
from offbeat.runtime.learning import JobThread, LazyEvaluator, LocalRuntime
from offbeat.runtime.messages import Accept, Begun, CutTickets, GiveWork, Message
from offbeat.runtime.serve import serve, start
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.runtime.supervision import seconds_since
from offbeat.types import Piece, StateTree, Ticket

_CLOSE_TIMEOUT_S = 2.0
_LEARNER_TIMEOUT_S = 5.0


class QueueInbox:
    """Messages on their way to another thread."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: wake up
        self._is_closed = False
        self.since = [0]  # see `CollectorServer`
        self.is_wide = False  # the reader gives its begun work

    def close(self) -> None:
        """Stop the reader after what it is doing now, whatever waits."""
        self._is_closed = True
        self._messages.put(None)

    def send(self, message: Message) -> None:
        """Put a message at the end of the line."""
        self._messages.put(message)

    def wake(self) -> None:
        """Have the reader look at its collector."""
        self._messages.put(None)

    def receive(self, timeout_s: float | None) -> Sequence[Message] | None:
        """Return all messages that have come, as soon as there is one or the reader is woken up."""
        found: list[Message] = []
        try:
            message = self._messages.get(timeout_s != 0.0, timeout_s)
            while True:
                if message is not None:
                    found.append(message)
                message = self._messages.get_nowait()
        except queue.Empty:
            return None if self._is_closed else found


class ThreadRuntime(LocalRuntime):
    """One thread per collector, one for the learner, one for asynchronous evaluation."""

    replaces_collectors = False

    def __init__(self) -> None:
        super().__init__()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}
        self._inboxes: dict[int, QueueInbox] = {}
        self._evaluator: LazyEvaluator | None = None
        self._eval_thread: JobThread | None = None

    def start(
        self, spec: RunSpec, collectors: Mapping[int, CollectorState], learner_state: StateTree | None
    ) -> None:
        """Make the learner here and each collector in its own thread."""
        self._spec = spec
        for index, state in collectors.items():
            self.start_collector(index, state)
        self._make_learner(learner_state)
        self._learner_thread = JobThread("learner", self._post)

    def _post(self, event: Event) -> None:
        self._events.put(event)

    def start_collector(self, index: int, state: CollectorState) -> None:
        """Start a collector's thread."""
        if index in self._inboxes:
            self._inboxes[index].close()
        assignment, post = self._spec.collector(index, state), self._events.put
        inbox = self._inboxes[index] = QueueInbox()

        def run() -> None:
            try:
                with keep_progress(self._collect_progress, f"collector_{index}"):
                    server = start(assignment, self._newest, post, wake=inbox.wake, since=inbox.since)
                    if server is not None:
                        inbox.is_wide = server.wide is not None
                        serve(server, inbox)
            except BaseException as error:  # such as SystemExit, which would end this thread without a word
                post(Broken(OffbeatError(f"collector {index} raised:\n{error!r}")))

        self._threads[index] = threading.Thread(target=run, name=f"collector-{index}", daemon=True)
        self._threads[index].start()

    def kill_collector(self, index: int, reason: str) -> None:
        """End the run: a thread cannot be killed."""
        text = f"collector {index} {reason}; threads cannot be killed, runtime.kind=processes can replace it"
        self._events.put(Broken(StallError(text)))

    def end_collector(self, index: int) -> None:
        """Let a collector's thread end."""
        if (inbox := self._inboxes.pop(index, None)) is not None:
            inbox.close()

    def collect(self, ticket: Ticket, begun: Begun | None = None, script: tuple[Piece, ...] = ()) -> None:
        """Queue the ticket for its collector."""
        self._inboxes[ticket.collector].send(Accept(ticket, begun, script))

    def cut(self, tickets: Sequence[Ticket]) -> None:
        """Tell the collectors."""
        for index in {ticket.collector for ticket in tickets}:
            held = tuple(ticket.number for ticket in tickets if ticket.collector == index)
            self._inboxes[index].send(CutTickets(held))

    def ask_work(self) -> Sequence[int]:
        """Ask the wide collectors; each answers between two pieces of work."""
        asked = {index: inbox for index, inbox in self._inboxes.items() if inbox.is_wide}
        for inbox in asked.values():
            inbox.send(GiveWork())
        return tuple(asked)

    def working_s(self, index: int) -> float | None:
        """Return the time since the piece of work at hand began."""
        inbox = self._inboxes.get(index)
        return seconds_since(0 if inbox is None else inbox.since[0])

    def release(self, tickets: Sequence[int]) -> None:
        """Nothing to free: segments go by reference."""

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate a snapshot in a thread of its own."""
        thread = self._eval_thread or JobThread("evaluator", self._events.put)
        evaluator = self._evaluator or LazyEvaluator(self._spec.evaluator())
        self._eval_thread, self._evaluator = thread, evaluator

        progress = self._eval_progress

        def run(weights: Any) -> None:
            with keep_progress(progress, "evaluator"):
                done = evaluator.run(weights, version, seed)
            if evaluator is self._evaluator:  # else it was given up
                self._events.put(done)

        self._do(lambda: self._executor.send_weights(lambda weights: thread.submit(partial(run, weights))))

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """A thread cannot be killed: the next evaluation gets another one."""
        if self._eval_thread is not None:
            self._eval_thread.stop()
        self._eval_thread, self._evaluator, self._eval_progress = None, None, {}
        self._events.put(EvalDone(version, None, 0.0, reason))

    def wait(self, timeout_s: float) -> list[Event]:
        """Return everything that happened, or nothing after the time-out."""
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=max(0.0, timeout_s)))
            while True:
                events.append(self._events.get_nowait())
        return events

    def close(self, at_once: bool = False) -> None:
        """Let each thread finish what it is doing, within limits."""
        give_up_s = time.monotonic() + (0.0 if at_once else _CLOSE_TIMEOUT_S)
        for inbox in self._inboxes.values():
            inbox.close()
        for thread in self._threads.values():
            thread.join(max(0.0, give_up_s - time.monotonic()))
        if self._eval_thread is not None:
            self._eval_thread.close(max(0.0, give_up_s - time.monotonic()))
        if self._learner_thread is not None:
            self._learner_thread.close(0.0 if at_once else _LEARNER_TIMEOUT_S)
        if hasattr(self, "_executor"):
            self._executor.close()
