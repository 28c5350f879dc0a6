"""Runtimes: where the roles of a run live."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.runtime.base import Runtime


def _inline() -> Runtime:
    from offbeat.runtime.inline import InlineRuntime

    return InlineRuntime()


def _threads() -> Runtime:
    from offbeat.runtime.threads import ThreadRuntime

    return ThreadRuntime()


def _processes() -> Runtime:
    from offbeat.runtime.processes import ProcessRuntime

    return ProcessRuntime()


def _ray() -> Runtime:
    from offbeat.runtime.ray import RayRuntime

    return RayRuntime()


RUNTIMES: dict[str, Callable[[], Runtime]] = {
    "inline": _inline,
    "threads": _threads,
    "processes": _processes,
    "ray": _ray,
}
"""Runtimes by kind; a test or a plugin may add its own."""


def make_runtime(kind: str) -> Runtime:
    """Make the runtime of a kind. Example: ``make_runtime("inline")``."""
    return RUNTIMES[kind]()
