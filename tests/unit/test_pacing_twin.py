"""The coordinator decides as its oracle does, which scans all tickets, when it decides after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings

from offbeat.errors import PromiseBroken
from offbeat.pacing import PaceConfig
from offbeat.pacing.checker import Violation
from offbeat.pacing.deadlines import feasible
from offbeat.pacing.ledger import LOST, READY, RUNNING, Ledger
from offbeat.pacing.schedules import Schedule, draw_schedule
from offbeat.pacing.simulate import RULES, Simulation
from tests.oracles.pacing import Differs, Twin

from .test_pacing_machine import AnyOrder


def small(seed: int) -> Schedule:
    """A schedule of at most 8 collectors and 6 segments a round; the dial opens at once."""
    schedule = draw_schedule(seed)
    return replace(schedule, config=replace(schedule.config, open_rounds=0), busy_s=None)


def large(seed: int) -> Schedule:
    """A schedule of at most 64 collectors and 48 segments a round."""
    schedule, rng = small(seed), Random(f"large {seed}")
    config, times, collectors = schedule.config, rng.randint(2, 8), rng.randint(8, 64)
    size, most = config.segments_per_round * times, config.max_outstanding
    config = replace(
        config,
        num_collectors=collectors,
        segments_per_round=size,
        min_segments=min(config.min_segments * times, size),
        max_outstanding=None if most is None else most * times + 64,
        rounds=min(config.rounds, 12),
    )
    base_s, slow = rng.uniform(0.1, 2.0), rng.choice((1.0, 3.0, 10.0))
    kills = tuple((at_s, number % collectors) for at_s, number in schedule.faults.kills)
    return replace(
        schedule,
        config=config,
        collect_s=tuple(base_s * rng.choice((1.0, 1.0, slow)) for _ in range(collectors)),
        faults=replace(schedule.faults, kills=kills),
    )


def compare(schedules: Iterable[Schedule], rule: str = "deadline") -> Counter[str]:
    """Drive coordinator and oracle through these schedules; `Differs` when they do not agree."""
    totals: Counter[str] = Counter()
    for schedule in schedules:
        twins: list[Twin] = []

        def make(config: PaceConfig, twins: list[Twin] = twins) -> Twin:
            twins.append(Twin(config, RULES[rule]))
            return twins[-1]

        try:
            Simulation(schedule, make).run()
        except (Violation, PromiseBroken):
            if RULES[rule] is feasible:
                raise
            totals["broken"] += 1
        for twin in twins:
            check_indexes(twin.ledger)
            totals["events"] += twin.num_events
            totals["most"] = max(totals["most"], twin.most_outstanding)
        totals["schedules"] += 1
    return totals


def check_indexes(ledger: Ledger) -> None:
    """Derive everything that the ledger keeps beside its tickets again."""
    counts = ledger.check()
    being_trained = ledger._round
    waiting = Counter(t.deadline for t in ledger.outstanding() if t.number not in being_trained)
    assert dict(waiting) == ledger.waiting
    ready = [t for t in ledger.with_status(READY) if t.number not in being_trained]
    by_deadline = {deadline: sorted(numbers) for deadline, numbers in ledger._ready_by.items()}
    assert by_deadline == {
        d: [t.number for t in ready if t.deadline == d] for d in {t.deadline for t in ready}
    }
    for status in (RUNNING, LOST):
        held: dict[int, set[int]] = {}
        for ticket in ledger.with_status(status):
            held.setdefault(ticket.collector, set()).add(ticket.number)
        assert held == {collector: numbers for collector, numbers in ledger._on[status].items() if numbers}
    assert counts.lost == len(ledger.lost)


@pytest.mark.parametrize(
    ("draw", "rule", "count"), [(small, "deadline", 250), (large, "deadline", 60), (small, "lag", 60)]
)
def test_decides_as_its_oracle(draw: Callable[[int], Schedule], rule: str, count: int) -> None:
    totals = compare(map(draw, range(count)), rule)
    assert totals["schedules"] == count
    assert (totals["broken"] > 0) == (rule == "lag")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "rule", "count"), [(small, "deadline", 6000), (large, "deadline", 2000), (small, "lag", 1000)]
)
def test_decides_as_its_oracle_in_thousands_of_schedules(
    draw: Callable[[int], Schedule], rule: str, count: int
) -> None:
    totals = compare(map(draw, range(10**6, 10**6 + count)), rule)
    assert totals["schedules"] == count
    print(dict(totals))


class Newest(Twin):
    """Trains the newest segments first."""

    def _choose(self) -> tuple[int, ...] | None:
        chosen = super()._choose()
        return None if chosen is None else tuple(self.ledger.ready)[-len(chosen) :]


def test_the_oracle_notices_another_decision() -> None:
    config = PaceConfig(rounds=9, segments_per_round=1, num_collectors=3, off_policy_degree=2)
    with pytest.raises(Differs, match="the oracle says"):
        Simulation(Schedule(config, 0, collect_s=(1.0, 1.1, 1.2), train_s=2.0), Newest).run()


class TwinInAnyOrder(AnyOrder):
    """Events in any order, drops among them; each is compared."""

    make = Twin
    opens = False


TestTwinInAnyOrder = TwinInAnyOrder.TestCase
TestTwinInAnyOrder.settings = settings(max_examples=50, stateful_step_count=60, deadline=None, database=None)
