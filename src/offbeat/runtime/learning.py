"""The learner's side of every runtime: train, publish and snapshot, one job after the other."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

from offbeat.errors import OffbeatError, TrainError
from offbeat.pacing.events import (
    Broken,
    Checksum,
    EvalDone,
    Event,
    HealthChanged,
    LearnerStateless,
    Notice,
    Published,
    PublishFailed,
    RoundTrained,
    SnapshotTaken,
)
from offbeat.roles import Evaluator, Learner, published, state_of
from offbeat.runtime.base import ManyRanks, Post, close_learner, describe, keep_progress, thread_stacks
from offbeat.runtime.checksum import weights_checksum
from offbeat.runtime.copies import CONTAINERS, Copies
from offbeat.runtime.spec import Assignment, RunSpec
from offbeat.types import Batch, Part, StateTree, parts_of

_UNKNOWN = (
    "weights() of this learner returns a {}, which has no checksum, so nobody can tell if training changes "
    "published weights: see to it that weights() returns a copy, or return a dict of arrays or tensors"
)


class LearnerExecutor:
    """Carries out the learner's jobs and posts what came of them. Not thread-safe: one caller.

    ``send_weights`` returns the number of bytes that it copied. ``by_reference``: collectors get the very
    objects that the learner publishes. ``copies`` keeps the memory of snapshots, of which one at a time is in
    use; None: each has its own. ``progress`` holds its newest report.
    """

    def __init__(
        self,
        learner: Learner,
        send_weights: Callable[[int, Any], int],
        post: Post,
        *,
        by_reference: bool = False,
        copies: Copies | None = None,
    ):
        self._copies = copies
        self.progress: dict[str, str] = {}
        self._by_reference = by_reference
        self._degree = 0
        self._published: Published | None = None
        self._weights: Any = None
        self._part_sums: dict[str, tuple[int, int | None]] = {}
        self._has_warned = False
        self._learner = learner
        self._send_weights = send_weights
        self._post = post
        for rank in self._ranks.pids() if self._ranks is not None else ():
            post(HealthChanged(rank, "up"))

    @property
    def _ranks(self) -> ManyRanks | None:
        return self._learner if isinstance(self._learner, ManyRanks) else None

    def train(self, batch: Batch) -> None:
        """Train one round."""
        started_s = perf_counter()
        self._degree = batch.off_policy_degree
        try:
            with keep_progress(self.progress, "learner"):
                metrics = self._learner.train(batch)
        except OffbeatError as error:
            if self._ranks is not None:
                for rank, reason in self._ranks.lost.items():
                    self._post(HealthChanged(rank, "down", reason))
            self._post(Broken(error))
        except Exception:
            self._post(Broken(TrainError(f"the learner raised in round {batch.version}:\n{_trace()}")))
        else:
            self._post(RoundTrained(batch.version + 1, batch, dict(metrics or {}), started_s, perf_counter()))

    def publish(self, version: int) -> None:
        """Hand the weights to the collectors."""
        started_s = perf_counter()
        if alias := self._alias():
            self._post(Broken(alias))
            return
        try:
            with keep_progress(self.progress, "learner"):
                weights = on_cpu(published(self._learner))
            num_bytes = self._send_weights(version, weights)
        except Exception:
            self._post(PublishFailed(version, _trace()))
        else:
            checksum = Checksum()
            event = Published(version, perf_counter() - started_s, checksum, num_bytes)
            if self._by_reference:
                self._published, self._weights = event, weights
            self._post(event)
            # It takes as long as sending: nobody waits for it.
            checksum.set_result(weights_checksum(weights, self._part_sums))

    def _alias(self) -> OffbeatError | None:
        """Return an error when training changed the published weights: collectors then acted on newer ones.

        At k = 0 nobody collects while the learner trains, so there it does no harm.
        """
        before = self._published
        if before is None or before.checksum is None or self._degree == 0:
            return None
        checksum = before.checksum.result()
        if checksum is None and not self._has_warned:
            self._has_warned = True
            self._post(Notice(_UNKNOWN.format(type(self._weights).__qualname__), is_warning=True))
        if weights_checksum(self._weights) == checksum:
            return None
        return OffbeatError(
            f"the learner changed the weights of version {before.version} after it had published them, so "
            "collectors acted on newer ones than their tickets say. weights() must return a copy: "
            "{name: value.copy() for ...}, of torch tensors {name: value.detach().clone() for ...}"
        )

    def prepare(self) -> None:
        """Copy the learner once before it trains, when no round waits for fresh memory.

        Posts that there is nothing to save, where that is so.
        """
        with (
            keep_progress(self.progress, "learner"),
            contextlib.suppress(Exception),  # a snapshot says what is wrong, with its state or its weights
        ):
            state = state_of(self._learner)
            if state is None:
                self._post(LearnerStateless())
            elif self._copies is not None:
                self._copies.copy((state, self._whole_weights()))

    def snapshot(self) -> None:
        """Copy everything the learner is, at this point of the training."""
        started_s = perf_counter()
        try:
            live = state_of(self._learner), self._whole_weights()
            state, weights = (self._copies or Copies()).copy(live)
        except Exception:
            self._post(Broken(TrainError(f"the learner could not give its state:\n{_trace()}")))
        else:
            self._post(SnapshotTaken(state, weights, perf_counter() - started_s))

    def send_weights(self, send: Callable[[Any], object]) -> None:
        """Pass a snapshot of the weights to ``send``, at this point of the training."""
        send(on_cpu(self._whole_weights(), copy=True))

    def _whole_weights(self) -> Any:
        """Return the weights; of parts the data."""
        weights = self._learner.weights()
        parts = parts_of(weights)
        return weights if parts is None else {name: part.data for name, part in parts.items()}

    def pids(self) -> dict[str, int]:
        """Processes of the learner on this machine, beside the calling one."""
        pids = self._ranks.pids() if self._ranks is not None else {}
        return {rank: pid for rank, pid in pids.items() if pid is not None}

    def stacks(self) -> dict[str, str]:
        """Return the stacks of the learner's other processes; from any thread."""
        return self._ranks.stacks() if self._ranks is not None else {}

    def close(self) -> None:
        """End the learner's other processes; from any thread, when no job is left to do."""
        close_learner(self._learner)


class LazyEvaluator:
    """An evaluator made when it is first needed: one that cannot be made costs evaluations, not the run."""

    def __init__(self, assignment: Assignment[Evaluator]) -> None:
        self._assignment = assignment
        self._evaluator: Evaluator | None = None

    def run(self, weights: Any, version: int, seed: int) -> EvalDone:
        """Evaluate; whatever goes wrong is reported and never stops training."""
        started_s = perf_counter()
        try:
            if self._evaluator is None:
                self._evaluator = self._assignment.role.make(self._assignment.context)
            metrics = self._evaluator.evaluate(weights, seed)
        except Exception as error:
            return EvalDone(version, None, perf_counter() - started_s, describe(error))
        return EvalDone(version, dict(metrics), perf_counter() - started_s)


class JobThread:
    """A thread that runs jobs in order. A job that raises is posted as `Broken`."""

    def __init__(self, name: str, post: Post) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._post = post
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Put a job at the end of the line."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Finish the job at hand, forget the others and end."""
        self._closing = True
        self._jobs.put(None)

    def close(self, timeout_s: float) -> bool:
        """Finish the job at hand and drop the others; return True if the thread ended in time."""
        self.stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def drain(self, timeout_s: float) -> bool:
        """Wait for all jobs in the line; return True if they were done in time."""
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(timeout_s)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing:
            try:
                job()
            except OffbeatError as error:
                self._post(Broken(error))
            except BaseException:
                self._post(Broken(OffbeatError(f"{threading.current_thread().name} raised:\n{_trace()}")))


class LocalRuntime(ABC):
    """Base of the runtimes whose learner lives in the driver's process."""

    replaces_collectors = True
    takes_turns = False

    _shares_weights = True
    """Collectors get the weights by reference."""

    def __init__(self) -> None:
        self._published: tuple[int, Any] = (-1, None)
        self._eval_progress: dict[str, str] = {}
        self._collect_progress: dict[str, str] = {}
        self._learner_thread: JobThread | None = None
        """Does the learner's jobs; None: they are done at once."""
        self._spec: RunSpec
        self._executor: LearnerExecutor

    @abstractmethod
    def _post(self, event: Event) -> None:
        """Report an event, from any thread."""

    def _make_learner(self, state: StateTree | None) -> None:
        self._executor = LearnerExecutor(
            self._spec.make_learner(state),
            self._send_weights,
            self._post,
            by_reference=self._shares_weights,
            copies=Copies() if self._spec.saves else None,
        )
        if self._spec.saves:
            self._executor.prepare()
        self._post(HealthChanged("learner", "up"))

    def _send_weights(self, version: int, weights: Any) -> int:
        self._published = (version, weights)  # one assignment: readers see the old pair or the new one
        return 0

    def _newest(self, at_least: int) -> tuple[int, Any]:
        return self._published

    def _do(self, job: Callable[[], None]) -> None:
        if self._learner_thread is None:
            job()
        else:
            self._learner_thread.submit(job)

    def train(self, batch: Batch) -> None:
        """Train when the learner comes to it."""
        self._do(partial(self._executor.train, batch))

    def publish(self, version: int) -> None:
        """Publish when the learner comes to it."""
        self._do(partial(self._executor.publish, version))

    def snapshot(self) -> None:
        """Copy the learner when it comes to it."""
        self._do(self._executor.snapshot)

    def stacks(self) -> dict[str, str]:
        """Return the stack of each thread of this process and of the learner's other ranks."""
        return thread_stacks() | self._executor.stacks()

    def pids(self) -> dict[str, int]:
        """The learner's other ranks, if it has any."""
        return self._executor.pids()

    @property
    def progress(self) -> Mapping[str, str]:
        """Newest reports of the learner, the evaluator and the collectors."""
        of_learner = self._executor.progress if hasattr(self, "_executor") else {}
        return of_learner | self._eval_progress | self._collect_progress


def on_cpu(tree: Any, *, copy: bool = False) -> Any:
    """Return the tree with every torch tensor on the CPU: who gets them may have no GPU.

    ``copy``: it shares no memory with the learner's, which trains on in place.
    """
    if copy:
        return Copies().copy(tree)
    torch: Any = sys.modules.get("torch")
    return tree if torch is None else _on_cpu(tree, torch)


def _on_cpu(value: Any, torch: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu")
    if type(value) in CONTAINERS:
        return type(value)({name: _on_cpu(item, torch) for name, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(item, torch) for item in value)
    if isinstance(value, Part):
        return Part(value.version, _on_cpu(value.data, torch))
    return value


def _trace() -> str:
    return traceback.format_exc().rstrip()
