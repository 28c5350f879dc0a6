"""Code that a configuration names as ``module:NAME``: found, announced, imported."""

from __future__ import annotations

import contextlib
import importlib
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from offbeat.config.models import RunConfig

_Factory = TypeVar("_Factory", bound=Callable[..., Any])
_Loss = TypeVar("_Loss", bound=Callable[..., Any])
_MARK, _LOSS_MARK = "is_env_factory", "is_token_loss"
_own_losses: dict[str, Callable[..., Any]] = {}
_announced: ContextVar[set[str] | None] = ContextVar("announced", default=None)


def env_factory(function: _Factory) -> _Factory:
    """Declare a function that makes environments, so that ``env.id`` may name it.

    A configuration can come from anywhere: it names environment classes and such functions, nothing else.

    Example::

        @offbeat.env_factory
        def make_maze(size: int = 8) -> gymnasium.Env:
            return gymnasium.wrappers.FlattenObservation(Maze(size))
    """
    setattr(function, _MARK, True)
    return function


def is_env_factory(found: object) -> bool:
    """Tell whether a function was declared by `env_factory`."""
    return callable(found) and getattr(found, _MARK, False) is True


def token_loss(function: _Loss) -> _Loss:
    """Declare a loss of language models, so that ``algorithm.loss`` may name it: ``module:function``.

    In the process that declares it its own name will do. It gets a `offbeat.ops.token_losses.TokenBatch` and
    returns a loss for each token.

    Example::

        @offbeat.token_loss
        def reinforce(batch):
            return -batch.advantages * batch.log_probs
    """
    _own_losses[function.__name__] = function
    setattr(function, _LOSS_MARK, True)
    return function


def is_token_loss(found: object) -> bool:
    """Tell whether a function was declared by `token_loss`."""
    return callable(found) and getattr(found, _LOSS_MARK, False) is True


def own_losses() -> Mapping[str, Callable[..., Any]]:
    """Return the functions that were declared by `token_loss` in this process, by name."""
    return _own_losses


def import_named(module_name: str) -> ModuleType:
    """Import a module that a configuration names, also from the working directory; ImportError if refused.

    The standard library holds nothing that a configuration needs, and some of its modules act on import.
    """
    package = module_name.partition(".")[0]
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ImportError(f"{module_name!r} is no name of a module")
    if package in sys.stdlib_module_names:
        raise ImportError(f"{package} is a module of Python itself, not of an environment or algorithm")
    _search_here()
    announce(module_name)
    return importlib.import_module(module_name)


def _search_here() -> None:
    """Look for modules in the working directory, too, after the installed packages."""
    directory = os.getcwd()
    if not {"", directory} & set(sys.path):
        sys.path.append(directory)


# ---------------------------------------------------------------- announcing


@contextlib.contextmanager
def announced_imports() -> Iterator[None]:
    """Within the block, print a line before code is imported from outside the installed packages."""
    told = _announced.get()
    token = _announced.set(set() if told is None else told)
    try:
        yield
    finally:
        _announced.reset(token)


def announce(module_name: str) -> None:
    """Print, once in a block of `announced_imports`, where a module lies that is not installed."""
    told = _announced.get()
    package = module_name.partition(".")[0]
    if told is None or package in told:
        return
    told.add(package)
    place = _place_of(package)
    if place is not None and not any(place.is_relative_to(known) for known in _installed()):
        print(f"note: this runs code of {module_name}, from {place}", file=sys.stderr, flush=True)


def announce_env(config: RunConfig) -> None:
    """Announce the modules of ``env.id`` and ``env.wrappers``, imported where environments are made."""
    for name in (config.env.id, *(one.wrapper for one in config.env.wrappers)):
        module_name, colon, _ = name.rpartition(":")
        if colon:
            _search_here()  # also in the processes of a run, which get this path
            announce(module_name)


def _place_of(package: str) -> Path | None:
    """The file or directory of a top-level module, found without importing it."""
    spec = PathFinder.find_spec(package)
    if spec is None:
        return None
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return Path(places[0]).resolve() if places and places[0] else None


def _installed() -> set[Path]:
    """Directories of installed packages, and offbeat's own."""
    names = ("purelib", "platlib", "stdlib", "platstdlib")
    paths = [sysconfig.get_path(name) for name in names]
    paths += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parent.parent)]
    return {Path(path).resolve() for path in paths}
