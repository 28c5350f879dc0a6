"""Signals: the first Ctrl-C or SIGTERM stops a run cleanly, the second one at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from offbeat.runtime.clock import Clock

_LIMIT_S = 8.0
_SAME_SIGNAL_S = 0.3


@contextlib.contextmanager
def stopping_on_signals(stop: Callable[[str, float], None], clock: Clock) -> Iterator[list[str]]:
    """Call ``stop(reason, within_s)`` on the first signal; yield the names of the signals received."""
    received: list[str] = []
    received_s = float("-inf")

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received_s
        if (now_s := clock.now_s()) - received_s < _SAME_SIGNAL_S:
            return  # sent to a whole process group, a signal comes twice: also by way of the command's guard
        received_s = now_s
        received.append(signal.Signals(number).name)
        if len(received) > 1:
            raise KeyboardInterrupt
        stop(f"interrupted by {received[0]}", _LIMIT_S)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
