"""Torch tensors in checkpoints. Torch is not imported to write them, for what holds none needs no torch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from offbeat.errors import CheckpointError
from offbeat.types import Array

_PLAIN = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
# What numpy has no dtype for travels as unsigned integers of the same size.
_CARRIERS = {name: name for name in _PLAIN} | {"bfloat16": "uint16"}
_CARRIERS |= {f"float8_{kind}": "uint8" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}


def is_tensor(value: object) -> bool:
    """Return True for a torch tensor or parameter; False for subclasses that hold more than numbers."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def to_array(tensor: Any, path: str) -> tuple[str, Array]:
    """Return a tensor's dtype by name and its values on the CPU, which share its memory where they can.

    CheckpointError, with ``path`` in it, for what has no dense array: complex, sparse, quantized or meta.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    carrier = _CARRIERS.get(name)
    try:
        if carrier is None:
            raise TypeError(f"dtype {tensor.dtype}")
        if carrier != name:
            tensor = tensor.detach().view(getattr(sys.modules["torch"], carrier))
        return name, np.asarray(tensor.numpy(force=True), order="C")
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path} is a torch.Tensor that a checkpoint cannot hold ({error}); "
            "give it as a dense tensor of a bool, integer or float dtype"
        ) from error


def to_tensor(array: Array, name: str) -> Any:
    """Return the tensor that `to_array` wrote; ValueError when the two do not belong together."""
    if _CARRIERS.get(name) != array.dtype.name:
        raise ValueError(f"an array of {array.dtype} cannot be a tensor of {name!r}")
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise CheckpointError(f"the checkpoint holds torch tensors: install torch ({error})") from error
    tensor = torch.from_numpy(array)
    return tensor if array.dtype.name == name else tensor.view(getattr(torch, name))
