"""The clockwork: a coordinator without I/O that keeps collection and training in step."""

from offbeat.pacing.config import AUTO, PaceConfig
from offbeat.pacing.coordinator import Coordinator
from offbeat.pacing.deadlines import feasible
from offbeat.pacing.ledger import Counts, Ledger

__all__ = ["AUTO", "Coordinator", "Counts", "Ledger", "PaceConfig", "feasible"]
