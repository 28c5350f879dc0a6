"""What kind of thing a class is: whether its instances show all their state, and how a state names it."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement or at run time, not compiled in
_POINTER_BYTES = object.__basicsize__ // 2  # an object is a reference count and a type pointer
_STATEFUL_MODULES = frozenset(
    ("threading", "multiprocessing", "subprocess", "socket", "asyncio", "concurrent", "queue", "io", "ctypes")
)
_OUTSIDE_ENGINES = frozenset(("pybullet", "traci", "libsumo"))
"""Simulators that environments only hold a number or nothing of: their state is in the module's process."""


class Opaque(Exception):
    """Something whose state cannot be seen from Python; the message says what it is."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where instances of a class keep their state: a ``__dict__``, slots, or both."""

    name: str
    has_dict: bool
    slots: tuple[MemberDescriptorType, ...]
    is_importable: bool


@functools.cache
def layout_of(cls: type[Any]) -> Layout | None:
    """Describe a class written in Python; None when instances have other memory than dict and slots."""
    if cls is SimpleNamespace:
        return Layout("types:SimpleNamespace", True, (), True)
    family = [base for base in cls.__mro__ if base is not object]
    if any(_hides_state(base) for base in family):
        return None
    slots = tuple(
        member
        for base in family
        for member in vars(base).values()
        if isinstance(member, MemberDescriptorType) and member.__objclass__ is base
    )
    # A dict or weak reference that lies inside the object takes a pointer; newer Pythons keep them in front.
    num_pointers = len(slots) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    if cls.__basicsize__ != object.__basicsize__ + _POINTER_BYTES * num_pointers:
        return None
    name = global_name(cls)
    return Layout(name, cls.__dictoffset__ != 0, slots, lookup(name) is cls)


def _hides_state(cls: type[Any]) -> bool:
    if not cls.__flags__ & _HEAP_TYPE or package_of(global_name(cls)) in _STATEFUL_MODULES:
        return True
    around = vars(sys.modules.get(getattr(cls, "__module__", ""), object))
    modules = [value.__name__ for value in around.values() if isinstance(value, ModuleType)]
    return any(_package(name) in _OUTSIDE_ENGINES for name in modules)


def global_name(value: Any) -> str:
    """Return ``module:qualified.name`` of a class or function, ``module:`` of a module."""
    if isinstance(value, ModuleType):
        return f"{value.__name__}:"
    # Classes of some extensions have no module; in a spawned process the main script goes by another name.
    module = getattr(value, "__module__", "?")
    return f"{'__main__' if module == '__mp_main__' else module}:{value.__qualname__}"


def lookup(name: str) -> type[Any] | FunctionType | BuiltinFunctionType | None:
    """Return the class or function that `global_name` gives this very name; None when none is loaded.

    It is looked for in its own module and the classes around it, never through what a module imports, and
    without calling anything: a name can come from a file that somebody forged.
    """
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        if not isinstance(found, type) and (found is None or found is not sys.modules.get(module_name)):
            return None
        found = vars(found).get(part)
        found = found.__func__ if isinstance(found, staticmethod) else found
    is_global = isinstance(found, (type, FunctionType, BuiltinFunctionType)) and global_name(found) == name
    return found if is_global else None


def module_of(name: str) -> str:
    """Return the module of a global name."""
    return name.partition(":")[0]


def package_of(name: str) -> str:
    """Return the top-level package of a global name."""
    return _package(name.partition(":")[0])


def _package(module_name: str) -> str:
    return module_name.partition(".")[0]
