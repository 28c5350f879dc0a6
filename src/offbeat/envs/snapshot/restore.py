"""From plain data back onto an environment."""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import math
import random
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np

from offbeat.envs.snapshot.capture import is_object
from offbeat.envs.snapshot.classes import global_name, layout_of, lookup, module_of, package_of
from offbeat.envs.snapshot.parts import custom_state, space_parts, wrapper_chain
from offbeat.errors import EnvError
from offbeat.types import StateTree

Node = dict[str, Any]
_NONE_SUCH: Any = object()
"""Stands for the counterpart of a value that the environment does not have."""
_SAFE_BUILTINS = frozenset(
    f"builtins:{cls.__name__}" for cls in (bool, int, float, str, bytes, tuple, list, dict, set, frozenset)
)
_LIBRARIES = frozenset(("gymnasium", "numpy", "offbeat", *sys.stdlib_module_names))
"""Packages of which an environment has only the modules it uses; of its own package it has all."""
_MAX_WORDS = 1024
"""Numbers in the pool of a seed sequence; numpy's default is 4."""
_MAX_ITEM_BYTES = 1 << 16
"""Length of a text in an array of texts."""


def restore(obj: object, tree: StateTree) -> None:
    """Put a captured state onto an environment (or list of them) that was made in the same way and reset.

    Objects are changed in place, so that what belongs to the environment itself (spaces, functions, windows)
    stays; numbers, containers, arrays and random generators become those of the state. EnvError when the
    state is of an environment of another kind; the environment is not usable after that.
    """
    try:
        restored = _Decoder(obj, tree["nodes"]).decode(tree["root"], obj)
    except _UNFIT as error:
        # Of the error only a text: what else it may hold would be asked to print itself.
        detail = next((f": {text}" for text in error.args[:1] if isinstance(text, str)), "")
        raise EnvError(
            f"this is no state of {_kinds(obj)} ({type(error).__name__}{detail}); "
            "go on with the environment and the version that made the checkpoint"
        ) from error
    targets = obj if isinstance(obj, list) else [obj]
    results = restored if isinstance(restored, list) else [restored]
    if [id(env) for env in results] != [id(env) for env in targets]:
        raise EnvError(
            f"the saved state is of {_kinds(restored)}, not of {_kinds(obj)}; "
            "go on with the environment and the version that made the checkpoint"
        )


_UNFIT = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError),
    *(RecursionError, MemoryError, OverflowError),
)


def _kinds(found: object) -> str:
    """The classes of one thing or several; what they print is left out: it is theirs to say."""
    return ", ".join(type(one).__name__ for one in (found if isinstance(found, list) else [found]))


class _Decoder:
    """One walk over a state and, beside it, over the environment it is put onto."""

    def __init__(self, root: object, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._made: dict[int, Any] = {}
        self._used: set[int] = set()
        self._alive: list[object] = []
        self._chain = {id(env) for env in wrapper_chain(root)}
        self._shared: dict[str, frozenset[int]] = {}
        self._modules = {module_of(global_name(type(env))) for env in wrapper_chain(root)}
        self._packages = set(map(package_of, self._modules)) - _LIBRARIES

    def decode(self, value: Any, old: Any = _NONE_SUCH) -> Any:
        """Return what an encoded value stands for; ``old`` is what the environment has in its place."""
        if type(value) is not list:
            return value
        if not value:
            return old
        index = value[0]
        if index not in self._made:
            node = self._nodes[index]
            made = _READERS[node["kind"]](self, index, node, old)
            self._made.setdefault(index, made)
        return self._made[index]

    def decode_all(self, values: Sequence[Any], old: object) -> list[Any]:
        """Decode the items of a sequence beside the items of ``old``, if that is one."""
        olds = list(old) if isinstance(old, (list, tuple, collections.deque)) else []
        olds.extend([_NONE_SUCH] * (len(values) - len(olds)))
        return [self.decode(value, before) for value, before in zip(values, olds, strict=False)]

    def begin(self, index: int, made: object) -> None:
        """Make a node's object known before its contents are decoded: they may contain it."""
        self._made[index] = made

    def claim(self, old: object, is_owned: bool = True) -> bool:
        """Take an object of the environment for one node; False when it is taken.

        With ``is_owned``, also False for what a module holds: changing it would change other environments.
        """
        if id(old) in self._used:
            return False
        name = global_name(type(old))
        if is_owned and id(old) not in self._chain and id(old) in self._shared_in(package_of(name)):
            return False
        self._used.add(id(old))
        self._alive.append(old)
        self._modules.add(module_of(name))
        return True

    def find(self, name: str) -> Any:
        """Look up a class or function where the environment comes from; a state cannot reach others."""
        found = lookup(name) if name in _SAFE_BUILTINS or self._is_own(name) else None
        if found is None:
            raise EnvError(
                f"the saved state needs {name}, which this environment does not use; "
                "go on with the environment and the version that made the checkpoint"
            )
        return found

    def _is_own(self, name: str) -> bool:
        return package_of(name) in self._packages or module_of(name) in self._modules - {"builtins"}

    def is_own_method(self, owner: object, name: str) -> bool:
        """Tell whether a state may bind a method: of the environment's code or of a plain container."""
        if type(owner) in _CONTAINERS:
            return not name.startswith("_")
        cls: type[Any] = owner if isinstance(owner, type) else type(owner)
        is_own = package_of(global_name(cls)) in self._packages and not name.startswith("__")
        return is_own and isinstance(inspect.getattr_static(cls, name, None), _METHODS)

    def _shared_in(self, package: str) -> frozenset[int]:
        """Ids of what the modules of a package hold, directly or in their containers."""
        if package not in self._shared:
            shared: set[int] = set()
            for name, module in list(sys.modules.items()):
                if package_of(name) == package and module is not None:
                    for value in list(vars(module).values()):
                        shared.add(id(value))
                        shared.update(map(id, _members(value)))
            self._shared[package] = frozenset(shared)
        return self._shared[package]


def _members(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else []


def _missing(what: str) -> EnvError:
    return EnvError(
        f"the saved state has {what} where this environment has none, and it cannot be made anew; "
        "give the environment get_state() and set_state(state)"
    )


# ---------------------------------------------------------------- objects


def _object(decoder: _Decoder, index: int, node: Node, old: Any) -> Any:
    name, attrs = node["class"], node["attrs"]
    made = old
    if old is _NONE_SUCH or global_name(type(old)) != name or not decoder.claim(old):
        made = _new_object(decoder, name, attrs, old)
    cls: Any = type(made)
    layout = layout_of(cls)
    if layout is None or not is_object(cls):
        raise _missing(f"an object of class {name}")
    decoder.begin(index, made)
    slots = {slot.__name__: slot for slot in layout.slots}
    before = dict(made.__dict__) if layout.has_dict else {}
    before.update({slot: getattr(made, slot) for slot in slots if hasattr(made, slot)})
    _refuse_shadows(cls, attrs.keys() - before.keys())
    after = {key: decoder.decode(value, before.get(key, _NONE_SUCH)) for key, value in attrs.items()}
    after = {key: value for key, value in after.items() if value is not _NONE_SUCH}
    for key, slot in slots.items():
        if key in after:
            slot.__set__(made, after.pop(key))
        elif key in before:
            slot.__delete__(made)
    if layout.has_dict:
        made.__dict__.clear()
        made.__dict__.update(after)
    return made


def _new_object(decoder: _Decoder, name: str, attrs: dict[str, Any], old: Any) -> Any:
    if name == "types:SimpleNamespace":
        return types.SimpleNamespace()
    cls = _class_of(decoder, name, old)
    # A class with __del__ would run its code when the state is dropped.
    is_plain = isinstance(cls, type) and is_object(cls) and not hasattr(cls, "__del__")
    if not is_plain or [] in attrs.values():
        raise _missing(f"an object of class {name}")
    return object.__new__(cls)


def _class_of(decoder: _Decoder, name: str, old: Any) -> Any:
    """Return the class of this name: that of what the environment has in its place, or one of its own."""
    is_same = old is not _NONE_SUCH and global_name(type(old)) == name
    return type(old) if is_same else decoder.find(name)


def _refuse_shadows(cls: type[Any], names: Iterable[str]) -> None:
    """Refuse attributes that would take the place of methods: what is called next must be the class's own."""
    for name in names:
        member = inspect.getattr_static(cls, name, None)
        if callable(member) or isinstance(member, (classmethod, staticmethod, property)):
            raise EnvError(
                f"the saved state would replace {global_name(cls)}.{name}, which is code; "
                "go on with the environment and the version that made the checkpoint"
            )


def _custom(decoder: _Decoder, index: int, node: Node, old: Any) -> Any:
    if custom_state(old) is None or global_name(type(old)) != node["class"]:
        raise _missing(f"an environment of class {node['class']}")
    decoder.begin(index, old)
    rng = decoder.decode(node["rng"])
    if rng is not None:
        old._np_random = rng
    old.set_state(decoder.decode(node["state"]))
    return old


def _space(decoder: _Decoder, _: int, node: Node, old: Any) -> Any:
    if not isinstance(old, gymnasium.Space):
        raise _missing("a space")
    for part, rng in zip(space_parts(old), node["rngs"], strict=True):
        part._np_random = _plain(decoder.decode(rng), np.random.Generator, type(None))
    return old


def _enum(decoder: _Decoder, _: int, node: Node, old: Any) -> Any:
    cls = _class_of(decoder, node["class"], old)
    if not issubclass(cls, enum.Enum):
        raise _missing(f"a member of {node['class']}")
    return cls(decoder.decode(node["value"]))


# ---------------------------------------------------------------- containers


def _list(decoder: _Decoder, index: int, node: Node, old: Any) -> Any:
    made: list[Any] = []
    decoder.begin(index, made)
    made.extend(decoder.decode_all(node["items"], old))
    return made


def _tuple(decoder: _Decoder, _: int, node: Node, old: Any) -> Any:
    items = decoder.decode_all(node["items"], old)
    if "class" not in node:
        return tuple(items)
    cls = _class_of(decoder, node["class"], old)
    if not issubclass(cls, tuple) or len(getattr(cls, "_fields", ())) != len(items):
        raise _missing(f"a tuple of class {node['class']}")
    return tuple.__new__(cls, items)


def _set(decoder: _Decoder, index: int, node: Node, _: Any) -> Any:
    if node["kind"] == "frozenset":
        return frozenset(decoder.decode_all(node["items"], None))
    made: set[Any] = set()
    decoder.begin(index, made)
    made.update(decoder.decode_all(node["items"], None))
    return made


def _deque(decoder: _Decoder, index: int, node: Node, old: Any) -> Any:
    made: collections.deque[Any] = collections.deque(maxlen=node["maxlen"])
    decoder.begin(index, made)
    made.extend(decoder.decode_all(node["items"], old))
    return made


def _dict(decoder: _Decoder, index: int, node: Node, old: Any) -> Any:
    made: dict[Any, Any] = _DICTS[node["kind"]]()
    decoder.begin(index, made)
    if isinstance(made, collections.defaultdict):
        factory = old.default_factory if isinstance(old, collections.defaultdict) else _NONE_SUCH
        made.default_factory = decoder.decode(node["factory"], factory)
    olds = old if isinstance(old, dict) else {}
    for encoded, value in zip(node["keys"], node["values"], strict=True):
        key = decoder.decode(encoded)
        made[key] = decoder.decode(value, olds.get(key, _NONE_SUCH))
    return made


# ---------------------------------------------------------------- numbers and arrays


def _float(_: _Decoder, __: int, node: Node, ___: Any) -> Any:
    return float(node["text"])


def _bytes(_: _Decoder, __: int, node: Node, ___: Any) -> Any:
    return bytes.fromhex(node["hex"])


def _range(_: _Decoder, __: int, node: Node, ___: Any) -> Any:
    return range(*node["bounds"])


def _dtype(_: _Decoder, __: int, node: Node, ___: Any) -> Any:
    return _plain_dtype(node, "biufUS")


def _plain_dtype(node: Node, kinds: str) -> np.dtype[Any]:
    """The dtype of a node, if it is of these kinds; a name may not reach numpy's more inventive ones."""
    name = node["dtype"]
    dtype = np.dtype(name if isinstance(name, str) else "V")
    if dtype.kind not in kinds or dtype.itemsize > _MAX_ITEM_BYTES:
        raise ValueError(f"the dtype {name!r:.40}")
    return dtype


def _plain(value: Any, *kinds: type) -> Any:
    """The value, if it is exactly of one of these classes."""
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__} in place of a {kinds[0].__name__}")
    return value


def _scalar(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    item = _plain(decoder.decode(node["item"]), int, float, bool, str)
    return _plain_dtype(node, "biufU").type(item)


def _array(_: _Decoder, __: int, node: Node, ___: Any) -> Any:
    data = _plain(node["data"], np.ndarray).copy()
    if "strides" not in node:
        return data
    return np.ndarray(tuple(node["shape"]), data.dtype, data, 0, tuple(node["strides"]))


def _view(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    base = _plain(decoder.decode(node["base"]), np.ndarray)
    shape, strides = tuple(node["shape"]), tuple(node["strides"])
    memory = _plain(base if base.flags.c_contiguous else base.base, np.ndarray)
    if memory.dtype.kind not in "biuf":
        raise TypeError("a view of an array of objects")
    return np.ndarray(shape, _plain_dtype(node, "biuf"), memory, node["offset"], strides)


def _item_array(decoder: _Decoder, index: int, node: Node, old: Any) -> Any:
    if math.prod(node["shape"]) != len(node["items"]):
        raise ValueError("an array with another number of items than its shape says")
    made = np.empty(tuple(node["shape"]), _plain_dtype(node, "OUS"))
    decoder.begin(index, made)
    olds = old.ravel().tolist() if isinstance(old, np.ndarray) else None
    flat = made.reshape(-1)
    for place, item in enumerate(decoder.decode_all(node["items"], olds)):
        flat[place] = item if made.dtype.kind == "O" else _plain(item, str, bytes)
    return made


# ---------------------------------------------------------------- random generators


def _generator(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    bits = decoder.decode(node["bits"])
    return np.random.Generator(_plain(bits, *_BIT_GENERATORS.values()))


def _bit_generator(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    cls = _BIT_GENERATORS[node["class"]]
    key, pool_size, num_children = node["spawn"]
    if not 0 < pool_size <= _MAX_WORDS:
        raise ValueError(f"a pool of {pool_size} numbers")
    seeds = np.random.SeedSequence(
        _numbers(decoder.decode(node["entropy"])),
        spawn_key=_numbers(decoder.decode(key)),
        pool_size=pool_size,
        n_children_spawned=num_children,
    )
    made: Any = cls(seeds)
    made.state = _generator_state(decoder.decode(node["state"]))
    return made


def _numbers(value: Any) -> Any:
    """The value, if it is a whole number, several, or none: what seeds are made of."""
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item, int) for item in value)
    return value if type(value) is np.ndarray and value.dtype.kind in "iu" else _plain(value, int, type(None))


def _generator_state(value: Any) -> Any:
    """The value, if it is a dict of numbers, texts and arrays, as the states of random generators are."""
    if type(value) is dict:
        return {_plain(key, str): _generator_state(item) for key, item in value.items()}
    return _plain(value, int, float, str, bool, np.ndarray, np.uint64)


def _random_state(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    made = np.random.RandomState(0)
    made.set_state(_generator_state(_plain(decoder.decode(node["state"]), dict)))
    return made


def _random(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    made = random.Random()
    words = tuple(_plain(node["words"], np.ndarray).tolist())
    gauss = _plain(decoder.decode(node["gauss"]), float, int, type(None))
    made.setstate((_plain(node["version"], int), words, gauss))
    return made


# ---------------------------------------------------------------- functions, classes, modules


def _function(decoder: _Decoder, index: int, node: Node, old: Any) -> Any:
    is_same = isinstance(old, types.FunctionType) and global_name(old) == node["name"]
    if not is_same or not decoder.claim(old, is_owned=False):
        # One of a module's: what it holds belongs to every environment, and stays as it is.
        found = _plain(decoder.find(node["name"]), types.FunctionType)
        if (found.__closure__ or found.__dict__) and found is not old:
            raise _missing(f"the function {node['name']} with a state of its own")
        return found
    decoder.begin(index, old)
    for cell, value in zip(old.__closure__ or (), node["cells"], strict=True):
        cell.cell_contents = decoder.decode(value, cell.cell_contents)
    for name, value in node["attrs"].items():
        old.__dict__[name] = decoder.decode(value, old.__dict__.get(name, _NONE_SUCH))
    return old


def _method(decoder: _Decoder, _: int, node: Node, old: Any) -> Any:
    name = _plain(node["name"], str)
    is_bound = isinstance(old, (types.MethodType, types.BuiltinFunctionType))
    owner = decoder.decode(node["self"], old.__self__ if is_bound else _NONE_SUCH)
    is_same = is_bound and old.__name__ == name and type(old.__self__) is type(owner)
    if not is_same and not decoder.is_own_method(owner, name):
        raise _missing(f"the method {name} of a {type(owner).__name__}")
    return getattr(owner, name)


def _global(decoder: _Decoder, _: int, node: Node, old: Any) -> Any:
    if (
        isinstance(old, (type, types.ModuleType, types.BuiltinFunctionType))
        and global_name(old) == node["name"]
    ):
        return old
    return decoder.find(node["name"])


def _partial(decoder: _Decoder, _: int, node: Node, old: Any) -> Any:
    before = old if isinstance(old, functools.partial) else None
    func = decoder.decode(node["func"], before.func if before else _NONE_SUCH)
    args = decoder.decode(node["args"], before.args if before else _NONE_SUCH)
    keywords = decoder.decode(node["keywords"], before.keywords if before else _NONE_SUCH)
    return functools.partial(func, *args, **keywords)


_DICTS: dict[str, Callable[[], dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "defaultdict": collections.defaultdict,
}
_BIT_GENERATORS = {
    cls.__name__: cls
    for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
_CONTAINERS = (
    *(list, dict, set, frozenset, collections.deque, *_DICTS.values()),
    *(np.random.Generator, np.random.RandomState, random.Random),
)
"""Things whose methods change nothing but themselves."""
_METHODS = (types.FunctionType, classmethod, staticmethod)
_READERS: dict[str, Callable[[_Decoder, int, Node, Any], Any]] = {
    **dict.fromkeys(_DICTS, _dict),
    "object": _object,
    "custom": _custom,
    "space": _space,
    "enum": _enum,
    "list": _list,
    "tuple": _tuple,
    "set": _set,
    "frozenset": _set,
    "deque": _deque,
    "float": _float,
    "bytes": _bytes,
    "range": _range,
    "dtype": _dtype,
    "scalar": _scalar,
    "array": _array,
    "view": _view,
    "item array": _item_array,
    "generator": _generator,
    "bit generator": _bit_generator,
    "random state": _random_state,
    "random": _random,
    "function": _function,
    "method": _method,
    "global": _global,
    "partial": _partial,
}
