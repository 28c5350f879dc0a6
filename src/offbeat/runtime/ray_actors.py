"""What lives in Ray's processes: collectors, the learner, the evaluator, and the store of a replay run.

Plain classes: the driver makes actors of them. What goes wrong inside is an answer, not an exception, so
that an exception always means that the actor itself is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from offbeat.errors import OffbeatError, TrainError
from offbeat.roles import Collector, Evaluator
from offbeat.runtime.base import (
    Assignment,
    Broken,
    CollectorRunner,
    EvalEnded,
    Happening,
    LazyEvaluator,
    Plan,
    make_runner,
    thread_stacks,
)
from offbeat.runtime.learning import LearnerDesk
from offbeat.runtime.ray_import import ray
from offbeat.runtime.ray_placement import Place
from offbeat.runtime.shared import checksum, pack_object, unpack_object
from offbeat.runtime.worker import SyncTimeout
from offbeat.types import Array, Batch, RemoteData, Segment, StateTree, Ticket

Outcome = tuple[list[Happening], list[Any]]
"""What happened in a job, and the weights that it made, if it made some, or a reference to them."""
_SMALL_BYTES = 1 << 16
"""What is no larger travels with a message: Ray would carry it that way too, with more questions asked."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_INTERNAL = (f"{os.sep}ray{os.sep}_private{os.sep}", f"{os.sep}concurrent{os.sep}")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an actor's process takes over from the driver's."""

    sys_path: tuple[str, ...]
    num_threads: int
    blas_threads: int
    node_id: str
    directory: str
    log: Path | None

    def take_over(self) -> None:
        """Find the user's modules, keep to the threads asked for, and write to the run's logs."""
        sys.path += [entry for entry in self.sys_path if entry not in sys.path]
        os.environ |= {name: str(self.num_threads) for name in _THREADS}
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


class Actor:
    """What all actors have: a start, a sign of life, and an account of where they are."""

    def __init__(self, surroundings: Surroundings, payload: bytes) -> None:
        self._surroundings = surroundings
        self._payload = payload

    def start(self) -> Started:
        """Make the role and say where it is, or what it raised."""
        error: OffbeatError | str | None = None
        try:
            self._surroundings.take_over()
            self.make(pickle.loads(self._payload))
        except OffbeatError as raised:
            error = raised
        except Exception:
            error = traceback.format_exc().rstrip()
        self._payload = b""
        node_id = ray.get_runtime_context().get_node_id()
        return Started(os.getpid(), node_id, error, self.pids() if error is None else {})

    def pids(self) -> dict[str, int]:
        """Processes on this machine that the role keeps beside this one."""
        return {}

    def make(self, payload: Any) -> None:
        """Make the role from what the driver sent."""
        raise NotImplementedError

    def ping(self) -> None:
        """A sign of life: answered beside whatever the role does."""

    def stack(self) -> str:
        """Where the threads of this process are, but for those of Ray."""
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
        packed.write(data)
        return PackedWeights(version, checksum(data), data)

    def check(self) -> None:
        """Raise `SyncTimeout` when these are not the bytes that were sent."""
        if checksum(self.data) != self.checksum:
            raise SyncTimeout(f"weights of version {self.version} arrived damaged")

    def unpack(self) -> Any:
        """The weights, from a copy of the bytes, which are checked first."""
        self.check()
        return unpack_object(self.data.copy())


class WeightsReader:
    """The newest weights this actor has; others are fetched, with patience."""

    def __init__(self, assignment: Assignment[Any]) -> None:
        self._timeout_s = assignment.sync_timeout_s
        self._retries = assignment.sync_retries
        self._retry_delay_s = assignment.sync_retry_delay_s
        self._have: tuple[int, Any] = (-1, None)

    def get(self, at_least: int, sent: Sequence[Any]) -> tuple[int, Any]:
        """Take what was sent (weights or a reference in a list, empty: nothing new); return the newest."""
        if sent:
            packed = sent[0] if isinstance(sent[0], PackedWeights) else self._fetch(sent[0])
            self._have = (packed.version, packed.unpack())
        if self._have[0] < at_least:
            raise SyncTimeout(f"weights of version {at_least} were not sent, {self._have[0]} is the newest")
        return self._have

    def _fetch(self, reference: Any) -> PackedWeights:
        for attempt in range(1 + self._retries):
            try:
                packed: PackedWeights = ray.get(reference, timeout=self._timeout_s)
                packed.check()
                return packed
            except (ray.exceptions.RayError, SyncTimeout) as error:
                reason = str(error).partition("\n")[0]
                if attempt < self._retries:
                    time.sleep(self._retry_delay_s)
        raise SyncTimeout(f"weights did not arrive in {1 + self._retries} tries: {reason}")


# ---------------------------------------------------------------- collecting


class CollectorActor(Actor):
    """Answers tickets with segments."""

    _runner: CollectorRunner
    _weights: WeightsReader
    _out: dict[str, Array] | None = None

    def make(self, payload: Assignment[Collector]) -> None:
        """Make the collector where it left off."""
        self._weights = WeightsReader(payload)
        self._runner = make_runner(payload)
        if self._runner.specs is not None:
            # One set of arrays for all segments: Ray copies an answer before the next ticket begins.
            self._out = {name: spec.empty() for name, spec in self._runner.specs.items()}

    def collect(self, ticket: Ticket, sent: Sequence[Any]) -> tuple[bytes, Any]:
        """Collect one ticket; the answer is small, and the data beside it stays where it is."""
        try:
            version, weights = self._weights.get(ticket.version, sent)
            out = dict(self._out) if self._out is not None else None
            segment = self._runner.run(replace(ticket, version=version), weights, out)
            state = self._runner.collector.state_dict()
            num_bytes = _num_bytes(segment.data)
            carried = CarriedData.pack(segment.data) if num_bytes <= _SMALL_BYTES else None
            answer = ("segment", replace(segment, data=carried), state, num_bytes)
            return cloudpickle.dumps(answer), None if carried is not None else segment.data
        except SyncTimeout as error:
            return cloudpickle.dumps(("lost", str(error))), None
        except OffbeatError as error:
            return cloudpickle.dumps(("error", str(error))), None
        except Exception:
            return cloudpickle.dumps(("error", traceback.format_exc().rstrip())), None


class CarriedData(RemoteData):
    """Data of a small segment, which travels with what describes it."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    @staticmethod
    def pack(data: Any) -> CarriedData:
        """Make it ready to travel."""
        return CarriedData(bytes(cloudpickle.dumps(data)))

    def fetch(self) -> Any:
        """Unpack it."""
        return pickle.loads(self._packed)


def _num_bytes(data: Any) -> int:
    if isinstance(data, dict) and all(isinstance(value, np.ndarray) for value in data.values()):
        return sum(value.nbytes for value in data.values())
    return pack_object(data).num_bytes


# ---------------------------------------------------------------- keeping


class KeeperActor(Actor):
    """Keeps segments that have arrived, by key, beside its other work: several threads call it."""

    def __init__(self, surroundings: Surroundings, payload: bytes) -> None:
        super().__init__(surroundings, payload)
        self._kept: dict[int, Any] = {}
        self._lock = threading.Lock()

    def hold(self, key: int, references: Sequence[Any], timeout_s: float) -> str | None:
        """Bring a segment's data here and keep it; say why when that does not work."""
        try:
            data = ray.get(references[0], timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            return f"its data did not arrive within {timeout_s:g} s (async_training.sync_timeout)"
        except ray.exceptions.RayError as error:
            return str(error).partition("\n")[0]
        with self._lock:
            self._kept[key] = data
        return None

    def give(self, keys: Sequence[int]) -> list[Any]:
        """The data of these segments."""
        with self._lock:
            return [self._kept[key] for key in keys]

    def drop(self, keys: Sequence[int]) -> None:
        """Forget these segments."""
        with self._lock:
            for key in keys:
                self._kept.pop(key, None)


class StoreActor(KeeperActor):
    """Keeps the segments of a replay run, on the learner's node."""

    def make(self, payload: Any) -> None:
        """There is nothing to make."""


# ---------------------------------------------------------------- learning


class LearnerActor(KeeperActor):
    """Trains, publishes and saves, one job after the other; keeps segments beside that.

    A job answers with what happened, and with a reference to weights where it made some.
    """

    _desk: LearnerDesk

    def make(self, payload: tuple[Plan, StateTree | None, Sequence[Place]]) -> None:
        """Make the learner where it left off, with ranks in other ``places`` when there are any."""
        plan, state, places = payload
        self._sync_timeout_s = plan.sync_timeout_s
        self._happened: list[Happening] = []
        self._references: list[Any] = []
        if places:
            from offbeat.runtime.ray_ranks import RayCrew

            host = ray.util.get_node_ip_address()
            learner = plan.make_learner(state, crew=RayCrew(plan, places, self._surroundings), host=host)
        else:
            learner = plan.make_learner(state)
        self._desk = LearnerDesk(plan, learner, self._put_weights, self._happened.append)

    def pids(self) -> dict[str, int]:
        """The other ranks on this machine."""
        return self._desk.pids()

    def stack(self) -> str:
        """Where this process is, and the other ranks."""
        ranks = "".join(f"\n{name}:\n{stack}" for name, stack in self._desk.stacks().items())
        return super().stack() + ranks

    def _put_weights(self, version: int, weights: Any) -> None:
        packed = PackedWeights.pack(version, weights)
        self._references = [packed if packed.data.nbytes <= _SMALL_BYTES else ray.put(packed)]

    def train(self, batch: Batch, keys: Sequence[int | None], store: Any) -> Outcome:
        """Train one round; ``keys`` are those of segments whose data is kept, here or in the ``store``."""
        kept = [key for key in keys if key is not None]
        try:
            is_here = store is None or not kept
            asked = None if is_here else store.give.remote(kept)
            found = self.give(kept) if is_here else ray.get(asked, timeout=self._sync_timeout_s)
        except (KeyError, ray.exceptions.RayError) as error:
            return [Broken(TrainError(f"segments of round {batch.version} are not there: {error!r}"))], []
        data = iter(found)
        segments = (
            _with_data(segment) if key is None else replace(segment, data=next(data))
            for segment, key in zip(batch.segments, keys, strict=True)
        )
        whole = replace(batch, segments=tuple(segments))
        return self._do(lambda: self._desk.train(whole))

    def publish(self, version: int) -> Outcome:
        """Put the weights where collectors can fetch them."""
        return self._do(lambda: self._desk.publish(version))

    def snapshot(self) -> Outcome:
        """Copy everything the learner is."""
        return self._do(self._desk.snapshot)

    def freeze(self, version: int) -> Outcome:
        """Put weights of this version where an evaluator can fetch them."""
        return self._do(lambda: self._desk.hand_weights(lambda weights: self._put_weights(version, weights)))

    def _do(self, job: Callable[[], None]) -> Outcome:
        try:
            job()
        except Exception:
            self._happened.append(
                Broken(TrainError(f"the learner raised:\n{traceback.format_exc().rstrip()}"))
            )
        happened, references = list(map(_portable, self._happened)), self._references
        self._happened.clear()
        self._references = []
        return happened, references


def _with_data(segment: Segment) -> Segment:
    data = segment.data
    return replace(segment, data=data.fetch()) if isinstance(data, CarriedData) else segment


def _portable(happening: Happening) -> Happening:
    """An error that cannot travel goes as its text."""
    if isinstance(happening, Broken):
        try:
            pickle.loads(pickle.dumps(happening.error))
        except Exception:
            return Broken(TrainError(str(happening.error)))
    return happening


# ---------------------------------------------------------------- evaluating


class EvaluatorActor(Actor):
    """Judges frozen weights, in a process that the learner does not depend on."""

    _weights: WeightsReader
    _evaluator: LazyEvaluator

    def make(self, payload: Assignment[Evaluator]) -> None:
        """Be ready to make the evaluator."""
        self._weights = WeightsReader(payload)
        self._evaluator = LazyEvaluator(payload)

    def evaluate(self, version: int, seed: int, sent: Sequence[Any]) -> EvalEnded:
        """Evaluate once; what goes wrong is part of the answer."""
        try:
            _, weights = self._weights.get(version, sent)
        except SyncTimeout as error:
            return EvalEnded(version, None, 0.0, str(error))
        return self._evaluator.run(weights, version, seed)
