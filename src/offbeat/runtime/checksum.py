"""Checksums of published weights, by which a replay finds the round in which it first differs."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from offbeat.types import parts_of


class _NotATree(Exception):
    """Something else than arrays, numbers and strings in dicts, lists and tuples."""


def weights_checksum(
    weights: Any, known: MutableMapping[str, tuple[int, int | None]] | None = None
) -> int | None:
    """Return a crc32 over names, dtypes, shapes and bytes of all arrays; None for what is no tree of them.

    Takes mappings, lists and tuples of numpy arrays, torch tensors, numbers, strings, bytes and None. Keys
    count in sorted order, so that two mappings that are equal have one checksum. That of parts is made from
    the checksums of their data; ``known`` keeps those by name, with the version of the part: those of other
    versions are computed.
    """
    if (parts := parts_of(weights)) is not None:
        known = {} if known is None else known
        for name, part in parts.items():
            if name not in known or known[name][0] != part.version:
                known[name] = (part.version, weights_checksum(part.data))
        weights = {name: known[name][1] for name in parts}
        if None in weights.values():
            return None
    try:
        return _add(weights, 0, sys.modules.get("torch"))
    except Exception:  # such as sparse tensors: a run goes on without
        return None


def _add(value: Any, crc: int, torch: Any) -> int:
    if isinstance(value, Mapping):
        crc = zlib.crc32(b"{%d" % len(value), crc)
        for key in sorted(value, key=lambda key: (type(key).__name__, str(key))):
            crc = _add(value[key], zlib.crc32(_plain_bytes(key), crc), torch)
        return crc
    if isinstance(value, list | tuple):
        crc = zlib.crc32(b"[%d" % len(value), crc)
        for item in value:
            crc = _add(item, crc, torch)
        return crc
    if isinstance(value, np.ndarray | np.generic):
        return _add_array(np.asarray(value), str(value.dtype), value.shape, crc)
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # numpy has no bfloat16
        return _add_array(flat.numpy(), str(value.dtype), tuple(value.shape), crc)
    return zlib.crc32(_plain_bytes(value), crc)


def _add_array(array: Any, dtype: str, shape: tuple[int, ...], crc: int) -> int:
    if array.dtype.hasobject:
        raise _NotATree
    crc = zlib.crc32(f"array {dtype} {shape}".encode(), crc)
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, crc)


def _plain_bytes(value: Any) -> bytes:
    if isinstance(value, float):
        return b"float " + struct.pack("<d", value)
    if value is None or isinstance(value, bool | int | str | bytes):
        text = f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass")
        return b"%d %b" % (len(text), text)
    raise _NotATree
