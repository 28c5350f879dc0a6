"""The table of collectors: tickets and since when, losses, restarts, and where each one continues."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from offbeat.checkpoint import pack, unpack
from offbeat.config.models import AsyncTrainingConfig, RuntimeConfig
from offbeat.config.settings import Settings
from offbeat.errors import CollectError
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    CollectorWorked,
    Event,
    Issued,
    RoundTrained,
    SegmentArrived,
)
from offbeat.run.collectors import Collectors, Loss
from offbeat.run.waits import Waits
from offbeat.runtime.spec import CollectorState
from offbeat.types import Segment, StateTree, Ticket


class Table:
    """A table with its waits; ``killed`` and ``started`` are what it asked of the runtime.

    ``working_s`` is how long the present piece of work of each collector lasts: for ever, if it is not said.
    """

    def __init__(self, num_workers: int = 2, generation_timeout: float = 10.0, **limits: Any) -> None:
        settings = Settings(
            runtime=RuntimeConfig(num_workers=num_workers, **limits),
            async_training=AsyncTrainingConfig(generation_timeout=generation_timeout),
        )
        self.version = 0
        self.killed: list[tuple[int, str]] = []
        self.started: list[int] = []
        self.working_s: dict[int, float | None] = {}
        self.now_s = 0.0
        self.waits = Waits()
        self.table = Collectors(
            settings,
            self.waits,
            self.started.append,
            lambda index, why: self.killed.append((index, why)),
            lambda: self.version,
            settings.runtime.start_timeout_s,
            working_s=lambda index: self.working_s.get(index, math.inf),
            clock=lambda: self.now_s,
        )
        self._handlers = self.table.handlers()

    def tell(self, event: Event, now_s: float) -> None:
        self._handlers[type(event)](event, now_s)

    def issue(self, number: int, now_s: float, collector: int = 0) -> None:
        self.tell(Issued(Ticket(number, collector, 0, 0, 0)), now_s)

    def arrive(
        self,
        number: int,
        now_s: float,
        collector: int = 0,
        collect_s: float = 0.0,
        state: StateTree | None = None,
    ) -> None:
        segment = Segment(Ticket(number, collector, 0, 0, 0), {}, np.array([0]), collect_s=collect_s)
        self.tell(SegmentArrived(segment, 0, state), now_s)

    def lose(self, now_s: float, collector: int = 0, why: str = "killed") -> None:
        self.tell(CollectorDown(collector, why), now_s)

    def train(self, now_s: float) -> None:
        """End a round; the version is the next one."""
        self.version += 1
        self.tell(RoundTrained(self.version, ended_s=now_s), now_s)

    def pass_time(self, now_s: float) -> None:
        """Do what the waits say at this time."""
        self.now_s = now_s
        for wait in self.waits.expired(now_s):
            wait.expire()

    def row_of(self, key: Any, now_s: float = 0.0) -> Any:
        return next(row for row in self.waits.rows(now_s) if row.wait.key == key)


# ---------------------------------------------------------------- tickets


def test_a_row_holds_its_tickets_and_when_they_were_issued() -> None:
    one = Table()
    one.issue(0, 1.0)
    one.issue(1, 2.0)
    one.issue(2, 3.0, collector=1)
    first, second = one.table.rows
    assert (first.tickets, first.since_s) == ({0: 1.0, 1: 2.0}, 1.0)
    assert (second.tickets, second.since_s) == ({2: 3.0}, 3.0)
    one.arrive(0, 5.0)
    assert (first.tickets, first.since_s) == ({1: 2.0}, 5.0)
    assert first.has_worked and not second.has_worked


def test_work_on_the_next_ticket_begins_when_the_one_before_ended() -> None:
    one = Table()
    one.issue(0, 0.0)
    one.issue(1, 0.0)
    one.arrive(0, 9.0, collect_s=2.0)
    assert one.table.rows[0].since_s == 2.0, "it was noticed late, and the segment says how long it took"


def test_work_on_a_ticket_does_not_begin_before_it_was_issued() -> None:
    one = Table()
    one.issue(0, 0.0)
    one.issue(1, 5.0)
    one.arrive(0, 9.0, collect_s=2.0)
    assert one.table.rows[0].since_s == 5.0


def test_each_collector_with_tickets_has_one_row_however_many_they_are() -> None:
    one = Table(num_workers=3)
    for number in range(50):
        one.issue(number, float(number), collector=number % 2)
    assert sorted(row.wait.key for row in one.waits.rows(60.0)) == ["collector_0", "collector_1"]
    for number in range(0, 50, 2):
        assert "collector_0" in one.waits
        one.arrive(number, 50.0 + number)
    assert [row.wait.key for row in one.waits.rows(60.0)] == ["collector_1"]


def test_the_row_names_the_ticket_the_round_and_the_setting() -> None:
    one = Table(generation_timeout=120.0)
    one.version = 7
    one.issue(14, 100.0, collector=1)
    assert str(one.row_of("collector_1", 112.3)) == (
        "round 7 waits for collector_1 (ticket 14) since 12.3 s"
        " (limit 120 s, async_training.generation_timeout)"
    )


def test_the_time_limit_of_a_ticket_begins_when_the_one_before_arrived() -> None:
    one = Table(generation_timeout=10.0)
    one.issue(0, 0.0)
    one.issue(1, 0.0)
    one.arrive(0, 9.0)
    one.pass_time(18.0)
    assert one.killed == []
    one.pass_time(19.1)
    assert one.killed == [(0, "hung: ticket 1 took more than 10 s (async_training.generation_timeout)")]


def test_an_arrival_noticed_late_does_not_shorten_the_limit_of_the_next_ticket() -> None:
    one = Table(generation_timeout=10.0)
    one.issue(0, 0.0)
    one.issue(1, 0.0)
    one.arrive(0, 500.0, collect_s=2.0)
    one.pass_time(509.0)
    assert one.killed == []


def test_more_tickets_do_not_extend_the_limit_of_the_first() -> None:
    one = Table(generation_timeout=10.0)
    one.issue(0, 0.0)
    one.issue(1, 9.0)
    one.pass_time(10.5)
    assert one.killed == [(0, "hung: ticket 0 took more than 10 s (async_training.generation_timeout)")]


def test_a_piece_of_work_has_the_whole_limit_whenever_its_ticket_came() -> None:
    one = Table(generation_timeout=10.0)
    one.working_s[0] = 7.0
    one.issue(0, 0.0)
    one.pass_time(10.5)
    assert one.killed == []
    row = one.row_of("collector_0", 11.0)
    assert (row.waited_s, row.wait.limit_s) == (0.5, 3.0), "the rest of the limit"
    one.working_s[0] = 10.2
    one.pass_time(13.7)
    assert one.killed == [(0, "hung: ticket 0 took more than 10 s (async_training.generation_timeout)")]


def test_a_collector_whose_tickets_wait_for_something_outside_does_not_hang() -> None:
    one = Table(generation_timeout=10.0)
    one.working_s[0] = None
    for number in range(300):
        one.issue(number, 0.0)
    for now_s in range(11, 1000, 11):
        one.pass_time(float(now_s))
    assert one.killed == []
    assert one.row_of("collector_0", 1000.0).waited_s < 20.0
    del one.working_s[0]
    one.pass_time(1010.5)
    assert [index for index, _ in one.killed] == [0]


def test_a_report_of_work_begins_the_limit_again() -> None:
    one = Table(generation_timeout=10.0)
    one.issue(0, 0.0)
    one.tell(CollectorWorked(0, 0.5), 9.0)
    one.pass_time(18.5)
    assert one.killed == []
    one.pass_time(19.5)
    assert len(one.killed) == 1
    idle = Table()
    idle.tell(CollectorWorked(0, 0.5), 1.0)
    assert idle.waits.rows(2.0) == [], "it holds no ticket any more"


def test_a_collector_that_holds_nothing_hangs_on_nothing() -> None:
    one = Table(generation_timeout=10.0)
    one.issue(0, 0.0)
    one.arrive(0, 1.0)
    one.pass_time(1000.0)
    assert one.killed == []


# ---------------------------------------------------------------- busy time


def test_busy_time_of_work_under_way_and_done() -> None:
    one = Table()
    one.issue(0, 0.0, collector=0)
    one.issue(1, 1.0, collector=1)
    assert one.table.busy_s(2.0) == 2.0 + 1.0
    one.arrive(0, 4.0, collector=0)
    assert one.table.busy_s(10.0) == 4.0 + 9.0


def test_an_arrival_noticed_late_does_not_make_the_collector_look_busy() -> None:
    one = Table(1)
    one.issue(0, 0.0)
    one.arrive(0, 8.0, collect_s=2.0)
    assert one.table.busy_s(10.0) == 2.0


def test_tickets_that_wait_on_one_collector_are_worked_on_one_after_the_other() -> None:
    one = Table(1)
    one.issue(0, 0.0)
    one.issue(1, 0.0)
    one.arrive(0, 6.0, collect_s=1.0)
    one.arrive(1, 6.0, collect_s=3.0)
    assert one.table.busy_s(8.0) == 4.0


def test_a_lost_collector_idles_until_it_has_a_ticket_again() -> None:
    one = Table()
    one.issue(0, 0.0, collector=0)
    one.lose(2.0, collector=0)
    assert one.table.busy_s(5.0) == 2.0
    one.issue(0, 6.0, collector=1)
    one.arrive(0, 10.0, collector=1)
    assert one.table.busy_s(10.0) == 2.0 + 4.0


def test_work_that_spans_two_rounds_counts_in_both() -> None:
    one = Table(1)
    one.issue(0, 6.0)
    assert one.table.busy_s(10.0) == 4.0
    one.train(10.0)
    assert one.table.busy_s(10.0) == 0.0
    assert one.table.busy_s(12.0) == 2.0
    one.arrive(0, 15.0)
    assert one.table.busy_s(20.0) == 5.0


def test_a_round_that_is_noticed_late_ended_when_the_learner_ended_it() -> None:
    one = Table(1)
    one.issue(0, 6.0)
    one.tell(RoundTrained(1, ended_s=10.0), 13.0)
    assert one.table.busy_s(13.0) == 3.0


def test_work_that_ended_before_the_window_counts_in_none() -> None:
    one = Table(1)
    one.issue(0, 0.0)
    one.train(10.0)
    one.arrive(0, 12.0, collect_s=3.0)
    assert one.table.busy_s(20.0) == 0.0


# ---------------------------------------------------------------- starts and losses


def test_a_collector_that_does_not_start_is_killed() -> None:
    one = Table(start_timeout_s=60.0)
    one.table.starting(0, 0.0)
    one.table.starting(1, 0.0)
    one.tell(CollectorUp(1), 30.0)
    one.pass_time(60.5)
    assert one.killed == [(0, "did not start within 60 s (runtime.start_timeout_s)")]
    assert one.waits.phase() == "starting"
    one.tell(CollectorUp(0), 61.0)
    assert one.waits.phase() == ""
    assert [row.is_up for row in one.table.rows] == [True, True]


def test_a_loss_is_kept_with_its_round_and_the_time_until_the_next_one_is_up() -> None:
    one = Table()
    one.version = 14
    one.issue(3, 99.0, collector=1)
    one.tell(CollectorUp(1), 99.0)
    one.lose(100.0, collector=1, why="killed by SIGKILL")
    row = one.table.rows[1]
    assert (row.tickets, row.is_up) == ({}, False)
    assert one.waits.rows(100.0) == []
    assert one.table.losses == [Loss("collector_1", "killed by SIGKILL", 14, None)]
    one.tell(CollectorUp(1), 100.75)
    assert one.table.losses == [Loss("collector_1", "killed by SIGKILL", 14, 0.75)]


def test_losses_in_a_row_are_replaced_together() -> None:
    one = Table()
    one.lose(10.0)
    one.lose(11.0, collector=1)
    one.lose(12.0)
    one.tell(CollectorUp(0), 15.0)
    assert [loss.replaced_s for loss in one.table.losses] == [5.0, None, 3.0]
    one.tell(CollectorUp(0), 20.0)
    assert [loss.replaced_s for loss in one.table.losses] == [5.0, None, 3.0], "the same one, seen again"


def test_a_collector_continues_from_the_state_of_its_last_segment() -> None:
    one = Table()
    one.issue(0, 0.0)
    one.arrive(0, 1.0, state={"at": 1})
    one.issue(1, 1.0)
    one.lose(2.0)
    assert one.table.starts[0] == CollectorState(0, {"at": 1})


def test_a_collector_without_a_saved_state_starts_as_another_incarnation() -> None:
    one = Table()
    one.issue(0, 0.0)
    one.arrive(0, 1.0, state={"at": 1})
    one.issue(1, 1.0)
    one.arrive(1, 2.0, state=None)
    one.lose(3.0)
    assert list(one.table.starts.values()) == [CollectorState(1, None), CollectorState(0, None)]
    one.issue(1, 5.0)
    one.arrive(1, 6.0, state={"at": 2})
    one.lose(7.0)
    assert one.table.starts[0] == CollectorState(1, {"at": 2})


def test_a_collector_that_made_nothing_yet_starts_as_the_same_one() -> None:
    """Nothing depends on what it was: at k = 0 its loss must not change the weights."""
    one = Table()
    one.issue(0, 0.0)
    one.lose(1.0)
    assert one.table.starts[0] == CollectorState(0, None)
    again = Table()
    again.table.load_state_dict(one.table.state_dict())
    assert again.table.starts[0] == CollectorState(0, None)
    one.issue(0, 2.0)
    one.arrive(0, 3.0, state=None)
    again.table.load_state_dict(one.table.state_dict())
    assert again.table.starts[0] == CollectorState(1, None)


# ---------------------------------------------------------------- restarts


def lose_and_restart(one: Table, now_s: float, collector: int = 0) -> float:
    one.lose(now_s, collector)
    return one.table.schedule_restart(collector, "killed", now_s)


def test_first_replacement_comes_at_once_and_later_ones_wait_longer() -> None:
    one = Table(restart_backoff_s=0.5, restart_backoff_max_s=3.0)
    assert [lose_and_restart(one, now_s * 100.0) for now_s in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert lose_and_restart(one, 600.0, collector=1) == 0.0, "each collector has its own row of failures"
    one.issue(0, 700.0)
    one.arrive(0, 701.0)
    assert lose_and_restart(one, 702.0) == 0.0, "a segment ends the row"


def test_after_its_pause_a_collector_is_started_once() -> None:
    one = Table(restart_backoff_s=0.5)
    lose_and_restart(one, 0.0)
    assert one.started == [], "the first replacement comes from the caller"
    lose_and_restart(one, 10.0)
    key = ("collector_0", "pause")
    row = one.row_of(key, 10.0).wait
    assert (row.limit_s, row.limit_key) == (0.5, "runtime.restart_backoff_s")
    one.pass_time(10.4)
    assert one.started == []
    one.pass_time(10.6)
    assert one.started == [0]
    assert key not in one.waits
    one.pass_time(100.0)
    assert one.started == [0]


def test_time_in_which_the_process_was_suspended_is_no_pause() -> None:
    one = Table(restart_backoff_s=0.5)
    lose_and_restart(one, 0.0)
    lose_and_restart(one, 10.0)
    one.waits.shift(3600.0, 4000.0)
    one.pass_time(3610.4)
    assert one.started == []


def test_budget_counts_within_its_window() -> None:
    one = Table(max_worker_restarts=2, restart_window_s=10.0)
    for now_s in (0.0, 1.0, 10.5):  # the first is forgotten by the third
        lose_and_restart(one, now_s)
    with pytest.raises(CollectError, match=r"more than 2 collectors were lost within 10 s.*the last one: oh"):
        one.table.schedule_restart(1, "oh", 10.6)


def test_no_restart_may_be_allowed_at_all() -> None:
    one = Table(max_worker_restarts=0)
    with pytest.raises(CollectError, match=r"runtime\.max_worker_restarts"):
        lose_and_restart(one, 0.0)


def test_a_ticket_that_kills_every_collector_ends_the_run() -> None:
    one = Table()
    for index, now_s in ((0, 0.0), (1, 1.0)):
        one.issue(7, now_s, collector=index)
        one.issue(8, now_s, collector=index)
        lose_and_restart(one, now_s, collector=index)
    one.issue(7, 2.0, collector=0)
    with pytest.raises(CollectError, match="ticket 7 took 3 collectors down and would take more"):
        lose_and_restart(one, 2.0)


def test_tickets_that_were_lost_with_others_are_not_named_before_they_were_tried_alone() -> None:
    one = Table()
    for turn in range(4):
        one.issue(100 + turn, float(turn))
        one.issue(7, float(turn))
        lose_and_restart(one, float(turn))
    assert len(one.table.losses) == 4
    one.issue(7, 5.0)
    one.arrive(7, 6.0)
    one.issue(8, 6.0)
    lose_and_restart(one, 7.0)
    one.issue(103, 7.0)
    lose_and_restart(one, 8.0)
    assert len(one.table.losses) == 6, "each of them was lost once or twice"


def test_every_ticket_of_a_lost_collector_is_blamed_once() -> None:
    one = Table(max_worker_restarts=10)
    for now_s in range(3):
        for number in range(5):
            one.issue(number, float(now_s))
        lose_and_restart(one, float(now_s))
    for number in (0, 1, 2):  # tried alone
        one.issue(number, 10.0)
        one.arrive(number, 11.0)
    one.issue(3, 12.0)
    with pytest.raises(CollectError, match="ticket 3 took 4 collectors down and would take more"):
        lose_and_restart(one, 13.0)


def test_losses_over_a_ticket_are_forgotten_when_it_arrives() -> None:
    """So a loss looks at no ticket but those that are still out, however many were ever lost."""
    one = Table(max_worker_restarts=100)
    for number in range(20):
        one.issue(number, float(number))
        lose_and_restart(one, float(number))
        one.issue(number, number + 0.5)
        one.arrive(number, number + 0.9)
    assert one.table._failures == {}


def test_a_ticket_that_arrived_after_all_is_no_reason_to_end() -> None:
    """Its last collector was leaving, so nobody took its place, and the ticket went on elsewhere."""
    one = Table(num_workers=2)
    for now_s in range(3):
        one.issue(7, float(now_s))
        one.lose(now_s + 0.5)
    one.issue(7, 4.0, collector=1)
    one.arrive(7, 5.0, collector=1)
    assert lose_and_restart(one, 6.0) == 0.0


# ---------------------------------------------------------------- saving


def through_a_checkpoint(table: Collectors) -> Any:
    skeleton, arrays = pack(table.state_dict())
    return unpack(json.loads(json.dumps(skeleton)), arrays)


def used() -> Table:
    one = Table()
    one.issue(0, 0.0)
    one.arrive(0, 1.0, state={"envs": np.arange(3)})
    for number in (1, 2):
        one.issue(number, 1.0, collector=1)
        one.arrive(number, 2.0, collector=1)
        if number == 1:
            one.lose(2.0, collector=1)
    return one


def test_the_saved_state_has_the_names_of_earlier_releases() -> None:
    saved = through_a_checkpoint(used().table)
    assert set(saved) == {"starts"}
    assert [set(start) for start in saved["starts"]] == [{"incarnation", "state"}] * 2


def test_collectors_continue_where_they_were_saved() -> None:
    saved = through_a_checkpoint(used().table)
    one = Table()
    one.table.load_state_dict(saved)
    first, second = one.table.starts.values()
    assert first.incarnation == 0
    np.testing.assert_array_equal(first.state["envs"], np.arange(3))
    assert second == CollectorState(2, None), "it was started anew once, and now once more"


def test_a_rollback_starts_all_anew_with_other_seeds() -> None:
    saved = through_a_checkpoint(used().table)
    one = Table()
    one.table.load_state_dict(saved, rollback=2)
    assert list(one.table.starts.values()) == [CollectorState(2, None), CollectorState(3, None)]


def test_a_table_with_another_number_of_rows_takes_what_there_is() -> None:
    saved = through_a_checkpoint(used().table)
    fewer, more = Table(num_workers=1), Table(num_workers=3)
    fewer.table.load_state_dict(saved)
    more.table.load_state_dict(saved)
    assert [start.incarnation for start in fewer.table.starts.values()] == [0]
    assert [start.incarnation for start in more.table.starts.values()] == [0, 2, 0]
