"""The ledger: every ticket has one fate, whatever legal operations come, and illegal ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import PromiseBroken
from offbeat.pacing.ledger import DROPPED, LOST, READY, RUNNING, TRAINED, Counts, IntSet, Ledger
from offbeat.types import Ticket

MOVES = {
    "arrive": ({RUNNING}, READY),
    "lose": ({RUNNING, READY}, LOST),
    "train": ({READY}, TRAINED),
    "drop": ({READY}, DROPPED),
    "again": ({LOST}, RUNNING),
}


def ticket(number: int, attempt: int = 0) -> Ticket:
    return Ticket(number=number, collector=0, version=0, deadline=0, seed=number, attempt=attempt)


def operation(ledger: Ledger, name: str, number: int) -> Callable[[], object]:
    if name == "again":
        return lambda: ledger.issue(ticket(number, attempt=1))
    if name == "train":
        return lambda: train(ledger, number)
    return lambda: getattr(ledger, name)(number)


def train(ledger: Ledger, *numbers: int) -> None:
    ledger.begin_round(numbers)
    ledger.end_round()


def count(fates: list[int]) -> Counts:
    numbers = {fate: fates.count(fate) for fate in (RUNNING, READY, TRAINED, DROPPED, LOST)}
    return Counts(
        len(fates), numbers[RUNNING], numbers[READY], numbers[TRAINED], numbers[DROPPED], numbers[LOST]
    )


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from([*MOVES, "new", "new"]), st.integers(0, 12)), max_size=60))
def test_conserved_under_legal_operations_and_illegal_ones_refused(steps: list[tuple[str, int]]) -> None:
    ledger, fates = Ledger(), list[int]()
    for name, number in steps:
        if name == "new":
            ledger.issue(ticket(len(fates)))
            fates.append(RUNNING)
        elif number < len(fates) and fates[number] in MOVES[name][0]:
            operation(ledger, name, number)()
            fates[number] = MOVES[name][1]
        elif name != "again" or number != len(fates):
            with pytest.raises(PromiseBroken, match=f"ticket {number} cannot "):
                operation(ledger, name, number)()
        assert ledger.check() == count(fates)
    live = [number for number, fate in enumerate(fates) if fate in (RUNNING, READY, LOST)]
    assert sorted(t.number for t in ledger.outstanding()) == live
    assert ledger.num_outstanding == len(live)
    for status in (RUNNING, READY, LOST):
        assert [t.number for t in ledger.with_status(status)] == [
            number for number in live if fates[number] == status
        ]


def test_survives_json() -> None:
    ledger = Ledger()
    for number in range(5):
        ledger.issue(ticket(number))
    for number in (0, 1, 2):
        ledger.arrive(number)
    train(ledger, 0)
    ledger.drop(1)
    ledger.lose(3)
    restored = Ledger()
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored.check() == ledger.check() == Counts(5, 1, 1, 1, 1, 1)
    assert [restored.with_status(status) for status in (READY, LOST, RUNNING)] == [
        [ticket(number)] for number in (2, 3, 4)
    ]
    assert restored.ticket(3) == ticket(3)


def test_a_torn_state_is_noticed() -> None:
    ledger = Ledger()
    ledger.issue(ticket(0))
    state = ledger.state_dict()
    state["running"] = []
    torn = Ledger()
    torn.load_state_dict(state)
    with pytest.raises(PromiseBroken, match="not conserved"):
        torn.check()


@pytest.mark.parametrize(
    "drift",
    [
        lambda ledger: ledger.waiting.update({2: 2, 3: 2}),
        lambda ledger: ledger.running_on[0].add(9),
        lambda ledger: ledger.lost.add(9),
        lambda ledger: setattr(ledger, "trained", 0),
    ],
    ids=["deadlines", "running", "lost", "trained"],
)
def test_a_count_that_drifts_is_noticed(drift: Callable[[Ledger], None]) -> None:
    ledger = Ledger()
    for number, deadline in enumerate((1, 1, 2, 3, 3, 3)):
        ledger.issue(Ticket(number, 0, 0, deadline, seed=number))
    for number in range(3):
        ledger.arrive(number)
    train(ledger, 0)
    ledger.begin_round([1])
    assert ledger.check() == Counts(issued=6, running=3, ready=2, trained=1, dropped=0, lost=0)
    assert ledger.waiting == {2: 1, 3: 3}
    drift(ledger)
    with pytest.raises(PromiseBroken, match="not conserved"):
        ledger.check()


def aged(finished: int, outstanding: int = 10) -> Ledger:
    """A ledger of a run that has trained so many tickets, one in ten dropped, and has some outstanding."""
    trained = finished - finished // 10
    rows = [[finished + i, i, 3, 4, i, 0] for i in range(outstanding)]
    ledger = Ledger()
    ledger.load_state_dict(
        {
            "issued": finished + outstanding,
            "trained": trained,
            "dropped": finished // 10,
            "running": rows[2:],
            "ready": rows[:1],
            "lost": rows[1:2],
        }
    )
    return ledger


def size_of(value: object) -> int:
    """Number of values inside."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | set | frozenset | IntSet):
        return sum(map(size_of, value)) if isinstance(value, list) else len(value)
    return 1


def test_forgets_what_is_finished() -> None:
    """After 10^7 tickets a saved state, and what is at hand, is as small as after 10^2."""
    young, old = aged(100), aged(10**7)
    assert old.check().trained == 9 * 10**6
    assert size_of(old.state_dict()) == size_of(young.state_dict())
    assert size_of(vars(old)) == size_of(vars(young))


def test_keeps_no_trace_of_tickets_that_came_and_went() -> None:
    ledger = Ledger()
    sizes = set()
    for version in range(200):
        numbers = range(4 * version, 4 * version + 4)
        for number in numbers:
            ledger.issue(Ticket(number, number % 4, version, version + 2, seed=0))
            ledger.arrive(number)
        ledger.drop(numbers[0])
        train(ledger, *numbers[1:])
        sizes.add((size_of(vars(ledger)), size_of(ledger.state_dict())))
    assert len(sizes) == 1
    assert ledger.check() == Counts(issued=800, running=0, ready=0, trained=600, dropped=200, lost=0)


def test_reads_a_state_that_held_every_ticket_ever_issued() -> None:
    statuses = bytes([TRAINED, DROPPED, READY, LOST, RUNNING, READY]).decode("latin-1")
    rows = [[4, 0, 1, 2, 99, 0], [5, 1, 1, 2, 98, 0], [2, 1, 0, 1, 97, 1], [3, 0, 1, 3, 96, 2]]
    ledger = Ledger()
    ledger.load_state_dict({"status": statuses, "live": rows})
    assert ledger.check() == Counts(issued=6, running=1, ready=2, trained=1, dropped=1, lost=1)
    assert list(ledger.ready) == [5, 2], "in order of arrival"
    assert ledger.ticket(2) == Ticket(2, 1, 0, 1, 97, 1)
    assert ledger.waiting == {1: 1, 2: 2, 3: 1}
    assert (3 in ledger.lost_on[0], len(ledger.lost_on[0]), len(ledger.running_on[0])) == (True, 1, 1)


def test_a_finished_ticket_is_not_at_hand() -> None:
    with pytest.raises(PromiseBroken, match="ticket 7 is finished"):
        aged(100).ticket(7)


def test_the_earliest_deadlines_come_first_and_then_the_smallest_numbers() -> None:
    ledger = Ledger()
    for number, deadline in enumerate([5, 3, 5, 3, 4, 5]):
        ledger.issue(Ticket(number, 0, 0, deadline, seed=0))
    for number in (5, 4, 3, 2, 0):
        ledger.arrive(number)
    assert list(ledger.earliest(4).items()) == [(3, 1), (4, 1), (5, 2)]
    assert ledger.pick(ledger.earliest(4)) == (0, 2, 3, 4)
    assert ledger.earliest(2) == {3: 1, 4: 1}
    assert ledger.first_arrived(2) == (4, 5)
