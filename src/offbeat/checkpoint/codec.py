"""State trees as JSON plus arrays, exactly and without pickle.

`pack` splits a tree into a skeleton that JSON can hold and a flat dict of arrays for safetensors; `unpack`
puts it together again. JSON has no tuples, no integer keys, no bytes and no NaN, so every value that is not
plain JSON becomes an object with one key, its tag: ``(1, b"x")`` is ``{"tuple": [1, {"bytes": "a0"}]}``.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from offbeat.checkpoint import files, tensors
from offbeat.errors import CheckpointError, ConfigError, PromiseBroken
from offbeat.types import Array, StateTree

Json = Any
"""A value that ``json.dumps`` takes."""

_MAX_DEPTH = 100
_DTYPES = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
)
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_Path = tuple[str | int, ...]
UNFIT = (
    *(KeyError, TypeError, ValueError, IndexError, AttributeError, struct.error),
    *(RecursionError, ArithmeticError, MemoryError, AssertionError),
)
"""What code raises that is given a state of another form."""


def pack(tree: StateTree, root: str = "state") -> tuple[Json, dict[str, Array]]:
    """Split a tree into a JSON-able skeleton and arrays named ``a0, a1, …``.

    Takes dicts (also OrderedDict and Counter) with str or int keys, lists, tuples, None, bool, int of any
    size, float (NaN and infinities keep their bits), str, bytes, and numpy scalars, numpy arrays and torch
    tensors of bool, integer and float dtypes. Arrays of foreign byte order come back in little-endian order;
    contiguous ones are not copied. Tensors come back on the CPU and without gradient. Anything else, also
    another subclass of these, is a CheckpointError that names the place, starting at ``root``.

    Example: ``pack({"w": np.ones(2), "t": (1,)})`` gives
    ``({"dict": [["w", {"array": "a0"}], ["t", {"tuple": [1]}]]}, {"a0": np.ones(2)})``.
    """
    arrays: dict[str, Array] = {}
    return _pack(tree, (root,), arrays), arrays


def check_state(state: StateTree | None, name: str) -> None:
    """Raise ConfigError, with the place and the fix, when a checkpoint could not hold a role's state."""
    fix = "Leave it out and make it anew in load_state_dict (a collector that cannot do so returns None)"
    _check(state, name, fix)


def check_data(data: StateTree, name: str) -> None:
    """Raise ConfigError, with the place and the fix, when a checkpoint could not hold a segment's data."""
    _check(data, name, "Segments that wait for training are saved, too: return arrays and plain values")


def _check(tree: StateTree, name: str, fix: str) -> None:
    try:
        pack(tree, root=name)
    except CheckpointError as error:
        text = f"{error}. {fix}, or train without checkpoints: checkpoint.enabled=false"
        raise ConfigError(text) from error


def unpack(skeleton: Json, arrays: Mapping[str, Array]) -> StateTree:
    """Put together what `pack` split; CheckpointError when the two do not belong together."""
    try:
        return _unpack(skeleton, arrays)
    except UNFIT as error:
        raise CheckpointError(
            f"this is not a state that offbeat packed ({type(error).__name__}: {error}); "
            "use another checkpoint"
        ) from error


@contextlib.contextmanager
def fitting(what: str) -> Iterator[None]:
    """Load a part of a checkpoint in the block; CheckpointError when it has not the form of ``what``."""
    try:
        yield
    except (*UNFIT, PromiseBroken) as error:
        raise CheckpointError(
            f"the checkpoint does not fit {what} ({type(error).__name__}: {error}); "
            "use one that this run and this version of offbeat wrote"
        ) from error


def plain_array(value: Array, path: str) -> Array:
    """Return the array C-contiguous and little-endian, or say by ``path`` why it cannot be stored."""
    dtype = value.dtype.newbyteorder("<")
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{path} is an array of dtype {value.dtype}, which a checkpoint cannot hold; "
            "convert it to a bool, integer or float array"
        )
    return np.asarray(value, dtype=dtype, order="C")


class Digest:
    """SHA-256 over names, dtypes, shapes and bytes of arrays that come in the order of their names."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()

    def begin(self, name: str, array: Array) -> None:
        """Begin an array."""
        head = f"{name!r} {array.dtype.str} {array.shape}\n".encode()
        self._total.update(struct.pack("<QQ", len(head), array.nbytes))
        self._total.update(head)

    def update(self, data: memoryview) -> None:
        """Take the next bytes of it."""
        self._total.update(data)

    def hexdigest(self) -> str:
        """Return the digest of what came so far."""
        return self._total.hexdigest()


def digest(weights: Mapping[str, Array]) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes: equal exactly when the weights are bit-identical.

    Does not depend on the order of the names, on memory layout or on any file format.
    """
    total = Digest()
    for name in sorted(weights):
        array = plain_array(weights[name], f"weights[{name!r}]")
        total.begin(name, array)
        total.update(files.as_bytes(array))
    return total.hexdigest()


# ---------------------------------------------------------------- packing


def _pack(value: StateTree, path: _Path, arrays: dict[str, Array]) -> Json:
    if len(path) > _MAX_DEPTH:
        raise CheckpointError(
            f"{_spell(path[:8])}… is nested deeper than {_MAX_DEPTH} levels; "
            "flatten it, or take out the value that contains itself"
        )
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < 2**63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack("<d", value).hex()}
    if kind in _DICTS:
        return {_DICTS[kind]: [_pack_item(key, item, path, arrays) for key, item in value.items()]}
    if kind is list or kind is tuple:
        items = [_pack(item, (*path, index), arrays) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is bytes:
        return {"bytes": _put(np.frombuffer(value, np.uint8), arrays)}
    if kind is np.ndarray:
        return {"array": _put(plain_array(value, _spell(path)), arrays)}
    if tensors.is_tensor(value):
        dtype, array = tensors.to_array(value, _spell(path))
        return {"tensor": [_put(array, arrays), dtype]}
    if isinstance(value, np.generic):
        return _pack_scalar(value, path)
    raise CheckpointError(
        f"{_spell(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; "
        "give it as dicts, lists, tuples, numbers, strings, bytes, numpy arrays or torch tensors"
    )


def _pack_item(key: object, value: StateTree, path: _Path, arrays: dict[str, Array]) -> Json:
    if type(key) is not str and type(key) is not int:
        raise CheckpointError(
            f"{_spell(path)} has the key {key!r} of type {type(key).__qualname__}; use str or int keys"
        )
    return [_pack(key, path, arrays), _pack(value, (*path, key), arrays)]


def _pack_scalar(value: np.generic, path: _Path) -> Json:
    array = plain_array(np.asarray(value), _spell(path))
    return {"scalar": [array.dtype.str, array.tobytes().hex()]}


def _put(array: Array, arrays: dict[str, Array]) -> str:
    name = f"a{len(arrays)}"
    arrays[name] = array
    return name


def _spell(path: _Path) -> str:
    return f"{path[0]}" + "".join(f"[{key!r}]" for key in path[1:])


# ---------------------------------------------------------------- unpacking


def _unpack(node: Json, arrays: Mapping[str, Array]) -> StateTree:
    if isinstance(node, list):
        return [_unpack(item, arrays) for item in node]
    if isinstance(node, dict):
        ((tag, body),) = node.items()
        return _READERS[tag](body, arrays)
    return node


def _read_dict(body: Json, arrays: Mapping[str, Array]) -> StateTree:
    return {_unpack(key, arrays): _unpack(value, arrays) for key, value in body}


def _read_ordered(body: Json, arrays: Mapping[str, Array]) -> StateTree:
    return OrderedDict(_read_dict(body, arrays))


def _read_counter(body: Json, arrays: Mapping[str, Array]) -> StateTree:
    return Counter(_read_dict(body, arrays))


def _read_tuple(body: Json, arrays: Mapping[str, Array]) -> StateTree:
    return tuple(_unpack(item, arrays) for item in body)


def _read_int(body: Json, _: Mapping[str, Array]) -> StateTree:
    return int(body, 16)


def _read_float(body: Json, _: Mapping[str, Array]) -> StateTree:
    return struct.unpack("<d", bytes.fromhex(body))[0]


def _read_bytes(body: Json, arrays: Mapping[str, Array]) -> StateTree:
    return arrays[body].tobytes()


def _read_array(body: Json, arrays: Mapping[str, Array]) -> StateTree:
    return arrays[body]


def _read_tensor(body: Json, arrays: Mapping[str, Array]) -> StateTree:
    name, dtype = body
    return tensors.to_tensor(arrays[name], dtype)


def _read_scalar(body: Json, _: Mapping[str, Array]) -> StateTree:
    dtype, text = body
    return np.frombuffer(bytes.fromhex(text), np.dtype(dtype))[0]


_READERS: dict[str, Callable[[Json, Mapping[str, Array]], StateTree]] = {
    "dict": _read_dict,
    "ordered": _read_ordered,
    "counter": _read_counter,
    "tuple": _read_tuple,
    "int": _read_int,
    "float": _read_float,
    "bytes": _read_bytes,
    "array": _read_array,
    "tensor": _read_tensor,
    "scalar": _read_scalar,
}
