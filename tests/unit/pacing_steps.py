"""Small steps through a coordinator, shared by the pacing tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing.messages import (
    Action,
    Issue,
    LaneReady,
    Published,
    RoundTrained,
    SegmentArrived,
    Signals,
)
from offbeat.types import Ticket

ActionT = TypeVar("ActionT")


def make(**changes: Any) -> Coordinator:
    """A coordinator of a small run: one segment a round, one lane, k = 0, unless told otherwise."""
    return Coordinator(PaceConfig(**({"rounds": 10, "segments_per_round": 1} | changes)))


def lanes_up(coordinator: Coordinator, now_s: float = 0.0) -> list[Action]:
    """Report every lane; return all actions."""
    lanes = range(coordinator.config.num_lanes)
    return [action for lane in lanes for action in coordinator.handle(LaneReady(lane), now_s)]


def begin(coordinator: Coordinator, now_s: float = 0.0) -> list[Action]:
    """Start, bring all lanes up and publish; return what the publish led to."""
    coordinator.start(now_s)
    assert lanes_up(coordinator, now_s) == []
    return coordinator.handle(Published(coordinator.version), now_s)


def arrive(coordinator: Coordinator, *numbers: int, now_s: float = 0.0) -> list[Action]:
    """Let these tickets' segments arrive as their tickets name them; return the last one's actions."""
    actions: list[Action] = []
    for number in numbers:
        version = coordinator.ledger.ticket(number).version
        actions = coordinator.handle(SegmentArrived(number, version), now_s)
    return actions


def end_round(
    coordinator: Coordinator, now_s: float = 0.0, publish: bool = True, signals: Signals | None = None
) -> list[Action]:
    """End the round under way and, unless told otherwise, publish what came of it."""
    version = coordinator.version + 1
    actions = coordinator.handle(RoundTrained(version, signals or Signals()), now_s)
    return actions + coordinator.handle(Published(version), now_s) if publish else actions


def of_type(actions: Sequence[Action], kind: type[ActionT]) -> list[ActionT]:
    """The actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


def tickets(actions: Sequence[Action]) -> list[Ticket]:
    """The tickets among the actions."""
    return [action.ticket for action in of_type(actions, Issue)]
