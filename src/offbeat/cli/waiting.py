"""Progress of a verb that takes long and prints only its result."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.progress import progress_to

INTERVAL_S, TERMINAL_INTERVAL_S = 2.5, 0.25
_CLEAR = "\r\x1b[K"


@contextmanager
def telling_progress(what: str) -> Iterator[None]:
    """Tell on the error stream what the work in the block reports, and how long it has lasted.

    On a terminal one line is written over and removed at the end; elsewhere there is one every 2.5 s.
    Example: ``evaluating: episode 3 of 10, 5 s``.
    """
    is_over, reports, started_s = threading.Event(), ["starting"], time.monotonic()
    stream, on_terminal = sys.stderr, sys.stderr.isatty()

    def tell() -> None:
        while not is_over.wait(TERMINAL_INTERVAL_S if on_terminal else INTERVAL_S):
            line = f"{what}: {reports[-1]}, {time.monotonic() - started_s:.0f} s"
            stream.write(f"{_CLEAR}{line}" if on_terminal else f"{line}\n")
            stream.flush()
        if on_terminal:
            stream.write(_CLEAR)
            stream.flush()

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        with progress_to(lambda text: reports.__setitem__(-1, text or reports[-1])):
            yield
    finally:
        is_over.set()
        thread.join()
