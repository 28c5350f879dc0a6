"""Algorithms by name: built-in, registered, ``module:NAME``, and plugins of ``offbeat.algorithms``.

A plugin package declares, in its ``pyproject.toml``::

    [project.entry-points."offbeat.algorithms"]
    my-algorithm = "my_package.my_module:ALGORITHM"

It is imported only when a configuration names it.
"""

from __future__ import annotations

import pkgutil
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from offbeat.config.code import import_named
from offbeat.config.errors import did_you_mean
from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from offbeat.algorithms.base import Algorithm
    from offbeat.config.models import AlgorithmConfig

BUILTIN = {
    "ppo": "offbeat.algorithms.ppo:ALGORITHM",
    "ppo_per": "offbeat.algorithms.ppo_per:ALGORITHM",
    "muzero": "offbeat.algorithms.muzero:ALGORITHM",
    "unizero": "offbeat.algorithms.unizero:ALGORITHM",
    "mappo": "offbeat.algorithms.mappo:ALGORITHM",
    "hmasd": "offbeat.algorithms.hmasd:ALGORITHM",
    "grpo": "offbeat.algorithms.grpo:ALGORITHM",
}
"""Name to ``module:attribute`` of the algorithms that come with offbeat."""
GROUP = "offbeat.algorithms"
"""The entry-point group of plugins."""


_REGISTERED: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known by its name in this process; return it. For scripts and notebooks.

    Example: ``offbeat.register(Algorithm("reinforce", ReinforceConfig, build))``.
    """
    _check(algorithm, "offbeat.register")
    if algorithm.name in BUILTIN or ":" in algorithm.name:
        raise ConfigError(
            f"an algorithm cannot be registered as {algorithm.name!r}: choose a name without a colon that no "
            "built-in algorithm has"
        )
    _REGISTERED[algorithm.name] = algorithm
    return algorithm


def names() -> list[str]:
    """Return the names of all algorithms, sorted; none of them is imported."""
    return sorted({*BUILTIN, *_REGISTERED, *(point.name for point in entry_points(group=GROUP))})


def find(name: str) -> Algorithm:
    """Return an algorithm by its name or as ``module:NAME``; ConfigError when there is none.

    A module is imported only when it is named, and is looked for in the working directory, too.
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name in BUILTIN:
        return _check(pkgutil.resolve_name(BUILTIN[name]), name)
    if ":" in name:
        return _check(_load_module(name), name)
    return _check(_load_plugin(name), f"the plugin for algorithm {name!r}")


def _check(found: object, source: str) -> Algorithm:
    from offbeat.algorithms.base import Algorithm

    if not isinstance(found, Algorithm):
        raise ConfigError(f"{source} gives {found!r}, which is no Algorithm")
    return found


def config_model(name: str) -> type[AlgorithmConfig]:
    """Return the model of an algorithm's own settings, for ``load_config``."""
    return find(name).config_model


def _load_module(name: str) -> object:
    module, _, attribute = name.partition(":")
    # Somebody else's code: whatever it raises belongs into a message that says whose it is.
    try:
        return getattr(import_named(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"algorithm.name {name!r} cannot be imported: {type(error).__name__}: {error}; it is "
            "module:NAME, with a module that is installed or lies in the working directory"
        ) from error


def _load_plugin(name: str) -> object:
    points = list(entry_points(group=GROUP, name=name))
    if not points:
        hint = "one of your own is named module:NAME, such as my_file:ALGORITHM"
        raise ConfigError(f"there is no algorithm of this name; {did_you_mean(name, names())}; {hint}")
    # A plugin is somebody else's code: whatever it raises belongs into a message that says whose it is.
    try:
        return points[0].load()
    except Exception as error:
        package = points[0].dist.name if points[0].dist else "unknown package"
        raise ConfigError(
            f"the plugin for algorithm {name!r} ({points[0].value} of {package}) cannot be imported:"
            f" {type(error).__name__}: {error}"
        ) from error
