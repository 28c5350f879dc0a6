"""Shared memory for the process runtime: blocks, packed objects, and the weights channel.

A block is an anonymous memory file that another process of the same user opens through the owner's
descriptor table, so that nothing is left behind however the processes die. Where the system has no such
files (other than Linux) it is a temporary file, removed on close.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from offbeat.types import Array, ArraySpec

_ALIGN = 64


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


_serials = itertools.count()


class Block:
    """A piece of memory that several processes map. ``address`` is what another process opens it by.

    An address ends in a serial number: descriptors are used again, and a reader that has opened a block
    must not take a later one for it.
    """

    def __init__(self, descriptor: int, path: str, size: int, serial: int, is_owner: bool) -> None:
        self.address = f"{path}:{size}:{serial}"
        self.size = size
        self._path = path
        self._map = mmap.mmap(descriptor, size)
        # The owner's descriptor is what others open the block through; a reader needs only its map.
        self._descriptor = descriptor if is_owner else None
        if not is_owner:
            os.close(descriptor)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @staticmethod
    def create(size: int) -> Block:
        """Make a block of at least ``size`` bytes with its pages in memory."""
        size = max(_aligned(size), mmap.PAGESIZE)
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("offbeat")
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            descriptor, path = tempfile.mkstemp(prefix="offbeat-")
        os.ftruncate(descriptor, size)
        block = Block(descriptor, path, size, next(_serials), is_owner=True)
        block.bytes[:: mmap.PAGESIZE] = 0  # touch each page once, so that no segment pays for it
        return block

    @staticmethod
    def open(address: str) -> Block:
        """Map a block that another process made."""
        path, size, serial = address.rsplit(":", 2)
        return Block(os.open(path, os.O_RDWR), path, int(size), int(serial), is_owner=False)

    def close(self) -> None:
        """Unmap; the memory is freed when the last process does so."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a view is still alive: the map goes when it does
            self._map.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            if not self._path.startswith("/proc/"):
                os.unlink(self._path)


class OpenBlocks:
    """Blocks of other processes, opened once."""

    def __init__(self) -> None:
        self._open: dict[str, Block] = {}

    def __getitem__(self, address: str) -> Block:
        if address not in self._open:
            self._open[address] = Block.open(address)
        return self._open[address]


def layout(specs: Mapping[str, ArraySpec]) -> tuple[dict[str, int], int]:
    """Place arrays one after the other; return their offsets and the total size in bytes."""
    offsets, end = {}, 0
    for name, spec in specs.items():
        offsets[name] = end
        end += _aligned(spec.num_bytes)
    return offsets, end


def arrays_in(block: Block, specs: Mapping[str, ArraySpec]) -> dict[str, Array]:
    """Views of a block as the arrays of ``specs``."""
    offsets, _ = layout(specs)
    views = {}
    for name, spec in specs.items():
        part = block.bytes[offsets[name] : offsets[name] + spec.num_bytes]
        views[name] = part.view(np.dtype(spec.dtype)).reshape(spec.shape)
    return views


# ---------------------------------------------------------------- any object in shared memory


@dataclass(frozen=True, slots=True)
class Packed:
    """An object as bytes that describe themselves: a table of sizes, a pickle, its large buffers."""

    parts: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        """Room it needs in a block."""
        return _table_bytes(len(self.parts)) + sum(_aligned(part.nbytes) for part in self.parts)

    def write(self, target: NDArray[np.uint8]) -> None:
        """Copy everything to the beginning of ``target``."""
        begin = _table_bytes(len(self.parts))
        table = target[:begin].view(np.int64)
        table[0] = len(self.parts)
        for index, part in enumerate(self.parts):
            table[1 + index] = part.nbytes
            target[begin : begin + part.nbytes] = np.frombuffer(part, np.uint8)
            begin += _aligned(part.nbytes)


def _table_bytes(num_parts: int) -> int:
    return _aligned(8 * (1 + num_parts))


def pack_object(value: Any) -> Packed:
    """Pickle with arrays out of band, so that they are copied once. For memory only, never for files."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    except (pickle.PicklingError, AttributeError, TypeError):
        buffers.clear()
        head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return Packed((memoryview(head), *(buffer.raw() for buffer in buffers)))


def unpack_object(own: NDArray[np.uint8]) -> Any:
    """Rebuild an object from its bytes, which its arrays go on using: pass a private copy."""
    count = int(own[:8].view(np.int64)[0])
    sizes = own[8 : 8 * (1 + count)].view(np.int64)
    parts, begin = [], _table_bytes(count)
    for size in map(int, sizes):
        parts.append(own[begin : begin + size])
        begin += _aligned(size)
    return pickle.loads(parts[0].data, buffers=[part.data for part in parts[1:]])


# ---------------------------------------------------------------- weights


def checksum(data: NDArray[np.uint8]) -> int:
    """Sum of the 64-bit words of ``data`` (whole words), wrapping: at memory speed."""
    return int(np.add.reduce(data.view(np.uint64), dtype=np.uint64)) & 0x7FFFFFFFFFFFFFFF


_SEQUENCE, _VERSION, _SIZE, _CHECKSUM = range(4)
_HEAD_BYTES = _ALIGN


class WeightsWriter:
    """Publishes weights through a block with two halves, written in turn.

    Each half has a sequence word that is odd while it is being written. A reader copies the newer half
    and looks again: if the word moved or the checksum differs, it reads once more.
    """

    def __init__(self) -> None:
        self._block: Block | None = None
        self._outgrown: list[Block] = []
        self._turn = 0

    @property
    def address(self) -> str:
        """Where readers find the weights; changes when they outgrow their block."""
        assert self._block is not None, "nothing was published yet"
        return self._block.address

    def publish(self, version: int, weights: Any) -> None:
        """Write a version."""
        packed = pack_object(weights)
        room = _HEAD_BYTES + packed.num_bytes
        if self._block is None or self._block.size < 2 * room:
            self._grow(2 * room)
        assert self._block is not None
        half = _half(self._block, self._turn)
        head, body = half[:_HEAD_BYTES].view(np.int64), half[_HEAD_BYTES:room]
        head[_SEQUENCE] += 1
        packed.write(body)
        head[_VERSION], head[_SIZE], head[_CHECKSUM] = version, packed.num_bytes, checksum(body)
        head[_SEQUENCE] += 1
        self._turn = 1 - self._turn

    def _grow(self, num_bytes: int) -> None:
        """Move to a larger block. The old one stays: its address may be on the way to a reader.

        Blocks grow by half at least, so that all outgrown ones together are no larger than twice the last.
        """
        if self._block is not None:
            self._outgrown.append(self._block)
            num_bytes = max(num_bytes, self._block.size * 3 // 2)
        self._block = Block.create(num_bytes)

    def close(self) -> None:
        """Free the memory; a reader that still has it open keeps its map."""
        for block in (*self._outgrown, *([self._block] if self._block is not None else [])):
            block.close()
        self._outgrown, self._block = [], None


def _half(block: Block, index: int) -> NDArray[np.uint8]:
    size = block.size // 2 // _ALIGN * _ALIGN
    return block.bytes[index * size : (index + 1) * size]


def read_weights(block: Block, at_least: int) -> tuple[int, Any] | None:
    """Copy the newest version, if it is ``at_least`` this one; None when it has to be tried again."""
    halves = [_half(block, index) for index in (0, 1)]
    half = max(halves, key=lambda h: _newest(h[:_HEAD_BYTES].view(np.int64)))
    head = half[:_HEAD_BYTES].view(np.int64)
    before, version, size = int(head[_SEQUENCE]), int(head[_VERSION]), int(head[_SIZE])
    if before % 2 or size == 0 or version < at_least:
        return None
    own = half[_HEAD_BYTES : _HEAD_BYTES + size].copy()
    if int(head[_SEQUENCE]) != before or checksum(own) != int(head[_CHECKSUM]):
        return None
    return version, unpack_object(own)


def newest_version(block: Block) -> int:
    """The newest version that is wholly there; -1 when none is."""
    return max(_newest(_half(block, index)[:_HEAD_BYTES].view(np.int64)) for index in (0, 1))


def _newest(head: NDArray[np.int64]) -> int:
    return int(head[_VERSION]) if head[_SIZE] and head[_SEQUENCE] % 2 == 0 else -1
