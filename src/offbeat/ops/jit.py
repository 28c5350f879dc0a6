"""Compiling small kernels with numba, where it is installed. Importing this imports numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from offbeat.ops.compiled import numba_is_wanted

numba: Any = None
if numba_is_wanted():
    try:
        import numba
    except ImportError:  # it is there and does not fit this Python or numpy
        numba = None

IS_COMPILED = numba is not None
"""Whether kernels are compiled; without numba, or with ``OFFBEAT_NUMBA=0``, they are plain Python: slow."""

Kernel = Callable[..., Any]


def jit(function: Kernel) -> Kernel:
    """Compile a function that needs no GIL, and keep the result on disk where that is possible."""
    if numba is None:
        return function
    try:
        return cast(Kernel, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # numba found no folder that it can write to
        return cast(Kernel, numba.njit(nogil=True)(function))
