"""Records and blocks between a driver and its collectors' processes, with both ends in this process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from offbeat.runtime import wire
from offbeat.runtime.messages import Accept
from offbeat.runtime.shared import Address, Block
from offbeat.runtime.wire import (
    DOWN,
    SEGMENT,
    DriverInput,
    SegmentReader,
    SegmentWriter,
    Slot,
    ToDriver,
    WorkerInput,
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
