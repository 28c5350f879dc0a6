"""The ledger: the fate of every ticket, with the counts that decisions need beside it.

Tickets that are outstanding are at hand, a finished one leaves only its count. So every operation takes
the same time, and a check and a saved state grow with what is outstanding, not with what was ever issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter, index
from typing import Any

from offbeat.errors import PromiseBroken
from offbeat.types import Ticket

RUNNING, READY, TRAINED, DROPPED, LOST = range(1, 6)
_BITS = 10  # of a member within its word: words of 1,024 bits keep both levels short up to 10^6 members
_MASK = (1 << _BITS) - 1
_deadline_of = attrgetter("deadline")
_NAMES = {RUNNING: "running", READY: "ready", LOST: "lost"}


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
    """Outstanding tickets by status, and how many are finished.

    Tickets of the round under way are READY until it ends. ``waiting`` maps a deadline to the number of
    outstanding tickets that have it, without those of the round under way; ``lost`` holds the numbers of
    lost tickets, ``suspects`` of those that are to be tried alone, ``lost_on`` of both by their collector.
    ``running_on`` holds the running ones of each collector, ``ready`` the READY tickets in order of arrival.
    They, and the counts ``issued``, ``trained`` and ``dropped``, are for reading.
    """

    def __init__(self) -> None:
        self.issued = self.trained = self.dropped = 0
        self.ready: dict[int, Ticket] = {}
        self._tickets: dict[int, dict[int, Ticket]] = {RUNNING: {}, READY: self.ready, LOST: {}}
        self._round: frozenset[int] = frozenset()
        self.waiting: dict[int, int] = {}
        self.lost = IntSet()
        self.suspects = IntSet()
        self.lost_on: dict[int, IntSet] = {}
        self._ready_by: dict[int, set[int]] = {}  # deadline -> ready and not in the round under way
        self.running_on: dict[int, set[int]] = {}

    # ------------------------------------------------------------ reading

    def ticket(self, number: int) -> Ticket:
        """The outstanding ticket with this number."""
        for tickets in self._tickets.values():
            if number in tickets:
                return tickets[number]
        raise PromiseBroken(f"ticket {number} is {self._fate(number)}")

    def outstanding(self) -> Iterator[Ticket]:
        """Tickets issued and neither trained nor dropped."""
        return chain.from_iterable(tickets.values() for tickets in self._tickets.values())

    @property
    def num_outstanding(self) -> int:
        """Number of tickets issued and neither trained nor dropped."""
        return self.issued - self.trained - self.dropped

    def with_status(self, status: int) -> list[Ticket]:
        """Outstanding tickets with this status, in order of number."""
        tickets = self._tickets[status]
        return [tickets[number] for number in sorted(tickets)]

    def first_arrived(self, count: int) -> tuple[int, ...]:
        """Numbers of the ``count`` READY tickets that arrived first, in order of number."""
        return tuple(sorted(islice(self.ready, count)))

    def earliest(self, count: int) -> dict[int, int]:
        """Deadlines of the ``count`` ready tickets to train next, by how many have each.

        The smallest deadlines come first.
        """
        chosen = {}
        for deadline in sorted(self._ready_by):
            chosen[deadline] = min(count, len(self._ready_by[deadline]))
            count -= chosen[deadline]
            if count <= 0:
                break
        return chosen

    def pick(self, deadlines: Mapping[int, int]) -> tuple[int, ...]:
        """Choose so many ready tickets of each deadline, those with the smallest numbers; return these."""
        chosen: list[int] = []
        for deadline, count in deadlines.items():
            chosen += sorted(self._ready_by[deadline])[:count]
        return tuple(sorted(chosen))

    # ------------------------------------------------------------ from status to status

    def issue(self, ticket: Ticket) -> None:
        """Enter a new ticket, or one that was lost and is issued again."""
        if ticket.number == self.issued:
            self.issued += 1
            self.waiting[ticket.deadline] = self.waiting.get(ticket.deadline, 0) + 1
        else:
            self._leave(ticket.number, LOST, "issued again")
        self._enter(ticket, RUNNING)

    def arrive(self, number: int) -> Ticket:
        """Note that the ticket's segment is in the store; return the ticket."""
        ticket = self._leave(number, RUNNING, "arrive")
        self.ready[number] = ticket
        self._ready_by.setdefault(ticket.deadline, set()).add(number)
        return ticket

    def lose(self, number: int, alone: bool = False) -> None:
        """Note that the ticket's collector died, or its segment went with a run that was killed.

        ``alone``: it is a suspect now.
        """
        status = READY if number in self.ready else RUNNING
        self._enter(self._leave(number, status, "be lost"), LOST)
        (self.suspects if alone else self.lost).add(number)

    def rehome(self, number: int, collector: int) -> None:
        """Let a lost ticket belong to another collector: its own has left."""
        alone = number in self.suspects
        self._enter(replace(self._leave(number, LOST, "change its collector"), collector=collector), LOST)
        (self.suspects if alone else self.lost).add(number)

    def drop(self, number: int) -> None:
        """Note that a named policy dropped the ticket's segment."""
        deadline = self._leave(number, READY, "be dropped").deadline
        self.waiting[deadline] -= 1
        if not self.waiting[deadline]:
            del self.waiting[deadline]
        self.dropped += 1

    def begin_round(self, numbers: Iterable[int]) -> None:
        """Take ready tickets into the round under way; there is no other one."""
        assert not self._round
        chosen, changed = frozenset(numbers), set[int]()
        if missing := chosen - self.ready.keys():
            raise PromiseBroken(f"ticket {min(missing)} cannot be trained: it is {self._fate(min(missing))}")
        for number in chosen:
            deadline = self.ready[number].deadline
            self._ready_by[deadline].remove(number)
            self.waiting[deadline] -= 1
            changed.add(deadline)
        for deadline in changed:
            if not self._ready_by[deadline]:
                del self._ready_by[deadline]
            if not self.waiting[deadline]:
                del self.waiting[deadline]
        self._round = chosen

    def end_round(self) -> None:
        """Note that the segments of the round under way were trained."""
        for number in self._round:
            del self.ready[number]
        self.trained += len(self._round)
        self._round = frozenset()

    def _enter(self, ticket: Ticket, status: int) -> None:
        """Enter a ticket as RUNNING or LOST."""
        self._tickets[status][ticket.number] = ticket
        if status == RUNNING:
            self.running_on.setdefault(ticket.collector, set()).add(ticket.number)
        else:
            self.lost_on.setdefault(ticket.collector, IntSet()).add(ticket.number)

    def _leave(self, number: int, status: int, purpose: str) -> Ticket:
        """Take a ticket out of its status, unless it has another one or is being trained."""
        ticket = self._tickets[status].get(number)
        if ticket is None or (status == READY and number in self._round):
            raise PromiseBroken(f"ticket {number} cannot {purpose}: it is {self._fate(number)}")
        del self._tickets[status][number]
        if status == READY:
            self._ready_by[ticket.deadline].remove(number)
            if not self._ready_by[ticket.deadline]:
                del self._ready_by[ticket.deadline]
        elif status == RUNNING:
            self.running_on[ticket.collector].remove(number)
        else:
            self.lost_on[ticket.collector].discard(number)
            self.lost.discard(number)
            self.suspects.discard(number)
        return ticket

    def _fate(self, number: int) -> str:
        if number in self._round:
            return "being trained"
        for status, tickets in self._tickets.items():
            if number in tickets:
                return _NAMES[status]
        return "finished" if 0 <= number < self.issued else "unknown"

    # ------------------------------------------------------------ counts

    def counts(self) -> Counts:
        """Count the tickets by fate."""
        running, ready, lost = map(len, self._tickets.values())
        return Counts(self.issued, running, ready, self.trained, self.dropped, lost)

    def check(self) -> Counts:
        """Assert conservation: every ticket has one fate, and all counts agree with the tickets at hand."""
        counts = self.counts()
        at_hand = counts.running + counts.ready + counts.lost
        waiting = Counter(map(_deadline_of, self.outstanding()))
        waiting.subtract(map(_deadline_of, map(self.ready.__getitem__, self._round)))
        ready = sum(map(len, self._ready_by.values())) + len(self._round)
        running = sum(map(len, self.running_on.values()))
        in_line = len(self.lost) + len(self.suspects)
        agree = (running, ready, in_line) == (counts.running, counts.ready, counts.lost)
        if not (agree and at_hand == self.num_outstanding and +waiting == self.waiting):
            raise PromiseBroken(
                f"tickets are not conserved: {counts}, {self.num_outstanding} outstanding, {running} running "
                f"by collector, {ready} ready by deadline, {in_line} in line to be issued again, "
                f"{self.waiting} waiting by deadline, counted {dict(+waiting)}"
            )
        return counts

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Counts of finished tickets and all outstanding ones, as plain values."""
        counts = {"issued": self.issued, "trained": self.trained, "dropped": self.dropped}
        return counts | {name: _rows(self._tickets[status]) for status, name in _NAMES.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, now or when it held a status for every ticket ever issued."""
        if "status" in state:
            state = _from_statuses(state)
        vars(self).update(vars(Ledger()))
        self.issued, self.trained, self.dropped = state["issued"], state["trained"], state["dropped"]
        for status, name in _NAMES.items():
            for row in state[name]:
                ticket = Ticket(*map(index, row))
                self._enter(ticket, RUNNING)
                if status == READY:
                    self.arrive(ticket.number)
                elif status == LOST:
                    self.lose(ticket.number)
        self.waiting = dict(Counter(ticket.deadline for ticket in self.outstanding()))


def _rows(tickets: Mapping[int, Ticket]) -> list[list[int]]:
    return [list(ticket.as_row()) for ticket in tickets.values()]


def _from_statuses(state: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a state that held the status of every ticket ever issued."""
    statuses = bytes(state["status"], "latin-1")
    rows: dict[str, list[Any]] = {name: [] for name in _NAMES.values()}
    for row in state["live"]:
        rows[_NAMES[statuses[row[0]]]].append(row)
    trained, dropped = statuses.count(TRAINED), statuses.count(DROPPED)
    return {"issued": len(statuses), "trained": trained, "dropped": dropped, **rows}


# ---------------------------------------------------------------- the line of those that wait


class IntSet:
    """A set of integers >= 0 with `next_from`: one bit for each member in words, one for each word.

    Example: ``IntSet`` with members 2 and 5: ``next_from(3)`` is 5, ``next_from(6)`` is 2.
    """

    __slots__ = ("_len", "_used", "_words")

    def __init__(self) -> None:
        self._words: dict[int, int] = {}
        self._used = 0  # bit i: word i has members
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, member: int) -> bool:
        word = self._words.get(member >> _BITS, 0)
        return bool(word >> (member & _MASK) & 1)

    def add(self, member: int) -> None:
        """Add a member; nothing changes when it is one already."""
        place, bit = member >> _BITS, 1 << (member & _MASK)
        word = self._words.get(place, 0)
        if not word & bit:
            self._words[place] = word | bit
            self._used |= 1 << place
            self._len += 1

    def discard(self, member: int) -> None:
        """Remove a member; nothing changes when it is none."""
        place, bit = member >> _BITS, 1 << (member & _MASK)
        word = self._words.get(place, 0)
        if word & bit:
            self._len -= 1
            if word == bit:
                del self._words[place]
                self._used ^= 1 << place
            else:
                self._words[place] = word ^ bit

    def next_from(self, start: int) -> int | None:
        """Return the smallest member >= ``start``, else the smallest of all; None when there is none."""
        if not self._len:
            return None
        place = start >> _BITS
        upper = start & _MASK
        bits = self._words.get(place, 0) >> upper << upper
        if not bits:
            places = self._used >> (place + 1) << (place + 1) or self._used
            place = (places & -places).bit_length() - 1
            bits = self._words[place]
        return (place << _BITS) + (bits & -bits).bit_length() - 1
