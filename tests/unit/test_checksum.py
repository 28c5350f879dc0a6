"""Checksums of published weights."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.pacing.events import Broken, Event, Notice, Published, SnapshotTaken
from offbeat.runtime.checksum import weights_checksum
from offbeat.runtime.learning import LearnerExecutor
from offbeat.types import Batch


def tree() -> dict[str, Any]:
    return {
        "net": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3)},
        "steps": 7,
        "rest": [1.5, "text", None, True, (np.int64(3), b"x")],
    }


def test_equal_weights_have_one_checksum_whatever_the_order_of_names() -> None:
    other = tree()
    turned = OrderedDict(reversed(other.items()))
    turned["net"] = dict(reversed(other["net"].items()))
    assert weights_checksum(tree()) == weights_checksum(turned)
    assert isinstance(weights_checksum(tree()), int)


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it["net"]["w"].__setitem__((1, 2), np.nextafter(np.float32(5), np.float32(6))),
        lambda it: it["net"].update(w=it["net"]["w"].reshape(3, 2)),
        lambda it: it["net"].update(w=it["net"]["w"].view(np.int32)),
        lambda it: it["net"].update(c=it["net"].pop("b")),
        lambda it: it.update(steps=8),
        lambda it: it.update(steps=7.0),
        lambda it: it["rest"].__setitem__(0, -1.5),
        lambda it: it["rest"].__setitem__(1, "texts"),
        lambda it: it["rest"].__setitem__(2, 0),
        lambda it: it["rest"].append(None),
        lambda it: it["rest"].__setitem__(4, (np.int64(3), b"y")),
    ],
)
def test_every_change_gives_another_checksum(change: Any) -> None:
    changed = tree()
    change(changed)
    assert weights_checksum(changed) != weights_checksum(tree())


def test_names_and_values_do_not_run_into_each_other() -> None:
    assert weights_checksum({"a": "b", "c": "d"}) != weights_checksum({"a": "bc", "": "d"})
    assert weights_checksum(["ab", "c"]) != weights_checksum(["a", "bc"])
    assert weights_checksum([[], 1]) != weights_checksum([[1]])


def test_memory_layout_does_not_count() -> None:
    array = np.arange(12.0).reshape(3, 4)
    assert weights_checksum(array) == weights_checksum(np.asfortranarray(array))
    assert weights_checksum(array[:, ::2]) == weights_checksum(array[:, ::2].copy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_tensors_count_by_their_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ones = torch.ones(shape, dtype=dtype)
    assert weights_checksum({"w": ones}) == weights_checksum({"w": ones.clone()})
    if ones.numel():
        assert weights_checksum({"w": ones}) != weights_checksum({"w": torch.zeros(shape, dtype=dtype)})


def test_parameters_are_tensors() -> None:
    layer = torch.nn.Linear(2, 3)
    assert weights_checksum(layer.state_dict()) == weights_checksum(layer.state_dict(keep_vars=True))
    assert weights_checksum(layer.weight.t()) == weights_checksum(layer.weight.t().contiguous())


@pytest.mark.parametrize(
    "weights", [object(), {"w": object()}, [np.array([None])], {1, 2}, torch.eye(2).to_sparse()]
)
def test_what_is_no_tree_of_arrays_has_none(weights: Any) -> None:
    assert weights_checksum(weights) is None


def test_a_tree_that_contains_itself_has_none() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert weights_checksum(loop) is None


def test_torch_is_not_imported_for_it() -> None:
    code = (
        "import sys, numpy as np\n"
        "from offbeat.runtime.checksum import weights_checksum\n"
        "assert weights_checksum({'w': np.ones(3)}) is not None\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=True)


class Learner:
    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def weights(self) -> Any:
        return self._weights


@pytest.mark.parametrize("weights", [{"w": np.ones(3)}, {"w": torch.ones(3)}, object()])
def test_what_is_published_carries_its_checksum(weights: Any) -> None:
    events: list[Event] = []
    executor = LearnerExecutor(Learner(weights), lambda version, sent: None, events.append)  # type: ignore[arg-type]
    executor.publish(3)
    (event,) = events
    assert isinstance(event, Published)
    assert event.checksum is not None
    assert (event.version, event.checksum.result()) == (3, weights_checksum(weights))


def test_collectors_do_not_wait_for_the_checksum() -> None:
    is_known: list[bool] = []

    def post(event: Any) -> None:
        is_known.append(event.checksum.done())
        events.append(event)

    events: list[Published] = []
    LearnerExecutor(Learner({"w": np.ones(3)}), lambda version, sent: None, post).publish(3)  # type: ignore[arg-type]
    assert is_known == [False]
    (event,) = events
    assert event.checksum is not None and event.checksum.done()
    travelled = pickle.loads(pickle.dumps(event))
    assert travelled.checksum.result() == event.checksum.result()


class Trains(Learner):
    """Trains in place."""

    def train(self, batch: Batch) -> dict[str, float]:
        self._weights["w"] += 1
        return {}


class Copies(Trains):
    def weights(self) -> Any:
        return {"w": self._weights["w"] * 1}


@pytest.mark.parametrize("start", [np.ones(3), torch.ones(3)], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("kind", "by_reference", "degree", "is_broken"),
    [
        (Trains, True, 1, True),
        (Trains, True, 0, False),
        (Trains, False, 1, False),
        (Copies, True, 1, False),
    ],
)
def test_published_weights_that_training_changes_break_the_run_where_they_are_used(
    kind: type[Trains], by_reference: bool, degree: int, is_broken: bool, start: Any
) -> None:
    events: list[Event] = []
    learner: Any = kind({"w": start * 1})
    executor = LearnerExecutor(learner, lambda *_: None, events.append, by_reference=by_reference)
    executor.publish(0)
    for version in range(2):
        executor.train(Batch(version, (), degree))
        executor.publish(version + 1)
    errors = [str(event.error) for event in events if isinstance(event, Broken)]
    assert bool(errors) is is_broken
    if errors:
        assert "the weights of version 0" in errors[0] and "weights() must return a copy" in errors[0]
        assert not [event for event in events if isinstance(event, Published) and event.version == 1]


class Model:
    """Weights that are no tree of arrays."""


class HandsOutItself(Learner):
    """Trains in place on what it publishes, which has no checksum."""

    def train(self, batch: Batch) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(("by_reference", "degree"), [(True, 1), (True, 0), (False, 1)])
def test_weights_that_nobody_can_compare_are_remarked_on_once(by_reference: bool, degree: int) -> None:
    events: list[Event] = []
    learner: Any = HandsOutItself(Model())
    executor = LearnerExecutor(learner, lambda *_: None, events.append, by_reference=by_reference)
    executor.publish(0)
    for version in range(3):
        executor.train(Batch(version, (), degree))
        executor.publish(version + 1)
    told = [event.text for event in events if isinstance(event, Notice)]
    assert len(told) == (by_reference and degree > 0)
    assert all("returns a Model, which has no checksum" in text for text in told)
    assert not [event for event in events if isinstance(event, Broken)]


def test_tensors_of_a_snapshot_are_copies() -> None:
    class Live(Trains):
        def state_dict(self) -> Any:
            return {"net": OrderedDict(w=self._weights["w"]), "all": [self._weights["w"]]}

    events: list[Event] = []
    learner: Any = Live({"w": torch.ones(3)})
    executor = LearnerExecutor(learner, lambda *_: None, events.append)
    executor.snapshot()
    executor.train(Batch(0, (), 0))
    snapshot = events[0]
    assert isinstance(snapshot, SnapshotTaken)
    for value in (snapshot.state["net"]["w"], snapshot.state["all"][0], snapshot.weights["w"]):
        assert torch.equal(value, torch.ones(3))
