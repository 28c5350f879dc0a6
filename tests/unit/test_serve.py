"""One collector, served step by step with fakes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from offbeat.errors import EnvError
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    CollectorWaits,
    CollectorWorked,
    OpenWork,
    SegmentArrived,
)
from offbeat.roles import Collector, PerWorker, WorkerContext
from offbeat.runtime.adapting import as_collector
from offbeat.runtime.messages import Accept, Begun, CutTickets, GiveWork
from offbeat.runtime.serve import CollectorServer, SyncTimeout, serve, start
from offbeat.runtime.spec import Assignment
from offbeat.types import Piece, Progress, Segment, Span, Ticket


def ticket(number: int, version: int = 0) -> Ticket:
    return Ticket(number, 1, version, 9, seed=number)


class Pairs:
    """Makes segments two at a time, in turns of nothing and of both; `load` is allowed in between."""

    capacity = 4

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.loaded: list[int] = []
        self.turns = 0

    def accept(self, ticket: Ticket, begun: Any = None, script: Sequence[int] = ()) -> None:
        self.tickets.append(ticket)

    def load(self, version: int, weights: Any) -> None:
        self.loaded.append(version)

    def advance(self) -> Progress:
        self.turns += 1
        if len(self.tickets) < 2:
            return Progress(idle=True)
        pair, self.tickets = self.tickets[:2], self.tickets[2:]
        return Progress([Segment(one, None, np.array([self.loaded[-1]])) for one in pair])

    def state_dict(self) -> Any:
        return {"turns": self.turns}

    def load_state_dict(self, state: Any) -> None:
        self.turns = state["turns"]


def server_of(
    collector: Any, versions: Any = None, clock: Callable[[], float] = time.monotonic
) -> tuple[CollectorServer, list[Any]]:
    posted: list[Any] = []
    versions = versions or (lambda at_least: at_least)
    made = as_collector(collector)

    def newest(at_least: int) -> tuple[int, Any]:
        return versions(at_least), {"v": versions(at_least)}

    return CollectorServer(1, made, newest, posted.append, clock=clock), posted


def test_collector_of_several_tickets_keeps_its_own_order() -> None:
    pairs = Pairs()
    assert isinstance(pairs, Collector)
    assert as_collector(pairs) is pairs
    server, posted = server_of(pairs)
    server.step()
    assert pairs.turns == 0, "without a ticket there is nothing to do"
    server.take(Accept(ticket(0, version=1)))
    server.step()
    assert server.poll_timeout_s and not posted, "it holds a ticket, and waits for another one"
    server.take(Accept(ticket(1, version=2)))
    assert server.poll_timeout_s == 0.0
    server.step()
    assert [event.segment.ticket.number for event in posted] == [0, 1]
    assert {event.state["turns"] for event in posted} == {2}
    assert pairs.loaded == [1, 2]
    assert server.poll_timeout_s is None


def test_function_collects_one_segment_per_step_with_the_newest_weights() -> None:
    newest = [3]
    server, posted = server_of(lambda t, weights: (t.version, weights["v"]), lambda least: newest[0])
    server.take(Accept(ticket(0, version=3)))
    server.take(Accept(ticket(1, version=3)))
    server.step()
    newest[0] = 5
    server.step()
    assert [event.segment.data for event in posted] == [(3, 3), (5, 5)]
    assert [event.segment.ticket.version for event in posted] == [3, 5]
    assert all(event.segment.collect_s > 0 for event in posted)
    assert server.poll_timeout_s is None


def raise_value_error(t: Ticket, weights: Any) -> None:
    raise ValueError("no such level")


def raise_env_error(t: Ticket, weights: Any) -> None:
    raise EnvError("the environment broke its contract")


def test_exception_ends_the_collector_and_names_the_ticket() -> None:
    server, posted = server_of(raise_value_error)
    server.take(Accept(ticket(4)))
    server.take(Accept(ticket(5)))
    server.step()
    (down,) = posted
    assert down.collector == 1 and down.raised
    assert down.reason.startswith("collector 1 raised in ticket 4:\nTraceback")
    assert down.reason.endswith("ValueError: no such level")
    assert server.is_over and server.poll_timeout_s is None
    server.take(Accept(ticket(6)))
    server.step()
    assert len(posted) == 1


def test_errors_for_users_are_told_without_a_traceback() -> None:
    server, posted = server_of(raise_env_error)
    server.take(Accept(ticket(4)))
    server.step()
    assert posted[0].reason == "collector 1 raised in ticket 4:\nthe environment broke its contract"


def test_weights_that_do_not_come_cost_the_collector() -> None:
    def late(at_least: int) -> int:
        raise SyncTimeout(f"weights of version {at_least} did not arrive")

    server, posted = server_of(Pairs(), late)
    server.take(Accept(ticket(0, version=2)))
    server.step()
    assert posted == [CollectorDown(1, "weights of version 2 did not arrive", raised=False)]


@pytest.mark.parametrize("answers", [(4, 4), (9,)], ids=["a second segment", "a ticket of nobody"])
def test_segment_for_a_ticket_that_is_not_held_ends_the_collector(answers: tuple[int, ...]) -> None:
    class Confused(Pairs):
        def advance(self) -> Progress:
            return Progress([Segment(ticket(number), None, np.array([0])) for number in answers])

    server, posted = server_of(Confused())
    server.take(Accept(ticket(4)))
    server.step()
    *_, down = posted
    assert [event.segment.ticket.number for event in posted[:-1]] == list(answers[:-1])
    assert down.raised
    assert down.reason.startswith(
        f"collector 1 raised in ticket 4:\nit made a segment for ticket {answers[-1]}"
    )


def test_capacity_that_would_get_no_ticket_again_ends_the_collector_with_the_reason() -> None:
    made = Pairs()
    server, posted = server_of(made)
    made.capacity = 0
    server.take(Accept(ticket(4)))
    server.step()
    (down,) = posted
    assert down.raised
    assert "capacity of Pairs is 0: it is a number of tickets, 1 at least" in down.reason


class Scripted:
    """An inbox with a script: what to return, call by call."""

    def __init__(self, *script: Any) -> None:
        self.script = deque(script)
        self.timeouts: list[float | None] = []

    def receive(self, timeout_s: float | None) -> Any:
        self.timeouts.append(timeout_s)
        found = self.script.popleft()
        return None if found is None else [Accept(one) for one in found]


def test_loop_blocks_only_when_there_is_nothing_to_do() -> None:
    posted: list[Any] = []
    role = PerWorker(lambda context: lambda ticket, weights: ticket.number)
    made = start(Assignment(role, WorkerContext(1, 2, seed=0)), lambda least: (0, None), posted.append)
    assert made is not None
    inbox = Scripted([ticket(0), ticket(1)], [], [ticket(2)], None)
    serve(made, inbox)
    assert inbox.timeouts == [None, 0.0, None, None]
    assert posted[0] == CollectorUp(1, capacity=1)
    assert [event.segment.data for event in posted if isinstance(event, SegmentArrived)] == [0, 1, 2]


def test_loop_blocks_while_a_collector_waits_for_something_outside() -> None:
    server, _ = server_of(Pairs())
    inbox = Scripted([ticket(0)], *[[]] * 3, [ticket(1)], [ticket(2)], [], None)
    serve(server, inbox)
    assert inbox.timeouts == [None, 1.0, 1.0, 1.0, 1.0, None, 1.0, 1.0]


class Recorded:
    """Repeats tickets whose next span has version 3."""

    capacity = 8

    def __init__(self) -> None:
        self.version = -1
        self.tickets: list[Ticket] = []
        self.log: list[Any] = []

    def accept(self, ticket: Ticket, begun: Any = None, script: Sequence[Piece] = ()) -> None:
        self.log.append(("accept", ticket.number, begun, script))
        self.tickets.append(ticket)

    def load(self, version: int, weights: Any) -> None:
        self.log.append(("load", version))
        self.version = version

    def advance(self) -> Progress:
        if self.version < 3:
            return Progress(idle=True, needs=3)
        done, self.tickets = self.tickets, []
        return Progress([Segment(one, {}, np.array([3])) for one in done], busy_s=0.25)

    def cut(self, tickets: Sequence[int]) -> None:
        self.log.append(("cut", list(tickets)))

    def open_work(self) -> dict[int, Any]:
        return {one.number: {"version": self.version} for one in self.tickets}

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def test_recorded_tickets_wait_for_their_version_and_say_so_once() -> None:
    newest = [1]
    recorded = Recorded()
    server, posted = server_of(recorded, lambda least: newest[0])
    script = (Piece((Span(3, 5),), "eos"),)
    server.take(Accept(ticket(0), Begun({"begun": 1}), script))
    for newest[0] in (1, 1, 2):
        server.step()
    assert posted == [CollectorWaits(1, 3, (0,))]
    assert server.poll_timeout_s == 0.004, "weights come without a message"
    newest[0] = 3
    server.step()
    assert [event.segment.ticket.number for event in posted[1:]] == [0]
    assert recorded.log == [("load", 1), ("accept", 0, {"begun": 1}, script), ("load", 2), ("load", 3)]


def test_collector_of_one_piece_begins_anew_and_repeats_what_one_version_made() -> None:
    server, posted = server_of(as_collector(lambda ticket, weights: 1.0), lambda least: 3)
    server.take(Accept(ticket(0), Begun({"tokens": [1]}), (Piece((Span(3, 5),), "eos"),)))
    server.step()
    assert [event.segment.ticket.number for event in posted] == [0]
    server.take(Accept(ticket(1), None, (Piece((Span(3, 5), Span(4, 1)), "eos"),)))
    server.step()
    (down,) = posted[1:]
    assert "ticket 1 was made with versions [3, 4]" in down.reason
    assert "repeat the run with the collector that made it" in down.reason
    assert "AssertionError" not in down.reason


def test_begun_work_with_versions_that_were_given_up_is_of_no_use_with_newer_ones() -> None:
    newest = [4]
    recorded = Recorded()
    server, _ = server_of(recorded, lambda least: newest[0])
    server.take(Accept(ticket(0), Begun("cut back", 4)))
    server.step()
    newest[0] = 5
    server.take(Accept(ticket(1), Begun("a future that was given up", 4)))
    server.take(Accept(ticket(2), Begun("whole")))
    server.step()
    accepted = [entry[1:3] for entry in recorded.log if entry[0] == "accept"]
    assert accepted == [(0, "cut back"), (1, None), (2, "whole")]


def test_wide_collector_cuts_what_it_holds_and_gives_its_work() -> None:
    recorded = Recorded()
    server, posted = server_of(recorded)
    server.take(Accept(ticket(0)))
    server.take(Accept(ticket(1)))
    server.take(CutTickets((7,)))
    assert recorded.log == [], "nothing that it holds"
    server.take(CutTickets((1, 7)))
    assert recorded.log[-1] == ("cut", [1]), "after it was accepted"
    server.take(GiveWork())
    assert posted == [OpenWork(1, {0: {"version": 0}, 1: {"version": 0}}, version=0)]


def test_question_for_begun_work_needs_no_weights_where_there_is_none() -> None:
    def none_yet(at_least: int) -> int:
        raise SyncTimeout("no weights were published")

    server, posted = server_of(Recorded(), none_yet)
    server.take(GiveWork())
    assert posted == [OpenWork(1, {})]


@pytest.mark.parametrize("message", [CutTickets((0,)), GiveWork()])
def test_exception_in_a_cut_or_in_an_answer_ends_the_collector(message: Any) -> None:
    class Fails(Recorded):
        def cut(self, tickets: Sequence[int]) -> None:
            raise ValueError("cannot cut")

        def open_work(self) -> dict[int, Any]:
            raise ValueError("cannot tell")

    server, posted = server_of(Fails())
    server.take(Accept(ticket(0)))
    server.take(message)
    (down,) = posted
    assert down.raised and "raised in ticket 0" in down.reason
    assert server.is_over and server.poll_timeout_s is None and server.since[0] == 0


def test_serial_collector_has_no_open_work() -> None:
    server, posted = server_of(lambda ticket, weights: 1)
    server.take(GiveWork())
    assert posted == [OpenWork(1, {})]


def test_busy_time_is_reported_with_segments_or_once_a_second() -> None:
    now_s = [100.0]
    recorded = Recorded()
    server, posted = server_of(recorded, lambda least: 3, lambda: now_s[0])
    recorded.advance = lambda: Progress(busy_s=0.25, units={"tokens": 2})  # type: ignore[method-assign]
    server.take(Accept(ticket(0)))
    for _ in range(3):
        now_s[0] += 0.4
        server.step()
    assert posted == [CollectorWorked(1, 0.75, {"tokens": 6})]
    del recorded.advance  # type: ignore[attr-defined]
    server.step()
    assert [event.busy_s for event in posted[1:]] == [0.25]


def test_time_of_the_piece_at_hand_and_a_changed_capacity_can_be_seen() -> None:
    seen: list[bool] = []
    recorded = Recorded()
    server, posted = server_of(recorded, lambda least: 3)

    def advance() -> Progress:
        seen.append(server.since[0] > 0)
        recorded.capacity = 5
        return Progress()

    recorded.advance = advance  # type: ignore[method-assign]
    server.take(Accept(ticket(0)))
    server.step()
    assert seen == [True] and server.since[0] == 0
    assert posted == [CollectorUp(1, 5, is_wide=True)]


def test_collector_that_cannot_be_made_is_told() -> None:
    posted: list[Any] = []

    def make(context: WorkerContext) -> Collector:
        raise RuntimeError("no display")

    assignment = Assignment(PerWorker(make), WorkerContext(3, 4, seed=0))
    assert start(assignment, lambda least: (0, None), posted.append) is None
    (down,) = posted
    assert down.raised
    assert down.reason.startswith("collector 3 raised while starting:\nTraceback")


@pytest.mark.parametrize("made", [raise_value_error, Pairs()])
def test_everything_that_collects_becomes_a_collector(made: Any) -> None:
    assert isinstance(as_collector(made), Collector)


class Slow(Pairs):
    """Takes two seconds to say its state."""

    now_s = 100.0

    def state_dict(self) -> Any:
        self.now_s += 2.0
        return super().state_dict()


def test_the_time_to_take_the_state_is_told_once_for_all_segments_of_a_piece() -> None:
    slow = Slow()
    server, posted = server_of(slow, clock=lambda: slow.now_s)
    server.take(Accept(ticket(0)))
    server.step()
    server.take(Accept(ticket(1)))
    server.step()
    assert [(event.state_s, event.state) for event in posted] == [(2.0, {"turns": 2}), (0.0, {"turns": 2})]


def test_worker_needs_no_configuration() -> None:
    """It starts in two thirds of the time without pydantic."""
    code = "import sys, offbeat.runtime.worker; sys.exit('pydantic' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
