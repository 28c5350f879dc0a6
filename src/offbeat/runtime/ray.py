"""Collectors, learner and evaluator as Ray actors, on one machine or many.

The driver asks and never waits: each answer comes with what to do about it, and `wait` does that in the
driver's own thread. A segment's data goes from its collector to the learner's node; the driver sees only
what describes it. A segment has arrived when it is safe there.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import pickle
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from offbeat.errors import ConfigError, LearnerLost, OffbeatError, TrainError
from offbeat.runtime.base import (
    Broken,
    CollectorDown,
    CollectorUp,
    EvalEnded,
    Happening,
    HealthChanged,
    LaneStart,
    LearnerDown,
    Plan,
    RoundDone,
    SegmentReady,
    SnapshotTaken,
)
from offbeat.runtime.ray_actors import (
    Actor,
    CollectorActor,
    EvaluatorActor,
    LearnerActor,
    Started,
    StoreActor,
    Surroundings,
)
from offbeat.runtime.ray_cluster import (
    CARRY,
    LIFE,
    STACK_WAIT_S,
    STORE,
    Cluster,
    is_reachable,
    kill_actor,
    make_actor,
)
from offbeat.runtime.ray_import import ray
from offbeat.runtime.ray_parts import Arrival, Evaluation, HeldData, Lane, Part, how_it_ended, process_state
from offbeat.runtime.ray_placement import Place, another_place, asks_of, cpus_of, place
from offbeat.runtime.supervision import Pulse
from offbeat.types import Batch, StateTree, Ticket

_TICKETS_AHEAD = 2
_RANK_WAITS = 3  # for the ranks to be there, to meet, and to make the learner
_CLOSE_TIMEOUT_S = 5.0
_AWAY_S = 2.0
_LOOK_EVERY_S = 0.25

Handler = Callable[[Future[Any]], None]


class RayRuntime:
    """All roles in Ray actors; the coordinator in the calling process."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._answers: queue.SimpleQueue[tuple[Handler, Future[Any]]] = queue.SimpleQueue()
        self._happened: deque[Happening] = deque()
        self._parts: list[Part] = []
        self._lanes: dict[int, Lane] = {}
        self._keys = itertools.count()
        self._held: dict[int, int] = {}  # ticket -> key of its segment
        self._published: tuple[int, list[Any]] = (-1, [])
        self._jobs: deque[tuple[str, tuple[Any, ...], Callable[[list[Any]], None]]] = deque()
        self._is_training = False
        self._evaluator: Part | None = None
        self._evaluation: Evaluation | None = None
        self._looked_s = time.monotonic()
        self._places: dict[str, Place] = {}
        self._node_id = ""
        self._plan: Plan
        self._learner: Part
        self._keeper: Part
        self._store: Part | None = None

    # ------------------------------------------------------------ starting and ending

    def start(self, plan: Plan, lanes: Sequence[LaneStart], learner_state: StateTree | None) -> None:
        """Find room for everything, start it, and wait for the learner."""
        self._plan = plan
        asks = asks_of(plan)
        self._cluster.open(plan.machines.runtime.ray, cpus_of(asks))
        self._node_id = ray.get_runtime_context().get_node_id()
        self._places = place(asks, self._cluster.nodes(), plan)
        ranks = [where for name, where in self._places.items() if name.startswith("learner_rank_")]
        payload = (plan, learner_state, ranks)
        self._learner = self._keeper = self._make("learner", LearnerActor, "learner", payload)
        self._report(self._learner, "starting")
        if plan.machines.learner.num_ranks > 1:
            self._then(self._learner.ask("ping", group=LIFE), partial(self._wait_for_ranks, self._learner))
        if plan.mode == "replay":
            self._store = self._keeper = self._make("store", StoreActor, "store", None)
            self._report(self._store, "starting")
        for lane, start in enumerate(lanes):
            self.start_lane(lane, start)
        self._wait_for_learner()

    def _make(self, component: str, kind: type[Actor], name: str, payload: Any) -> Part:
        """Make an actor; it reports when its role is made."""
        where = self._places[component]
        handle = make_actor(kind, where, self._surroundings(name, component == "learner"), payload)
        part = Part(name, component, handle, where, time.monotonic(), self._plan.start_timeout_s)
        self._parts.append(part)
        self._then(part.ask("start"), partial(self._hear_start, part))
        return part

    def _surroundings(self, name: str, is_learner: bool) -> Surroundings:
        plan = self._plan
        threads = plan.machines.runtime.torch_threads if is_learner else plan.worker_threads
        log: Path | None = None
        if plan.log_dir is not None:
            # The learner's own log is written by the driver: this one has what its process prints.
            log = plan.log_dir.absolute() / f"{'learner_output' if is_learner else name}.log"
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        return Surroundings(path, threads, plan.worker_threads, self._node_id, os.getcwd(), log)

    def _wait_for_ranks(self, part: Part, future: Future[Any]) -> None:
        """The learner's process is there: from now on it is the one to say which rank does not start."""
        if future.exception() is None:
            part.patience_s += _RANK_WAITS * self._plan.start_timeout_s

    def _wait_for_learner(self) -> None:
        while not self._learner.is_up:
            self._listen(_LOOK_EVERY_S)
            for happening in self._happened:
                if isinstance(happening, Broken):
                    raise happening.error
                if isinstance(happening, LearnerDown):
                    raise LearnerLost(f"the learner was lost while starting: {happening.reason}")

    def start_lane(self, lane: int, start: LaneStart) -> None:
        """Make a collector's actor, on the same node as the one before if that is still there."""
        self._move_if_gone(f"collector_{lane}")
        part = self._make(f"collector_{lane}", CollectorActor, f"worker_{lane}", self._plan.lane(lane, start))
        self._lanes[lane] = Lane(lane, part)

    def _move_if_gone(self, component: str) -> None:
        where = self._places[component]
        if where.node.id != self._node_id and not is_reachable(where.node):
            taken = [part.place for part in self._parts]
            self._places[component] = another_place(where, taken, self._cluster.nodes())

    def kill_lane(self, lane: int, reason: str) -> None:
        """Kill a collector that hangs, with its stack in the report."""
        if (found := self._lanes.get(lane)) is None:  # it died: its `CollectorDown` is on the way
            return
        stack = self._stacks([found.part])[found.part.component]
        self._lane_down(found, f"{found.part} {reason}, it was here:\n{stack}")

    def close(self) -> None:
        """End all actors, and the Ray that was started for them."""
        parts, self._parts = self._parts, []
        for part in parts:
            kill_actor(part.handle)
        self._lanes.clear()
        self._held.clear()
        self._jobs.clear()
        self._published = (-1, [])
        here = [part for part in parts if part.node_id == self._node_id]
        self._wait_for_ends([pid for part in here for pid in (part.pid, *part.pids.values())])
        self._cluster.close()

    def _wait_for_ends(self, pids: Sequence[int]) -> None:
        processes = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(pid))
        psutil.wait_procs(processes, timeout=_CLOSE_TIMEOUT_S)

    def stacks(self) -> dict[str, str]:
        """Where each actor is, by its own account."""
        return self._stacks(self._parts)

    def _stacks(self, parts: Sequence[Part]) -> dict[str, str]:
        asked = {part.component: part.ask("stack", group=LIFE) for part in parts if part.is_up}
        asked_s = time.monotonic()
        stacks = {part.component: "(it has not started)" for part in parts}
        for component, reference in asked.items():
            limit_s = self._stack_wait_s(component)
            try:
                stacks[component] = ray.get(reference, timeout=max(0.0, asked_s + limit_s - time.monotonic()))
            except ray.exceptions.RayError:
                stacks[component] = f"(it did not answer in {limit_s:g} s)"
        return stacks

    def _stack_wait_s(self, component: str) -> float:
        """The learner asks its other ranks, one after the other, and waits for each as long."""
        return STACK_WAIT_S * (self._plan.machines.learner.num_ranks if component == "learner" else 1)

    def pids(self) -> dict[str, int]:
        """The actors on this machine."""
        here = [part for part in self._parts if part.pid and part.node_id == self._node_id]
        ranks = {name: pid for part in here for name, pid in part.pids.items()}
        return {part.name: part.pid for part in here} | ranks

    # ------------------------------------------------------------ collecting

    def collect(self, ticket: Ticket) -> None:
        """Line the ticket up for its lane."""
        lane = self._lanes.get(ticket.collector)
        if lane is None:  # it died and its `CollectorDown` is on the way: the ticket is lost with it
            return
        lane.waiting.append(ticket)
        self._send_tickets(lane)

    def _send_tickets(self, lane: Lane) -> None:
        """Send tickets with the newest weights, where the actor has not got them yet."""
        while lane.waiting and lane.num_sent < _TICKETS_AHEAD and not lane.part.is_gone:
            ticket = lane.waiting.popleft()
            version, references = self._published
            sent = references if version > lane.weights_version else []
            lane.weights_version = version
            lane.num_sent += 1
            answer, data = lane.part.ask("collect", ticket, sent, num_returns=2)
            self._then(answer, partial(self._hear_collect, lane, ticket, data))

    def _hear_collect(self, lane: Lane, ticket: Ticket, data: Any, future: Future[Any]) -> None:
        if lane.part.is_gone:
            return
        if (error := future.exception()) is not None:
            self._collect_failed(lane, error)
            return
        lane.num_sent -= 1
        match pickle.loads(future.result()):
            case ("segment", segment, state, num_bytes):
                self._hold(lane, Arrival(next(self._keys), segment, state, num_bytes), data)
            case ("lost", reason):
                self._lane_down(lane, f"{lane.part}: {reason}")
            case ("error", text):
                doing = f"in ticket {ticket.number}"
                self._lane_down(lane, f"collector {lane.number} raised {doing}:\n{text}", raised=True)
        self._send_tickets(lane)

    def _collect_failed(self, lane: Lane, error: BaseException) -> None:
        if isinstance(error, ray.exceptions.RayTaskError):  # what it collected cannot be sent
            self._lane_down(lane, f"collector {lane.number} raised:\n{error}", raised=True)
        else:
            self._lane_down(lane, how_it_ended(lane.part, error))

    def _hold(self, lane: Lane, arrival: Arrival, data: Any) -> None:
        """Have the data brought to the learner's node, unless it came along."""
        lane.arriving.append(arrival)
        if arrival.segment.data is not None:
            arrival.is_held = True
            self._report_arrivals(lane)
            return
        held = self._keeper.ask("hold", arrival.key, [data], self._plan.sync_timeout_s, group=CARRY)
        self._then(held, partial(self._hear_hold, lane, arrival))

    def _hear_hold(self, lane: Lane, arrival: Arrival, future: Future[Any]) -> None:
        if self._keeper.is_gone:
            return
        if (error := future.exception()) is not None:
            self._keeper_down(self._keeper, how_it_ended(self._keeper, error))
        elif lane.part.is_gone:  # its ticket was lost with it and is collected again
            self._drop([arrival.key])
        elif (reason := future.result()) is not None:
            self._lane_down(lane, f"{lane.part}: ticket {arrival.segment.ticket.number} was lost: {reason}")
        else:
            arrival.is_held = True
            self._report_arrivals(lane)

    def _report_arrivals(self, lane: Lane) -> None:
        """Segments arrive in the order in which they were collected: each brings its collector's state."""
        while lane.arriving and lane.arriving[0].is_held:
            arrival = lane.arriving.popleft()
            segment = arrival.segment
            if segment.data is None:
                self._held[segment.ticket.number] = arrival.key
                data = HeldData(self._keeper.handle, arrival.key, self._plan.sync_timeout_s)
                segment = replace(segment, data=data)
            self._happened.append(SegmentReady(segment, arrival.state, arrival.num_bytes))

    def release(self, tickets: Sequence[int]) -> None:
        """The segments of these tickets are no longer needed."""
        self._drop([self._held.pop(ticket) for ticket in tickets if ticket in self._held])

    def _drop(self, keys: Sequence[int]) -> None:
        if keys and not self._keeper.is_gone:
            self._keeper.ask("drop", keys, group=STORE, num_returns=0)

    def _lane_down(self, lane: Lane, reason: str, raised: bool = False) -> None:
        self._end(lane.part)
        if self._lanes.get(lane.number) is lane:
            del self._lanes[lane.number]
        self._drop([arrival.key for arrival in lane.arriving if arrival.is_held])
        self._happened.append(CollectorDown(lane.number, reason, raised))

    # ------------------------------------------------------------ learning

    def train(self, batch: Batch) -> None:
        """Train on what is kept beside the learner; small data and that of a resumed run travels along."""
        keys = [s.data.key if isinstance(s.data, HeldData) else None for s in batch.segments]
        segments = (
            segment if key is None else replace(segment, data=None)
            for segment, key in zip(batch.segments, keys, strict=True)
        )
        store = self._store.handle if self._store is not None else None
        self._submit("train", replace(batch, segments=tuple(segments)), keys, store)

    def publish(self, version: int) -> None:
        """Put the weights into the object store when the learner comes to it."""
        self._submit("publish", version, then=partial(self._keep_weights, version))

    def _keep_weights(self, version: int, references: list[Any]) -> None:
        if references:
            self._published = (version, references)

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
        if self._is_training or not self._jobs or self._learner.is_gone:
            return
        method, args, then = self._jobs.popleft()
        self._is_training = True
        self._then(self._learner.ask(method, *args), partial(self._hear_learner, then))

    def _hear_learner(self, then: Callable[[list[Any]], None], future: Future[Any]) -> None:
        if self._learner.is_gone:
            return
        self._is_training = False
        error = future.exception()
        if isinstance(error, ray.exceptions.RayTaskError):  # what it made cannot be sent
            self._happened.append(Broken(TrainError(f"the learner raised:\n{error}")))
        elif error is not None:
            self._keeper_down(self._learner, how_it_ended(self._learner, error))
        else:
            happened, references = future.result()
            then(references)
            self._happened.extend(map(_as_seen_here, happened))
        self._send_job()

    def _keeper_down(self, part: Part, reason: str) -> None:
        """The learner is gone, or what it was to train on: either way the run goes back to a checkpoint."""
        self._end(part)
        if part is not self._learner:
            self._report(part, "down", reason)
        self._happened.append(LearnerDown(reason))

    # ------------------------------------------------------------ evaluating

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate a frozen copy of the weights, in an actor of its own."""
        if "evaluator" not in self._places:
            reason = "Ray has no room for an evaluator: lower runtime.ray.evaluator_resources or add a node"
            self._happened.append(EvalEnded(version, None, 0.0, reason))
            return
        if self._evaluator is None:
            self._evaluator = self._make("evaluator", EvaluatorActor, "evaluator", self._plan.evaluator())
            self._report(self._evaluator, "starting")
        evaluation = self._evaluation = Evaluation(version, self._evaluator)
        self._submit("freeze", version, then=partial(self._send_evaluation, evaluation, seed))

    def _send_evaluation(self, evaluation: Evaluation, seed: int, references: list[Any]) -> None:
        if evaluation is not self._evaluation or not references:  # its evaluator has died since
            return
        asked = evaluation.part.ask("evaluate", evaluation.version, seed, references)
        self._then(asked, partial(self._hear_evaluator, evaluation))

    def _hear_evaluator(self, evaluation: Evaluation, future: Future[Any]) -> None:
        if evaluation.part.is_gone:
            return
        if (error := future.exception()) is not None:
            self._evaluator_down(evaluation.part, how_it_ended(evaluation.part, error))
        else:
            self._evaluation = None
            self._happened.append(future.result())

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """Kill the evaluator with its stack in the report; the next evaluation gets a new one."""
        if self._evaluator is None:
            self._happened.append(EvalEnded(version, None, 0.0, reason))
            return
        stack = self._stacks([self._evaluator])["evaluator"]
        self._evaluator_down(self._evaluator, f"{reason}, it was here:\n{stack}")

    def _evaluator_down(self, part: Part, reason: str) -> None:
        """An evaluator that dies costs one evaluation; the next one gets a new actor."""
        self._end(part)
        self._evaluator = None
        self._report(part, "down", reason)
        if self._evaluation is not None:
            self._happened.append(EvalEnded(self._evaluation.version, None, 0.0, reason))
            self._evaluation = None

    # ------------------------------------------------------------ what happens

    def wait(self, timeout_s: float) -> list[Happening]:
        """Wait for answers, and look after the actors meanwhile."""
        give_up_s = time.monotonic() + max(0.0, timeout_s)
        while True:
            left_s = 0.0 if self._happened else give_up_s - time.monotonic()
            self._listen(min(max(0.0, left_s), _LOOK_EVERY_S))
            if self._happened or left_s <= 0:
                return [self._happened.popleft() for _ in range(len(self._happened))]

    def _listen(self, timeout_s: float) -> None:
        """Deal with all answers that are there, waiting a little for the first."""
        with contextlib.suppress(queue.Empty):
            handler, future = (
                self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get_nowait()
            )
            while True:
                handler(future)
                handler, future = self._answers.get_nowait()
        self._look_after()

    def _then(self, reference: Any, handler: Handler) -> None:
        """Deal with an answer in the driver's thread, once it is there."""
        reference.future().add_done_callback(lambda future: self._answers.put((handler, future)))

    def _report(self, part: Part, state: Any, detail: str = "") -> None:
        self._happened.append(HealthChanged(part.component, state, detail))

    def _hear_start(self, part: Part, future: Future[Any]) -> None:
        if part.is_gone:
            return
        if (error := future.exception()) is not None:
            self._down(part, how_it_ended(part, error))
            return
        started: Started = future.result()
        part.pid, part.node_id, part.pids = started.pid, started.node_id, started.pids
        if started.error is not None:
            self._start_failed(part, started.error)
            return
        part.is_up = True
        timeout_s = self._plan.machines.runtime.heartbeat_timeout_s or math.inf
        part.pulse = Pulse(timeout_s, time.monotonic())
        if part.component.startswith("collector"):
            self._happened.append(CollectorUp(int(part.component.rpartition("_")[2])))
        else:
            self._report(part, "up")

    def _start_failed(self, part: Part, error: OffbeatError | str) -> None:
        text = f"{part.component.replace('_', ' ')} raised while starting:\n{error}"
        if (lane := self._lane_of(part)) is not None:
            self._lane_down(lane, text, raised=True)
        elif part is self._evaluator:
            self._evaluator_down(part, text)
        else:
            self._happened.append(Broken(error if isinstance(error, OffbeatError) else TrainError(text)))

    def _lane_of(self, part: Part) -> Lane | None:
        return next((lane for lane in self._lanes.values() if lane.part is part), None)

    def _down(self, part: Part, reason: str) -> None:
        """Whatever it was: report that it is gone."""
        if part is self._evaluator:
            self._evaluator_down(part, reason)
        elif part is self._learner or part is self._store:
            self._keeper_down(part, reason)
        elif (lane := self._lane_of(part)) is not None:
            self._lane_down(lane, reason)

    def _end(self, part: Part) -> None:
        part.is_gone = True
        if part in self._parts:
            self._parts.remove(part)
        kill_actor(part.handle)

    # ------------------------------------------------------------ signs of life

    def _look_after(self) -> None:
        """Ask each actor for a sign of life, and end those that give none or do not come up."""
        now_s = time.monotonic()
        passed_s = now_s - self._looked_s
        if passed_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        for part in list(self._parts):
            if part.is_up:
                self._feel_pulse(part, now_s)
                continue
            if passed_s > _AWAY_S:  # the driver itself did not run: nobody else is to blame
                part.started_s += passed_s
            if now_s - part.started_s > part.patience_s:
                self._did_not_start(part)

    def _feel_pulse(self, part: Part, now_s: float) -> None:
        timing = self._plan.machines.runtime
        timeout_s = timing.heartbeat_timeout_s or math.inf
        if not part.is_asked and now_s - part.asked_s >= min(timing.heartbeat_interval_s, timeout_s / 4):
            part.is_asked, part.asked_s = True, now_s
            self._then(part.ask("ping", group=LIFE), partial(self._hear_ping, part))
        cpu_s, is_stopped = process_state(part.pid) if part.node_id == self._node_id else (0.0, False)
        assert part.pulse is not None
        if part.pulse.is_dead(part.num_pings, cpu_s, now_s, is_stopped):
            text = f"{part} gives no sign of life (runtime.heartbeat_timeout_s is {timeout_s:g})"
            self._report(part, "unresponsive", text)
            self._down(part, f"{text} and was killed")

    def _hear_ping(self, part: Part, future: Future[Any]) -> None:
        part.is_asked = False
        part.num_pings += 1
        if not part.is_gone and (error := future.exception()) is not None:
            self._down(part, how_it_ended(part, error))

    def _did_not_start(self, part: Part) -> None:
        waits = round(part.patience_s / self._plan.start_timeout_s)
        times = f"{waits} times " if waits > 1 else ""
        limit = f"did not start within {part.patience_s:g} s ({times}runtime.start_timeout_s)"
        wanted = ", ".join(f"{name} {amount:g}" for name, amount in part.place.resources.items())
        free = ray.available_resources()
        has = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in part.place.resources)
        text = f"{part} {limit}: it asks for {wanted}; free in Ray: {has}"
        if part is self._learner:
            self._end(part)
            is_free = all(free.get(name, 0.0) >= amount for name, amount in part.place.resources.items())
            advice = (
                "The machine is slow: allow it more time" if is_free else "Free some, or allow it more time"
            )
            self._happened.append(Broken(ConfigError(f"{text}. {advice}")))
        else:
            self._down(part, text)


def _as_seen_here(happening: Happening) -> Happening:
    """Times by this machine's clock, and copies of what lies in Ray's memory, which ends with it."""
    match happening:
        case RoundDone(version, metrics, started_s, ended_s):
            now_s = time.perf_counter()
            return RoundDone(version, metrics, now_s - (ended_s - started_s), now_s)
        case SnapshotTaken():
            return copy.deepcopy(happening)
        case _:
            return happening
