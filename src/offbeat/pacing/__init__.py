"""The clockwork: a coordinator without I/O that keeps collection and training in step.

Names are imported when they are first used: workers need the events only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.pacing.config import AUTO, PaceConfig
    from offbeat.pacing.coordinator import Coordinator
    from offbeat.pacing.deadlines import feasible
    from offbeat.pacing.ledger import Counts, Ledger

__all__ = ["AUTO", "Coordinator", "Counts", "Ledger", "PaceConfig", "feasible"]

_HOMES = {
    "AUTO": "config",
    "Coordinator": "coordinator",
    "Counts": "ledger",
    "Ledger": "ledger",
    "PaceConfig": "config",
    "feasible": "deadlines",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'offbeat.pacing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"offbeat.pacing.{_HOMES[name]}"), name)
