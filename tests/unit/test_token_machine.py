"""The wide collector that people copy from: its tokens, its slots, and what the contract asks of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from offbeat.roles import WideCollector, WorkerContext
from offbeat.testing import TokenLearner, TokenMachine
from offbeat.testing.token_model import CALL, FROM_TOOL
from offbeat.types import Batch, Piece, Progress, Segment, Span, Ticket

ALWAYS_CALLS = TokenLearner(bias={CALL: 50.0}).weights()


def weights(version: int) -> dict[str, Any]:
    return TokenLearner(seed=version).weights()


def ticket(number: int, version: int = 0) -> Ticket:
    return Ticket(number, 0, version, version + 4, seed=1000 + number)


def machine(wake: Callable[[], None] = lambda: None, **options: Any) -> TokenMachine:
    made = TokenMachine(WorkerContext(0, 1, seed=0, wake=wake), **options)
    made.load(0, weights(0))
    return made


def finish(
    made: TokenMachine, count: int, versions: Sequence[int] = (), every: int = 7
) -> dict[int, Segment]:
    """Advance until so many segments are there; load the next of ``versions`` after ``every`` pieces."""
    found: dict[int, Segment] = {}
    coming = list(versions)
    for turn in range(1, 20_000):
        progress = made.advance()
        found |= {segment.ticket.number: segment for segment in progress.segments}
        if len(found) == count:
            return found
        if progress.idle:
            time.sleep(0.001)
        if coming and turn % every == 0:
            made.load(coming[0], weights(coming.pop(0)))
    raise AssertionError(f"{len(found)} of {count} segments")


def repeat(made: TokenMachine, recorded: dict[int, Segment]) -> dict[int, Segment]:
    """Give all tickets with their scripts, and each version when nothing goes on without it."""
    for number, segment in recorded.items():
        made.accept(ticket(number), script=segment.pieces)
    found: dict[int, Segment] = {}
    for _ in range(20_000):
        progress = made.advance()
        found |= {segment.ticket.number: segment for segment in progress.segments}
        if len(found) == len(recorded):
            return found
        if progress.needs is not None:
            made.load(progress.needs, weights(progress.needs))
        elif progress.idle:
            time.sleep(0.001)
    raise AssertionError(f"{len(found)} of {len(recorded)} segments")


def assert_equal(one: dict[int, Segment], other: dict[int, Segment]) -> None:
    assert one.keys() == other.keys()
    for number, segment in one.items():
        assert segment.pieces == other[number].pieces
        np.testing.assert_array_equal(segment.versions, other[number].versions)
        for name, array in segment.data.items():
            np.testing.assert_array_equal(array, other[number].data[name], err_msg=f"{number} {name}")


def test_it_is_a_wide_collector() -> None:
    assert isinstance(machine(), WideCollector)
    assert machine(slots=12).capacity == 24
    assert machine(slots=12, group=4).capacity == 6
    assert machine(slots=12, capacity=3).capacity == 3


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_tokens_do_not_depend_on_slots_or_on_what_else_is_there(slots: int) -> None:
    alone = {}
    for number in range(20):
        one = machine(slots=1, group=2)
        one.accept(ticket(number))
        alone |= finish(one, 1)
    together = machine(slots=slots, group=2)
    for number in reversed(range(20)):
        together.accept(ticket(number))
    assert_equal(finish(together, 20), alone)


def test_short_ones_are_finished_first_and_slots_are_given_out_in_the_order_of_tickets() -> None:
    made = machine(slots=4)
    for number in reversed(range(40)):
        made.accept(ticket(number))
    order = list(finish(made, 40))
    assert order != sorted(order)
    assert all(number < 4 + place for place, number in enumerate(order)), "only admitted ones could finish"


def test_weights_may_change_in_the_middle_of_a_response_and_the_spans_say_where() -> None:
    made = machine(slots=8)
    for number in range(30):
        made.accept(ticket(number))
    found = finish(made, 30, versions=range(1, 30))
    assert max(len(segment.pieces[0].spans) for segment in found.values()) > 2
    for segment in found.values():
        (piece,) = segment.pieces
        assert sum(span.size for span in piece.spans) == segment.num_steps == len(segment.data["tokens"])
        by_span = [span.version for span in piece.spans for _ in range(span.size)]
        assert by_span == segment.versions.tolist() == sorted(by_span)
        assert piece.end == ("eos" if segment.data["tokens"][-1] == 0 else "length")


def test_tokens_depend_on_the_version_that_makes_them() -> None:
    def tokens(version: int) -> list[int]:
        made = machine()
        made.load(version, weights(version))
        made.accept(ticket(0))
        return list(finish(made, 1)[0].data["tokens"])

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize("group", [1, 3])
def test_scripts_repeat_versions_ends_and_tokens_bit_for_bit(group: int) -> None:
    made = machine(slots=5, group=group, tool=lambda seed, place: 2 + (seed + place) % 30)
    for number in range(20):
        made.accept(ticket(number))
    recorded = finish(made, 20, versions=range(1, 40), every=5)
    assert_equal(
        repeat(machine(slots=5, group=group, tool=lambda s, p: 2 + (s + p) % 30), recorded), recorded
    )


def test_cut_ends_with_what_there_is_and_is_repeated() -> None:
    made = machine(slots=4)
    for number in range(8):
        made.accept(ticket(number))
    begun = [segment for _ in range(5) for segment in made.advance().segments]
    made.cut(sorted(set(range(8)) - {segment.ticket.number for segment in begun}))
    found = {segment.ticket.number: segment for segment in (*begun, *made.advance().segments)}
    ends = [found[number].pieces[0].end for number in range(8)]
    assert ends.count("cut") >= 7
    assert found[7].drop == "empty", "it had no slot yet"
    assert found[7].versions.tolist() == [0]
    kept = {number: segment for number, segment in found.items() if not segment.drop}
    assert {5} >= {segment.num_steps for segment in kept.values() if segment.pieces[0].end == "cut"}
    assert_equal(repeat(machine(), kept), kept)


def test_begun_work_goes_on_elsewhere_without_what_a_newer_version_made() -> None:
    made = machine(slots=8)
    for number in range(6):
        made.accept(ticket(number))
    for version in (1, 2, 3):
        for _ in range(4):
            made.advance()
        made.load(version, weights(version))
    made.advance()
    work = made.open_work()
    assert {tuple(row["0"]["made"][-2:]) for row in work.values()} == {(2, 3)}, "none is over yet"
    for newest, kept in ((0, 4), (1, 8), (3, 13)):
        other = machine(slots=8)
        other.load(newest, weights(newest))
        for number, begun in work.items():
            other.accept(ticket(number), begun)
        found = finish(other, len(work))
        for number, segment in found.items():
            np.testing.assert_array_equal(segment.data["tokens"][:kept], work[number]["0"]["tokens"][:kept])
            assert segment.oldest_version == 0
            assert segment.versions.max() == newest
            assert segment.pieces[0].spans[-1] == Span(newest, segment.num_steps - kept, rebuilt=True)
        assert_equal(repeat(machine(slots=2), found), found)


def test_a_rebuilt_cache_is_another_one() -> None:
    made = machine()
    made.accept(ticket(0))
    made.advance()
    made.load(1, weights(1))
    made.advance()
    other = machine()
    other.load(1, weights(1))
    other.accept(ticket(0), made.open_work()[0])
    (one,), (two,) = finish(made, 1).values(), finish(other, 1).values()
    shared = min(one.num_steps, two.num_steps)
    assert one.data["logprobs"][:2].tolist() == two.data["logprobs"][:2].tolist()
    assert one.data["logprobs"][2:shared].tolist() != two.data["logprobs"][2:shared].tolist()


def test_what_is_over_stays_over_unless_a_newer_version_ended_it() -> None:
    made = machine(slots=8, group=6)
    made.accept(ticket(0))
    made.advance()
    made.load(1, weights(1))
    while not any(row["end"] and len(row["made"]) > 1 for row in made.open_work()[0].values()):
        made.advance()
    work = made.open_work()[0]
    place = next(place for place, row in work.items() if row["end"] and row["made"][-1] == 1)
    for newest, is_kept in ((1, True), (0, False)):
        other = machine(slots=8, group=6)
        other.load(newest, weights(newest))
        other.accept(ticket(0), work)
        piece = finish(other, 1)[0].pieces[int(place)]
        assert ([list(span) for span in piece.spans] == work[place]["spans"]) == is_kept


def test_tools_are_waited_for_without_work_and_wake_the_machine() -> None:
    gate, woken = threading.Event(), threading.Semaphore(0)

    def tool(seed: int, place: int) -> int:
        gate.wait(10.0)
        return 2 + (seed + place) % 30

    made = machine(woken.release, slots=200, tool=tool, max_tokens=2)
    made.load(0, ALWAYS_CALLS)
    for number in range(200):
        made.accept(ticket(number))
    while not (progress := made.advance()).idle:
        pass
    assert progress == Progress(idle=True), "it needs no version, and has nothing to compute"
    gate.set()
    for _ in range(200):
        assert woken.acquire(timeout=10.0)
    found = finish(made, 200)
    for segment in found.values():
        assert segment.data["made"].tolist() == [0, FROM_TOOL, 0]
        assert segment.data["tokens"][[0, 2]].tolist() == [CALL, CALL]
        assert segment.versions.tolist() == [0, 0]
        assert segment.num_steps == 2


def test_a_tool_that_takes_too_long_ends_its_response() -> None:
    def tool(seed: int, place: int) -> int:
        time.sleep(2.0)
        return 2

    made = machine(tool=tool, timeout_s=0.01)
    made.load(0, ALWAYS_CALLS)
    made.accept(ticket(0))
    found = finish(made, 1)
    assert found[0].pieces == (Piece((Span(0, 1),), "timeout"),)
    again = machine(tool=tool, timeout_s=0.01)
    again.load(0, ALWAYS_CALLS)
    assert_equal(repeat(again, found), found)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tool_that_raises_ends_its_response() -> None:
    def tool(seed: int, place: int) -> int:
        raise OSError("no such tool")

    made = machine(tool=tool)
    made.load(0, ALWAYS_CALLS)
    made.accept(ticket(0))
    assert finish(made, 1)[0].pieces[0].end == "error"


def test_a_slow_step_is_waited_for_in_small_pieces() -> None:
    made = machine(step_s=0.05)
    made.accept(ticket(0))
    kinds = []
    while sum(kinds) < 3:
        progress = made.advance()
        assert not progress.idle
        kinds.append(progress.units.get("tokens", 0))
    assert kinds.count(0) >= 4, "two steps of 50 ms are waited for in pieces of 20 ms"


def test_groups_without_spread_are_dropped() -> None:
    made = machine(group=2, needs_spread=True)
    for number in range(40):
        made.accept(ticket(number))
    found = finish(made, 40).values()
    assert {segment.drop for segment in found} == {"", "no_spread"}
    for segment in found:
        first, second = segment.data["rewards"]
        assert (segment.drop == "no_spread") == (first == second)


def test_its_learner_feels_every_token_version_and_the_order() -> None:
    made = machine()
    for number in range(2):
        made.accept(ticket(number))
    one, two = finish(made, 2).values()

    def digest(*segments: Segment) -> bytes:
        learner = TokenLearner()
        learner.train(Batch(0, segments, 0))
        return learner.weights()["embed"].tobytes()

    def changed(name: str, by: float) -> Segment:
        array = two.data[name].copy()
        array[3] = (array[3] + by) % 31 if name == "tokens" else array[3] + by
        return Segment(two.ticket, {**two.data, name: array}, two.versions)

    assert digest(one, two) == digest(one, two)
    others = [digest(two, one), digest(one), *(digest(one, changed(n, 1)) for n in ("tokens", "made"))]
    others.append(digest(one, changed("logprobs", 1e-12)))
    assert len({digest(one, two), *others}) == 6
