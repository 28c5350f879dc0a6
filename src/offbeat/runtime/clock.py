"""The clock that a run is driven by: passed in, so that tests and simulations bring their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time of a run, in seconds."""

    def now_s(self) -> float:
        """Return the time of a clock that never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...

    def date(self, form: str) -> str:
        """Return the local date and time as `time.strftime` writes it."""
        ...


class SystemClock:
    """The machine's clock; runtimes in other threads and processes of this machine use the same one."""

    now_s = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)
    date = staticmethod(time.strftime)


SYSTEM_CLOCK = SystemClock()
"""Default of parameters that take a clock."""
