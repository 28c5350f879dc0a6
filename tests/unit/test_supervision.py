"""Judgements without processes or clocks: alive or dead, again or not, diverging or not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offbeat.config.models import RuntimeConfig
from offbeat.runtime.learning import on_cpu
from offbeat.runtime.supervision import LossWatch, Pulse, RestartBudget, Wait, describe_stall


def watch(pulse: Pulse, counts: list[int], cpu: list[float], start_s: float = 100.0) -> list[bool]:
    """Ask once a second."""
    asked = enumerate(zip(counts, cpu, strict=True))
    return [pulse.is_dead(count, used, start_s + second) for second, (count, used) in asked]


def test_worker_that_counts_is_alive() -> None:
    assert not any(watch(Pulse(5.0, 100.0), list(range(20)), [1.0] * 20))


def test_worker_that_neither_counts_nor_computes_is_dead_after_the_limit() -> None:
    verdicts = watch(Pulse(5.0, 100.0), [0, 1, 2] + [2] * 10, [1.0] * 13)
    assert verdicts.index(True) == 2 + 5


def test_stopped_worker_is_given_up_sooner() -> None:
    pulse = Pulse(8.0, 0.0)
    assert [pulse.is_dead(1, 1.0, float(second), is_stopped=True) for second in range(4)].index(True) == 1


def test_worker_deep_in_native_code_is_busy_not_dead() -> None:
    cpu = [float(second) for second in range(30)]
    assert not any(watch(Pulse(5.0, 100.0), [0] * 30, cpu))


def test_worker_that_stops_computing_is_dead_after_all() -> None:
    verdicts = watch(Pulse(5.0, 100.0), [0] * 20, [min(float(s), 8.0) for s in range(20)])
    assert not any(verdicts[:13]) and verdicts[-1]


def test_nobody_is_blamed_for_time_in_which_nobody_asked() -> None:
    pulse = Pulse(5.0, 0.0)
    assert not pulse.is_dead(1, 1.0, 0.5)
    assert not pulse.is_dead(1, 1.0, 500.0), "the whole machine slept"
    assert not pulse.is_dead(1, 1.0, 501.0)
    assert pulse.is_dead(1, 1.0, 502.9) is False
    assert [pulse.is_dead(1, 1.0, 503.0 + s) for s in range(5)][-1]


def budget(**settings: object) -> RestartBudget:
    return RestartBudget(RuntimeConfig.model_validate(settings))


def test_first_replacement_comes_at_once_and_later_ones_wait_longer() -> None:
    restarts = budget(restart_backoff_s=0.5, restart_backoff_max_s=3.0)
    assert [restarts.lost(0, now_s) for now_s in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert restarts.lost(1, 6.0) == 0.0, "each collector has its own row of failures"
    restarts.worked(0)
    assert restarts.lost(0, 7.0) == 0.0, "a segment ends the row"


def test_budget_counts_within_its_window() -> None:
    restarts = budget(max_worker_restarts=2, restart_window_s=10.0)
    for now_s in (0.0, 1.0):
        restarts.lost(0, now_s)
    assert not restarts.is_spent
    restarts.lost(0, 10.5)
    assert not restarts.is_spent, "the first is forgotten by now"
    restarts.lost(0, 10.6)
    assert restarts.is_spent


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["learn/loss", "learn/value_loss", "learn/grad_norm"])
def test_loss_that_is_no_number_is_noticed(name: str, value: float) -> None:
    assert name in (LossWatch(None).verdict({"learn/loss": 0.1, name: value}) or "")


def test_metrics_that_may_be_undefined_are_left_alone() -> None:
    metrics = {"learn/loss": 0.1, "learn/explained_variance": math.nan, "rollout/return_mean": math.nan}
    assert LossWatch(2.0).verdict(metrics) is None


def test_explosion_is_judged_by_the_median_of_earlier_rounds() -> None:
    watch = LossWatch(10.0)
    for loss in (1.0, -1.0, 2.0, 1.0, 1.0, 5.0, 1.0):
        assert watch.verdict({"learn/loss": loss}) is None
    assert "run.explosion_factor" in (watch.verdict({"learn/loss": -11.0}) or "")
    assert LossWatch(None).verdict({"learn/loss": 1e30}) is None


def test_first_rounds_have_nothing_to_compare_with() -> None:
    watch = LossWatch(2.0)
    assert [watch.verdict({"learn/loss": loss}) for loss in (1.0, 100.0, 1.0, 50.0)] == [None] * 4


def test_stall_report_names_who_waits_for_whom_and_where_they_are() -> None:
    wait = Wait("round 7", "collector_1 (ticket 14)", 12.34, 120.0, "async_training.generation_timeout")
    text = describe_stall("nothing happened", [wait], {"collector_1": "File x\n  line y"})
    assert text.splitlines() == [
        "nothing happened",
        "who waits for whom:",
        "  round 7 waits for collector_1 (ticket 14) since 12.3 s"
        " (limit 120 s, async_training.generation_timeout)",
        "collector_1 was here:",
        "  File x",
        "    line y",
    ]


def test_weights_leave_the_learner_on_the_cpu_and_without_a_graph() -> None:
    layer = torch.nn.Linear(2, 1)
    array = np.ones(3)
    weights = {"net": layer.state_dict(keep_vars=True), "extra": (array, [layer.weight], "text", 3)}
    sent = on_cpu(weights)
    assert list(sent["net"]) == ["weight", "bias"]
    tensors = [*sent["net"].values(), sent["extra"][1][0]]
    assert all(not tensor.requires_grad and tensor.device.type == "cpu" for tensor in tensors)
    assert torch.equal(sent["net"]["weight"], layer.weight)
    assert sent["extra"][0] is array and sent["extra"][2:] == ("text", 3)
