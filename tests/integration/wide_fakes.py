"""Wide collectors for tests of runtimes: they tell what reached them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offbeat.roles import WorkerContext
from offbeat.types import Piece, Progress, Segment, Span, Ticket


class Counting:
    """Each ticket needs ``length`` pieces of work, one token each; all that are open go on together.

    Begun work is the tokens, which are the versions that made them. A ticket with a script repeats it.
    """

    def __init__(self, context: WorkerContext, length: int = 5, capacity: int = 256, pause_s: float = 0.0):
        self.capacity = capacity
        self.context, self._length, self._pause_s = context, length, pause_s
        self._open: dict[int, tuple[Ticket, list[int], list[int]]] = {}  # with tokens, and those to repeat
        self._cut: set[int] = set()
        self._version = -1

    def accept(self, ticket: Ticket, begun: Any = None, script: Sequence[Piece] = ()) -> None:
        tokens = [] if begun is None else begun["tokens"].tolist()
        repeated = [span.version for piece in script for span in piece.spans for _ in range(span.size)]
        self._open[ticket.number] = (ticket, tokens, repeated)

    def load(self, version: int, weights: Any) -> None:
        self._version = version

    def advance(self) -> Progress:
        time.sleep(self._pause_s)
        segments, num_tokens, needs = [], 0, []
        for number, (ticket, tokens, repeated) in list(self._open.items()):
            due = repeated[len(tokens)] if len(tokens) < len(repeated) else self._version
            if due > self._version:
                needs.append(due)
                continue
            if number not in self._cut:
                tokens.append(due)
                num_tokens += 1
            if number in self._cut or len(tokens) >= (len(repeated) or self._length):
                segments.append(self._segment(ticket, tokens))
                del self._open[number]
        idle = not num_tokens
        return Progress(segments, 1e-6 * num_tokens, {"tokens": num_tokens}, idle, min(needs, default=None))

    def _segment(self, ticket: Ticket, tokens: list[int]) -> Segment:
        versions = np.array(tokens or [self._version])
        spans = tuple(Span(version, tokens.count(version)) for version in sorted(set(tokens)))
        pieces = (Piece(spans, "cut" if ticket.number in self._cut else "eos"),)
        data = {"tokens": versions, "collector": self.context.collector}
        return Segment(ticket, data, versions, {"tokens": len(tokens)}, pieces=pieces)

    def cut(self, tickets: Sequence[int]) -> None:
        self._cut.update(tickets)

    def open_work(self) -> Mapping[int, Any]:
        return {number: {"tokens": np.array(tokens)} for number, (_, tokens, _) in self._open.items()}

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Tools(Counting):
    """All of its tickets wait for tools, each of which answers after ``tool_s``, from another thread."""

    def __init__(self, context: WorkerContext, tool_s: float = 0.5, capacity: int = 256):
        super().__init__(context, capacity=capacity)
        self._tool_s = tool_s
        self._called: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._answered: list[int] = []
        self.num_turns = 0
        threading.Thread(target=self._answer, daemon=True).start()

    def accept(self, ticket: Ticket, begun: Any = None, script: Sequence[Piece] = ()) -> None:
        super().accept(ticket, begun, script)
        self._called.put((time.monotonic() + self._tool_s, ticket.number))

    def _answer(self) -> None:
        while True:
            due_s, number = self._called.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._answered.append(number)
            self.context.wake()

    def advance(self) -> Progress:
        self.num_turns += 1
        if not self._answered:
            return Progress(idle=True)
        answered, self._answered = self._answered, []
        segments = [self._segment(self._open.pop(number)[0], [self._version]) for number in answered]
        for segment in segments:
            segment.data["turns"] = self.num_turns
        return Progress(segments, 1e-6)
