"""Checks the invariants of a simulated run: staleness bound, conservation of tickets, progress.

Nothing here is taken from the coordinator's state: the checker follows the actions it gave and the events
that came of them, so that a mistake in the coordinator's own checks does not hide another one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from offbeat.pacing.actions import Cut, Evaluate, Finish, Train
from offbeat.pacing.config import AUTO, PaceConfig
from offbeat.pacing.events import GatesSet
from offbeat.pacing.ledger import Counts
from offbeat.types import Ticket

BOUND = "bound_violations"
CONSERVATION = "conservation_violations"
CONTRACT = "contract_violations"
DEADLOCK = "deadlocks"
_SUSPECT_AFTER = 3
KINDS = (BOUND, CONSERVATION, CONTRACT, DEADLOCK)


class Violation(Exception):
    """A promise was broken in a simulated run. ``kind`` is one of `KINDS`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _require(condition: bool, kind: str, text: str, *values: object) -> None:
    # The text is put together only when it is needed: this runs several times per event.
    if not condition:
        raise Violation(kind, text.format(*values))


def gates_at_first(config: PaceConfig) -> GatesSet:
    """Return the gates as they are at the start."""
    return GatesSet(collect=False, until=0) if config.stepwise else GatesSet()


@dataclass(slots=True)
class InvariantChecker:
    """A record of every ticket, segment and component of a run, checked after each step.

    ``dial`` is the chosen setting (-1: auto); ``always_zero`` says that k was 0 all along, so that
    not even the order of training may depend on timing. ``tickets`` are as last issued; ``born_under``
    maps a ticket to the k in force when it was first issued, ``ready`` to the oldest version behind its
    segment. ``failures`` counts failed publishes in a row. A round's segments stay in ``ready`` until the
    round has ended. ``members`` may get tickets; ``up`` maps a collector to the number of tickets that it
    wants to hold, ``held`` to what it holds, ``losses`` a ticket to the collectors that were lost with it.
    ``suspects`` have to be tried alone, ``asked`` are the tickets and attempts that were cut. ``num_drops``
    are those since ``round_kept`` rounds were kept.
    """

    config: PaceConfig
    dial: int
    always_zero: bool
    version: int = 0
    asked_to_publish: int = -1
    published: int = -1
    failures: int = 0
    tickets: dict[int, Ticket] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    ready: dict[int, int] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    members: list[int] = field(default_factory=list)
    num_joined: int = 0
    up: dict[int, int] = field(default_factory=dict)
    held: Counter[int] = field(default_factory=Counter)
    losses: Counter[int] = field(default_factory=Counter)
    suspects: set[int] = field(default_factory=set)
    asked: set[tuple[int, int]] = field(default_factory=set)
    num_drops: int = 0
    round_kept: int = 0
    has_too_many_drops: bool = False
    born_under: dict[int, int] = field(default_factory=dict)
    training: tuple[int, ...] | None = None
    eval_running: int | None = None
    eval_blocks: bool = False
    eval_points: int = 0
    evaluations: int = 0
    issued_at_s: float | None = None
    checkpointed: int = 0
    stop_requested: bool = False
    has_resumed: bool = False
    gates: GatesSet = field(default_factory=GatesSet)

    def __post_init__(self) -> None:
        self.members = self.members or list(range(self.config.num_collectors))
        if not self.has_resumed:
            self.eval_points += self.config.eval_at_start

    # ------------------------------------------------------------ collectors

    def come_up(self, collector: int, capacity: int) -> None:
        """A collector is up, or wants to hold another number of tickets."""
        self.up[collector] = capacity

    def join(self, count: int) -> None:
        """Collectors joined."""
        first = self.config.num_collectors + self.num_joined
        self.members += range(first, first + count)
        self.num_joined += count

    def leave(self, collector: int) -> None:
        """A collector was asked to leave."""
        self.members.remove(collector)

    def retire(self, collector: int) -> None:
        """A collector ends that was asked to leave."""
        is_due = collector not in self.members and not self.held[collector]
        _require(is_due, CONTRACT, "collector {} ended, it holds {}", collector, self.held[collector])
        self.up.pop(collector, None)

    def _check_place(self, ticket: Ticket, degree: int, home: int | None) -> None:
        """Compare the collector of a ticket with its ``home`` at k = 0, or with those that are freer."""
        collector, is_suspect = ticket.collector, ticket.number in self.suspects
        _require(collector in self.members, CONTRACT, "{} is on no member", ticket)
        _require(collector in self.up, CONTRACT, "{} is on a collector that is down", ticket)
        tried = {self.tickets[number].collector for number in self.suspects & self.running}
        disturbs = self.held[collector] > 0 and (is_suspect or collector in tried)
        _require(not disturbs, CONTRACT, "{} is not alone, or disturbs another", ticket)
        if degree == 0:
            _require(home in (None, collector), CONTRACT, "{} belongs to collector {}", ticket, home)
            return
        free = {one: capacity - self.held[one] for one, capacity in self.up.items() if one in self.members}
        most = free[collector] if self.suspects else max(free.values())
        is_freest = free[collector] == most > 0
        _require(is_freest, CONTRACT, "{} has {} places there of {}", ticket, free[collector], most)

    # ------------------------------------------------------------ tickets and segments

    def degree(self, reported: int) -> int:
        """k in force: what the dial says, or in auto what is reported, within its limits."""
        if self.dial == AUTO:
            _require(0 <= reported <= self.config.auto_max, CONTRACT, "auto set k to {}", reported)
            return reported
        due = self._opened()
        _require(reported == due, CONTRACT, "k is {}, but {} is due at {}", reported, due, self.version)
        return due

    def _opened(self) -> int:
        """Return k as the dial says, or as far as it has opened."""
        config, every = self.config, self.config.open_rounds
        if config.mode == "replay" or not every:
            return self.dial
        return min(self.dial, config.publish_interval - 1 + self.version // every)

    def issue(self, ticket: Ticket, degree: int, now_s: float) -> None:
        """A ticket was given out, for the first time or again."""
        _require(not self.eval_blocks, CONTRACT, "{} issued during a blocking evaluation", ticket)
        if ticket.number in self.lost:
            self._issue_again(ticket, degree)
        else:
            self._issue_new(ticket, degree, now_s)
        self.tickets[ticket.number] = ticket
        self.running.add(ticket.number)
        self.held[ticket.collector] += 1

    def _issue_again(self, ticket: Ticket, degree: int) -> None:
        before = self.tickets[ticket.number]
        self.lost.remove(ticket.number)
        expected = replace(before, collector=ticket.collector, attempt=before.attempt + 1)
        _require(ticket == expected, CONTRACT, "{} issued again, expected {}", ticket, expected)
        self._check_place(ticket, degree, before.collector if before.collector in self.members else None)

    def _issue_new(self, ticket: Ticket, degree: int, now_s: float) -> None:
        config, number = self.config, len(self.born_under)
        _require(self._is_collecting(), CONTRACT, "{} issued although {}", ticket, self.gates)
        _require(ticket.number == number, CONSERVATION, "{} issued, number {} was due", ticket, number)
        named = (ticket.version, ticket.deadline, ticket.attempt)
        expected = (self.published, self.published + degree, 0)
        _require(named == expected, CONTRACT, "{} should name {}", ticket, expected)
        self._check_place(ticket, degree, self.members[number % len(self.members)])
        overtakes = degree == 0 and any(self.tickets[n].collector == ticket.collector for n in self.lost)
        _require(not overtakes, CONTRACT, "{} overtakes a lost ticket of its collector", ticket)
        most = config.max_outstanding
        waiting = len(self.running) + len(self.ready) + len(self.lost) - len(self.training or ())
        _require(most is None or waiting < most, CONTRACT, "{} exceeds the queue of {}", ticket, most)
        self.born_under[number] = degree
        self._check_ahead(number, degree)
        self._check_counted(number)
        self._check_interval(ticket, now_s)

    def _is_collecting(self) -> bool:
        """Return True if a gate is open through which a new ticket may go."""
        next_round, until = self.version + (self.training is not None), self.gates.until
        return self.gates.collect or (until is not None and next_round < until)

    def _check_ahead(self, number: int, degree: int) -> None:
        if self.config.mode == "replay":
            limit = self.config.replay_limit(self.version, degree)
            kept = number - len(self.dropped)
            _require(kept < limit, BOUND, "ticket {} is beyond {} at {}", number, limit, self.version)
        if degree == 0:
            _require(self.training is None, BOUND, "ticket {} issued during a round at k = 0", number)
            newest = self.published == self.asked_to_publish
            _require(newest, BOUND, "ticket {} issued with old weights at k = 0", number)

    def _check_counted(self, number: int) -> None:
        """Compare a new ticket with what the rule of a preset counts."""
        preset, size = self.config.preset, self.config.segments_per_round
        if preset is None:
            return
        kept, begun = number + 1 - len(self.dropped), self.version + (self.training is not None)
        since = begun if preset.in_step else self.published
        most = size * since + math.floor(size * preset.rounds_ahead + 1e-6)
        _require(kept <= most, BOUND, "ticket {} is number {}, at most {} may be", number, kept, most)
        newest = self.published == self.asked_to_publish
        _require(not preset.in_step or newest, CONTRACT, "ticket {} is of old weights", number)

    def _check_interval(self, ticket: Ticket, now_s: float) -> None:
        if self.issued_at_s is not None:
            since_s = now_s - self.issued_at_s
            waited = since_s >= self.config.issue_interval_s - 1e-9
            _require(waited, CONTRACT, "{} issued {} s after the last", ticket, since_s)
        self.issued_at_s = now_s

    def arrive(self, number: int, newer_version: int | None) -> int:
        """A segment came in; return the version that produced it."""
        self.running.remove(number)
        self.held[self.tickets[number].collector] -= 1
        self.losses.pop(number, None)
        self.suspects.discard(number)
        version = self.tickets[number].version
        self.ready[number] = version if newer_version is None else max(version, newer_version)
        return self.ready[number]

    def drop(self, number: int) -> None:
        """A segment that had arrived was dropped."""
        del self.ready[number]
        self.dropped.add(number)
        kept = (len(self.ready) + len(self.trained)) // self.config.segments_per_round
        self.num_drops = 1 + (self.num_drops if kept == self.round_kept else 0)
        self.round_kept = kept
        is_ending = self.stop_requested or self.version >= self.config.rounds
        self.has_too_many_drops |= self.num_drops > self.config.most_drops and not is_ending

    def lose(self, collector: int) -> int:
        """A collector died; return how many tickets went with it."""
        gone = {number for number in self.running if self.tickets[number].collector == collector}
        self.running -= gone
        self.lost |= gone
        self.losses.update(gone)
        self.suspects |= {number for number in gone if self.losses[number] >= _SUSPECT_AFTER}
        del self.held[collector]
        self.up.pop(collector, None)
        return len(gone)

    def cut(self, action: Cut) -> None:
        """Running tickets were asked to end: a round could begin if they had."""
        size = self.config.segments_per_round
        waits = self.training is None and len(self.ready) >= size
        _require(waits and self.config.straggler_policy == "cut", CONTRACT, "{} holds no round up", action)
        left = sorted(self.tickets[number].deadline for number in self.ready)[size:]
        left += [self.tickets[number].deadline for number in self.running | self.lost]
        for ticket in action.tickets:
            number, attempt = ticket.number, ticket.attempt
            is_new = self.tickets[number] == ticket and number in self.running
            _require(is_new and (number, attempt) not in self.asked, CONTRACT, "{} was cut before", ticket)
            self.asked.add((number, attempt))
            later = [deadline for deadline in set(left) if deadline >= ticket.deadline]
            due = [(d, sum(one <= d for one in left)) for d in later]
            is_late = any(count > size * (d - self.version) for d, count in due)
            _require(is_late, CONTRACT, "{} holds no round up", ticket)

    # ------------------------------------------------------------ rounds

    def train(self, action: Train, degree: int) -> float:
        """Start a round; return the mean staleness of its segments."""
        _require(self.training is None, CONTRACT, "{} during another round", action)
        _require(not self.eval_blocks, CONTRACT, "{} during a blocking evaluation", action)
        _require(action.version == self.version, CONTRACT, "{} at version {}", action, self.version)
        is_open = self.gates.until is None or self.version < self.gates.until
        _require(is_open, CONTRACT, "{} although {}", action, self.gates)
        fresh = [n for n in action.tickets if n in self.ready and n not in self.trained]
        distinct = len(set(fresh)) == len(action.tickets)
        _require(distinct, CONSERVATION, "{} holds segments trained before or not there", action)
        if self.config.mode == "stream":
            has_all = len(self.ready) >= self.config.min_segments or not self._can_come(degree)
            _require(has_all, CONTRACT, "{} began with {} segments", action, len(self.ready))
        self.training = action.tickets
        if self.config.mode == "replay":
            self._check_replay_round(action, degree)
        else:
            size = self.config.segments_per_round
            _require(len(action.tickets) == size, CONSERVATION, "{} should hold {} segments", action, size)
            self._check_preset(action)
        if self.always_zero:
            self._check_lockstep(action)
        return self._check_staleness(action)

    def _check_preset(self, action: Train) -> None:
        """Compare a round with the order and the size of those of a preset."""
        preset, size = self.config.preset, self.config.segments_per_round
        if preset is None:
            return
        first = list(self.ready) if preset.by_arrival else sorted(self.ready)
        due = tuple(sorted(first[:size]))
        _require(action.tickets == due, CONTRACT, "{} should train {}", action, due)
        left = min(preset.batches - self.version % preset.batches, self.config.rounds - self.version)
        _require(len(self.ready) >= left * size, CONTRACT, "{} began with {}", action, len(self.ready))
        if preset.in_step and not self.has_resumed:
            versions = {self.tickets[number].version for number in action.tickets}
            _require(len(versions) == 1, CONTRACT, "{} mixes versions {}", action, versions)

    def _check_lockstep(self, action: Train) -> None:
        first, last = self._due_by(self.version - 1), self._due_by(self.version)
        kept = [number for number in range(len(self.born_under)) if number not in self.dropped]
        in_order = action.tickets == tuple(kept[first:last])
        _require(in_order, CONTRACT, "{} at k = 0 should train {}", action, kept[first:last])
        _require(len(kept) == last, CONTRACT, "{} at k = 0, but {} tickets are kept", action, len(kept))
        if self.config.publish_interval == 1:
            newest = all(self.ready[number] == self.version for number in action.tickets)
            _require(newest, BOUND, "{} at k = 0 trains older segments", action)

    def _can_come(self, degree: int) -> bool:
        """Return True if more segments can come before the next round begins."""
        if self.running or self.lost:
            return True
        rounds = min(self.asked_to_publish + degree + 1, self.config.rounds) - self.version
        most = min(rounds * self.config.segments_per_round, self.config.max_outstanding or math.inf)
        return self._is_collecting() and len(self.ready) < most

    def _due_by(self, version: int) -> int:
        """Return the number of segments that a run at k = 0 has used when this round starts."""
        if self.config.mode == "stream":
            return (version + 1) * self.config.segments_per_round
        return self.config.replay_limit(version, 0) if version >= 0 else 0

    def _check_staleness(self, action: Train) -> float:
        ages = {number: self.version - self.ready[number] for number in action.tickets}
        if self.config.mode == "stream" and self.config.is_bounded:
            for number, age in ages.items():
                bound = self.born_under[number]
                _require(
                    age <= bound, BOUND, "{} trains ticket {} of age {} > {}", action, number, age, bound
                )
        return sum(ages.values()) / max(len(ages), 1)

    def _check_replay_round(self, action: Train, degree: int) -> None:
        arrived, ratio = len(self.ready) + len(self.trained), self.config.replay_ratio
        enough = arrived >= max(1, self.config.min_segments)
        _require(enough, BOUND, "round {} began with {} segments", self.version, arrived)
        within = ratio is None or self.version + 1 <= ratio * arrived + 1e-9
        _require(within, BOUND, "round {} with {} segments is beyond {}", self.version, arrived, ratio)
        share = max(self.config.segments_per_round, math.ceil(1 / (ratio or 1) - 1e-9))
        later = arrived - max(0, self.config.min_segments - share)
        own = ratio is None or self.version + 1 <= ratio * later + 1e-9
        _require(own, BOUND, "round {} lives on what the first one waited for", self.version)
        share = self.config.replay_limit(self.version, 0)
        first = tuple(sorted(list(self.ready)[: max(0, share - len(self.trained))]))
        _require(action.tickets == first, CONTRACT, "{} should train {}", action, first)
        due = share if degree == 0 else 0
        most = self.config.max_outstanding
        ready = arrived >= due or (most is not None and len(self.ready) >= most)
        _require(ready, BOUND, "round {} at k = 0 with {} of {}", self.version, arrived, due)

    def end_round(self) -> None:
        """The round under way has ended."""
        for number in self.training or ():
            del self.ready[number]
            self.trained.add(number)
        self.training = None
        self.version += 1
        every, last = self.config.eval_interval, self.version == self.config.rounds
        self.eval_points += bool((every and self.version % every == 0) or (last and self.config.eval_at_end))

    def check(self, counts: Counts) -> None:
        """Compare the coordinator's counts with the sets kept here."""
        mine = Counts(
            issued=len(self.born_under),
            running=len(self.running),
            ready=len(self.ready),
            trained=len(self.trained),
            dropped=len(self.dropped),
            lost=len(self.lost),
        )
        _require(counts == mine, CONSERVATION, "{}, but the checker counts {}", counts, mine)
        total = mine.running + mine.ready + mine.trained + mine.lost + mine.dropped
        _require(total == mine.issued, CONSERVATION, "a ticket is in two places: {}", mine)

    # ------------------------------------------------------------ evaluation, end, restart

    def evaluate(self, action: Evaluate) -> None:
        """Start an evaluation."""
        idle = self.eval_running is None and self.training is None
        _require(idle, CONTRACT, "{} while something else is under way", action)
        fits = action.version == self.version and action.blocking != self.config.async_eval
        _require(fits, CONTRACT, "{} at version {}", action, self.version)
        self.eval_running, self.eval_blocks = action.version, action.blocking
        self.evaluations += 1

    def end_evaluation(self) -> None:
        """The evaluation under way has ended."""
        self.eval_running, self.eval_blocks = None, False

    def finish(self, action: Finish, skipped: int) -> None:
        """The run ended: complete, stopped on request, or given up for failed publishes."""
        _require(self.training is None, CONTRACT, "{} during a round", action)
        gave_up = self.failures > self.config.max_publish_retries or self.has_too_many_drops
        found = (self.failures, self.num_drops)
        _require(action.failed == gave_up, CONTRACT, "{} after failed publishes, drops: {}", action, found)
        saved = self.checkpointed == self.version or not self.config.checkpoint_at_end
        _require(saved, CONTRACT, "{} without a checkpoint of version {}", action, self.version)
        if not gave_up and not self.stop_requested:
            self._check_complete(action, skipped)

    def _check_complete(self, action: Finish, skipped: int) -> None:
        rounds, size = self.config.rounds, self.config.segments_per_round
        _require(self.version == rounds, CONTRACT, "{} at version {} of {}", action, self.version, rounds)
        evaluated = self.evaluations + skipped == self.eval_points and self.eval_running is None
        found = (self.evaluations, skipped, self.eval_points)
        _require(evaluated, CONTRACT, "evaluations, skipped, due: {}", found)
        if self.config.mode == "stream":
            left = len(self.running) + len(self.ready) + len(self.lost)
            used_up = len(self.trained) == rounds * size and left == 0
            _require(used_up, CONSERVATION, "{} segments trained, {} left over", len(self.trained), left)

    def after_crash(self, keeps_segments: bool) -> InvariantChecker:
        """Return the checker of a run that continues from here: ready segments survive only if kept."""
        return replace(
            self,
            asked_to_publish=-1,
            published=-1,
            failures=0,
            tickets=dict(self.tickets),
            running=set(),
            lost=self.lost | self.running | (set() if keeps_segments else self.ready.keys()),
            ready=dict(self.ready) if keeps_segments else {},
            trained=set(self.trained),
            dropped=set(self.dropped),
            members=list(self.members),
            up={},
            held=Counter(),
            losses=Counter(),
            suspects=set(),
            asked=set(self.asked),
            num_drops=0,
            round_kept=0,
            has_too_many_drops=False,
            born_under=dict(self.born_under),
            training=None,
            eval_running=None,
            eval_blocks=False,
            evaluations=self.evaluations - (self.eval_running is not None),
            issued_at_s=None,
            checkpointed=self.version,
            stop_requested=False,
            has_resumed=True,
            gates=gates_at_first(self.config),
        )
