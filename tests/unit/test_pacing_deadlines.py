"""The deadline rule against its literal definition."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.pacing.deadlines import feasible

deadline_lists = st.lists(st.integers(0, 12), max_size=30)
rounds = st.integers(0, 10)
sizes = st.integers(1, 5)


def feasible_by_definition(deadlines: list[int], next_round: int, size: int) -> bool:
    return all(next_round + i // size <= deadline for i, deadline in enumerate(sorted(deadlines)))


@settings(max_examples=500, deadline=None, database=None)
@given(deadline_lists, rounds, sizes)
def test_feasible_is_its_definition(deadlines: list[int], next_round: int, size: int) -> None:
    found = feasible(Counter(deadlines), next_round, size)
    assert found == feasible_by_definition(deadlines, next_round, size)


@settings(max_examples=300, deadline=None, database=None)
@given(deadline_lists, rounds, sizes)
def test_training_the_earliest_keeps_a_feasible_set_feasible(
    deadlines: list[int], next_round: int, size: int
) -> None:
    if feasible(Counter(deadlines), next_round, size):
        rest = sorted(deadlines)[size:]
        assert feasible(Counter(rest), next_round + 1, size)


@settings(max_examples=300, deadline=None, database=None)
@given(deadline_lists, rounds, sizes, st.data())
def test_losing_segments_only_relaxes(
    deadlines: list[int], next_round: int, size: int, data: st.DataObject
) -> None:
    if feasible(Counter(deadlines), next_round, size):
        kept = [deadline for deadline in deadlines if data.draw(st.booleans())]
        assert feasible(Counter(kept), next_round, size)


def test_entries_that_fell_to_zero_do_not_count() -> None:
    assert feasible(Counter({0: 0, 5: 1}), next_round=5, segments_per_round=1)


def test_a_deadline_that_is_over_is_infeasible() -> None:
    assert not feasible(Counter({4: 1}), next_round=5, segments_per_round=8)
