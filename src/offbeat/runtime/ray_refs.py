"""The driver's references to actors on Ray, their requests and the answers on their way."""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import ray

from offbeat.errors import LearnerLost
from offbeat.pacing.events import Event
from offbeat.runtime.ray_cluster import STORE, cause_of
from offbeat.runtime.ray_placement import Placement
from offbeat.runtime.supervision import Pulse
from offbeat.types import RemoteData


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
    is_wide: bool = False
    pid: int = 0
    node_id: str = ""
    pids: dict[str, int] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    pulse: Pulse | None = None
    num_pings: int = 0
    polled_at_s: float = -math.inf
    is_polled: bool = False
    worked_s: float | None = None
    """How long its piece of work lasted, by its last answer, which came at `answered_s`."""
    answered_s: float = -math.inf

    def ask(self, method: str, *args: Any, group: str | None = None, num_returns: int = 1) -> Any:
        """Call a method of the actor, beside its other work when a ``group`` is named."""
        if method not in self.methods:
            options: dict[str, Any] = {"num_returns": num_returns}
            if group is not None:
                options["concurrency_group"] = group
            self.methods[method] = getattr(self.handle, method).options(**options)
        return self.methods[method].remote(*args)

    def working_s(self, now_s: float) -> float | None:
        """Return how long its piece of work lasts already; one that does not answer is taken to be at it."""
        if self.worked_s is not None:
            return self.worked_s + now_s - self.answered_s
        return now_s - self.polled_at_s if self.is_polled else None

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.placement.node.name})" if self.pid else self.name


@dataclass(slots=True, eq=False)
class PendingReport:
    """A report, and the key of its segment's data on the way to the learner's node, if it has some there."""

    event: Event
    key: int | None = None
    is_stored: bool = True


@dataclass(slots=True, eq=False)
class CollectorRef:
    """A collector's actor, the tickets that are there, and what comes from it."""

    index: int
    actor: ActorRef
    held: set[int] = field(default_factory=set)
    is_asked: bool = False
    """It is to answer with its begun work."""
    weights_version: int = -1
    arriving: deque[PendingReport] = field(default_factory=deque)


def how_it_ended(actor: ActorRef, error: BaseException) -> str:
    """Say who was lost, and how."""
    return f"{actor} was lost: {cause_of(error)}"
