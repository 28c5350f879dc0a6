from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.runtime.shared import (
    Address,
    Block,
    Packed,
    WeightsWriter,
    arrays_in,
    checksum,
    newest_version,
    pack_object,
    read_weights,
    unpack_object,
)
from offbeat.types import ArraySpec


def test_block_is_shared_with_whoever_opens_its_address() -> None:
    block = Block.create(1000)
    other = Block.open(block.address)
    block.bytes[:4] = (1, 2, 3, 4)
    assert list(other.bytes[:4]) == [1, 2, 3, 4]
    other.close()
    block.close()


def test_block_that_grows_keeps_what_is_in_it() -> None:
    block = Block.create(5000)
    before = Block.open(block.address)
    block.bytes[:5000] = 7
    larger = block.grow(100_000)
    assert (larger.size >= 100_000, larger.address.serial) == (True, block.address.serial)
    after = Block.open(larger.address)
    assert (after.bytes[:5000] == 7).all()
    assert not after.bytes[5056:].any()
    larger.bytes[0] = 8
    assert before.bytes[0] == after.bytes[0] == 8, "readers of the smaller block see the same memory"
    larger.close()
    with pytest.raises(OSError, match="No such file"):
        Block.open(larger.address)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=4), st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=6
    )
)
def test_arrays_in_a_block_do_not_overlap(shapes: dict[str, tuple[int, int]]) -> None:
    dtypes = ("float32", "int64", "bool", "uint8")
    specs = {name: ArraySpec(shape, dtypes[i % 4]) for i, (name, shape) in enumerate(shapes.items())}
    block = Block.create(sum(spec.num_bytes + 64 for spec in specs.values()))
    arrays = arrays_in(block, specs)
    for index, array in enumerate(arrays.values()):
        array[...] = index % 2 if array.dtype == bool else index
    for index, array in enumerate(arrays.values()):
        assert (array == (index % 2 if array.dtype == bool else index)).all()
    block.close()


@pytest.mark.parametrize(
    "value",
    [{"a": np.arange(5.0), "b": [np.zeros((0, 3)), "text", None]}, 7, [lambda: 1], np.arange(1000)[::3]],
)
def test_objects_survive_packing(value: Any) -> None:
    packed = pack_object(value)
    room = np.zeros(packed.num_bytes, np.uint8)
    packed.write(room.data)
    back = unpack_object(room.copy())
    if isinstance(value, list) and callable(value[0]):
        assert back[0]() == 1
    else:
        np.testing.assert_equal(back, value)


def test_checksum_sees_a_single_flipped_bit() -> None:
    data = np.arange(256, dtype=np.uint8)
    before = checksum(data)
    data[100] ^= 4
    assert checksum(data) != before


def address_of(writer: WeightsWriter) -> Address:
    assert writer.address is not None
    return writer.address


def test_weights_have_the_version_they_were_published_with() -> None:
    writer = WeightsWriter()
    writer.publish(0, {"w": np.zeros(3)})
    block = Block.open(address_of(writer))
    assert newest_version(block) == 0
    assert read_weights(block, at_least=1) is None
    writer.publish(1, {"w": np.ones(3)})
    version, weights = read_weights(block, at_least=1) or (None, None)
    assert version == 1
    assert weights is not None and (weights["w"] == 1).all()
    writer.close()


def test_weights_that_outgrow_their_block_move() -> None:
    writer = WeightsWriter()
    writer.publish(0, {"w": np.zeros(3)})
    before = writer.address
    writer.publish(1, {"w": np.zeros(100_000)})
    assert writer.address != before
    found = read_weights(Block.open(address_of(writer)), at_least=1)
    assert found is not None and found[1]["w"].shape == (100_000,)
    writer.close()


@pytest.mark.parametrize("size", [3, 100_000], ids=["in the same block", "in a larger one"])
def test_weights_that_cannot_be_written_leave_the_last_ones(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(packed: Packed, memory: memoryview) -> None:
        assert address_of(writer) == before, "the block was announced with nothing in it"
        raise MemoryError

    writer = WeightsWriter()
    writer.publish(0, np.zeros(3))
    before = address_of(writer)
    with monkeypatch.context() as patch:
        patch.setattr(Packed, "write", fail)
        with pytest.raises(MemoryError):
            writer.publish(1, np.ones(size))
    assert newest_version(Block.open(address_of(writer))) == 0
    for version in range(1, 4):
        writer.publish(version, np.full(size, version))
        found = read_weights(Block.open(address_of(writer)), at_least=version)
        assert found is not None and found[0] == version
        np.testing.assert_equal(found[1], np.full(size, version))
    writer.close()


def test_half_written_weights_are_not_taken() -> None:
    writer = WeightsWriter()
    writer.publish(0, np.zeros(8))
    writer.publish(1, np.ones(8))
    block = Block.open(address_of(writer))
    second = block.bytes[block.size // 2 // 64 * 64 :]
    second[:8].view(np.int64)[0] += 1  # as if version 1 were being overwritten
    assert newest_version(block) == 0
    second[:8].view(np.int64)[0] += 1
    second[200] ^= 1  # as if a byte had not arrived
    assert read_weights(block, at_least=1) is None
    writer.close()


def test_reader_never_sees_a_mix_of_two_versions() -> None:
    writer = WeightsWriter()
    writer.publish(0, np.zeros(20_000))
    block, done = Block.open(address_of(writer)), threading.Event()

    def publish() -> None:
        for version in range(1, 400):
            writer.publish(version, np.full(20_000, float(version)))
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    while not done.is_set():
        if (found := read_weights(block, at_least=0)) is not None:
            assert (found[1] == found[0]).all()
    thread.join()
    writer.close()
