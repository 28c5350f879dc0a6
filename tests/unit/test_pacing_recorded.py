"""The pace of a replay: what it asks for, when, and what makes a schedule one that cannot be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from offbeat.errors import ReplayError
from offbeat.pacing.actions import Action, Checkpoint, Finish, Issue, Publish, Renew, Train
from offbeat.pacing.events import (
    Checksum,
    CollectorDown,
    CollectorUp,
    DialTurned,
    Event,
    Published,
    RoundTrained,
    SegmentArrived,
    StopRequested,
)
from offbeat.pacing.recorded import Difference, RecordedPace, RecordedSegment, Schedule
from offbeat.seeding import derive_seed, reseed
from offbeat.types import Batch, Segment, Ticket
from tests.unit.run_fakes import FakeRun


def segment(number: int, lane: int, version: int, **fields: int) -> dict[str, Any]:
    known = {"ticket": number, "lane": lane, "version": version, "deadline": version + 1, "incarnation": 0}
    return {"kind": "segment", **known, "rollbacks": 0, **fields}


def round_of(version: int, tickets: Sequence[int], weights: tuple[int, int] | None = None) -> dict[str, Any]:
    record = {"kind": "round", "version": version, "tickets": list(tickets), "degree": 1}
    return record if weights is None else {**record, "weights": list(weights)}


RECORDS = [
    segment(0, 0, 0),
    segment(1, 1, 0),
    segment(2, 0, 0),
    round_of(0, [0, 1], (0, 100)),
    segment(3, 1, 1),
    round_of(1, [2, 3], (1, 101)),
    segment(4, 0, 2),
    segment(5, 1, 2),
    round_of(2, [4, 5], (2, 102)),
]


def pace_of(records: Sequence[Mapping[str, Any]] = RECORDS, until: int = 3, **options: Any) -> RecordedPace:
    return RecordedPace(Schedule.from_records(records), 7, until, 2, **options)


class Replayed:
    """A pace with a runtime that answers nothing by itself; ``asked`` are all actions so far."""

    def __init__(self, pace: RecordedPace) -> None:
        self.pace = pace
        self.asked: list[Action] = list(pace.start(0.0))
        self.tickets: dict[int, Ticket] = {}

    def tell(self, *events: Event) -> list[Action]:
        """Apply events, decide once; return what is asked for."""
        new = [action for event in events for action in self.pace.apply(event, 0.0)]
        new += self.pace.decide(0.0)
        self.tickets |= {one.ticket.number: one.ticket for one in new if isinstance(one, Issue)}
        self.asked += new
        return new

    def begin(self) -> list[Action]:
        return self.tell(CollectorUp(0), CollectorUp(1), Published(0))

    def arrive(self, *numbers: int) -> list[Action]:
        return self.tell(*(SegmentArrived(self.segment(number)) for number in numbers))

    def segment(self, number: int) -> Segment:
        ticket = self.tickets[number]
        return Segment(ticket, {}, np.array([ticket.version]))

    def train(self, tickets: Sequence[int], checksum: int | None = None) -> list[Action]:
        version = self.pace.version
        batch = Batch(version, tuple(self.segment(number) for number in tickets), 1)
        new = self.tell(RoundTrained(version + 1, batch))
        return new + self.tell(Published(version + 1, 0.0, Checksum.of(checksum)))


def issued(actions: Sequence[Action]) -> list[int]:
    return [action.ticket.number for action in actions if isinstance(action, Issue)]


# ---------------------------------------------------------------- a whole replay


def test_it_asks_for_what_the_recorded_run_did_version_by_version() -> None:
    one = Replayed(pace_of())
    assert one.asked == [Publish(0)]
    assert issued(one.begin()) == [0, 2, 1], "each collector's in order; those of both side by side"
    assert one.arrive(1, 0) == []
    assert one.arrive(2) == [Train(0, (0, 1), 1)]
    assert issued(one.train([0, 1])) == [3]
    assert one.arrive(3) == [Train(1, (2, 3), 1)]
    assert issued(one.train([2, 3])) == [4, 5]
    assert one.arrive(4, 5) == [Train(2, (4, 5), 1)]
    assert one.train([4, 5])[-1] == Finish("repeated 3 rounds")
    assert one.tell() == []
    assert one.pace.is_ending and one.pace.difference is None
    counts = one.pace.counts()
    assert (counts.issued, counts.trained, counts.running, counts.ready) == (6, 6, 0, 0)


def test_a_ticket_is_the_recorded_one() -> None:
    one = Replayed(pace_of([segment(0, 1, 0, deadline=4, rollbacks=2), round_of(0, [0])], until=1))
    one.begin()
    seed = reseed(derive_seed(7, "collect", 0), 2)
    assert one.tickets == {0: Ticket(0, 1, 0, 4, seed)}


def test_nothing_is_issued_before_its_weights_are_published_and_its_collector_is_up() -> None:
    one = Replayed(pace_of())
    assert one.tell(CollectorUp(0)) == []
    assert issued(one.tell(Published(0))) == [0, 2]
    assert issued(one.tell(CollectorUp(1))) == [1]


def test_nothing_is_issued_while_the_learner_trains_or_publishes() -> None:
    one = Replayed(pace_of())
    one.begin()
    one.arrive(0, 1, 2)
    assert one.tell() == []
    batch = Batch(0, (one.segment(0), one.segment(1)), 1)
    assert one.tell(RoundTrained(1, batch)) == [Publish(1)]
    assert issued(one.tell(Published(1))) == [3]


def test_a_shorter_replay_ends_earlier_and_saves_if_asked() -> None:
    one = Replayed(pace_of(until=1, saves=True))
    one.begin()
    one.arrive(0, 1, 2)
    assert one.train([0, 1])[-2:] == [Checkpoint(1), Finish("repeated 1 rounds")]


def test_requests_to_stop_end_it_and_others_are_not_heard() -> None:
    one = Replayed(pace_of())
    one.begin()
    assert one.tell(DialTurned(0)) == []
    assert one.pace.degree == 1
    assert one.tell(StopRequested("enough")) == [Finish("enough")]


def test_it_says_whom_it_waits_for() -> None:
    one = Replayed(pace_of())
    one.begin()
    one.arrive(0)
    text = one.pace.waiting_for()
    assert text == "round 0 waits for segments, still out: ticket 2 on collector 0, ticket 1 on collector 1"
    assert one.pace.lag() == 1.5
    one.arrive(1, 2)
    assert one.pace.waiting_for() == "round 0 is being trained by the learner"


# ---------------------------------------------------------------- incarnations and losses


def test_a_collector_is_started_anew_where_the_recorded_one_was() -> None:
    records = [segment(0, 0, 0), segment(1, 0, 0, incarnation=2), round_of(0, [0, 1])]
    one = Replayed(pace_of(records, until=1))
    assert issued(one.begin()) == [0], "the next one is for another incarnation"
    assert one.arrive(0) == [Renew(0, 2)]
    assert one.pace.incarnations == {0: 2, 1: 0}
    assert one.tell() == [], "it has to come up first"
    assert issued(one.tell(CollectorUp(0))) == [1]
    assert one.arrive(1) == [Train(0, (0, 1), 1)]


def test_collectors_may_begin_as_other_incarnations() -> None:
    records = [segment(0, 0, 0, incarnation=1), segment(1, 1, 0), round_of(0, [0, 1])]
    one = Replayed(pace_of(records, until=1))
    first = one.begin()
    assert issued(first) == [1]
    assert Renew(0, 1) in first


def test_a_driver_starts_the_incarnation_that_is_asked_for() -> None:
    records = [segment(0, 0, 0), segment(1, 0, 0, incarnation=2), round_of(0, [0, 1])]
    run = FakeRun(num_workers=1, make_pace=lambda config: pace_of(records, until=1)).start()
    run.complete()
    states = [state for _, state in run.runtime.named("start_collector")]
    assert [(state.incarnation, state.state) for state in states] == [(0, None), (2, None)]
    assert run.runtime.named("collect") == [(0,), (1,)]
    assert run.driver.collectors.losses == [], "that was no loss"


def test_tickets_of_a_lost_collector_are_collected_again_by_its_replacement() -> None:
    one = Replayed(pace_of())
    one.begin()
    assert one.arrive(1) == []
    assert one.tell(CollectorDown(0, "killed", restorable=True)) == []
    assert one.pace.num_up == 1
    assert issued(one.tell(CollectorUp(0))) == [0, 2], "in their own order"
    assert one.arrive(0, 2) == [Train(0, (0, 1), 1)]


def test_a_segment_that_had_arrived_is_not_collected_again() -> None:
    one = Replayed(pace_of())
    one.begin()
    one.arrive(0)
    one.tell(CollectorDown(0, "killed", restorable=True))
    assert issued(one.tell(CollectorUp(0))) == [2]


def test_a_collector_that_cannot_continue_ends_the_replay() -> None:
    one = Replayed(pace_of(saves=True))
    one.begin()
    one.arrive(0)
    assert one.tell(CollectorDown(0, "killed", restorable=False)) == []
    (finish,) = one.tell(CollectorUp(0))
    assert isinstance(finish, Finish) and finish.failed
    assert "collector 0 was lost during the replay and cannot continue: killed" in finish.reason


def test_a_collector_that_had_made_nothing_starts_again_as_it_was() -> None:
    one = Replayed(pace_of())
    one.begin()
    assert one.tell(CollectorDown(0, "killed", restorable=False)) == []
    assert one.tell(CollectorUp(0)) == [Renew(0, 0)]
    assert issued(one.tell(CollectorUp(0))) == [0, 2]


def test_an_idle_collector_that_is_lost_ends_the_replay_with_its_next_ticket() -> None:
    one = Replayed(pace_of())
    one.begin()
    one.arrive(0, 2)
    assert one.tell(CollectorDown(0, "killed", restorable=False)) == []
    assert one.tell(CollectorUp(0)) == []
    assert one.arrive(1) == [Train(0, (0, 1), 1)]
    one.train([0, 1])
    one.arrive(3)
    finish = one.train([2, 3])[-1]
    assert isinstance(finish, Finish) and finish.failed


def test_a_ticket_that_comes_again_is_collected_after_the_first_time() -> None:
    records = [segment(0, 0, 0), segment(1, 1, 0), segment(0, 1, 0, rollbacks=1), round_of(0, [0, 1])]
    one = Replayed(pace_of(records, until=1))
    assert issued(one.begin()) == [0, 1]
    assert one.arrive(0) == []
    again = one.arrive(1)
    assert issued(again) == [0]
    assert again[0].ticket.collector == 1
    assert one.arrive(0) == [Train(0, (0, 1), 1)]


# ---------------------------------------------------------------- checksums


@pytest.mark.parametrize("checksum", [101, None])
def test_equal_weights_and_weights_without_a_checksum_go_on(checksum: int | None) -> None:
    one = Replayed(pace_of())
    one.begin()
    one.arrive(0, 1, 2)
    assert issued(one.train([0, 1], checksum)) == [3]


def test_other_weights_end_it_and_name_the_round_and_its_tickets() -> None:
    one = Replayed(pace_of())
    one.begin()
    one.arrive(0, 1, 2)
    one.train([0, 1], 101)
    one.arrive(3)
    assert one.train([2, 3], 999)[-1] == Finish("round 1 (tickets 2, 3) gave other weights than recorded")
    assert one.pace.difference == Difference(1, (2, 3), 1)


def test_other_weights_of_the_start_are_not_blamed_on_a_round() -> None:
    one = Replayed(pace_of())
    one.tell(CollectorUp(0), CollectorUp(1), Published(0, 0.0, Checksum.of(99)))
    assert str(one.pace.difference).startswith("the learner starts with other weights than recorded: ")
    assert one.pace.difference == Difference(-1, (), -1)


def test_other_weights_are_blamed_on_all_rounds_since_the_last_that_were_compared() -> None:
    records = [*RECORDS[:-1], round_of(2, [4, 5]), segment(6, 0, 3), round_of(3, [6], (3, 103))]
    one = Replayed(pace_of(records, until=4))
    one.begin()
    one.arrive(0, 1, 2)
    one.train([0, 1], 101)
    one.arrive(3)
    one.train([2, 3], 999)
    assert one.pace.difference is None
    one.arrive(4, 5)
    one.train([4, 5], 999)
    assert one.pace.difference == Difference(1, (2, 3, 4, 5), 2)
    assert (
        str(one.pace.difference)
        == "one of rounds 1 to 2 (tickets 2, 3, 4, 5) gave other weights than recorded"
    )


def test_tickets_of_another_rollback_are_repeated_after_those_before_it() -> None:
    again = [segment(1, 1, 0, rollbacks=1), segment(0, 0, 0, rollbacks=1)]
    records = [segment(0, 0, 0), *again, round_of(0, [0, 1])]
    one = Replayed(pace_of(records, until=1))
    assert issued(one.begin()) == [0]
    assert one.pace.rollbacks == 0
    assert issued(one.arrive(0)) == [1, 0]
    assert one.pace.rollbacks == 1


def test_weights_that_were_not_recorded_are_not_compared() -> None:
    records = [{key: value for key, value in record.items() if key != "weights"} for record in RECORDS]
    one = Replayed(pace_of(records))
    one.begin()
    one.arrive(0, 1, 2)
    assert issued(one.train([0, 1], 999)) == [3]


def test_a_round_of_many_tickets_is_named_in_a_line() -> None:
    text = str(Difference(4, tuple(range(20))))
    assert text == "round 4 (tickets 0, 1, 2, 3, 4, 5, 6, 7, …) gave other weights than recorded"


# ---------------------------------------------------------------- schedules


def test_a_schedule_is_read_by_version() -> None:
    schedule = Schedule.from_records(RECORDS)
    assert [one.ticket for one in schedule.segments[0]] == [0, 1, 2]
    assert schedule.segments[1] == (RecordedSegment(3, 1, 1, 2, 0, 0),)
    assert schedule.rounds[1].tickets == (2, 3)
    assert schedule.checksums == {0: 100, 1: 101, 2: 102}


def test_a_schedule_from_before_rollbacks_and_checksums_is_read() -> None:
    old = {key: value for key, value in segment(0, 0, 0).items() if key != "rollbacks"}
    schedule = Schedule.from_records([old, round_of(0, [0])])
    assert schedule.segments[0][0].rollbacks == 0
    assert schedule.checksums == {}


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "segment", "ticket": 0},
        {**segment(0, 0, 0), "more": 1},
        {"kind": "round", "version": 0},
        {"kind": "round", "version": 0, "tickets": 3, "degree": 1},
        {**round_of(0, [0]), "weights": [1]},
        {**round_of(0, [0]), "weights": [1, "x"]},
        round_of(0, [{}]),  # type: ignore[list-item]
        round_of(0, [0, 0]),
        {**round_of(0, [0]), "degree": 0.5},
        segment(0, 1e308, 0),  # type: ignore[arg-type]
        segment(0, 0, 0, incarnation=None),  # type: ignore[arg-type]
        {"version": 0},
    ],
)
def test_a_record_that_is_none_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ReplayError, match=r"schedule\.jsonl was damaged or edited"):
        Schedule.from_records([record])


def test_a_gap_is_refused() -> None:
    with pytest.raises(ReplayError, match="the schedule has a gap: the disk was full"):
        Schedule.from_records([*RECORDS, {"kind": "gap"}])


def test_a_missing_round_is_named() -> None:
    one = Replayed(pace_of([record for record in RECORDS if record.get("tickets") != [0, 1]]))
    one.begin()
    with pytest.raises(ReplayError, match="the schedule has no round 0"):
        one.arrive(0, 1, 2)


def test_missing_segments_are_named() -> None:
    one = Replayed(pace_of([record for record in RECORDS if record.get("ticket") != 1]))
    one.begin()
    with pytest.raises(ReplayError, match=r"round 0 trained tickets \[1\], which the schedule does not have"):
        one.arrive(0, 2)


@pytest.mark.parametrize("collector", [-1, 2, 10**30])
def test_segments_of_a_collector_that_the_run_does_not_have_are_refused(collector: int) -> None:
    one = Replayed(pace_of([segment(0, collector, 0), *RECORDS]))
    with pytest.raises(ReplayError, match=f"ticket 0 is of collector {collector}, but the run has 2"):
        one.begin()


# ---------------------------------------------------------------- state


def test_a_replay_continues_where_another_one_ended() -> None:
    first = Replayed(pace_of(until=1))
    first.begin()
    first.arrive(0, 1, 2)
    first.train([0, 1])
    second = pace_of(until=3)
    second.load_state_dict(first.pace.state_dict(), arrived=[2])
    one = Replayed(second)
    assert one.asked == [Publish(1)]
    one.tickets = first.tickets
    assert issued(one.tell(CollectorUp(0), CollectorUp(1), Published(1))) == [3]
    assert one.arrive(3) == [Train(1, (2, 3), 1)]
    assert issued(one.train([2, 3])) == [4, 5]
    assert one.pace.counts().trained == 4


def test_its_state_is_that_of_a_coordinator_at_this_version() -> None:
    one = Replayed(pace_of(until=1))
    one.begin()
    one.arrive(0, 1, 2)
    one.train([0, 1])
    run = FakeRun(off_policy_degree=1)
    run.pace.load_state_dict(one.pace.state_dict(), arrived=[2])
    counts = run.pace.counts()
    assert (run.pace.version, counts.issued, counts.trained, counts.ready) == (1, 3, 2, 1)
    assert run.pace.degree == 1
