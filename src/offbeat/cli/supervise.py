"""The guard of a run: a child does the work, and one that is killed is followed by another that continues.

This is the first thing the command imports. The guard lives as long as the run, so nothing here may import
more than it must: every page of it is memory that the run pays for.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

_VERBS = ("train", "resume")
_HEARD = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)
_CRASHES = tuple(getattr(signal, f"SIG{name}") for name in ("KILL", "SEGV", "BUS", "ABRT", "ILL", "FPE"))
_FROM_TERMINAL = 0x80  # SI_KERNEL: Ctrl-C, which the terminal has sent to the child as well
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NEVER_S = 1e8
_PATIENCE_S = 3.0
_STOP_S, _STOP_MARGIN_S = 60.0, 30.0
"""Time to end after one signal for a child that has not told its limit; time to close beyond that limit."""
_LOOK_EVERY_S, _SUSPENDED_S = 1.0, 2.0
_STOP_LIMIT = b"stop within "
SAME_SIGNAL_S = 0.3
"""A signal to a whole process group comes twice, also by way of the guard: so soon it is the same one."""
_WINDOW_S = 3600.0
_ORPHANS_LIMIT_S = 10.0
_ORPHANS_POLL_S = 0.02
_MOST_MESSAGE_BYTES = 1 << 16
_STOPPED_AT_ONCE = 130
_SHOW_CURSOR = b"\x1b[?25h\n"


class Death(NamedTuple):
    """End of the previous child: its signal, the number of the restart, and its last message.

    Example: ``Death(signal.SIGKILL, 1, b'{"directory": "runs/x"}')``.
    """

    number: int
    attempt: int
    message: bytes

    @property
    def signal_name(self) -> str:
        """Such as ``SIGKILL``."""
        return signal.Signals(self.number).name


class ChildContext(NamedTuple):
    """Context of a supervised child: the pipe to its guard, and the end of the child before it, if any."""

    line: int
    after: Death | None

    def send(self, text: str) -> None:
        """Send the guard, in one line, what a child that has to follow this one will need."""
        os.write(self.line, text.encode() + b"\n")

    def limit_stop(self, seconds: float) -> None:
        """Tell the guard how long an end may take that was asked for; well beyond it, the child is killed."""
        os.write(self.line, _STOP_LIMIT + b"%f\n" % seconds)


class _Line:
    """The guard's end of the pipe to its child."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._text = b""

    def _lines(self) -> list[bytes]:
        """Return all whole lines so far."""
        try:
            while data := os.read(self._descriptor, _MOST_MESSAGE_BYTES):
                self._text += data
        except BlockingIOError:  # a process that the child forked may still hold its end
            pass
        return self._text.split(b"\n")[:-1]

    def message(self) -> bytes:
        """Return the last message, empty if none."""
        told = [line for line in self._lines() if not line.startswith(_STOP_LIMIT)]
        return told[-1] if told else b""

    def stop_s(self) -> float:
        """Return the seconds after which a child is killed that was asked to end once."""
        limits = [line for line in self._lines() if line.startswith(_STOP_LIMIT)]
        return _STOP_MARGIN_S + (float(limits[-1][len(_STOP_LIMIT) :]) if limits else _STOP_S)

    def close(self) -> None:
        os.close(self._descriptor)


def is_wanted(arguments: Sequence[str]) -> bool:
    """Return True if this command is a run that its guard may restart, on a system where that is possible."""
    is_run = sys.platform == "linux" and bool(arguments) and arguments[0] in _VERBS
    alone = {"--help", "--eval-only", "run.max_restarts=0", "max_restarts=0"}
    return is_run and not alone & set(arguments)


def supervise(as_json: bool) -> ChildContext:
    """Fork; return in the child only. The guard ends with the exit code of the last child.

    A child that crashed (killed by a signal that is no request to end) is followed by another one, when it
    has sent what that one needs. The new child decides if the run continues.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of a killed child come to us
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    heard = _to_hear()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    death: Death | None = None
    while True:
        started_s = time.monotonic()
        listen, line = os.pipe()
        guard, child = os.getpid(), os.fork()
        if child == 0:
            os.close(listen)
            _begin(guard, mask)
            return ChildContext(line, death)
        os.close(line)
        told = _Line(listen)
        status, num_asked, is_late = _await_end(child, heard, told)
        message = told.message()
        told.close()
        if not os.WIFSIGNALED(status):
            raise SystemExit(os.waitstatus_to_exitcode(status))
        _end_orphans()
        if num_asked > 1:
            _say("the run was stopped at once, as asked", as_json)
            raise SystemExit(_STOPPED_AT_ONCE)
        if is_late:
            _say("asked to stop, the run did not end in time (run.stop_timeout_s) and was killed", as_json)
            raise SystemExit(128 + signal.SIGKILL)
        is_new_row = death is None or time.monotonic() - started_s > _WINDOW_S
        attempt = 1 if death is None or is_new_row else death.attempt + 1
        death = Death(os.WTERMSIG(status), attempt, message)
        if num_asked or death.number not in _CRASHES or not message:
            _give_up(death, as_json)


def _begin(guard: int, mask: Iterable[int]) -> None:
    """Make this child die with its guard, and receive signals as usual."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before we could ask for that
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _to_hear() -> tuple[int, ...]:
    """Return the signals to wait for: `nohup` has SIGHUP ignored, which waiting for it would undo."""
    return _HEARD if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*_HEARD, signal.SIGHUP)


def _await_end(child: int, to_hear: Iterable[int], told: _Line) -> tuple[int, int, bool]:
    """Pass signals on until the child has ended, or has been asked and does not end in time: then kill it.

    Return its status, how often the end was asked for, and whether the child was killed for being late.
    """
    num_asked, requested_s, kill_at_s, is_late = 0, -_NEVER_S, _NEVER_S, False
    while (status := _reap(child)) is None:
        started_s = time.monotonic()
        # Short waits: time in which the guard itself was suspended is not to count against the child.
        wait_s = max(0.0, min(kill_at_s - started_s, _LOOK_EVERY_S)) if kill_at_s < _NEVER_S else _NEVER_S
        heard = signal.sigtimedwait(to_hear, wait_s)
        now_s = time.monotonic()
        if (suspended_s := now_s - started_s - wait_s) > _SUSPENDED_S:
            kill_at_s += suspended_s
        if heard is None:
            if now_s >= kill_at_s:
                os.kill(child, signal.SIGKILL)
                kill_at_s, is_late = _NEVER_S, True
        elif heard.si_signo != signal.SIGCHLD:
            if now_s - requested_s >= SAME_SIGNAL_S:
                num_asked, requested_s = num_asked + 1, now_s
                kill_at_s = now_s + told.stop_s() if num_asked == 1 else min(kill_at_s, now_s + _PATIENCE_S)
            if heard.si_code != _FROM_TERMINAL:
                os.kill(child, heard.si_signo)
            os.kill(child, signal.SIGCONT)  # a stopped process could not do as it was asked
    return status, num_asked, is_late


def _reap(child: int) -> int | None:
    """Clear away who has ended, orphans too; return the status of the child if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _end_orphans() -> None:
    """Kill what a killed child has left behind, children of its children included."""
    give_up_s = time.monotonic() + _ORPHANS_LIMIT_S
    while (left := _children()) and time.monotonic() < give_up_s:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(_ORPHANS_POLL_S)
        _reap(0)


def _children() -> list[int]:
    """Return our children, zombies included: only this process reaps them, so their numbers stay theirs."""
    _reap(0)
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without this list: what dies with its parent is all that is ended
        return []


def _give_up(death: Death, as_json: bool) -> NoReturn:
    text = f"the run was killed by {death.signal_name}"
    if not death.message:
        text += " before it began"
    _say(text, as_json)
    raise SystemExit(128 + death.number)


def _say(text: str, as_json: bool) -> None:
    """Print an end that the child could not print itself, as far as there is still a terminal."""
    try:
        show_cursor()
        os.write(2, f"error: {text}\n".encode())
        if as_json:
            import json

            os.write(1, json.dumps({"ok": False, "error": text}).encode() + b"\n")
    except OSError:
        return


def show_cursor() -> None:
    """A killed live display leaves the terminal without its cursor, in the middle of a line: mend both."""
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
