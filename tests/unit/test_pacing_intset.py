"""The set of integers against Python's own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.pacing.ledger import IntSet

members = st.integers(0, 40) | st.sampled_from([1022, 1023, 1024, 1025, 2047, 2048, 70_000, 10**7])
changes = st.lists(st.tuples(st.booleans(), members), max_size=80)


@settings(max_examples=300, deadline=None, database=None)
@given(changes, members)
def test_is_a_set_that_finds_the_next_member_in_turn(steps: list[tuple[bool, int]], start: int) -> None:
    found, expected = IntSet(), set[int]()
    for is_added, member in steps:
        (found.add if is_added else found.discard)(member)
        (expected.add if is_added else expected.discard)(member)
        assert len(found) == len(expected)
        assert (member in found) == (member in expected)
    above = [member for member in expected if member >= start]
    assert found.next_from(start) == min(above or expected, default=None)


def test_an_empty_set_keeps_nothing() -> None:
    found = IntSet()
    for member in range(0, 10_000, 7):
        found.add(member)
    for member in range(0, 10_000, 7):
        found.discard(member)
    assert (len(found), found.next_from(3), found._words, found._used) == (0, None, {}, 0)
