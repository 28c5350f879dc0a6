"""The ranks of a learner on other machines: actors, as rank 0 in its own actor sees them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from offbeat.runtime.base import describe
from offbeat.runtime.ranks import Answer, Follower, Peer, PeerGone, RankAssignment, Request
from offbeat.runtime.ray_actors import Actor, ProcessEnv, Started
from offbeat.runtime.ray_cluster import LIFE, STACK_WAIT_S, cause_of, kill_actor, make_actor
from offbeat.runtime.ray_placement import Placement
from offbeat.runtime.spec import RunSpec


class RankActor(Actor):
    """A rank other than 0: carries out the requests of rank 0, as rank 0 does."""

    _assignment: RankAssignment
    _follower: Follower

    def make(self, payload: RankAssignment) -> None:
        """Be ready to meet the others."""
        self._assignment = payload

    def meet(self) -> Answer:
        """Meet the others and make the learner."""
        try:
            self._follower = Follower(self._assignment)
            return self._follower.up()
        except Exception as error:
            return ("error", "while starting", describe(error))

    def serve(self, references: Sequence[Any]) -> Answer:
        """Carry out one request."""
        try:
            return self._follower.serve(ray.get(references[0]))
        except Exception as error:
            return ("error", "in a request", describe(error))


class RayPeer:
    """A rank in an actor."""

    def __init__(self, name: str, handle: Any, where: Placement, timeout_s: float | None) -> None:
        self.name = name
        self.pid: int | None = None
        self._handle = handle
        self._where = where
        self._timeout_s = timeout_s
        self._waiting: deque[Any] = deque([handle.start.remote(), handle.meet.remote()])
        self._ping: tuple[Any, float] | None = None

    def send(self, packed: Any) -> None:
        """Send a reference to a request."""
        self._waiting.append(self._handle.serve.remote(packed))

    def receive(self, timeout_s: float) -> Answer | None:
        """Its next answer, None when there is none in time."""
        ready, _ = ray.wait([self._waiting[0]], timeout=timeout_s)
        if not ready:
            return None
        try:
            answer = ray.get(self._waiting.popleft())
        except ray.exceptions.RayError as error:
            raise PeerGone(self._loss(error)) from None
        return self._as_started(answer) if isinstance(answer, Started) else tuple(answer)

    def _as_started(self, started: Started) -> Answer:
        if started.error is not None:
            return ("error", "while starting", str(started.error))
        if started.node_id == ray.get_runtime_context().get_node_id():
            self.pid = started.pid
        return ("ready",)

    def failure_reason(self) -> str | None:
        """Return the reason if its actor has died or gives no sign of life."""
        now_s = time.monotonic()
        if self._ping is None:
            asked = self._handle.ping.options(concurrency_group=LIFE).remote()
            self._ping = (asked, now_s)
            return None
        asked, since_s = self._ping
        ready, _ = ray.wait([asked], timeout=0)
        if not ready:
            is_silent = self._timeout_s is not None and now_s - since_s > self._timeout_s
            limit = f"gave no sign of life for {self._timeout_s} s (runtime.heartbeat_timeout_s)"
            return f"{self.name} on {self._where.node.name} {limit}" if is_silent else None
        self._ping = None
        try:
            ray.get(asked)
        except ray.exceptions.RayError as error:
            return self._loss(error)
        return None

    def _loss(self, error: BaseException) -> str:
        return f"{self.name} on {self._where.node.name} was lost: {cause_of(error)}"

    def stack(self) -> str:
        """Return the stack that it reports."""
        try:
            asked = self._handle.stack.options(concurrency_group=LIFE).remote()
            return str(ray.get(asked, timeout=STACK_WAIT_S))
        except ray.exceptions.RayError:
            return ""

    def kill(self) -> None:
        """End its actor."""
        kill_actor(self._handle)

    def end(self, timeout_s: float) -> None:
        """End it: it holds nothing that needs an orderly end."""
        self.kill()


class RayRankLauncher:
    """Ranks in actors, one in each of the ``placements``; requests lie in Ray's object store."""

    def __init__(self, spec: RunSpec, placements: Sequence[Placement], env: ProcessEnv) -> None:
        self._spec = spec
        self._placements = placements
        self._env = env
        self._request: list[Any] = []

    def spawn(self, assignment: RankAssignment) -> Peer:
        """Start an actor."""
        name, where = f"learner_rank_{assignment.rank}", self._placements[assignment.rank - 1]
        log = self._spec.log_dir
        env = replace(self._env, log=log.absolute() / f"{name}.log" if log else None)
        handle = make_actor(RankActor, where, env, assignment)
        return RayPeer(name, handle, where, self._spec.settings.runtime.heartbeat_timeout_s)

    def pack(self, request: Request) -> list[Any]:
        """Put a request into the object store; the one before is freed."""
        self._request = [ray.put(request)]
        return self._request

    def close(self) -> None:
        """Free the last request."""
        self._request = []
