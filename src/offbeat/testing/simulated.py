"""A world with time of its own, and in it the roles of a run and a runtime that carries them.

Nothing sleeps and no thread is started: time passes when the driver waits. Collectors are served by the real
`CollectorServer`. What a role makes is a number that depends on everything that it may depend on, so that a
run can be compared with its replay.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

from offbeat.pacing.events import (
    Checksum,
    CollectorDown,
    EvalDone,
    Event,
    LearnerDown,
    Published,
    PublishFailed,
    Request,
    RoundTrained,
    SnapshotTaken,
)
from offbeat.pacing.schedules import Faults, Schedule
from offbeat.roles import WorkerContext
from offbeat.runtime import serve
from offbeat.runtime.messages import Accept, Begun, CutTickets, GiveWork, Message
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.testing.simulated_roles import Serial, SimulatedLearner, Weights
from offbeat.types import Batch, Metrics, Piece, StateTree, Ticket

_MOST_PLANNED = 50_000
_MOST_LOSSES = 2
_OFTEN_S = 0.1
_MOST_IDLE_WAITS = 50
_LATE_S = 1e-3  # a wait that finds nothing ends a little late
_NOT_YET = Weights(-1, 0)
_Planned = tuple[float, float, int, bool, Callable[..., None], tuple[Any, ...]]
"""Time, random tie-breaker, number, True if it comes from outside, function, its arguments."""


MakeCollector = Callable[["World", Schedule, WorkerContext], Serial]


class Killed(BaseException):
    """The process of the run is killed in the middle of whatever it does."""


class Endless(Exception):
    """A run goes on for longer than any run should."""


class World:
    """Time, chance, and what is planned. A `Clock` that only it moves.

    ``grid_s`` rounds times up so that things happen at once.
    """

    def __init__(self, seed: int | str, grid_s: float = 0.0, tail: float | None = None) -> None:
        self.time_s = 1000.0
        self.rng = Random(seed)
        self._grid_s, self._tail = grid_s, tail
        self._heap: list[_Planned] = []
        self._number = 0

    def now_s(self) -> float:
        """Return the time."""
        return self.time_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.time_s += seconds

    def date(self, form: str) -> str:
        """Return no date."""
        return "simulated"

    def plan(self, after_s: float, do: Callable[..., None], *arguments: Any, outside: bool = False) -> None:
        """Call a function after some time; ``outside``: also when the run was killed meanwhile."""
        at_s, grid_s = self.time_s + after_s, self._grid_s
        if grid_s:  # a power of two, so that the product is exact and never before at_s
            at_s = math.ceil(at_s / grid_s) * grid_s
        self._number += 1
        if self._number > _MOST_PLANNED:
            raise Endless(f"more than {_MOST_PLANNED} things were planned")
        heappush(self._heap, (at_s, self.rng.random(), self._number, outside, do, arguments))

    def next_s(self) -> float:
        """Return when something happens next; infinity if nothing is planned."""
        return self._heap[0][0] if self._heap else math.inf

    def run_next(self) -> None:
        """Let time pass until something happens, and have it happen."""
        at_s, _, _, _, do, arguments = heappop(self._heap)
        self.time_s = max(self.time_s, at_s)
        do(*arguments)

    def run_until(self, at_s: float) -> None:
        """Let everything happen until a time."""
        while self.next_s() <= at_s:
            self.run_next()
        self.time_s = max(self.time_s, at_s)

    def forget_run(self) -> None:
        """Forget all plans but those from outside."""
        self._heap = [planned for planned in self._heap if planned[3]]
        heapify(self._heap)

    def spread(self, typical_s: float) -> float:
        """Draw a time around a typical one, with the tail of the schedule up to 20 times as long."""
        return typical_s if self._tail is None else typical_s * min(self.rng.paretovariate(self._tail), 20.0)


def typical_s(schedule: Schedule, index: int) -> float:
    """Return the typical time that a collector takes for a segment."""
    return schedule.collect_s[index % len(schedule.collect_s)]


class Watch:
    """Sees everything that a driver asks of its simulated runtime, and everything that it is told."""

    def start_collector(self, index: int) -> None:
        """Note that the driver has a collector started."""

    def end_collector(self, index: int) -> None:
        """Note that the driver has a collector ended."""

    def issue(self, ticket: Ticket, begun: Begun | None) -> None:
        """Note that a ticket goes to its collector."""

    def cut(self, tickets: Sequence[Ticket]) -> None:
        """Note that tickets are to be ended early."""

    def train(self, batch: Batch) -> None:
        """Note that a round begins."""

    def publish(self, weights: Weights) -> None:
        """Note that weights are to be published."""

    def evaluate(self, version: int) -> None:
        """Note that an evaluation begins."""

    def snapshot(self) -> None:
        """Note that the learner is copied."""

    def release(self, tickets: Sequence[int]) -> None:
        """Note that the memory of segments may be used again."""

    def tell(self, events: Sequence[Event]) -> None:
        """Note what the driver is told, which it takes in one step."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A simulated process of a collector. Plans of an older ``turn`` are void."""

    index: int
    server: serve.CollectorServer | None = None
    inbox: list[Message] = field(default_factory=list)
    outbox: list[Event] = field(default_factory=list)
    since_s: float | None = None  # of the piece of work at hand
    turn: int = 0
    is_hung: bool = False
    is_gone: bool = False


class SimulatedRuntime:
    """Carries out the requests of one driver in a simulated world. ``requests`` end its waits.

    ``losses`` counts by ticket the collectors that it was the end of, over all runtimes of a schedule;
    ``is_stuck`` says that the learner hangs.
    """

    replaces_collectors = True
    takes_turns = False
    progress: Mapping[str, str] = {}

    def __init__(
        self,
        world: World,
        schedule: Schedule,
        watch: Watch,
        requests: deque[Request],
        losses: Counter[int],
        make: MakeCollector,
    ) -> None:
        self._world, self._schedule, self._watch = world, schedule, watch
        self._faults: Faults = schedule.faults
        self._requests, self._losses, self._make = requests, losses, make
        self._events: deque[Event] = deque()
        self._workers: dict[int, _Worker] = {}
        self._collectors: dict[int, Serial] = {}
        self._newest = _NOT_YET
        self._learner_free_s = 0.0
        self._failures = self._publishes = self._idle_waits = 0
        self._evaluating: int | None = None
        self._is_dead = self._is_interrupted = False
        self.is_stuck = False
        self.learner = SimulatedLearner()

    # ------------------------------------------------------------ start, wait, end

    def start(
        self, spec: RunSpec, collectors: Mapping[int, CollectorState], learner_state: StateTree | None
    ) -> None:
        """Start the collectors and make the learner."""
        self._spec = spec
        if learner_state is not None:
            self.learner.load_state_dict(learner_state)
        for index, state in collectors.items():
            self.start_collector(index, state)

    def wait(self, timeout_s: float) -> list[Event]:
        """Let time pass until something happens, or somebody asks for something."""
        world, busy_s = self._world, self._schedule.busy_s
        limit_s = world.time_s + timeout_s
        if busy_s:  # the driver was busy with the step before
            world.run_until(world.time_s + busy_s * world.rng.random())
        while not (self._events or self._requests or self._is_interrupted):
            if world.next_s() > limit_s:
                self._note_idle_wait()
                world.time_s = max(world.time_s, limit_s + _LATE_S)
                break
            world.run_next()
        self._is_interrupted = False
        if self._events:
            self._idle_waits = 0
        if busy_s is None:  # it decides after each event
            events = [self._events.popleft()] if self._events else []
        else:
            world.run_until(world.time_s)
            events = list(self._events)
            self._events.clear()
        self._watch.tell(events)
        return events

    def _note_idle_wait(self) -> None:
        """Count waits in a row in which nothing happened and nothing is planned; too many are the end."""
        self._idle_waits += math.isinf(self._world.next_s())
        if self._idle_waits > _MOST_IDLE_WAITS:
            raise Endless("nothing happens any more")

    def interrupt(self) -> None:
        """End the wait at hand, though nothing has happened."""
        self._is_interrupted = True

    @property
    def has_nothing_to_tell(self) -> bool:
        """True when the driver knows of everything that has happened."""
        return not self._events

    def stacks(self) -> dict[str, str]:
        """Return nothing: nobody is anywhere."""
        return {}

    def pids(self) -> dict[str, int]:
        """Return nothing: there are no processes."""
        return {}

    def close(self, at_once: bool = False) -> None:
        """End everything."""
        self._is_dead = True
        self._world.forget_run()

    # ------------------------------------------------------------ collectors

    def start_collector(self, index: int, state: CollectorState) -> None:
        """Start a collector, which takes some time, and now and then does not work."""
        worker, world, faults = _Worker(index), self._world, self._faults
        if index in self._workers:
            self._workers[index].is_gone = True
        self._workers[index] = worker
        self._watch.start_collector(index)
        chance, after_s = world.rng.random(), world.rng.uniform(0, self._schedule.start_s)
        if chance < faults.start_hang:
            return
        if chance < faults.start_hang + faults.start_death:
            world.plan(after_s, self._lose, worker, "died while starting")
        else:
            world.plan(after_s, self._bring_up, worker, state)

    def _bring_up(self, worker: _Worker, state: CollectorState) -> None:
        if worker.is_gone:
            return
        assignment = self._spec.collector(worker.index, state)
        wake = partial(self._wake, worker)
        worker.server = serve.start(
            assignment, self._weights, worker.outbox.append, wake=wake, clock=self._world.now_s
        )
        self._post(worker)

    def make_collector(self, context: WorkerContext) -> Serial:
        """Make the role of a collector."""
        collector = self._collectors[context.collector] = self._make(self._world, self._schedule, context)
        return collector

    def _weights(self, at_least: int) -> tuple[int, Weights]:
        if self._newest.version < at_least:
            raise serve.SyncTimeout(f"version {at_least} is not there")
        return self._newest.version, self._newest

    def kill_collector(self, index: int, reason: str) -> None:
        """End a collector."""
        self._world.plan(0.0, self._lose, self._workers[index], reason)

    def end_collector(self, index: int) -> None:
        """End a collector without a report."""
        self._workers[index].is_gone = True
        self._watch.end_collector(index)

    def collect(self, ticket: Ticket, begun: Begun | None = None, script: tuple[Piece, ...] = ()) -> None:
        """Send a ticket, and draw what becomes of its collector."""
        self._watch.issue(ticket, begun)
        worker, faults, number = self._workers[ticket.collector], self._faults, ticket.number
        self._send(worker, Accept(ticket, begun, script))
        chance, after_s = self._world.rng.random(), self._world.rng.random()
        after_s *= typical_s(self._schedule, ticket.collector)
        if number == faults.poison:
            self._world.plan(after_s, self._lose, worker, "died of a ticket")
        elif chance < faults.loss + faults.hang and self._losses[number] < _MOST_LOSSES:
            self._losses[number] += 1
            what = (self._lose, worker, "died") if chance < faults.loss else (self._hang, worker)
            self._world.plan(after_s, *what)

    def cut(self, tickets: Sequence[Ticket]) -> None:
        """Tell the collectors."""
        self._watch.cut(tickets)
        for index in {ticket.collector for ticket in tickets}:
            numbers = tuple(ticket.number for ticket in tickets if ticket.collector == index)
            self._send(self._workers[index], CutTickets(numbers))

    def ask_work(self) -> Sequence[int]:
        """Ask all collectors that are up."""
        asked = [one for one in self._workers.values() if one.server is not None and not one.is_gone]
        latest_s = 0.0 if self._schedule.collectors is None else self._schedule.collectors.answer_s
        for worker in asked:
            self._world.plan(latest_s * self._world.rng.random(), self._send, worker, GiveWork())
        return [worker.index for worker in asked]

    def working_s(self, index: int) -> float | None:
        """Return how long the piece of work at hand has taken."""
        since_s = self._workers[index].since_s
        return None if since_s is None else self._world.time_s - since_s

    def _send(self, worker: _Worker, message: Message) -> None:
        worker.inbox.append(message)
        self._wake(worker)

    def _wake(self, worker: _Worker) -> None:
        """Have a collector work now, unless it does."""
        if worker.since_s is None:
            self._plan_step(worker, 0.0)

    def _plan_step(self, worker: _Worker, after_s: float) -> None:
        worker.turn += 1
        self._world.plan(after_s, self._step, worker, worker.turn)

    def _step(self, worker: _Worker, turn: int) -> None:
        """Take messages and begin a piece of work; what it makes comes at its end."""
        server = worker.server
        if turn != worker.turn or worker.is_gone or server is None:
            return
        if worker.is_hung:
            worker.since_s = self._world.time_s
            return
        for message in worker.inbox:
            server.take(message)
        worker.inbox.clear()
        self._post(worker)
        server.step()
        if server.is_over:
            self._lose(worker, "")
            return
        piece_s = self._collectors[worker.index].take_piece_s()
        if piece_s > 0:
            worker.since_s = self._world.time_s
            self._world.plan(piece_s, self._end_piece, worker)
        else:
            self._go_on(worker)

    def _end_piece(self, worker: _Worker) -> None:
        if not (worker.is_gone or worker.is_hung):
            worker.since_s = None
            self._go_on(worker)

    def _go_on(self, worker: _Worker) -> None:
        self._post(worker)
        assert worker.server is not None
        timeout_s = 0.0 if worker.inbox else worker.server.poll_timeout_s
        looks_for_weights = timeout_s is not None and 0.0 < timeout_s < _OFTEN_S  # those that come wake it
        if timeout_s is not None and not looks_for_weights:
            self._plan_step(worker, timeout_s)

    def _post(self, worker: _Worker) -> None:
        self._events.extend(worker.outbox)
        worker.outbox.clear()

    def _hang(self, worker: _Worker) -> None:
        worker.is_hung = True

    def _lose(self, worker: _Worker, reason: str) -> None:
        """End a collector's process; what it has not sent is lost."""
        if worker.is_gone or self._is_dead:
            return
        worker.is_gone = True
        if reason:
            self._events.append(CollectorDown(worker.index, reason))
        else:
            self._post(worker)  # it raised, and says so

    def kill_from_outside(self, index: int) -> None:
        """Kill a collector, whatever it does."""
        if (worker := self._workers.get(index)) is not None:
            self._lose(worker, "killed from outside")

    # ------------------------------------------------------------ learner

    def _when_learner_is_free(self, takes_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Plan the end of what the learner does next; one thing comes after the other."""
        now_s = self._world.time_s
        self._learner_free_s = max(now_s, self._learner_free_s) + takes_s
        self._world.plan(self._learner_free_s - now_s, do, *arguments)

    def train(self, batch: Batch) -> None:
        """Begin a round."""
        self._watch.train(batch)
        if batch.version == self._faults.train_hang_at:
            self.is_stuck = True
            return
        started_s = max(self._world.time_s, self._learner_free_s)
        train_s = self._world.spread(self._schedule.train_s)
        self._when_learner_is_free(train_s, self._end_round, batch, started_s)

    def _end_round(self, batch: Batch, started_s: float) -> None:
        if self._is_dead:
            return
        metrics: Metrics = self.learner.train(batch)
        if batch.version == self._faults.nan_at and self._losses[-1] == 0:
            self._losses[-1] += 1  # once
            metrics["learn/loss"] = math.nan
        if self._schedule.ess_cost:
            ages = batch.staleness()
            metrics["learn/ess"] = 1 - self._schedule.ess_cost * sum(ages) / max(1, len(ages))
        self._events.append(RoundTrained(batch.version + 1, batch, metrics, started_s, self._world.time_s))

    def release(self, tickets: Sequence[int]) -> None:
        """Free memory."""
        self._watch.release(tickets)

    def publish(self, version: int) -> None:
        """Send the learner's weights, which may fail, and may be overtaken."""
        assert self.learner.version == version
        self._watch.publish(self.learner.weights())
        if version == self._faults.publish_hang_at:
            self.is_stuck = True
            return
        publish_s = self._schedule.publish_s * self._world.rng.uniform(0.5, 1.5)
        self._world.plan(publish_s, self._end_publish, self.learner.weights(), publish_s)

    def _end_publish(self, weights: Weights, publish_s: float) -> None:
        faults, version = self._faults, weights.version
        if self._is_dead:
            return
        self._publishes += 1
        is_broken = faults.publish_breaks_at is not None and self._publishes > faults.publish_breaks_at
        may_fail = self._failures < self._schedule.config.max_publish_retries
        if is_broken or (may_fail and self._world.rng.random() < faults.publish_failure):
            self._failures += 1
            self._events.append(PublishFailed(version, "simulated"))
            return
        self._failures = 0
        if version > self._newest.version:
            self._newest = weights
        for worker in self._workers.values():
            if worker.server is not None and not worker.is_gone:
                self._wake(worker)
        checksum = Checksum.of(weights.digest & 0xFFFFFFFF)
        self._events.append(Published(version, publish_s, checksum))

    def snapshot(self) -> None:
        """Copy the learner between rounds."""
        self._watch.snapshot()
        taken = SnapshotTaken(self.learner.state_dict(), self.learner.weights().as_tree())
        self._when_learner_is_free(self._schedule.snapshot_s, self._end_snapshot, taken)

    def _end_snapshot(self, taken: SnapshotTaken) -> None:
        if not self._is_dead:
            self._events.append(taken)

    def lose_learner(self) -> None:
        """Have the learner's process die: nothing comes from it any more."""
        if not self._is_dead:
            self._events.append(LearnerDown("killed from outside"))

    # ------------------------------------------------------------ evaluator

    def evaluate(self, version: int, seed: int) -> None:
        """Begin an evaluation; now and then it never ends."""
        self._watch.evaluate(version)
        self._evaluating = version
        if self._world.rng.random() >= self._faults.eval_hang:
            eval_s = self._world.spread(self._schedule.eval_s)
            score = {"eval/return_mean": float(version % 7)}
            self._world.plan(eval_s, self._end_evaluation, EvalDone(version, score, eval_s))

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """End an evaluation."""
        self._world.plan(0.0, self._end_evaluation, EvalDone(version, None, 0.0, reason))

    def _end_evaluation(self, event: EvalDone) -> None:
        if self._evaluating == event.version and not self._is_dead:
            self._evaluating = None
            self._events.append(event)
