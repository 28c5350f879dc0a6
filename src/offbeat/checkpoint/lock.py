"""One writer per run directory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from offbeat.errors import CheckpointError
from offbeat.reading import LINE_BYTES, open_file

_PATIENCE_S = 2.0
_POLL_S = 0.02


class RunLock:
    """Held while a process writes to a run directory; the system releases it when the process dies."""

    def __init__(self, directory: Path) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                open_file(directory / "lock", LINE_BYTES).close()  # refuses what could be waited for
            self._file = (directory / "lock").open("a+")
        except OSError as error:
            raise CheckpointError(f"{directory / 'lock'} cannot be opened: {error.strerror}") from error
        if not _lock_soon(self._file.fileno()):
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise CheckpointError(
                f"{directory} is being written by another process (pid {owner}): wait for its end, or stop it"
            )
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            self._file.truncate(0)
            self._file.write(str(os.getpid()))
            self._file.flush()

    def release(self) -> None:
        """Let others write."""
        with contextlib.suppress(OSError):
            self._file.close()


def _lock_soon(descriptor: int) -> bool:
    """Try for a moment: a run that was killed just now takes some time to go, and a look at it an instant."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while not (is_ours := _try_to_lock(descriptor)) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    return is_ours


def _try_to_lock(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
