"""What a run on Ray pays against one with processes, on one machine: per segment, per round, and to start.

Collectors only copy a buffer into their segment, and the learner only touches every page of it, so that what
is left is the runtime: asking, handing over, publishing. Each run is a whole `Pipeline` with two collectors
and a Ray of its own where it is one on Ray; the two kinds take turns.

  segment   time per segment at k = 4, four segments a round: 10 KB (which travel in messages on Ray), 1 MB
            and 8 MB (which go through its object store). From the end of the warm-up, a quarter of the
            rounds, to the end of the last round.
  round     time per round at k = 0, with one segment of 10 KB and weights of a few bytes: latency, since
            nothing goes on meanwhile.
  start-up  from the start of a run to the end of its first round, over all runs; the imports of the
            calling process are not in it, those of workers and actors are.
  memory    of all processes that a run has beside the calling one, at its end, as PSS, which counts a page
            that n processes share as 1/n for each; the median over all runs.

Medians over the repeats, and the ratio of the medians. There is no bar: Ray is for more than one machine, and
this is what it costs where one would have done. It fails only when a run does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import psutil
from common import conclude, median, parser, say
from data_path import PAGE, make_writer

import offbeat.runtime.ray  # noqa: F401  (its import belongs to nobody's start-up)
from offbeat.config.models import AsyncTrainingConfig
from offbeat.observe.callbacks import Callback, RoundInfo
from offbeat.pipeline import Pipeline, Settings
from offbeat.roles import PerWorker, WorkerContext
from offbeat.types import Batch, Metrics

Kind = Literal["processes", "ray"]
KINDS: tuple[Kind, ...] = ("processes", "ray")
KB, MB = 1_000, 1_000_000
NUM_WORKERS = 2
COUNTS = {10 * KB: 1200, MB: 480, 8 * MB: 240}
"""Segments of a run, by their size: a few seconds on Ray."""
SEGMENTS_PER_ROUND, DEGREE = 4, 4
NUM_SERIAL_ROUNDS = 400


class Touch:
    """A learner that reads one byte of every page."""

    def __init__(self, context: WorkerContext) -> None:
        self._sum = 0

    def train(self, batch: Batch) -> Metrics:
        for segment in batch.segments:
            self._sum += int(segment.data["payload"][::PAGE].sum())
        return {}

    def weights(self) -> int:
        return self._sum

    def state_dict(self) -> int:
        return self._sum

    def load_state_dict(self, state: Any) -> None:
        self._sum = state


@dataclass(slots=True)
class Clock(Callback):
    """Notes when each round ended, and after the last one what memory the run has."""

    rounds: int
    ended_s: list[float] = field(default_factory=list)
    memory_bytes: int = 0

    def on_round(self, info: RoundInfo) -> None:
        self.ended_s.append(time.perf_counter())
        if len(self.ended_s) == self.rounds:
            children = psutil.Process().children(recursive=True)
            self.memory_bytes = sum(child.memory_full_info().pss for child in children)


@dataclass(frozen=True, slots=True)
class Timing:
    """What one run took."""

    round_s: float
    start_s: float
    memory_bytes: int


def time_run(kind: Kind, num_bytes: int, rounds: int, segments: int, degree: int) -> Timing:
    """Run a pipeline and time its rounds."""
    clock = Clock(rounds)
    pipeline = Pipeline(
        collect=PerWorker(partial(make_writer, num_bytes, "in")),
        train=PerWorker(Touch),
        off_policy_degree=degree,
        runtime=kind,
        num_workers=NUM_WORKERS,
        segments_per_round=segments,
        settings=Settings(AsyncTrainingConfig(open_rounds=0)),
        callbacks=[clock],
    )
    started_s = time.perf_counter()
    pipeline.run(rounds)
    warm = rounds // 4
    round_s = (clock.ended_s[-1] - clock.ended_s[warm]) / (len(clock.ended_s) - 1 - warm)
    return Timing(round_s, clock.ended_s[0] - started_s, clock.memory_bytes)


@dataclass(frozen=True, slots=True)
class Load:
    """What is run, and the name of the figure that it gives: milliseconds per round or segment."""

    figure: str
    num_bytes: int
    num_segments: int
    segments_per_round: int
    degree: int

    def time(self, kind: Kind, shorter: int) -> Timing:
        """Run it once."""
        rounds = self.num_segments // self.segments_per_round // shorter
        return time_run(kind, self.num_bytes, rounds, self.segments_per_round, self.degree)


def loads() -> list[Load]:
    """Segments of all sizes at k = 4, then rounds of one segment at k = 0."""
    made = [
        Load(f"segment of {in_words(num_bytes)}, ms", num_bytes, count, SEGMENTS_PER_ROUND, DEGREE)
        for num_bytes, count in COUNTS.items()
    ]
    return [*made, Load("round at k = 0, ms", 10 * KB, NUM_SERIAL_ROUNDS, 1, 0)]


def measure(repeats: int, shorter: int) -> dict[str, dict[str, float]]:
    """All figures; the kinds take turns with every load."""
    found: dict[str, dict[Kind, list[float]]] = {}

    def note(name: str, kind: Kind, value: float) -> None:
        found.setdefault(name, {each: [] for each in KINDS})[kind].append(value)

    for _ in range(repeats):
        for load in loads():
            for kind in KINDS:
                timing = load.time(kind, shorter)
                note(load.figure, kind, 1e3 * timing.round_s / load.segments_per_round)
                note("start-up, s", kind, timing.start_s)
                note("memory, MB", kind, timing.memory_bytes / MB)
    return {name: summed_up(values) for name, values in found.items()}


def in_words(num_bytes: int) -> str:
    return f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes // KB} KB"


def summed_up(values: Mapping[Kind, Sequence[float]]) -> dict[str, float]:
    """Medians of both kinds, and their ratio."""
    processes, on_ray = median(values["processes"]), median(values["ray"])
    return {"processes": processes, "ray": on_ray, "ratio": on_ray / processes}


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=3, help="runs of each kind, interleaved (3)")
    options = made.parse_args(arguments)
    figures = measure(1, 10) if options.quick else measure(options.repeats, 1)
    say(f"{'':22} {'processes':>10} {'ray':>10} {'ratio':>7}")
    for name, row in figures.items():
        say(f"{name:22} {row['processes']:10.2f} {row['ray']:10.2f} {row['ratio']:7.1f}")
    say("no bar")
    return conclude(figures, True, options)


if __name__ == "__main__":
    sys.exit(main())
