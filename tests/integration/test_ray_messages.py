"""Wide collectors on Ray are told and tell what they are and do everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from offbeat.pacing.events import OpenWork, Published, SegmentArrived
from tests.integration import test_messages as messages
from tests.integration import test_wide_collectors as runs
from tests.integration.test_collectors import running, wait_for
from tests.integration.test_messages import LONG, ticket, tokens_of
from tests.integration.wide_fakes import Counting


@pytest.mark.parametrize(
    "keeps",
    [
        messages.test_collector_holds_more_tickets_than_fit_into_a_pipe,
        messages.test_begun_work_and_scripts_reach_the_collector,
        messages.test_tickets_are_cut_where_they_are,
        messages.test_begun_work_can_be_asked_for_again_and_again,
        messages.test_collectors_of_one_segment_at_a_time_are_not_asked_for_begun_work,
        messages.test_collector_says_which_version_its_scripts_wait_for,
        messages.test_collector_that_waits_for_tools_is_woken,
        messages.test_busy_time_is_reported_while_nothing_is_finished,
        messages.test_capacity_may_change,
        messages.test_parts_of_weights_travel_when_they_have_changed,
        messages.test_collectors_join_and_leave,
        runs.test_above_zero_segments_mix_versions_and_come_in_any_order,
    ],
)
def test_promise_on_ray(keeps: Callable[[str], None], shared_ray: None) -> None:
    keeps("ray")


def test_new_weights_reach_a_busy_collector_without_another_ticket(shared_ray: None) -> None:
    with running("ray", partial(Counting, length=LONG, pause_s=0.01)) as runtime:
        runtime.collect(ticket(0))
        for version in (0, 1, 2):
            if version:
                runtime.publish(version)
                wait_for(runtime, Published)
            versions: set[Any] = set()
            while version not in versions:
                runtime.ask_work()
                versions |= {int(one) for one in wait_for(runtime, OpenWork)[0].work[0]["tokens"]}
        runtime.cut([ticket(0)])
        (arrived,) = wait_for(runtime, SegmentArrived)
    assert sorted(set(tokens_of([arrived])[0])) == [0, 1, 2]
