"""The collectors' actors, as the driver sees them: what they are told, and what comes from them, in order.

Data of a segment goes from its collector to the learner's node. A segment has arrived when it is safe there.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from offbeat.pacing.events import CollectorDown, CollectorUp, Event, OpenWork, SegmentArrived
from offbeat.runtime.base import describe
from offbeat.runtime.messages import Accept, GiveWork, Message
from offbeat.runtime.ray_cluster import ACCEPT, CARRY, STORE
from offbeat.runtime.ray_refs import (
    ActorRef,
    CollectorRef,
    PendingReport,
    RemoteSegmentData,
    how_it_ended,
)
from offbeat.runtime.serve import Report

Handler = Callable[[Future[Any]], None]


class CollectorActors:
    """Tells collectors what is asked of them, and appends what they report to ``events``.

    ``then`` has an answer dealt with in the driver's thread, ``end`` ends an actor, and ``store_down`` says
    that the one beside the learner, which keeps segments, is lost.
    """

    def __init__(
        self,
        events: deque[Event],
        then: Callable[[Any, Handler], None],
        end: Callable[[ActorRef], None],
        store_down: Callable[[ActorRef, str], None],
    ) -> None:
        self.by_index: dict[int, CollectorRef] = {}
        self._events, self._then, self._end, self._store_down = events, then, end, store_down
        self._keys = itertools.count()
        self._held: dict[int, int] = {}  # ticket -> key of its segment
        self._published: tuple[int, list[Any]] = (-1, [])
        self._sync_timeout_s = 0.0
        self._node_id = ""
        self._store: ActorRef

    def keep_with(self, store: ActorRef, sync_timeout_s: float, node_id: str) -> None:
        """Have segments kept by this actor; ``node_id`` is the driver's."""
        self._store, self._sync_timeout_s, self._node_id = store, sync_timeout_s, node_id

    def add(self, index: int, actor: ActorRef) -> None:
        """Listen to a collector that starts."""
        self.by_index[index] = CollectorRef(index, actor)
        self._take(self.by_index[index])

    def clear(self) -> None:
        """Forget all: they have ended."""
        self.by_index.clear()
        self._held.clear()
        self._published = (-1, [])

    # ------------------------------------------------------------ to them

    def publish(self, version: int, references: list[Any]) -> None:
        """Pass weights on; a collector without work gets them with its next ticket."""
        if references:
            self._published = (version, references)
            for collector in self.by_index.values():
                self._send(collector)

    def tell(self, index: int, message: Message) -> None:
        """Send a message, with the newest weights where the actor has not got them."""
        collector = self.by_index.get(index)
        if collector is None:  # it died and its `CollectorDown` is on the way: the ticket is lost with it
            return
        if isinstance(message, Accept):
            collector.held.add(message.ticket.number)
        self._send(collector, (message,))

    def ask_work(self) -> Sequence[int]:
        """Ask the wide collectors, and return them."""
        asked = [collector for collector in self.by_index.values() if collector.actor.is_wide]
        for collector in asked:
            if not collector.is_asked:
                collector.is_asked = True
                self.tell(collector.index, GiveWork())
        return [collector.index for collector in asked]

    def _send(self, collector: CollectorRef, messages: Sequence[Message] = ()) -> None:
        version, references = self._published
        is_new = version > collector.weights_version and bool(collector.held)
        if is_new:
            collector.weights_version = version
        if (messages or is_new) and not collector.actor.is_gone:
            sent = references if is_new else []
            collector.actor.ask("tell", messages, sent, group=ACCEPT, num_returns=0)

    # ------------------------------------------------------------ from them

    def up(self, actor: ActorRef) -> CollectorUp:
        """Return what to report of a collector that is up."""
        pid = actor.pid if actor.node_id == self._node_id else None
        index = int(actor.component.rpartition("_")[2])
        return CollectorUp(index, actor.capacity, pid, actor.is_wide)

    def _take(self, collector: CollectorRef) -> None:
        """Have the next reports of a collector, in their order."""
        reports, data = collector.actor.ask("take", num_returns=2)
        self._then(reports, partial(self._on_reports, collector, data))

    def _on_reports(self, collector: CollectorRef, data: Any, future: Future[Any]) -> None:
        if collector.actor.is_gone:
            return
        if (error := future.exception()) is not None:
            raised = isinstance(error, ray.exceptions.RayTaskError)  # what it collected cannot be sent
            text = f"collector {collector.index} raised:\n{error}"
            self.down(collector, text if raised else how_it_ended(collector.actor, error), raised)
            return
        stored: list[PendingReport] = []
        for packed in future.result():
            try:
                report = pickle.loads(packed)
            except Exception as unreadable:  # such as an object whose module is not there
                text = f"a segment of {collector.actor} could not be read: {describe(unreadable)}"
                report = CollectorDown(collector.index, text, raised=True)
            if isinstance(report, CollectorDown):
                text = report.reason if report.raised else f"{collector.actor}: {report.reason}"
                self.down(collector, text, report.raised, report.is_final)
                return
            stored += self._on_report(collector, report)
        if stored:
            keys = [one.key for one in stored]
            asked = self._store.ask("put", keys, [data], self._sync_timeout_s, group=CARRY)
            self._then(asked, partial(self._on_stored, collector, stored))
        self._forward(collector)
        self._take(collector)

    def _on_report(self, collector: CollectorRef, report: Report) -> list[PendingReport]:
        """Line a report up behind those before; return it if its data is to be brought to the learner."""
        pending = PendingReport(report)
        match report:
            case SegmentArrived(segment):
                collector.held.discard(segment.ticket.number)
                if segment.data is None:
                    pending = PendingReport(report, next(self._keys), is_stored=False)
            case CollectorUp(_, capacity):
                collector.actor.capacity = capacity
                pending = PendingReport(self.up(collector.actor))
            case OpenWork():
                collector.is_asked = False
        collector.arriving.append(pending)
        return [] if pending.is_stored else [pending]

    def _on_stored(
        self, collector: CollectorRef, stored: Sequence[PendingReport], future: Future[Any]
    ) -> None:
        if self._store.is_gone:
            return
        if (error := future.exception()) is not None:
            self._store_down(self._store, how_it_ended(self._store, error))
        elif collector.actor.is_gone:  # its tickets were lost with it and are collected again
            self._drop([one.key for one in stored if one.key is not None])
        elif (reason := future.result()) is not None:
            self.down(collector, f"{collector.actor}: segments were lost: {reason}")
        else:
            for one in stored:
                one.is_stored = True
            self._forward(collector)

    def _forward(self, collector: CollectorRef) -> None:
        """Report in the order of the collector: each segment brings its state."""
        while collector.arriving and collector.arriving[0].is_stored:
            pending = collector.arriving.popleft()
            event = pending.event
            if isinstance(event, SegmentArrived) and pending.key is not None:
                segment = event.segment
                self._held[segment.ticket.number] = pending.key
                data = RemoteSegmentData(self._store.handle, pending.key, self._sync_timeout_s)
                event = event._replace(segment=replace(segment, data=data))
            self._events.append(event)

    def release(self, tickets: Sequence[int]) -> None:
        """Forget the segments of these tickets."""
        self._drop([self._held.pop(ticket) for ticket in tickets if ticket in self._held])

    def _drop(self, keys: Sequence[int]) -> None:
        if keys and not self._store.is_gone:
            self._store.ask("drop", keys, group=STORE, num_returns=0)

    def down(
        self, collector: CollectorRef, reason: str, raised: bool = False, is_final: bool = False
    ) -> None:
        """Report that a collector is gone."""
        self._end(collector.actor)
        if self.by_index.get(collector.index) is collector:
            del self.by_index[collector.index]
        self._drop([one.key for one in collector.arriving if one.is_stored and one.key is not None])
        self._events.append(CollectorDown(collector.index, reason, raised, is_final=is_final))
