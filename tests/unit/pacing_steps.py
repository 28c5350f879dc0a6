"""Small steps through a coordinator, shared by the pacing tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing.actions import Action, Issue
from offbeat.pacing.events import CollectorUp, Event, Published, RoundTrained, SegmentArrived, Signals
from offbeat.types import Segment, Ticket

ActionT = TypeVar("ActionT")


def make(**changes: Any) -> Coordinator:
    """A coordinator of a small run: one segment a round, one collector, k = 0, unless told otherwise."""
    return Coordinator(PaceConfig(**({"rounds": 10, "segments_per_round": 1} | changes)))


def step(coordinator: Coordinator, event: Event, now_s: float = 0.0) -> list[Action]:
    """Enter one event and decide; return all actions."""
    return [*coordinator.apply(event, now_s), *coordinator.decide(now_s)]


def arrived(number: int, version: int) -> SegmentArrived:
    """The arrival of a ticket's segment that this version produced."""
    ticket = Ticket(number, collector=0, version=version, deadline=version, seed=0)
    return SegmentArrived(Segment(ticket, None, np.array([version])))


def all_up(coordinator: Coordinator, now_s: float = 0.0) -> list[Action]:
    """Report every collector; return all actions."""
    collectors = range(coordinator.config.num_collectors)
    return [action for number in collectors for action in step(coordinator, CollectorUp(number), now_s)]


def begin(coordinator: Coordinator, now_s: float = 0.0) -> list[Action]:
    """Start, bring all collectors up and publish; return what the publish led to."""
    coordinator.start(now_s)
    assert all_up(coordinator, now_s) == []
    return step(coordinator, Published(coordinator.version), now_s)


def arrive(coordinator: Coordinator, *numbers: int, now_s: float = 0.0) -> list[Action]:
    """Let these tickets' segments arrive as their tickets name them; return the last one's actions."""
    actions: list[Action] = []
    for number in numbers:
        version = coordinator.ledger.ticket(number).version
        actions = step(coordinator, arrived(number, version), now_s)
    return actions


def end_round(
    coordinator: Coordinator, now_s: float = 0.0, publish: bool = True, signals: Signals | None = None
) -> list[Action]:
    """End the round under way and, unless told otherwise, publish what came of it."""
    version = coordinator.version + 1
    actions = step(coordinator, RoundTrained(version, signals=signals or Signals()), now_s)
    return actions + step(coordinator, Published(version), now_s) if publish else actions


def of_type(actions: Sequence[Action], kind: type[ActionT]) -> list[ActionT]:
    """The actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


def tickets(actions: Sequence[Action]) -> list[Ticket]:
    """The tickets among the actions."""
    return [action.ticket for action in of_type(actions, Issue)]
