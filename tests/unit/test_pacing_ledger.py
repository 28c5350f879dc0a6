"""The ledger: every ticket has one fate, whatever legal operations come, and illegal ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import PromiseBroken
from offbeat.pacing.ledger import DROPPED, LOST, READY, RUNNING, TRAINED, Counts, Ledger
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
        assert ledger.num(status) == fates.count(status)
    assert ledger.num(TRAINED) == fates.count(TRAINED)


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
