"""The parts of a checkpoint but the learner: where a run starts, and what it is at a moment."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offbeat.observe.meter import Meter
from offbeat.pacing.actions import Pace
from offbeat.replay import StreamStore
from offbeat.run.begun import BegunWork
from offbeat.run.collectors import Collectors
from offbeat.run.writing import Parts
from offbeat.runtime.copies import Copies
from offbeat.types import StateTree


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The start of a run, or the saved parts that it continues from.

    ``warnings`` become notices when the run starts. ``rollback`` is its number when the run goes back
    because it diverged: what was collected and not trained is then thrown away, and collectors start again
    with other seeds.
    """

    version: int = 0
    parts: Mapping[str, StateTree] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    resumed: bool = False
    rollback: int = 0


class RunParts:
    """Pace, collectors, store and meter of a run as parts of a checkpoint.

    ``states`` are what observers add to the part ``recorder``.
    """

    def __init__(
        self,
        pace: Pace,
        collectors: Collectors,
        store: StreamStore,
        meter: Meter,
        begun: BegunWork,
        clock: Callable[[], float],
    ) -> None:
        self.states: list[Callable[[], dict[str, StateTree]]] = []
        self._pace, self._collectors, self._meter, self._begun = pace, collectors, meter, begun
        self._store, self._clock = store, clock
        self._copies = Copies()

    def capture(self) -> Parts:
        """Return all parts as they are now; no round begins meanwhile.

        Segments are copied, into the memory of the capture before.
        """
        began_s = self._clock()
        recorder: dict[str, StateTree] = {"max_staleness": self._meter.max_staleness}
        for state in self.states:
            recorder |= state()
        parts = {
            "coordinator": self._pace.state_dict(),
            "collectors": {**self._collectors.state_dict(), "rollbacks": self._pace.rollbacks},
            "store": self._copies.copy(self._store.state_dict()),
            "meter": self._meter.state_dict(),
            "recorder": recorder,
        }
        self._meter.pause(self._clock() - began_s)
        return parts

    def restore(self, point: StartPoint) -> None:
        """Continue from saved parts."""
        parts, pace, collectors, meter = point.parts, self._pace, self._collectors, self._meter
        if not point.rollback:
            self._store.load_state_dict(parts["store"])
            self._begun.load(parts, point.version)
        ready = self._store.ready()
        pace.load_state_dict(parts["coordinator"], ready)
        collectors.load_state_dict(parts["collectors"], point.rollback)
        pace.rollbacks = operator.index(parts["collectors"]["rollbacks"]) + point.rollback
        meter.count(collectors.starts.keys(), len(collectors.rows))
        meter.load_state_dict(parts["meter"], ready)
        meter.max_staleness = operator.index(parts["recorder"]["max_staleness"])
