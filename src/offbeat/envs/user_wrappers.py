"""Wrappers that a configuration names, around environments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import gymnasium

from offbeat.config.code import import_named
from offbeat.envs.checks import check_spaces
from offbeat.errors import EnvError

if TYPE_CHECKING:
    from offbeat.config.models import WrapperConfig

AnyEnv = gymnasium.Env[Any, Any]


def wrapped(env: AnyEnv, name: str, wrappers: Sequence[WrapperConfig]) -> AnyEnv:
    """Put wrappers around the environment called ``name``, the first one innermost."""
    classes = [_find(config.wrapper, index) for index, config in enumerate(wrappers)]
    for index, (cls, config) in enumerate(zip(classes, wrappers, strict=True)):
        try:
            env = cls(env, **config.kwargs)
        except Exception as error:
            raise EnvError(
                f"env.wrappers[{index}]: {config.wrapper} cannot be put around {name}: "
                f"{type(error).__name__}: {error}; it takes {_arguments(cls)}"
            ) from error
        check_spaces(f"{name} in {config.wrapper}", env)
    return env


def _find(name: str, index: int) -> type[gymnasium.Wrapper[Any, Any, Any, Any]]:
    """Import a wrapper by ``module:Class``; nothing is called that is no Wrapper."""
    where = f"env.wrappers[{index}]"
    module_name, _, path = name.partition(":")
    try:
        found: object = reduce(getattr, path.split("."), import_named(module_name))
    except ImportError as error:
        raise EnvError(
            f"{where}: cannot import {module_name!r} ({error}); install the package, or run from the folder "
            "it lies in"
        ) from error
    except AttributeError as error:
        raise EnvError(f"{where}: {module_name} has no {path!r}; name a wrapper as module:Class") from error
    if isinstance(found, type) and issubclass(found, gymnasium.Wrapper):
        return found
    kind = f"the class {found.__qualname__}" if isinstance(found, type) else f"a {type(found).__name__}"
    hint = ""
    if isinstance(found, type) and issubclass(found, gymnasium.vector.VectorWrapper):
        hint = "; it is for vector environments: take the one of gymnasium.wrappers"
    raise EnvError(f"{where}: {name} is {kind}, not a subclass of gymnasium.Wrapper{hint}")


def _arguments(cls: type[object]) -> str:
    try:
        _, *names = inspect.signature(cls).parameters
    except (TypeError, ValueError):
        return "other arguments"
    return f"the arguments {', '.join(names)}" if names else "no arguments"
