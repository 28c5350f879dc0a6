"""Copies of learners: what they share, what they do not, and when memory is used again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest

from offbeat.runtime.copies import Copies


def addresses(tree: Any) -> list[int]:
    if isinstance(tree, dict):
        return [address for value in tree.values() for address in addresses(value)]
    if isinstance(tree, list | tuple):
        return [address for value in tree for address in addresses(value)]
    if isinstance(tree, np.ndarray):
        return [tree.__array_interface__["data"][0]]
    return [tree.data_ptr()] if hasattr(tree, "data_ptr") else []


def state() -> dict[str, Any]:
    moments = OrderedDict(mean=np.arange(6.0).reshape(2, 3), count=np.array(3), none=np.zeros((0, 4)))
    return {
        "w": np.ones(1000, np.float32),
        "moments": moments,
        "seen": Counter(a=1),
        "rest": (1, [None, "x"]),
    }


def test_copies_are_equal_and_share_no_memory_with_the_original() -> None:
    live = state()
    copied = Copies().copy(live)
    assert not set(addresses(copied)) & set(addresses([live["w"], live["moments"]["mean"]]))
    live["w"] += 1.0
    live["moments"]["mean"][:] = 0.0
    live["moments"]["count"][...] = 7
    live["seen"]["a"] = 5
    assert copied["w"].tolist() == [1.0] * 1000 and copied["w"].dtype == np.float32
    assert copied["moments"]["mean"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (copied["moments"]["count"].tolist(), copied["moments"]["none"].shape) == (3, (0, 4))
    assert [type(value) for value in copied.values()] == [np.ndarray, OrderedDict, Counter, tuple]
    assert (copied["seen"], copied["rest"]) == ({"a": 1}, (1, [None, "x"]))


def test_next_copy_is_in_the_same_memory() -> None:
    copies, live = Copies(), state()
    first = addresses(copies.copy(live))
    live["new"] = np.zeros(3)
    live["moments"]["mean"] = live["moments"]["mean"].T
    copied = copies.copy(live)
    assert set(first) < set(addresses(copied)), "whatever came before and after it"
    assert copied["moments"]["mean"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_array_that_grows_has_room_to_grow_further() -> None:
    copies = Copies()
    places = [addresses(copies.copy({"ring": np.ones(size)}))[0] for size in (1000, 1100, 1200, 1300, 900)]
    assert places[0] != places[1] == places[2] == places[3] == places[4]


def test_memory_of_what_is_gone_is_freed() -> None:
    copies = Copies()
    copies.copy(state())
    copies.copy({"w": np.ones(1)})
    assert len(copies._blocks) == 1


def test_what_shares_memory_is_copied_once() -> None:
    w = np.arange(12.0).reshape(3, 4)
    copied = Copies().copy(
        [{"w": w}, {"actor": w, "half": w[:2], "turned": w.T, "as_ints": w.view(np.int64)}]
    )
    first, second = copied
    places = addresses(second)
    assert addresses(first) * 2 == [places[0], places[3]]
    assert len(set(places)) == 3, "other parts of it have copies of their own"
    assert second["turned"].tolist() == w.T.tolist() and second["half"].tolist() == w[:2].tolist()
    assert second["as_ints"].tolist() == w.view(np.int64).tolist()


@pytest.mark.parametrize(
    "array", [np.array([{}, 1], object), np.array(["a", "bc"]), np.ma.array([1, 2], mask=[0, 1])]
)
def test_arrays_that_no_checkpoint_can_hold_keep_their_kind(array: Any) -> None:
    copied = Copies().copy({"x": array})["x"]
    assert type(copied) is type(array) and copied.dtype == array.dtype and copied is not array


def test_tensors_are_copied_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    w = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    live = {
        "w": w,
        "view": w.detach().numpy(),
        "bf16": torch.ones(4, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "none": torch.zeros(0, 2),
        "wide": torch.ones(1).expand(3),
        "turned": w.detach().T,
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "bool": torch.tensor([True, False]),
    }
    copies = Copies()
    copied = copies.copy(live)
    assert copied["w"].data_ptr() == addresses(copied["view"])[0] != w.data_ptr()
    assert not copied["w"].requires_grad and type(copied["w"]) is torch.Tensor
    again = copies.copy(live)
    with torch.no_grad():
        w.zero_()
    for name, tensor in live.items():
        if name not in ("w", "view", "turned"):
            assert (
                torch.equal(again[name].to_dense(), tensor.to_dense()) and again[name].dtype == tensor.dtype
            )
    assert again["w"].tolist() == [[0, 1, 2], [3, 4, 5]] == again["turned"].T.tolist()
    assert again["w"].data_ptr() == copied["w"].data_ptr()
