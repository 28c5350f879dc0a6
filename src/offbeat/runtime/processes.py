"""Collectors in processes of their own, the learner in a thread of the driver: the default for CPU work.

Segments stay in shared memory, where their workers wrote them; only fixed-size records travel (see
`offbeat.runtime.wire`). Each worker has a pipe of its own and the driver waits on all of them: one queue to
read from, and no lock that a killed worker could take with it.
"""

from __future__ import annotations

import os
import pickle
import resource
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.errors import CollectError
from offbeat.pacing.events import (
    Broken,
    CollectorDown,
    CollectorUp,
    CollectorWaits,
    CollectorWorked,
    EvalDone,
    Event,
    HealthChanged,
    OpenWork,
    SegmentArrived,
)
from offbeat.runtime import wire
from offbeat.runtime.base import describe, with_stack
from offbeat.runtime.children import WorkerProcess
from offbeat.runtime.learning import JobThread, LocalRuntime
from offbeat.runtime.messages import Accept, Begun, CutTickets, GiveWork, Message
from offbeat.runtime.parts import PublishedWriter
from offbeat.runtime.shared import Address
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.runtime.wire import (
    CUT_AT_ONCE,
    MOST_SENT,
    RECORD_BYTES,
    DriverInput,
    Lender,
    SegmentReader,
    Slot,
    ToDriver,
    pack_message,
    pack_weights,
    take_lent,
)
from offbeat.types import ArraySpec, Piece, StateTree, Ticket

_CLOSE_TIMEOUT_S = 5.0
_MANY_FILES = 1 << 16
_PULSE_CHECK_S = 0.5
_WAKE, _EVALUATOR = "wake", "evaluator"
_NONE_IS_UP: Any = object()


def _allow_many_files() -> None:
    """Raise the limit of open files as far as may be: each worker takes a few, and each of its blocks one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(slots=True, eq=False)
class _Collector:
    """A collector's process, the tickets that are there, and messages that wait here for room in its pipe.

    ``num_sent`` records are in its pipe, as far as it has said; ``lender`` has what goes with some of them.
    """

    index: int
    worker: WorkerProcess
    records: DriverInput
    segments: SegmentReader | None = None
    is_wide: bool = False
    is_asked: bool = False
    """It is to answer with its begun work."""
    sent: dict[int, Ticket] = field(default_factory=dict)
    waiting: deque[Message] = field(default_factory=deque)
    num_sent: int = 0
    lender: Lender = field(default_factory=Lender)
    weights: Address | None = None

    def write(self, data: bytes) -> None:
        """Send records."""
        self.num_sent += len(data) // RECORD_BYTES
        self.worker.write(data)


class ProcessRuntime(LocalRuntime):
    """Collectors and evaluator in worker processes, the learner in a thread."""

    _shares_weights = False

    def __init__(self) -> None:
        super().__init__()
        self._events: deque[Event] = deque()
        self._collectors: dict[int, _Collector] = {}
        self._specs: dict[str, ArraySpec] | None = _NONE_IS_UP
        self._slots: dict[int, Slot] = {}  # ticket -> memory of its segment, until it is released
        self._weights = PublishedWriter()
        self._announced: Address | None = None
        self._eval_weights = PublishedWriter()
        self._evaluator: WorkerProcess | None = None
        self._eval_queue: deque[tuple[int, int, Address]] = deque()
        self._evaluating: int | None = None
        self._pulses_checked_s = 0.0
        self._pipe_lock, self._is_open = threading.Lock(), False
        self._wake_read: int
        self._wake_write: int
        self._selector: selectors.BaseSelector

    # ------------------------------------------------------------ starting and ending

    def start(
        self, spec: RunSpec, collectors: Mapping[int, CollectorState], learner_state: StateTree | None
    ) -> None:
        """Spawn the collectors, and make the learner here while they start."""
        self._spec = spec
        _allow_many_files()
        self._selector, (self._wake_read, self._wake_write) = selectors.DefaultSelector(), os.pipe()
        self._is_open = True
        self._selector.register(self._wake_read, selectors.EVENT_READ, _WAKE)
        for index, state in collectors.items():
            self.start_collector(index, state)
        self._make_learner(learner_state)
        self._learner_thread = JobThread("learner", self._post)

    def _send_weights(self, version: int, weights: Any) -> int:
        return self._weights.publish(version, weights)

    def _post(self, event: Event) -> None:
        """Report from another thread, and wake the driver up."""
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        with self._pipe_lock:
            if self._is_open:
                os.write(self._wake_write, b"x")

    def start_collector(self, index: int, state: CollectorState) -> None:
        """Spawn a collector; where the system has no room for one, it is lost like one that died."""
        if (before := self._collectors.get(index)) is not None:
            self._remove(before)
        try:
            worker = WorkerProcess(
                f"worker_{index}", self._spec, "collect", self._spec.collector(index, state)
            )
        except OSError as error:
            text = f"a process for collector {index} could not be started: {error}"
            self._events.append(CollectorDown(index, text))
            return
        self._collectors[index] = _Collector(index, worker, DriverInput(worker.connection.fileno()))
        self._selector.register(worker.connection, selectors.EVENT_READ, index)

    def kill_collector(self, index: int, reason: str) -> None:
        """Kill a collector that hangs, with its stack in the report."""
        if (collector := self._collectors.get(index)) is None:  # its `CollectorDown` is on the way
            return
        worker = collector.worker
        text = f"{worker.name} (pid {worker.process.pid}) {reason}"
        self._collector_down(collector, with_stack(text, worker.stack()))

    def close(self, at_once: bool = False) -> None:
        """End all processes and threads, free all memory."""
        limit_s = 0.0 if at_once else _CLOSE_TIMEOUT_S
        give_up_s = time.monotonic() + limit_s
        busy = {id(collector.worker) for collector in self._collectors.values() if collector.sent}
        workers = self._workers().values()
        for worker in workers:
            worker.ask_to_stop()
        for worker in workers:
            is_ready = worker.is_up and id(worker) not in busy
            worker.end(max(0.0, give_up_s - time.monotonic()) if is_ready else 0.0)
        for collector in self._collectors.values():
            collector.lender.close()
        self._collectors.clear()
        self._evaluator = None
        if self._learner_thread is not None:
            self._learner_thread.close(limit_s)
            self._learner_thread = None
            self._executor.close()
        with self._pipe_lock:  # a learner that did not end in time may still want to report
            if self._is_open:
                self._is_open = False
                self._selector.close()
                os.close(self._wake_read)
                os.close(self._wake_write)
        self._slots.clear()
        self._weights.close()
        self._eval_weights.close()

    def _workers(self) -> dict[str, WorkerProcess]:
        workers = {f"collector_{number}": collector.worker for number, collector in self._collectors.items()}
        return workers if self._evaluator is None else workers | {"evaluator": self._evaluator}

    def stacks(self) -> dict[str, str]:
        """Return the stack of each thread of this process and of each worker."""
        found = {name: stack for name, worker in self._workers().items() if (stack := worker.stack())}
        return super().stacks() | found

    def pids(self) -> dict[str, int]:
        """The worker processes."""
        return {worker.name: worker.process.pid for worker in self._workers().values()} | super().pids()

    # ------------------------------------------------------------ actions

    def end_collector(self, index: int) -> None:
        """End a collector that holds no ticket."""
        if (collector := self._collectors.get(index)) is not None:
            self._remove(collector)

    def collect(self, ticket: Ticket, begun: Begun | None = None, script: tuple[Piece, ...] = ()) -> None:
        """Send the ticket to its collector, behind those that are there."""
        self._send(ticket.collector, Accept(ticket, begun, script))

    def cut(self, tickets: Sequence[Ticket]) -> None:
        """Tell the collectors, behind what they were told before; each record waits for room by itself."""
        for index in {ticket.collector for ticket in tickets}:
            held = tuple([ticket.number for ticket in tickets if ticket.collector == index])
            for at in range(0, len(held), CUT_AT_ONCE):
                self._send(index, CutTickets(held[at : at + CUT_AT_ONCE]))

    def ask_work(self) -> Sequence[int]:
        """Ask the wide collectors; each answers between two pieces of work, once if asked twice before."""
        asked = [collector for collector in self._collectors.values() if collector.is_wide]
        for collector in asked:
            if not collector.is_asked:
                collector.is_asked = True
                self._send(collector.index, GiveWork())
        return [collector.index for collector in asked]

    def working_s(self, index: int) -> float | None:
        """Return the time since the piece of work at hand began, which its worker keeps in shared memory."""
        collector = self._collectors.get(index)
        return None if collector is None else collector.worker.working_s()

    def _send(self, index: int, message: Message) -> None:
        collector = self._collectors.get(index)
        if collector is None:  # it died and its `CollectorDown` is on the way: the ticket is lost with it
            return
        collector.waiting.append(message)
        self._send_messages(collector)

    def _send_messages(self, collector: _Collector) -> None:
        """Send what waits, as far as there is room."""
        if not collector.waiting:
            return
        self._announce_weights(collector)
        records = b""
        while collector.waiting and collector.num_sent + len(records) // RECORD_BYTES < MOST_SENT:
            message = collector.waiting.popleft()
            if isinstance(message, Accept):
                collector.sent[message.ticket.number] = message.ticket
            records += pack_message(message, collector.lender)
        collector.write(records)

    def _announce_weights(self, collector: _Collector) -> None:
        """Send a worker the address of the weights; it looks there for new versions by itself."""
        address = self._weights.address
        if address is not None and address != collector.weights:
            collector.weights = address
            collector.write(pack_weights(address))

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate a snapshot in a process of its own."""
        self._evaluating = version
        if self._evaluator is None and not self._start_evaluator():
            return

        def send(weights: Any) -> None:
            self._eval_weights.publish(version, weights)
            assert self._eval_weights.address is not None
            self._eval_queue.append((version, seed, self._eval_weights.address))
            self._wake()

        self._do(lambda: self._executor.send_weights(send))

    def _start_evaluator(self) -> bool:
        """Start the evaluator's process; one that cannot be started costs an evaluation."""
        self._events.append(HealthChanged("evaluator", "starting"))
        try:
            self._evaluator = WorkerProcess("evaluator", self._spec, "evaluate", self._spec.evaluator())
        except OSError as error:
            self._evaluation_lost(f"a process for the evaluator could not be started: {error}")
            return False
        self._selector.register(self._evaluator.connection, selectors.EVENT_READ, _EVALUATOR)
        return True

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """Kill the evaluator with its stack in the report; the next evaluation gets a new one."""
        if self._evaluator is None:
            self._events.append(EvalDone(version, None, 0.0, reason))
            return
        self._evaluator_down(with_stack(reason, self._evaluator.stack()))

    # ------------------------------------------------------------ what happens

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for the workers' pipes and the learner's thread at once."""
        self._listen(0.0 if self._events else max(0.0, timeout_s))
        self._send_evaluations()
        if self._weights.address != self._announced:  # they have outgrown their block
            self._announced = self._weights.address
            for collector in self._collectors.values():
                self._announce_weights(collector)
        self._check_pulses(time.monotonic())
        return [self._events.popleft() for _ in range(len(self._events))]

    def _check_pulses(self, now_s: float) -> None:
        """End workers that give no sign of life, and report them."""
        if now_s - self._pulses_checked_s < _PULSE_CHECK_S:
            return
        self._pulses_checked_s = now_s
        silent = "gives no sign of life (runtime.heartbeat_timeout_s)"
        for index, collector in list(self._collectors.items()):
            if collector.worker.is_dead(now_s):
                self._events.append(HealthChanged(f"collector_{index}", "unresponsive", silent))
                self.kill_collector(index, silent)
        evaluator = self._evaluator
        if evaluator is not None and evaluator.is_dead(now_s):
            self._events.append(HealthChanged("evaluator", "unresponsive", silent))
            self._evaluator_down(f"{evaluator.name} (pid {evaluator.process.pid}) {silent}")

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data == _WAKE:
                os.read(self._wake_read, 4096)
            elif key.data == _EVALUATOR:
                self._on_evaluator()
            else:
                self._on_collector(self._collectors[key.data])

    def _on_collector(self, collector: _Collector) -> None:
        """Take everything that a worker has sent."""
        worker = collector.worker
        try:
            for record, extra in collector.records.read():
                match record.kind:
                    case wire.SEGMENT:
                        self._on_segment(collector, record)
                    case wire.DOWN | wire.LOST | wire.HOPELESS:
                        text, raised = extra.decode(), record.kind != wire.LOST
                        reason = text if raised else f"{worker.name}: {text}"
                        self._collector_down(collector, reason, raised, record.kind == wire.HOPELESS)
                        return
                    case _:
                        self._on_report(collector, record, extra)
        except (EOFError, ConnectionError, FileNotFoundError):  # it has ended, and its memory with it
            self._collector_down(collector, worker.how_it_ended())
        except Exception as error:  # such as an object that cannot be unpickled here
            is_its_own = not isinstance(error, OSError)
            text = f"a segment of {worker.name} could not be read: {describe(error)}"
            self._collector_down(collector, text, raised=is_its_own)
        else:
            collector.lender.free()
            self._send_messages(collector)

    def _on_report(self, collector: _Collector, record: ToDriver, extra: bytes) -> None:
        index = collector.index
        match record.kind:
            case wire.TAKEN:
                collector.num_sent -= record.ticket
            case wire.UP:
                self._on_up(collector, record.ticket, *pickle.loads(extra))
            case wire.PROGRESS:
                self._collect_progress[f"collector_{index}"] = extra.decode()
            case wire.WORKED:
                self._events.append(CollectorWorked(index, *pickle.loads(extra)))
            case wire.WAITS:
                self._events.append(CollectorWaits(index, *pickle.loads(extra)))
            case wire.OPEN_WORK:
                place = (record.descriptor, record.size, record.serial)
                work = take_lent(Address(collector.worker.process.pid, *place))
                collector.is_asked = False
                self._events.append(OpenWork(index, work, record.version))

    def _on_up(
        self, collector: _Collector, capacity: int, specs: dict[str, ArraySpec] | None, is_wide: bool
    ) -> None:
        if self._specs is not _NONE_IS_UP and specs != self._specs:
            text = (
                f"collector {collector.index} makes segments of {specs}, another one of {self._specs}: "
                "make them equal"
            )
            self._events.append(Broken(CollectError(text)))
            return
        pid = collector.worker.process.pid
        if collector.segments is None:  # else it has come up before, and tells another capacity
            self._specs, collector.is_wide = specs, is_wide
            collector.worker.came_up()
            collector.segments = SegmentReader(pid, specs)
        self._events.append(CollectorUp(collector.index, capacity, pid, is_wide))

    def _on_segment(self, collector: _Collector, record: ToDriver) -> None:
        assert collector.segments is not None, "a segment came from a collector that is not up"
        began_s = time.perf_counter()
        segment, state, slot = collector.segments.read(record, collector.sent[record.ticket])
        state_s = record.state_s + (time.perf_counter() - began_s if state is not None else 0.0)
        del collector.sent[record.ticket]
        num_bytes = record.num_bytes
        if self._specs is None:
            slot.release()  # nothing in it is used any more
        else:
            self._slots[record.ticket] = slot
            num_bytes = slot.block.size
        self._events.append(SegmentArrived(segment, num_bytes, state, state_s, record.busy_s))

    def release(self, tickets: Sequence[int]) -> None:
        """Let the workers write over these segments."""
        for ticket in tickets:
            if (slot := self._slots.pop(ticket, None)) is not None:
                slot.release()

    def _collector_down(
        self, collector: _Collector, reason: str, raised: bool = False, is_final: bool = False
    ) -> None:
        self._remove(collector)
        self._events.append(CollectorDown(collector.index, reason, raised, is_final=is_final))

    def _remove(self, collector: _Collector) -> None:
        del self._collectors[collector.index]
        self._collect_progress.pop(f"collector_{collector.index}", None)
        self._selector.unregister(collector.worker.connection)
        collector.worker.end()
        collector.lender.close()

    def _send_evaluations(self) -> None:
        while self._eval_queue and self._evaluator is not None:
            version, seed, address = self._eval_queue.popleft()
            if version != self._evaluating:  # asked of an evaluator that has died since
                continue
            self._evaluator.send(("evaluate", version, seed, address))

    def _on_evaluator(self) -> None:
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
                self._events.append(HealthChanged("evaluator", "up"))
            case ("progress", text):
                self._eval_progress["evaluator"] = text
            case ("evaluated", ended):
                self._evaluating = None
                self._eval_progress.clear()
                self._events.append(ended)
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
        self._eval_progress.clear()
        self._evaluation_lost(reason)

    def _evaluation_lost(self, reason: str) -> None:
        self._events.append(HealthChanged("evaluator", "down", reason))
        if self._evaluating is not None:
            self._events.append(EvalDone(self._evaluating, None, 0.0, reason))
            self._evaluating = None
