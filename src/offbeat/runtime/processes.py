"""Collectors in processes of their own, the learner in a thread of the driver: the default for CPU work.

Segments are written in place into shared slots; only ticket numbers and addresses travel through pipes.
Each worker has a pipe of its own and the driver waits on all of them: one queue to read from, and no
lock that a killed worker could take with it.
"""

from __future__ import annotations

import os
import resource
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.errors import CollectError
from offbeat.runtime.base import (
    Broken,
    CollectorDown,
    CollectorUp,
    EvalEnded,
    Happening,
    HealthChanged,
    LaneStart,
    Plan,
    SegmentReady,
    thread_stacks,
)
from offbeat.runtime.children import WorkerProcess
from offbeat.runtime.learning import JobThread, LearnerDesk
from offbeat.runtime.shared import Block, WeightsWriter, arrays_in, layout, unpack_object
from offbeat.types import Array, ArraySpec, Batch, StateTree, Ticket

_FIRST_TAIL_BYTES = 1 << 16
_CLOSE_TIMEOUT_S = 5.0
_STACK_WAIT_S = 0.3
_WORKER = "offbeat.runtime.worker"
_MANY_FILES = 1 << 16
_PULSE_CHECK_S = 0.5
_WAKE, _EVALUATOR = "wake", "evaluator"


@dataclass(slots=True)
class Slot:
    """Memory for one segment: its arrays, and a tail for everything else."""

    tail: Block
    arrays: Block | None = None
    views: dict[str, Array] = field(default_factory=dict)


def _allow_many_files() -> None:
    """Each slot takes a few descriptors: use as many as the system lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class SlotPool:
    """Slots made on demand; the tickets outstanding bound their number."""

    def __init__(self) -> None:
        self._free: dict[int, list[Slot]] = {}
        self._all: list[Slot] = []
        self._tail_bytes = _FIRST_TAIL_BYTES

    def take(self, lane: int, specs: dict[str, ArraySpec] | None) -> Slot:
        """A slot, if possible one whose pages this lane's worker has mapped already."""
        free = self._free.setdefault(lane, [])
        if not free:
            free = next((slots for slots in self._free.values() if slots), free)
        slot = free.pop() if free else self._make(specs)
        if slot.tail.size < self._tail_bytes:
            self._replace_tail(slot)
        return slot

    def _make(self, specs: dict[str, ArraySpec] | None) -> Slot:
        slot = Slot(Block.create(self._tail_bytes))
        if specs is not None:
            slot.arrays = Block.create(layout(specs)[1])
            slot.views = arrays_in(slot.arrays, specs)
            for view in slot.views.values():
                view.flags.writeable = False
        self._all.append(slot)
        return slot

    def grow(self, slot: Slot, num_bytes: int) -> None:
        """Give the slot a larger tail, and later slots too."""
        self._tail_bytes = max(self._tail_bytes, num_bytes * 5 // 4)
        self._replace_tail(slot)

    def _replace_tail(self, slot: Slot) -> None:
        slot.tail.close()
        slot.tail = Block.create(self._tail_bytes)

    @property
    def num_bytes(self) -> int:
        """Shared memory that all slots together take."""
        return sum(slot.tail.size + (slot.arrays.size if slot.arrays else 0) for slot in self._all)

    def give_back(self, lane: int, slot: Slot) -> None:
        """The slot may be written again."""
        self._free.setdefault(lane, []).append(slot)

    def close(self) -> None:
        """Free all memory."""
        for slot in self._all:
            slot.views = {}
            slot.tail.close()
            if slot.arrays is not None:
                slot.arrays.close()
        self._all.clear()
        self._free.clear()


@dataclass(slots=True)
class _Lane:
    """A collector's process, the ticket it works on with its slot, and the tickets that wait for it.

    One ticket at a time is in the pipe: neither side can then block the other by a full one, and the
    answer to a worker's question is the next thing it reads.
    """

    worker: WorkerProcess
    running: tuple[int, Slot] | None = None
    waiting: deque[Ticket] = field(default_factory=deque)


def _slot_of(lane: _Lane, ticket: int) -> Slot:
    assert lane.running is not None, f"{lane.worker.name} speaks of ticket {ticket}, but has none"
    number, slot = lane.running
    assert number == ticket, f"{lane.worker.name} speaks of ticket {ticket}, but has {number}"
    return slot


class ProcessRuntime:
    """Spawned collectors, shared-memory slots, learner in a thread beside the coordinator."""

    def __init__(self) -> None:
        self._happened: deque[Happening] = deque()
        self._lanes: dict[int, _Lane] = {}
        self._slots = SlotPool()
        self._specs: dict[str, ArraySpec] | None = None
        self._held: dict[int, tuple[int, Slot]] = {}  # ticket -> lane and slot of a segment not yet trained
        self._weights = WeightsWriter()
        self._eval_weights = WeightsWriter()
        self._evaluator: WorkerProcess | None = None
        self._eval_queue: deque[tuple[int, int, str]] = deque()
        self._evaluating: int | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._pulses_checked_s = 0.0
        self._pipe_lock, self._is_closed = threading.Lock(), False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, _WAKE)
        self._plan: Plan
        self._desk: LearnerDesk
        self._learner_thread: JobThread | None = None

    # ------------------------------------------------------------ starting and ending

    def start(self, plan: Plan, lanes: Sequence[LaneStart], learner_state: StateTree | None) -> None:
        """Spawn the collectors, and make the learner here while they start."""
        self._plan = plan
        _allow_many_files()
        for lane, start in enumerate(lanes):
            self.start_lane(lane, start)
        learner = plan.make_learner(learner_state)
        self._desk = LearnerDesk(plan, learner, self._weights.publish, self._post)
        self._happened.append(HealthChanged("learner", "up"))
        self._learner_thread = JobThread("learner", self._post)

    def _post(self, happening: Happening) -> None:
        """Report from another thread, and wake the driver up."""
        self._happened.append(happening)
        self._wake()

    def _wake(self) -> None:
        with self._pipe_lock:
            if not self._is_closed:
                os.write(self._wake_write, b"x")

    def start_lane(self, lane: int, start: LaneStart) -> None:
        """Spawn a collector; where the system has no room for one, it is lost like one that died."""
        payload = ("collect", self._plan.lane(lane, start))
        try:
            worker = WorkerProcess(f"worker_{lane}", self._plan, payload)
        except OSError as error:
            text = f"a process for collector {lane} could not be started: {error}"
            self._happened.append(CollectorDown(lane, text))
            return
        self._lanes[lane] = _Lane(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, lane)

    def kill_lane(self, lane: int, reason: str) -> None:
        """Kill a collector that hangs, with its stack in the report."""
        worker = self._lanes[lane].worker
        stack = worker.stack()
        where = f", it was here:\n{stack}" if stack else ""
        self._lane_down(lane, f"{worker.name} (pid {worker.process.pid}) {reason}{where}")

    def close(self) -> None:
        """End all processes and threads, free all memory."""
        workers = [lane.worker for lane in self._lanes.values()]
        if self._evaluator is not None:
            workers.append(self._evaluator)
        busy = {id(lane.worker) for lane in self._lanes.values() if lane.running is not None}
        for worker in workers:
            worker.end(0.0 if id(worker) in busy or not worker.is_up else _CLOSE_TIMEOUT_S)
        self._lanes.clear()
        self._evaluator = None
        if self._learner_thread is not None:
            self._learner_thread.close(_CLOSE_TIMEOUT_S)
            self._learner_thread = None
            self._desk.close()
        with self._pipe_lock:  # a learner that did not end in time may still want to report
            if not self._is_closed:
                self._is_closed = True
                self._selector.close()
                os.close(self._wake_read)
                os.close(self._wake_write)
        self._slots.close()
        self._weights.close()
        self._eval_weights.close()

    def stacks(self) -> dict[str, str]:
        """Where each thread of this process is, and each worker."""
        workers = {f"collector_{number}": lane.worker for number, lane in self._lanes.items()}
        if self._evaluator is not None:
            workers["evaluator"] = self._evaluator
        found = {name: worker.stack() for name, worker in workers.items()}
        found |= self._desk.stacks()
        return thread_stacks() | {name: stack for name, stack in found.items() if stack}

    def pids(self) -> dict[str, int]:
        """The worker processes."""
        workers = [lane.worker for lane in self._lanes.values()]
        if self._evaluator is not None:
            workers.append(self._evaluator)
        return {worker.name: worker.process.pid for worker in workers} | self._desk.pids()

    # ------------------------------------------------------------ actions

    def collect(self, ticket: Ticket) -> None:
        """Line the ticket up for its lane."""
        lane = self._lanes.get(ticket.collector)
        if lane is None:  # it died and its `CollectorDown` is on the way: the ticket is lost with it
            return
        lane.waiting.append(ticket)
        self._send_next(lane)

    def _send_next(self, lane: _Lane) -> None:
        """Send a ticket with the addresses of the weights and of its slot."""
        if lane.running is not None or not lane.waiting:
            return
        ticket = lane.waiting.popleft()
        slot = self._slots.take(ticket.collector, self._specs)
        lane.running = (ticket.number, slot)
        arrays = slot.arrays.address if slot.arrays is not None else ""
        lane.worker.tell(("collect", ticket, self._weights.address, arrays, slot.tail.address))

    def train(self, batch: Batch) -> None:
        """Train in the learner's thread."""
        self._submit(lambda: self._desk.train(batch))

    def publish(self, version: int) -> None:
        """Copy the weights into shared memory when the learner comes to it."""
        self._submit(lambda: self._desk.publish(version))

    def snapshot(self) -> None:
        """Copy the learner when it comes to it."""
        self._submit(self._desk.snapshot)

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate a snapshot in a process of its own."""
        self._evaluating = version
        if self._evaluator is None and not self._start_evaluator():
            return

        def hand_over(weights: Any) -> None:
            self._eval_weights.publish(version, weights)
            self._eval_queue.append((version, seed, self._eval_weights.address))
            self._wake()

        self._submit(lambda: self._desk.hand_weights(hand_over))

    def _submit(self, job: Any) -> None:
        assert self._learner_thread is not None
        self._learner_thread.submit(job)

    def _start_evaluator(self) -> bool:
        """Start the evaluator's process; one that cannot be started costs an evaluation."""
        self._happened.append(HealthChanged("evaluator", "starting"))
        try:
            self._evaluator = WorkerProcess("evaluator", self._plan, ("evaluate", self._plan.evaluator()))
        except OSError as error:
            self._evaluation_lost(f"a process for the evaluator could not be started: {error}")
            return False
        self._selector.register(self._evaluator.connection, selectors.EVENT_READ, _EVALUATOR)
        return True

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """Kill the evaluator with its stack in the report; the next evaluation gets a new one."""
        if self._evaluator is None:
            self._happened.append(EvalEnded(version, None, 0.0, reason))
            return
        stack = self._evaluator.stack()
        self._evaluator_down(f"{reason}, it was here:\n{stack}" if stack else reason)

    # ------------------------------------------------------------ what happens

    def wait(self, timeout_s: float) -> list[Happening]:
        """Wait for the workers' pipes and the learner's thread at once."""
        self._listen(0.0 if self._happened else max(0.0, timeout_s))
        self._send_evaluations()
        self._check_starts()
        self._check_pulses(time.monotonic())
        return [self._happened.popleft() for _ in range(len(self._happened))]

    def _check_starts(self) -> None:
        limit_s = self._plan.start_timeout_s
        for number, lane in list(self._lanes.items()):
            if not lane.worker.is_up and time.monotonic() - lane.worker.started_s > limit_s:
                self.kill_lane(number, f"did not start within {limit_s} s")

    def _check_pulses(self, now_s: float) -> None:
        """Once a second: a worker that gives no sign of life is ended, and its pipe's end reported."""
        if now_s - self._pulses_checked_s < _PULSE_CHECK_S:
            return
        self._pulses_checked_s = now_s
        silent = "gives no sign of life (runtime.heartbeat_timeout_s)"
        for number, lane in list(self._lanes.items()):
            if lane.worker.has_beaten and lane.worker.is_dead(now_s):
                self._happened.append(HealthChanged(f"collector_{number}", "unresponsive", silent))
                self.kill_lane(number, silent)
        evaluator = self._evaluator
        if evaluator is not None and evaluator.has_beaten and evaluator.is_dead(now_s):
            self._happened.append(HealthChanged("evaluator", "unresponsive", silent))
            self._evaluator_down(f"{evaluator.name} (pid {evaluator.process.pid}) {silent}")

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data == _WAKE:
                os.read(self._wake_read, 4096)
            elif key.data == _EVALUATOR:
                self._hear_evaluator()
            else:
                self._hear_collector(key.data)

    def _hear_collector(self, number: int) -> None:
        lane = self._lanes[number]
        try:
            message = lane.worker.connection.recv()
        except (EOFError, OSError):
            self._lane_down(number, lane.worker.how_it_ended())
            return
        match message:
            case ("up", specs):
                self._lane_up(number, specs)
            case ("segment", ticket, num_bytes):
                self._segment_ready(number, ticket, num_bytes)
            case ("grow", ticket, num_bytes):
                slot = _slot_of(lane, ticket)
                self._slots.grow(slot, num_bytes)
                lane.worker.tell(("tail", slot.tail.address))
            case ("lost", reason):
                self._lane_down(number, f"{lane.worker.name}: {reason}")
            case ("error", doing, text):
                self._lane_down(number, f"collector {number} raised {doing}:\n{text}", raised=True)

    def _lane_up(self, number: int, specs: dict[str, ArraySpec] | None) -> None:
        if self._specs is not None and specs != self._specs:
            text = (
                f"collector {number} makes segments of {specs}, another one of {self._specs}: make them equal"
            )
            self._happened.append(Broken(CollectError(text)))
            return
        self._specs = specs
        self._lanes[number].worker.came_up()
        self._happened.append(CollectorUp(number))

    def _segment_ready(self, number: int, ticket_number: int, num_bytes: int) -> None:
        lane = self._lanes[number]
        slot, lane.running = _slot_of(lane, ticket_number), None
        self._send_next(lane)
        segment, state = unpack_object(slot.tail.bytes[:num_bytes].copy())
        if slot.arrays is not None:
            segment = replace(segment, data=dict(slot.views))
            num_bytes += slot.arrays.size
        self._held[ticket_number] = (number, slot)
        self._happened.append(SegmentReady(segment, state, num_bytes))

    def release(self, tickets: Sequence[int]) -> None:
        """The segments of these tickets are no longer needed."""
        for ticket in tickets:
            if ticket in self._held:
                self._slots.give_back(*self._held.pop(ticket))

    def _lane_down(self, number: int, reason: str, raised: bool = False) -> None:
        lane = self._lanes.pop(number)
        self._selector.unregister(lane.worker.connection)
        if lane.running is not None:
            self._slots.give_back(number, lane.running[1])
        lane.worker.end()
        self._happened.append(CollectorDown(number, reason, raised))

    def _send_evaluations(self) -> None:
        while self._eval_queue and self._evaluator is not None:
            version, seed, address = self._eval_queue.popleft()
            if version != self._evaluating:  # asked of an evaluator that has died since
                continue
            self._evaluator.tell(("evaluate", version, seed, address))

    def _hear_evaluator(self) -> None:
        worker = self._evaluator
        assert worker is not None
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._evaluator_down(worker.how_it_ended())
            return
        match message:
            case ("up", _):
                worker.came_up()
                self._happened.append(HealthChanged("evaluator", "up"))
            case ("evaluated", ended):
                self._evaluating = None
                self._happened.append(ended)
            case ("lost", reason):
                self._evaluator_down(reason)
            case ("error", _, text):
                self._evaluator_down(text)

    def _evaluator_down(self, reason: str) -> None:
        """An evaluator that dies costs one evaluation; the next one gets a new process."""
        assert self._evaluator is not None
        self._selector.unregister(self._evaluator.connection)
        self._evaluator.end()
        self._evaluator = None
        self._eval_queue.clear()
        self._evaluation_lost(reason)

    def _evaluation_lost(self, reason: str) -> None:
        self._happened.append(HealthChanged("evaluator", "down", reason))
        if self._evaluating is not None:
            self._happened.append(EvalEnded(self._evaluating, None, 0.0, reason))
            self._evaluating = None
