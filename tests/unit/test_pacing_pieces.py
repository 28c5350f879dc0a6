"""The pace of a replay whose segments mix versions, were dropped, or are of collectors that joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.errors import ReplayError
from offbeat.observe.events import ScheduleLog, read_schedule
from offbeat.pacing.actions import Finish, Issue, Renew, Train
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    CollectorWaits,
    SegmentArrived,
    SegmentDropped,
)
from offbeat.pacing.recorded import Difference, Schedule
from offbeat.run.observers import ScheduleRecorder
from offbeat.types import Piece, Segment, Span, Ticket
from tests.unit.run_fakes import FakeRun
from tests.unit.test_pacing_recorded import RECORDS, Replayed, issued, pace_of, round_of, segment

Records = Sequence[Mapping[str, Any]]


def made(number: int, lane: int, *pieces: Any, **fields: Any) -> dict[str, Any]:
    """A segment with pieces, of a ticket of version 0."""
    return {**segment(number, lane, 0, **fields), "pieces": list(pieces)}


BOTH_VERSIONS = ([[[0, 3], [1, 4, 1]], "cut"], [[[1, 2]], "eos"])
RUN = [
    made(0, 0, [[[0, 5]], "eos"]),
    made(1, 0, *BOTH_VERSIONS),
    made(2, 1, [[[0, 9]], "length"]),
    round_of(0, [0, 2]),
    made(3, 1, [[[1, 1]], "eos"]),
    round_of(1, [1, 3]),
]
DROP = {"kind": "drop", "version": 0, "ticket": 1, "reason": "no_signal"}


def replayed(records: Records, until: int) -> Replayed:
    return Replayed(pace_of(records, until=until))


def test_tickets_are_issued_with_their_pieces_when_the_first_of_their_versions_is_reached() -> None:
    one = replayed(RUN, until=2)
    first = one.begin()
    assert issued(first) == [0, 1, 2]
    scripts = {action.ticket.number: action.script for action in first if isinstance(action, Issue)}
    assert scripts[0] == (Piece((Span(0, 5),), "eos"),)
    assert scripts[1] == (Piece((Span(0, 3), Span(1, 4, True)), "cut"), Piece((Span(1, 2),), "eos"))
    assert one.arrive(0, 2) == [], "ticket 1 may still have something to make with version 0"
    assert one.tell(CollectorWaits(0, 1, (1,))) == [Train(0, (0, 2), 1)]
    assert issued(one.train([0, 2])) == [3]
    before, ticket = one.tickets[2], one.tickets[3]
    assert ticket == replace(before, number=3, seed=ticket.seed), "of version 0, as it was"
    assert one.arrive(3) == [], "what waited for version 1 has it now"
    assert one.arrive(1) == [Train(1, (1, 3), 1)]
    assert one.train([1, 3])[-1] == Finish("repeated 2 rounds")


def test_a_round_waits_until_a_report_covers_all_that_is_open() -> None:
    records = [*RUN[:3], made(4, 0, [[[0, 1], [2, 1]], "eos"]), round_of(0, [0, 2])]
    one = replayed([*records, segment(3, 1, 1), round_of(1, [1, 3])], until=2)
    one.begin()
    one.arrive(0, 2)
    assert one.tell(CollectorWaits(0, 1, (1,))) == [], "ticket 4 is open, too"
    assert one.tell(CollectorWaits(0, 1, (1, 4))) == [Train(0, (0, 2), 1)]
    one.train([0, 2])
    assert one.arrive(1, 3) == [], "that report was about version 1"
    assert one.pace.counts().running == 1
    assert one.tell(CollectorWaits(0, 2, (4,))) == [Train(1, (1, 3), 1)]


def test_segments_with_pieces_that_were_dropped_are_not_repeated() -> None:
    again = made(1, 0, *BOTH_VERSIONS, rollbacks=1)
    assert issued(replayed([*RUN[:3], DROP, *RUN[3:]], until=1).begin()) == [0, 2]
    assert issued(replayed([*RUN[:3], DROP, again, *RUN[3:]], until=1).begin()) == [0, 1, 2]


def test_segments_without_pieces_that_were_dropped_are_made_and_dropped_again() -> None:
    one = replayed([*RECORDS[:3], {**DROP, "ticket": 2}, round_of(0, [0, 1])], until=1)
    assert issued(one.begin()) == [0, 2, 1], "what its environments do next depends on it"
    one.arrive(0, 1)
    assert one.tell(SegmentArrived(one.segment(2)), SegmentDropped(2)) == [Train(0, (0, 1), 1)]
    counts = one.pace.counts()
    assert (counts.issued, counts.ready, counts.dropped) == (3, 2, 1)
    one.train([0, 1])
    rows: dict[str, Any] = {"running": [], "ready": [], "lost": []}
    assert one.pace.state_dict()["ledger"] == {"issued": 3, "trained": 2, "dropped": 1, **rows}


def test_what_a_lost_collector_had_begun_with_this_version_is_made_again_and_nothing_older() -> None:
    one = replayed(RUN, until=2)
    one.begin()
    assert one.tell(CollectorDown(0, "killed")) == []
    assert issued(one.tell(CollectorUp(0))) == [0, 1]
    one.arrive(0, 2)
    one.tell(CollectorWaits(0, 1, (1,)))
    one.train([0, 2])
    finish = one.tell(CollectorDown(0, "killed"))[-1]
    assert isinstance(finish, Finish) and finish.failed
    assert "collector 0 was lost during the replay and cannot continue: killed" in finish.reason


def test_first_ticket_that_is_made_of_other_pieces_is_known() -> None:
    one = replayed(RUN, until=2)
    one.begin()
    one.tell(SegmentArrived(replace(one.segment(0), pieces=(Piece((Span(0, 5),), "eos"),))))
    assert one.pace.strayed is None
    one.arrive(2)
    assert one.pace.strayed == 2
    text = str(Difference(0, (0, 2), strayed=2))
    assert text.endswith("the collector made ticket 2 of other pieces than accept(script) told it")


def test_report_of_a_lost_collector_says_nothing_about_the_next_one() -> None:
    one = replayed(RUN, until=2)
    one.begin()
    one.arrive(0)
    one.tell(CollectorWaits(0, 1, (1,)), CollectorDown(0, "killed"))
    assert issued(one.tell(CollectorUp(0))) == [1]
    assert one.arrive(2) == [], "what ticket 1 has of version 0 is made again"
    assert one.tell(CollectorWaits(0, 1, (1,))) == [Train(0, (0, 2), 1)]


def test_tickets_that_are_open_where_another_replay_ended_are_refused_with_the_reason() -> None:
    first = replayed(RUN, until=1)
    first.begin()
    first.arrive(0, 2)
    first.tell(CollectorWaits(0, 1, (1,)))
    first.train([0, 2])
    state = first.pace.state_dict()
    assert [row[0] for row in state["ledger"]["lost"]] == [1, 3]
    second = pace_of(RUN, until=2)
    with pytest.raises(ReplayError, match=r"tickets \[1\] were begun before version 1.*--to 1"):
        second.load_state_dict(state, arrived=[])


def test_whoever_waits_is_told_which_tickets_are_open() -> None:
    one = replayed(RUN, until=1)
    one.begin()
    one.arrive(0, 2)
    assert one.pace.waiting_for().endswith("still out: ticket 1 on collector 0")


# ---------------------------------------------------------------- collectors that joined


def test_a_collector_that_joined_is_started_when_it_is_needed() -> None:
    late = segment(1, 7, 0, incarnation=1)
    one = replayed([segment(0, 0, 0), {"kind": "join", "lane": 7}, late, round_of(0, [0, 1])], until=1)
    first = one.begin()
    assert (issued(first), Renew(7, 1) in first) == ([0], True)
    assert one.arrive(0) == []
    assert issued(one.tell(CollectorUp(7))) == [1]
    assert one.arrive(1) == [Train(0, (0, 1), 1)]


def test_a_collector_that_joined_makes_pieces() -> None:
    one = replayed([{"kind": "join", "lane": 2}, made(0, 2, [[[0, 1]], "eos"]), round_of(0, [0])], until=1)
    assert one.begin() == [Renew(2, 0)]
    assert one.tell() == []
    assert issued(one.tell(CollectorUp(2))) == [0]


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    "record",
    [
        {**segment(0, 0, 0), "pieces": 3},
        made(0, 0, []),
        made(0, 0, [[[0, 1]], "bored"]),
        made(0, 0, [[[0, 1]], ["eos"]]),
        made(0, 0, [[[0]], "eos"]),
        made(0, 0, [[[0, 1, 1, 1]], "eos"]),
        made(0, 0, [[[0, -1]], "eos"]),
        made(0, 0, [[[-1, 1]], "eos"]),
        made(0, 0, [[[0, 0.5]], "eos"]),
        made(0, 0, [[["0", 1]], "eos"]),
        made(0, 0, [[[1, 1], [0, 1]], "eos"]),
        segment(0, 0, 0, begin=1),
        {"kind": "drop", "ticket": 0},
        {"kind": "drop", "ticket": "0", "version": 0},
        {"kind": "join"},
        {"kind": "join", "lane": -1},
        {"kind": "join", "lane": 10**12},
        {"kind": "join", "lane": 1.5},
    ],
)
def test_forged_pieces_drops_and_collectors_are_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ReplayError, match=r"schedule\.jsonl was damaged or edited"):
        Schedule.from_records([record])


def test_pieces_of_a_collector_that_is_none_are_refused() -> None:
    one = replayed([made(0, 5, [[[0, 1]], "eos"]), round_of(0, [0])], until=1)
    with pytest.raises(ReplayError, match="ticket 0 is of collector 5, but the run has 2"):
        one.begin()


def test_a_round_with_a_ticket_that_goes_on_later_is_refused() -> None:
    one = replayed([*RUN[:3], round_of(0, [0, 1])], until=1)
    one.begin()
    one.arrive(0, 2)
    with pytest.raises(ReplayError, match=r"round 0 trained tickets \[1\]"):
        one.tell(CollectorWaits(0, 1, (1,)))


# ---------------------------------------------------------------- recording


def recorded(directory: Path, *segments: Segment) -> list[dict[str, Any]]:
    """Lines that are written for these segments in a run with one collector, which another one joined."""
    run, log = FakeRun(num_workers=2), ScheduleLog(directory / "schedule.jsonl")
    handlers = ScheduleRecorder(log, run.driver.collectors, run.pace, num_collectors=1).handlers()
    for one in segments:
        handlers[SegmentArrived](SegmentArrived(one), 0.0)
        if one.drop:
            handlers[SegmentDropped](SegmentDropped(one.ticket.number, one.drop), 0.0)
    log.close()
    return [dict(record) for record in read_schedule(directory / "schedule.jsonl")]


def test_a_schedule_is_read_as_it_was_written(tmp_path: Path) -> None:
    ticket, versions = Ticket(1, 0, 0, 1, seed=0), np.array([0])
    pieces = (Piece((Span(0, 3), Span(1, 4, True)), "cut"), Piece((), "error"))
    first = Segment(ticket, None, versions, pieces=pieces)
    second = Segment(replace(ticket, number=2, collector=1), None, versions, pieces=pieces, drop="no_signal")
    third = Segment(replace(ticket, number=3), None, versions)
    schedule = Schedule.from_records(records := recorded(tmp_path, first, second, third))
    assert schedule.scripts.keys() == {1}
    assert (schedule.scripts[1].pieces, schedule.scripts[1].begin) == (pieces, 0)
    assert (schedule.drops, schedule.joined) == ({2: 0}, {1})
    assert [one.ticket for one in schedule.segments[0]] == [3]
    assert [record["kind"] for record in records] == ["segment", "join", "segment", "drop", "segment"]
    assert records[0]["pieces"] == [[[[0, 3], [1, 4, 1]], "cut"], [[], "error"]]
    assert "pieces" not in records[-1]
