"""Files that are either whole or absent: writing, syncing, hashing, moving into place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from offbeat.errors import CheckpointError
from offbeat.reading import ARRAYS_BYTES, open_file
from offbeat.types import Array

Listed = dict[str, tuple[int, str]]
"""Size and SHA-256 of files by name."""
_PIECE_BYTES = 1 << 23
_ALIGN = 8
_LOOK_BYTES = 1 << 12  # most arrays that differ do so here
_KINDS = {"b": "BOOL", "i": "I", "u": "U", "f": "F"}


class Hash(Protocol):
    """Takes the names and bytes of arrays, in order."""

    def begin(self, name: str, array: Array) -> None:
        """Begin an array."""
        ...

    def update(self, data: memoryview) -> None:
        """Take the next bytes of it."""
        ...


def _nothing() -> None:
    """Go on."""


def write_bytes(path: Path, data: bytes, listed: Listed | None = None) -> None:
    """Write a file, wait until the disk has it, and enter it into the list."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if listed is not None:
        listed[path.name] = (len(data), hashlib.sha256(data).hexdigest())


def write_arrays(
    path: Path,
    arrays: Mapping[str, Array],
    listed: Listed | None = None,
    also: Hash | None = None,
    check: Callable[[], None] = _nothing,
) -> None:
    """Write arrays (C-contiguous, little-endian) as safetensors, and enter the file into the list.

    Waits until the disk has them. They are read once: hashed as they are written, in `order`, by ``also``
    too. ``check`` is called between pieces and may raise.
    """
    total, head = hashlib.sha256(), _head(arrays)
    with path.open("wb") as file:
        file.write(head)
        total.update(head)
        for name in order(arrays):
            if also is not None:
                also.begin(name, arrays[name])
            for piece in _pieces(arrays[name]):
                check()
                file.write(piece)
                total.update(piece)
                if also is not None:
                    also.update(piece)
        size = file.tell()
    sync(path)
    if listed is not None:
        listed[path.name] = (size, total.hexdigest())


def order(arrays: Mapping[str, Array]) -> list[str]:
    """Return the names in the order of a safetensors file: each array is aligned to its items."""
    return sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def are_equal(one: Array, other: Array) -> bool:
    """Return True if two C-contiguous arrays of one shape and dtype have the same bytes."""
    if one.__array_interface__["data"] == other.__array_interface__["data"]:
        return True
    for piece, same in zip(_pieces(one), _pieces(other), strict=True):
        mine, others = np.frombuffer(piece, np.uint8), np.frombuffer(same, np.uint8)
        if not (np.array_equal(mine[:_LOOK_BYTES], others[:_LOOK_BYTES]) and np.array_equal(mine, others)):
            return False
    return True


def _pieces(array: Array) -> Iterator[memoryview]:
    data = as_bytes(array)
    return (data[begin : begin + _PIECE_BYTES] for begin in range(0, len(data), _PIECE_BYTES))


def _head(arrays: Mapping[str, Array]) -> bytes:
    """Return what a safetensors file begins with: the length of a JSON object, padded, and the object."""
    entries, end = {}, 0
    for name in order(arrays):
        array = arrays[name]
        kind, begin, end = _KINDS[array.dtype.kind], end, end + array.nbytes
        dtype = kind if kind == "BOOL" else f"{kind}{8 * array.itemsize}"
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def read_arrays(path: Path) -> dict[str, Array]:
    """Read a safetensors file into arrays that may be written to."""
    try:
        return safetensors.numpy.load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is not a safetensors file ({error})") from error


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new, never a mixture."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        write_bytes(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has this file, or the names in this directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """SHA-256 of a file's content (hex)."""
    with open_file(path, ARRAYS_BYTES) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_tree(path: Path) -> None:
    """Remove a directory as far as it lets itself be removed: leftovers are tried again next time."""
    shutil.rmtree(path, ignore_errors=True)


def process_alive(pid: int) -> bool:
    """Return True if a process of this number exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
