"""Messages from a driver to one of its collectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from offbeat.types import Piece, StateTree, Ticket


class Accept(NamedTuple):
    """A ticket for a collector, with begun work and the pieces to repeat, if there are any."""

    ticket: Ticket
    begun: StateTree | None = None
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
