"""Records and blocks between a driver and its collectors' processes, with both ends in this process."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from offbeat.runtime import wire
from offbeat.runtime.messages import Accept, Begun, CutTickets, GiveWork, Message
from offbeat.runtime.shared import Address, Block
from offbeat.runtime.wire import (
    DOWN,
    MOST_SENT,
    RECORD_BYTES,
    SEGMENT,
    TAKEN,
    DriverInput,
    Lender,
    SegmentReader,
    SegmentWriter,
    Slot,
    ToDriver,
    WorkerInput,
    pack_message,
    pack_text,
    pack_ticket,
    pack_weights,
)
from offbeat.types import ArraySpec, Episodes, Piece, Segment, Span, Ticket

SPECS = {"x": ArraySpec((3,), "float64"), "done": ArraySpec((5,), "bool")}
TICKET_7 = Ticket(7, 2, 3, 4, seed=(1 << 63) - 1, attempt=1)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def decode(record: bytes) -> ToDriver:
    read, write = os.pipe()
    os.write(write, record)
    ((found, _),) = DriverInput(read).read()
    os.close(read)
    os.close(write)
    return found


def segment_of(ticket: Ticket, data: Any, **fields: Any) -> Segment:
    return Segment(ticket, data, np.array([ticket.version]), {"env_steps": 3}, collect_s=0.5, **fields)


def test_records_to_a_worker_come_out_as_they_went_in(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], pack_weights(Address(10, 11, 12, 13)) + pack_ticket(TICKET_7))
    worker = WorkerInput(pipe[0], TICKET_7.collector)
    assert worker.receive(None) == [Accept(TICKET_7)]
    assert worker.weights == Address(10, 11, 12, 13)


def test_records_that_were_cut_on_their_way_are_put_together(pipe: tuple[int, int]) -> None:
    data = pack_ticket(TICKET_7) * 3
    os.write(pipe[1], data[:70])
    worker = WorkerInput(pipe[0], 2)
    assert len(worker.receive(None) or ()) == 1
    os.write(pipe[1], data[70:])
    assert len(worker.receive(None) or ()) == 2


SCRIPT = (Piece((Span(3, 5), Span(4, 2, True)), "eos"), Piece((), "cut"))


def test_messages_to_a_worker_come_out_as_they_went_in(pipe: tuple[int, int]) -> None:
    lender, worker = Lender(), WorkerInput(pipe[0], TICKET_7.collector)
    begun = Begun({"tokens": np.arange(1000), "rng": {"seed": 1 << 100}, "text": "é"}, 7)
    messages: list[Message] = [
        Accept(TICKET_7, begun, SCRIPT),
        GiveWork(),
        Accept(TICKET_7, Begun({})),
        CutTickets(tuple(range(10))),
        Accept(TICKET_7, None, SCRIPT),
        CutTickets((7,)),
        Accept(TICKET_7),
    ]
    data = b"".join(pack_message(message, lender) for message in messages)
    assert lender.num_lent == 3, "a plain ticket needs no block"
    found: list[Any] = []
    for at in range(0, len(data), 100):  # cut on their way
        os.write(pipe[1], data[at : at + 100])
        found += worker.receive(0.0) or ()
    np.testing.assert_equal(found[0].begun, begun)
    assert found[0]._replace(begun=None) == Accept(TICKET_7, None, SCRIPT)
    assert found[1:3] == messages[1:3]
    assert found[3:5] == [CutTickets(tuple(range(7))), CutTickets((7, 8, 9))]
    assert found[5:] == messages[4:]
    lender.free()
    assert lender.num_lent == 0, "a block is released when it was read"


def test_plain_ticket_is_one_record() -> None:
    assert pack_message(Accept(TICKET_7), Lender()) == pack_ticket(TICKET_7)
    assert len(pack_ticket(TICKET_7)) == RECORD_BYTES == 64


def test_begun_work_that_nobody_reads_is_freed_with_its_collector() -> None:
    before, lender = len(os.listdir("/proc/self/fd")), Lender()
    for _ in range(5):
        pack_message(Accept(TICKET_7, Begun({"tokens": np.arange(10_000)})), lender)
    lender.free()
    assert lender.num_lent == 5, "its reader may still come"
    lender.close()
    assert lender.num_lent == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_worker_says_how_much_it_has_taken() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker, driver = WorkerInput(theirs.fileno(), 2), DriverInput(ours.fileno())
        taken = 0
        for count in (MOST_SENT // 2 - 1, 1, 3, MOST_SENT):
            ours.sendall(pack_ticket(TICKET_7) * count)
            assert len(worker.receive(None) or ()) == count
            ours.setblocking(False)
            try:
                records = driver.read()
            except BlockingIOError:
                records = []
            assert all(record.kind == TAKEN for record, _ in records)
            taken += sum(record.ticket for record, _ in records)
            ours.setblocking(True)
    assert taken == MOST_SENT // 2 + 3 + MOST_SENT


def test_wait_of_a_worker_ends_when_it_is_woken(pipe: tuple[int, int]) -> None:
    wake_read, wake_write = os.pipe()
    worker = WorkerInput(pipe[0], 2, wake_read)
    os.write(wake_write, b"xx")
    assert worker.receive(60.0) == ()
    assert worker.receive(0.0) == (), "it was woken once"
    os.write(wake_write, b"x")
    os.write(pipe[1], pack_ticket(TICKET_7))
    assert worker.receive(60.0) == [Accept(TICKET_7)]
    assert worker.receive(0.0) == ()
    os.close(wake_read)
    os.close(wake_write)


def test_text_that_was_cut_waits_for_its_end(pipe: tuple[int, int]) -> None:
    text = "worse than ever: é" * 10
    data = pack_text(DOWN, text.encode()) * 2
    driver = DriverInput(pipe[0])
    os.write(pipe[1], data[:100])
    assert list(driver.read()) == []
    os.write(pipe[1], data[100:])
    assert [(record.kind, extra.decode()) for record, extra in driver.read()] == [(DOWN, text)] * 2


def test_segment_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.runtime.wire.perf_counter", itertools.count(0.0, 2.0).__next__)
    writer, reader = SegmentWriter(SPECS), SegmentReader(os.getpid(), SPECS)
    for number in range(5):
        ticket = Ticket(number, 0, version=2, deadline=3, seed=number)
        arrays = writer.arrays()
        arrays["x"][:], arrays["done"][:] = number, number % 2
        episodes = Episodes((1.5,), (number,)) if number else Episodes()
        state = {"rng": np.arange(4), "number": number}
        record = decode(writer.write(segment_of(ticket, arrays, episodes=episodes), state, 0.25))
        assert (record.kind, record.ticket, record.state_s) == (SEGMENT, number, 2.25)
        segment, state_read, slot = reader.read(record, ticket)
        assert segment.ticket == ticket
        assert (segment.units, segment.episodes, segment.collect_s) == ({"env_steps": 3}, episodes, 0.5)
        assert (segment.data["x"] == number).all()
        assert (segment.data["done"] == number % 2).all()
        assert not segment.data["x"].flags.writeable
        np.testing.assert_equal(state_read, state)
        slot.release()
    assert len(reader._slots) == 1, "one block is enough when each segment is released before the next"


def test_segment_has_the_version_it_was_made_with() -> None:
    writer, reader = SegmentWriter(None), SegmentReader(os.getpid(), None)
    newer = Ticket(7, 2, version=5, deadline=4, seed=1, attempt=1)
    pieces = (Piece((Span(4, 1), Span(5, 2)), "eos"),)
    mixed = Segment(newer, {"a": 1}, np.array([4, 5, 5]), {"tokens": 3}, pieces=pieces)
    segment, _, _ = reader.read(decode(writer.write(mixed, None)), Ticket(7, 2, 3, 4, 1, 1))
    assert segment.ticket == newer
    assert list(segment.versions) == [4, 5, 5]
    assert segment.pieces == pieces
    assert segment.data == {"a": 1}


def test_units_may_change() -> None:
    writer, reader = SegmentWriter(None), SegmentReader(os.getpid(), None)
    for units in ({}, {"a": 1}, {"a": 1}, {"a": 2}, {}, {}, {"a": 2}, {"b": 1}):
        segment = Segment(TICKET_7, None, np.array([3]), units)
        assert reader.read(decode(writer.write(segment, None)), TICKET_7)[0].units == units


def test_block_in_use_is_not_written_again() -> None:
    writer, reader = SegmentWriter(SPECS), SegmentReader(os.getpid(), SPECS)
    held = []
    for number in range(30):
        arrays = writer.arrays()
        arrays["x"][:] = number
        segment, _, slot = reader.read(decode(writer.write(segment_of(TICKET_7, arrays), None)), TICKET_7)
        held.append((segment.data["x"], slot, number))
        if number % 3 == 0:
            held.pop(0)[1].release()
    assert all((x == number).all() for x, _, number in held)


def test_blocks_that_are_released_late_are_found_again() -> None:
    writer, reader = SegmentWriter(SPECS), SegmentReader(os.getpid(), SPECS)
    slots = []
    for number in range(400):
        writer.arrays()
        record = decode(writer.write(segment_of(TICKET_7, None), None))
        slots.append(reader.read(record, TICKET_7)[2])
        if len(slots) == 20:
            for slot in slots[(number % 3 == 0) :]:
                slot.release()
            slots = slots[: (number % 3 == 0)]
    assert len(reader._slots) < 60


@pytest.mark.parametrize("outstanding", [8, 100])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_worker_makes_as_many_blocks_as_it_has_segments_outstanding(
    outstanding: int, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    create = Block.create

    def noting(size: int) -> Block:
        sizes.append(size)
        return create(size)

    monkeypatch.setattr(wire.Block, "create", noting)
    writer, rng = SegmentWriter(SPECS), np.random.default_rng(0)
    slots: list[Slot] = []
    for _ in range(30 * outstanding):
        writer.arrays()
        writer.write(segment_of(TICKET_7, None), None)
        slots.append(writer._sent[-1])
        if len(slots) == outstanding:
            for _ in range(4):
                slots.pop(0 if in_order else int(rng.integers(len(slots)))).release()
    assert len(sizes) == outstanding


def test_block_that_is_too_small_grows_and_keeps_its_arrays() -> None:
    writer, reader = SegmentWriter(SPECS), SegmentReader(os.getpid(), SPECS)
    for size in (10, 100_000, 10, 300_000):
        arrays = writer.arrays()
        arrays["x"][:] = size
        record = decode(writer.write(segment_of(TICKET_7, arrays), {"state": b"s" * size}))
        segment, state, slot = reader.read(record, TICKET_7)
        assert len(reader._slots) == 1
        assert (segment.data["x"] == size).all()
        assert len(state["state"]) == size
        slot.release()
    del segment
