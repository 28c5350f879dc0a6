"""Signals: the first Ctrl-C, SIGTERM or SIGHUP stops a run cleanly, the second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from offbeat.runtime.clock import Clock

_SAME_SIGNAL_S = 0.3


@contextlib.contextmanager
def stopping_on_signals(
    stop: Callable[[str, float], None], clock: Clock, within_s: float
) -> Iterator[list[str]]:
    """Call ``stop(reason, within_s)`` on the first signal; yield the names of the signals received."""
    received: list[str] = []
    received_s = float("-inf")
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received_s
        _leave_closed(terminals)
        if (now_s := clock.now_s()) - received_s < _SAME_SIGNAL_S:
            return  # sent to a whole process group, a signal comes twice: also by way of the command's guard
        received_s = now_s
        received.append(signal.Signals(number).name)
        if len(received) > 1:
            raise KeyboardInterrupt
        stop(f"interrupted by {received[0]}", within_s)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, receive) for number in _to_receive()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _to_receive() -> list[signal.Signals]:
    """Return the signals that ask for an end; `nohup` has SIGHUP ignored, and so it stays."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def _leave_closed(terminals: list[int]) -> None:
    """Send output nowhere whose terminal was closed: writing to it would raise in the middle of the end."""
    for descriptor in [one for one in terminals if not os.isatty(one)]:
        terminals.remove(descriptor)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
