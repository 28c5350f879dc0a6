"""Messages from a driver to one of its collectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from offbeat.types import Piece, StateTree, Ticket


class Begun(NamedTuple):
    """Begun work of a ticket. ``newest``: the run went back to this version; None: to none.

    Versions above ``newest`` are not the ones that some of the work was made with, though they have their
    numbers.
    """

    tree: StateTree
    newest: int | None = None

    def under(self, version: int) -> StateTree | None:
        """Return what a collector gets that has loaded this version; None if it cannot tell what to keep."""
        return self.tree if self.newest is None or version <= self.newest else None


class Accept(NamedTuple):
    """A ticket for a collector, with begun work and the pieces to repeat, if there are any."""

    ticket: Ticket
    begun: Begun | None = None
    script: tuple[Piece, ...] = ()


class CutTickets(NamedTuple):
    """End these tickets with what there is."""

    tickets: tuple[int, ...]


class GiveWork(NamedTuple):
    """Report what is begun."""


Message = Accept | CutTickets | GiveWork


class Inbox(Protocol):
    """Messages on their way to a collector."""

    def receive(self, timeout_s: float | None) -> Sequence[Message] | None:
        """Return the messages that have come, after waiting this long for one (None: no limit).

        It returns early when the collector is woken up. None: stop.
        """
        ...
