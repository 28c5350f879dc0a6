"""Stragglers: running tickets that hold a round up, for the policy that ends them early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from heapq import nsmallest

from offbeat.types import Ticket


class Stragglers:
    """Running tickets by deadline, without those that were asked to end."""

    def __init__(self) -> None:
        self._running: dict[int, set[int]] = {}
        self._asked: dict[int, int] = {}  # ticket -> deadline
        self._num_asked: Counter[int] = Counter()  # by deadline

    def begin(self, ticket: Ticket) -> None:
        """Enter a ticket that was issued, for the first time or again."""
        if (running := self._running.get(ticket.deadline)) is None:
            running = self._running[ticket.deadline] = set()
        running.add(ticket.number)

    def end(self, ticket: Ticket) -> None:
        """Forget a ticket that arrived or was lost."""
        if self._asked.pop(ticket.number, None) is not None:
            self._num_asked[ticket.deadline] -= 1
        else:
            self._take(ticket.deadline, ticket.number)

    def ask(self, rest: Mapping[int, int], next_round: int, segments_per_round: int) -> list[int]:
        """Choose tickets that have to end so that rounds from ``next_round`` on can train ``rest`` in time.

        ``rest`` is what would be outstanding, by deadline. The earliest deadlines and smallest numbers are
        chosen first, as few as will do, and each once.
        """
        chosen, late = list[int](), 0
        for deadline in sorted(rest):
            late += rest[deadline] - self._num_asked[deadline]
            excess = late - segments_per_round * (deadline - next_round + 1)
            for number in self._earliest(excess, deadline):
                chosen.append(number)
                late -= 1
        return chosen

    def _earliest(self, count: int, deadline: int) -> list[int]:
        """Take so many tickets that are due by a deadline, or all there are; they count as asked to end."""
        taken: list[int] = []
        for due in sorted(due for due in self._running if due <= deadline) if count > 0 else ():
            for number in nsmallest(count - len(taken), self._running[due]):
                self._take(due, number)
                self._asked[number] = due
                self._num_asked[due] += 1
                taken.append(number)
        return taken

    def _take(self, deadline: int, number: int) -> None:
        running = self._running[deadline]
        running.remove(number)
        if not running:
            del self._running[deadline]
