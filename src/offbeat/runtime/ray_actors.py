"""Actors in Ray's processes: collectors, the learner, the evaluator, and the store of a replay run.

Plain classes: the driver makes actors of them. What goes wrong inside is an answer, not an exception, so
that an exception always means that the actor itself is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import ray

from offbeat.errors import OffbeatError, TrainError
from offbeat.pacing.events import Broken, CollectorDown, EvalDone, Event, RoundTrained, SegmentArrived
from offbeat.roles import Evaluator
from offbeat.runtime.adapting import make_collector
from offbeat.runtime.base import describe, thread_stacks
from offbeat.runtime.learning import LazyEvaluator, LearnerExecutor
from offbeat.runtime.messages import Message
from offbeat.runtime.ray_placement import Placement
from offbeat.runtime.serve import CollectorServer, Report, SyncTimeout, serve
from offbeat.runtime.shared import checksum, pack_object, unpack_object
from offbeat.runtime.spec import Assignment, RunSpec, thread_limits
from offbeat.runtime.supervision import seconds_since
from offbeat.runtime.threads import QueueInbox
from offbeat.types import Array, Batch, Part, StateTree, parts_of

Outcome = tuple[list[Event], list[Any]]
"""Events of a job, and the weights that it made, if any, or a reference to them."""
_SMALL_BYTES = 1 << 16
"""Largest array that travels with a message: Ray would send it that way too, with more overhead."""
_INTERNAL = (f"{os.sep}ray{os.sep}_private{os.sep}", f"{os.sep}concurrent{os.sep}")


@dataclass(frozen=True, slots=True)
class ProcessEnv:
    """Environment of an actor's process, taken over from the driver's."""

    sys_path: tuple[str, ...]
    num_threads: int
    blas_threads: int
    node_id: str
    directory: str
    log: Path | None

    def take_over(self) -> None:
        """Find the user's modules, keep to the threads asked for, and write to the run's logs."""
        sys.path += [entry for entry in self.sys_path if entry not in sys.path]
        os.environ |= thread_limits(self.num_threads)
        from threadpoolctl import threadpool_limits

        threadpool_limits(self.blas_threads, user_api="blas")
        if ray.get_runtime_context().get_node_id() != self.node_id:
            return
        with contextlib.suppress(OSError):
            os.chdir(self.directory)
        if self.log is not None:
            _write_to(self.log)


def _write_to(log: Path) -> None:
    """Send everything this process prints to a file of the run."""
    with contextlib.suppress(OSError):
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Started:
    """An actor's first answer; ``error`` None: it is up."""

    pid: int
    node_id: str
    error: OffbeatError | str | None
    pids: dict[str, int]
    capacity: int = 1
    is_wide: bool = False


class Sign(NamedTuple):
    """A sign of life: how long a collector's piece of work lasts already, and the role's newest report."""

    working_s: float | None = None
    progress: str = ""


class Actor:
    """Base of all actors: a start, a sign of life, and stacks."""

    capacity, is_wide = 1, False
    """Number of tickets that it wants to hold, and if they can be cut, where it is a collector."""

    def __init__(self, env: ProcessEnv, payload: bytes) -> None:
        self._env = env
        self._payload = payload

    def start(self) -> Started:
        """Make the role and say where it is, or what it raised."""
        error: OffbeatError | str | None = None
        try:
            self._env.take_over()
            self.make(pickle.loads(self._payload))
        except Exception as raised:
            error = raised if isinstance(raised, OffbeatError) else describe(raised)
        self._payload = b""
        node_id = ray.get_runtime_context().get_node_id()
        pids = self.pids() if error is None else {}
        return Started(os.getpid(), node_id, error, pids, self.capacity, self.is_wide)

    def pids(self) -> dict[str, int]:
        """Processes on this machine that the role keeps beside this one."""
        return {}

    def make(self, payload: Any) -> None:
        """Make the role from what the driver sent."""
        raise NotImplementedError

    def ping(self) -> Sign:
        """Answer beside whatever the role does."""
        return Sign()

    def stack(self) -> str:
        """Return the stacks of this process's threads, without those of Ray."""
        stacks = {
            name: stack for name, stack in thread_stacks().items() if not _is_internal(stack.splitlines())
        }
        return "\n".join(f"{name}:\n{stack}" for name, stack in stacks.items())


def _is_internal(lines: Sequence[str]) -> bool:
    places = [line for line in lines if line.lstrip().startswith("File ")]
    return all(any(part in line for part in _INTERNAL) or "/threading.py" in line for line in places)


# ---------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights on the way to those who act with them: bytes, and a sum to know them by."""

    version: int
    checksum: int
    data: Array

    @staticmethod
    def pack(version: int, weights: Any) -> PackedWeights:
        """Copy the weights into one array."""
        packed = pack_object(weights)
        data = np.empty(packed.num_bytes, np.uint8)
        packed.write(data.data)
        return PackedWeights(version, checksum(data), data)

    def unpack(self) -> tuple[int, Any]:
        """The version and the weights, from a copy of the bytes; `SyncTimeout` if they are not those sent."""
        if checksum(self.data) != self.checksum:
            raise SyncTimeout(f"weights of version {self.version} arrived damaged")
        return self.version, unpack_object(self.data.copy())


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Parts of weights on the way: by name the version, and the packed part or a reference to it."""

    version: int
    parts: Mapping[str, tuple[int, Any]]


class WeightsReader:
    """The newest weights this actor has; others are fetched, with patience."""

    def __init__(self, assignment: Assignment[Any]) -> None:
        self._timeout_s = assignment.sync_timeout_s
        self._retries = assignment.sync_retries
        self._retry_delay_s = assignment.sync_retry_delay_s
        self._have: tuple[int, Any] = (-1, None)
        self._parts: dict[str, Part] = {}

    def get(self, at_least: int, sent: Sequence[Any]) -> tuple[int, Any]:
        """Take what was sent (weights or a reference in a list, empty: nothing new); return the newest."""
        if sent:
            newest = sent[0]
            self._have = self._fetch_parts(newest) if isinstance(newest, PackedParts) else self._fetch(newest)
        if self._have[0] < at_least:
            raise SyncTimeout(f"weights of version {at_least} were not sent, {self._have[0]} is the newest")
        return self._have

    def _fetch_parts(self, sent: PackedParts) -> tuple[int, dict[str, Part]]:
        """Fetch the parts that have changed."""
        before = self._parts
        self._parts = {
            name: before[name]
            if name in before and before[name].version == version
            else Part(*self._fetch(packed))
            for name, (version, packed) in sent.parts.items()
        }
        return sent.version, dict(self._parts)

    def _fetch(self, sent: Any) -> tuple[int, Any]:
        for attempt in range(1 + self._retries):
            try:
                is_here = isinstance(sent, PackedWeights)
                packed: PackedWeights = sent if is_here else ray.get(sent, timeout=self._timeout_s)
                return packed.unpack()
            except (ray.exceptions.RayError, SyncTimeout) as error:
                reason = str(error).partition("\n")[0]
                if attempt < self._retries:
                    time.sleep(self._retry_delay_s)
        raise SyncTimeout(f"weights did not arrive in {1 + self._retries} tries: {reason}")


# ---------------------------------------------------------------- collecting


class CollectorActor(Actor):
    """Turns messages into reports: its collector works in one thread and gets messages from another."""

    def __init__(self, env: ProcessEnv, payload: bytes) -> None:
        super().__init__(env, payload)
        self._inbox = QueueInbox()
        self._reports: queue.SimpleQueue[tuple[bytes, list[Any]]] = queue.SimpleQueue()
        self._sent: deque[Any] = deque()

    def make(self, payload: Assignment[Any]) -> None:
        """Make the collector from its saved state."""
        self._weights = WeightsReader(payload)
        collector, index = make_collector(payload, wake=self._inbox.wake), payload.context.collector
        server = CollectorServer(index, collector, self._newest, self._post, self._inbox.since)
        self.capacity, self.is_wide = collector.capacity, server.wide is not None

        def run() -> None:
            try:
                serve(server, self._inbox)
            except BaseException as error:  # such as SystemExit, which would end this thread without a word
                self._post(CollectorDown(index, f"collector {index} raised:\n{error!r}", raised=True))

        threading.Thread(target=run, name="collector", daemon=True).start()

    def ping(self) -> Sign:
        """Tell how long the piece of work at hand lasts already."""
        return Sign(working_s=seconds_since(self._inbox.since[0]))

    def tell(self, messages: Sequence[Message], sent: Sequence[Any]) -> None:
        """Pass messages to the collector, with weights that are newer than those before, if there are any."""
        self._sent.extend(sent)
        for message in messages:
            self._inbox.send(message)
        if sent and not messages:
            self._inbox.wake()

    def take(self) -> tuple[list[bytes], list[Any]]:
        """Return the reports since the last call, waiting for one, and the data of their segments.

        Data that is no part of a report stays where it is. The driver limits how long a report may take.
        """
        found = [self._reports.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._reports.get_nowait())
        return [packed for packed, _ in found], [one for _, data in found for one in data]

    def _newest(self, at_least: int) -> tuple[int, Any]:
        sent: Sequence[Any] = ()
        while self._sent:
            sent = (self._sent.popleft(),)
        return self._weights.get(at_least, sent)

    def _post(self, report: Report) -> None:
        data: list[Any] = []
        if isinstance(report, SegmentArrived):
            segment = report.segment
            num_bytes = _num_bytes(segment.data)
            if num_bytes > _SMALL_BYTES or segment.data is None:
                data, segment = [segment.data], replace(segment, data=None)
            report = report._replace(segment=segment, num_bytes=num_bytes)
        self._reports.put((bytes(cloudpickle.dumps(report)), data))


def _num_bytes(data: Any) -> int:
    if isinstance(data, dict) and all(isinstance(value, np.ndarray) for value in data.values()):
        return sum(value.nbytes for value in data.values())
    return pack_object(data).num_bytes


# ---------------------------------------------------------------- keeping


class SegmentStoreActor(Actor):
    """Keeps segments that have arrived, by key, on the learner's node: several threads call it."""

    def __init__(self, env: ProcessEnv, payload: bytes) -> None:
        super().__init__(env, payload)
        self._kept: dict[int, Any] = {}
        self._lock = threading.Lock()

    def make(self, payload: Any) -> None:
        """There is nothing to make."""

    def put(self, keys: Sequence[int], references: Sequence[Any], timeout_s: float) -> str | None:
        """Bring the data of segments here and keep it; say why when that does not work."""
        try:
            data = ray.get(references[0], timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            return f"its data did not arrive within {timeout_s:g} s (async_training.sync_timeout)"
        except ray.exceptions.RayError as error:
            return str(error).partition("\n")[0]
        with self._lock:
            self._kept.update(zip(keys, data, strict=True))
        return None

    def get(self, keys: Sequence[int]) -> list[Any]:
        """The data of these segments."""
        with self._lock:
            return [self._kept[key] for key in keys]

    def drop(self, keys: Sequence[int]) -> None:
        """Forget these segments."""
        with self._lock:
            for key in keys:
                self._kept.pop(key, None)


# ---------------------------------------------------------------- learning


class LearnerActor(SegmentStoreActor):
    """Trains, publishes and saves, one job after the other; keeps segments beside that.

    A job answers with what happened, and with a reference to weights where it made some.
    """

    _executor: LearnerExecutor

    def make(self, payload: tuple[RunSpec, StateTree | None, Sequence[Placement]]) -> None:
        """Make the learner where it left off, with ranks in other ``placements`` when there are any."""
        spec, state, placements = payload
        self._sync_timeout_s = spec.sync_timeout_s
        self._events: list[Event] = []
        self._references: list[Any] = []
        self._parts: dict[str, tuple[int, Any]] = {}
        launcher, host = None, "127.0.0.1"
        if placements:
            from offbeat.runtime.ray_ranks import RayRankLauncher

            launcher, host = RayRankLauncher(spec, placements, self._env), ray.util.get_node_ip_address()
        learner = spec.make_learner(state, launcher=launcher, host=host)
        self._executor = LearnerExecutor(learner, self._put_weights, self._events.append)

    def prepare(self) -> Outcome:
        """Do what the learner does before its first round."""
        return self._do(self._executor.prepare)

    def ping(self) -> Sign:
        """Tell how far the learner is; it is made when this is asked for."""
        return Sign(progress=self._executor.progress.get("learner", "") if hasattr(self, "_executor") else "")

    def pids(self) -> dict[str, int]:
        """The other ranks on this machine."""
        return self._executor.pids()

    def stack(self) -> str:
        """Return the stacks of this process and of the other ranks."""
        ranks = "".join(f"\n{name}:\n{stack}" for name, stack in self._executor.stacks().items())
        return super().stack() + ranks

    def _put_weights(self, version: int, weights: Any) -> int:
        """Put weights, and of parts those that have changed, where they can be fetched; return their size."""
        if (parts := parts_of(weights)) is None:
            reference, num_bytes = _put(version, weights)
            self._references = [reference]
            return num_bytes
        total = 0
        for name, part in parts.items():
            if name not in self._parts or self._parts[name][0] != part.version:
                reference, num_bytes = _put(part.version, part.data)
                self._parts[name] = (part.version, reference)
                total += num_bytes
        self._references = [PackedParts(version, {name: self._parts[name] for name in parts})]
        return total

    def train(self, batch: Batch, keys: Sequence[int | None], store: Any) -> Outcome:
        """Train one round; ``keys`` are those of segments whose data is kept, here or in the ``store``."""
        kept = [key for key in keys if key is not None]
        try:
            is_here = store is None or not kept
            asked = None if is_here else store.get.remote(kept)
            found = self.get(kept) if is_here else ray.get(asked, timeout=self._sync_timeout_s)
        except (KeyError, ray.exceptions.RayError) as error:
            return [Broken(TrainError(f"segments of round {batch.version} are not there: {error!r}"))], []
        data = iter(found)
        segments = (
            segment if key is None else replace(segment, data=next(data))
            for segment, key in zip(batch.segments, keys, strict=True)
        )
        whole = replace(batch, segments=tuple(segments))
        return self._do(lambda: self._executor.train(whole))

    def publish(self, version: int) -> Outcome:
        """Put the weights where collectors can fetch them."""
        return self._do(lambda: self._executor.publish(version))

    def snapshot(self) -> Outcome:
        """Copy everything the learner is."""
        return self._do(self._executor.snapshot)

    def freeze(self, version: int) -> Outcome:
        """Put weights of this version where an evaluator can fetch them."""
        return self._do(
            lambda: self._executor.send_weights(lambda weights: self._put_weights(version, weights))
        )

    def _do(self, job: Callable[[], None]) -> Outcome:
        try:
            job()
        except Exception:
            self._events.append(Broken(TrainError(f"the learner raised:\n{traceback.format_exc().rstrip()}")))
        events, references = list(map(_portable, self._events)), self._references
        self._events.clear()
        self._references = []
        return events, references


def _put(version: int, weights: Any) -> tuple[Any, int]:
    """Return weights as they are to travel, and their size."""
    packed = PackedWeights.pack(version, weights)
    num_bytes = packed.data.nbytes
    return (packed if num_bytes <= _SMALL_BYTES else ray.put(packed)), num_bytes


def _portable(event: Event) -> Event:
    """An event that can travel: without the batch, which the driver has, and an error as text if need be."""
    if isinstance(event, RoundTrained):
        return replace(event, batch=Batch(0, (), 0))
    if isinstance(event, Broken):
        try:
            pickle.loads(pickle.dumps(event.error))
        except Exception:
            return Broken(TrainError(str(event.error)))
    return event


# ---------------------------------------------------------------- evaluating


class EvaluatorActor(Actor):
    """Evaluates frozen weights, in a process that the learner does not depend on."""

    _weights: WeightsReader
    _evaluator: LazyEvaluator

    def make(self, payload: Assignment[Evaluator]) -> None:
        """Be ready to make the evaluator."""
        self._weights = WeightsReader(payload)
        self._evaluator = LazyEvaluator(payload)

    def evaluate(self, version: int, seed: int, sent: Sequence[Any]) -> EvalDone:
        """Evaluate once; what goes wrong is part of the answer."""
        try:
            _, weights = self._weights.get(version, sent)
        except SyncTimeout as error:
            return EvalDone(version, None, 0.0, str(error))
        return self._evaluator.run(weights, version, seed)
