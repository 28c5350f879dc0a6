"""Weights in parts: what is copied, what arrives, and by which checksum they are known."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from offbeat.errors import OffbeatError
from offbeat.pacing.events import Broken, Published, SnapshotTaken
from offbeat.runtime.checksum import weights_checksum
from offbeat.runtime.learning import LearnerExecutor, on_cpu
from offbeat.runtime.parts import PublishedReader, PublishedWriter
from offbeat.runtime.shared import Block
from offbeat.types import Batch, Part, parts_of

BASE = np.arange(100_000.0)


def weights(base: int, adapter: int) -> dict[str, Part]:
    return {"base": Part(base, BASE + base), "adapter": Part(adapter, {"w": np.full(10, adapter)})}


def plain(parts: dict[str, Part]) -> dict[str, Any]:
    return {name: (part.version, part.data) for name, part in parts.items()}


def read(reader: PublishedReader, writer: PublishedWriter, at_least: int = 0) -> Any:
    assert writer.address is not None
    found = reader.read(Block.open(writer.address), at_least)
    assert found is not None
    return found


def test_only_parts_that_changed_are_copied() -> None:
    writer = PublishedWriter()
    first = writer.publish(0, weights(0, 0))
    second = writer.publish(1, weights(0, 1))
    third = writer.publish(2, weights(2, 1))
    assert first > BASE.nbytes and third > BASE.nbytes
    assert second < 2000
    writer.close()


def test_parts_arrive_whole_and_those_that_are_here_stay() -> None:
    writer, reader = PublishedWriter(), PublishedReader()
    writer.publish(0, weights(0, 0))
    version, found = read(reader, writer)
    assert (version, found["base"].version, found["adapter"].version) == (0, 0, 0)
    for newest in range(1, 5):
        before = found
        writer.publish(newest, weights(0, newest))
        version, found = read(reader, writer)
        assert version == newest
        np.testing.assert_equal(plain(found), plain(weights(0, newest)))
        assert found["base"] is before["base"]
    writer.publish(5, {"adapter": Part(9, 1)})
    assert read(reader, writer) == (5, {"adapter": Part(9, 1)})
    writer.publish(6, {"w": 1.0})
    assert read(reader, writer) == (6, {"w": 1.0}), "the next ones may have no parts"
    writer.close()


def test_part_may_outgrow_its_block_and_go_back_to_an_older_version() -> None:
    writer, reader = PublishedWriter(), PublishedReader()
    for newest, (stamp, size) in enumerate(((7, 10), (3, 10), (4, 200_000), (7, 10), (7, 10))):
        writer.publish(newest, {"x": Part(stamp, np.full(size, stamp))})
        _, found = read(reader, writer, newest)
        np.testing.assert_equal(plain(found), {"x": (stamp, np.full(size, stamp))})
    writer.close()


def test_reader_never_mixes_parts_of_two_versions() -> None:
    writer, reader = PublishedWriter(), PublishedReader()

    def both(version: int) -> dict[str, Part]:
        return {name: Part(version, np.full(20_000, version)) for name in ("a", "b")}

    writer.publish(0, both(0))
    thread = threading.Thread(
        target=lambda: [writer.publish(version, both(version)) for version in range(300)]
    )
    thread.start()
    assert writer.address is not None
    block, seen = Block.open(writer.address), set()
    while thread.is_alive():
        if (found := reader.read(block, 0)) is not None:
            version, parts = found
            seen.add(version)
            assert {part.version for part in parts.values()} == {version}
            assert all((part.data == version).all() for part in parts.values())
    thread.join()
    writer.close()
    assert seen


def test_what_is_no_dict_of_parts_is_whole() -> None:
    for other in ({}, {"a": Part(0, 1), "b": 2}, [Part(0, 1)], Part(0, 1), None, np.zeros(3)):
        assert parts_of(other) is None
    assert parts_of({"a": Part(0, 1)}) == {"a": Part(0, 1)}


def test_checksum_of_parts_is_that_of_their_data() -> None:
    whole = weights_checksum(weights(0, 1))
    assert whole is not None
    restamped = {name: Part(part.version + 50, part.data) for name, part in weights(0, 1).items()}
    assert weights_checksum(restamped) == whole
    assert weights_checksum(weights(0, 2)) != whole
    assert weights_checksum({"a": Part(0, object())}) is None


def test_checksums_of_parts_that_stay_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, tuple[int, int | None]] = {}
    assert weights_checksum(weights(0, 1), known) == weights_checksum(weights(0, 1))
    assert set(known) == {"base", "adapter"}
    changed = {**weights(0, 2), "base": Part(0, None)}
    assert weights_checksum(changed, known) == weights_checksum(weights(0, 2))


class Learner:
    """Trains on in place; ``copies``: it publishes a copy of its adapter."""

    def __init__(self, copies: bool = True) -> None:
        self.base, self.adapter, self.version, self.copies = np.ones(5), np.zeros(5), 0, copies

    def train(self, batch: Batch) -> dict[str, float]:
        self.adapter += 1.0
        self.version += 1
        return {}

    def weights(self) -> Any:
        adapter = self.adapter.copy() if self.copies else self.adapter
        return {"base": Part(0, self.base), "adapter": Part(self.version, adapter)}

    def state_dict(self) -> Any:
        return {"adapter": self.adapter}

    def load_state_dict(self, state: Any) -> None:
        self.adapter = state["adapter"]


def publish_train_publish(learner: Learner) -> list[Any]:
    posted: list[Any] = []
    executor = LearnerExecutor(learner, lambda version, weights: 7, posted.append, by_reference=True)
    executor.publish(0)
    executor.train(Batch(0, (), 1))
    executor.publish(1)
    executor.snapshot()
    return posted


def test_learner_that_trains_on_in_a_published_part_is_found() -> None:
    posted = publish_train_publish(Learner(copies=False))
    (broken,) = [event for event in posted if isinstance(event, Broken)]
    assert isinstance(broken.error, OffbeatError) and "must return a copy" in str(broken.error)


def test_parts_are_published_whole_and_saved_without_their_versions() -> None:
    posted = publish_train_publish(Learner())
    assert [event.num_bytes for event in posted if isinstance(event, Published)] == [7, 7]
    sums = [event.checksum.result() for event in posted if isinstance(event, Published) and event.checksum]
    assert None not in sums and sums[0] != sums[1]
    (snapshot,) = [event for event in posted if isinstance(event, SnapshotTaken)]
    np.testing.assert_equal(snapshot.weights, {"base": np.ones(5), "adapter": np.ones(5)})


def test_tensors_in_parts_are_brought_to_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    part = Part(3, {"w": torch.ones(2, requires_grad=True)})
    found = on_cpu({"a": part})["a"]
    assert found.version == 3 and not found.data["w"].requires_grad
