"""The ledger: what became of every ticket. Counts are derived from it, never kept beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offbeat.errors import PromiseBroken
from offbeat.types import Ticket

RUNNING, READY, TRAINED, DROPPED, LOST = range(1, 6)
_LIVE = (RUNNING, READY, LOST)


@dataclass(frozen=True, slots=True)
class Counts:
    """Tickets by fate: ``issued = running + ready + trained + dropped + lost``.

    ``lost`` are the tickets whose collector died and that wait to be issued again.
    """

    issued: int
    running: int
    ready: int
    trained: int
    dropped: int
    lost: int


class Ledger:
    """One status per ticket ever issued, and the tickets that are still outstanding."""

    def __init__(self) -> None:
        self._status = bytearray()
        self._live: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._status)

    def ticket(self, number: int) -> Ticket:
        """The outstanding ticket with this number."""
        return self._live[number]

    def status(self, number: int) -> int:
        """RUNNING, READY, TRAINED, DROPPED or LOST."""
        return self._status[number]

    def outstanding(self) -> Iterator[Ticket]:
        """Tickets issued and neither trained nor dropped."""
        return iter(self._live.values())

    def with_status(self, status: int) -> list[Ticket]:
        """Outstanding tickets with this status, in order of number."""
        return sorted((t for n, t in self._live.items() if self._status[n] == status), key=lambda t: t.number)

    def issue(self, ticket: Ticket) -> None:
        """Enter a new ticket, or one that was lost and is issued again."""
        if ticket.number == len(self._status):
            self._status.append(RUNNING)
        else:
            self._move(ticket.number, LOST, RUNNING)
        self._live[ticket.number] = ticket

    def arrive(self, number: int) -> None:
        """The ticket's segment is in the store."""
        self._move(number, RUNNING, READY)

    def lose(self, number: int) -> None:
        """The ticket's collector died."""
        self._move(number, RUNNING, LOST)

    def train(self, number: int) -> None:
        """The ticket's segment was trained."""
        self._move(number, READY, TRAINED)
        del self._live[number]

    def drop(self, number: int) -> None:
        """A named policy threw the ticket's segment away."""
        self._move(number, READY, DROPPED)
        del self._live[number]

    def _move(self, number: int, before: int, after: int) -> None:
        if not 0 <= number < len(self._status) or self._status[number] != before:
            found = self._status[number] if 0 <= number < len(self._status) else "unknown"
            raise PromiseBroken(f"ticket {number} cannot go from {before} to {after}: it is {found}")
        self._status[number] = after

    def counts(self) -> Counts:
        """Count the tickets by fate."""
        count = self._status.count
        return Counts(
            len(self._status), count(RUNNING), count(READY), count(TRAINED), count(DROPPED), count(LOST)
        )

    def check(self) -> Counts:
        """Assert conservation: every ticket has one fate, and the live ones are those outstanding."""
        counts = self.counts()
        total = counts.running + counts.ready + counts.trained + counts.dropped + counts.lost
        live = sum(1 for number in self._live if self._status[number] in _LIVE)
        ended = counts.trained + counts.dropped
        if total != counts.issued or live != len(self._live) or live != total - ended:
            raise PromiseBroken(f"tickets are not conserved: {counts}, {len(self._live)} outstanding")
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Statuses and outstanding tickets as plain values."""
        fields = ("number", "lane", "version", "deadline", "seed", "attempt")
        return {
            "status": self._status.decode("latin-1"),
            "live": [[getattr(ticket, name) for name in fields] for ticket in self._live.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._status = bytearray(state["status"], "latin-1")
        self._live = {row[0]: Ticket(*row) for row in state["live"]}
