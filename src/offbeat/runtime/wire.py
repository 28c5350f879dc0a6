"""Messages between a driver and its collectors' processes: fixed-size records, and segments in blocks.

A segment lies in a block that the worker owns: a word that says whether it is in use, the arrays that the
collector wrote in place, and a pickle with everything else. The worker writes it and sends its address; the
driver clears the word when the segment is no longer needed. So no message waits for an answer.
"""

from __future__ import annotations

import os
import select
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from offbeat.runtime.messages import Accept
from offbeat.runtime.shared import Address, Block, arrays_in, copy_object, num_bytes_of, pack_object
from offbeat.types import Array, ArraySpec, Episodes, Segment, StateTree, Ticket

TICKET, WEIGHTS = 1, 2
"""Kinds of records to a worker: a ticket, or the address of another block of weights."""
SEGMENT, UP, DOWN, LOST, PROGRESS = 1, 2, 3, 4, 5
"""Kinds of `ToDriver`: a segment, or (with a text or a pickle behind the record) a start, an end or
progress."""
MOST_SENT = 64
"""Tickets that are with a worker at most: they fit into its pipe, so that no write blocks."""
_READ_BYTES = 1 << 16
_HEAD_BYTES = 64
_FIRST_TAIL_BYTES = 1 << 12
_TO_WORKER = struct.Struct("8q")
_TO_DRIVER = struct.Struct("7q2d")


class ToDriver(NamedTuple):
    """A record to the driver. ``ticket`` is the capacity in one of kind `UP`."""

    kind: int
    ticket: int = 0
    version: int = 0
    descriptor: int = 0
    size: int = 0
    serial: int = 0
    num_bytes: int = 0
    collect_s: float = 0.0
    state_s: float = 0.0


def pack_ticket(ticket: Ticket) -> bytes:
    """Pack a ticket for its collector's worker."""
    number, _, *rest = ticket.as_row()
    return _TO_WORKER.pack(TICKET, number, *rest)


def pack_weights(address: Address) -> bytes:
    """Pack the address of the weights."""
    return _TO_WORKER.pack(WEIGHTS, *address, 0, 0, 0)


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a pipe, waiting for its reader where necessary."""
    while data:
        data = data[os.write(descriptor, data) :]


class WorkerInput:
    """The worker's end: tickets, however their records were cut on their way, and the weights' address."""

    def __init__(self, descriptor: int, collector: int) -> None:
        self.weights: Address | None = None
        self._descriptor = descriptor
        self._collector = collector
        self._rest = b""
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def receive(self, timeout_s: float | None) -> Sequence[Accept] | None:
        """Return the tickets that have come; None: the driver says stop, or is gone."""
        try:
            if timeout_s is not None:
                return self._read() if self._poll.poll(1000.0 * timeout_s) else ()
            while not (tickets := self._read()):
                pass  # only an address came, or a part of a record
        except (EOFError, OSError):
            return None
        return tickets

    def _read(self) -> list[Accept]:
        data = os.read(self._descriptor, _READ_BYTES)
        if not data:
            raise EOFError
        data = self._rest + data
        end = len(data) - len(data) % _TO_WORKER.size
        self._rest = data[end:]
        tickets = []
        for kind, *fields in _TO_WORKER.iter_unpack(data[:end]):
            if kind == WEIGHTS:
                self.weights = Address(*fields[:4])
            else:
                number, *rest = fields
                tickets.append(Accept(Ticket(number, self._collector, *rest)))
        return tickets


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
    """Pack a start, an end or a report of progress with what belongs to it."""
    return _TO_DRIVER.pack(kind, capacity, 0, 0, 0, 0, len(extra), 0.0, 0.0) + extra


# ---------------------------------------------------------------- segments in blocks


class Slot:
    """A worker's block and the arrays in it, as the worker or its driver has it mapped."""

    __slots__ = ("block", "views")

    def __init__(self, block: Block, specs: Mapping[str, ArraySpec]) -> None:
        self.block = block
        self.views = arrays_in(block, specs, _HEAD_BYTES)

    def release(self) -> None:
        """Let the worker write it again."""
        self.block.words[0] = 0


class SegmentWriter:
    """Puts segments into blocks of this process; those that were released are used again."""

    def __init__(self, specs: Mapping[str, ArraySpec] | None) -> None:
        self._specs = specs or {}
        self._tail = _HEAD_BYTES + num_bytes_of(self._specs)
        self._tail_bytes = _FIRST_TAIL_BYTES
        self._sent: deque[Slot] = deque()
        self._next: Slot | None = None

    def arrays(self) -> dict[str, Array]:
        """Return the memory of the next segment's arrays."""
        self._next = self._take()
        return dict(self._next.views)

    def write(self, segment: Segment, state: StateTree | None, state_s: float = 0.0) -> bytes:
        """Put a segment and the state after it into a block; return the record to send."""
        ticket, versions, episodes = segment.ticket, segment.versions, segment.episodes
        is_one = len(versions) == 1 and int(versions[0]) == ticket.version  # the reader makes it: cheaper
        data = None if self._specs else segment.data
        ended = (episodes.returns, episodes.lengths)
        counts = (dict(segment.units), ended, segment.steps_by_env, segment.pieces, segment.drop)
        rest = (None if is_one else versions, *counts, data, state)
        began_s = perf_counter()
        packed = pack_object(rest)
        state_s += perf_counter() - began_s if state is not None else 0.0
        slot, self._next = self._next or self._take(), None
        if self._tail + packed.num_bytes > slot.block.size:
            self._tail_bytes = max(self._tail_bytes, packed.num_bytes * 5 // 4)
            slot = Slot(slot.block.grow(self._tail + self._tail_bytes), self._specs)
        packed.write(slot.block.memory[self._tail :])
        slot.block.words[0] = 1
        self._sent.append(slot)
        _, *place = slot.block.address
        numbers = (SEGMENT, ticket.number, ticket.version, *place, packed.num_bytes)
        return _TO_DRIVER.pack(*numbers, segment.collect_s, state_s)

    def _take(self) -> Slot:
        """Find a block that was released, from the one sent longest ago, or make one."""
        for _ in range(len(self._sent)):
            slot = self._sent.popleft()
            if not slot.block.words[0]:
                return slot
            self._sent.append(slot)
        return Slot(Block.create(self._tail + self._tail_bytes), self._specs)


class SegmentReader:
    """Finds the segments of one worker. What it has mapped outlives the worker for as long as it is used."""

    def __init__(self, pid: int, specs: Mapping[str, ArraySpec] | None) -> None:
        self._pid = pid
        self._specs = specs or {}
        self._tail = _HEAD_BYTES + num_bytes_of(self._specs)
        self._slots: dict[int, Slot] = {}  # by the serial number of the block

    def read(self, record: ToDriver, ticket: Ticket) -> tuple[Segment, StateTree | None, Slot]:
        """Return a segment and the state after it. OSError: its worker died before it was mapped."""
        slot = self._slots.get(record.serial)
        if slot is None or slot.block.size != record.size:
            address = Address(self._pid, record.descriptor, record.size, record.serial)
            slot = self._slots[record.serial] = Slot(Block.open(address), self._specs)
            for view in slot.views.values():
                view.flags.writeable = False
        rest = slot.block.bytes[self._tail : self._tail + record.num_bytes]
        versions, units, ended, by_env, pieces, drop, data, state = copy_object(rest)
        if record.version != ticket.version:
            number, collector, _, *others = ticket.as_row()
            ticket = Ticket(number, collector, record.version, *others)
        if versions is None:
            versions = np.array((record.version,), np.int64)
        data = dict(slot.views) if self._specs else data
        episodes = Episodes(*ended)
        rest_of = (units, episodes, record.collect_s, by_env, pieces, drop)
        segment = Segment(ticket, data, versions, *rest_of)
        return segment, state, slot
