"""A worker process: makes one role and serves it until its driver says stop or is gone.

Started as ``python -m offbeat.runtime.worker``, with its name last, for lists of processes. Not through
multiprocessing: so the user's script is not run again, no guard is needed in it, and functions from
notebooks travel by value. Collectors speak in the records of `offbeat.runtime.wire`, other roles in small
tuples; arrays and states go through shared memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import cloudpickle

from offbeat.pacing.events import (
    CollectorDown,
    CollectorUp,
    CollectorWaits,
    CollectorWorked,
    OpenWork,
    SegmentArrived,
)
from offbeat.roles import Evaluator, progress_to
from offbeat.runtime.base import describe
from offbeat.runtime.learning import LazyEvaluator
from offbeat.runtime.parts import PublishedReader
from offbeat.runtime.serve import Report, Stamp, SyncTimeout, serve, start
from offbeat.runtime.shared import Address, Block, copy_object, newest_version
from offbeat.runtime.spec import Assignment
from offbeat.runtime.wire import (
    DOWN,
    HOPELESS,
    LOST,
    PROGRESS,
    UP,
    WAITS,
    WORKED,
    Lender,
    SegmentWriter,
    WorkerInput,
    pack_open_work,
    pack_text,
    write_all,
)
from offbeat.types import Array, ArraySpec

if TYPE_CHECKING:
    from offbeat.runtime.ranks import RankAssignment

_SYNC_POLL_S = 0.0005
_PROGRESS_S = 0.1


class Weights:
    """The newest weights that this worker has copied."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._block: Block | None = None
        self._reader = PublishedReader()
        self._have: tuple[int, Any] = (-1, None)

    def get(self, address: Address, at_least: int) -> tuple[int, Any]:
        """Return the newest weights, which must be of at least this version, copying only what is new."""
        block = self._block
        if block is None or block.address != address:
            block = self._block = Block.open(address)
        elif (version := self._have[0]) >= at_least and version == newest_version(block):
            return self._have
        give_up_s = time.monotonic() + self._timeout_s
        while (found := self._reader.read(block, at_least)) is None:
            if time.monotonic() > give_up_s:
                raise SyncTimeout(f"weights of version {at_least} did not arrive in {self._timeout_s} s")
            time.sleep(_SYNC_POLL_S)
        self._have = found
        return found


class Reporter:
    """Sends the reports of a role, each once and at most one in 0.1 s; an empty one is sent at once."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._reported, self._reported_s = "", 0.0

    def __call__(self, text: str) -> None:
        """Send a report if it is new and due."""
        now_s = time.monotonic()
        is_due = not text or now_s - self._reported_s >= _PROGRESS_S
        if is_due and text != self._reported:
            self._reported, self._reported_s = text, now_s
            self._send(text)


class CollectorHost:
    """Runs a collector in this process: tickets in, segments in shared memory out."""

    def __init__(self, descriptor: int, assignment: Assignment[Any], since: Stamp) -> None:
        self._descriptor = descriptor
        self._assignment = assignment
        self._since = since
        wake_fd, self._wake_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        self._inbox = WorkerInput(descriptor, assignment.context.collector, wake_fd)
        self._weights = Weights(assignment.sync_timeout_s)
        self._segments = SegmentWriter(None)
        self._open_work = Lender()
        self._specs: dict[str, ArraySpec] | None = None

    def run(self) -> None:
        """Make the collector and serve it, until the driver wants no more or it raised."""
        with progress_to(Reporter(self._send_progress)):
            server = start(
                self._assignment,
                self._newest,
                self._post,
                self._allocate_for,
                wake=self._wake,
                since=self._since,
            )
            if server is not None:
                serve(server, self._inbox)
        while self._inbox.receive(None) is not None:
            pass  # segments that were sent can be read for as long as this process lives

    def _wake(self) -> None:
        """Have the collector advance again; from any thread."""
        with contextlib.suppress(BlockingIOError):  # enough bytes are there
            os.write(self._wake_fd, b"x")

    def _allocate_for(self, specs: dict[str, ArraySpec]) -> Callable[[], dict[str, Array]]:
        self._specs, self._segments = specs, SegmentWriter(specs)
        return self._segments.arrays

    def _send_progress(self, text: str) -> None:
        write_all(self._descriptor, pack_text(PROGRESS, text.encode()))

    def _newest(self, at_least: int) -> tuple[int, Any]:
        assert self._inbox.weights is not None, "a ticket came before any weights"
        return self._weights.get(self._inbox.weights, at_least)

    def _post(self, event: Report) -> None:
        match event:
            case SegmentArrived(segment, _, state, state_s, busy_s):
                record = self._segments.write(segment, state, state_s, busy_s)
            case CollectorWorked(_, busy_s, units):
                record = pack_text(WORKED, pickle.dumps((busy_s, units)))
            case CollectorWaits(_, version, tickets):
                record = pack_text(WAITS, pickle.dumps((version, tickets)))
            case OpenWork(_, work, version):
                record = pack_open_work(self._open_work.lend(work), version)
            case CollectorUp(_, capacity, _, is_wide):
                record = pack_text(UP, cloudpickle.dumps((self._specs, is_wide)), capacity)
            case CollectorDown(_, reason, raised, _, is_final):
                kind = HOPELESS if is_final else DOWN if raised else LOST
                record = pack_text(kind, reason.encode())
        write_all(self._descriptor, record)


class EvaluatorServer:
    """Answers requests for evaluation, and reports its progress."""

    def __init__(self, connection: Connection, assignment: Assignment[Evaluator]) -> None:
        self._connection = connection
        self._weights = Weights(assignment.sync_timeout_s)
        self._evaluator = LazyEvaluator(assignment)
        connection.send(("up", None))

    def serve(self, message: tuple[Any, ...]) -> None:
        """Evaluate once: ("evaluate", version, seed, weights address)."""
        (_, version, seed, address), connection = message, self._connection
        found, weights = self._weights.get(address, version)
        assert found == version, f"version {version} was to be evaluated, but {found} is there"
        with progress_to(Reporter(lambda text: connection.send(("progress", text)))):
            done = self._evaluator.run(weights, version, seed)
        connection.send(("evaluated", done))


class RankServer:
    """A rank of the learner: carries out the requests of rank 0, as rank 0 does."""

    def __init__(self, connection: Connection, assignment: RankAssignment) -> None:
        from offbeat.runtime.ranks import Follower

        self._connection = connection
        self._block: Block | None = None
        connection.send(("ready",))
        self._follower = Follower(assignment)
        connection.send(self._follower.up())

    def serve(self, message: tuple[Any, ...]) -> None:
        """Carry out one request: (kind, address, number of bytes)."""
        _, address, num_bytes = message
        if self._block is None or self._block.address != address:
            self._block = Block.open(address)
        request = copy_object(self._block.bytes[:num_bytes])
        self._connection.send(self._follower.serve(request))


_SERVERS: dict[str, Callable[[Connection, Any], EvaluatorServer | RankServer]] = {
    "evaluate": EvaluatorServer,
    "rank": RankServer,
}


def _beat(address: Address, interval_s: float) -> Stamp:
    """Count in shared memory for as long as this process lives: its signs of life.

    Return the word behind, for the start of a collector's piece of work.
    """
    words = Block.open(address).words

    def count() -> None:
        while True:
            words[0] += 1
            time.sleep(interval_s)

    threading.Thread(target=count, name="heartbeat", daemon=True).start()
    return words[1:2]


def _die_with_parent() -> None:
    """Ask Linux to end this process when its driver dies, even in the middle of a native call."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _serve(kind: str, connection: Connection, packed: bytes) -> None:
    """Serve an evaluator or a rank of the learner until the driver is done or gone; report what it raises."""
    doing = "while starting"
    report: tuple[Any, ...]
    try:
        server = _SERVERS[kind](connection, cloudpickle.loads(packed))
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                return
            doing = "while evaluating" if kind == "evaluate" else f"in the request {message[0]!r}"
            server.serve(message)
    except SyncTimeout as error:
        report = ("lost", str(error))
    except Exception as error:
        report = ("error", doing, describe(error))
    with contextlib.suppress(OSError):  # the driver may be gone
        connection.send(report)


def main(
    connection_fd: int, stack_fd: int, payload: Address, pulse: Address, interval_s: float, name: str
) -> None:
    """Make the role in the payload and serve it until a stop request."""
    _die_with_parent()
    since = _beat(pulse, interval_s)
    for number in (signal.SIGINT, signal.SIGHUP):  # the driver decides what they mean
        signal.signal(number, signal.SIG_IGN)
    stacks = os.fdopen(stack_fd, "w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    kind, packed = copy_object(Block.open(payload).bytes)
    if kind != "collect":
        _serve(kind, Connection(connection_fd), packed)
        return
    try:
        assignment = cloudpickle.loads(packed)
    except Exception as error:
        text = f"{name} raised while starting:\n{describe(error)}"
        write_all(connection_fd, pack_text(DOWN, text.encode()))
        return
    CollectorHost(connection_fd, assignment, since).run()


if __name__ == "__main__":
    descriptors = (int(sys.argv[1]), int(sys.argv[2]))
    addresses = (Address.parse(sys.argv[3]), Address.parse(sys.argv[4]))
    main(*descriptors, *addresses, float(sys.argv[5]), sys.argv[6])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # environments may keep threads; nothing here needs an orderly end
