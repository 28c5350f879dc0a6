"""Torch tensors and the state of torch optimizers in checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.checkpoint import digest, pack, unpack
from offbeat.errors import CheckpointError
from tests.unit.test_checkpoint_codec import through_disk

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    whole = torch.arange(12).to(getattr(torch, name)).reshape(3, 4)
    tree = {"whole": whole, "turned": whole.T, "zero-d": whole[2, 3], "empty": whole[:0]}
    back: Any = through_disk(tree, tmp_path)
    for key, before in tree.items():
        assert type(back[key]) is torch.Tensor
        assert (back[key].dtype, back[key].shape) == (before.dtype, before.shape)
        assert raw(back[key]) == raw(before)


def test_parameters_come_back_as_tensors_that_can_be_written_to(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 1)
    back: Any = through_disk({"p": layer.weight}, tmp_path)["p"]  # type: ignore[index]
    assert (type(back), back.requires_grad) == (torch.Tensor, False)
    before = back.clone()
    back += 1
    assert torch.equal(back, before + 1)
    assert torch.equal(layer.weight, before), "what was saved is not what was loaded"


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.LBFGS])
def test_state_of_an_optimizer_comes_back(make: Any, tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = make(layer.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    schedule.step()
    tree = {"net": layer.state_dict(), "opt": optimizer.state_dict(), "schedule": schedule.state_dict()}
    back: Any = through_disk(tree, tmp_path)
    assert type(back["net"]) is OrderedDict
    assert back["schedule"]["milestones"] == Counter({3: 1, 5: 1})
    assert repr(back["opt"]) == repr(tree["opt"])
    layer.load_state_dict(back["net"])
    optimizer.load_state_dict(back["opt"])
    schedule.load_state_dict(back["schedule"])
    optimizer.step(closure)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
    ],
    ids=["complex", "sparse", "meta"],
)
def test_what_has_no_dense_array_is_refused_by_its_place(value: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"learner\['a'\]\[1\] is a torch.Tensor that .* dense tensor"):
        pack({"a": [0, value]}, root="learner")


@pytest.mark.parametrize("dtype", ["float64", "no_such_dtype", "nn", "uint16"])
def test_tensor_of_another_dtype_than_its_array_is_refused(dtype: str) -> None:
    with pytest.raises(CheckpointError, match="not a state that offbeat packed"):
        unpack({"tensor": ["a0", dtype]}, {"a0": np.ones(2, "float32")})


def test_digest_sees_a_bit_of_a_tensor() -> None:
    one = torch.ones(3, dtype=torch.bfloat16)
    other = one.clone()
    other.view(torch.int16)[1] ^= 1
    assert digest(pack([one])[1]) != digest(pack([other])[1])
    assert digest(pack([one])[1]) == digest(pack([one.clone()])[1])


def test_states_without_tensors_need_no_torch() -> None:
    skeleton = json.dumps(pack({"w": [1, None], "o": OrderedDict(a=1)})[0])
    code = (
        "import json, sys; from offbeat.checkpoint import pack, unpack; "
        f"pack(unpack(json.loads({skeleton!r}), {{}})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
