"""What capture and restore must see in the same way: wrappers, spaces inside spaces, states by request."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv, VectorWrapper


def wrapper_chain(root: object) -> list[object]:
    """Return an environment, or each of a list of them, with everything it wraps, from the outside in."""
    chain: list[object] = []
    for outer in root if isinstance(root, list) else [root]:
        chain.append(outer)
        while isinstance(chain[-1], (gymnasium.Wrapper, VectorWrapper)):
            chain.append(chain[-1].env)
    return chain


def space_parts(space: gymnasium.Space[Any]) -> list[gymnasium.Space[Any]]:
    """Return a space and the spaces in it, in a fixed order: each may have a random generator of its own."""
    inner: Any = getattr(space, "spaces", ())
    parts = [space]
    for part in inner.values() if isinstance(inner, dict) else inner:
        parts.extend(space_parts(part))
    return parts


def custom_state(env: Any) -> Callable[[], Any] | None:
    """Return the environment's own ``get_state`` when it has that and a ``set_state(state)``, else None."""
    cls: Any = type(env)
    return env.get_state if _has_custom_state(cls) else None


@functools.cache
def _has_custom_state(cls: type[Any]) -> bool:
    if not issubclass(cls, (gymnasium.Env, VectorEnv)) or issubclass(cls, (gymnasium.Wrapper, VectorWrapper)):
        return False
    get_state, set_state = getattr(cls, "get_state", None), getattr(cls, "set_state", None)
    return _takes(get_state, "self") and _takes(set_state, "self", "state")


def _takes(method: object, *arguments: str) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    return True
