"""From an environment to plain data."""

from __future__ import annotations

import collections
import enum
import functools
import logging
import math
import random
import types
from collections.abc import Callable, Iterable
from threading import Lock, RLock
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from offbeat.envs.snapshot.classes import Layout, Opaque, global_name, layout_of, package_of
from offbeat.envs.snapshot.parts import custom_state, space_parts, wrapper_chain
from offbeat.types import Array, StateTree

Node = dict[str, Any]
_ATOMS = frozenset((int, bool, str, type(None)))
_isfinite = math.isfinite
_KEEP: list[int] = []
_ARRAY_KINDS = "biuf"
_DISPLAY_PACKAGES = frozenset(("matplotlib", "pyglet", "PIL"))
_PYGAME_DISPLAY = frozenset(("Surface", "Clock", "Font", "Window", "Renderer", "Texture"))
_RANDOM_MODULES = frozenset(("random", "numpy.random"))


def capture(obj: object) -> StateTree | None:
    """Return the state of an environment, or of a list of them, as plain data; None when some is hidden.

    The data shares no memory with the environment. An unwrapped environment with ``get_state()`` and
    ``set_state(state)`` gives its state itself: all that its next steps depend on, as plain values and
    arrays; its ``np_random`` is captured beside it.
    """
    try:
        return _Encoder(obj).tree()
    except (Opaque, RecursionError):
        return None


def why_not(obj: object) -> str | None:
    """Say what keeps `capture` from seeing the state of ``obj``; None when it can be captured."""
    try:
        _Encoder(obj).tree()
    except (Opaque, RecursionError) as error:
        return str(error)
    return None


class _Encoder:
    """One walk over an object graph; every mutable thing becomes one node, however often it is reached."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._chain = {id(env): env for env in wrapper_chain(root)}
        self._nodes: list[Node | None] = []
        self._refs: dict[int, list[int]] = {}
        self._alive: list[object] = []
        self._bits: set[int] = set()

    def tree(self) -> StateTree:
        return {"root": self.encode(self._root), "nodes": self._nodes}

    def encode(self, value: Any) -> Any:
        """Return an atom, ``[i]`` for node i, or ``[]`` for what belongs to the environment restored onto."""
        kind: Any = type(value)
        if kind in _ATOMS or (kind is float and _isfinite(value)):
            return value
        ref = self._refs.get(id(value))
        if ref is not None:
            return ref
        make = _maker_of(kind)
        if make is None:
            return _KEEP
        ref = self._refs[id(value)] = [len(self._nodes)]
        self._alive.append(value)  # an id is only unique while its object lives
        self._nodes.append(None)
        self._nodes[ref[0]] = make(self, value)
        return ref

    def encode_all(self, values: Iterable[Any]) -> list[Any]:
        """Encode what a container holds; it cannot hold things that belong to another environment."""
        encode = self.encode
        items = [value if type(value) in _ATOMS else encode(value) for value in values]
        if _KEEP in items:
            raise Opaque("a container of windows, surfaces, specs or loggers")
        return items

    def claim_bits(self, bits: object) -> None:
        """Note that a bit generator belongs to one node: a Generator and a RandomState cannot share it."""
        if id(bits) in self._bits:
            raise Opaque("a bit generator shared by a Generator and a RandomState")
        self._bits.add(id(bits))

    def is_in_chain(self, value: object) -> bool:
        """Tell whether ``value`` is the environment or a wrapper, which a restore always finds again."""
        return id(value) in self._chain


_Maker = Callable[[_Encoder, Any], Node]


@functools.cache
def _maker_of(kind: Any) -> _Maker | None:
    """How to make the node of a class's instances; None for what stays with the environment."""
    if kind in _MAKERS:
        return _MAKERS[kind]
    if issubclass(kind, (EnvSpec, logging.Logger)) or _is_display(kind):
        return None
    for base, make in _FAMILIES:
        if issubclass(kind, base):
            return make
    layout = layout_of(kind)
    if layout is None:
        raise Opaque(f"a {global_name(kind)}, whose state cannot be seen from Python")
    return functools.partial(_object, layout)


def is_object(kind: type) -> bool:
    """Tell whether a state holds the instances of a class by their attributes."""
    try:
        return getattr(_maker_of(kind), "func", None) is _object
    except Opaque:
        return False


def _is_display(kind: type) -> bool:
    package = package_of(global_name(kind))
    return package in _DISPLAY_PACKAGES or (package.startswith("pygame") and kind.__name__ in _PYGAME_DISPLAY)


# ---------------------------------------------------------------- objects


def _object(layout: Layout, encoder: _Encoder, value: Any) -> Node:
    if encoder.is_in_chain(value):
        custom = custom_state(value)
        if custom is not None:
            return _custom(layout, encoder, value, custom)
    elif not layout.is_importable:
        raise Opaque(f"an object of the local class {layout.name}")
    encode = encoder.encode
    held = value.__dict__ if layout.has_dict else {}
    attrs = {name: item if type(item) in _ATOMS else encode(item) for name, item in held.items()}
    for slot in layout.slots:
        try:
            attrs[slot.__name__] = encode(slot.__get__(value))
        except AttributeError:
            continue
    return {"kind": "object", "class": layout.name, "attrs": attrs}


def _custom(layout: Layout, encoder: _Encoder, value: Any, get_state: Callable[[], Any]) -> Node:
    try:
        state = encoder.encode_all([get_state()])[0]
    except NotImplementedError as error:
        raise Opaque(f"{layout.name}, whose get_state() is not implemented") from error
    rng = encoder.encode(getattr(value, "_np_random", None))
    return {"kind": "custom", "class": layout.name, "state": state, "rng": rng}


def _space(encoder: _Encoder, value: gymnasium.Space[Any]) -> Node:
    return {"kind": "space", "rngs": [encoder.encode(part._np_random) for part in space_parts(value)]}


def _enum(encoder: _Encoder, value: enum.Enum) -> Node:
    return {"kind": "enum", "class": global_name(type(value)), "value": encoder.encode(value.value)}


# ---------------------------------------------------------------- containers


def _list(encoder: _Encoder, value: list[Any]) -> Node:
    return {"kind": "list", "items": encoder.encode_all(value)}


def _tuple(encoder: _Encoder, value: tuple[Any, ...]) -> Node:
    node = {"kind": "tuple", "items": encoder.encode_all(value)}
    if type(value) is not tuple:
        if not hasattr(value, "_fields"):
            raise Opaque(f"a {type(value).__qualname__}, which is a tuple with a class of its own")
        node["class"] = global_name(type(value))
    return node


def _set(encoder: _Encoder, value: set[Any] | frozenset[Any]) -> Node:
    # The order in which a set gives its items depends on what it held before, and steps may depend on it.
    items = list(value)
    if any(old is not new for old, new in zip(items, type(value)(items), strict=True)):
        raise Opaque("a set that would give its items in another order after a restore")
    return {"kind": type(value).__name__, "items": encoder.encode_all(items)}


def _deque(encoder: _Encoder, value: collections.deque[Any]) -> Node:
    return {"kind": "deque", "items": encoder.encode_all(value), "maxlen": value.maxlen}


def _dict(encoder: _Encoder, value: dict[Any, Any]) -> Node:
    return {
        "kind": type(value).__name__,
        "keys": encoder.encode_all(value),
        "values": encoder.encode_all(value.values()),
    }


def _defaultdict(encoder: _Encoder, value: collections.defaultdict[Any, Any]) -> Node:
    return {**_dict(encoder, value), "factory": encoder.encode(value.default_factory)}


# ---------------------------------------------------------------- numbers and arrays


def _float(_: _Encoder, value: float) -> Node:
    return {"kind": "float", "text": repr(value)}


def _bytes(_: _Encoder, value: bytes) -> Node:
    return {"kind": "bytes", "hex": value.hex()}


def _range(_: _Encoder, value: range) -> Node:
    return {"kind": "range", "bounds": [value.start, value.stop, value.step]}


def _dtype(_: _Encoder, value: np.dtype[Any]) -> Node:
    if value.kind not in _ARRAY_KINDS + "US":
        raise Opaque(f"the dtype {value}")
    return {"kind": "dtype", "dtype": value.str}


def _scalar(encoder: _Encoder, value: np.generic) -> Node:
    if value.dtype.kind not in _ARRAY_KINDS + "U" or (value.dtype.kind == "f" and value.itemsize > 8):
        raise Opaque(f"a numpy scalar of dtype {value.dtype}")
    return {"kind": "scalar", "dtype": value.dtype.str, "item": encoder.encode(value.item())}


def _array(encoder: _Encoder, value: Array) -> Node:
    if value.dtype.kind in "OUS":
        return _item_array(encoder, value)
    is_plain = value.dtype.kind in _ARRAY_KINDS and value.itemsize <= 8 and value.dtype.isnative
    if not is_plain:
        raise Opaque(f"an array of dtype {value.dtype}")
    if value.base is not None and not isinstance(value.base, bytes):
        return _view(encoder, value, value.base)
    if value.flags.c_contiguous:
        return {"kind": "array", "data": value.copy()}
    # The order of sums, and with it the last bit, depends on how an array lies in memory.
    return {
        "kind": "array",
        "data": value.ravel("K").copy(),
        "shape": list(value.shape),
        "strides": list(value.strides),
    }


def _view(encoder: _Encoder, value: Array, base: Array) -> Node:
    is_dense = type(base) is np.ndarray and (base.flags.owndata or base.flags.c_contiguous)
    if not is_dense or base.dtype.kind not in _ARRAY_KINDS:
        raise Opaque("an array on top of memory that is not numpy's")
    return {
        "kind": "view",
        "base": encoder.encode(base),
        "dtype": value.dtype.str,
        "offset": value.__array_interface__["data"][0] - base.__array_interface__["data"][0],
        "shape": list(value.shape),
        "strides": list(value.strides),
    }


def _item_array(encoder: _Encoder, value: Array) -> Node:
    if value.base is not None:
        raise Opaque(f"a view of an array of dtype {value.dtype}")
    items = encoder.encode_all(value.ravel().tolist())
    return {"kind": "item array", "dtype": value.dtype.str, "shape": list(value.shape), "items": items}


# ---------------------------------------------------------------- random generators


def _generator(encoder: _Encoder, value: np.random.Generator) -> Node:
    return {"kind": "generator", "bits": encoder.encode(value.bit_generator)}


def _bit_generator(encoder: _Encoder, value: np.random.BitGenerator) -> Node:
    encoder.claim_bits(value)
    seeds = value.seed_seq
    if type(value).__module__.partition(".")[0] != "numpy" or type(seeds) is not np.random.SeedSequence:
        raise Opaque(f"the bit generator {type(value).__qualname__}")
    return {
        "kind": "bit generator",
        "class": type(value).__name__,
        "state": encoder.encode(value.state),
        "entropy": encoder.encode(seeds.entropy),
        "spawn": [encoder.encode(seeds.spawn_key), seeds.pool_size, seeds.n_children_spawned],
    }


def _random_state(encoder: _Encoder, value: np.random.RandomState) -> Node:
    if value is getattr(np.random.rand, "__self__", None):
        raise Opaque("numpy's global random state")
    encoder.claim_bits(value._bit_generator)
    return {"kind": "random state", "state": encoder.encode(value.get_state(legacy=False))}


def _random(encoder: _Encoder, value: random.Random) -> Node:
    if type(value) is not random.Random or value is getattr(random.random, "__self__", None):
        raise Opaque("Python's global random state, or a random generator of another class")
    version, words, gauss = value.getstate()
    return {
        "kind": "random",
        "version": version,
        "words": np.array(words, np.uint32),
        "gauss": encoder.encode(gauss),
    }


# ---------------------------------------------------------------- functions, classes, modules


def _function(encoder: _Encoder, value: types.FunctionType) -> Node:
    try:
        cells = [encoder.encode(cell.cell_contents) for cell in value.__closure__ or ()]
    except ValueError as error:
        raise Opaque(f"the function {global_name(value)} with an empty cell") from error
    attrs = {name: encoder.encode(item) for name, item in value.__dict__.items()}
    return {"kind": "function", "name": global_name(value), "cells": cells, "attrs": attrs}


def _method(encoder: _Encoder, value: types.MethodType) -> Node:
    owner, name = value.__self__, value.__func__.__name__
    if getattr(getattr(owner, name, None), "__func__", None) is not value.__func__:
        raise Opaque(f"the method {name}, which {type(owner).__qualname__} does not have under this name")
    return {"kind": "method", "self": encoder.encode_all([owner])[0], "name": name}


def _builtin(encoder: _Encoder, value: types.BuiltinFunctionType) -> Node:
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        return {"kind": "global", "name": f"{value.__module__}:{value.__qualname__}"}
    return {"kind": "method", "self": encoder.encode_all([owner])[0], "name": value.__name__}


def _global(_: _Encoder, value: type | types.ModuleType) -> Node:
    name = global_name(value)
    if name.rstrip(":") in _RANDOM_MODULES:
        raise Opaque(f"the module {name.rstrip(':')}, which draws from a global random state")
    return {"kind": "global", "name": name}


def _partial(encoder: _Encoder, value: functools.partial[Any]) -> Node:
    func, args = encoder.encode_all([value.func, value.args])
    return {"kind": "partial", "func": func, "args": args, "keywords": encoder.encode(value.keywords)}


_MAKERS: dict[type, _Maker | None] = {
    float: _float,
    bytes: _bytes,
    range: _range,
    list: _list,
    tuple: _tuple,
    dict: _dict,
    collections.OrderedDict: _dict,
    collections.Counter: _dict,
    collections.defaultdict: _defaultdict,
    set: _set,
    frozenset: _set,
    collections.deque: _deque,
    np.ndarray: _array,
    np.random.Generator: _generator,
    np.random.RandomState: _random_state,
    random.Random: _random,
    types.FunctionType: _function,
    types.MethodType: _method,
    types.BuiltinFunctionType: _builtin,
    types.ModuleType: _global,
    functools.partial: _partial,
    np.ufunc: None,
    type(Lock()): None,
    type(RLock()): None,
}
_FAMILIES: tuple[tuple[type, _Maker], ...] = (
    (type, _global),
    (enum.Enum, _enum),
    (gymnasium.Space, _space),
    (np.generic, _scalar),
    (np.dtype, _dtype),
    (np.random.BitGenerator, _bit_generator),
    (random.Random, _random),
    (tuple, _tuple),
)
