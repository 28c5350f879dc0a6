"""Runtimes: where the roles of a run live."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from offbeat.runtime.base import Runtime

RUNTIMES: dict[str, str | Callable[[], Runtime]] = {
    "inline": "offbeat.runtime.inline:InlineRuntime",
    "threads": "offbeat.runtime.threads:ThreadRuntime",
    "processes": "offbeat.runtime.processes:ProcessRuntime",
    "ray": "offbeat.runtime.ray:RayRuntime",
}
"""Runtimes by kind, each imported when it is first made; a test or a plugin may add its own."""


def make_runtime(kind: str) -> Runtime:
    """Make the runtime of a kind. Example: ``make_runtime("inline")``."""
    if kind not in RUNTIMES:
        raise ConfigError(f"there is no runtime {kind!r}: choose one of {', '.join(RUNTIMES)}")
    made = RUNTIMES[kind]
    runtime: Runtime = (pkgutil.resolve_name(made) if isinstance(made, str) else made)()
    return runtime
