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
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError
from offbeat.types import Array, ArraySpec

_ALIGN = 64


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


_serials = itertools.count()
_HAS_MEMFD = hasattr(os, "memfd_create")


class Address(NamedTuple):
    """All that another process needs to open a block: four numbers.

    The serial number is there because descriptors are used again: a reader that has opened a block must not
    take a later one for it.
    """

    pid: int
    descriptor: int
    size: int
    serial: int

    @property
    def path(self) -> str:
        """The file behind the block."""
        if _HAS_MEMFD:
            return f"/proc/{self.pid}/fd/{self.descriptor}"
        return os.path.join(tempfile.gettempdir(), f"offbeat-{self.pid}-{self.serial}")

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @staticmethod
    def parse(text: str) -> Address:
        """Read an address from a command line."""
        return Address(*map(int, text.split(":")))


class Block:
    """A piece of memory that several processes map.

    ``bytes`` and ``memory`` are its bytes, ``words`` the same as 64-bit numbers.
    """

    def __init__(self, descriptor: int, address: Address, is_owner: bool) -> None:
        self.address = address
        self.size = address.size
        self._map = mmap.mmap(descriptor, address.size)
        # The owner's descriptor is what others open the block through; a reader needs only its map.
        self._descriptor = descriptor if is_owner else None
        if not is_owner:
            os.close(descriptor)
        self.memory = memoryview(self._map)
        self.words = self.memory.cast("q")
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @staticmethod
    def create(size: int) -> Block:
        """Make a block of at least ``size`` bytes with its pages in memory."""
        size, serial = max(_aligned(size), mmap.PAGESIZE), next(_serials)
        if _HAS_MEMFD:
            descriptor = os.memfd_create("offbeat")
        else:
            path = Address(os.getpid(), 0, size, serial).path
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, size)
        block = Block(descriptor, Address(os.getpid(), descriptor, size, serial), is_owner=True)
        block.bytes[:: mmap.PAGESIZE] = 0  # touch each page once, so that no segment pays for it
        return block

    @staticmethod
    def open(address: Address) -> Block:
        """Map a block that another process made; OSError when that process has ended."""
        return Block(os.open(address.path, os.O_RDWR), address, is_owner=False)

    def grow(self, size: int) -> Block:
        """Return the same memory with more behind it, in the place of this block; others open it again."""
        size, descriptor, self._descriptor = _aligned(size), self._descriptor, None
        assert descriptor is not None, "a block is made larger by the process that made it"
        os.ftruncate(descriptor, size)
        larger = Block(descriptor, self.address._replace(size=size), is_owner=True)
        larger.bytes[self.size :: mmap.PAGESIZE] = 0
        self.close()
        return larger

    def close(self) -> None:
        """Unmap; the memory is freed when the last process does so."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a view is still alive: the map goes when it does
            self.words.release()
            self.memory.release()
            self._map.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            if not _HAS_MEMFD:
                os.unlink(self.address.path)


def num_bytes_of(specs: Mapping[str, ArraySpec]) -> int:
    """Room that arrays need in a block."""
    return sum(_aligned(spec.num_bytes) for spec in specs.values())


def arrays_in(block: Block, specs: Mapping[str, ArraySpec], begin: int = 0) -> dict[str, Array]:
    """Views of a block as the arrays of ``specs``, the first one at byte ``begin``."""
    views = {}
    for name, spec in specs.items():
        part = block.bytes[begin : begin + spec.num_bytes]
        views[name] = part.view(np.dtype(spec.dtype)).reshape(spec.shape)
        begin += _aligned(spec.num_bytes)
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

    def write(self, memory: memoryview) -> None:
        """Copy everything to the beginning of ``memory``."""
        parts = self.parts
        struct.pack_into(f"{1 + len(parts)}q", memory, 0, len(parts), *(part.nbytes for part in parts))
        begin = _table_bytes(len(parts))
        for part in parts:
            memory[begin : begin + part.nbytes] = part
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


def pickled_role(assignment: Any, name: str, place: str) -> bytes:
    """Pickle what a role is made from, for a process or an actor."""
    try:
        return bytes(cloudpickle.dumps(assignment))
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to {place} ({error}): make it there with PerWorker(make), "
            "or use runtime='threads'"
        ) from error


def unpack_object(own: NDArray[np.uint8]) -> Any:
    """Rebuild an object from its bytes, which its arrays keep using: pass a private copy."""
    memory = own.data
    (count,) = struct.unpack_from("q", memory)
    parts, begin = [], _table_bytes(count)
    for size in struct.unpack_from(f"{count}q", memory, 8):
        parts.append(memory[begin : begin + size])
        begin += _aligned(size)
    return pickle.loads(parts[0], buffers=parts[1:])


def copy_object(shared: NDArray[np.uint8]) -> Any:
    """Rebuild an object from shared bytes, which may be written again afterwards."""
    has_arrays = struct.unpack_from("q", shared.data)[0] > 1
    return unpack_object(shared.copy() if has_arrays else shared)


# ---------------------------------------------------------------- weights


def checksum(data: NDArray[np.uint8]) -> int:
    """Sum of the 64-bit words of ``data`` (whole words), wrapping: at memory speed."""
    return int(np.add.reduce(data.view(np.uint64), dtype=np.uint64)) & 0x7FFFFFFFFFFFFFFF


_SEQUENCE, _VERSION, _SIZE, _CHECKSUM = range(4)
_HEAD_BYTES = _ALIGN
_HEAD_WORDS = 4


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
    def address(self) -> Address | None:
        """Address for readers, which changes when the weights outgrow their block; None before the first."""
        return self._block.address if self._block is not None else None

    def publish(self, version: int, weights: Any) -> int:
        """Write a version and return its size; one that outgrows the block goes to a larger one.

        The new address counts from when the weights are there. The old block stays, because its address may
        be on the way to a reader. Blocks grow by half at least, so that all outgrown ones together are no
        larger than twice the last.
        """
        packed, block = pack_object(weights), self._block
        num_bytes = 2 * (_HEAD_BYTES + packed.num_bytes)
        if block is not None and block.size >= num_bytes:
            self._write(block, version, packed)
            return packed.num_bytes
        larger = Block.create(num_bytes if block is None else max(num_bytes, block.size * 3 // 2))
        try:
            self._write(larger, version, packed)
        except BaseException:
            larger.close()
            raise
        self._block = larger
        if block is not None:
            self._outgrown.append(block)
        return packed.num_bytes

    def _write(self, block: Block, version: int, packed: Packed) -> None:
        half = _half(block, self._turn)
        head, body = half[:_HEAD_BYTES].view(np.int64), half[_HEAD_BYTES : _HEAD_BYTES + packed.num_bytes]
        head[_SEQUENCE] |= 1  # which it is already where the last writing failed
        packed.write(body.data)
        head[_VERSION], head[_SIZE], head[_CHECKSUM] = version, packed.num_bytes, checksum(body)
        head[_SEQUENCE] += 1
        self._turn = 1 - self._turn

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
    return _read_half(max(halves, key=lambda h: _newest(h[:_HEAD_BYTES].view(np.int64))), at_least)


def read_version(block: Block, version: int) -> Any | None:
    """Copy this very version, in a list; None when it is no longer there, or has to be tried again."""
    for half in (_half(block, 0), _half(block, 1)):
        if int(half[:_HEAD_BYTES].view(np.int64)[_VERSION]) == version:
            found = _read_half(half, version)
            if found is not None and found[0] == version:
                return [found[1]]
    return None


def _read_half(half: NDArray[np.uint8], at_least: int) -> tuple[int, Any] | None:
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
    words, second = block.words, block.size // 2 // _ALIGN * _ALIGN // 8
    return max(_newest(words[:_HEAD_WORDS]), _newest(words[second : second + _HEAD_WORDS]))


def _newest(head: memoryview | NDArray[np.int64]) -> int:
    return int(head[_VERSION]) if head[_SIZE] and head[_SEQUENCE] % 2 == 0 else -1
