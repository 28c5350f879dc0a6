"""Everything in the calling thread, one thing after the other: for k = 0, debugging and replay."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.pacing.events import CollectorDown, Event
from offbeat.runtime.base import keep_progress
from offbeat.runtime.learning import LazyEvaluator, LocalRuntime
from offbeat.runtime.messages import Accept, Begun, CutTickets, GiveWork
from offbeat.runtime.serve import CollectorServer, start
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.types import Piece, StateTree, Ticket


class InlineRuntime(LocalRuntime):
    """Carries out each action at once. Segments travel by reference."""

    takes_turns = True

    def __init__(self) -> None:
        super().__init__()
        self._events: deque[Event] = deque()
        self._servers: dict[int, CollectorServer] = {}
        self._open: dict[int, CollectorServer] = {}  # their collectors hold tickets
        self._woken = threading.Event()
        self._evaluator: LazyEvaluator | None = None

    def start(
        self, spec: RunSpec, collectors: Mapping[int, CollectorState], learner_state: StateTree | None
    ) -> None:
        """Make all roles here."""
        self._spec = spec
        self._make_learner(learner_state)
        for index, state in collectors.items():
            self.start_collector(index, state)

    def _post(self, event: Event) -> None:
        self._events.append(event)

    def start_collector(self, index: int, state: CollectorState) -> None:
        """Make a collector."""
        self._open.pop(index, None)
        assignment = self._spec.collector(index, state)
        server = start(assignment, self._newest, self._events.append, wake=self._woken.set)
        if server is not None:
            self._servers[index] = server

    def end_collector(self, index: int) -> None:
        """Forget a collector that holds no ticket."""
        self._servers.pop(index, None)

    def kill_collector(self, index: int, reason: str) -> None:
        """Forget a collector."""
        server = self._servers.pop(index, None)
        self._open.pop(index, None)
        if server is not None and not server.is_over:  # otherwise its `CollectorDown` is on the way
            self._events.append(CollectorDown(index, reason))

    def collect(self, ticket: Ticket, begun: Begun | None = None, script: tuple[Piece, ...] = ()) -> None:
        """Collect now, with a collector of one ticket; others work whenever the driver waits."""
        server = self._servers.get(ticket.collector)
        if server is None:  # it raised, and its `CollectorDown` is on the way: the ticket is lost with it
            return
        server.take(Accept(ticket, begun, script))
        while server.poll_timeout_s == 0.0 and not server.holds_many:
            server.step()
        self._look_at(ticket.collector, server)

    def cut(self, tickets: Sequence[Ticket]) -> None:
        """Tell the collectors."""
        for index in {ticket.collector for ticket in tickets} & self._servers.keys():
            held = tuple(ticket.number for ticket in tickets if ticket.collector == index)
            self._servers[index].take(CutTickets(held))

    def ask_work(self) -> Sequence[int]:
        """Have the answers reported at once."""
        asked = {index: server for index, server in self._servers.items() if server.wide is not None}
        for server in asked.values():
            server.take(GiveWork())
        return tuple(asked)

    def working_s(self, index: int) -> None:
        """Return None: nothing works while the driver looks."""

    def _look_at(self, index: int, server: CollectorServer) -> None:
        """Note whether a collector still holds tickets, and forget one that raised."""
        if server.poll_timeout_s is not None:
            self._open[index] = server
        else:
            self._open.pop(index, None)
        if server.is_over:
            self._servers.pop(index, None)

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
        """Let collectors of many tickets work in turns until something happens; else wait for the clock."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            self._woken.clear()
            for index, server in list(self._open.items()):
                server.step()
                self._look_at(index, server)
            left_s = give_up_s - time.monotonic()
            if self._events or left_s <= 0.0:
                return [self._events.popleft() for _ in range(len(self._events))]
            timeouts = (server.poll_timeout_s for server in self._open.values())
            pause_s = min([left_s, *(one_s for one_s in timeouts if one_s is not None)])
            if pause_s > 0.0:
                self._woken.wait(pause_s)

    def close(self, at_once: bool = False) -> None:
        """Drop the roles."""
        self._servers.clear()
        if hasattr(self, "_executor"):
            self._executor.close()
