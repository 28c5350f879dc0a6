"""A coordinator beside its oracle: both get the same events, and must give the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from offbeat.errors import PromiseBroken
from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing import actions as actions_of
from offbeat.pacing import events as facts
from offbeat.pacing.coordinator import Feasible
from offbeat.pacing.deadlines import feasible

from . import pacing_messages as old
from .pacing_coordinator import Coordinator as Oracle


class Differs(Exception):
    """The coordinator and its oracle do not agree."""


def old_event(event: facts.Event) -> old.Event:
    """Translate an event into the oracle's words."""
    match event:
        case facts.CollectorUp(collector):
            return old.LaneReady(collector)
        case facts.CollectorDown(collector):
            return old.LaneLost(collector)
        case facts.SegmentArrived(segment):
            return old.SegmentArrived(segment.ticket.number, int(segment.versions.min()))
        case facts.SegmentDropped(ticket):
            return old.SegmentDropped(ticket)
        case facts.RoundTrained(version, signals=signals):
            return old.RoundTrained(version, signals)
        case facts.EvalDone(version):
            return old.EvalDone(version)
        case facts.Published(version):
            return old.Published(version)
    kind = getattr(old, type(event).__name__)
    translated: old.Event = kind(*(getattr(event, field.name) for field in fields(kind)))
    return translated


def new_action(action: old.Action) -> actions_of.Action:
    """Translate the oracle's action."""
    kind = getattr(actions_of, type(action).__name__)
    translated: actions_of.Action = kind(*(getattr(action, field.name) for field in fields(action)))
    return translated


class Twin(Coordinator):
    """A coordinator that compares itself with its oracle after each event; `apply` takes one a step."""

    def __init__(self, config: PaceConfig, rule: Feasible = feasible) -> None:
        super().__init__(config, rule)
        self.oracle = Oracle(config, rule)
        self.num_events = self.most_outstanding = 0
        self._event: old.Event = old.Clock()
        self._applied: list[actions_of.Action] = []

    def start(self, now_s: float) -> Sequence[actions_of.Action]:
        actions = super().start(now_s)
        self._compare("start", actions, [new_action(action) for action in self.oracle.start(now_s)])
        return actions

    def apply(self, event: facts.Event, now_s: float) -> Sequence[actions_of.Action]:
        assert isinstance(self._event, old.Clock), "an event that is not followed by a decision"
        self._event = old_event(event)
        self._applied = list(super().apply(event, now_s))
        return self._applied

    def decide(self, now_s: float) -> Sequence[actions_of.Action]:
        event, applied, self._event, self._applied = self._event, self._applied, old.Clock(), []
        if self.version >= self.config.rounds and self.oracle._checkpointed_at_s is None:
            return super().decide(now_s)  # part of `start`
        error: PromiseBroken | None = None
        try:
            actions = super().decide(now_s)
        except PromiseBroken as broken:
            error, actions = broken, ()
        try:
            expected = [new_action(action) for action in self.oracle.handle(event, now_s)]
        except PromiseBroken as broken:
            self._compare(str(event), str(error), str(broken))
            assert error is not None
            raise error from broken
        self._compare(str(event), [*applied, *actions], expected)
        self._compare(f"after {event}", state_of(self, now_s), state_of(self.oracle, now_s))
        self.num_events += 1
        self.most_outstanding = max(self.most_outstanding, self.ledger.num_outstanding)
        return actions

    def load_state_dict(self, state: dict[str, Any], arrived: Any = None) -> None:
        super().load_state_dict(state["new"], arrived)
        self.oracle.load_state_dict(state["old"], arrived)

    def state_dict(self) -> dict[str, Any]:
        return {"new": super().state_dict(), "old": self.oracle.state_dict()}

    def _compare(self, place: str, found: object, expected: object) -> None:
        if found != expected:
            raise Differs(f"{place}: {found}, but the oracle says {expected}")


def state_of(coordinator: Coordinator | Oracle, now_s: float) -> tuple[object, ...]:
    """Everything that others may ask a coordinator."""
    if isinstance(coordinator, Coordinator):
        arrived = list(coordinator.ledger.ready)
    else:
        arrived = coordinator.ledger.arrived()
    return (
        coordinator.counts(),
        coordinator.degree,
        coordinator.version,
        coordinator.published,
        coordinator.eval_skipped,
        coordinator.num_up,
        coordinator.finished,
        coordinator.is_ending,
        coordinator.is_publishing,
        coordinator.is_paused,
        coordinator.next_round,
        coordinator.can_train(now_s),
        coordinator.wake_at_s(now_s),
        coordinator.warm_at_s,
        coordinator.lag(),
        arrived,
        coordinator._versions,
    )
