"""The collectors of a run: who belongs to it, who takes the next ticket, and who a lost one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from heapq import heappop, heappush
from operator import index
from typing import Any

from offbeat.errors import ConfigError
from offbeat.pacing.ledger import IntSet, Ledger

_MOST_LOSSES = 3
"""A ticket that was lost so often is tried alone: it may be the one that ends its collectors."""


FIXED_MEMBERS = (
    "collectors cannot join or leave at off_policy_degree 0: ticket n belongs to collector n mod their "
    "number, so another number would change the order of experience. Turn the dial to 1 or more, or start "
    "the run with another runtime.num_workers"
)


class Members:
    """Places tickets on collectors: a part of the coordinator, which tells it what happens to its ledger.

    At k = 0 ticket n belongs to member n mod N, whatever that wants to hold: this makes the order of
    experience, and so the weights, independent of timing. Above 0 the collector with most free capacity takes
    the next ticket, in turn where several have as much, so a slow collector holds no other up.

    ``present`` are the collectors that may get tickets, ``leaving`` those that only finish theirs, ``up`` the
    capacities of those that are up; all are for reading.
    """

    def __init__(self, num_collectors: int, ledger: Ledger) -> None:
        self.present = list(range(num_collectors))
        self.leaving: set[int] = set()
        self.up: dict[int, int] = {}
        self._configured = self._num_ever = num_collectors
        self._ledger = ledger
        self._free: dict[int, int] = {}  # collector -> free capacity
        self._by_free: dict[int, IntSet] = {}
        self._most_free: list[int] = []  # heap of free capacities that some may have, negative
        self._listed: set[int] = set()  # those in the heap
        self._returned = IntSet()  # collectors that can perhaps take their lost tickets again
        self._losses: Counter[int] = Counter()  # ticket -> collectors that were lost with it
        self._alone: int | None = None  # collector that gets nothing but suspects above k = 0

    # ------------------------------------------------------------ events

    def join(self, count: int) -> None:
        """Take in so many new collectors, under numbers that nobody had before."""
        self.present += range(self._num_ever, self._num_ever + count)
        self._num_ever += count

    def leave(self, collector: int) -> None:
        """Give a collector no new ticket; its lost ones belong to others. The last member stays."""
        if collector in self.present and len(self.present) > 1:
            self.present.remove(collector)
            self.leaving.add(collector)
            self._alone = None if self._alone == collector else self._alone
            self._rehome(collector)
            self.update(collector)

    def check(self, leaving: int | None) -> None:
        """Refuse that this collector leaves, naming the reason."""
        if leaving is not None and leaving not in self.present:
            raise ConfigError(f"there is no collector {leaving} that could leave, only {self.present}")
        if leaving is not None and len(self.present) == 1:
            raise ConfigError(f"collector {leaving} cannot leave: it is the last one, add another one first")

    def come_up(self, collector: int, capacity: int) -> None:
        """Note that a collector is up, or wants to hold another number of tickets."""
        if collector in self.present or collector in self.leaving:
            self.up[collector] = capacity
            self._returned.add(collector)
            self.update(collector)

    def go_down(self, collector: int) -> None:
        """Note that a collector was lost with all tickets that it held."""
        self.up.pop(collector, None)
        for number in sorted(self._ledger.running_on.get(collector, ())):
            self._losses[number] += 1
            self._ledger.lose(number, alone=self._losses[number] >= _MOST_LOSSES)
        if self._alone == collector:
            self._alone = None
        self.update(collector)
        if collector not in self.present:
            self._rehome(collector)

    def arrive(self, number: int, collector: int) -> None:
        """Note that a ticket's segment has arrived."""
        if self._losses:
            self._losses.pop(number, None)
        if self._ledger.lost_on.get(collector) and not self._ledger.running_on[collector]:
            self._returned.add(collector)
        self.update(collector)

    def retired(self) -> list[int]:
        """Return the leaving collectors that hold nothing any more; they have left."""
        done = sorted(one for one in self.leaving if not self._ledger.running_on.get(one))
        self.leaving.difference_update(done)
        for collector in done:
            self.up.pop(collector, None)
        return done

    def _rehome(self, collector: int) -> None:
        lost = self._ledger.lost_on.get(collector, IntSet())
        while (number := lost.next_from(0)) is not None:
            self._ledger.rehome(number, home := self.home(number))
            self._returned.add(home)

    # ------------------------------------------------------------ places

    def home(self, number: int) -> int:
        """Return the member that a ticket belongs to at k = 0."""
        return self.present[number % len(self.present)]

    def update(self, collector: int) -> None:
        """Note how many more tickets a collector wants to hold."""
        held = self._ledger.running_on.get(collector, ())
        free = max(0, self.up.get(collector, 0) - len(held))
        if free and (
            collector == self._alone
            or collector in self.leaving
            or (self._losses and self._holds_suspect(held))
        ):
            free = 0
        before = self._free.get(collector, 0)
        if free == before:
            return
        self._free[collector] = free
        if before:
            self._by_free[before].discard(collector)
        if free:
            if (as_free := self._by_free.get(free)) is None:
                as_free = self._by_free[free] = IntSet()
            if free not in self._listed:
                self._listed.add(free)
                heappush(self._most_free, -free)
            as_free.add(collector)

    def _holds_suspect(self, held: Collection[int]) -> bool:
        return len(held) == 1 and self._losses.get(next(iter(held)), 0) >= _MOST_LOSSES

    def for_new(self, number: int, degree: int) -> int | None:
        """Return the collector of a new ticket; None while it has to wait for one."""
        if degree:
            return self._freest(number)
        home, ledger = self.present[number % len(self.present)], self._ledger
        if home not in self.up or ledger.lost_on.get(home):
            return None
        is_alone = self._losses and self._holds_suspect(ledger.running_on.get(home, ()))
        return None if is_alone else home

    def for_lost(self, degree: int) -> tuple[int, int] | None:
        """Return a lost ticket that can be issued again, and the collector that takes it.

        At k = 0 it goes back to its own collector once that is up again, which takes its tickets in order.
        Above 0 the collector with most free capacity takes it, so that no work waits for one to start.
        A suspect is tried on a collector that holds nothing else.
        """
        ledger = self._ledger
        if degree == 0:
            while (collector := self._returned.next_from(0)) is not None:
                lost = ledger.lost_on.get(collector)
                number = lost.next_from(0) if lost and collector in self.up else None
                held = ledger.running_on.get(collector, ())
                if number is not None and not (
                    held and (number in ledger.suspects or self._holds_suspect(held))
                ):
                    return number, collector
                self._returned.discard(collector)
            return None
        if (ledger.suspects or self._alone is not None) and (alone := self._for_suspect()) is not None:
            return alone
        number = ledger.lost.next_from(0)
        collector = None if number is None else self._freest(number)
        return None if number is None or collector is None else (number, collector)

    def _for_suspect(self) -> tuple[int, int] | None:
        """Keep one collector free for suspects while there are any."""
        number = self._ledger.suspects.next_from(0)
        if number is not None and self._alone is None and (chosen := self._freest(number)) is not None:
            self._alone = chosen
            self.update(chosen)
        if (alone := self._alone) is None:
            return None
        if number is None:
            self._alone = None
            self.update(alone)
            return None
        is_idle = alone in self.up and not self._ledger.running_on.get(alone)
        return (number, alone) if is_idle else None

    def _freest(self, number: int) -> int | None:
        while self._most_free:
            collectors = self._by_free[-self._most_free[0]]
            if collectors:
                return collectors.next_from(self.present[number % len(self.present)])
            self._listed.remove(-heappop(self._most_free))
        return None

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return who belongs to the run; those that are leaving do not continue."""
        return {"configured": self._configured, "ever": self._num_ever, "present": list(self.present)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with the same members, unless another number is configured now; a ledger comes first."""
        if state is not None and state["configured"] == self._configured:
            present, num_ever = [index(one) for one in state["present"]], index(state["ever"])
            if not present or not set(present) <= set(range(num_ever)):
                raise ValueError(f"the collectors {present} of {num_ever} that there ever were")
            self.present, self._num_ever = present, num_ever
        gone = self._ledger.lost_on.keys() - set(self.present)
        for collector in sorted(gone):
            self._rehome(collector)
