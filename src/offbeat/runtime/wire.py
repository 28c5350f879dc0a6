"""Messages between a driver and its collectors' processes: fixed-size records, and segments in blocks.

A segment lies in a block that the worker owns: a word that says whether it is in use, the arrays that the
collector wrote in place, and a pickle with everything else. The worker writes it and sends its address; the
driver clears the word when the segment is no longer needed. Begun work, scripts and open work lie in blocks,
too, which their reader releases at once. So no message waits for an answer.
"""

from __future__ import annotations

import os
import select
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from offbeat.runtime.messages import Accept, Begun, CutTickets, GiveWork, Message
from offbeat.runtime.shared import Address, Block, arrays_in, copy_object, num_bytes_of, pack_object
from offbeat.types import Array, ArraySpec, Episodes, Piece, Segment, StateTree, Ticket

TICKET, WEIGHTS, BEGUN, CUT, GIVE_WORK = 1, 2, 3, 4, 5
"""Kinds of records to a worker: a ticket, the address of another block of weights, the block with begun work
and script of the ticket behind it, tickets to cut, or the question for begun work."""
SEGMENT, UP, DOWN, LOST, PROGRESS, WORKED, WAITS, OPEN_WORK, TAKEN, HOPELESS = range(1, 11)
"""Kinds of `ToDriver`: a segment; with a text or a pickle behind the record a start or another capacity, an
end, progress, or what a collector reports; a block with begun work; the number of records taken."""
MOST_SENT = 64
"""Records in a worker's pipe at most: they fit, so that no write blocks."""
_READ_BYTES = 1 << 16
_HEAD_BYTES = 64
_FIRST_TAIL_BYTES = 1 << 12
_TO_WORKER = struct.Struct("8q")
_TO_DRIVER = struct.Struct("7q3d")
RECORD_BYTES = _TO_WORKER.size
CUT_AT_ONCE, _NO_TICKET = 7, -1


class ToDriver(NamedTuple):
    """A record to the driver. ``ticket`` is the capacity in one of kind `UP`, a number in one of `TAKEN`."""

    kind: int
    ticket: int = 0
    version: int = 0
    descriptor: int = 0
    size: int = 0
    serial: int = 0
    num_bytes: int = 0
    collect_s: float = 0.0
    state_s: float = 0.0
    busy_s: float = 0.0


def pack_ticket(ticket: Ticket) -> bytes:
    """Pack a ticket for its collector's worker."""
    row = ticket.as_row()
    return _TO_WORKER.pack(TICKET, row[0], *row[2:])


def pack_weights(address: Address) -> bytes:
    """Pack the address of the weights."""
    return _TO_WORKER.pack(WEIGHTS, *address, 0, 0, 0)


def pack_message(message: Message, lender: Lender) -> bytes:
    """Pack a message to a worker; begun work and scripts go into a block of the ``lender``."""
    match message:
        case Accept(ticket, None, ()):
            return pack_ticket(ticket)
        case Accept(ticket, begun, script):
            address = lender.lend((begun, script))
            return _TO_WORKER.pack(BEGUN, *address, 0, 0, 0) + pack_ticket(ticket)
        case CutTickets(tickets):
            padded = (*tickets, *(-len(tickets) % CUT_AT_ONCE) * (_NO_TICKET,))
            starts = range(0, len(padded), CUT_AT_ONCE)
            return b"".join(_TO_WORKER.pack(CUT, *padded[at : at + CUT_AT_ONCE]) for at in starts)
        case GiveWork():
            return _TO_WORKER.pack(GIVE_WORK, *CUT_AT_ONCE * (0,))


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a pipe, waiting for its reader where necessary."""
    while data:
        data = data[os.write(descriptor, data) :]


class WorkerInput:
    """The worker's end: messages, however their records were cut on their way, and the weights' address.

    ``wake_fd`` is a pipe: a byte in it ends a wait. The driver is told how many records were taken.
    """

    def __init__(self, descriptor: int, collector: int, wake_fd: int | None = None) -> None:
        self.weights: Address | None = None
        self._descriptor, self._wake_fd = descriptor, wake_fd
        self._collector = collector
        self._rest = b""
        self._begun: tuple[Begun | None, tuple[Piece, ...]] | None = None  # of the next ticket
        self._num_taken = 0
        self._poll = select.poll()
        for one in (descriptor,) if wake_fd is None else (descriptor, wake_fd):
            self._poll.register(one, select.POLLIN)

    def receive(self, timeout_s: float | None) -> Sequence[Message] | None:
        """Return the messages that have come; None: the driver says stop, or is gone."""
        try:
            if timeout_s is not None:
                return self._wait(1000.0 * timeout_s)
            while not (messages := self._read()):
                pass  # only an address came, or a part of a record
        except (EOFError, OSError):
            return None
        return messages

    def _wait(self, timeout_ms: float) -> Sequence[Message]:
        ready = [descriptor for descriptor, _ in self._poll.poll(timeout_ms)]
        if self._wake_fd is not None and self._wake_fd in ready:
            os.read(self._wake_fd, _READ_BYTES)
        return self._read() if self._descriptor in ready else ()

    def _read(self) -> list[Message]:
        data = os.read(self._descriptor, _READ_BYTES)
        if not data:
            raise EOFError
        data = self._rest + data
        end = len(data) - len(data) % _TO_WORKER.size
        self._rest = data[end:]
        messages: list[Message] = []
        for record in _TO_WORKER.iter_unpack(data[:end]):
            if record[0] != TICKET:
                messages += self._unpack(record[0], record[1:])
                continue
            ticket, begun = Ticket(record[1], self._collector, *record[2:]), self._begun
            messages.append(Accept(ticket) if begun is None else Accept(ticket, *begun))
            self._begun = None
        self._num_taken += end // _TO_WORKER.size
        if self._num_taken >= MOST_SENT // 2:
            write_all(self._descriptor, pack_text(TAKEN, b"", self._num_taken))
            self._num_taken = 0
        return messages

    def _unpack(self, kind: int, fields: Sequence[int]) -> list[Message]:
        if kind == CUT:
            return [CutTickets(tuple(number for number in fields if number != _NO_TICKET))]
        if kind == GIVE_WORK:
            return [GiveWork()]
        address = Address(*fields[:4])
        if kind == WEIGHTS:
            self.weights = address
        else:
            self._begun = take_lent(address)
        return []


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


def pack_text(kind: int, extra: bytes, number: int = 0) -> bytes:
    """Pack a report to the driver with what belongs to it: a text or a pickle, a capacity or a count."""
    return _TO_DRIVER.pack(kind, number, 0, 0, 0, 0, len(extra), 0.0, 0.0, 0.0) + extra


def pack_open_work(address: Address, version: int) -> bytes:
    """Pack the address of a block with begun work, and the version of its collector's weights."""
    _, *place = address
    return _TO_DRIVER.pack(OPEN_WORK, 0, version, *place, 0, 0.0, 0.0, 0.0)


# ---------------------------------------------------------------- objects and segments in blocks


class Lender:
    """Objects in blocks of this process, each of which another process reads once (`take_lent`)."""

    def __init__(self) -> None:
        self._lent: list[Block] = []

    @property
    def num_lent(self) -> int:
        """Blocks that are not freed."""
        return len(self._lent)

    def lend(self, value: Any) -> Address:
        """Put an object into a block of its own."""
        self.free()
        packed = pack_object(value)
        block = Block.create(_HEAD_BYTES + packed.num_bytes)
        packed.write(block.memory[_HEAD_BYTES:])
        block.words[0] = 1
        self._lent.append(block)
        return block.address

    def free(self) -> None:
        """Free the blocks that were read."""
        lent, self._lent = self._lent, []
        for block in lent:
            if block.words[0]:
                self._lent.append(block)
            else:
                block.close()

    def close(self) -> None:
        """Free all blocks: nobody reads them any more."""
        for block in self._lent:
            block.close()
        self._lent.clear()


def take_lent(address: Address) -> Any:
    """Copy an object that another process lends, and release its block; OSError if that has ended."""
    block = Block.open(address)
    value = copy_object(block.bytes[_HEAD_BYTES:])
    block.words[0] = 0
    block.close()
    return value


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

    def write(
        self, segment: Segment, state: StateTree | None, state_s: float = 0.0, busy_s: float = 0.0
    ) -> bytes:
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
        return _TO_DRIVER.pack(*numbers, segment.collect_s, state_s, busy_s)

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
