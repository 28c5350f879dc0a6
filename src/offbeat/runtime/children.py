"""A child process that serves one role: started, watched and ended by its driver."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import psutil

from offbeat.reading import open_to_append
from offbeat.runtime.shared import Block, pack_object, pickled_role
from offbeat.runtime.spec import RunSpec, thread_limits
from offbeat.runtime.supervision import Pulse, process_state, seconds_since
from offbeat.runtime.wire import write_all

_WORKER = "offbeat.runtime.worker"
_CLOSE_TIMEOUT_S = 5.0
_STACK_WAIT_S = 0.3


class WorkerProcess:
    """A child process with a pipe, and a memory file into which it writes its stack when asked."""

    def __init__(self, name: str, spec: RunSpec, kind: str, assignment: Any) -> None:
        self.name = name
        self.is_up = False
        self._stack_read = 0
        limits = spec.settings.runtime
        self._pulse = Pulse(limits.heartbeat_timeout_s or math.inf, time.monotonic())
        packed = pack_object((kind, pickled_role(assignment, f"the role of {name}", "a process")))
        with contextlib.ExitStack() as made:  # what is undone when the process cannot be started
            ours, theirs = (made.enter_context(end) for end in socket.socketpair())
            self._stack_fd = _stack_file()
            made.callback(os.close, self._stack_fd)
            self._payload = Block.create(packed.num_bytes)
            made.callback(self._payload.close)
            self._counter = Block.create(16)  # signs of life, and the start of the work at hand
            made.callback(self._counter.close)
            packed.write(self._payload.memory)
            self._counter.bytes[:] = 0
            descriptors = (theirs.fileno(), self._stack_fd)
            arguments = (self._payload.address, self._counter.address, limits.heartbeat_interval_s, name)
            command = [sys.executable, "-m", _WORKER, *map(str, (*descriptors, *arguments))]
            with _log_file(spec.log_dir, name) as log:
                self.process = subprocess.Popen(
                    command,
                    pass_fds=descriptors,
                    env=_worker_environment(limits.worker_torch_threads),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            made.pop_all()
        theirs.close()
        self.connection = Connection(ours.detach())

    def came_up(self) -> None:
        """It has made its role and needs what it was made from no longer."""
        self.is_up = True
        self._payload.close()

    def is_dead(self, now_s: float) -> bool:
        """Return True if it gave no sign of life for too long, by its own counter and the processor's.

        Before its first heartbeat only its start is limited. One that has ended is told by its pipe.
        """
        count, state = int(self._counter.words[0]), process_state(self.process.pid)
        if count == 0 or state is None:
            return False
        return self._pulse.is_dead(count, state[0], now_s, state[1] == psutil.STATUS_STOPPED)

    def working_s(self) -> float | None:
        """Return how long a collector's piece of work lasts already; None between two."""
        return seconds_since(self._counter.words[1])

    def send(self, message: Any) -> None:
        """Send a message. To a dead worker it is lost, and the end of its pipe reports the death."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def ask_to_stop(self) -> None:
        """Let the worker read the end of its input; it can still write."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.shutdown(socket.SHUT_WR)

    def write(self, data: bytes) -> None:
        """Write to its pipe; for a dead worker see `send`."""
        with contextlib.suppress(OSError):
            write_all(self.connection.fileno(), data)

    def stack(self) -> str:
        """Return the stack that the process reports; empty when it does not answer or cannot."""
        state = process_state(self.process.pid)
        if state is None or state[1] in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            return ""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_WAIT_S)
        return self._new_stack()

    def _new_stack(self) -> str:
        """Read what it has written since the last time."""
        written = os.pread(self._stack_fd, 1 << 16, self._stack_read)
        self._stack_read += len(written)
        return written.decode(errors="replace").strip()

    def end(self, timeout_s: float = 0.0) -> None:
        """Ask the process to stop, kill it when it has not after ``timeout_s``, and reap it."""
        self.ask_to_stop()
        for wait_s in (timeout_s, _CLOSE_TIMEOUT_S):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
                break
            self.process.kill()
        self._payload.close()
        self._counter.close()
        self.connection.close()
        os.close(self._stack_fd)

    def how_it_ended(self) -> str:
        """The exit in words, with the native traceback if there was one."""
        try:
            code = self.process.wait(timeout=_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"{self.name} (pid {self.process.pid}) closed its pipe and did not end"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        stack = self._new_stack()
        return f"{self.name} (pid {self.process.pid}) {how}" + (f"\n{stack}" if stack else "")


def _log_file(directory: Path | None, name: str) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    """Open the file for a worker's output; None where none can be written: it goes with the driver's."""
    if directory is not None:
        with contextlib.suppress(OSError):
            return open_to_append(directory / f"{name}.log")
    return contextlib.nullcontext()


def _stack_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("offbeat-stack")
    import tempfile

    descriptor, path = tempfile.mkstemp(prefix="offbeat-stack-")
    os.unlink(path)
    return descriptor


def _worker_environment(num_threads: int) -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, **thread_limits(num_threads), "PYTHONPATH": path}
