"""Items in memory: one slot each, written in turn and read at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.types import Array, ArraySpec

VERSION = "#version"
"""Name of the version that every item carries beside its own arrays."""
LINE_BYTES = 64
"""Memory comes in pieces of this size."""


class Rings:
    """The arrays of ``capacity`` items, by name.

    An array of more than a cache line per item has a ring of its own. Smaller ones lie side by side in one
    record per item, together with its version: drawing an item at random then waits for memory once and not
    once for every number it has.
    """

    def __init__(self, spec: Mapping[str, ArraySpec], capacity: int) -> None:
        self._record = _record(spec)
        self._records = aligned_zeros(capacity * self._record.itemsize).view(self._record)
        self._large = {
            name: np.zeros((capacity, *array.shape), np.dtype(array.dtype))
            for name, array in spec.items()
            if name not in self._small
        }
        self.spec = {name: ArraySpec(array.shape, np.dtype(array.dtype).str) for name, array in spec.items()}

    @property
    def _small(self) -> tuple[str, ...]:
        return self._record.names or ()

    @staticmethod
    def num_bytes(spec: Mapping[str, ArraySpec], capacity: int) -> int:
        """Memory that the items take."""
        record = _record(spec)
        large = sum(array.num_bytes for name, array in spec.items() if name not in (record.names or ()))
        return capacity * (large + record.itemsize) + LINE_BYTES

    def view(self, name: str) -> Array:
        """All slots of one array ``[capacity, ...]``, to be read and written in place."""
        return self._large[name] if name in self._large else self._records[name]

    @property
    def versions(self) -> NDArray[np.int64]:
        """Versions of all slots ``[capacity]``, to be read and written in place."""
        return self._records[VERSION]

    def gather(self, index: NDArray[np.int64]) -> tuple[dict[str, Array], NDArray[np.int64]]:
        """Copies of the items in these slots, ``[B, ...]`` by name, and their versions ``[B]``."""
        records = self._records.take(index)
        items = {
            name: self._large[name].take(index, axis=0) if name in self._large else records[name].copy()
            for name in self.spec
        }
        return items, records[VERSION].copy()


def aligned_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that begin on a cache line."""
    raw = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    offset = -raw.ctypes.data % LINE_BYTES
    return raw[offset : offset + num_bytes]


def _record(spec: Mapping[str, ArraySpec]) -> np.dtype[np.void]:
    """The version and all small arrays, the widest numbers first, so that each is aligned."""
    version: tuple[str, np.dtype[Any], tuple[int, ...]] = (VERSION, np.dtype(np.int64), ())
    small = [(name, np.dtype(a.dtype), a.shape) for name, a in spec.items() if a.num_bytes <= LINE_BYTES]
    fields = sorted([version, *small], key=lambda field: -field[1].itemsize)
    offsets = np.cumsum([0] + [kind.itemsize * int(np.prod(shape)) for _, kind, shape in fields]).tolist()
    return np.dtype(
        {
            "names": [name for name, _, _ in fields],
            "formats": [(kind, shape) for _, kind, shape in fields],
            "offsets": offsets[:-1],
            "itemsize": _padded(offsets[-1]),
        }
    )


def _padded(size: int) -> int:
    """Next size at which no record lies across more cache lines than it needs."""
    if size > LINE_BYTES:
        return -(-size // LINE_BYTES) * LINE_BYTES
    return 1 << (size - 1).bit_length()
