"""The coordinator's invariants under events in any order that a runtime could bring about."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offbeat.pacing import AUTO, Coordinator, Counts, PaceConfig
from offbeat.pacing.actions import Action, Checkpoint, Cut, Evaluate, Finish, Issue, Publish, Train
from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    DialTurned,
    EvalDone,
    Event,
    GatesSet,
    Published,
    PublishFailed,
    RoundTrained,
    SegmentDropped,
    Signals,
)
from offbeat.types import Ticket

from .pacing_steps import arrived, step

shares = st.floats(0, 1)
picks = st.integers(0, 1000)


class AnyOrder(RuleBasedStateMachine):
    """Plays runtime, learner, publisher and evaluator, and keeps its own sets of tickets."""

    @initialize(
        degree=st.integers(AUTO, 3),
        size=st.integers(1, 3),
        collectors=st.integers(1, 3),
        rounds=st.integers(1, 6),
        queue=st.none() | st.integers(0, 3),
        eval_interval=st.sampled_from([None, 1, 2]),
        async_eval=st.booleans(),
        interval=picks,
        open_rounds=st.integers(0, 2),
        least=st.integers(0, 9),
        policy=st.sampled_from(["wait", "cut"]),
    )
    def begin(
        self,
        degree: int,
        size: int,
        collectors: int,
        rounds: int,
        queue: int | None,
        eval_interval: int | None,
        async_eval: bool,
        interval: int,
        open_rounds: int,
        least: int,
        policy: Literal["wait", "cut"],
    ) -> None:
        most = (degree if degree >= 0 else 3) * size + size
        self.config = PaceConfig(
            rounds=rounds,
            segments_per_round=size,
            num_collectors=collectors,
            off_policy_degree=degree,
            open_rounds=open_rounds,
            min_segments=min(least, most if queue is None else min(most, size + queue)),
            straggler_policy=policy,
            max_drops_per_round=10**6,
            auto_max=3,
            max_outstanding=None if queue is None else size + queue,
            publish_interval=1 + interval % (max(degree, 0) + 1),
            eval_interval=eval_interval,
            async_eval=async_eval,
            checkpoint_interval=1,
            max_publish_retries=10**6,
        )
        self.now_s = 0.0
        self.tickets: dict[int, Ticket] = {}
        self.born_under: dict[int, int] = {}
        self.running: set[int] = set()
        self.lost: set[int] = set()
        self.dropped: set[int] = set()
        self.ready: dict[int, int] = {}
        self.trained: set[int] = set()
        self.reset(Coordinator(self.config))

    def reset(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.up: dict[int, int] = {}
        self.training: Train | None = None
        self.publishing: list[int] = []
        self.published = -1
        self.evaluating: Evaluate | None = None
        self.finish: Finish | None = None
        self.gates = GatesSet()
        self.take(coordinator.start(self.now_s))

    # ------------------------------------------------------------ carrying out actions

    def tell(self, event: Event) -> None:
        self.take(step(self.coordinator, event, self.now_s))

    def take(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert self.finish is None
            match action:
                case Issue(ticket):
                    self.take_ticket(ticket)
                case Train():
                    self.take_round(action)
                case Publish(version):
                    self.publishing.append(version)
                case Evaluate():
                    assert self.evaluating is None
                    self.evaluating = action
                case Finish():
                    self.finish = action
                case Cut(tickets):
                    assert self.training is None and self.config.straggler_policy == "cut"
                    assert all(self.tickets[one.number] == one for one in tickets)
                    assert self.running >= {one.number for one in tickets}
                case Checkpoint(version):
                    assert version == self.coordinator.version

    def take_ticket(self, ticket: Ticket) -> None:
        assert ticket.collector in self.up
        held = [n for n in self.running if self.tickets[n].collector == ticket.collector]
        assert len(held) < self.up[ticket.collector] or self.coordinator.degree == 0
        if ticket.number in self.lost:
            self.lost.remove(ticket.number)
            before = self.tickets[ticket.number]
            assert ticket == replace(before, collector=ticket.collector, attempt=before.attempt + 1)
        else:
            assert ticket.version == self.published
            until, next_round = self.gates.until, self.coordinator.next_round
            assert self.gates.collect or (until is not None and next_round < until)
            assert ticket.number == len(self.tickets)
            self.born_under[ticket.number] = ticket.deadline - ticket.version
        self.tickets[ticket.number] = ticket
        self.running.add(ticket.number)

    def take_round(self, action: Train) -> None:
        assert self.training is None
        assert self.gates.until is None or action.version < self.gates.until
        assert len(set(action.tickets)) == self.config.segments_per_round
        for number in action.tickets:
            assert action.version - self.ready[number] <= self.born_under[number]
            assert number not in self.trained
        self.training = action

    # ------------------------------------------------------------ what may happen

    @precondition(lambda self: len(self.up) < self.config.num_collectors)
    @rule(pick=picks, capacity=st.integers(1, 5))
    def collector_comes_up(self, pick: int, capacity: int) -> None:
        down = sorted(set(range(self.config.num_collectors)) - self.up.keys())
        collector = down[pick % len(down)]
        self.up[collector] = capacity
        self.tell(CollectorUp(collector, capacity))

    @precondition(lambda self: self.up)
    @rule(pick=picks, capacity=st.integers(1, 5))
    def collector_wants_to_hold_another_number(self, pick: int, capacity: int) -> None:
        collector = sorted(self.up)[pick % len(self.up)]
        self.up[collector] = capacity
        self.tell(CollectorUp(collector, capacity))

    @precondition(lambda self: self.up)
    @rule(pick=picks)
    def collector_dies(self, pick: int) -> None:
        collector = sorted(self.up)[pick % len(self.up)]
        del self.up[collector]
        gone = {number for number in self.running if self.tickets[number].collector == collector}
        self.running -= gone
        self.lost |= gone
        self.tell(CollectorDown(collector))

    @precondition(lambda self: self.running)
    @rule(pick=picks, newer=st.booleans())
    def segment_arrives(self, pick: int, newer: bool) -> None:
        number = sorted(self.running)[pick % len(self.running)]
        self.running.remove(number)
        self.ready[number] = self.published if newer else self.tickets[number].version
        self.tell(arrived(number, self.ready[number]))

    @precondition(lambda self: self.training)
    @rule(collect_idle=shares, train_idle=shares, ess=st.none() | shares)
    def round_ends(self, collect_idle: float, train_idle: float, ess: float | None) -> None:
        assert self.training is not None
        for number in self.training.tickets:
            del self.ready[number]
            self.trained.add(number)
        version, self.training = self.training.version + 1, None
        signals = Signals(1.0, 1.0, 1.0, collect_idle, train_idle, ess)
        self.tell(RoundTrained(version, signals=signals))

    @precondition(lambda self: self.publishing)
    @rule(pick=picks, works=st.booleans())
    def publish_ends(self, pick: int, works: bool) -> None:
        version = self.publishing.pop(pick % len(self.publishing))
        if works:
            self.published = max(self.published, version)
            self.tell(Published(version))
        else:
            self.tell(PublishFailed(version, "test"))

    @precondition(lambda self: self.evaluating)
    @rule()
    def evaluation_ends(self) -> None:
        assert self.evaluating is not None
        version, self.evaluating = self.evaluating.version, None
        self.tell(EvalDone(version))

    @rule(steps=st.integers(1, 20), pick=picks)
    def things_go_on(self, steps: int, pick: int) -> None:
        """Several events of a run without faults, so that later rounds are reached."""
        for turn in range(steps):
            possible: list[tuple[bool, Callable[[], None]]] = [
                (
                    len(self.up) < self.config.num_collectors,
                    lambda: self.collector_comes_up(pick, 1 + pick % 3),
                ),
                (bool(self.running), lambda: self.segment_arrives(pick, newer=False)),
                (self.training is not None, lambda: self.round_ends(0.2, 0.3, None)),
                (bool(self.publishing), lambda: self.publish_ends(pick, works=True)),
                (self.evaluating is not None, self.evaluation_ends),
                (True, lambda: self.time_passes(0.1)),
            ]
            happenings = [happen for can, happen in possible if can]
            happenings[(pick + turn) % len(happenings)]()

    @rule(degree=st.integers(0, 4))
    def dial_is_turned(self, degree: int) -> None:
        if self.config.publish_interval <= degree + 1:
            self.tell(DialTurned(degree))

    @rule(collect=st.booleans(), rounds=st.none() | st.integers(0, 2))
    def gates_are_set(self, collect: bool, rounds: int | None) -> None:
        until = None if rounds is None else self.coordinator.version + rounds
        self.gates = GatesSet(collect, until)
        self.tell(self.gates)

    def waiting_to_be_trained(self) -> list[int]:
        training = self.training.tickets if self.training else ()
        return sorted(set(self.ready) - set(training))

    @precondition(lambda self: bool(self.waiting_to_be_trained()))
    @rule(pick=picks)
    def segment_is_dropped(self, pick: int) -> None:
        free = self.waiting_to_be_trained()
        number = free[pick % len(free)]
        del self.ready[number]
        self.dropped.add(number)
        self.tell(SegmentDropped(number))

    @rule(seconds=st.floats(0, 1))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.coordinator.decide(self.now_s))

    @rule(kept=st.booleans())
    def run_dies_and_resumes(self, kept: bool) -> None:
        state = json.loads(json.dumps(self.coordinator.state_dict()))
        fresh = Coordinator(self.config)
        fresh.load_state_dict(state, None if kept else ())
        self.lost |= self.running
        self.running = set()
        if not kept:
            self.lost |= set(self.ready)
            self.ready = {}
        self.reset(fresh)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def tickets_are_conserved(self) -> None:
        sets = (self.running, self.ready, self.trained, self.dropped, self.lost)
        assert self.coordinator.counts() == Counts(len(self.tickets), *map(len, sets))
        assert sum(map(len, sets)) == len(self.tickets)

    @invariant()
    def outstanding_deadlines_can_be_met(self) -> None:
        training = self.training.tickets if self.training else ()
        waiting = (self.running | self.lost | set(self.ready)) - set(training)
        deadlines = sorted(self.tickets[number].deadline for number in waiting)
        first, size = self.coordinator.next_round, self.config.segments_per_round
        assert all(first + i // size <= deadline for i, deadline in enumerate(deadlines))

    @invariant()
    def never_stuck(self) -> None:
        under_way = self.running or self.training or self.publishing or self.evaluating
        all_up = len(self.up) == self.config.num_collectors
        if all_up and not under_way and self.finish is None:
            is_awaited = self.coordinator.wake_at_s(self.now_s) is not None
            assert is_awaited or (self.coordinator.is_paused and self.gates != GatesSet())

    @invariant()
    def a_held_run_goes_on_when_its_gates_are_opened(self) -> None:
        if self.coordinator.is_paused and len(self.up) == self.config.num_collectors:
            assert not (self.running or self.training or self.publishing or self.evaluating)
            self.gates = GatesSet()
            self.tell(self.gates)
            assert self.running or self.training

    @invariant()
    def the_end_is_complete(self) -> None:
        if self.finish is not None:
            assert not self.finish.failed
            assert len(self.trained) == self.config.rounds * self.config.segments_per_round
            assert not (self.running or self.ready or self.lost)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=60, deadline=None, database=None)
