"""Which algorithms there are: built-in ones and plugins of the entry-point group ``offbeat.algorithms``.

A plugin package declares, in its ``pyproject.toml``::

    [project.entry-points."offbeat.algorithms"]
    my-algorithm = "my_package.my_module:ALGORITHM"

It is imported only when a configuration names it.
"""

from __future__ import annotations

import pkgutil
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

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
}
"""Name to ``module:attribute`` of the algorithms that come with offbeat."""
GROUP = "offbeat.algorithms"
"""The entry-point group of plugins."""


def names() -> list[str]:
    """Names of all algorithms, sorted; none of them is imported."""
    return sorted({*BUILTIN, *(point.name for point in entry_points(group=GROUP))})


def find(name: str) -> Algorithm:
    """Import an algorithm by name. Raises ``ConfigError`` when there is none or its plugin is broken."""
    from offbeat.algorithms.base import Algorithm

    if name in BUILTIN:
        found: object = pkgutil.resolve_name(BUILTIN[name])
    else:
        found = _load_plugin(name)
    if not isinstance(found, Algorithm):
        raise ConfigError(f"the plugin for algorithm {name!r} gives {found!r}, which is no Algorithm")
    return found


def config_model(name: str) -> type[AlgorithmConfig]:
    """The model of an algorithm's own settings: what ``load_config`` asks for."""
    return find(name).config_model


def _load_plugin(name: str) -> object:
    points = list(entry_points(group=GROUP, name=name))
    if not points:
        raise ConfigError(f"there is no algorithm of this name; {did_you_mean(name, names())}")
    # A plugin is somebody else's code: whatever it raises belongs into a message that says whose it is.
    try:
        return points[0].load()
    except Exception as error:
        package = points[0].dist.name if points[0].dist else "unknown package"
        raise ConfigError(
            f"the plugin for algorithm {name!r} ({points[0].value} of {package}) cannot be imported:"
            f" {type(error).__name__}: {error}"
        ) from error
