"""Replay: a pace that reads its decisions from a recorded schedule.

Each version's tickets are collected when that version is reached. A collector's tickets have versions that
never go down, so this keeps each collector's own order; the order across collectors does not matter, since
they share nothing.

A segment whose pieces mix versions depends on its ticket and on them alone. Its ticket is issued with a
script when the first of its versions is reached; a round waits until all such tickets that are open continue
with a later version.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, get_args

from offbeat.errors import ConfigError, ReplayError
from offbeat.pacing.actions import Action, Checkpoint, Finish, Issue, Publish, Renew, Train
from offbeat.pacing.answers import Answers, ChangedAnswer, first_change, unanswered, with_answers
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    CollectorWaits,
    Event,
    Published,
    RoundTrained,
    SegmentArrived,
    SegmentDropped,
    StopRequested,
)
from offbeat.pacing.ledger import Counts
from offbeat.seeding import derive_seed, reseed
from offbeat.types import End, Piece, Span, Ticket

_NONE = -1
_MOST_COLLECTORS = 100_000
_OTHER_FIELDS = ("kind", "lane", "pieces", "answers")


@dataclass(frozen=True, slots=True)
class RecordedSegment:
    """A segment line of ``schedule.jsonl``: which collector made it, and with which weights.

    ``pieces`` are those of a segment that says so, ``num_answers`` counts what each of them was answered.
    """

    ticket: int
    collector: int
    version: int
    deadline: int
    incarnation: int
    rollbacks: int = 0
    steps_collected: int = 0
    steps_trained: int = 0
    pieces: tuple[Piece, ...] = ()
    num_answers: tuple[int, ...] = ()

    @property
    def begin(self) -> int:
        """The version with which it is begun."""
        return min((span.version for piece in self.pieces for span in piece.spans), default=self.version)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run without its data: segments and rounds by version, and checksums of published weights.

    ``scripts`` are segments with pieces, by ticket; what was dropped of them is left out. ``drops`` are the
    rounds in which segments were dropped, by ticket, ``joined`` collectors that came later.
    """

    segments: Mapping[int, tuple[RecordedSegment, ...]]
    rounds: Mapping[int, Train]
    checksums: Mapping[int, int] = field(default_factory=dict)
    scripts: Mapping[int, RecordedSegment] = field(default_factory=dict)
    drops: Mapping[int, int] = field(default_factory=dict)
    joined: frozenset[int] = frozenset()

    @staticmethod
    def from_records(records: Iterable[Mapping[str, Any]], answers: Answers | None = None) -> Schedule:
        """Read the lines of ``schedule.jsonl``; ReplayError when they are not those of a schedule.

        ``answers`` are those that pieces got, by ticket; None: they are asked for again.
        """
        segments: dict[int, list[RecordedSegment]] = {}
        scripts: dict[int, RecordedSegment] = {}
        rounds, checksums = {}, {}
        drops: dict[int, int] = {}
        joined: set[int] = set()
        try:
            for record in records:
                match record["kind"]:
                    case "gap":
                        raise ReplayError("the schedule has a gap: the disk was full while the run went on")
                    case "segment":
                        found = _segment_of(record)
                        drops.pop(found.ticket, None)
                        if found.pieces:  # the last one counts: what a run went back behind is not repeated
                            scripts[found.ticket] = found
                        else:
                            segments.setdefault(found.version, []).append(found)
                    case "drop":
                        _check_whole(record["ticket"], record["version"])
                        drops[record["ticket"]] = record["version"]
                        scripts.pop(record["ticket"], None)
                    case "join":
                        if not 0 <= record["lane"] < _MOST_COLLECTORS:
                            raise ValueError(f"a collector {record['lane']}")
                        joined.add(operator.index(record["lane"]))
                    case _:
                        train = _round_of(record)
                        rounds[train.version] = train
                        if "weights" in record:
                            published, checksum = record["weights"]
                            _check_whole(published, checksum)
                            checksums[published] = checksum
        except (KeyError, TypeError, ValueError) as error:
            raise ReplayError(
                f"schedule.jsonl was damaged or edited, the run cannot be repeated ({error!r})"
            ) from error
        for ticket, one in scripts.items():
            if answers is not None and one.num_answers:
                scripts[ticket] = replace(
                    one, pieces=with_answers(ticket, one.pieces, one.num_answers, answers)
                )
        by_version = {version: tuple(group) for version, group in segments.items()}
        return Schedule(by_version, rounds, checksums, scripts, drops, frozenset(joined))

    def all_segments(self) -> list[RecordedSegment]:
        """Return all segments, those of later versions later."""
        plain = chain.from_iterable(self.segments[version] for version in sorted(self.segments))
        return [*plain, *self.scripts.values()]

    def rest(self, until: int) -> Difference | None:
        """Return the rounds up to version ``until`` whose weights were not recorded; None if none were."""
        compared = [version for version in self.checksums if version <= until]
        if not compared:
            return None
        first = min(max(compared), until - 1)
        trained = [self.rounds[version] for version in range(first, until) if version in self.rounds]
        return Difference(first, tuple(ticket for one in trained for ticket in one.tickets), until - 1)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first round whose published weights differ from the recorded ones, and its tickets.

    ``last``: it is one of the rounds up to this one, whose weights were not compared; the tickets are theirs.
    ``round`` is -1 when the weights differ before the first round. ``strayed`` is the first ticket whose
    segment was made of other pieces than its script says.
    """

    round: int
    tickets: tuple[int, ...]
    last: int | None = None
    strayed: int | None = None

    def __str__(self) -> str:
        if self.round < 0:
            return (
                "the learner starts with other weights than recorded: other package versions, machine "
                "or settings?"
            )
        tickets = ", ".join(map(str, self.tickets[:8])) + (", …" if len(self.tickets) > 8 else "")
        is_one = self.last is None or self.last == self.round
        rounds = f"round {self.round}" if is_one else f"one of rounds {self.round} to {self.last}"
        text = f"{rounds} (tickets {tickets}) gave other weights than recorded"
        if self.strayed is None:
            return text
        return f"{text}; the collector made ticket {self.strayed} of other pieces than accept(script) told it"


class RecordedPace:
    """Repeats a schedule until version ``until``, and ends early at the first different weights.

    ``difference`` is then not None; ``strayed`` is the first ticket that was made of other pieces than its
    script says. With ``calls`` scripts come without the answers, which are asked for again; it ends at the
    first one that is ``changed``. With ``saves`` a checkpoint is taken at the end. ``incarnations`` are those
    of the collectors as they were started.
    """

    def __init__(
        self,
        schedule: Schedule,
        seed: int,
        until: int,
        num_collectors: int,
        *,
        saves: bool = False,
        calls: bool = False,
    ) -> None:
        self.difference: Difference | None = None
        self.changed: ChangedAnswer | None = None
        self.strayed: int | None = None
        self._calls = calls
        self.num_compared = 0  # versions whose weights were compared
        self._equal = 0  # newest of them; with none the start, from where all that follows is made
        self.incarnations = dict.fromkeys(range(num_collectors), 0)
        self.rollbacks = 0
        self.published = -1
        self.eval_skipped = 0
        self.is_paused = False
        self.dial_reason = ""
        self.warm_at_s = -math.inf
        self.rounds = until
        self._schedule = schedule
        self._seed = seed
        self._saves = saves
        self._up: set[int] = set()
        self._begun = -1  # newest version whose tickets were taken up
        self._waves: deque[list[RecordedSegment]] = deque()  # of this version, see `_waves_of`
        self._queues: dict[int, deque[RecordedSegment]] = {}  # collector -> its tickets of this wave
        self._have_worked: set[int] = set()  # collectors that made a segment in this incarnation
        self._gone: dict[int, tuple[int, str]] = {}  # collector -> incarnation lost for good, and why
        self._running: dict[int, RecordedSegment] = {}
        # Segments with pieces: those to be issued by version, then by collector, and those that are open.
        self._scripts: dict[int, list[RecordedSegment]] = {}
        for segment in schedule.scripts.values():
            self._scripts.setdefault(segment.begin, []).append(segment)
        self._due: dict[int, deque[RecordedSegment]] = {}
        self._open: dict[int, dict[int, RecordedSegment]] = {}
        self._waits: dict[int, CollectorWaits] = {}
        self._wide = {segment.collector for segment in schedule.scripts.values()}
        self._dropped: set[int] = set()
        self._ready: dict[int, int] = {}  # ticket -> oldest version in its segment
        self._training: Train | None = None
        self._num_trained = self._steps_trained = 0
        self._stop_reason: str | None = None
        self._failed = False
        self._finished = False
        self._reach(0)

    def _reach(self, version: int) -> None:
        """Continue at a version, with the k that was recorded for its round."""
        self.version = version
        found = self._schedule.rounds.get(version)
        self.degree = 0 if found is None else found.off_policy_degree

    # ------------------------------------------------------------ state for observers

    @property
    def num_up(self) -> int:
        """Collectors that are up."""
        return len(self._up)

    @property
    def present(self) -> Sequence[int]:
        """Collectors that may get tickets."""
        return range(len(self.incarnations))

    def check_members(self, leaving: int | None = None) -> None:
        """Refuse: a replay has the collectors that were recorded."""
        raise ConfigError("a replay repeats what was recorded: no collector can join or leave")

    @property
    def is_ending(self) -> bool:
        """True when no further round starts."""
        return self._finished or self._stop_reason is not None or self.version >= self.rounds

    def counts(self) -> Counts:
        """Tickets by fate, as far as they were repeated."""
        running = len(self._running) + sum(map(len, self._open.values()))
        ready, trained, dropped = len(self._ready), self._num_trained, len(self._dropped)
        return Counts(running + ready + trained + dropped, running, ready, trained, dropped, lost=0)

    def lag(self) -> float:
        """Outstanding segments, in rounds."""
        found = self._schedule.rounds.get(self.version)
        size = 1 if found is None else max(1, len(found.tickets))
        counts = self.counts()
        return (counts.running + counts.ready) / size

    def warm_up(self) -> None:
        """Return None: a repeated round waits for its own segments."""

    def waiting_for(self) -> str:
        """Return who waits for whom, in words."""
        if self._training is not None:
            return f"round {self.version} is being trained by the learner"
        running = [*self._running.values(), *chain.from_iterable(one.values() for one in self._open.values())]
        out = ", ".join(f"ticket {one.ticket} on collector {one.collector}" for one in running[:8])
        return f"round {self.version} waits for segments, still out: {out or 'none'}"

    def wake_at_s(self, now_s: float) -> float | None:
        """No decision waits for time."""
        return None

    # ------------------------------------------------------------ events

    def start(self, now_s: float) -> Sequence[Action]:
        """Publish the weights that the learner has."""
        return (Publish(self.version),)

    def apply(self, event: Event, now_s: float) -> Sequence[Action]:
        """Enter one event."""
        match event:
            case CollectorUp(collector):
                self._up.add(collector)
            case CollectorDown(collector):
                self._collector_down(event)
            case SegmentArrived(segment):
                ticket = segment.ticket
                found = self._open.get(ticket.collector, {}).pop(ticket.number, None)
                if found is None:
                    found = self._running.pop(ticket.number)
                    self._have_worked.add(found.collector)
                else:
                    self._compare_pieces(ticket.number, found.pieces, segment.pieces)
                self.rollbacks = found.rollbacks
                self._ready[found.ticket] = segment.oldest_version
                self._dropped.discard(found.ticket)
            case SegmentDropped(number):
                self._ready.pop(number, None)
                self._dropped.add(number)
            case CollectorWaits(collector):
                self._waits[collector] = event
            case RoundTrained(version, batch):
                self._num_trained += len(batch.segments)
                self._steps_trained += sum(segment.num_steps for segment in batch.segments)
                for trained in batch.segments:
                    del self._ready[trained.ticket.number]
                self._training = None
                self._reach(version)
                return (Publish(version),)
            case Published(version, _, checksum):
                self.published = version
                self._compare(version, None if checksum is None else checksum.result())
            case StopRequested(reason):
                self._stop_reason = reason
            case _:
                pass
        return ()

    def _compare_pieces(self, ticket: int, recorded: Sequence[Piece], now: Sequence[Piece]) -> None:
        """Compare the pieces of a segment with the recorded ones, and answers that were asked for again."""
        if self._calls and self.changed is None:
            self.changed = first_change(ticket, recorded, now)
        if self.strayed is None and unanswered(now) != unanswered(recorded):
            self.strayed = ticket

    def _compare(self, version: int, checksum: int | None) -> None:
        """Compare published weights with the recorded ones."""
        recorded = self._schedule.checksums.get(version)
        if recorded is None or checksum is None:
            return
        self.num_compared += 1
        if recorded == checksum:
            self._equal = version
        else:
            rounds = range(min(self._equal, version - 1), version)
            tickets = [
                ticket
                for one in rounds
                if one in self._schedule.rounds
                for ticket in self._schedule.rounds[one].tickets
            ]
            self.difference = Difference(rounds.start, tuple(tickets), version - 1)

    def _collector_down(self, event: CollectorDown) -> None:
        """Take the tickets of a lost collector up again, where its state can be restored."""
        self._up.discard(event.collector)
        self._waits.pop(event.collector, None)
        lost = [one for one in self._running.values() if one.collector == event.collector]
        for one in lost:
            del self._running[one.ticket]
        if lost:
            self._queues.setdefault(event.collector, deque()).extendleft(reversed(lost))
        if scripted := self._open.pop(event.collector, None):
            self._due.setdefault(event.collector, deque()).extend(scripted.values())
            if min(one.begin for one in scripted.values()) < self.version:
                self._fail(event.collector, event.reason)
        if not event.restorable:  # another one starts, in the place of one that may have to continue
            if event.collector in self._have_worked:
                self._gone[event.collector] = (self.incarnations[event.collector], event.reason)
            self.incarnations[event.collector] = _NONE

    # ------------------------------------------------------------ decisions

    def decide(self, now_s: float) -> Sequence[Action]:
        """Return what the recorded run did next."""
        if self._finished:
            return ()
        if ended := self.difference or self.changed or self._stop_reason:
            return self._finish(str(ended))
        if self._training is not None or self.published != self.version:
            return ()
        if self.version >= self.rounds:
            return self._finish(f"repeated {self.version} rounds")
        if self._begun < self.version:
            self._begun = self.version
            self._waves = _waves_of(self._schedule.segments.get(self.version, ()))
            self._place(self._scripts.pop(self.version, ()), self._due)
        if not self._queues and not self._running:
            if self._waves:
                self.rollbacks = self._waves[0][0].rollbacks
                self._place(self._waves.popleft(), self._queues)
            elif not self._due and self._all_wait():
                return [self._train()]
        actions = [action for collector in list(self._due) for action in self._next_scripts(collector)]
        for collector in list(self._queues):
            actions += self._next_tickets(collector)
        return actions if self._stop_reason is None else self._finish(self._stop_reason)

    def _place(self, segments: Iterable[RecordedSegment], queues: dict[int, deque[RecordedSegment]]) -> None:
        """Put segments in line at their collectors; refuse those whose collector is none of this run."""
        for one in segments:
            if one.collector not in self.incarnations and one.collector not in self._schedule.joined:
                raise ReplayError(
                    f"ticket {one.ticket} is of collector {one.collector}, but the run has "
                    f"{len(self.incarnations)}: schedule.jsonl was damaged or edited"
                )
            queues.setdefault(one.collector, deque()).append(one)

    def _all_wait(self) -> bool:
        """Return True if what is open continues with versions that later rounds make."""
        for collector, tickets in self._open.items():
            waits = self._waits.get(collector)
            if tickets and (
                waits is None or waits.version <= self.version or not tickets.keys() <= set(waits.tickets)
            ):
                return False
        return True

    def _next_scripts(self, collector: int) -> list[Action]:
        """Issue tickets with the pieces of their segments, as many as there are."""
        if collector not in self._up:
            return self._begin_joined(collector, self._due[collector][0])
        due = self._due.pop(collector)
        self._open.setdefault(collector, {}).update({segment.ticket: segment for segment in due})
        scripts = [unanswered(one.pieces) if self._calls else one.pieces for one in due]
        return [Issue(self._ticket(one), script) for one, script in zip(due, scripts, strict=True)]

    def _begin_joined(self, collector: int, segment: RecordedSegment) -> list[Action]:
        """Start a collector that joined the recorded run, once."""
        if collector in self.incarnations:
            return []
        self.incarnations[collector] = segment.incarnation
        return [Renew(collector, segment.incarnation)]

    def _next_tickets(self, collector: int) -> list[Action]:
        """Issue a collector's tickets, and restart it where the recorded run did."""
        queue = self._queues[collector]
        actions = [] if collector in self._up else self._begin_joined(collector, queue[0])
        while queue and collector in self._up:
            segment = queue[0]
            # What a wide collector makes depends on the ticket, whichever incarnation it is.
            if segment.incarnation != self.incarnations[collector] and collector not in self._wide:
                incarnation, reason = self._gone.get(collector, (_NONE, ""))
                if incarnation == segment.incarnation:
                    self._fail(collector, reason)
                elif all(one.collector != collector for one in self._running.values()):
                    self.incarnations[collector] = segment.incarnation
                    self._up.discard(collector)
                    self._have_worked.discard(collector)
                    actions.append(Renew(collector, segment.incarnation))
                break
            queue.popleft()
            self._running[segment.ticket] = segment
            actions.append(Issue(self._ticket(segment)))
        if not queue:
            del self._queues[collector]
        return actions

    def _fail(self, collector: int, reason: str) -> None:
        self._failed = True
        self._stop_reason = f"collector {collector} was lost during the replay and cannot continue: {reason}"

    def _ticket(self, segment: RecordedSegment) -> Ticket:
        seed = reseed(derive_seed(self._seed, "collect", segment.ticket), segment.rollbacks)
        place = (segment.ticket, segment.collector, segment.version, segment.deadline)
        return Ticket(*place, seed, 0, segment.steps_collected, segment.steps_trained)

    def _train(self) -> Train:
        found = self._schedule.rounds.get(self.version)
        if found is None:
            raise ReplayError(f"the schedule has no round {self.version}: schedule.jsonl was cut or edited")
        if missing := [number for number in found.tickets if number not in self._ready]:
            raise ReplayError(
                f"round {self.version} trained tickets {missing}, which the schedule does not have"
            )
        self._training = found
        return found

    def _finish(self, reason: str) -> Sequence[Action]:
        self._finished = True
        saves = self._saves and not self._failed
        return (*((Checkpoint(self.version),) if saves else ()), Finish(reason, self._failed))

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a coordinator that would continue here."""
        later = {segment.ticket: segment for segment in self._schedule.all_segments()}
        repeated = {
            segment.ticket: segment
            for segment in self._schedule.all_segments()
            if segment.version < self.version or segment.ticket in self._ready
        }
        trained = self._trained_before(self.version)
        drops = self._schedule.drops
        dropped = self._dropped | {number for number in drops if drops[number] < self.version}
        rows: dict[str, list[list[int]]] = {"running": [], "ready": [], "lost": []}
        num_issued = max([*repeated, *dropped], default=-1) + 1
        for number in sorted({*range(num_issued)} - trained - dropped):
            known = repeated.get(number) or later.get(number)
            version = self.version if known is None else min(known.version, self.version)
            deadline = version + self.degree if known is None else known.deadline
            collector = number % len(self.incarnations) if known is None else known.collector
            fate = "ready" if number in self._ready else "lost"
            steps = (known.steps_collected, known.steps_trained) if known else (self._steps_trained,) * 2
            rows[fate].append([number, collector, version, deadline, 0, 0, *steps])
        return {
            "version": self.version,
            "configured_degree": None,  # the settings say which dial holds from here
            "degree": self.degree,
            "auto": None,
            "ledger": {"issued": num_issued, "trained": len(trained), "dropped": len(dropped), **rows},
            "steps_trained": self._steps_trained,
            "versions": sorted(self._ready.items()),
            "eval_due": False,
            "eval_skipped": 0,
        }

    def load_state_dict(self, state: dict[str, Any], arrived: Collection[int] | None = None) -> None:
        """Continue from what `state_dict` returned, with the segments that are still there.

        ReplayError when a ticket was begun before and ended later: what is begun stays with its collectors.
        """
        self._reach(state["version"])
        self._begun = self.version - 1
        self._ready = {n: v for n, v in state["versions"] if arrived is None or n in arrived}
        trained = self._trained_before(self.version)
        self._num_trained = len(trained)
        self._steps_trained = state.get("steps_trained", 0)
        earlier = [self._scripts.pop(begin) for begin in sorted(self._scripts) if begin < self.version]
        done = trained | self._ready.keys()
        if open_ones := [one.ticket for one in chain.from_iterable(earlier) if one.ticket not in done]:
            raise ReplayError(
                f"tickets {open_ones[:8]} were begun before version {self.version}, at which the run was "
                "resumed with other settings, and ended after it: a replay repeats such a run up to this "
                f"version only (--to {self.version})"
            )

    def _trained_before(self, version: int) -> set[int]:
        return {number for before in range(version) for number in self._schedule.rounds[before].tickets}


def _segment_of(record: Mapping[str, Any]) -> RecordedSegment:
    """Read a segment line; KeyError, TypeError or ValueError when it is none."""
    fields = {key: value for key, value in record.items() if key not in _OTHER_FIELDS}
    counts = tuple(record.get("answers", ()))
    _check_whole(record["lane"], *fields.values(), *counts)
    pieces = tuple([_piece_of(*row) for row in record.get("pieces", ())])
    return RecordedSegment(collector=record["lane"], pieces=pieces, num_answers=counts, **fields)


def _piece_of(rows: Sequence[Sequence[int]], end: End) -> Piece:
    """Read ``[[[version, size], [version, size, 1 if rebuilt], ...], end]``."""
    spans = tuple([Span(version, size, bool(*rebuilt)) for version, size, *rebuilt in rows])
    _check_whole(*chain.from_iterable(rows))
    is_forged = any(span.version < 0 or span.size < 0 for span in spans) or end not in get_args(End)
    if is_forged or any(later.version < earlier.version for earlier, later in pairwise(spans)):
        raise ValueError(f"a piece {rows} that ends with {end!r}")
    return Piece(spans, end)


def _round_of(record: Mapping[str, Any]) -> Train:
    """Read a round line; KeyError, TypeError or ValueError when it is none."""
    version, tickets = record["version"], tuple(record["tickets"])
    _check_whole(version, record["degree"], *tickets)
    if len(set(tickets)) < len(tickets):
        raise ValueError(f"round {version} with a ticket twice")
    return Train(version, tickets, record["degree"])


def _check_whole(*values: Any) -> None:
    """Raise TypeError unless all values are whole numbers, as nearly all of a schedule are."""
    for value in values:
        operator.index(value)


def _waves_of(segments: Sequence[RecordedSegment]) -> deque[list[RecordedSegment]]:
    """Cut the segments of a version where a ticket comes again, after the run lost or went back behind it.

    What comes later replaces what came before, so a wave is collected after the one before it.
    """
    waves: deque[list[RecordedSegment]] = deque()
    seen: set[int] = set()
    for segment in segments:
        if not waves or segment.ticket in seen or segment.rollbacks != waves[-1][0].rollbacks:
            waves.append([])
            seen.clear()
        seen.add(segment.ticket)
        waves[-1].append(segment)
    return waves
