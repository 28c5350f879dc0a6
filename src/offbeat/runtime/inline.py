"""Everything in the calling thread, one thing after the other: for k = 0, debugging and replay."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.pacing.events import CollectorDown, Event, HealthChanged
from offbeat.runtime.base import thread_stacks
from offbeat.runtime.learning import LearnerExecutor
from offbeat.runtime.serial import make_collector
from offbeat.runtime.serve import CollectorServer, start
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.types import Batch, StateTree, Ticket


class InlineRuntime:
    """Carries out each action at once. Segments travel by reference."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._servers: dict[int, CollectorServer] = {}
        self._published: tuple[int, Any] = (-1, None)
        self._spec: RunSpec
        self._executor: LearnerExecutor

    def start(
        self, spec: RunSpec, collectors: Sequence[CollectorState], learner_state: StateTree | None
    ) -> None:
        """Make all roles here."""
        self._spec = spec
        learner = spec.make_learner(learner_state)
        self._executor = LearnerExecutor(spec, learner, self._keep_weights, self._events.append)
        self._events.append(HealthChanged("learner", "up"))
        for index, state in enumerate(collectors):
            self.start_collector(index, state)

    def _keep_weights(self, version: int, weights: Any) -> None:
        self._published = (version, weights)

    def start_collector(self, index: int, state: CollectorState) -> None:
        """Make a collector."""
        assignment = self._spec.collector(index, state)
        server = start(index, lambda: make_collector(assignment), self._newest, self._events.append)
        if server is not None:
            self._servers[index] = server

    def _newest(self, at_least: int) -> tuple[int, Any]:
        return self._published

    def kill_collector(self, index: int, reason: str) -> None:
        """Forget a collector."""
        server = self._servers.pop(index, None)
        if server is not None and not server.is_over:  # otherwise its `CollectorDown` is on the way
            self._events.append(CollectorDown(index, reason))

    def collect(self, ticket: Ticket) -> None:
        """Collect now."""
        server = self._servers.get(ticket.collector)
        if server is None:  # it raised, and its `CollectorDown` is on the way: the ticket is lost with it
            return
        server.accept(ticket)
        while server.patience_s == 0.0:
            server.step()
        if server.is_over:
            del self._servers[ticket.collector]

    def train(self, batch: Batch) -> None:
        """Train now."""
        self._executor.train(batch)

    def release(self, tickets: Sequence[int]) -> None:
        """Nothing to free: segments go by reference."""

    def publish(self, version: int) -> None:
        """Keep a reference to the weights."""
        self._executor.publish(version)

    def snapshot(self) -> None:
        """Copy the learner now."""
        self._executor.snapshot()

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate now."""
        self._executor.evaluate_here(version, seed)

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """Nothing to do: an evaluation is over before its time-out could be noticed."""

    def wait(self, timeout_s: float) -> list[Event]:
        """Return what happened; with nothing to do, wait for the clock."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            for server in self._servers.values():
                server.step()  # collectors that wait for something else than tickets
            left_s = give_up_s - time.monotonic()
            if self._events or left_s <= 0.0:
                return [self._events.popleft() for _ in range(len(self._events))]
            patience = (server.patience_s for server in self._servers.values())
            time.sleep(min(left_s, *(most_s for most_s in patience if most_s is not None), math.inf))

    def stacks(self) -> dict[str, str]:
        """Return the stack of each thread of this process."""
        return thread_stacks()

    def pids(self) -> dict[str, int]:
        """The learner's other ranks, if it has any."""
        return self._executor.pids()

    @property
    def progress(self) -> Mapping[str, str]:
        """Newest reports; empty between two calls, as all work is done within them."""
        return self._executor.progress

    def close(self) -> None:
        """Drop the roles."""
        self._servers.clear()
        if hasattr(self, "_executor"):
            self._executor.close()
