"""The model of engines that only wait: steps, slots, waits, and versions in the middle of responses."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from offbeat.pacing import PaceConfig
from offbeat.types import Ticket

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from llm_model import Engine, Leg, Shop, Timing, lognormal_lengths, simulate

TIMING = Timing(step_s=1.0, row_s=0.5, token_s=0.25)


def engine(slots: int = 4, timing: Timing = TIMING) -> Engine:
    made = Engine(timing, slots)
    made.load(0)
    return made


def ticket(number: int, version: int = 0) -> Ticket:
    return Ticket(number, 0, version, version + 9, seed=number)


def until_done(one: Engine) -> list[tuple[int, float]]:
    """Let an engine work all off; return tickets and when they were finished."""
    found = []
    while (next_s := one.next_s()) < math.inf:
        found += [(done.ticket.number, done.finished_s) for done in one.advance(next_s)]
    return found


def test_a_step_takes_as_long_as_its_live_rows_say() -> None:
    one = engine()
    one.accept(ticket(0), [(Leg(2),), (Leg(4),)], 10.0)
    assert until_done(one) == [(0, 10.0 + 2 * 2.0 + 2 * 1.5)]
    assert (one.steps, one.row_steps, one.busy_s) == (4, 6, 7.0)


def test_what_comes_in_the_middle_of_a_step_joins_the_next_one() -> None:
    one = engine()
    one.accept(ticket(0), [(Leg(3),)], 0.0)
    assert one.advance(2.0) == []  # the second step is under way since 1.5
    one.accept(ticket(1), [(Leg(1),)], 2.0)
    assert until_done(one) == [(0, 5.0), (1, 5.0)]


def test_a_full_engine_admits_in_the_order_of_tickets() -> None:
    one = engine(slots=1)
    for number in (2, 1, 0):
        one.accept(ticket(number), [(Leg(2),)], 0.0)
    assert until_done(one) == [(0, 3.0), (1, 6.0), (2, 9.0)]


def test_waiting_for_a_tool_is_no_row_and_for_a_reward_no_slot() -> None:
    one = engine(slots=1)
    one.accept(ticket(0), [(Leg(2, wait_s=10.0), Leg(2, wait_s=100.0))], 0.0)
    one.accept(ticket(1), [(Leg(1),)], 0.0)
    assert until_done(one) == [(1, 13.0 + 3.0 + 1.5), (0, 116.0)]
    assert one.busy_s == 5 * 1.5


def test_tokens_count_for_the_version_that_made_them() -> None:
    one = engine()
    one.accept(ticket(0), [(Leg(5),), (Leg(2),)], 0.0)
    assert one.advance(3.0) == []  # one step of two rows is done, another is under way
    one.load(7)
    (done,) = one.advance(100.0)
    assert done.made == {0: 4, 7: 3}


def test_long_rows_cost_more_where_positions_do() -> None:
    slow = Timing(step_s=1.0, row_s=0.0, token_s=0.0, place_s=0.1)
    short, long = engine(timing=slow), engine(timing=slow)
    short.accept(ticket(0), [(Leg(4),)], 0.0)
    long.accept(ticket(0), [(Leg(4, given=20),)], 0.0)
    assert until_done(long)[0][1] - until_done(short)[0][1] == pytest.approx(4 * 20 * 0.1)


def test_catching_up_seldom_or_often_comes_to_the_same() -> None:
    seldom, often = engine(), engine()
    plans = [[(Leg(size),) for size in lognormal_lengths(seed, 8, 1.0, 30, 200)] for seed in range(6)]
    for one in (seldom, often):
        for number, plan in enumerate(plans):
            one.accept(ticket(number), plan, 0.0)
    fine = [done for step in range(100_000) for done in often.advance(0.0371 * step)]
    coarse = seldom.advance(3710.0)
    assert [one.ticket.number for one in fine] == [one.ticket.number for one in coarse]
    assert [one.finished_s for one in fine] == pytest.approx([one.finished_s for one in coarse])


def test_rounds_at_zero_take_turns_and_above_overlap() -> None:
    def plan(seed: int) -> list[tuple[Leg, ...]]:
        return [(Leg(4),)]

    shop = Shop(engines=1, slots=2, capacity=4)
    by_degree = {k: simulate(PaceConfig(20, 2, 1, off_policy_degree=k), shop, TIMING, plan) for k in (0, 1)}
    round_s = {k: (ends[18].time_s - ends[8].time_s) / 10 for k, ends in by_degree.items()}
    assert round_s == {0: pytest.approx(4 * 2.0 + 8 * 0.25), 1: pytest.approx(4 * 2.0)}
    assert [end.oldest_age for end in by_degree[0]] == [0] * 20
    assert max(end.oldest_age for end in by_degree[1]) == 1
