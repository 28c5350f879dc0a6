"""The ledger of the coordinator that serves as an oracle: counts are derived from statuses by scanning."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from offbeat.errors import PromiseBroken
from offbeat.pacing.ledger import Counts
from offbeat.types import Ticket

RUNNING, READY, TRAINED, DROPPED, LOST = range(1, 6)


class Ledger:
    """One status per ticket ever issued, and the tickets that are still outstanding."""

    def __init__(self) -> None:
        self._status = bytearray()
        self._live: dict[int, dict[int, Ticket]] = {RUNNING: {}, READY: {}, LOST: {}}

    def __len__(self) -> int:
        return len(self._status)

    def ticket(self, number: int) -> Ticket:
        """The outstanding ticket with this number."""
        return self._live[self._status[number]][number]

    def status(self, number: int) -> int:
        """RUNNING, READY, TRAINED, DROPPED or LOST."""
        return self._status[number]

    def outstanding(self) -> Iterator[Ticket]:
        """Tickets issued and neither trained nor dropped."""
        return chain.from_iterable(tickets.values() for tickets in self._live.values())

    @property
    def num_outstanding(self) -> int:
        """How many tickets are issued and neither trained nor dropped."""
        return sum(map(len, self._live.values()))

    def num(self, status: int) -> int:
        """How many tickets have this status."""
        return len(self._live[status]) if status in self._live else self._status.count(status)

    def with_status(self, status: int) -> list[Ticket]:
        """Outstanding tickets with this status, in order of number."""
        tickets = self._live[status]
        return [tickets[number] for number in sorted(tickets)]

    def arrived(self) -> list[int]:
        """Numbers of the tickets that are READY, in order of arrival."""
        return list(self._live[READY])

    def issue(self, ticket: Ticket) -> None:
        """Enter a new ticket, or one that was lost and is issued again."""
        if ticket.number == len(self._status):
            self._status.append(RUNNING)
        else:
            self._take(ticket.number, LOST, RUNNING)
        self._live[RUNNING][ticket.number] = ticket

    def arrive(self, number: int) -> None:
        """The ticket's segment is in the store."""
        self._live[READY][number] = self._take(number, RUNNING, READY)

    def lose(self, number: int) -> None:
        """The ticket's collector died, or its segment went with a run that was killed."""
        before = READY if number in self._live[READY] else RUNNING
        self._live[LOST][number] = self._take(number, before, LOST)

    def train(self, number: int) -> None:
        """The ticket's segment was trained."""
        self._take(number, READY, TRAINED)

    def drop(self, number: int) -> None:
        """A named policy threw the ticket's segment away."""
        self._take(number, READY, DROPPED)

    def _take(self, number: int, before: int, after: int) -> Ticket:
        if not 0 <= number < len(self._status) or self._status[number] != before:
            found = self._status[number] if 0 <= number < len(self._status) else "unknown"
            raise PromiseBroken(f"ticket {number} cannot go from {before} to {after}: it is {found}")
        self._status[number] = after
        return self._live[before].pop(number)

    def counts(self) -> Counts:
        """Count the tickets by fate."""
        count = self._status.count
        return Counts(
            len(self._status), count(RUNNING), count(READY), count(TRAINED), count(DROPPED), count(LOST)
        )

    def check(self) -> Counts:
        """Assert conservation: every ticket has one fate, and the outstanding ones are all at hand."""
        counts = self.counts()
        total = counts.running + counts.ready + counts.trained + counts.dropped + counts.lost
        live = {RUNNING: counts.running, READY: counts.ready, LOST: counts.lost}
        if total != counts.issued or any(
            len(self._live[status]) != number for status, number in live.items()
        ):
            raise PromiseBroken(f"tickets are not conserved: {counts}, {self.num_outstanding} outstanding")
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Statuses and outstanding tickets as plain values."""
        fields = ("number", "collector", "version", "deadline", "seed", "attempt")
        return {
            "status": self._status.decode("latin-1"),
            "live": [[getattr(ticket, name) for name in fields] for ticket in self.outstanding()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._status = bytearray(state["status"], "latin-1")
        self._live = {RUNNING: {}, READY: {}, LOST: {}}
        for row in state["live"]:
            ticket = Ticket(*row)
            self._live[self._status[ticket.number]][ticket.number] = ticket
