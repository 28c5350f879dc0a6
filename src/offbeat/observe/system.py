"""Resource use of a run: memory and processor time of its processes, memory on the device."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import psutil

from offbeat.types import Metrics


class SystemMonitor:
    """Measures at most every ``interval_s`` seconds and repeats the last figures in between.

    Asking the system costs about 50 µs per process, too much for every round of a fast run.
    """

    def __init__(self, interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._processes: dict[int, psutil.Process] = {}
        self._measured_at_s: float | None = None
        self._figures: Metrics = {}

    def read(self, now_s: float, worker_pids: Callable[[], Iterable[int]] = tuple) -> Metrics:
        """Return figures of this process and its workers.

        ``system/rss_bytes`` sums their resident memory (pages they share count once each),
        ``system/cpu_percent`` their processor time since the last measurement (100 is one core),
        ``system/gpu_mem_bytes`` what torch holds on this process's device, and ``system/gpu_percent`` the
        share of time in which it computes, if torch can tell (nvidia-ml-py).
        """
        if self._measured_at_s is None or now_s - self._measured_at_s >= self._interval_s:
            self._measured_at_s = now_s
            self._figures = self._measure((os.getpid(), *worker_pids()))
        return dict(self._figures)

    def _measure(self, pids: Sequence[int]) -> Metrics:
        rss_bytes, cpu_percent = 0.0, 0.0
        self._processes = {pid: self._processes[pid] for pid in pids if pid in self._processes}
        for pid in pids:
            try:
                process = self._processes.setdefault(pid, psutil.Process(pid))
                with process.oneshot():
                    rss_bytes += process.memory_info().rss
                    cpu_percent += process.cpu_percent(interval=None)
            except psutil.Error:
                self._processes.pop(pid, None)  # it died between being listed and being asked
        return {
            "system/rss_bytes": rss_bytes,
            "system/cpu_percent": cpu_percent,
            **_device_figures(),
        }


def _device_figures() -> Metrics:
    # Looked up, not imported: a process that has not loaded torch uses no device.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {"system/gpu_mem_bytes": 0.0}
    figures = {"system/gpu_mem_bytes": float(torch.cuda.memory_reserved())}
    with contextlib.suppress(ImportError, RuntimeError):  # no nvidia-ml-py, or its driver is missing
        figures["system/gpu_percent"] = float(torch.cuda.utilization())
    return figures
