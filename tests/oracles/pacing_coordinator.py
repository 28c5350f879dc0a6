"""A coordinator that decides after every event and scans all tickets to do so: an oracle.

It is slow and simple: every count that `offbeat.pacing.Coordinator` keeps is derived here from the tickets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from offbeat.errors import PromiseBroken
from offbeat.pacing.auto import AutoConfig, AutoDial
from offbeat.pacing.config import AUTO, PaceConfig
from offbeat.pacing.deadlines import BoundBroken, feasible
from offbeat.pacing.ledger import Counts
from offbeat.seeding import derive_seed
from offbeat.types import Ticket

from .pacing_ledger import DROPPED, LOST, READY, RUNNING, TRAINED, Ledger
from .pacing_messages import (
    Action,
    Checkpoint,
    Clock,
    DialTurned,
    EvalDone,
    Evaluate,
    Event,
    Finish,
    GatesSet,
    GoalReached,
    Issue,
    LaneLost,
    LaneReady,
    Publish,
    Published,
    PublishFailed,
    RoundTrained,
    SegmentArrived,
    SegmentDropped,
    StopRequested,
    Train,
)

Feasible = Callable[[Counter[int], int, int], bool]


@dataclass(slots=True)
class _Publishing:
    """Where publishing stands: what collectors have, what is under way, how often it failed in a row.

    ``under_way`` is the newest version on its way; a slow publisher may have older ones before it.
    """

    published: int = -1
    under_way: int | None = None
    failures: int = 0
    retry_at_s: float | None = None


@dataclass(slots=True)
class _Evaluating:
    """Where evaluation stands. ``due`` is the newest version that asked for one and did not get it yet."""

    running: int | None = None
    newest: int | None = None
    due: bool = False
    skipped: int = 0


class Coordinator:
    """Decides what may happen next. Feed events to `handle`, carry out the actions it returns, in order."""

    def __init__(self, config: PaceConfig, rule: Feasible = feasible) -> None:
        self.config = config
        self.version = 0
        self.ledger = Ledger()
        self._rule = rule
        self._auto: AutoDial | None = None
        self._degree = 0
        self._turn(config.off_policy_degree)
        self._training: tuple[int, ...] | None = None
        self._versions: dict[int, int] = {}  # ticket -> oldest version that really produced its segment
        self._up: set[int] = set()
        self._publishing = _Publishing()
        self._evaluating = _Evaluating()
        self._gates = GatesSet(collect=False, until=0) if config.stepwise else GatesSet()
        self._checkpointed = 0
        self._checkpointed_at_s: float | None = None
        self._checkpoint_due = False
        self._issued_at_s: float | None = None
        self._warm_at_s: float | None = None
        self._stop_reason: str | None = None
        self._goal: str | None = None
        self._failed = False
        self._finished = False

    # ------------------------------------------------------------ what others may look at

    @property
    def degree(self) -> int:
        """k now in force."""
        return self._degree

    @property
    def published(self) -> int:
        """Newest version collectors can get; -1 before the first publish."""
        return self._publishing.published

    @property
    def eval_skipped(self) -> int:
        """Evaluations that a slow evaluator passed over."""
        return self._evaluating.skipped

    @property
    def num_up(self) -> int:
        """Collectors that can take tickets."""
        return len(self._up)

    @property
    def finished(self) -> bool:
        """Whether `Finish` was given out."""
        return self._finished

    @property
    def is_ending(self) -> bool:
        """Whether no further round begins: all are trained, or the run was asked to end."""
        asked = self._stop_reason is not None or self._goal is not None
        return asked or self._finished or self.version >= self.config.rounds

    @property
    def is_publishing(self) -> bool:
        """Whether weights are on their way to collectors, or wait to be tried again."""
        return self._publishing.under_way is not None or self._publishing.retry_at_s is not None

    @property
    def is_paused(self) -> bool:
        """Whether nothing is under way, and nothing will be before somebody opens a gate."""
        is_busy = self._training is not None or self._evaluating.running is not None or self.is_publishing
        out = self.ledger.num(RUNNING) + self.ledger.num(LOST)
        if is_busy or out or self.is_ending or self.published < 0:
            return False
        return not self._may_begin_round() if self._choose() is not None else not self._may_collect()

    @property
    def next_round(self) -> int:
        """The first round that is not yet being trained."""
        return self.version + (self._training is not None)

    @property
    def warm_at_s(self) -> float:
        """When the first round may begin at the earliest; long ago once it has."""
        return self._warm_at_s if self.version == 0 and self._warm_at_s is not None else -math.inf

    def counts(self) -> Counts:
        """Tickets by fate."""
        return self.ledger.counts()

    def lag(self) -> float:
        """Outstanding segments, in rounds."""
        return self.ledger.num_outstanding / self.config.segments_per_round

    def can_train(self, now_s: float) -> bool:
        """Whether the next round could begin now, as far as its gate does not matter."""
        is_busy = self._training is not None or self._blocked_by_eval() or self._is_warming_up(now_s)
        return not (is_busy or self.is_ending or self.published < 0) and self._choose() is not None

    def waiting_for(self) -> str:
        """Who waits for whom, in words: for the report of a stall."""
        if self._training is not None:
            return f"round {self.version} is being trained by the learner"
        if self._blocked_by_eval():
            return f"training waits for the evaluation of version {self._evaluating.running}"
        if self._publishing.under_way is not None:
            return f"collectors wait for version {self._publishing.under_way} to be published"
        counts = self.counts()
        running = self.ledger.with_status(RUNNING) + self.ledger.with_status(LOST)
        if running:
            names = ", ".join(f"ticket {t.number} on collector {t.collector}" for t in running[:8])
            return f"round {self.version} waits for segments ({counts.ready} ready), still out: {names}"
        if self.is_paused:
            return self._held_by()
        down = sorted(set(range(self.config.num_collectors)) - self._up)
        if not down and self.version == 0 and self.config.warmup_s:
            return f"round 0 waits until {self.config.warmup_s:g} s of warm-up are over"
        return f"round {self.version} waits for collectors {down} to start"

    def _held_by(self) -> str:
        if self._choose() is not None:
            return f"round {self.version} could be trained and waits for sync_update()"
        segments = f"segments: {self.ledger.num(READY)} ready, none being collected"
        return f"round {self.version} waits for enable_data_collection() ({segments})"

    def wake_at_s(self, now_s: float) -> float | None:
        """When, after ``now_s``, a `Clock` event is wanted although nothing else happened."""
        if self._finished:
            return None
        times = []
        if self._publishing.retry_at_s is not None and self._training is None:
            times.append(self._publishing.retry_at_s)
        if self.config.issue_interval_s and self._issued_at_s is not None:
            times.append(self._issued_at_s + self.config.issue_interval_s)
        times.append(self.warm_at_s)
        return min((time for time in times if time > now_s), default=None)

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take in one event; return what is to be done, in this order."""
        if self._checkpointed_at_s is None:
            self._checkpointed_at_s = now_s
        actions: list[Action] = []
        match event:
            case LaneReady(lane):
                self._up.add(lane)
            case LaneLost(lane):
                self._lane_lost(lane)
            case SegmentArrived(number, version):
                self.ledger.arrive(number)
                self._versions[number] = version
            case SegmentDropped(number):
                self.ledger.drop(number)
                del self._versions[number]
            case RoundTrained():
                self._round_trained(event, now_s, actions)
            case Published(version):
                self._published(version)
            case PublishFailed(version, reason):
                self._publish_failed(version, reason, now_s)
            case EvalDone(version):
                if self._evaluating.running == version:
                    self._evaluating.running = None
            case DialTurned(degree):
                self._turn(degree)
            case GatesSet():
                self._gates = event
            case StopRequested(reason):
                self._stop_reason = self._stop_reason or reason
            case GoalReached(reason):
                self._goal = self._goal or reason
            case Clock():
                pass
        self._decide(now_s, actions)
        return actions

    def start(self, now_s: float) -> list[Action]:
        """Begin, or go on after `load_state_dict`: publish what the learner has, evaluate what was due."""
        self._checkpointed_at_s = now_s
        self._warm_at_s = now_s + self.config.warmup_s
        if self.version >= self.config.rounds:
            return self.handle(Clock(), now_s)
        actions: list[Action] = []
        self._publish(actions)
        self._evaluate_if_due(actions)
        return actions

    def _lane_lost(self, lane: int) -> None:
        self._up.discard(lane)
        for ticket in self.ledger.with_status(RUNNING):
            if ticket.collector == lane:
                self.ledger.lose(ticket.number)

    def _round_trained(self, event: RoundTrained, now_s: float, actions: list[Action]) -> None:
        if self._training is None or event.version != self.version + 1:
            raise PromiseBroken(f"round {event.version - 1} ended, but round {self.version} was due")
        for number in self._training:
            self.ledger.train(number)
            del self._versions[number]
        self._training = None
        self.version = event.version
        self._check_conservation()
        if self._auto is not None:
            self._degree = self._auto.update(event.signals)
        if self.version % self.config.publish_interval == 0 or self._publishing.retry_at_s is not None:
            self._publish(actions)
        self._checkpoint_if_due(now_s, actions)
        self._ask_for_eval(actions)

    def _check_conservation(self) -> None:
        counts = self.ledger.check()
        if self.config.mode == "stream" and counts.trained != self.version * self.config.segments_per_round:
            raise PromiseBroken(f"{self.version} rounds cannot have trained {counts.trained} segments")

    def _turn(self, degree: int) -> None:
        self.config.check_degree(degree)
        if degree == AUTO:
            self._auto = AutoDial(AutoConfig(maximum=self.config.auto_max), degree=self._degree)
            self._degree = self._auto.degree
        else:
            self._auto, self._degree = None, degree

    # ------------------------------------------------------------ publishing, checkpoints, evaluation

    def _publish(self, actions: list[Action]) -> None:
        self._publishing.under_way = self.version
        self._publishing.retry_at_s = None
        actions.append(Publish(self.version))

    def _published(self, version: int) -> None:
        publishing = self._publishing
        publishing.published = max(publishing.published, version)
        publishing.failures = 0
        if version == publishing.under_way:
            publishing.under_way = None

    def _publish_failed(self, version: int, reason: str, now_s: float) -> None:
        publishing = self._publishing
        publishing.failures += 1
        if publishing.failures > self.config.max_publish_retries:
            self._failed = True
            self._stop_reason = f"publishing weights failed {publishing.failures} times: {reason}"
        if version == publishing.under_way:
            publishing.under_way = None
            publishing.retry_at_s = now_s + self.config.publish_retry_delay_s

    def _retry_publish(self, now_s: float, actions: list[Action]) -> None:
        retry_at_s = self._publishing.retry_at_s
        if retry_at_s is not None and now_s >= retry_at_s and self._training is None:
            self._publish(actions)

    def _checkpoint_if_due(self, now_s: float, actions: list[Action]) -> None:
        """Take a checkpoint that is due at a version that is published.

        A run that is resumed publishes what it has: only of such a version collectors had the weights too, so
        that the run goes on as it would have.
        """
        every, every_s = self.config.checkpoint_interval, self.config.checkpoint_interval_s
        by_rounds = every is not None and self.version % every == 0
        since_s = now_s if self._checkpointed_at_s is None else self._checkpointed_at_s
        by_time = every_s is not None and now_s - since_s >= every_s
        self._checkpoint_due |= by_rounds or by_time
        if self._checkpoint_due and self.version % self.config.publish_interval == 0:
            self._checkpoint(now_s, actions)

    def _checkpoint(self, now_s: float, actions: list[Action]) -> None:
        self._checkpointed, self._checkpointed_at_s, self._checkpoint_due = self.version, now_s, False
        actions.append(Checkpoint(self.version))

    def _ask_for_eval(self, actions: list[Action]) -> None:
        every, last = self.config.eval_interval, self.version == self.config.rounds
        if (every is not None and self.version % every == 0) or (last and self.config.eval_at_end):
            self._evaluating.skipped += self._evaluating.due
            self._evaluating.due = True
        self._evaluate_if_due(actions)

    def _evaluate_if_due(self, actions: list[Action]) -> None:
        """Start an evaluation that is due, unless one is running or the run is about to stop."""
        if self._evaluating.due and self._evaluating.running is None and self._stop_reason is None:
            self._evaluating.due = False
            self._evaluating.running = self._evaluating.newest = self.version
            actions.append(Evaluate(self.version, blocking=not self.config.async_eval))

    def _blocked_by_eval(self) -> bool:
        return self._evaluating.running is not None and not self.config.async_eval

    # ------------------------------------------------------------ decisions

    def _decide(self, now_s: float, actions: list[Action]) -> None:
        if self._finished:
            return
        if self.is_ending:
            self._wind_up(now_s, actions)
            return
        self._retry_publish(now_s, actions)
        if self._blocked_by_eval() or self._publishing.published < 0:
            return
        self._reissue_lost(actions)
        if not self._is_warming_up(now_s) and self._may_begin_round():
            self._train_if_allowed(actions)
        if self._may_collect():
            self._issue_what_is_allowed(now_s, actions)

    def _wind_up(self, now_s: float, actions: list[Action]) -> None:
        if self._training is not None:
            return
        if self._checkpointed != self.version and self.config.checkpoint_at_end:
            self._checkpoint(now_s, actions)
        if self._goal is not None and self.config.eval_at_end:
            self._evaluating.due |= self._evaluating.newest != self.version
        self._evaluate_if_due(actions)
        if self._evaluating.running is not None and self._stop_reason is None:
            return
        self._finished = True
        actions.append(Finish(self._stop_reason or self._goal or "all rounds trained", self._failed))

    def _reissue_lost(self, actions: list[Action]) -> None:
        """Issue lost tickets again, with newer weights and the old deadline.

        At k = 0 a ticket waits until its own lane is up again. Above 0 a lane that is free takes it, so that
        nobody waits for a collector to start.
        """
        for ticket in self.ledger.with_status(LOST):
            lane = (
                ticket.collector if self._degree == 0 or ticket.collector in self._up else self._free_lane()
            )
            if lane is not None and lane in self._up:
                version = max(ticket.version, self._publishing.published)
                again = replace(ticket, collector=lane, version=version, attempt=ticket.attempt + 1)
                self.ledger.issue(again)
                actions.append(Issue(again))

    def _waiting_deadlines(self, without: tuple[int, ...] = ()) -> Counter[int]:
        excluded = set(without) | set(self._training or ())
        return Counter(t.deadline for t in self.ledger.outstanding() if t.number not in excluded)

    def _is_warming_up(self, now_s: float) -> bool:
        return now_s < self.warm_at_s

    def _may_begin_round(self) -> bool:
        return self._gates.until is None or self.version < self._gates.until

    def _may_collect(self) -> bool:
        """Whether the gate for tickets is open, or that of a round which still needs some."""
        until = self._gates.until
        return self._gates.collect or (until is not None and self.next_round < until)

    def _train_if_allowed(self, actions: list[Action]) -> None:
        if self._training is not None or (chosen := self._choose()) is None:
            return
        self._assert_bound(chosen)
        self._training = chosen
        actions.append(Train(self.version, chosen, self._degree))

    def _choose(self) -> tuple[int, ...] | None:
        """The tickets that the next round would train now; None while it has to wait."""
        return self._choose_stream() if self.config.mode == "stream" else self._choose_replay()

    def _choose_stream(self) -> tuple[int, ...] | None:
        size = self.config.segments_per_round
        if self.ledger.num(READY) < max(size, self._first_batch()):
            return None
        ready = self.ledger.with_status(READY)
        earliest = sorted(ready, key=lambda t: (t.deadline, t.number))[:size]
        chosen = tuple(sorted(t.number for t in earliest))
        rest = self._waiting_deadlines(without=chosen)
        return chosen if self._rule(rest, self.version + 1, size) else None

    def _first_batch(self) -> int:
        """Segments that the first round waits for: no more than the dial, which may be turned, lets come."""
        if self.version > 0:
            return 0
        rounds = min(self._degree + 1, self.config.rounds)
        return min(self.config.min_segments, rounds * self.config.segments_per_round)

    def _choose_replay(self) -> tuple[int, ...] | None:
        ready = self.ledger.num(READY)
        arrived = ready + self.ledger.num(TRAINED)
        if arrived < self.config.replay_need(self.version):
            return None
        # A dial turned to 0 late may owe more segments than the queue holds: a full queue is enough.
        most = self.config.max_outstanding
        owed = self.config.replay_limit(self.version, 0) if self._degree == 0 else 0
        if arrived < owed and (most is None or ready < most):
            return None
        # No more than at k = 0 by now: what came earlier is for later rounds, which would have nothing new.
        share = max(0, self.config.replay_limit(self.version, 0) - self.ledger.num(TRAINED))
        # First come, first trained: a ticket issued again has an old number, but what its lane made last.
        return tuple(sorted(self.ledger.arrived()[:share]))

    def _assert_bound(self, chosen: tuple[int, ...]) -> None:
        """The bound, checked where it matters: on what is about to be trained."""
        if self.config.mode == "replay":
            return
        for number in chosen:
            ticket = self.ledger.ticket(number)
            born_degree = ticket.deadline - ticket.version
            if self.version - self._versions[number] > max(born_degree, 0) or ticket.deadline < self.version:
                raise BoundBroken(
                    f"round {self.version} would train ticket {number} of version {self._versions[number]} "
                    f"with deadline {ticket.deadline}"
                )

    def _issue_what_is_allowed(self, now_s: float, actions: list[Action]) -> None:
        if not self._may_issue(now_s) or (lane := self._free_lane()) is None:
            return
        deadline = self._publishing.published + self._degree
        waiting = self._waiting_deadlines()
        while lane is not None and self._may_issue(now_s):
            waiting[deadline] += 1
            if not self._in_time(waiting):
                return
            self._issue(lane, deadline, actions)
            self._issued_at_s = now_s
            lane = self._free_lane()

    def _issue(self, lane: int, deadline: int, actions: list[Action]) -> None:
        number = len(self.ledger)
        seed = derive_seed(self.config.seed, "collect", number)
        ticket = Ticket(number, lane, self._publishing.published, deadline, seed)
        self.ledger.issue(ticket)
        actions.append(Issue(ticket))

    def _may_issue(self, now_s: float) -> bool:
        """Whether everything but deadlines and lanes allows one more ticket."""
        config = self.config
        if self._issued_at_s is not None and now_s < self._issued_at_s + config.issue_interval_s:
            return False
        outstanding = self.ledger.num_outstanding
        waiting = outstanding - len(self._training or ())
        if config.max_outstanding is not None and waiting >= config.max_outstanding:
            return False
        if config.mode == "stream":
            return outstanding < (config.rounds - self.version) * config.segments_per_round
        if self._degree == 0 and not self._in_lockstep():
            return False
        issued = len(self.ledger) - self.ledger.num(DROPPED)
        return issued < config.replay_limit(self.version, self._degree)

    def _in_lockstep(self) -> bool:
        """Whether learner and publisher are done: only then may a replay run at k = 0 collect.

        Streams need no such check, there older weights or a round under way leave no ticket in time.
        """
        publishing = self._publishing
        return self._training is None and publishing.under_way is None and publishing.retry_at_s is None

    def _in_time(self, deadlines: Counter[int]) -> bool:
        size = self.config.segments_per_round
        return self.config.mode == "replay" or self._rule(deadlines, self.next_round, size)

    def _free_lane(self) -> int | None:
        """The lane of the next ticket, None while it has to wait for one.

        At k = 0 ticket n belongs to lane n mod N, whoever is free: that makes the order of experience, and
        so the weights, independent of timing. Above 0 lanes take turns, and one that is still busy is
        passed over, so a slow collector holds nobody up.
        """
        if self._degree == 0:
            lane = len(self.ledger) % self.config.num_collectors
            return lane if lane in self._up else None
        busy = {t.collector for t in self.ledger.with_status(RUNNING)}
        free = sorted(self._up - busy)
        if not free:
            return None
        after = [lane for lane in free if lane >= len(self.ledger) % self.config.num_collectors]
        return after[0] if after else free[0]

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything but the clock: tickets, versions, dial. A round under way counts as not begun."""
        evaluating = self._evaluating
        interrupted = evaluating.running is not None
        return {
            "version": self.version,
            "configured_degree": self.config.off_policy_degree,
            "degree": self._degree,
            "auto": None if self._auto is None else self._auto.state_dict(),
            "ledger": self.ledger.state_dict(),
            "versions": sorted(self._versions.items()),
            "eval_due": evaluating.due or interrupted,
            "eval_skipped": evaluating.skipped + (evaluating.due and interrupted),
        }

    def load_state_dict(self, state: dict[str, Any], arrived: Collection[int] | None = None) -> None:
        """Go on from a saved state: tickets that were running are lost until their lanes are up again.

        ``arrived`` names the tickets whose segments were saved too (None: all that had arrived).
        A dial turned during the run stays where it was, unless the configuration now asks for another.
        """
        self.version = self._checkpointed = state["version"]
        self.ledger.load_state_dict(state["ledger"])
        for ticket in self.ledger.with_status(RUNNING):
            self.ledger.lose(ticket.number)
        self._versions = dict(state["versions"])
        for ticket in self.ledger.with_status(READY):
            if arrived is not None and ticket.number not in arrived:
                self.ledger.lose(ticket.number)
                del self._versions[ticket.number]
        self._evaluating = _Evaluating(due=state["eval_due"], skipped=state["eval_skipped"])
        if state["configured_degree"] == self.config.off_policy_degree:
            self._restore_dial(state["degree"], state["auto"])
        self._check_conservation()

    def _restore_dial(self, degree: int, auto: dict[str, Any] | None) -> None:
        self._turn(degree if auto is None else AUTO)
        if self._auto is not None and auto is not None:
            self._auto.load_state_dict(auto)
            self._degree = self._auto.degree
