"""A wide collector to copy from and to test with: it makes tokens with a small model in numpy.

It has what an engine for language models has: slots, groups, weights that change in the middle of a response,
tools that are waited for, tickets that are cut, begun work that goes on elsewhere, and scripts.
docs/wide-collectors.md walks through it; `offbeat.testing.TokenLearner` trains it.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Thread

import numpy as np

from offbeat.roles import WorkerContext
from offbeat.seeding import derive_seed
from offbeat.testing.token_model import CALL, EOS, FROM_TOOL, NUM_TOKENS, Response
from offbeat.types import Array, Piece, Progress, Segment, StateTree, Ticket

_PIECE_S = 0.02  # most work in one `advance`

Tool = Callable[[int, int], int]
"""``tool(seed of the response, number of tokens before)`` returns a token; it runs in a thread of its own."""


class TokenMachine:
    """Makes a group of responses per ticket, in ``slots`` that are given out in the order of tickets.

    A step, which makes one token in each slot, takes ``step_s`` at least. A response ends with ``timeout``
    when a tool takes longer than ``timeout_s``. ``needs_spread`` drops groups whose rewards are all equal.
    Example: ``Pipeline(collect=PerWorker(partial(TokenMachine, slots=64)), train=TokenLearner(), ...)``.
    """

    def __init__(
        self,
        context: WorkerContext,
        slots: int = 8,
        capacity: int | None = None,
        group: int = 1,
        max_tokens: int = 64,
        step_s: float = 0.0,
        tool: Tool | None = None,
        timeout_s: float = 60.0,
        needs_spread: bool = False,
    ) -> None:
        self.capacity = capacity or max(1, 2 * slots // group)
        self._wake, self._slots, self._group, self._max_tokens = context.wake, slots, group, max_tokens
        self._step_s, self._step_ends_s, self._timeout_s = step_s, 0.0, timeout_s
        self._tool, self._needs_spread = tool, needs_spread
        self._version, self._weights = -1, dict[str, Array]()
        self._held: dict[int, tuple[Ticket, list[Response]]] = {}
        self._queue: list[tuple[int, int, Response]] = []  # without a slot, by ticket and place in the group
        self._live: deque[Response] = deque()  # with a slot
        self._answers: deque[tuple[Response, int | None]] = deque()

    # ------------------------------------------------------------ the contract

    def accept(self, ticket: Ticket, begun: StateTree | None = None, script: Sequence[Piece] = ()) -> None:
        """Begin a group, continue what is begun, or repeat what a script says."""
        prompt = np.random.default_rng(ticket.seed).integers(2, NUM_TOKENS, 5).tolist()
        self._held[ticket.number] = ticket, []
        for place in range(self._group):
            seed = derive_seed(ticket.seed, "response", place)
            one = Response(seed, prompt, np.random.default_rng(seed).random(self._max_tokens))
            if script:
                one.follow(script[place])
            elif begun is not None:
                one.begin(begun[str(place)], self._version)
            one.rebuild()
            self._end_if_over(one)
            self._held[ticket.number][1].append(one)
            heapq.heappush(self._queue, (ticket.number, place, one))

    def load(self, version: int, weights: Mapping[str, Array]) -> None:
        """Make the next tokens with these weights, also of responses under way."""
        self._version, self._weights = version, dict(weights)

    def advance(self) -> Progress:
        """Make a token in each slot that does not wait, or in as many as 20 ms are enough for."""
        began_s, num_made = time.monotonic(), 0
        if began_s < self._step_ends_s:  # a slow machine is still at work
            time.sleep(min(self._step_ends_s - began_s, _PIECE_S))
            return Progress(busy_s=time.monotonic() - began_s)
        self._take_answers(began_s)
        self._admit()
        for _ in range(len(self._live)):
            one = self._live.popleft()
            if not one.end and one.called_s is None and not self._lacks(one):
                self._make_token(one)
                num_made += 1
            if not one.end:
                self._live.append(one)
            if time.monotonic() - began_s > _PIECE_S:
                break
        segments = [self._segment(number) for number in self._finished()]
        if num_made or segments:
            self._step_ends_s = began_s + self._step_s
            return Progress(segments, units={"tokens": num_made})
        lacking = [self._lacks(one) for _, group in self._held.values() for one in group if not one.end]
        return Progress(idle=True, needs=min(lacking) if lacking and all(lacking) else None)

    def cut(self, tickets: Sequence[int]) -> None:
        """End these tickets with the tokens that there are."""
        for one in [one for number in tickets for one in self._held[number][1]]:
            one.end = one.end or "cut"

    def open_work(self) -> Mapping[int, StateTree]:
        """Return the tokens of each ticket, which is all that another machine needs: it makes a new cache."""
        return {
            number: {
                str(place): {**one.arrays(), "spans": [list(span) for span in one.spans], "end": one.end}
                for place, one in enumerate(group)
            }
            for number, (_, group) in self._held.items()
            if any(one.tokens for one in group)
        }

    def state_dict(self) -> StateTree:
        """Return nothing: what a segment depends on is its ticket and the weights."""
        return {}

    def load_state_dict(self, state: StateTree) -> None:
        """Nothing to restore."""

    # ------------------------------------------------------------ one step

    def _take_answers(self, now_s: float) -> None:
        """Append what tools have answered since the last step; end responses whose tool takes too long."""
        while self._answers:
            one, token = self._answers.popleft()
            one.called_s = None
            if token is None:
                one.end = one.end or "error"
            elif not one.end:
                one.append(token, FROM_TOOL)
        for one in self._live:
            if one.called_s is not None and now_s - one.called_s > self._timeout_s and one.plan is None:
                one.end = one.end or "timeout"

    def _admit(self) -> None:
        """Give free slots to the first in the queue; a response with a script may wait and needs none."""
        num_free = self._slots - sum(one.plan is None and not one.end for one in self._live)
        while self._queue and (num_free > 0 or self._queue[0][2].plan is not None):
            *_, one = heapq.heappop(self._queue)
            if not one.end:
                num_free -= one.plan is None
                self._live.append(one)
                self._call_if_due(one)

    def _lacks(self, one: Response) -> int:
        """Return the version that its script wants next; 0 when that one is loaded, or there is no script."""
        if one.plan is None or self._version == one.plan[one.num_sampled][0]:
            return 0
        assert self._version < one.plan[one.num_sampled][0], "a version that a script needs was passed over"
        return one.plan[one.num_sampled][0]

    def _make_token(self, one: Response) -> None:
        if one.plan is not None and one.plan[one.num_sampled][1]:
            one.rebuild()
        one.sample(self._version, self._weights)
        self._end_if_over(one)
        self._call_if_due(one)

    def _end_if_over(self, one: Response) -> None:
        """End a response after its last token: where it ends by itself, or where its script says so."""
        if one.plan is not None:
            one.end = one.plan_end if one.num_sampled == len(one.plan) else ""
        elif one.last == EOS:
            one.end = "eos"
        elif one.num_sampled == self._max_tokens:
            one.end = "length"

    def _call_if_due(self, one: Response) -> None:
        """Have a tool called in a thread, which wakes the machine up when there is an answer."""
        if self._tool is None or one.end or one.last != CALL:
            return
        tool, seed, place = self._tool, one.seed, len(one.tokens)

        def call() -> None:
            token: int | None = None
            try:
                token = tool(seed, place)
            finally:
                self._answers.append((one, token))
                self._wake()

        one.called_s = time.monotonic()
        Thread(target=call, name="tool", daemon=True).start()

    def _finished(self) -> list[int]:
        return [number for number, (_, group) in self._held.items() if all(one.end for one in group)]

    def _segment(self, number: int) -> Segment:
        ticket, group = self._held.pop(number)
        arrays = [one.arrays() for one in group]
        data = {name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]}
        data["sizes"] = np.array([len(one.tokens) for one in group], np.int64)
        data["rewards"] = np.array([sum(one.tokens) % 2 for one in group], np.float64)
        versions = data["made"][data["made"] != FROM_TOOL]
        drop = "no_spread" if self._needs_spread and np.ptp(data["rewards"]) == 0.0 else ""
        return Segment(
            ticket,
            data,
            versions if versions.size else np.array([self._version], np.int64),
            {"tokens": versions.size},
            pieces=tuple(Piece(tuple(one.spans), one.end) for one in group),
            drop=drop if versions.size else "empty",
        )
