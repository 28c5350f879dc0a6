"""Weights on their way between processes, whole or in parts: a part is copied only when it has changed."""

from __future__ import annotations

from typing import Any, NamedTuple

from offbeat.runtime.shared import Address, Block, WeightsWriter, read_version, read_weights
from offbeat.types import Part, parts_of


class PartTable(NamedTuple):
    """The form in which parts are published: the version of each, and the block that has it."""

    parts: dict[str, tuple[int, Address]]


class PublishedWriter:
    """Publishes weights to other processes. Each part has a `WeightsWriter` of its own."""

    def __init__(self) -> None:
        self._whole = WeightsWriter()
        self._parts: dict[str, tuple[int, WeightsWriter]] = {}

    @property
    def address(self) -> Address | None:
        """Address for readers, which changes when there is more to publish; None before the first version."""
        return self._whole.address

    def publish(self, version: int, weights: Any) -> int:
        """Write a version, and of parts those that have changed; return the number of bytes written."""
        if (parts := parts_of(weights)) is None:
            return self._whole.publish(version, weights)
        num_bytes, table = 0, {}
        for name, part in parts.items():
            newest, writer = self._parts.get(name, (None, None))
            writer = writer or WeightsWriter()
            if newest != part.version:
                num_bytes += writer.publish(part.version, part.data)
                self._parts[name] = (part.version, writer)
            assert writer.address is not None
            table[name] = (part.version, writer.address)
        return num_bytes + self._whole.publish(version, PartTable(table))

    def close(self) -> None:
        """Free the memory."""
        for writer in (self._whole, *(writer for _, writer in self._parts.values())):
            writer.close()
        self._parts.clear()


class PublishedReader:
    """Copies what a `PublishedWriter` of another process has published; parts that are here stay."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[Block, Part]] = {}

    def read(self, block: Block, at_least: int) -> tuple[int, Any] | None:
        """Return the newest version, if it is ``at_least`` this one; None when it has to be tried again."""
        found = read_weights(block, at_least)
        if found is None or not isinstance(found[1], PartTable):
            return found
        for name, (version, address) in found[1].parts.items():
            before = self._parts.get(name)
            if before is None or before[0].address != address or before[1].version != version:
                other = Block.open(address) if before is None or before[0].address != address else before[0]
                if (data := read_version(other, version)) is None:
                    return None  # a newer one is being written, and a newer table after it
                self._parts[name] = (other, Part(version, data[0]))
        self._parts = {name: self._parts[name] for name in found[1].parts}
        return found[0], {name: part for name, (_, part) in self._parts.items()}
