"""Judgements without processes or clocks: alive or dead, diverging or not."""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.pacing.events import Event, SnapshotTaken
from offbeat.runtime.learning import LearnerExecutor, on_cpu
from offbeat.runtime.supervision import LossWatch, Pulse


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


class LearnsInPlace:
    """A learner that hands out its own arrays and containers, and trains on in them."""

    def __init__(self) -> None:
        self.array, self.names, self.seen = np.zeros(3), ["a"], Counter({"left": 1})
        self.moments = OrderedDict(mean=np.zeros(2), square=(np.zeros(1), None))

    def weights(self) -> dict[str, Any]:
        return {"w": self.array}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.array, "names": self.names, "seen": self.seen, "moments": self.moments}

    def train(self) -> None:
        self.array += 1
        self.names.append("b")
        self.seen["left"] += 1
        self.moments["mean"][:] = 1
        self.moments["square"][0][:] = 1


@pytest.mark.parametrize("has_torch", [True, False])
def test_snapshots_do_not_change_with_a_learner_that_trains_in_place(
    monkeypatch: pytest.MonkeyPatch, has_torch: bool
) -> None:
    if not has_torch:
        monkeypatch.delitem(sys.modules, "torch")
    learner, posted, judged = LearnsInPlace(), list[Event](), list[Any]()
    executor = LearnerExecutor(learner, lambda *_: None, posted.append)  # type: ignore[arg-type]
    executor.snapshot()
    executor.send_weights(judged.append)
    learner.train()
    (snapshot,) = posted
    assert isinstance(snapshot, SnapshotTaken)
    assert snapshot.weights["w"].tolist() == judged[0]["w"].tolist() == [0, 0, 0]
    state = snapshot.state
    assert state["w"].tolist() == [0, 0, 0] and state["names"] == ["a"] and state["seen"] == {"left": 1}
    assert state["moments"]["mean"].tolist() == [0, 0] and state["moments"]["square"][0].tolist() == [0]
    assert [type(value) for value in state.values()] == [np.ndarray, list, Counter, OrderedDict]
    assert list(state["moments"]) == ["mean", "square"] and type(state["moments"]["square"]) is tuple


def test_snapshots_copy_a_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    copy_ = torch.Tensor.copy_

    def counted(target: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.numel())
        return copy_(target, tensor)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    tensor = torch.zeros(2)
    copied = on_cpu({"w": tensor}, copy=True)["w"]
    tensor += 1
    assert copied.tolist() == [0, 0] and copies == [2]
