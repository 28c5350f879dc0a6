"""The coordinator: events in, actions out, no I/O, no clock, no threads.

Every runtime and the simulator drive this one object. A driver enters all events of a step with `apply`,
then asks once with `decide`. The staleness bound rests on one invariant, "the deadlines of outstanding
segments are feasible from the next round" (see `deadlines`): issuing and training check it, arrivals do
not change it, a loss relaxes it, and publishing or turning the dial only touches tickets issued later. So
it holds however many events lie between two decisions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from offbeat.errors import ConfigError, PromiseBroken
from offbeat.pacing.actions import (
    Action,
    Checkpoint,
    Cut,
    Evaluate,
    Finish,
    Issue,
    Publish,
    Retire,
    Train,
)
from offbeat.pacing.auto import AutoConfig, AutoDial
from offbeat.pacing.config import AUTO, PaceConfig
from offbeat.pacing.deadlines import BoundBroken, Feasible, feasible, no_rule
from offbeat.pacing.drops import Drops
from offbeat.pacing.events import (
    CollectorDown,
    CollectorRemoved,
    CollectorsAdded,
    CollectorUp,
    DialTurned,
    EvalDone,
    Event,
    GatesSet,
    GoalReached,
    Published,
    PublishFailed,
    RoundTrained,
    SegmentArrived,
    SegmentDropped,
    StopRequested,
)
from offbeat.pacing.ledger import LOST, READY, RUNNING, Counts, Ledger
from offbeat.pacing.members import FIXED_MEMBERS, Members
from offbeat.pacing.stragglers import Stragglers
from offbeat.seeding import derive_seed, reseed
from offbeat.types import Ticket


class Coordinator:
    """Decides what may happen next: a `Pace`.

    Carry out the actions that `start`, `apply` and `decide` return, in order. Its attributes are those of a
    `Pace`, for reading; ``finished`` is true once `Finish` was returned.
    """

    def __init__(self, config: PaceConfig, rule: Feasible = feasible) -> None:
        self.config = config
        self.rounds = config.rounds
        self.version = 0
        self.degree = 0
        self.published = -1
        self.rollbacks = 0
        self.ledger = Ledger()
        self.members = Members(config.num_collectors, self.ledger)
        self.warm_at_s = -math.inf
        self.finished = False
        self._rule = self._keeps_in_time = rule
        self._preset = preset = config.preset
        if preset is not None:
            self._rule, self._keeps_in_time = preset.rule(config.off_policy_degree), no_rule
        self._auto: AutoDial | None = None
        self._dial = 0  # k as it was chosen; while the dial opens, less is in force
        self._turn(config.off_policy_degree)
        self._training: tuple[int, ...] | None = None
        self._steps_trained = 0
        self._versions: dict[int, int] = {}  # ticket -> oldest version that really produced its segment
        self._stragglers = Stragglers() if config.straggler_policy == "cut" else None
        self._drops = Drops(config.segments_per_round, config.most_drops)
        # The newest version on its way; a slow publisher may have older ones before it.
        self._publishing: int | None = None
        self._num_publish_failures = 0  # in a row
        self._retry_publish_at_s: float | None = None
        self.eval_skipped = 0
        self._evaluating: int | None = None
        self._newest_evaluated: int | None = None
        # Of the newest version that asked for one and did not get it yet.
        self._eval_due = config.eval_at_start
        self._gates = GatesSet(collect=False, until=0) if config.stepwise else GatesSet()
        self._checkpointed = 0
        self._checkpointed_at_s = math.inf
        self._checkpoint_due = False
        self._round_ended = False  # since the last decision
        self._issued_at_s = -math.inf
        self._stop_reason: str | None = None
        self._goal: str | None = None
        self._failed = False

    # ------------------------------------------------------------ properties

    @property
    def dial_reason(self) -> str:
        """Reason of the tuner's last move of k; empty before the first, and where k is chosen."""
        return "" if self._auto is None else self._auto.reason

    @property
    def num_up(self) -> int:
        """Collectors that can take tickets."""
        return len(self.members.up)

    @property
    def present(self) -> Sequence[int]:
        """Collectors that may get tickets."""
        return self.members.present

    @property
    def is_ending(self) -> bool:
        """True when no further round starts: all are trained, or the run was asked to end."""
        asked = self._stop_reason is not None or self._goal is not None
        return asked or self.finished or self.version >= self.rounds

    @property
    def is_publishing(self) -> bool:
        """True while weights are on their way to collectors, or wait to be tried again."""
        return self._publishing is not None or (self._retry_publish_at_s is not None and self._may_publish())

    @property
    def is_paused(self) -> bool:
        """True when nothing is under way, and nothing will be before a gate is opened."""
        is_busy = self._training is not None or self._evaluating is not None or self.is_publishing
        counts = self.counts()
        if is_busy or counts.running or counts.lost or self.is_ending or self.published < 0:
            return False
        return not (self._may_begin_round() if self._has_round() else self._may_collect())

    @property
    def next_round(self) -> int:
        """The first round that is not yet being trained."""
        return self.version + (self._training is not None)

    def counts(self) -> Counts:
        """Tickets by fate."""
        return self.ledger.counts()

    def lag(self) -> float:
        """Outstanding segments, in rounds."""
        return self.ledger.num_outstanding / self.config.segments_per_round

    def can_train(self, now_s: float) -> bool:
        """Return True if the next round could start now, apart from its gate."""
        is_busy = self._training is not None or self._blocked_by_eval() or now_s < self.warm_at_s
        return not (is_busy or self.is_ending or self.published < 0) and self._has_round()

    def check_members(self, leaving: int | None = None) -> None:
        """Refuse that a collector joins or leaves, with the reason; ``leaving`` is which one."""
        if self._auto is None and self._dial == 0:
            raise ConfigError(FIXED_MEMBERS)
        self.members.check(leaving)

    def warm_up(self) -> tuple[int, int] | None:
        """Segments that arrived, and those that the first round waits for; None when it waits for its own."""
        needed = self.config.needed_at_once
        if self.next_round > 0 or needed <= self.config.segments_per_round:
            return None
        return min(self.counts().ready, needed), needed

    def waiting_for(self) -> str:
        """Describe who waits for whom, for the report of a stall; this walks over all tickets."""
        if self._training is not None:
            return f"round {self.version} is being trained by the learner"
        if self._blocked_by_eval():
            return f"training waits for the evaluation of version {self._evaluating}"
        if self._publishing is not None:
            return f"collectors wait for version {self._publishing} to be published"
        counts = self.counts()
        running = self.ledger.with_status(RUNNING) + self.ledger.with_status(LOST)
        if running:
            names = ", ".join(f"ticket {t.number} on collector {t.collector}" for t in running[:8])
            return f"round {self.version} waits for segments ({counts.ready} ready), still out: {names}"
        if self.is_paused:
            if self._has_round():
                return f"round {self.version} could be trained and waits for sync_update()"
            segments = f"segments: {counts.ready} ready, none being collected"
            return f"round {self.version} waits for enable_data_collection() ({segments})"
        down = sorted(set(self.members.present) - self.members.up.keys())
        if not down and self.version == 0 and self.config.warmup_s:
            return f"round 0 waits until {self.config.warmup_s:g} s of warm-up are over"
        return f"round {self.version} waits for collectors {down} to start"

    def wake_at_s(self, now_s: float) -> float | None:
        """Time after ``now_s`` at which to decide again although no event came; None: not needed."""
        if self.finished:
            return None
        times = [self.warm_at_s, self._issued_at_s + self.config.issue_interval_s]
        if self._retry_publish_at_s is not None and self._training is None:
            times.append(self._retry_publish_at_s)
        return min([time for time in times if time > now_s], default=None)

    # ------------------------------------------------------------ events

    def start(self, now_s: float) -> Sequence[Action]:
        """Start, or continue after `load_state_dict`: publish what the learner has, evaluate what was due."""
        self._checkpointed_at_s = now_s
        if self.version == 0:
            self.warm_at_s = now_s + self.config.warmup_s
        if self.version >= self.rounds:
            return self.decide(now_s)
        actions: list[Action] = [self._publish()]
        self._evaluate_if_due(actions)
        return actions

    def apply(self, event: Event, now_s: float) -> Sequence[Action]:
        """Enter one event; return what follows at once, which is publishing a new version.

        Events that change no decision are ignored.
        """
        match event:
            case SegmentArrived(segment):
                ticket = self.ledger.arrive(segment.ticket.number)
                self._versions[ticket.number] = segment.oldest_version
                self.members.arrive(ticket.number, ticket.collector)
                if self._stragglers is not None:
                    self._stragglers.end(ticket)
            case CollectorUp(collector, capacity):
                self.members.come_up(collector, capacity)
            case CollectorDown(collector):
                self._collector_down(collector)
            case CollectorsAdded(count):
                self.members.join(count)
            case CollectorRemoved(int(collector)):
                self.members.leave(collector)
            case SegmentDropped(number, reason):
                self._drop(number, reason)
            case RoundTrained():
                return self._round_trained(event, now_s)
            case Published(version):
                self.published = max(self.published, version)
                self._num_publish_failures = 0
                if version == self._publishing:
                    self._publishing = None
            case PublishFailed(version, reason):
                self._publish_failed(version, reason, now_s)
            case EvalDone(version):
                if self._evaluating == version:
                    self._evaluating = None
            case DialTurned(degree):
                self._turn(degree)
            case GatesSet():
                self._gates = event
            case StopRequested(reason):
                self._stop_reason = self._stop_reason or reason
            case GoalReached(reason):
                self._goal = self._goal or reason
        return ()

    def _collector_down(self, collector: int) -> None:
        if self._stragglers is not None:
            for number in self.ledger.running_on.get(collector, ()):
                self._stragglers.end(self.ledger.ticket(number))
        self.members.go_down(collector)

    def _drop(self, number: int, reason: str) -> None:
        self.ledger.drop(number)
        del self._versions[number]
        self._drops.add(reason, kept=self.ledger.trained + len(self.ledger.ready))
        if self._drops.are_too_many and not self.is_ending:
            self._failed, self._stop_reason = True, str(self._drops)

    def _round_trained(self, event: RoundTrained, now_s: float) -> Sequence[Action]:
        if self._training is None or event.version != self.version + 1:
            raise PromiseBroken(f"round {event.version - 1} ended, but round {self.version} was due")
        self.ledger.end_round()
        for number in self._training:
            del self._versions[number]
        self._training = None
        self.version = event.version
        self._steps_trained += sum([segment.num_steps for segment in event.batch.segments])
        self.warm_at_s = -math.inf
        self._check_conservation()
        if self._auto is not None:
            self.degree = self._auto.update(event.signals)
        else:
            self.degree = self.config.opened(self._dial, self.version)
        self._note_what_is_due(now_s)
        is_due = self.version % self.config.publish_interval == 0 or self._retry_publish_at_s is not None
        if is_due and not self._may_publish():
            self._retry_publish_at_s, is_due = now_s, False
        return (self._publish(),) if is_due else ()

    def _note_what_is_due(self, now_s: float) -> None:
        """Note a checkpoint, by rounds or by time, and an evaluation; one that is still due is skipped."""
        config, version = self.config, self.version
        by_rounds = config.checkpoint_interval is not None and version % config.checkpoint_interval == 0
        every_s = config.checkpoint_interval_s
        by_time = every_s is not None and now_s - self._checkpointed_at_s >= every_s
        self._checkpoint_due |= by_rounds or by_time
        by_rounds = config.eval_interval is not None and version % config.eval_interval == 0
        if by_rounds or (version == config.rounds and config.eval_at_end):
            self.eval_skipped += self._eval_due
            self._eval_due = True
        self._round_ended = True

    def _check_conservation(self) -> None:
        counts = self.ledger.check()
        if self.config.mode == "stream" and counts.trained != self.version * self.config.segments_per_round:
            raise PromiseBroken(f"{self.version} rounds cannot have trained {counts.trained} segments")

    def _turn(self, degree: int) -> None:
        self.config.check_degree(degree)
        if degree == AUTO:
            self._auto = AutoDial(AutoConfig(maximum=self.config.auto_max), degree=self.degree)
            self.degree = self._auto.degree
        else:
            self._auto, self._dial = None, degree
            self.degree = self.config.opened(degree, self.version)

    # ------------------------------------------------------------ publishing, checkpoints, evaluation

    def _may_publish(self) -> bool:
        """Return True unless the segments of a round are under way, for which weights are not to change."""
        if self._preset is None or not self._preset.in_step or self.published < 0:
            return True
        num_ready = len(self.ledger.ready) - len(self._training or ())
        return not self.ledger.waiting or num_ready >= self.config.segments_per_round

    def _publish(self) -> Publish:
        self._publishing = self.version
        self._retry_publish_at_s = None
        return Publish(self.version)

    def _publish_failed(self, version: int, reason: str, now_s: float) -> None:
        self._num_publish_failures += 1
        if self._num_publish_failures > self.config.max_publish_retries:
            self._failed = True
            self._stop_reason = f"publishing weights failed {self._num_publish_failures} times: {reason}"
        if version == self._publishing:
            self._publishing = None
            self._retry_publish_at_s = now_s + self.config.publish_retry_delay_s

    def _checkpoint(self, now_s: float, actions: list[Action]) -> None:
        self._checkpointed, self._checkpointed_at_s, self._checkpoint_due = self.version, now_s, False
        actions.append(Checkpoint(self.version))

    def _evaluate_if_due(self, actions: list[Action]) -> None:
        """Start an evaluation that is due, unless one is running or the run is about to stop."""
        if self._eval_due and self._evaluating is None and self._stop_reason is None:
            self._eval_due = False
            self._evaluating = self._newest_evaluated = self.version
            actions.append(Evaluate(self.version, blocking=not self.config.async_eval))

    def _blocked_by_eval(self) -> bool:
        return self._evaluating is not None and not self.config.async_eval

    # ------------------------------------------------------------ decisions

    def decide(self, now_s: float) -> Sequence[Action]:
        """Return the actions that the events so far allow, in order."""
        actions: list[Action] = []
        if self.finished:
            return actions
        if self._round_ended:  # what its end made due comes before the next round begins
            self._round_ended = False
            # A resumed run publishes what it has. So only a version that is published is saved: collectors
            # had its weights too, and the run continues as it would have.
            if self._checkpoint_due and self.version % self.config.publish_interval == 0:
                self._checkpoint(now_s, actions)
            self._evaluate_if_due(actions)
        if self.members.leaving:
            actions += [Retire(collector) for collector in self.members.retired()]
        if self.is_ending:
            self._wind_up(now_s, actions)
            return actions
        retry_at_s = self._retry_publish_at_s
        is_idle = self._training is None
        if retry_at_s is not None and now_s >= retry_at_s and is_idle and self._may_publish():
            actions.append(self._publish())
        if self._blocked_by_eval() or self.published < 0:
            return actions
        self._reissue_lost(actions)
        if now_s >= self.warm_at_s and self._may_begin_round():
            self._train_if_allowed(actions)
        if self._may_collect():
            self._issue_what_is_allowed(now_s, actions)
        return actions

    def _wind_up(self, now_s: float, actions: list[Action]) -> None:
        if self._training is not None:
            return
        if self._checkpointed != self.version and self.config.checkpoint_at_end:
            self._checkpoint(now_s, actions)
        if self._goal is not None and self.config.eval_at_end:
            self._eval_due |= self._newest_evaluated != self.version
        self._evaluate_if_due(actions)
        if self._evaluating is not None and self._stop_reason is None:
            return
        self.finished = True
        actions.append(Finish(self._stop_reason or self._goal or "all rounds trained", self._failed))

    def _reissue_lost(self, actions: list[Action]) -> None:
        """Issue lost tickets again, for the version and the deadline that they have had from the start."""
        while (found := self.members.for_lost(self.degree)) is not None:
            number, collector = found
            ticket = self.ledger.ticket(number)
            seed = self._seed(number)
            again = replace(ticket, collector=collector, seed=seed, attempt=ticket.attempt + 1)
            self._issue(again, actions)

    def _may_begin_round(self) -> bool:
        return self._gates.until is None or self.version < self._gates.until

    def _may_collect(self) -> bool:
        """Return True if the gate for tickets is open, or that of a round which still needs some."""
        until = self._gates.until
        return self._gates.collect or (until is not None and self.next_round < until)

    def _train_if_allowed(self, actions: list[Action]) -> None:
        if self._training is not None:
            return
        if (chosen := self._choose()) is None:
            self._cut_stragglers(actions)
            return
        self.ledger.begin_round(chosen)
        self._assert_bound(chosen)
        self._training = chosen
        actions.append(Train(self.version, chosen, self.degree))

    def _cut_stragglers(self, actions: list[Action]) -> None:
        """Ask the tickets to end without which a round of a stream would begin; each once."""
        stragglers, size = self._stragglers, self.config.segments_per_round
        if stragglers is None or self.config.mode != "stream" or len(self.ledger.ready) < self._needed():
            return
        rest = self._rest(self.ledger.earliest(size))
        if numbers := stragglers.ask(rest, self.version + 1, size):
            actions.append(Cut(tuple([self.ledger.ticket(number) for number in numbers])))

    def _choose(self) -> tuple[int, ...] | None:
        """The tickets that the next round would train now; None while it has to wait."""
        if self.config.mode == "stream":
            if (earliest := self._earliest()) is None:
                return None
            if self._preset is not None and self._preset.by_arrival:
                return self.ledger.first_arrived(self.config.segments_per_round)
            return self.ledger.pick(earliest)
        # First come, first trained: a ticket issued again has an old number, but its collector's newest data.
        return None if (share := self._replay_share()) is None else self.ledger.first_arrived(share)

    def _has_round(self) -> bool:
        """Return True if the segments that the next round needs have arrived."""
        return (self._earliest() if self.config.mode == "stream" else self._replay_share()) is not None

    def _earliest(self) -> dict[int, int] | None:
        """The next round of a stream, as counts by deadline; None while it has to wait."""
        if len(self.ledger.ready) < self._needed():
            return None
        chosen = self.ledger.earliest(self.config.segments_per_round)
        rest, size = self._rest(chosen), self.config.segments_per_round
        is_allowed = self._keeps_in_time(rest, self.version + 1, size)
        return chosen if is_allowed else None

    def _rest(self, chosen: Mapping[int, int]) -> dict[int, int]:
        """Return what is outstanding beside a round that would begin now, as counts by deadline."""
        return {d: left for d, count in self.ledger.waiting.items() if (left := count - chosen.get(d, 0))}

    def _needed(self) -> int:
        """Segments that the next round of a stream waits for: no more than can still come before it."""
        config, size = self.config, self.config.segments_per_round
        if self._preset is not None:
            batches = self._preset.batches
            return size * min(batches - self.version % batches, self.rounds - self.version)
        if config.min_segments <= size:
            return size
        to_come = self.ledger.num_outstanding
        if self._may_collect():
            newest = self.version if self._retry_publish_at_s is not None else self._publishing
            newest = self.published if newest is None else newest
            most = min(newest + self.degree + 1, self.rounds) - self.version
            to_come = max(to_come, min(most * size, config.max_outstanding or most * size))
        return max(size, min(config.min_segments, to_come))

    def _replay_share(self) -> int | None:
        """Number of segments that enter the replay with the next round; None while it has to wait."""
        ready = len(self.ledger.ready)
        arrived = ready + self.ledger.trained
        if arrived < self.config.replay_need(self.version):
            return None
        # A dial turned to 0 late may owe more segments than the queue holds: a full queue is enough.
        most = self.config.max_outstanding
        limit = self.config.replay_limit(self.version, 0)
        owed = limit if self.degree == 0 else 0
        if arrived < owed and (most is None or ready < most):
            return None
        # No more than at k = 0 by now: what came earlier is for later rounds, which would have nothing new.
        return max(0, limit - self.ledger.trained)

    def _assert_bound(self, chosen: tuple[int, ...]) -> None:
        """The bound, checked where it matters: on what is about to be trained."""
        if self.config.mode == "replay" or not self.config.is_bounded:
            return
        for number in chosen:
            ticket = self.ledger.ready[number]
            born_degree = ticket.deadline - ticket.version
            if self.version - self._versions[number] > born_degree or ticket.deadline < self.version:
                raise BoundBroken(
                    f"round {self.version} would train ticket {number} of version {self._versions[number]} "
                    f"with deadline {ticket.deadline}"
                )

    def _issue_what_is_allowed(self, now_s: float, actions: list[Action]) -> None:
        ledger, size, next_round = self.ledger, self.config.segments_per_round, self.next_round
        version, deadline = self.published, self.published + self.degree
        waiting = dict(ledger.waiting)
        # Steps of the segments before a ticket, those that no round has taken yet for their mean. They depend
        # on nothing that timing decides at k = 0: not on what has arrived.
        steps, trained = self._steps_trained, ledger.trained
        for _ in range(self._num_allowed(now_s)):
            if (collector := self.members.for_new(ledger.issued, self.degree)) is None:
                return
            waiting[deadline] = waiting.get(deadline, 0) + 1
            if self.config.mode == "stream" and not self._rule(waiting, next_round, size):
                return
            number = ledger.issued
            collected = steps * number // trained if trained else 0
            ticket = Ticket(number, collector, version, deadline, self._seed(number), 0, collected, steps)
            self._issue(ticket, actions)
            self._issued_at_s = now_s

    def _issue(self, ticket: Ticket, actions: list[Action]) -> None:
        self.ledger.issue(ticket)
        self.members.update(ticket.collector)
        if self._stragglers is not None:
            self._stragglers.begin(ticket)
        actions.append(Issue(ticket))

    def _seed(self, number: int) -> int:
        seed = derive_seed(self.config.seed, "collect", number)
        return reseed(seed, self.rollbacks) if self.rollbacks else seed

    def _num_allowed(self, now_s: float) -> int:
        """Return how many more tickets everything but deadlines and collectors allows."""
        config, outstanding = self.config, self.ledger.num_outstanding
        if now_s < self._issued_at_s + config.issue_interval_s:
            return 0
        if self._preset is not None and self._preset.in_step and self.is_publishing:
            return 0
        if config.mode == "stream":
            allowed = (self.rounds - self.version) * config.segments_per_round - outstanding
        elif self.degree == 0 and not self._in_lockstep():
            return 0
        else:
            issued = self.ledger.issued - self.ledger.dropped
            allowed = config.replay_limit(self.version, self.degree) - issued
        if config.max_outstanding is not None:
            waiting = outstanding - len(self._training or ())
            allowed = min(allowed, config.max_outstanding - waiting)
        return min(allowed, 1) if config.issue_interval_s else allowed

    def _in_lockstep(self) -> bool:
        """Return True if learner and publisher are done: only then may a replay run at k = 0 collect.

        Streams need no such check, there older weights or a round under way leave no ticket in time.
        """
        return self._training is None and not self.is_publishing

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return tickets, versions and dial, without the clock. A round under way counts as not started."""
        interrupted = self._evaluating is not None
        return {
            "version": self.version,
            "configured_degree": self.config.off_policy_degree,
            "degree": self._dial if self._auto is None else self.degree,
            "auto": None if self._auto is None else self._auto.state_dict(),
            "ledger": self.ledger.state_dict(),
            "members": self.members.state_dict(),
            "versions": sorted(self._versions.items()),
            "steps_trained": self._steps_trained,
            "eval_due": self._eval_due or interrupted,
            "eval_skipped": self.eval_skipped + (self._eval_due and interrupted),
        }

    def load_state_dict(self, state: dict[str, Any], arrived: Collection[int] | None = None) -> None:
        """Continue from a saved state; tickets that were running wait to be issued again.

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
        self.members.load_state_dict(state.get("members"))
        self._steps_trained = state.get("steps_trained", 0)
        self._eval_due, self.eval_skipped = state["eval_due"], state["eval_skipped"]
        if state["configured_degree"] == self.config.off_policy_degree:
            auto = state["auto"]
            self._turn(state["degree"] if auto is None else AUTO)
            if self._auto is not None and auto is not None:
                self._auto.load_state_dict(auto)
                self.degree = self._auto.degree
        else:
            self._turn(self.config.off_policy_degree)
        self._check_conservation()
