"""Compiling small kernels with numba, where it is installed. Importing this imports numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from offbeat.ops.compiled import numba_is_wanted
from offbeat.progress import report_progress

numba: Any = None
if numba_is_wanted():
    try:
        import numba
    except ImportError:  # it is there and does not fit this Python or numpy
        numba = None

IS_COMPILED = numba is not None
"""Whether kernels are compiled; without numba, or with ``OFFBEAT_NUMBA=0``, they are plain Python: slow."""

COMPILING = "compiling kernels, once"
"""Report to the display while kernels are compiled."""

Kernel = Callable[..., Any]


def jit(function: Kernel) -> Kernel:
    """Compile a function that needs no GIL, and keep the result on disk where that is possible."""
    if numba is None:
        return function
    try:
        return cast(Kernel, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # numba found no folder that it can write to
        return cast(Kernel, numba.njit(nogil=True)(function))


if numba is not None:

    class _CompilationReports(numba.core.event.Listener):  # type: ignore[misc]
        """Reports when kernels are compiled, which takes seconds and is kept on disk.

        Called in the thread that compiles. Kernels that a kernel calls are compiled within its compilation.
        """

        def __init__(self) -> None:
            self._depth = 0  # numba compiles under one lock

        def on_start(self, event: Any) -> None:
            """Report that kernels are compiled."""
            self._depth += 1
            if self._depth == 1:
                report_progress(COMPILING)

        def on_end(self, event: Any) -> None:
            """Report that the kernel is compiled, with those that it calls."""
            self._depth -= 1
            if self._depth == 0:
                report_progress("")

    numba.core.event.register("numba:compile", _CompilationReports())
