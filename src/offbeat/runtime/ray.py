"""Collectors, learner and evaluator as Ray actors, on one machine or many.

The driver asks and never waits: each answer comes with what to do about it, and `wait` does that in the
driver's own thread. A segment's data goes from its collector to the learner's node; the driver sees only
what describes it. A segment has arrived when it is safe there.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from offbeat.errors import ConfigError, LearnerLost, OffbeatError, TrainError
from offbeat.pacing.events import (
    Broken,
    EvalDone,
    Event,
    HealthChanged,
    LearnerDown,
    RoundTrained,
    SnapshotTaken,
)

try:
    import ray
except ImportError:
    raise ConfigError('runtime.kind=ray needs Ray: pip install "offbeat[ray]"') from None

from offbeat.runtime.copies import Copies
from offbeat.runtime.messages import Accept, Begun, CutTickets
from offbeat.runtime.ray_actors import (
    Actor,
    CollectorActor,
    EvaluatorActor,
    LearnerActor,
    ProcessEnv,
    SegmentStoreActor,
    Sign,
    Started,
)
from offbeat.runtime.ray_cluster import (
    LIFE,
    STACK_WAIT_S,
    Cluster,
    is_reachable,
    kill_actor,
    make_actor,
)
from offbeat.runtime.ray_collecting import CollectorActors, Handler
from offbeat.runtime.ray_placement import Placement, another_placement, cpus_of, place, requests_of
from offbeat.runtime.ray_refs import (
    ActorRef,
    RemoteSegmentData,
    how_it_ended,
)
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.runtime.supervision import Pulse, process_state
from offbeat.types import Batch, Piece, StateTree, Ticket

_RANK_WAITS = 3  # for the ranks to be there, to meet, and to make the learner
_CLOSE_TIMEOUT_S = 5.0
_SUSPENDED_S = 2.0
_LOOK_EVERY_S = 0.25


class RayRuntime:
    """All roles in Ray actors; the coordinator in the calling process."""

    replaces_collectors = True
    takes_turns = False

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._answers: queue.SimpleQueue[tuple[Handler, Future[Any]]] = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._actors: list[ActorRef] = []
        self._collectors = CollectorActors(self._events, self._then, self._end, self._store_down)
        self._jobs: deque[tuple[str, tuple[Any, ...], Callable[[list[Any]], None]]] = deque()
        self._is_busy = False
        self._report_of_learner = ""
        self._training = Batch(0, (), 0)
        self._evaluator: ActorRef | None = None
        self._evaluating: int | None = None
        self._looked_s = time.monotonic()
        self._placements: dict[str, Placement] = {}
        self._node_id = ""
        self._spec: RunSpec
        self._learner: ActorRef
        self._store: ActorRef | None = None
        self._copies = Copies()

    # ------------------------------------------------------------ starting and ending

    def start(
        self, spec: RunSpec, collectors: Mapping[int, CollectorState], learner_state: StateTree | None
    ) -> None:
        """Find room for everything, start it, and wait for the learner."""
        self._spec = spec
        requests = requests_of(spec)
        self._cluster.open(spec.settings.runtime.ray, cpus_of(requests))
        self._node_id = ray.get_runtime_context().get_node_id()
        self._placements = place(requests, self._cluster.nodes(), spec)
        ranks = [where for name, where in self._placements.items() if name.startswith("learner_rank_")]
        payload = (spec, learner_state, ranks)
        self._learner = self._make("learner", LearnerActor, "learner", payload)
        self._report(self._learner, "starting")
        if spec.settings.learner.num_ranks > 1:
            self._then(self._learner.ask("ping", group=LIFE), partial(self._wait_for_ranks, self._learner))
        if spec.mode == "replay":
            self._store = self._make("store", SegmentStoreActor, "store", None)
            self._report(self._store, "starting")
        self._collectors.keep_with(self._store or self._learner, spec.sync_timeout_s, self._node_id)
        for collector, start in collectors.items():
            self.start_collector(collector, start)
        self._await_learner(lambda: self._learner.is_up)
        if spec.saves:  # a job, since it may take long, such as a warm-up, which `start_timeout_s` is not for
            self._submit("prepare")
            self._await_learner(lambda: not self._is_busy)

    def _make(self, component: str, kind: type[Actor], name: str, payload: Any) -> ActorRef:
        """Make an actor; it reports when its role is made."""
        placement = self._placements[component]
        handle = make_actor(kind, placement, self._env(name, component == "learner"), payload)
        # The driver limits the start of collectors, which it can replace.
        start_timeout_s = math.inf if component.startswith("collector_") else self._spec.start_timeout_s
        actor = ActorRef(name, component, handle, placement, time.monotonic(), start_timeout_s)
        self._actors.append(actor)
        self._then(actor.ask("start"), partial(self._on_start, actor))
        return actor

    def _env(self, name: str, is_learner: bool) -> ProcessEnv:
        spec = self._spec
        threads = (
            spec.settings.runtime.torch_threads if is_learner else spec.settings.runtime.worker_torch_threads
        )
        log: Path | None = None
        if spec.log_dir is not None:
            # The learner's own log is written by the driver: this one has what its process prints.
            log = spec.log_dir.absolute() / f"{'learner_output' if is_learner else name}.log"
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        return ProcessEnv(
            path, threads, spec.settings.runtime.worker_torch_threads, self._node_id, os.getcwd(), log
        )

    def _wait_for_ranks(self, actor: ActorRef, future: Future[Any]) -> None:
        """The learner's process is there: from now on it is the one to say which rank does not start."""
        if future.exception() is None:
            actor.start_timeout_s += _RANK_WAITS * self._spec.start_timeout_s

    def _await_learner(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._listen(_LOOK_EVERY_S)
            for event in self._events:
                if isinstance(event, Broken):
                    raise event.error
                if isinstance(event, LearnerDown):
                    raise LearnerLost(f"the learner was lost while starting: {event.reason}")

    def start_collector(self, collector: int, start: CollectorState) -> None:
        """Make a collector's actor, on the same node as the one before if that is still there."""
        if (before := self._collectors.by_index.pop(collector, None)) is not None:
            self._end(before.actor)
        component = f"collector_{collector}"
        placement = self._placements.get(component) or self._place_joining(component)
        if placement.node.id != self._node_id and not is_reachable(placement.node):
            taken = [actor.placement for actor in self._actors]
            self._placements[component] = another_placement(placement, taken, self._cluster.nodes())
        payload = self._spec.collector(collector, start)
        self._collectors.add(collector, self._make(component, CollectorActor, f"worker_{collector}", payload))

    def _place_joining(self, component: str) -> Placement:
        """Find a place like the others' for a collector that joins.

        A Ray of the run's own has as many processors as its first actors ask for: it asks for none there.
        """
        like = next(where for name, where in self._placements.items() if name.startswith("collector_"))
        if self._cluster.is_started:
            like = Placement(like.node, {**like.resources, "CPU": 0.0})
        taken = [actor.placement for actor in self._actors]
        self._placements[component] = another_placement(like, taken, self._cluster.nodes())
        return self._placements[component]

    def kill_collector(self, collector: int, reason: str) -> None:
        """Kill a collector that hangs, with its stack in the report."""
        if (found := self._collectors.by_index.get(collector)) is None:
            return  # it died: its `CollectorDown` is on the way
        if not found.actor.is_up:
            self._collectors.down(found, f"{found.actor} {reason}: {_room_for(found.actor)}")
            return
        stack = self._stacks([found.actor])[found.actor.component]
        self._collectors.down(found, f"{found.actor} {reason}, it was here:\n{stack}")

    @property
    def progress(self) -> Mapping[str, str]:
        """The learner's newest report, as of its last sign of life."""
        return {"learner": self._report_of_learner}

    def close(self, at_once: bool = False) -> None:
        """End all actors, and the Ray that was started for them."""
        actors, self._actors = self._actors, []
        for actor in actors:
            kill_actor(actor.handle)
        self._collectors.clear()
        self._jobs.clear()
        here = [actor for actor in actors if actor.node_id == self._node_id]
        processes = []
        for pid in (pid for actor in here for pid in (actor.pid, *actor.pids.values())):
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(pid))
        psutil.wait_procs(processes, timeout=_CLOSE_TIMEOUT_S)
        self._cluster.close()

    def stacks(self) -> dict[str, str]:
        """Return the stack that each actor reports."""
        return self._stacks(self._actors)

    def _stacks(self, actors: Sequence[ActorRef]) -> dict[str, str]:
        asked = {actor.component: actor.ask("stack", group=LIFE) for actor in actors if actor.is_up}
        requested_s = time.monotonic()
        stacks = {actor.component: "(it has not started)" for actor in actors}
        for component, reference in asked.items():
            limit_s = self._stack_wait_s(component)
            left_s = max(0.0, requested_s + limit_s - time.monotonic())
            try:
                stacks[component] = ray.get(reference, timeout=left_s)
            except ray.exceptions.RayError:
                stacks[component] = f"(it did not answer in {limit_s:g} s)"
        return stacks

    def _stack_wait_s(self, component: str) -> float:
        """The learner asks its other ranks, one after the other, and waits for each as long."""
        return STACK_WAIT_S * (self._spec.settings.learner.num_ranks if component == "learner" else 1)

    def pids(self) -> dict[str, int]:
        """The actors on this machine."""
        here = [actor for actor in self._actors if actor.pid and actor.node_id == self._node_id]
        ranks = {name: pid for actor in here for name, pid in actor.pids.items()}
        return {actor.name: actor.pid for actor in here} | ranks

    # ------------------------------------------------------------ collecting

    def end_collector(self, index: int) -> None:
        """End a collector that holds no ticket."""
        if (found := self._collectors.by_index.pop(index, None)) is not None:
            self._end(found.actor)

    def collect(self, ticket: Ticket, begun: Begun | None = None, script: tuple[Piece, ...] = ()) -> None:
        """Line the ticket up for its collector."""
        self._collectors.tell(ticket.collector, Accept(ticket, begun, script))

    def cut(self, tickets: Sequence[Ticket]) -> None:
        """Tell the collectors, behind what they were told before."""
        for index in {ticket.collector for ticket in tickets}:
            held = tuple(ticket.number for ticket in tickets if ticket.collector == index)
            self._collectors.tell(index, CutTickets(held))

    def ask_work(self) -> Sequence[int]:
        """Ask the wide collectors; each answers between two pieces of work, once if asked twice before."""
        return self._collectors.ask_work()

    def working_s(self, index: int) -> float | None:
        """Return how long the piece of work at hand lasts, by the last sign of life; silence counts, too."""
        collector = self._collectors.by_index.get(index)
        return None if collector is None else collector.actor.working_s(time.monotonic())

    def release(self, tickets: Sequence[int]) -> None:
        """The segments of these tickets are no longer needed."""
        self._collectors.release(tickets)

    # ------------------------------------------------------------ learning

    def train(self, batch: Batch) -> None:
        """Train on what is kept beside the learner; small data and that of a resumed run travels along."""
        keys = [s.data.key if isinstance(s.data, RemoteSegmentData) else None for s in batch.segments]
        segments = (
            segment if key is None else replace(segment, data=None)
            for segment, key in zip(batch.segments, keys, strict=True)
        )
        store = self._store.handle if self._store is not None else None
        self._training = batch
        self._submit("train", replace(batch, segments=tuple(segments)), keys, store)

    def publish(self, version: int) -> None:
        """Put the weights into the object store when the learner comes to it."""
        self._submit("publish", version, then=partial(self._collectors.publish, version))

    def snapshot(self) -> None:
        """Copy the learner when it comes to it."""
        self._submit("snapshot")

    def _submit(
        self, method: str, *args: Any, then: Callable[[list[Any]], None] = lambda references: None
    ) -> None:
        """Line a job up for the learner, which has one at a time."""
        self._jobs.append((method, args, then))
        self._send_job()

    def _send_job(self) -> None:
        if self._is_busy or not self._jobs or self._learner.is_gone:
            return
        method, args, then = self._jobs.popleft()
        self._is_busy = True
        self._then(self._learner.ask(method, *args), partial(self._on_learner, then))

    def _on_learner(self, then: Callable[[list[Any]], None], future: Future[Any]) -> None:
        if self._learner.is_gone:
            return
        self._is_busy = False
        error = future.exception()
        if isinstance(error, ray.exceptions.RayTaskError):  # what it made cannot be sent
            self._events.append(Broken(TrainError(f"the learner raised:\n{error}")))
        elif error is not None:
            self._store_down(self._learner, how_it_ended(self._learner, error))
        else:
            events, references = future.result()
            then(references)
            self._events.extend(map(self._as_seen_here, events))
        self._send_job()

    def _as_seen_here(self, event: Event) -> Event:
        """The event with this machine's clock, the whole batch, and copies of what lies in Ray's memory."""
        match event:
            case RoundTrained():
                now_s = time.perf_counter()
                started_s = now_s - (event.ended_s - event.started_s)
                return replace(event, batch=self._training, started_s=started_s, ended_s=now_s)
            case SnapshotTaken():
                return event._replace(**self._copies.copy({"state": event.state, "weights": event.weights}))
            case _:
                return event

    def _store_down(self, actor: ActorRef, reason: str) -> None:
        """The learner is gone, or what it was to train on: either way the run goes back to a checkpoint."""
        self._end(actor)
        if actor is not self._learner:
            self._report(actor, "down", reason)
        self._events.append(LearnerDown(reason))

    # ------------------------------------------------------------ evaluating

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate a frozen copy of the weights, in an actor of its own."""
        if "evaluator" not in self._placements:
            reason = "Ray has no room for an evaluator: lower runtime.ray.evaluator_resources or add a node"
            self._events.append(EvalDone(version, None, 0.0, reason))
            return
        if self._evaluator is None:
            self._evaluator = self._make("evaluator", EvaluatorActor, "evaluator", self._spec.evaluator())
            self._report(self._evaluator, "starting")
        self._evaluating = version
        self._submit("freeze", version, then=partial(self._send_evaluation, self._evaluator, version, seed))

    def _send_evaluation(self, actor: ActorRef, version: int, seed: int, references: list[Any]) -> None:
        if not actor.is_gone and references:
            asked = actor.ask("evaluate", version, seed, references)
            self._then(asked, partial(self._on_evaluator, actor))

    def _on_evaluator(self, actor: ActorRef, future: Future[Any]) -> None:
        if actor.is_gone:
            return
        if (error := future.exception()) is not None:
            self._evaluator_down(actor, how_it_ended(actor, error))
        else:
            self._evaluating = None
            self._events.append(future.result())

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """Kill the evaluator with its stack in the report; the next evaluation gets a new one."""
        if self._evaluator is None:
            self._events.append(EvalDone(version, None, 0.0, reason))
            return
        stack = self._stacks([self._evaluator])["evaluator"]
        self._evaluator_down(self._evaluator, f"{reason}, it was here:\n{stack}")

    def _evaluator_down(self, actor: ActorRef, reason: str) -> None:
        """An evaluator that dies costs one evaluation; the next one gets a new actor."""
        self._end(actor)
        self._evaluator = None
        self._report(actor, "down", reason)
        if self._evaluating is not None:
            self._events.append(EvalDone(self._evaluating, None, 0.0, reason))
            self._evaluating = None

    # ------------------------------------------------------------ what happens

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for answers, and look after the actors meanwhile."""
        give_up_s = time.monotonic() + max(0.0, timeout_s)
        while True:
            left_s = 0.0 if self._events else give_up_s - time.monotonic()
            self._listen(min(max(0.0, left_s), _LOOK_EVERY_S))
            if self._events or left_s <= 0:
                return [self._events.popleft() for _ in range(len(self._events))]

    def _listen(self, timeout_s: float) -> None:
        """Deal with all answers that are there, waiting a little for the first."""
        with contextlib.suppress(queue.Empty):
            handler, future = (
                self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get_nowait()
            )
            while True:
                handler(future)
                handler, future = self._answers.get_nowait()
        self._check_actors()

    def _then(self, reference: Any, handler: Handler) -> None:
        """Deal with an answer in the driver's thread, once it is there."""
        reference.future().add_done_callback(lambda future: self._answers.put((handler, future)))

    def _report(self, actor: ActorRef, state: Any, detail: str = "") -> None:
        self._events.append(HealthChanged(actor.component, state, detail))

    def _on_start(self, actor: ActorRef, future: Future[Any]) -> None:
        if actor.is_gone:
            return
        if (error := future.exception()) is not None:
            self._down(actor, how_it_ended(actor, error))
            return
        started: Started = future.result()
        actor.pid, actor.node_id, actor.pids = started.pid, started.node_id, started.pids
        if started.error is not None:
            text = f"{actor.component.replace('_', ' ')} raised while starting:\n{started.error}"
            self._down(actor, text, started.error)
            return
        actor.is_up, actor.capacity, actor.is_wide = True, started.capacity, started.is_wide
        timeout_s = self._spec.settings.runtime.heartbeat_timeout_s or math.inf
        actor.pulse = Pulse(timeout_s, time.monotonic())
        actor.answered_s = time.monotonic()
        if actor.component.startswith("collector"):
            self._events.append(self._collectors.up(actor))
        else:
            self._report(actor, "up")

    def _down(self, actor: ActorRef, reason: str, raised: OffbeatError | str | None = None) -> None:
        """Report that an actor of any role is gone, or what it ``raised`` while starting."""
        of_actor = (collector for collector in self._collectors.by_index.values() if collector.actor is actor)
        if actor is self._evaluator:
            self._evaluator_down(actor, reason)
        elif (collector := next(of_actor, None)) is not None:
            self._collectors.down(collector, reason, raised=raised is not None)
        elif raised is not None:
            self._events.append(Broken(raised if isinstance(raised, OffbeatError) else TrainError(reason)))
        elif actor is self._learner or actor is self._store:
            self._store_down(actor, reason)

    def _end(self, actor: ActorRef) -> None:
        actor.is_gone = True
        if actor in self._actors:
            self._actors.remove(actor)
        kill_actor(actor.handle)

    # ------------------------------------------------------------ signs of life

    def _check_actors(self) -> None:
        """Ask each actor for a sign of life, and end those that give none or do not come up."""
        now_s = time.monotonic()
        passed_s = now_s - self._looked_s
        if passed_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        for actor in list(self._actors):
            if actor.is_up:
                self._check_heartbeat(actor, now_s)
                continue
            if passed_s > _SUSPENDED_S:  # extend the deadline by the time this process was suspended
                actor.started_s += passed_s
            if now_s - actor.started_s > actor.start_timeout_s:
                self._did_not_start(actor)

    def _check_heartbeat(self, actor: ActorRef, now_s: float) -> None:
        timing = self._spec.settings.runtime
        timeout_s = timing.heartbeat_timeout_s or math.inf
        interval_s = min(timing.heartbeat_interval_s, timeout_s / 4)
        if not actor.is_polled and now_s - actor.polled_at_s >= interval_s:
            actor.is_polled, actor.polled_at_s = True, now_s
            self._then(actor.ask("ping", group=LIFE), partial(self._on_ping, actor))
        is_here = actor.node_id == self._node_id
        cpu_s, state = (process_state(actor.pid) if is_here else None) or (0.0, "")
        assert actor.pulse is not None
        if actor.pulse.is_dead(actor.num_pings, cpu_s, now_s, state == psutil.STATUS_STOPPED):
            text = f"{actor} gives no sign of life (runtime.heartbeat_timeout_s is {timeout_s:g})"
            self._report(actor, "unresponsive", text)
            self._down(actor, f"{text} and was killed")

    def _on_ping(self, actor: ActorRef, future: Future[Any]) -> None:
        actor.is_polled, actor.answered_s = False, time.monotonic()
        actor.num_pings += 1
        if (error := future.exception()) is None:
            sign: Sign = future.result()
            actor.worked_s = sign.working_s
            if actor is self._learner:
                self._report_of_learner = sign.progress
        elif not actor.is_gone:
            self._down(actor, how_it_ended(actor, error))

    def _did_not_start(self, actor: ActorRef) -> None:
        waits = round(actor.start_timeout_s / self._spec.start_timeout_s)
        times = f"{waits} times " if waits > 1 else ""
        text = f"{actor} did not start within {actor.start_timeout_s:g} s ({times}runtime.start_timeout_s)"
        text, is_free = f"{text}: {_room_for(actor)}", _has_room(actor)
        if actor is self._learner:
            self._end(actor)
            advice = (
                "The machine is slow: allow it more time" if is_free else "Free some, or allow it more time"
            )
            self._events.append(Broken(ConfigError(f"{text}. {advice}")))
        else:
            self._down(actor, text)


def _room_for(actor: ActorRef) -> str:
    """The resources that an actor waits for, and those that are free."""
    free = ray.available_resources()
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in actor.placement.resources.items())
    has = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in actor.placement.resources)
    return f"it asks for {wanted}; free in Ray: {has}"


def _has_room(actor: ActorRef) -> bool:
    free = ray.available_resources()
    return all(free.get(name, 0.0) >= amount for name, amount in actor.placement.resources.items())
