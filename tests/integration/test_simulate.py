"""The simulator: random schedules hold, it is repeatable, and it finds what is broken on purpose."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing.actions import Action, Cut, Issue
from offbeat.pacing.checker import BOUND, CONSERVATION, CONTRACT, DEADLOCK, KINDS
from offbeat.pacing.deadlines import RULES, no_rule
from offbeat.pacing.events import CollectorRemoved, CollectorUp, Event, GatesSet, RoundTrained
from offbeat.pacing.ledger import RUNNING
from offbeat.pacing.schedules import Collectors, Faults, Schedule, draw_schedule
from offbeat.replay import StreamStore
from offbeat.run.driver import Driver
from offbeat.run.waits import Waits
from offbeat.testing.simulated_roles import Weights, Wide
from offbeat.testing.simulation import MakePace, Simulation, make_collector
from offbeat.testing.simulator import Report, main, pipeline_figures, run_many, run_schedule
from offbeat.types import Segment


def find(kind: str, text: str = "", make: MakePace = Coordinator, schedules: int = 300) -> Report:
    """Simulate schedules until one fails in this way; AssertionError if none does."""
    report = Report()
    for seed in range(schedules):
        report.add(one := run_schedule(draw_schedule(seed), make))
        if any(kind in failure and text in failure for failure in one.failures):
            return report
    raise AssertionError(f"none of {schedules} schedules failed so: {report.failures}")


# ---------------------------------------------------------------- the promises hold


@pytest.mark.parametrize("schedules", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_schedules_hold_and_nothing_is_left_untried(schedules: int) -> None:
    report = run_many(schedules, seed=1)
    assert report.failures == []
    assert report.holds
    untried = {name for name, count in report.as_dict().items() if count == 0}
    rare = {"late"} if schedules < 5000 else set()  # what presets train at any age
    assert untried - rare == {*KINDS, "dropped"}


def test_schedules_are_as_wild_as_promised() -> None:
    schedules = [draw_schedule(seed) for seed in range(3000)]
    configs = [schedule.config for schedule in schedules]
    assert {config.off_policy_degree for config in configs if config.preset is None} == set(range(-1, 9))
    assert {config.mode for config in configs} == {"stream", "replay"}
    assert any(config.publish_interval == config.off_policy_degree + 1 > 3 for config in configs)
    assert any(config.max_outstanding == config.segments_per_round for config in configs)
    assert any(config.min_segments > config.segments_per_round for config in configs)
    assert any(max(s.collect_s) >= 9.9 * min(s.collect_s) for s in schedules)
    assert any(s.faults.loss > 0.4 for s in schedules)
    assert any(s.faults.stop_at_s is not None and s.faults.resume_after_stop for s in schedules)
    assert any(degree == -1 for s in schedules for _, degree in s.dial_turns)
    assert any(config.open_rounds and config.off_policy_degree > 3 for config in configs)
    assert any(config.stepwise and config.mode == "replay" for config in configs)
    assert any(s.config.stepwise and s.closings and s.faults.crashes for s in schedules)
    wide = [s.collectors for s in schedules if s.collectors is not None]
    assert {0, 1} < {capacity for one in wide for capacity in one.capacities}
    assert max(capacity for one in wide for capacity in one.capacities) > 500
    assert any(one.changes and one.sleeps and one.drops for one in wide)
    assert any(config.max_drops_per_round == 0 for config in configs)
    assert any(config.segments_per_round > 100 for config in configs)
    assert any(collector is None for s in schedules for _, collector in s.moves)
    assert {config.straggler_policy for config in configs} == {"wait", "cut"}
    closings = [closing for s in schedules for closing in s.closings]
    assert {(one.collect, one.rounds is None) for one in closings} == {(a, b) for a in (0, 1) for b in (0, 1)}


def test_the_same_seed_gives_the_same_totals_in_one_process_or_two() -> None:
    assert run_many(60, seed=3).as_dict() == run_many(60, seed=3, processes=2).as_dict()


def test_giving_up_on_publishing_ends_in_failure() -> None:
    config = PaceConfig(rounds=5, segments_per_round=1, max_publish_retries=2)
    simulation = Simulation(Schedule(config, 0, (1.0,), faults=Faults(publish_breaks_at=3)))
    simulation.run()
    assert simulation.finish is not None
    assert simulation.finish.failed
    assert simulation.totals["publish_failures"] == 3


def test_the_pipeline_limit_is_reached_from_one_on() -> None:
    figures = pipeline_figures()
    assert figures["k=0"] == pytest.approx(2.0, rel=0.01)
    assert figures["k=1"] == pytest.approx(1.0, rel=0.01)
    assert figures["k=2"] == pytest.approx(1.0, rel=0.01)


# ---------------------------------------------------------------- broken on purpose


@pytest.mark.parametrize("rule", ["lag", "none"])
def test_any_other_rule_breaks_the_bound(rule: str) -> None:
    report = run_many(150, rule=rule)
    assert report.totals[BOUND] > 0
    assert not report.holds


def test_the_usual_rule_breaks_on_one_straggler() -> None:
    """Ticket 1 crawls on collector 1 while collector 0 keeps the lag small: its deadline passes unseen."""
    config = PaceConfig(rounds=9, segments_per_round=2, num_collectors=2, off_policy_degree=1)
    schedule = Schedule(config, 0, collect_s=(1.0, 5.0))
    assert run_schedule(schedule).holds
    report = run_schedule(schedule, lambda config: Coordinator(config, RULES["lag"]))
    assert report.totals[BOUND] == 1
    assert re.search(r"round 2 would train ticket \d of version 0 with deadline 1", report.failures[0])


class WithoutAssertion(Coordinator):
    """Admits anything and does not look at what it trains."""

    def __init__(self, config: PaceConfig) -> None:
        super().__init__(config, no_rule)

    def _assert_bound(self, chosen: tuple[int, ...]) -> None:
        pass


class Forgetful(Coordinator):
    """Never issues a lost ticket again."""

    def _reissue_lost(self, actions: list[Action]) -> None:
        pass


class Renewing(Coordinator):
    """Gives a lost ticket a new deadline."""

    def _reissue_lost(self, actions: list[Action]) -> None:
        super()._reissue_lost(actions)
        for number, action in enumerate(actions):
            if isinstance(action, Issue):
                ticket = action.ticket
                actions[number] = Issue(replace(ticket, deadline=ticket.version + self.degree))


class Repeating(Coordinator):
    """Trains one segment several times, which the store notices."""

    def _choose(self) -> tuple[int, ...] | None:
        chosen = super()._choose()
        return None if chosen is None else chosen[:1] * len(chosen)


class Optimistic(Coordinator):
    """Thinks that a dead collector's tickets go on running."""

    def _collector_down(self, collector: int) -> None:
        self.members.up.pop(collector, None)
        self.members.update(collector)


class Sleepy(Coordinator):
    """Is not woken when it is time to decide."""

    def wake_at_s(self, now_s: float) -> float | None:
        return None


class Hasty(Coordinator):
    """At k = 0 goes on collecting for a replay while the learner trains."""

    def _in_lockstep(self) -> bool:
        return True


class Deaf(Coordinator):
    """Forgets to try a failed publish again."""

    def _publish_failed(self, version: int, reason: str, now_s: float) -> None:
        super()._publish_failed(version, reason, now_s)
        self._retry_publish_at_s = None


class Gateless(Coordinator):
    """Issues tickets however the gates stand."""

    def _may_collect(self) -> bool:
        return True


class Impatient(Coordinator):
    """Trains rounds that nobody has asked for."""

    def _may_begin_round(self) -> bool:
        return True


class Shut(Coordinator):
    """Closes gates and does not open them again."""

    def apply(self, event: Event, now_s: float) -> Sequence[Action]:
        return () if event == GatesSet() else super().apply(event, now_s)


class Unhelpful(Coordinator):
    """Does not collect what an open round needs when collecting is closed."""

    def _may_collect(self) -> bool:
        return self._gates.collect


class WideOpen(Coordinator):
    """Opens the dial at once."""

    def _turn(self, degree: int) -> None:
        super()._turn(degree)
        self.degree = max(self.degree, degree)


class Greedy(Coordinator):
    """Gives collectors one ticket more than they want to hold."""

    def apply(self, event: Event, now_s: float) -> Sequence[Action]:
        if isinstance(event, CollectorUp):
            event = replace(event, capacity=event.capacity + 1)
        return super().apply(event, now_s)


class Bumping(Coordinator):
    """Gives a lost ticket the newest version."""

    def _reissue_lost(self, actions: list[Action]) -> None:
        super()._reissue_lost(actions)
        for number, action in enumerate(actions):
            if isinstance(action, Issue):
                ticket = action.ticket
                actions[number] = Issue(replace(ticket, version=max(ticket.version, self.published)))


class Patient(Coordinator):
    """Does not see that too much is dropped."""

    def _drop(self, number: int, reason: str) -> None:
        self.ledger.drop(number)
        del self._versions[number]


class Eager(Coordinator):
    """Forgets what was dropped: issues no other tickets."""

    def _drop(self, number: int, reason: str) -> None:
        super()._drop(number, reason)
        self.ledger.dropped -= 1


class Hungry(Coordinator):
    """Begins rounds without waiting for more than they train."""

    def _needed(self) -> int:
        return self.config.segments_per_round


class Ruthless(Coordinator):
    """Cuts every ticket that runs when a round has to wait."""

    def _cut_stragglers(self, actions: list[Action]) -> None:
        actions.append(Cut(tuple(self.ledger.with_status(RUNNING))))


class Crowding(Coordinator):
    """Gives a ticket that ends its collectors others for company."""

    def _collector_down(self, collector: int) -> None:
        self.members._losses.clear()
        super()._collector_down(collector)


class Clinging(Coordinator):
    """Gives tickets to collectors that were asked to leave."""

    def apply(self, event: Event, now_s: float) -> Sequence[Action]:
        return () if isinstance(event, CollectorRemoved) else super().apply(event, now_s)


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (Greedy, CONTRACT),
        (Bumping, CONTRACT),
        (Patient, CONTRACT),
        (Eager, CONSERVATION),
        (Hungry, CONTRACT),
        (Ruthless, CONTRACT),
        (Crowding, CONTRACT),
        (Clinging, CONTRACT),
        (WideOpen, CONTRACT),
        (Gateless, CONTRACT),
        (Impatient, CONTRACT),
        (Shut, DEADLOCK),
        (WithoutAssertion, BOUND),
        (Hasty, BOUND),
        (Forgetful, DEADLOCK),
        (Deaf, DEADLOCK),
        (Repeating, CONTRACT),
        (Optimistic, CONSERVATION),
        (Renewing, CONTRACT),
        (Sleepy, DEADLOCK),
    ],
)
def test_the_checker_finds_a_broken_coordinator(broken: type[Coordinator], kind: str) -> None:
    find(kind, make=broken)


def test_a_step_that_dies_is_done_again_from_the_checkpoint_on_although_collecting_is_closed() -> None:
    """Round 3 is trained from 7 s to 8 s, with closed gates; it goes on from version 2."""
    config = PaceConfig(
        rounds=6, segments_per_round=2, num_collectors=2, checkpoint_interval=2, stepwise=True
    )
    schedule = Schedule(config, 0, collect_s=(1.0, 1.0), faults=Faults(crashes=(7.5,)))
    simulation = Simulation(schedule)
    simulation.run()
    assert simulation.totals["resumes"] == 1
    assert simulation.totals["rounds"] == 6 + 1
    assert simulation.totals["steps"] == 6
    assert run_schedule(schedule, Unhelpful).totals[DEADLOCK] == 1


# ---------------------------------------------------------------- steps of a driver


def with_driver(busy_s: float | None, schedules: int = 100, **changes: Any) -> list[Schedule]:
    drawn = (draw_schedule(seed) for seed in range(schedules))
    return [replace(schedule, busy_s=busy_s, **changes) for schedule in drawn]


@pytest.mark.parametrize("busy_s", [None, 0.0, 0.2, 5.0])
def test_the_promises_hold_however_long_the_driver_is_busy(busy_s: float | None) -> None:
    report = Report()
    for schedule in with_driver(busy_s):
        report.add(run_schedule(schedule))
    assert report.failures == []
    assert (report.totals["batched"] > 0) == (busy_s is not None)


def test_what_happens_at_once_is_one_step_of_a_driver_that_is_never_busy() -> None:
    config = PaceConfig(rounds=3, segments_per_round=4, num_collectors=4, off_policy_degree=1)
    schedule = Schedule(config, 0, collect_s=(1.0,) * 4, busy_s=0.0)
    assert run_schedule(schedule).totals["batched"] > 0
    assert run_schedule(replace(schedule, busy_s=None)).totals["batched"] == 0


class Hoarding(Wide):
    """Keeps all that was begun, also what was made with weights that a crash took back."""

    def _take_over(self, work: Any, begun: Any) -> None:
        for (version, size), mark in zip(begun["spans"], begun["marks"], strict=True):
            work.add(size, Weights(version, mark))


def test_begun_work_of_a_future_that_a_crash_took_back_is_found() -> None:
    """Collectors are slow to say what is begun, rounds are fast, and the run is killed again and again."""
    config = PaceConfig(
        rounds=60, segments_per_round=4, num_collectors=2, off_policy_degree=6, checkpoint_interval=1
    )
    collectors = Collectors((24, 24), piece_s=0.3, answer_s=2.0)
    crashes = Faults(crashes=tuple(12.0 * number for number in range(1, 8)))
    hoarding, report = partial(make_collector, wide=Hoarding), Report()
    for seed in range(6):
        schedule = Schedule(config, seed, (8.0,), 0.05, tail=3.0, collectors=collectors, faults=crashes)
        assert run_schedule(schedule).failures == []
        report.add(run_schedule(schedule, roles=hoarding))
    assert report.totals[BOUND] > 0
    assert any("which this run never had" in failure for failure in report.failures)


def test_begun_work_is_cut_back_also_where_its_ticket_is_issued_late_or_lost_again() -> None:
    """Collectors come up one after the other, some are killed: a version has the number of one before."""
    config = PaceConfig(
        rounds=60, segments_per_round=4, num_collectors=2, off_policy_degree=6, checkpoint_interval=1
    )
    report = Report()
    for seed in range(8):
        for capacities, kill_at_s in ((24, 24), 5.5), ((3, 24), None):
            kills = [(15.0 * life + kill_at_s, 0) for life in range(1, 8)] if kill_at_s else []
            kills += [(at_s + 0.5, 1) for at_s, _ in kills]
            collectors = Collectors(capacities, piece_s=0.3, answer_s=2.0)
            faults = Faults(crashes=tuple(15.0 * life for life in range(1, 8)), kills=tuple(kills))
            schedule = Schedule(config, seed, (8.0,), 0.05, start_s=3.0, tail=3.0, collectors=collectors)
            report.add(run_schedule(replace(schedule, faults=faults)))
    assert report.failures == []


# ---------------------------------------------------------------- a driver that is broken on purpose


def keep_waits_for(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    end = Waits.end
    monkeypatch.setattr(Waits, "end", lambda waits, one: None if one == key else end(waits, one))


def keep_memory_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_round(driver: Driver, event: RoundTrained) -> RoundTrained:
        return replace(event, signals=driver.meter.measure(event))

    monkeypatch.setattr(Driver, "_check_round", check_round)


def keep_trained_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(store: StreamStore, tickets: Sequence[int]) -> tuple[Segment, ...]:
        return tuple([store._segments[ticket] for ticket in tickets])

    monkeypatch.setattr(StreamStore, "next", take)


@pytest.mark.parametrize(
    ("break_it", "kind", "text"),
    [
        (
            lambda patch: keep_waits_for(patch, "evaluation"),
            CONTRACT,
            "nobody ends: {'evaluation'}",
        ),
        (
            lambda patch: keep_waits_for(patch, "collector_0"),
            CONTRACT,
            "nobody ends: {'collector_0'}",
        ),
        (keep_memory_of_rounds, CONSERVATION, "memory is held"),
        (keep_trained_segments, CONSERVATION, "checkpoint"),
    ],
)
def test_the_books_find_a_broken_driver(
    break_it: Callable[[pytest.MonkeyPatch], None], kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    find(kind, text)


# ---------------------------------------------------------------- command line


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_prints_one_json_object_and_says_that_all_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "30", "--seed", "2", "--processes", "1", "--json"]) == 0
    result = last_line(capsys)
    assert (result["schedules"], result["holds"], result["deadlocks"]) == (30, True, 0)
    named = {"bound_violations", "conservation_violations", "dropped", "rounds", "segments", "lost"}
    named |= {"reissued", "publish_failures", "dial_turns", "evaluations", "evaluations_skipped"}
    assert named | {"resumes", "seconds", "pipeline"} <= result.keys()


def test_exits_with_1_when_something_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "30", "--processes", "1", "--rule", "none", "--json"]) == 1
    assert last_line(capsys)["bound_violations"] > 0


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "5", "--processes", "1"]) == 0
    assert Counter(capsys.readouterr().out.split())["holds"] == 1


def test_trace_prints_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", "0"]) == 0
    output = capsys.readouterr().out
    assert "CollectorUp" in output
    assert "Issued(ticket=Ticket(number=0" in output
    assert "Finished(version=" in output


def test_trace_of_a_broken_rule_ends_with_what_broke(capsys: pytest.CaptureFixture[str]) -> None:
    failure = run_many(150, rule="none").failures[0]
    seed = failure.split()[1].rstrip(",")
    assert main(["--trace", seed, "--rule", "none"]) == 1
    assert failure.split(": ", 1)[1] in capsys.readouterr().out
