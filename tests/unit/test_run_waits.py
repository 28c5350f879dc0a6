"""The table of waits: every deadline of a run."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.run.waits import Pending, Wait, Waits, describe_stall


def wait(key: Hashable, limit_s: float = 10.0, phase: str = "") -> Wait:
    return Wait(key, "round 7", f"whom {key}", limit_s, f"limit_of.{key}", lambda: None, phase)


def keys(found: list[Wait]) -> list[Hashable]:
    return [one.key for one in found]


def test_a_row_is_open_from_begin_to_end() -> None:
    waits = Waits()
    assert "a" not in waits
    waits.begin(wait("a"), 0.0)
    assert "a" in waits
    assert keys(waits.expired(11.0)) == ["a"]
    waits.end("a")
    assert "a" not in waits
    assert waits.expired(1000.0) == []
    assert waits.rows(1000.0) == []


def test_to_end_what_is_not_open_does_nothing() -> None:
    waits = Waits()
    waits.end("a")
    waits.begin(wait("b"), 0.0)
    waits.end("a")
    assert "b" in waits


def test_a_limit_is_over_only_after_it() -> None:
    waits = Waits()
    waits.begin(wait("a", 10.0), 5.0)
    assert waits.expired(15.0) == []
    assert keys(waits.expired(15.001)) == ["a"]


def test_beginning_again_starts_the_time_anew() -> None:
    waits = Waits()
    waits.begin(wait("a"), 0.0)
    waits.begin(wait("b"), 1.0)
    waits.begin(wait("a"), 8.0)
    assert keys(waits.expired(11.5)) == ["b"], "the newer row stands behind the older one"
    assert [(row.wait.key, row.waited_s) for row in waits.rows(12.0)] == [("b", 11.0), ("a", 4.0)]


def test_the_same_key_may_begin_again_with_another_limit() -> None:
    waits = Waits()
    waits.begin(wait("a", 10.0), 0.0)
    waits.begin(wait("a", 100.0), 0.0)
    assert waits.expired(50.0) == []
    assert len(waits.rows(50.0)) == 1
    assert waits.next_s() == 100.0


def test_an_expired_row_is_named_once_and_stays_until_it_ends_or_starts_again() -> None:
    waits = Waits()
    waits.begin(wait("a", 10.0), 0.0)
    assert keys(waits.expired(25.0)) == ["a"]
    assert waits.expired(25.0) == waits.expired(1e9) == []
    assert "a" in waits
    assert waits.deadline_s("a") == waits.next_s() == math.inf
    assert [row.waited_s for row in waits.rows(40.0)] == [40.0], "it is still the same wait"
    waits.begin(wait("a", 10.0), 50.0)
    assert waits.deadline_s("a") == waits.next_s() == 60.0
    assert keys(waits.expired(61.0)) == ["a"]


def test_all_rows_of_a_limit_that_are_over_are_named() -> None:
    waits = Waits()
    for at_s, key in enumerate("abcd"):
        waits.begin(wait(key, 10.0), float(at_s))
    waits.begin(wait("long", 1000.0), -100.0)
    waits.end("b")
    assert keys(waits.expired(12.5)) == ["a", "c"]


def test_time_in_which_the_process_was_suspended_counts_for_nobody() -> None:
    waits = Waits()
    waits.begin(wait("a", 10.0), 0.0)
    waits.begin(wait("b", 60.0), 2.0)
    waits.shift(3600.0, 3605.0)
    assert waits.next_s() == 3610.0
    assert waits.expired(3609.0) == []
    assert [row.waited_s for row in waits.rows(3609.0)] == [9.0, 7.0]
    assert keys(waits.expired(3610.5)) == ["a"]


def test_a_row_that_began_after_a_suspension_is_not_extended_by_it() -> None:
    waits = Waits()
    waits.begin(wait("before", 10.0), 0.0)
    waits.begin(wait("after", 60.0), 3600.0)
    waits.shift(3600.0, 3601.0)
    assert [row.waited_s for row in waits.rows(3602.0)] == [2.0, 1.0]


def test_the_next_deadline_is_the_earliest_of_all_limits() -> None:
    waits = Waits()
    assert waits.next_s() == math.inf
    waits.begin(wait("a", 10.0), 5.0)
    waits.begin(wait("b", 3.0), 11.0)
    assert waits.next_s() == 14.0
    waits.end("b")
    assert waits.next_s() == 15.0
    waits.end("a")
    assert waits.next_s() == math.inf


def test_rows_are_listed_with_the_longest_wait_first() -> None:
    waits = Waits()
    waits.begin(wait("short", 1.0), 5.0)
    waits.begin(wait("old", 100.0), 1.0)
    waits.begin(wait("new", 100.0), 9.0)
    assert [row.wait.key for row in waits.rows(10.0)] == ["old", "short", "new"]


def test_a_row_as_an_event_holds_it() -> None:
    assert Pending(wait("a", 120.0), 12.3456).to_record() == {
        **{"who": "round 7", "for": "whom a", "since_s": 12.346},
        **{"limit_s": 120.0, "limit_key": "limit_of.a"},
    }


def test_the_phase_is_that_of_the_newest_row_that_has_one() -> None:
    waits = Waits()
    assert waits.phase() == ""
    waits.begin(wait("collector"), 9.0)
    assert waits.phase() == ""
    waits.begin(wait("train", 600.0, "training round 7"), 3.0)
    waits.begin(wait("evaluation", 60.0, "evaluating version 7"), 4.0)
    assert waits.phase() == "evaluating version 7"
    waits.end("evaluation")
    assert waits.phase() == "training round 7"


def test_the_phase_has_the_reports_of_components_that_start() -> None:
    waits = Waits()
    for index in range(3):
        row = wait(f"collector_{index}", phase="starting")._replace(whom=f"collector_{index} to start")
        waits.begin(row, 0.25 * index)
    assert waits.phase({}) == "starting"
    assert waits.phase({"collector_0": "compiling", "learner": "minibatch 1 of 2"}) == "starting: compiling"
    assert waits.phase({"collector_0": "compiling", "collector_1": "compiling"}) == "starting: compiling"
    waits.begin(wait("train", phase="training round 7")._replace(whom="learner"), 3.0)
    assert waits.phase({"collector_0": "compiling"}) == "training round 7"


def test_only_limits_of_open_rows_are_kept() -> None:
    waits = Waits()
    for number in range(100):
        waits.begin(wait("warm", float(number)), 0.0)
        waits.begin(wait(f"once {number}", 1000.0 + number), 0.0)
        waits.end(f"once {number}")
    assert list(waits._by_limit) == [99.0]
    assert keys(waits.expired(1e9)) == ["warm"]
    assert list(waits._by_limit) == [math.inf]
    waits.end("warm")
    assert waits._by_limit == {}


def test_stall_report_names_who_waits_for_whom_and_where_they_are() -> None:
    limit = "async_training.generation_timeout"
    row = Pending(Wait("c", "round 7", "collector_1 (ticket 14)", 120.0, limit, lambda: None), waited_s=12.34)
    text = describe_stall("nothing happened", [row], {"collector_1": "File x\n  line y"})
    assert text.splitlines() == [
        "nothing happened",
        "who waits for whom:",
        "  round 7 waits for collector_1 (ticket 14) since 12.3 s"
        " (limit 120 s, async_training.generation_timeout)",
        "collector_1 was here:",
        "  File x",
        "    line y",
    ]
    assert describe_stall("nothing happened", [], {}) == "nothing happened"


@dataclass
class Naive:
    """A plain list of waits, starts of their limits, and their own starts."""

    rows: list[tuple[Wait, float, float]] = field(default_factory=list)  # with start and limit

    def begin(self, wait: Wait, now_s: float) -> None:
        self.end(wait.key)
        self.rows.append((wait, now_s, wait.limit_s))

    def end(self, key: Hashable) -> None:
        self.rows = [row for row in self.rows if row[0].key != key]

    def shift(self, by_s: float, now_s: float) -> None:
        self.rows = [(one, min(since_s + by_s, now_s), limit_s) for one, since_s, limit_s in self.rows]

    def expired(self, now_s: float) -> set[Hashable]:
        found = {one.key for one, since_s, limit_s in self.rows if now_s - since_s > limit_s}
        self.rows = [
            (one, since_s, math.inf if one.key in found else limit_s) for one, since_s, limit_s in self.rows
        ]
        return found

    def next_s(self) -> float:
        return min((since_s + limit_s for _, since_s, limit_s in self.rows), default=math.inf)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "begin", "end", "expired", "shift"]),
        st.integers(0, 5),
        st.sampled_from([1.0, 4.0, 16.0]),
        st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0]),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_the_table_does_what_a_plain_list_does(steps: list[tuple[str, int, float, float]]) -> None:
    waits, naive, now_s = Waits(), Naive(), 0.0
    for what, key, limit_s, later_s in steps:
        now_s += later_s
        if what == "begin":
            row = wait(key, limit_s, phase=f"phase {key}" if key % 2 else "")
            waits.begin(row, now_s)
            naive.begin(row, now_s)
        elif what == "end":
            waits.end(key)
            naive.end(key)
        elif what == "shift":
            now_s += later_s
            waits.shift(later_s, now_s)
            naive.shift(later_s, now_s)
        else:
            found = keys(waits.expired(now_s))
            assert len(found) == len(set(found))
            assert set(found) == naive.expired(now_s)
        assert waits.next_s() == pytest.approx(naive.next_s())
        assert {(row.wait, row.waited_s) for row in waits.rows(now_s)} == {
            (one, now_s - since_s) for one, since_s, _ in naive.rows
        }
        assert all((key in waits) == any(row[0].key == key for row in naive.rows) for key in range(6))
        phases = [(since_s, one.phase) for one, since_s, _ in naive.rows if one.phase]
        assert waits.phase() == max(phases, default=(0.0, ""))[1]
