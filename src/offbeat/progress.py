"""Reports of how far a piece of work is, from the role that does it to the display of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_report: ContextVar[Callable[[str], None]] = ContextVar("offbeat_report", default=lambda text: None)


def report_progress(text: str) -> None:
    """Report how far the work of a role is, for the display of the run; empty: nothing to report any more.

    Roles may call it at any time in the thread that calls them; elsewhere it does nothing.
    Example: ``report_progress("episode 3 of 10")``.
    """
    _report.get()(text)


@contextmanager
def progress_to(report: Callable[[str], None]) -> Iterator[None]:
    """Pass what roles report in this thread to ``report``."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)
