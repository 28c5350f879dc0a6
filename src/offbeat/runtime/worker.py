"""A worker process: makes one role and serves it until its driver says stop or is gone.

Started as ``python -m offbeat.runtime.worker``, with its name last for whoever looks at processes. Not
through multiprocessing: so the user's script is not run again, no guard is needed in it, and functions from
notebooks travel by value. Messages are small tuples; arrays and states go through shared memory.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from offbeat.errors import OffbeatError
from offbeat.roles import Collector, Evaluator
from offbeat.runtime.base import Assignment, LazyEvaluator, make_runner
from offbeat.runtime.shared import (
    Block,
    OpenBlocks,
    arrays_in,
    newest_version,
    pack_object,
    read_weights,
    unpack_object,
)
from offbeat.types import Array, Segment, Ticket

if TYPE_CHECKING:
    from offbeat.runtime.ranks import RankAssignment

_SYNC_POLL_S = 0.0005


class SyncTimeout(Exception):
    """Weights of the wanted version did not come in time."""


class Weights:
    """The newest weights this worker has copied."""

    def __init__(self, blocks: OpenBlocks, timeout_s: float) -> None:
        self._blocks = blocks
        self._timeout_s = timeout_s
        self._have: tuple[str, int, Any] = ("", -1, None)

    def get(self, address: str, at_least: int) -> tuple[int, Any]:
        """Return the newest weights, which must be of at least this version, copying only what is new."""
        block = self._blocks[address]
        if self._have[:2] == (address, newest_version(block)):
            return self._have[1:]
        give_up_s = time.monotonic() + self._timeout_s
        while (found := read_weights(block, at_least)) is None:
            if time.monotonic() > give_up_s:
                raise SyncTimeout(f"weights of version {at_least} did not arrive in {self._timeout_s} s")
            time.sleep(_SYNC_POLL_S)
        self._have = (address, *found)
        return found


class CollectorServer:
    """Answers tickets with segments, written into the slots it is told."""

    def __init__(self, connection: Connection, assignment: Assignment[Collector]) -> None:
        self._connection = connection
        self._blocks = OpenBlocks()
        self._weights = Weights(self._blocks, assignment.sync_timeout_s)
        self._runner = make_runner(assignment)
        self._views: dict[str, dict[str, Array]] = {}

    def up_message(self) -> tuple[Any, ...]:
        """Say that tickets are welcome, and what a segment looks like."""
        return ("up", self._runner.specs)

    def serve(self, message: tuple[Any, ...]) -> None:
        """Collect one ticket: ("collect", ticket, weights address, array slot, tail slot)."""
        _, ticket, weights_address, slot, tail = message
        version, weights = self._weights.get(weights_address, ticket.version)
        segment = self._runner.run(replace(ticket, version=version), weights, self._arrays(slot))
        self._answer(ticket, segment, self._blocks[tail])

    def _arrays(self, slot: str) -> dict[str, Array] | None:
        if self._runner.specs is None:
            return None
        if slot not in self._views:
            self._views[slot] = arrays_in(self._blocks[slot], self._runner.specs)
        return dict(self._views[slot])

    def _answer(self, ticket: Ticket, segment: Segment, tail: Block) -> None:
        if self._runner.specs is not None:
            segment = replace(segment, data=None)
        packed = pack_object((segment, self._runner.collector.state_dict()))
        if packed.num_bytes > tail.size:
            self._connection.send(("grow", ticket.number, packed.num_bytes))
            _, address = self._connection.recv()
            tail = self._blocks[address]
        packed.write(tail.bytes)
        self._connection.send(("segment", ticket.number, packed.num_bytes))


class EvaluatorServer:
    """Answers requests for evaluation."""

    def __init__(self, connection: Connection, assignment: Assignment[Evaluator]) -> None:
        self._connection = connection
        self._weights = Weights(OpenBlocks(), assignment.sync_timeout_s)
        self._evaluator = LazyEvaluator(assignment)

    def up_message(self) -> tuple[Any, ...]:
        """Say that requests are welcome."""
        return ("up", None)

    def serve(self, message: tuple[Any, ...]) -> None:
        """Evaluate once: ("evaluate", version, seed, weights address)."""
        _, version, seed, address = message
        found, weights = self._weights.get(address, version)
        assert found == version, f"version {version} was to be evaluated, but {found} is there"
        self._connection.send(("evaluated", self._evaluator.run(weights, version, seed)))


class RankServer:
    """A rank of the learner: does what rank 0 tells, as rank 0 does it."""

    def __init__(self, connection: Connection, assignment: RankAssignment) -> None:
        from offbeat.runtime.ranks import Follower

        self._connection = connection
        self._blocks = OpenBlocks()
        connection.send(("ready",))
        self._follower = Follower(assignment)

    def up_message(self) -> tuple[Any, ...]:
        """Say that requests are welcome."""
        return self._follower.up()

    def serve(self, message: tuple[Any, ...]) -> None:
        """Carry out one request: (kind, address, number of bytes)."""
        _, address, num_bytes = message
        request = unpack_object(self._blocks[address].bytes[:num_bytes].copy())
        self._connection.send(self._follower.serve(request))


_SERVERS: dict[str, Callable[[Connection, Any], CollectorServer | EvaluatorServer | RankServer]] = {
    "collect": CollectorServer,
    "evaluate": EvaluatorServer,
    "rank": RankServer,
}


def _beat(address: str, interval_s: float) -> None:
    """Count in shared memory for as long as this process lives: its signs of life."""
    counter = Block.open(address).bytes.view(np.int64)

    def count() -> None:
        while True:
            counter[0] += 1
            time.sleep(interval_s)

    threading.Thread(target=count, name="heartbeat", daemon=True).start()


def _die_with_parent() -> None:
    """Ask Linux to end this process when its driver dies, even in the middle of a native call."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _doing(message: tuple[Any, ...]) -> str:
    if message[0] == "collect":
        return f"in ticket {message[1].number}"
    return "while evaluating" if message[0] == "evaluate" else f"in the request {message[0]!r}"


def main(connection_fd: int, stack_fd: int, payload_address: str, pulse: str, interval_s: float) -> int:
    """Make the role in the payload and serve it until told to stop; report what it raises and end."""
    _die_with_parent()
    _beat(pulse, interval_s)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what Ctrl-C means
    stacks = os.fdopen(stack_fd, "w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    connection = Connection(connection_fd)
    doing = "while starting"
    try:
        kind, assignment = cloudpickle.loads(unpack_object(Block.open(payload_address).bytes.copy()))
        server = _SERVERS[kind](connection, assignment)
        connection.send(server.up_message())
        while (message := connection.recv()) is not None:
            doing = _doing(message)
            server.serve(message)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1  # the driver is gone
    except SyncTimeout as error:
        connection.send(("lost", str(error)))
        return 1
    except OffbeatError as error:
        connection.send(("error", doing, str(error)))
        return 1
    except Exception:
        connection.send(("error", doing, traceback.format_exc().rstrip()))
        return 1
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # environments may keep threads; nothing here needs an orderly end
