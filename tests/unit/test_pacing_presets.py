"""Presets: what the rules of other projects admit, and what they do not bound."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.errors import ConfigError
from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing.actions import Action, Issue, Publish, Train
from offbeat.pacing.deadlines import lag_rule
from offbeat.pacing.events import CollectorUp, DialTurned, Published, RoundTrained
from offbeat.pacing.presets import Preset
from offbeat.pacing.schedules import PRESETS, draw_schedule, with_preset
from offbeat.testing.simulator import run_schedule, run_seeds
from tests.unit.pacing_steps import arrive, make, step

ONE_STEP_OFF = Preset("one_step_off", 1.0, in_step=True)
AREAL = Preset("areal", 3.0)


def begun(preset: Preset, degree: int, size: int = 2, **changes: Any) -> tuple[Coordinator, list[Action]]:
    """A coordinator of one collector of 100 tickets, after its first publication."""
    settings = {"segments_per_round": size, "off_policy_degree": degree, "preset": preset}
    coordinator = make(**settings, **changes)
    coordinator.start(0.0)
    step(coordinator, CollectorUp(0, 100))
    return coordinator, step(coordinator, Published(0))


def issued(actions: list[Action]) -> list[tuple[int, int]]:
    return [(action.ticket.number, action.ticket.version) for action in actions if isinstance(action, Issue)]


def trained(actions: list[Action]) -> list[tuple[int, ...]]:
    return [action.tickets for action in actions if isinstance(action, Train)]


def test_areal_trains_past_a_straggler_that_the_dial_waits_for() -> None:
    coordinator, first = begun(AREAL, degree=2)
    assert [number for number, _ in issued(first)] == [0, 1, 2, 3, 4, 5]
    for version in range(1, 4):  # ticket 0 never comes
        numbers = [2 * version - 1, 2 * version]
        assert trained(arrive(coordinator, *numbers)) == [tuple(numbers)]
        step(coordinator, RoundTrained(version))
        step(coordinator, Published(version))
    assert coordinator.ledger.ticket(0).deadline == 2
    assert trained(arrive(coordinator, 7, 0)) == [(0, 7)]  # 3 versions old, though k is 2
    assert not coordinator.config.is_bounded


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("waiting", [{4: 3}, {2: 1, 4: 3}, {4: 8}, {3: 2, 4: 6}, {0: 3, 4: 2}])
def test_areal_admits_by_the_count_that_the_lag_rule_is(waiting: dict[int, int], degree: int) -> None:
    rule = Preset("areal", 1.0 + degree).rule(degree)
    for next_round in range(6):
        assert rule(waiting, next_round, 2) == lag_rule(waiting, next_round, 2)


def test_verl_counts_from_the_last_publication() -> None:
    preset = Preset("verl_fully_async", 2 * 1.5, by_arrival=True)
    coordinator, first = begun(preset, degree=2, publish_interval=2)
    assert len(issued(first)) == 6
    assert trained(arrive(coordinator, 5, 1)) == [(1, 5)]  # what arrived first
    assert issued(step(coordinator, RoundTrained(1))) == []  # no publication, so no room
    assert trained(arrive(coordinator, 4, 0)) == [(0, 4)]
    assert Publish(2) in step(coordinator, RoundTrained(2))
    assert issued(step(coordinator, Published(2))) == [(number, 2) for number in (6, 7, 8, 9)]


def test_verl_begins_with_all_mini_batches_of_a_fetch() -> None:
    preset = Preset("verl_fully_async", 4.0, batches=2, by_arrival=True)
    coordinator, _ = begun(preset, degree=3, publish_interval=4, rounds=5)
    assert trained(arrive(coordinator, 0, 1, 2)) == []
    assert trained(arrive(coordinator, 3)) == [(0, 1)]
    assert trained(step(coordinator, RoundTrained(1))) == [(2, 3)]
    assert coordinator.config.is_bounded  # nothing is left over when weights are published
    step(coordinator, RoundTrained(2))
    arrive(coordinator, 4, 5, 6, 7)
    step(coordinator, RoundTrained(3))
    step(coordinator, RoundTrained(4))
    step(coordinator, Published(4))
    assert trained(arrive(coordinator, 8, 9)) == [(8, 9)]  # the last one of five waits for no second


def test_one_step_off_keeps_one_round_under_way_and_publishes_between_two() -> None:
    coordinator, first = begun(ONE_STEP_OFF, degree=1)
    assert issued(first) == [(0, 0), (1, 0)]
    second = arrive(coordinator, 0, 1)
    assert (trained(second), issued(second)) == ([(0, 1)], [(2, 0), (3, 0)])
    arrive(coordinator, 2)
    assert step(coordinator, RoundTrained(1)) == []  # ticket 3 goes on with version 0
    assert not coordinator.is_publishing
    ended = arrive(coordinator, 3)
    assert Publish(1) in ended
    assert (trained(ended), issued(ended)) == ([(2, 3)], [])
    assert issued(step(coordinator, Published(1))) == [(4, 1), (5, 1)]


def test_a_preset_is_not_turned_and_not_mixed() -> None:
    coordinator, _ = begun(AREAL, degree=2)
    with pytest.raises(ConfigError, match="the preset areal sets off_policy_degree to 2"):
        coordinator.apply(DialTurned(1), 0.0)
    for key, value in {
        "open_rounds": 3,
        "max_staleness": 4,
        "straggler_policy": "cut",
        "min_segments": 3,
    }.items():
        with pytest.raises(ConfigError, match="the preset areal cannot be had with"):
            PaceConfig(5, 2, off_policy_degree=2, preset=AREAL, **{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_their_rules_in_random_schedules(name: str) -> None:
    report = run_seeds(range(40), preset=name)
    assert report.holds, report.failures
    if name == "one_step_off":
        assert report.totals["late"] == 0


def test_one_schedule_in_ten_has_a_preset() -> None:
    chosen = [draw_schedule(seed).config.preset for seed in range(300)]
    assert {preset.name for preset in chosen if preset is not None} == set(PRESETS)


def test_the_simulator_sees_a_preset_that_does_not_keep_its_rule() -> None:
    class Greedy(Coordinator):
        """Admits a round more than its rule says."""

        def __init__(self, config: PaceConfig) -> None:
            super().__init__(config)
            self._rule = Preset("areal", 99.0).rule(config.off_policy_degree)

    schedules = [with_preset(draw_schedule(seed), "areal") for seed in range(5)]
    reports = [run_schedule(schedule, Greedy) for schedule in schedules]
    assert any(report.totals["bound_violations"] for report in reports)
