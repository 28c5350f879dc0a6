"""The books on a simulated run: what a driver and its pace may do, checked at the runtime's end of it.

Nothing is taken from the driver's or the coordinator's state but what they are checked for. What they ask of
the runtime and what it tells them is entered here, and compared after each step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from offbeat.pacing.actions import Cut, Evaluate, Train
from offbeat.pacing.checker import BOUND, CONSERVATION, CONTRACT, InvariantChecker, Violation
from offbeat.pacing.events import (
    CollectorDown,
    CollectorRemoved,
    CollectorsAdded,
    CollectorUp,
    DialTurned,
    EvalDone,
    Event,
    GatesSet,
    Published,
    PublishFailed,
    RoundTrained,
    SegmentArrived,
    SnapshotTaken,
    StopRequested,
)
from offbeat.run.driver import Driver
from offbeat.runtime.messages import Begun
from offbeat.testing.simulated import Watch, World
from offbeat.testing.simulated_roles import Weights
from offbeat.types import Batch, Segment, StateTree, Ticket

_MOST_BLAMES = 3
WINDOW_S = 3600.0


def require(condition: bool, kind: str, text: str, *values: object) -> None:
    """Raise a `Violation` unless a condition holds."""
    if not condition:
        raise Violation(kind, text.format(*values))


@dataclass(slots=True)
class Budget:
    """Losses of collectors, and whether the run has to end for them. Of one driver.

    ``blames`` counts by ticket how many collectors were lost with it; ``deadly`` is one that took the last of
    several down alone.
    """

    most: int
    lost_at_s: deque[float] = field(default_factory=deque)
    blames: Counter[int] = field(default_factory=Counter)
    deadly: int | None = None
    is_spent: bool = False

    def blame(self, held: Mapping[int, None]) -> None:
        """Count a loss for each ticket of a collector."""
        self.blames.update(held.keys())
        if len(held) == 1 and self.blames[first := next(iter(held))] >= _MOST_BLAMES:
            self.deadly = first

    def forgive(self, ticket: int) -> None:
        """Forget the losses over a ticket that has arrived."""
        self.blames.pop(ticket, None)
        self.deadly = None if self.deadly == ticket else self.deadly

    def lose(self, now_s: float) -> None:
        """Count a collector that was lost, and is to be replaced."""
        self.lost_at_s.append(now_s)
        while self.lost_at_s[0] < now_s - WINDOW_S:
            self.lost_at_s.popleft()
        self.is_spent |= self.deadly is not None or len(self.lost_at_s) > self.most


class Books(Watch):
    """Checks one driver and its runtime. ``history`` are the digests of weights by version.

    ``checker`` is about pacing. ``held`` are the tickets of each collector, ``blocks`` those whose segments
    take memory; ``waits`` are the keys of everything that the driver has to wait for.
    """

    def __init__(
        self,
        world: World,
        checker: InvariantChecker,
        totals: Counter[str],
        history: dict[int, int],
        most_restarts: int,
    ) -> None:
        self.checker, self.totals, self.history = checker, totals, history
        self._world = world
        self.blocks: set[int] = set(checker.ready)
        self.held: dict[int, dict[int, None]] = {}
        self.budget = Budget(most_restarts)
        self.waits: set[Hashable] = {"progress"}
        self.captured: dict[int, InvariantChecker] = {}
        self._snapshots = 0
        self._is_to_capture = False

    def watch(self, driver: Driver) -> None:
        """Watch a driver, too."""
        self._driver = driver
        driver.observe({DialTurned: self._turned, GatesSet: self._gated, StopRequested: self._stopped})
        driver.observe({CollectorsAdded: self._joined, CollectorRemoved: self._leaving})

    def _degree(self) -> int:
        return self.checker.degree(self._driver.pace.degree)

    # ------------------------------------------------------------ requests of the user, once they are taken

    def _turned(self, event: DialTurned, now_s: float) -> None:
        self.checker.dial, self.checker.always_zero = event.off_policy_degree, False

    def _gated(self, event: GatesSet, now_s: float) -> None:
        self.checker.gates = event

    def _stopped(self, event: StopRequested, now_s: float) -> None:
        self.checker.stop_requested = True

    def _joined(self, event: CollectorsAdded, now_s: float) -> None:
        require(self._may_move(), CONTRACT, "{} at k = 0", event)
        self.checker.join(event.count)
        self.totals["joined"] += event.count

    def _leaving(self, event: CollectorRemoved, now_s: float) -> None:
        require(self._may_move(), CONTRACT, "{} at k = 0", event)
        assert event.collector is not None
        self.checker.leave(event.collector)
        require(bool(self.checker.members), CONTRACT, "{}: it is the last one", event)
        self.waits.discard((f"collector_{event.collector}", "pause"))

    def _may_move(self) -> bool:
        return self.checker.dial != 0

    # ------------------------------------------------------------ requests of the driver

    def start_collector(self, index: int) -> None:
        """Expect a collector to come up."""
        name = f"collector_{index}"
        require((name, "start") not in self.waits, CONTRACT, "{} is started twice", name)
        self.waits.discard((name, "pause"))
        self.waits.add((name, "start"))

    def end_collector(self, index: int) -> None:
        """Check a collector that is ended, since it was asked to leave."""
        name = f"collector_{index}"
        self.checker.retire(index)
        self.waits -= {name, (name, "start"), (name, "pause")}
        self.totals["left"] += 1

    def issue(self, ticket: Ticket, begun: Begun | None) -> None:
        """Check a ticket that goes to its collector."""
        index = ticket.collector
        self.totals["reissued" if ticket.attempt else "segments"] += 1
        self.totals["begun_before"] += begun is not None
        self.totals["tried_alone"] += ticket.number in self.checker.suspects
        self.checker.issue(ticket, self._degree(), self._world.time_s)
        self.held.setdefault(index, {})[ticket.number] = None
        self.waits.add(f"collector_{index}")

    def cut(self, tickets: Sequence[Ticket]) -> None:
        """Check tickets that are to be ended early."""
        self.totals["cut"] += len(tickets)
        self.checker.cut(Cut(tuple(tickets)))

    def train(self, batch: Batch) -> None:
        """Check a round that begins."""
        tickets = tuple(segment.ticket.number for segment in batch.segments)
        if not self.checker.config.is_bounded:
            oldest = batch.version - self._driver.pace.degree
            self.totals["late"] += sum(self.checker.ready[number] < oldest for number in tickets)
        self.checker.train(Train(batch.version, tickets, batch.off_policy_degree), self._degree())
        self.waits.add("train")

    def publish(self, weights: Weights) -> None:
        """Expect weights to be published."""
        checker, preset = self.checker, self.checker.config.preset
        if preset is not None and preset.in_step and checker.published >= 0:
            left = len(checker.ready) + len(checker.running) + len(checker.lost)
            is_whole = (
                left in (0, len(checker.ready)) or len(checker.ready) >= checker.config.segments_per_round
            )
            require(is_whole, CONTRACT, "version {} is published within a round", weights.version)
        self.checker.asked_to_publish = weights.version
        self.history[weights.version] = weights.digest
        self.waits.add(("publish", weights.version))

    def evaluate(self, version: int) -> None:
        """Check an evaluation that begins."""
        self.checker.evaluate(Evaluate(version, blocking=not self.checker.config.async_eval))
        self.totals["evaluations"] += 1
        self.waits.add("evaluation")

    def snapshot(self) -> None:
        """Keep the books after this step, for the checkpoint: it knows all that was decided with it."""
        self._snapshots += 1
        self.waits.add("snapshot")
        self._is_to_capture = True

    def release(self, tickets: Sequence[int]) -> None:
        """Check that memory is released once."""
        for number in tickets:
            require(number in self.blocks, CONSERVATION, "the memory of ticket {} is not held", number)
            self.blocks.remove(number)

    # ------------------------------------------------------------ events

    def tell(self, events: Sequence[Event]) -> None:
        """Enter the events that the driver is about to take."""
        self.totals["batched"] += len(events) if len(events) > 1 else 0
        for event in events:
            self._enter(event)

    def _enter(self, event: Event) -> None:
        if self._driver.finish is not None:
            if isinstance(event, SnapshotTaken):
                self._end_snapshot()
            return
        match event:
            case SegmentArrived(segment):
                self._arrive(segment)
            case CollectorUp(index, capacity):
                self.checker.come_up(index, capacity)
                self.waits.discard((f"collector_{index}", "start"))
            case CollectorDown(index):
                self._lose(index)
            case RoundTrained():
                self.checker.end_round()
                self.totals["rounds"] += 1
                self.waits.discard("train")
            case Published(version):
                self.checker.failures = 0
                self.checker.published = max(self.checker.published, version)
                self.waits.discard(("publish", version))
            case PublishFailed(version):
                self.checker.failures += 1
                self.totals["publish_failures"] += 1
                self.waits.discard(("publish", version))
            case EvalDone():
                self.checker.end_evaluation()
                self.waits.discard("evaluation")
            case SnapshotTaken():
                self._end_snapshot()

    def _end_snapshot(self) -> None:
        self._snapshots -= 1
        if not self._snapshots:
            self.waits.discard("snapshot")

    def _arrive(self, segment: Segment) -> None:
        ticket = segment.ticket
        index, number = ticket.collector, ticket.number
        held = self.held[index]
        require(number in held, CONTRACT, "{} was not asked for", ticket)
        del held[number]
        if not held:
            self.waits.discard(f"collector_{index}")
        self._check_versions(segment)
        self.budget.forgive(number)
        self.checker.arrive(number, segment.oldest_version)
        require(number not in self.blocks, CONSERVATION, "the memory of ticket {} is taken twice", number)
        self.blocks.add(number)
        if segment.drop:
            self.checker.drop(number)
            self.totals["dropped_as_named"] += 1

    def _check_versions(self, segment: Segment) -> None:
        """Check that each part of a segment was made with weights that this run has had, in order."""
        versions, marks = segment.versions.tolist(), segment.data["marks"].tolist()
        known = self.history
        own = [known.get(version) for version in versions] == marks
        require(own, BOUND, "{} holds {}, which this run never had", segment.ticket, versions)
        require(versions == sorted(versions), CONTRACT, "{} goes back in {}", segment.ticket, versions)

    def _lose(self, index: int) -> None:
        name, held = f"collector_{index}", self.held.setdefault(index, {})
        self.totals["lost"] += self.checker.lose(index)
        self.budget.blame(held)
        if index in self.checker.members:  # nobody takes the place of one that leaves
            self.budget.lose(self._world.time_s)
        held.clear()
        self.waits -= {name, (name, "start")}
        if index in self.checker.members:
            self.waits.add((name, "pause"))  # unless it is started at once

    # ------------------------------------------------------------ after each step

    def check(self) -> None:
        """Compare the books with the run after a step."""
        driver, checker = self._driver, self.checker
        if self._is_to_capture:
            self._is_to_capture = False
            self.captured[checker.version] = checker.after_crash(keeps_segments=True)
        checker.check(driver.pace.counts())
        require(
            self.blocks == checker.ready.keys(),
            CONSERVATION,
            "memory is held for {}, segments wait of {}",
            self.blocks,
            checker.ready.keys(),
        )
        if driver.finish is not None:
            checker.checkpointed = checker.version  # it may take some time yet: looked at in the end
            checker.finish(driver.finish, driver.pace.eval_skipped)
            return
        require(not self.budget.is_spent, CONTRACT, "the run goes on though its budget is spent")
        found = driver.waits.keys() - {"stop", "work", "write"}
        require(
            found == self.waits,
            CONTRACT,
            "waits that nobody ends: {}; missing: {}",
            found - self.waits,
            self.waits - found,
        )

    # ------------------------------------------------------------ checkpoints

    def check_saved(self, version: int, parts: Mapping[str, StateTree]) -> InvariantChecker:
        """Compare a checkpoint with the books of its time; return those."""
        mine = self.captured.pop(version)
        ledger, store = parts["coordinator"]["ledger"], parts["store"]["segments"]
        trained: list[int] = parts["learner"]["trained"]
        require(len(set(trained)) == len(trained), CONSERVATION, "checkpoint {}: trained twice", version)
        require(set(trained) == mine.trained, CONSERVATION, "checkpoint {}: others are trained", version)
        ready = _numbers(ledger["ready"])
        lost = _numbers(ledger["lost"]) | _numbers(ledger["running"])
        kept = {segment["ticket"][0] for segment in store}
        found = {"ready": ready, "lost": lost, "kept": kept}
        due = {"ready": set(mine.ready), "lost": mine.lost, "kept": set(mine.ready)}
        require(found == due, CONSERVATION, "checkpoint {} holds {}, but there were {}", version, found, due)
        again = mine.trained & set(parts.get("work", {}))
        require(not again, CONSERVATION, "checkpoint {} holds begun work of trained {}", version, again)
        return mine


def _numbers(rows: Sequence[Sequence[int]]) -> set[int]:
    return {row[0] for row in rows}
