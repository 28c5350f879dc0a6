"""From plain data back onto an environment."""

from __future__ import annotations

import collections
import enum
import functools
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from offbeat.envs.snapshot.classes import global_name, layout_of, lookup, package_of
from offbeat.envs.snapshot.parts import custom_state, space_parts, wrapper_chain
from offbeat.errors import EnvError
from offbeat.types import StateTree

Node = dict[str, Any]
_NONE_SUCH: Any = object()
"""Stands for the counterpart of a value that the environment does not have."""
_SAFE_BUILTINS = frozenset(
    f"builtins:{cls.__name__}" for cls in (bool, int, float, str, bytes, tuple, list, dict, set, frozenset)
)


def restore(obj: object, tree: StateTree) -> None:
    """Put a captured state onto an environment (or list of them) that was made in the same way and reset.

    Objects are changed in place, so that what belongs to the environment itself (spaces, functions, windows)
    stays; numbers, containers, arrays and random generators become those of the state. EnvError when the
    state is of an environment of another kind; the environment is not usable after that.
    """
    try:
        restored = _Decoder(obj, tree["nodes"]).decode(tree["root"], obj)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EnvError(
            f"this is no state of {obj} ({type(error).__name__}: {error}); "
            "go on with the environment and the version that made the checkpoint"
        ) from error
    targets = obj if isinstance(obj, list) else [obj]
    results = restored if isinstance(restored, list) else [restored]
    if [id(env) for env in results] != [id(env) for env in targets]:
        raise EnvError(
            f"the saved state is of {results}, not of {targets}; "
            "go on with the environment and the version that made the checkpoint"
        )


class _Decoder:
    """One walk over a state and, beside it, over the environment it is put onto."""

    def __init__(self, root: object, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._made: dict[int, Any] = {}
        self._used: set[int] = set()
        self._alive: list[object] = []
        self._chain = {id(env) for env in wrapper_chain(root)}
        self._shared: dict[str, frozenset[int]] = {}
        self._packages = {package_of(global_name(type(env))) for env in wrapper_chain(root)}

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
        package = package_of(global_name(type(old)))
        if id(old) in self._used:
            return False
        if is_owned and id(old) not in self._chain and id(old) in self._shared_in(package):
            return False
        self._used.add(id(old))
        self._alive.append(old)
        self._packages.add(package)
        return True

    def find(self, name: str) -> Any:
        """Look up a global name in packages that the environment itself uses; a state cannot reach others."""
        is_known = package_of(name) in self._packages or name in _SAFE_BUILTINS
        found = lookup(name) if is_known else None
        if found is None:
            raise EnvError(
                f"the saved state needs {name}, which this environment does not use; "
                "go on with the environment and the version that made the checkpoint"
            )
        return found

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
        made = _new_object(decoder, name, attrs)
    cls: Any = type(made)
    layout = layout_of(cls)
    assert layout is not None
    decoder.begin(index, made)
    slots = {slot.__name__: slot for slot in layout.slots}
    before = dict(made.__dict__) if layout.has_dict else {}
    before.update({slot: getattr(made, slot) for slot in slots if hasattr(made, slot)})
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


def _new_object(decoder: _Decoder, name: str, attrs: dict[str, Any]) -> Any:
    if name == "types:SimpleNamespace":
        return types.SimpleNamespace()
    cls = decoder.find(name)
    if not isinstance(cls, type) or layout_of(cls) is None or [] in attrs.values():
        raise _missing(f"an object of class {name}")
    return object.__new__(cls)


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
        part._np_random = decoder.decode(rng)
    return old


def _enum(decoder: _Decoder, _: int, node: Node, old: Any) -> Any:
    is_same = old is not _NONE_SUCH and global_name(type(old)) == node["class"]
    cls = type(old) if is_same else decoder.find(node["class"])
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
    is_same = old is not _NONE_SUCH and global_name(type(old)) == node["class"]
    cls = type(old) if is_same else decoder.find(node["class"])
    if not issubclass(cls, tuple):
        raise _missing(f"a tuple of class {node['class']}")
    return cls(*items)


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
        factory = getattr(old, "default_factory", _NONE_SUCH)
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
    return np.dtype(node["dtype"])


def _scalar(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    return np.dtype(node["dtype"]).type(decoder.decode(node["item"]))


def _array(_: _Decoder, __: int, node: Node, ___: Any) -> Any:
    data = np.array(node["data"])
    if "strides" not in node:
        return data
    return np.ndarray(tuple(node["shape"]), data.dtype, data, 0, tuple(node["strides"]))


def _view(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    base = decoder.decode(node["base"])
    shape, strides = tuple(node["shape"]), tuple(node["strides"])
    memory = base if base.flags.c_contiguous else base.base
    return np.ndarray(shape, np.dtype(node["dtype"]), memory, node["offset"], strides)


def _item_array(decoder: _Decoder, index: int, node: Node, old: Any) -> Any:
    made = np.empty(tuple(node["shape"]), np.dtype(node["dtype"]))
    decoder.begin(index, made)
    olds = old.ravel().tolist() if isinstance(old, np.ndarray) else None
    flat = made.reshape(-1)
    for place, item in enumerate(decoder.decode_all(node["items"], olds)):
        flat[place] = item
    return made


# ---------------------------------------------------------------- random generators


def _generator(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    return np.random.Generator(decoder.decode(node["bits"]))


def _bit_generator(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    cls = _BIT_GENERATORS[node["class"]]
    key, pool_size, num_children = node["spawn"]
    entropy = decoder.decode(node["entropy"])
    seeds = np.random.SeedSequence(
        entropy, spawn_key=decoder.decode(key), pool_size=pool_size, n_children_spawned=num_children
    )
    made: Any = cls(seeds)
    made.state = decoder.decode(node["state"])
    return made


def _random_state(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    made = np.random.RandomState(0)
    made.set_state(decoder.decode(node["state"]))
    return made


def _random(decoder: _Decoder, _: int, node: Node, __: Any) -> Any:
    made = random.Random()
    made.setstate((node["version"], tuple(node["words"].tolist()), decoder.decode(node["gauss"])))
    return made


# ---------------------------------------------------------------- functions, classes, modules


def _function(decoder: _Decoder, index: int, node: Node, old: Any) -> Any:
    made = old
    is_same = isinstance(old, types.FunctionType) and global_name(old) == node["name"]
    if not is_same or not decoder.claim(old, is_owned=False):
        made = decoder.find(node["name"])
    cells = made.__closure__ or ()
    decoder.begin(index, made)
    for cell, value in zip(cells, node["cells"], strict=True):
        cell.cell_contents = decoder.decode(value, cell.cell_contents)
    for name, value in node["attrs"].items():
        setattr(made, name, decoder.decode(value, getattr(made, name, _NONE_SUCH)))
    return made


def _method(decoder: _Decoder, _: int, node: Node, old: Any) -> Any:
    owner = decoder.decode(node["self"], getattr(old, "__self__", _NONE_SUCH))
    return getattr(owner, node["name"])


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
