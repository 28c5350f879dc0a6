"""TensorBoard's own server as a child process that lives as long as a run does.

This module is both sides: `TensorBoardServer` in the run, and, started as ``python -m
offbeat.observe.tensorboard_server``, the child. The child dies with its run however that ends: it reads from
a pipe that closes with the run, and Linux kills it with the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import IO

from offbeat.reading import open_to_append

_CLOSE_TIMEOUT_S = 2.0
_PR_SET_PDEATHSIG = 1
_NICENESS = 10
_MOST_TOLD_BYTES = 1 << 12
_FAILED = "TensorBoard could not be started"


class TensorBoardServer:
    """A child that serves ``directory/tensorboard`` on 127.0.0.1.

    Its messages for the user come from `poll_status`. Nothing here waits for it: starting takes it a second
    or two. Its own log is ``logs/tensorboard.log``.
    """

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self._log_dir = directory / "tensorboard"
        self._has_told_end = False
        self._told = b""
        command = [sys.executable, "-m", __name__, str(self._log_dir), str(port or 0), str(os.getpid())]
        with _log_file(directory / "logs") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment()
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll_status(self) -> str | None:
        """Return the next message for the user, if any: the address it serves at, or that it has ended."""
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._told += os.read(self._process.stdout.fileno(), _MOST_TOLD_BYTES)
        line, newline, rest = self._told.partition(b"\n")
        if newline:
            self._told = rest
            told = line.decode(errors="replace")
            self._has_told_end |= told.startswith(_FAILED)
            return told
        if self._has_told_end or self._process.poll() is None:
            return None
        self._has_told_end = True
        by_hand = f"see it with `tensorboard --logdir {self._log_dir}`"
        return f"TensorBoard's server has ended (logs/tensorboard.log says why); {by_hand}"

    def close(self) -> None:
        """End the child; a second call does nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _log_file(directory: Path) -> contextlib.AbstractContextManager[IO[bytes] | int]:
    """Open the file for the child's output; the null device, when no file can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return open_to_append(directory / "tensorboard.log")
    except OSError:
        return contextlib.nullcontext(subprocess.DEVNULL)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}


# ---------------------------------------------------------------- the child


def main(log_dir: str, port: int, parent: int) -> int:
    """Serve until the run closes our standard input, or is gone."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides what Ctrl-C means
    tell = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print belongs in the log
    threading.Thread(target=_end_with_input, name="end with the run", daemon=True).start()
    os.nice(_NICENESS)  # training comes first
    try:
        address = _serve(log_dir, port)
    except BaseException as error:
        traceback.print_exc()
        what = str(getattr(error, "msg", error)).strip().partition("\n")[0]
        hint = "; set observe.tensorboard.port to another one, or to null" if port else ""
        print(f"{_FAILED}: {what}{hint}", file=tell, flush=True)
        return 1
    print(f"TensorBoard shows this run at {address}", file=tell, flush=True)
    threading.Event().wait()
    return 0


def _serve(log_dir: str, port: int) -> str:
    """Start the server in a thread and return its address; it answers from then on."""
    from tensorboard import program

    board = program.TensorBoard()
    # Its fast loader would be a process of its own, which nobody here could be sure to end.
    options = ("--host", "127.0.0.1", "--port", str(port), "--load_fast", "false")
    board.configure(("tensorboard", "--logdir", log_dir, *options))
    return str(board.launch())


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask for that
        os._exit(1)


def _end_with_input() -> None:
    os.read(0, 1)
    os._exit(0)  # it only reads: nothing needs an orderly end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
