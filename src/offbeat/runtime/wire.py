"""Messages between a driver and its collectors' processes: fixed-size records, and segments in blocks.

A segment lies in a block that the worker owns: a word that says whether it is in use, the arrays that the
collector wrote in place, and a pickle with everything else. The worker writes it and sends its address; the
driver clears the word when the segment is no longer needed. So no message waits for an answer.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from offbeat.runtime.shared import Address, Block, Packed, arrays_in, copy_object, layout, pack_object
from offbeat.types import Array, ArraySpec, Episodes, Segment, StateTree, Ticket

TICKET, WEIGHTS = 1, 2
"""Kinds of records to a worker: a ticket, or the address of another block of weights."""
SEGMENT, UP, DOWN, LOST = 1, 2, 3, 4
"""Kinds of `ToDriver`: a segment, or (with a text or a pickle behind the record) a start or an end."""
MOST_SENT = 64
"""Tickets that are with a worker at most: they fit into its pipe, so that no write blocks."""
_READ_BYTES = 1 << 16
_HEAD_BYTES = 64
_FIRST_TAIL_BYTES = 1 << 12
_BLOCKS_LOOKED_AT = 8
_TO_WORKER = struct.Struct("6q")
_TO_DRIVER = struct.Struct("8qd")


class ToDriver(NamedTuple):
    """A record to the driver. ``ticket`` is the capacity in one of kind `UP`."""

    kind: int
    ticket: int = 0
    version: int = 0
    slot: int = 0
    descriptor: int = 0
    size: int = 0
    serial: int = 0
    num_bytes: int = 0
    collect_s: float = 0.0


def pack_ticket(ticket: Ticket) -> bytes:
    """Pack a ticket for its collector's worker."""
    return _TO_WORKER.pack(
        TICKET, ticket.number, ticket.version, ticket.deadline, ticket.seed, ticket.attempt
    )


def pack_weights(address: Address) -> bytes:
    """Pack the address of the weights."""
    return _TO_WORKER.pack(WEIGHTS, *address, 0)


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a pipe, waiting for its reader where necessary."""
    while data:
        data = data[os.write(descriptor, data) :]


class WorkerInput:
    """The worker's end: reads whole records, however they were cut on their way."""

    def __init__(self, descriptor: int, collector: int) -> None:
        self._descriptor = descriptor
        self._collector = collector
        self._rest = b""

    def read(self) -> list[Ticket | Address]:
        """Wait for tickets and addresses of weights; EOFError when the driver says no more."""
        while True:
            data = os.read(self._descriptor, _READ_BYTES)
            if not data:
                raise EOFError
            data = self._rest + data
            end = len(data) - len(data) % _TO_WORKER.size
            self._rest = data[end:]
            if end:
                return [self._unpack(*fields) for fields in _TO_WORKER.iter_unpack(data[:end])]

    def _unpack(self, kind: int, *fields: int) -> Ticket | Address:
        if kind == WEIGHTS:
            return Address(*fields[:4])
        number, version, deadline, seed, attempt = fields
        return Ticket(number, self._collector, version, deadline, seed, attempt)


class DriverInput:
    """The driver's end: reads records, some with bytes behind them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[tuple[ToDriver, bytes]]:
        """Read what is there and return whole records; EOFError when the worker has ended.

        What a killed worker left half-written never becomes whole.
        """
        data = os.read(self._descriptor, _READ_BYTES)
        if not data:
            raise EOFError
        data, begin, records = self._rest + data, 0, []
        while (end := begin + _TO_DRIVER.size) <= len(data):
            record = ToDriver._make(_TO_DRIVER.unpack_from(data, begin))
            extra = 0 if record.kind == SEGMENT else record.num_bytes
            if end + extra > len(data):
                break
            records.append((record, data[end : end + extra]))
            begin = end + extra
        self._rest = data[begin:]
        return records


def pack_text(kind: int, extra: bytes, capacity: int = 0) -> bytes:
    """Pack a start or an end with what belongs to it."""
    return _TO_DRIVER.pack(kind, capacity, 0, 0, 0, 0, 0, len(extra), 0.0) + extra


# ---------------------------------------------------------------- the worker's blocks


@dataclass(slots=True, eq=False)
class _OwnSlot:
    index: int
    block: Block
    views: dict[str, Array]


class SegmentWriter:
    """Puts segments into blocks of this process; those that were released are used again."""

    def __init__(self, specs: Mapping[str, ArraySpec] | None) -> None:
        self._specs = specs or {}
        self._tail = _HEAD_BYTES + layout(self._specs)[1]
        self._tail_bytes = _FIRST_TAIL_BYTES
        self._sent: deque[_OwnSlot] = deque()
        self._indices = itertools.count()
        self._next: _OwnSlot | None = None
        self._units: Mapping[str, int] | None = None

    def arrays(self) -> dict[str, Array]:
        """Return the memory of the next segment's arrays."""
        self._next = self._take()
        return dict(self._next.views)

    def write(self, segment: Segment, state: StateTree | None) -> bytes:
        """Put a segment and the state after it into a block; return the record to send."""
        packed = pack_object(self._rest_of(segment, state))
        slot, self._next = self._next or self._take(), None
        if self._tail + packed.num_bytes > slot.block.size:
            self._grow(slot, packed)
        packed.write(slot.block.memory[self._tail :])
        slot.block.words[0] = 1
        self._sent.append(slot)
        address = slot.block.address
        return _TO_DRIVER.pack(
            SEGMENT,
            segment.ticket.number,
            segment.ticket.version,
            slot.index,
            address.descriptor,
            address.size,
            address.serial,
            packed.num_bytes,
            segment.collect_s,
        )

    def _rest_of(self, segment: Segment, state: StateTree | None) -> tuple[Any, ...]:
        """Everything that is neither in the record nor in the arrays; None: as the reader expects it."""
        versions = segment.versions
        is_one = len(versions) == 1 and int(versions[0]) == segment.ticket.version
        units = None if segment.units == self._units else dict(segment.units)
        if units is not None:
            self._units = units
        episodes = segment.episodes
        data = None if self._specs else segment.data
        ended = (episodes.returns, episodes.lengths) if episodes.returns or episodes.lengths else None
        return None if is_one else versions, units, ended, segment.partial, data, state

    def _take(self) -> _OwnSlot:
        """Find a block that was released among those sent longest ago, or make one."""
        for _ in range(min(_BLOCKS_LOOKED_AT, len(self._sent))):
            slot = self._sent.popleft()
            if not slot.block.words[0]:
                return slot
            self._sent.append(slot)
        return self._make(next(self._indices), self._tail_bytes)

    def _make(self, index: int, tail_bytes: int) -> _OwnSlot:
        block = Block.create(self._tail + tail_bytes)
        return _OwnSlot(index, block, arrays_in(block, self._specs, _HEAD_BYTES))

    def _grow(self, slot: _OwnSlot, packed: Packed) -> None:
        """Move to a larger block, with what the collector has written already."""
        self._tail_bytes = max(self._tail_bytes, packed.num_bytes * 5 // 4)
        larger = self._make(slot.index, self._tail_bytes)
        larger.block.memory[: self._tail] = slot.block.memory[: self._tail]
        slot.views.clear()
        slot.block.close()
        slot.block, slot.views = larger.block, larger.views


# ---------------------------------------------------------------- the driver's view of them


class MappedSlot:
    """A worker's block as its driver has it mapped."""

    __slots__ = ("block", "views")

    def __init__(self, block: Block, specs: Mapping[str, ArraySpec]) -> None:
        self.block = block
        self.views = arrays_in(block, specs, _HEAD_BYTES)
        for view in self.views.values():
            view.flags.writeable = False

    def release(self) -> None:
        """Let the worker write it again."""
        self.block.words[0] = 0


class SegmentReader:
    """Finds the segments of one worker. What it has mapped outlives the worker for as long as it is used."""

    def __init__(self, pid: int, specs: Mapping[str, ArraySpec] | None) -> None:
        self._pid = pid
        self._specs = specs or {}
        self._tail = _HEAD_BYTES + layout(self._specs)[1]
        self._slots: dict[int, MappedSlot] = {}
        self._units: Mapping[str, int] = {}

    def read(self, record: ToDriver, ticket: Ticket) -> tuple[Segment, StateTree | None, MappedSlot]:
        """Return a segment and the state after it. OSError: its worker died before it was mapped."""
        slot = self._slots.get(record.slot)
        if slot is None or slot.block.address.serial != record.serial:
            address = Address(self._pid, record.descriptor, record.size, record.serial)
            slot = self._slots[record.slot] = MappedSlot(Block.open(address), self._specs)
        rest = slot.block.bytes[self._tail : self._tail + record.num_bytes]
        versions, units, ended, partial, data, state = copy_object(rest)
        if units is not None:
            self._units = units
        if record.version != ticket.version:
            number, collector, deadline = ticket.number, ticket.collector, ticket.deadline
            ticket = Ticket(number, collector, record.version, deadline, ticket.seed, ticket.attempt)
        if versions is None:
            versions = np.array((record.version,), np.int64)
        episodes = Episodes(*ended) if ended is not None else Episodes()
        data = dict(slot.views) if self._specs else data
        segment = Segment(ticket, data, versions, self._units, episodes, record.collect_s, partial)
        return segment, state, slot
