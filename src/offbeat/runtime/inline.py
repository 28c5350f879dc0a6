"""Everything in the calling thread, one thing after the other: for k = 0, debugging and replay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from offbeat.pacing.events import CollectorDown, Event
from offbeat.runtime.base import keep_progress
from offbeat.runtime.learning import LazyEvaluator, LocalRuntime
from offbeat.runtime.serve import CollectorServer, start
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.types import StateTree, Ticket


class InlineRuntime(LocalRuntime):
    """Carries out each action at once. Segments travel by reference."""

    def __init__(self) -> None:
        super().__init__()
        self._events: deque[Event] = deque()
        self._servers: dict[int, CollectorServer] = {}
        self._idle: dict[int, CollectorServer] = {}  # their collectors wait for something else than tickets
        self._evaluator: LazyEvaluator | None = None

    def start(
        self, spec: RunSpec, collectors: Sequence[CollectorState], learner_state: StateTree | None
    ) -> None:
        """Make all roles here."""
        self._spec = spec
        self._make_learner(learner_state)
        for index, state in enumerate(collectors):
            self.start_collector(index, state)

    def _post(self, event: Event) -> None:
        self._events.append(event)

    def start_collector(self, index: int, state: CollectorState) -> None:
        """Make a collector."""
        self._idle.pop(index, None)
        assignment = self._spec.collector(index, state)
        server = start(assignment, self._newest, self._events.append)
        if server is not None:
            self._servers[index] = server

    def kill_collector(self, index: int, reason: str) -> None:
        """Forget a collector."""
        server = self._servers.pop(index, None)
        self._idle.pop(index, None)
        if server is not None and not server.is_over:  # otherwise its `CollectorDown` is on the way
            self._events.append(CollectorDown(index, reason))

    def collect(self, ticket: Ticket) -> None:
        """Collect now."""
        server = self._servers.get(ticket.collector)
        if server is None:  # it raised, and its `CollectorDown` is on the way: the ticket is lost with it
            return
        server.accept(ticket)
        self._advance(ticket.collector, server)

    def _advance(self, index: int, server: CollectorServer) -> None:
        while server.poll_timeout_s == 0.0:
            server.step()
        if server.poll_timeout_s is not None:
            self._idle[index] = server
        else:
            self._idle.pop(index, None)
        if server.is_over:
            del self._servers[index]

    def release(self, tickets: Sequence[int]) -> None:
        """Nothing to free: segments go by reference."""

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate now."""
        evaluator = self._evaluator = self._evaluator or LazyEvaluator(self._spec.evaluator())

        def run(weights: Any) -> None:
            with keep_progress(self._eval_progress, "evaluator"):
                self._events.append(evaluator.run(weights, version, seed))

        self._executor.send_weights(run)

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """Nothing to do: an evaluation is over before its time-out could be noticed."""

    def wait(self, timeout_s: float) -> list[Event]:
        """Return what happened; with nothing to do, wait for the clock."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            for index, server in list(self._idle.items()):
                server.step()
                self._advance(index, server)
            left_s = give_up_s - time.monotonic()
            if self._events or left_s <= 0.0:
                return [self._events.popleft() for _ in range(len(self._events))]
            timeouts = (server.poll_timeout_s for server in self._idle.values())
            time.sleep(min([left_s, *(one_s for one_s in timeouts if one_s is not None)]))

    def close(self, at_once: bool = False) -> None:
        """Drop the roles."""
        self._servers.clear()
        if hasattr(self, "_executor"):
            self._executor.close()
