"""Simulated runs made again: by replay of what was recorded, and at k = 0 by plain arithmetic."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from dataclasses import replace

from offbeat.observe.events import ScheduleLog
from offbeat.pacing.checker import CONTRACT, DEADLOCK, Violation
from offbeat.pacing.recorded import RecordedPace
from offbeat.pacing.recorded import Schedule as Recording
from offbeat.pacing.schedules import Faults, Schedule
from offbeat.roles import PerWorker
from offbeat.run.driver import Driver
from offbeat.run.parts import StartPoint
from offbeat.run.restarts import OpenRun, RestartPolicy
from offbeat.runtime.spec import RunSpec
from offbeat.seeding import derive_seed
from offbeat.testing.simulated import MakeCollector, SimulatedRuntime, Watch, World
from offbeat.testing.simulated_roles import SimulatedLearner, fold, size_of
from offbeat.types import Metrics, Ticket


class MemoryLog(ScheduleLog):
    """The schedule of a run in memory."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.gap = False

    def offset(self) -> int:
        """Return the number of lines."""
        return len(self.lines)

    def truncate(self, offset: int, gap: bool = False) -> None:
        """Forget the lines after so many."""
        del self.lines[offset:]

    def flush(self) -> None:
        """Keep the lines."""

    def close(self) -> None:
        """Keep the lines."""


def check_replay(
    spec: RunSpec, schedule: Schedule, log: MemoryLog, learner: SimulatedLearner, make: MakeCollector
) -> None:
    """Repeat a run with other timing, and compare the weights that it comes to."""
    world = World(f"replay of {schedule.seed}", 0.0, schedule.tail)
    recording = Recording.from_records(map(json.loads, log.lines))
    pace = RecordedPace(recording, spec.seed, learner.version, spec.num_collectors)
    quiet = replace(schedule, faults=Faults(), closings=())
    runtime = SimulatedRuntime(world, quiet, Watch(), deque(), Counter(), make)
    spec = replace(spec, collect=PerWorker(runtime.make_collector))
    driver = Driver(spec, pace, runtime, world.now_s, deque(), system=no_figures)
    driver.poll_s = math.inf
    policy = RestartPolicy(spec.settings.run, None, world)
    with OpenRun(lambda _: driver, StartPoint(), policy, deque(), None) as run:
        pace.incarnations = {n: start.incarnation for n, start in driver.collectors.starts.items()}
        while not run.finished:
            if math.isinf(world.next_s()) and runtime.has_nothing_to_tell:
                raise Violation(DEADLOCK, f"the replay stands still: {pace.waiting_for()}")
            run.step()
    if pace.difference is not None or runtime.learner.digest != learner.digest:
        raise Violation(CONTRACT, f"the replay came to other weights: {pace.difference}")


def no_figures(now_s: float) -> Metrics:
    """Return no figures of a machine."""
    return {}


def digest_at_zero(spec: RunSpec, schedule: Schedule, rounds: int) -> int:
    """Return the weights of a stream at k = 0, as one loop over its tickets makes them."""
    config, collectors = schedule.config, schedule.collectors
    capacities = (0,) if collectors is None else collectors.capacities
    states = [
        fold(derive_seed(spec.seed, "lane", index, 0)) for index in range(config.num_collectors)
    ]  # of those that work one by one
    size, digest = config.segments_per_round, 1
    for version in range(rounds):
        before = digest
        for number in range(version * size, (version + 1) * size):
            index, seed = number % config.num_collectors, derive_seed(config.seed, "collect", number)
            if capacities[index % len(capacities)]:
                made = fold(seed, size_of(Ticket(number, index, version, version, seed)), before)
            else:
                made = states[index] = fold(states[index], seed, before)
            digest = fold(digest, number, made)
        digest = fold(digest, version)
    return digest
