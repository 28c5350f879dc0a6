"""The driver's references to actors on Ray, their requests and the answers on their way."""

from __future__ import annotations

import copy
import math
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray

from offbeat.errors import LearnerLost
from offbeat.pacing.events import SegmentArrived
from offbeat.runtime.ray_cluster import STORE, cause_of
from offbeat.runtime.ray_placement import Placement
from offbeat.runtime.supervision import Pulse
from offbeat.types import RemoteData, Ticket


class RemoteSegmentData(RemoteData):
    """Data of a segment that is kept beside the learner."""

    def __init__(self, store: Any, key: int, timeout_s: float) -> None:
        self.key = key
        self._store = store
        self._timeout_s = timeout_s

    def fetch(self) -> Any:
        """Bring a copy here."""
        asked = self._store.get.options(concurrency_group=STORE).remote([self.key])
        try:
            (data,) = ray.get(asked, timeout=self._timeout_s)
        except ray.exceptions.RayError as error:
            is_late = isinstance(error, ray.exceptions.GetTimeoutError)
            late = f"it did not arrive within {self._timeout_s:g} s (async_training.sync_timeout)"
            reason = late if is_late else cause_of(error)
            raise LearnerLost(f"a segment kept beside the learner cannot be fetched: {reason}") from error
        return copy.deepcopy(data)  # what Ray gives lies in memory that ends with it


@dataclass(slots=True, eq=False)
class ActorRef:
    """An actor as the driver knows it. One that ``is_gone`` is not listened to any more.

    ``start_timeout_s`` is how long it may take to start.
    """

    name: str
    component: str
    handle: Any
    placement: Placement
    started_s: float
    start_timeout_s: float
    is_up: bool = False
    is_gone: bool = False
    capacity: int = 1
    pid: int = 0
    node_id: str = ""
    pids: dict[str, int] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    pulse: Pulse | None = None
    num_pings: int = 0
    polled_at_s: float = -math.inf
    is_polled: bool = False

    def ask(self, method: str, *args: Any, group: str | None = None, num_returns: int = 1) -> Any:
        """Call a method of the actor, beside its other work when a ``group`` is named."""
        if method not in self.methods:
            options: dict[str, Any] = {"num_returns": num_returns}
            if group is not None:
                options["concurrency_group"] = group
            self.methods[method] = getattr(self.handle, method).options(**options)
        return self.methods[method].remote(*args)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.placement.node.name})" if self.pid else self.name


@dataclass(slots=True, eq=False)
class PendingSegment:
    """A segment on its way to the learner's node."""

    key: int
    event: SegmentArrived
    is_stored: bool = False


@dataclass(slots=True, eq=False)
class CollectorRef:
    """A collector's actor, what it was asked, and what comes from it.

    As many tickets as it wants to hold are with the actor, and two at least, so that it need not wait for a
    round trip; the others wait here.
    """

    index: int
    actor: ActorRef
    num_asked: int = 0
    num_answered: int = 0
    answers: dict[int, tuple[Any, Future[Any]]] = field(default_factory=dict)  # by place, not taken yet
    weights_version: int = -1
    waiting: deque[Ticket] = field(default_factory=deque)
    arriving: deque[PendingSegment] = field(default_factory=deque)


def how_it_ended(actor: ActorRef, error: BaseException) -> str:
    """Say who was lost, and how."""
    return f"{actor} was lost: {cause_of(error)}"
