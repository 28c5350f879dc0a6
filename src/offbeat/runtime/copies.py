"""Copies of state trees, in memory that is kept: fresh memory takes many times as long to fill."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from typing import Any

import numpy as np

from offbeat.types import Array, StateTree

_SPARE = 1.25
"""A block that has grown too small is followed by one with room, for states that grow, such as replays."""
CONTAINERS = (dict, OrderedDict, Counter)
_Path = tuple[Any, ...]


class Copies:
    """Copies trees of arrays and tensors to the CPU; each place of a tree has its block of memory.

    What `copy` returned is overwritten by the next call: one copy at a time is in use. Containers are new,
    arrays that share memory share it in the copy too. Not thread-safe.
    """

    def __init__(self) -> None:
        self._blocks: dict[_Path, Array] = {}  # of the copy before
        self._used: dict[_Path, Array] = {}
        self._known: dict[Any, Array] = {}  # memory that was copied -> block

    def copy(self, tree: StateTree) -> StateTree:
        """Return a copy, in the memory of the one before where that fits."""
        self._used, self._known = {}, {}
        copied = self._copy(tree, ())
        self._blocks, self._known = self._used, {}
        return copied

    def _copy(self, value: Any, path: _Path) -> Any:
        torch: Any = sys.modules.get("torch")
        kind = type(value)
        if kind is np.ndarray:
            return self._copy_array(value, path)
        if torch is not None and isinstance(value, torch.Tensor):
            return self._copy_tensor(value, path, torch)
        if isinstance(value, np.ndarray):
            return value.copy()
        if kind in CONTAINERS:
            return kind({name: self._copy(item, (*path, name)) for name, item in value.items()})
        if kind in (list, tuple):
            return kind(self._copy(item, (*path, index)) for index, item in enumerate(value))
        return value

    def _copy_array(self, array: Array, path: _Path) -> Array:
        if array.dtype.kind not in "biufc":
            return array.copy()
        memory = ("cpu", array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)
        block, is_new = self._block(memory, array.nbytes, path)
        copied = block[: array.nbytes].view(array.dtype).reshape(array.shape)
        if is_new:
            np.copyto(copied, array)
        return copied

    def _copy_tensor(self, tensor: Any, path: _Path, torch: Any) -> Any:
        tensor, size = tensor.detach(), tensor.element_size()
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
        if not is_plain or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return tensor.to("cpu", copy=True)
        strides = tuple([size * stride for stride in tensor.stride()])
        memory = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), strides, size)
        num_bytes = size * tensor.numel()
        block, is_new = self._block(memory, num_bytes, path)
        copied = torch.from_numpy(block[:num_bytes]).view(tensor.dtype).reshape(tensor.shape)
        return copied.copy_(tensor) if is_new else copied

    def _block(self, memory: Any, num_bytes: int, path: _Path) -> tuple[Array, bool]:
        """Return the block for some memory, and False if the memory is in it already."""
        known = self._known.get(memory)
        if known is not None:
            return known, False
        block = self._blocks.get(path)
        if block is None:
            block = np.empty(num_bytes, np.uint8)
        elif len(block) < num_bytes:
            block = np.empty(int(_SPARE * num_bytes), np.uint8)
        self._used[path] = self._known[memory] = block
        return block, True
