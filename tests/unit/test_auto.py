"""The tuner: the smallest k that keeps the bottleneck busy, lower when the data says so, and then at rest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from offbeat.pacing import AUTO, PaceConfig
from offbeat.pacing.auto import AutoConfig, AutoDial
from offbeat.pacing.events import Signals
from offbeat.pacing.schedules import Schedule
from offbeat.testing.simulation import Simulation

ROUNDS = 500


def changes(degrees: Sequence[int]) -> int:
    return sum(before != after for before, after in pairwise(degrees))


def resting_place(degrees: Sequence[int]) -> int:
    """The k most used in the last 200 rounds."""
    return Counter(degrees[-200:]).most_common(1)[0][0]


# ---------------------------------------------------------------- on a simulated pipeline


def simulate(
    collect_s: tuple[float, ...],
    train_s: float,
    degree: int = AUTO,
    auto_max: int = 8,
    ess_cost: float = 0.0,
    rounds: int = ROUNDS,
) -> Simulation:
    config = PaceConfig(
        rounds=rounds,
        segments_per_round=4,
        num_collectors=len(collect_s),
        off_policy_degree=degree,
        auto_max=auto_max,
    )
    simulation = Simulation(Schedule(config, 0, collect_s, train_s, ess_cost=ess_cost))
    simulation.run()
    return simulation


def smallest_that_is_fast(collect_s: tuple[float, ...], train_s: float) -> int:
    """The least fixed k within 3 % of the best, tried one by one."""
    times = [simulate(collect_s, train_s, degree, rounds=100).now_s for degree in range(9)]
    return next(degree for degree, time_s in enumerate(times) if time_s <= 1.03 * min(times))


@pytest.mark.parametrize(
    ("collect_s", "train_s", "smallest"),
    [
        ((1.0,) * 4, 1.0, 1),
        ((2.0,) * 4, 1.0, 1),
        ((1.0,) * 4, 3.0, 1),
        ((1.0, 1.0, 1.0, 3.0), 1.2, 3),
        ((4.0,) * 16, 1.0, 4),
    ],
    ids=["even", "collect-bound", "train-bound", "straggler", "many-slow-lanes"],
)
def test_comes_to_rest_at_the_smallest_k_that_keeps_the_bottleneck_busy(
    collect_s: tuple[float, ...], train_s: float, smallest: int
) -> None:
    assert smallest_that_is_fast(collect_s, train_s) == smallest
    degrees = simulate(collect_s, train_s).degrees
    assert degrees[0] == 0
    assert resting_place(degrees) == smallest
    assert changes(degrees) <= 20


def test_never_beyond_its_maximum() -> None:
    degrees = simulate((1.0, 1.0, 1.0, 10.0), 1.2, auto_max=3).degrees
    assert max(degrees) == resting_place(degrees) == 3


def test_staleness_that_costs_too_much_keeps_k_low() -> None:
    free = simulate((4.0,) * 16, 1.0).degrees
    costly = simulate((4.0,) * 16, 1.0, ess_cost=0.3).degrees
    assert resting_place(costly) < resting_place(free)
    assert changes(costly) <= 30


# ---------------------------------------------------------------- on made-up measurements


def drive(dial: AutoDial, measure: Callable[[int], Signals], rounds: int = ROUNDS) -> list[int]:
    return [dial.update(measure(dial.degree)) for _ in range(rounds)]


def overlapping(degree: int) -> Signals:
    """Collecting and training take a second each and overlap from k = 1 on."""
    idle = 0.5 if degree == 0 else 0.0
    return Signals(2.0 if degree == 0 else 1.0, 1.0, 1.0, idle, idle)


def one_core(degree: int) -> Signals:
    """Both sides share one core: overlapping keeps them busy but makes nothing faster."""
    idle = 0.5 if degree == 0 else 0.3
    return Signals(2.0, 2.0, 2.0, idle, idle)


def test_a_step_that_does_not_pay_is_taken_back() -> None:
    degrees = drive(AutoDial(AutoConfig()), one_core)
    assert resting_place(degrees) == 0
    assert max(degrees) == 1
    assert changes(degrees) <= 16


def test_a_dial_handed_over_high_comes_down() -> None:
    degrees = drive(AutoDial(AutoConfig(), degree=6), overlapping)
    assert degrees[0] == 6
    assert resting_place(degrees) == 1


def test_a_dial_handed_over_beyond_the_maximum_is_cut() -> None:
    assert AutoDial(AutoConfig(maximum=2), degree=6).degree == 2


@pytest.mark.parametrize(
    "costly",
    [
        Signals(1.0, ess=0.3),
        Signals(1.0, behaviour_kl=0.5),
        Signals(1.0, ess=0.9, behaviour_kl=0.5),
        Signals(1.0, search_kl=0.7),
    ],
    ids=["ess", "kl", "either", "search"],
)
def test_low_sample_size_or_high_divergence_lowers_k_at_once(costly: Signals) -> None:
    config = AutoConfig()
    dial = AutoDial(config, degree=4)
    degrees = drive(dial, lambda _: costly, rounds=config.window + 1)
    assert degrees[-1] == 2
    assert drive(dial, lambda _: costly, rounds=40)[-1] == 0


def test_data_that_was_costly_does_not_freeze_the_dial_for_good() -> None:
    dial = AutoDial(AutoConfig())
    costly = drive(dial, lambda _: Signals(2.0, collect_idle=0.5, train_idle=0.5, ess=0.1))
    assert resting_place(costly) == 0
    assert resting_place(drive(dial, overlapping, rounds=2 * ROUNDS)) == 1


def test_one_bad_round_in_a_window_does_not_move_it() -> None:
    dial = AutoDial(AutoConfig(patience=100), degree=1)
    sizes = [0.4, 0.9, 0.9, 0.9, 0.9]
    signals = [Signals(1.0, collect_idle=0.2, train_idle=0.0, ess=ess) for ess in sizes]
    drive(dial, overlapping, rounds=1)
    assert [dial.update(one) for one in signals[:4]] == [1] * 4
    dial.update(signals[4])
    assert dial.state_dict()["ceiling"][2] == 0


def test_what_was_found_survives_json() -> None:
    dial = AutoDial(AutoConfig())
    drive(dial, overlapping, rounds=60)
    state = json.loads(json.dumps(dial.state_dict()))
    restored = AutoDial(AutoConfig())
    restored.load_state_dict(state)
    assert restored.state_dict() == dial.state_dict()
    assert resting_place(drive(restored, overlapping)) == 1


def test_follows_a_pipeline_that_changes() -> None:
    dial = AutoDial(AutoConfig())
    drive(dial, overlapping)

    def needs_three(degree: int) -> Signals:
        idle = max(0.0, 0.6 - 0.2 * degree)
        return Signals(1 / (1 - idle), 1.0, 1.0, idle, idle)

    assert resting_place(drive(dial, needs_three)) == 3
