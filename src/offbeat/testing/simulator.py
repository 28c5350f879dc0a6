"""The simulator: thousands of random schedules with faults, and what they found.

``python -m offbeat.pacing.simulate --schedules 100000 --json`` tries the promises of the pacing and of the
driver; ``--rule lag`` shows what the usual rule does, ``--preset areal`` what that of another project does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from offbeat.errors import PromiseBroken
from offbeat.pacing.checker import BOUND, CONSERVATION, CONTRACT, DEADLOCK, KINDS, Violation
from offbeat.pacing.coordinator import Coordinator
from offbeat.pacing.deadlines import RULES, BoundBroken
from offbeat.pacing.schedules import PRESETS, Schedule, draw_schedule, steady_schedule, with_preset
from offbeat.testing.simulated import Endless
from offbeat.testing.simulation import MakePace, Simulation

_TOTALS = (
    *("rounds", "segments", "lost", "reissued", "begun_before", "tried_alone", "cut"),
    *("dropped_as_named", "joined", "left", "late"),
    *("publish_failures", "dial_turns", "gates_set", "steps", "batched"),
    *("evaluations", "evaluations_skipped", "saved", "resumes", "restarts", "replayed"),
    *("ended_by_collectors", "ended_by_divergence", "ended_by_learner", "ended_by_stall"),
)
_REPLAYS_ONE_OF = 100


# ---------------------------------------------------------------- many schedules


@dataclass(slots=True)
class Report:
    """Result of many schedules. ``failures`` describes the first violations."""

    schedules: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True when every promise was kept in every schedule."""
        return not any(self.totals[kind] for kind in (*KINDS, "dropped"))

    def add(self, other: Report) -> None:
        """Take in another report."""
        self.schedules += other.schedules
        self.totals.update(other.totals)
        self.failures = (self.failures + other.failures)[:10]

    def as_dict(self) -> dict[str, Any]:
        """The counts by name, and whether all promises held."""
        counts = {name: self.totals[name] for name in (*KINDS, "dropped", *_TOTALS)}
        return {"schedules": self.schedules, **counts, "holds": self.holds}


def run_schedule(schedule: Schedule, make: MakePace = Coordinator, **options: Any) -> Report:
    """Simulate one schedule to its end or its first violation; ``options`` are those of `Simulation`."""
    simulation = Simulation(schedule, make, **options)
    report = Report(1, simulation.totals)
    try:
        simulation.run()
    except Violation as violation:
        kind, text = violation.kind, str(violation)
    except BoundBroken as error:
        kind, text = BOUND, str(error)
    except PromiseBroken as error:
        kind, text = CONSERVATION, str(error)
    except Endless as error:
        kind, text = DEADLOCK, str(error)
    except Exception as error:  # none of those that may end a run: ``--trace`` shows from where
        kind, text = CONTRACT, f"{type(error).__name__}: {error}"
    else:
        return report
    report.totals[kind] += 1
    report.failures.append(f"schedule {schedule.seed}, {kind}: {text}")
    return report


def run_seeds(seeds: Iterable[int], rule: str = "deadline", preset: str | None = None) -> Report:
    """Simulate the schedules with these seeds under one of `RULES`; one in a hundred is replayed."""
    report, make = Report(), partial(Coordinator, rule=RULES[rule])
    for seed in seeds:
        is_recorded = seed % _REPLAYS_ONE_OF == 0
        report.add(run_schedule(_drawn(seed, preset), make, is_recorded=is_recorded))
    return report


def _drawn(seed: int, preset: str | None) -> Schedule:
    return draw_schedule(seed) if preset is None else with_preset(draw_schedule(seed), preset)


def run_many(
    schedules: int, seed: int = 0, rule: str = "deadline", processes: int = 1, preset: str | None = None
) -> Report:
    """Simulate ``schedules`` random schedules; schedule i of seed s has the seed s * 10^9 + i.

    ``preset``: all of them under the rule of this preset, as far as it can be had.
    """
    first = seed * 10**9
    if processes <= 1:
        return run_seeds(range(first, first + schedules), rule, preset)
    chunk = max(1, min(1000, schedules // (4 * processes)))
    ranges = [
        range(first + start, first + min(start + chunk, schedules)) for start in range(0, schedules, chunk)
    ]
    report = Report()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for part in pool.map(partial(run_seeds, rule=rule, preset=preset), ranges):
            report.add(part)
    return report


def pipeline_figures(degrees: Sequence[int] = (0, 1, 2)) -> dict[str, float]:
    """Time per round over max(C, T) for steady C = T, by k: 2 is serial, 1 is the pipeline limit."""
    figures = {}
    for degree in degrees:
        simulation = Simulation(steady_schedule(collect_s=1.0, train_s=1.0, degree=degree))
        simulation.run()
        figures[f"k={degree}"] = round(simulation.now_s / simulation.schedule.config.rounds, 4)
    return figures


# ---------------------------------------------------------------- command line


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="offbeat.pacing.simulate", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="how many random schedules (1000)")
    parser.add_argument("--seed", type=int, default=0, help="which random schedules (0)")
    parser.add_argument("--rule", choices=sorted(RULES), default="deadline", help="admission rule (deadline)")
    parser.add_argument("--preset", choices=PRESETS, help="all schedules under the rule of a preset")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once (all cores)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")
    parser.add_argument("--trace", type=int, metavar="SEED", help="print what happens in this one schedule")
    return parser.parse_args(arguments)


def _trace(seed: int, rule: str, preset: str | None) -> int:
    schedule = _drawn(seed, preset)
    print(schedule)
    simulation = Simulation(schedule, partial(Coordinator, rule=RULES[rule]), log=print)
    try:
        simulation.run()
    except (Violation, PromiseBroken, Endless) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulator; return 0 when every promise held, else 1."""
    options = _parse(arguments)
    if options.trace is not None:
        return _trace(options.trace, options.rule, options.preset)
    began_s = time.perf_counter()
    report = run_many(options.schedules, options.seed, options.rule, options.processes, options.preset)
    result = report.as_dict()
    result["seconds"] = round(time.perf_counter() - began_s, 1)
    result["pipeline"] = pipeline_figures()
    for failure in report.failures:
        print(failure, file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:24} {value}" for name, value in result.items()))
    return 0 if report.holds else 1
