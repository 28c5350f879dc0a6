"""Whether kernels are to be compiled, found out without importing numba."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec


def numba_is_wanted() -> bool:
    """Whether numba is installed and not turned off with ``OFFBEAT_NUMBA=0``."""
    return os.environ.get("OFFBEAT_NUMBA", "1") != "0" and _is_installed()


def uses_numba() -> bool:
    """Whether compiled loops are used: numba can be imported, and ``OFFBEAT_NUMBA`` is not 0."""
    if not numba_is_wanted():
        return False
    from offbeat.ops.jit import IS_COMPILED

    return IS_COMPILED


@cache
def _is_installed() -> bool:
    return find_spec("numba") is not None
