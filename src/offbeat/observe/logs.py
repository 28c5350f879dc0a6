"""Log files, one per role: ``logs/run.log``, ``logs/learner.log``, ``logs/worker_0.log``, …"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from offbeat.errors import ConfigError
from offbeat.reading import open_to_append
from offbeat.types import Ticket

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s"
_DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def make_logs_dir(run_dir: Path) -> None:
    """Make the directory of a run's log files; ConfigError when it cannot be made."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = (
            f"{error.filename} is not a directory" if isinstance(error, FileExistsError) else error.strerror
        )
        raise ConfigError(
            f"{run_dir} cannot take the log files of a run: {what}. Remove it, or choose another run.dir"
        ) from error


def open_log(
    directory: str | Path,
    role: str,
    whole_process: bool | None = None,
    level: int = logging.INFO,
    on_fault: Callable[[str], None] | None = None,
) -> logging.Logger:
    """Return the logger of a role, writing to ``directory/<role>.log``; a second call opens no second file.

    With ``whole_process`` the file also takes what offbeat's modules log in this process: right for the run
    itself (the default for ``run``) and for a worker that has a process of its own. When the file cannot be
    written, ``on_fault`` is called, once and from the thread that logs; without it stderr is.
    """
    logger = logging.getLogger(f"offbeat.role.{role}")
    logger.setLevel(level)
    logger.propagate = False
    path = Path(directory) / f"{role}.log"
    files = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    if not any(Path(handler.baseFilename) == path.absolute() for handler in files):
        close_log(logger)
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(path, on_fault or (lambda text: print(text, file=sys.stderr)))
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
        logger.addHandler(handler)
        if role == "run" if whole_process is None else whole_process:
            package = logging.getLogger("offbeat")
            package.setLevel(level)
            package.addHandler(handler)
    return logger


def close_log(logger: logging.Logger) -> None:
    """Close a role's file; a second call does nothing."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        logging.getLogger("offbeat").removeHandler(handler)
        handler.close()


def debug_ticket(
    logger: logging.Logger,
    happening: Literal["issued", "arrived", "trained", "dropped", "lost"],
    ticket: Ticket,
    version: int,
    seconds: float | None = None,
) -> None:
    """Log one moment in a ticket's life; ``version`` is the learner's, ``seconds`` what it took to get here.

    Example: ``ticket 17 arrived  lane 1 version 3 deadline 4 attempt 0 age 1 after 0.231 s``.
    """
    after = "" if seconds is None else f" after {seconds:.3f} s"
    logger.info(
        "ticket %d %-8s lane %d version %d deadline %d attempt %d age %d%s",
        *(ticket.number, happening, ticket.collector, ticket.version, ticket.deadline, ticket.attempt),
        *(version - ticket.version, after),
    )


class _FileHandler(logging.FileHandler):
    """Loses lines that the disk does not take, instead of a traceback for each or an error at the end."""

    def __init__(self, path: Path, on_fault: Callable[[str], None]) -> None:
        super().__init__(path, encoding="utf-8")
        self._on_fault = on_fault
        self._has_told = False

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(open_to_append(Path(self.baseFilename)), "utf-8", write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report the first line that could not be written; other errors are those of the caller."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_told:
            self._has_told = True
            self._on_fault(f"{self.baseFilename} cannot be written, lines are missing there: {error}")

    def close(self) -> None:
        """Close the file, also when the disk does not take its last lines."""
        with contextlib.suppress(OSError):
            super().close()
