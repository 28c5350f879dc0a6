"""How close collecting and training side by side come to the pipeline limit, and what evaluation costs.

With C the time in which all workers together collect a round's segments and T the time to train them, no
schedule takes less than max(C, T) per round, and taking turns takes C + T. The roles here do nothing but
last: by default they sleep, the learner too, so that nothing competes for the processors and what is
measured is the runtime alone; ``--work spin`` burns processor time instead, which needs more processors
than workers. C and T are what the roles themselves measured, so that a sleep that oversleeps is not
counted as ours. Time per round is taken from the end of the warm-up to the end of the last round.

Part 1: time per round / max(C, T), for C:T = 2:1, 1:1, 1:2, runtimes ``threads`` and ``processes``,
k = 0, 1, 2, 4. Median over interleaved repeats. Bar: at most 1.05 for steady times at k >= 1.
In brackets, what the coordinator's rule would reach with the very same measured times if deciding and
handing over took no time: the rest is ours, or waits for a busy processor. Then the same for segments of
random length (log-normal, one in ten a straggler of four times the length): reported, no bar.

Part 2: an evaluation as long as a round after every second round. Bar: with ``enable_async_eval`` a run
takes less than 5 % longer than without evaluation (medians of interleaved repeats).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple

import numpy as np
from common import conclude, median, parser, say

from offbeat.config.models import AsyncTrainingConfig, EvalConfig
from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing.actions import Issue, Publish, Train
from offbeat.pacing.events import CollectorUp, Event, Published, RoundTrained, SegmentArrived
from offbeat.pipeline import Pipeline, Settings
from offbeat.types import Batch, Metrics, Segment, Ticket

NUM_WORKERS = 2
AT_ONCE = AsyncTrainingConfig(open_rounds=0)
WARM_UP_ROUNDS = 6
DEGREES = (0, 1, 2, 4)
RATIOS = {"2:1": (1.0, 0.5), "1:1": (1.0, 1.0), "1:2": (0.5, 1.0)}
BAR_ROUND, BAR_EVAL = 1.05, 1.05


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long a round is to take, in seconds, and its segments. Random ones depend on their number alone."""

    collect_s: float
    train_s: float
    segments_per_round: int
    random: bool = False

    def of_segment(self, number: int) -> float:
        """One worker's time for one segment."""
        each_s = self.collect_s * NUM_WORKERS / self.segments_per_round
        if not self.random:
            return each_s
        rng = Random(number)
        straggles = 4.0 if rng.random() < 0.1 else 1.0
        return each_s * straggles / 1.3 * rng.lognormvariate(-0.08, 0.4)  # of mean 1


def work(seconds: float, spin: bool) -> float:
    """Last about so long; return how long it was."""
    started_s = time.perf_counter()
    if not spin:
        time.sleep(seconds)
    while time.perf_counter() - started_s < seconds:
        pass
    return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class Collect:
    """A collector whose segment is the time it took."""

    lengths: Lengths
    spin: bool

    def __call__(self, ticket: Ticket, weights: Any) -> float:
        return work(self.lengths.of_segment(ticket.number), self.spin)


@dataclass(slots=True)
class Learn:
    """A learner that notes when each round ended and how long its parts took."""

    lengths: Lengths
    spin: bool
    ended_s: list[float] = field(default_factory=list)
    collect_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    segment_s: dict[int, float] = field(default_factory=dict)

    def train(self, batch: Batch) -> Metrics:
        seconds = {segment.ticket.number: segment.data for segment in batch.segments}
        self.segment_s |= seconds
        self.collect_s.append(sum(seconds.values()) / NUM_WORKERS)
        self.train_s.append(work(self.lengths.train_s, self.spin))
        self.ended_s.append(time.perf_counter())
        return {}

    def weights(self) -> int:
        return 0

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass

    def limit_s(self) -> float:
        """max(C, T) after the warm-up."""
        count = len(self.ended_s) - WARM_UP_ROUNDS
        return max(sum(self.collect_s[WARM_UP_ROUNDS:]), sum(self.train_s[WARM_UP_ROUNDS:])) / count


def mean_after_warm_up(ended_s: Sequence[float]) -> float:
    """Mean time per round, given when each round ended."""
    return (ended_s[-1] - ended_s[WARM_UP_ROUNDS - 1]) / (len(ended_s) - WARM_UP_ROUNDS)


class Ratio(NamedTuple):
    """Time per round over max(C, T), and what it would be at no cost for deciding and handing over."""

    measured: float
    ideal: float


@dataclass(frozen=True, slots=True)
class Case:
    """One run to be made: its runtime, dial and lengths."""

    runtime: str
    degree: int
    ratio: str
    lengths: Lengths
    spin: bool
    rounds: int

    def measure(self) -> Ratio:
        """Make the run and compare its time with the limit."""
        learner = run_pipeline(self, None, Settings(AT_ONCE))
        limit_s = learner.limit_s()
        return Ratio(mean_after_warm_up(learner.ended_s) / limit_s, ideal_s(learner, self.degree) / limit_s)


def run_pipeline(case: Case, evaluate: Callable[[Any], float] | None, settings: Settings) -> Learn:
    learner = Learn(case.lengths, case.spin)
    Pipeline(
        collect=Collect(case.lengths, case.spin),
        train=learner,
        evaluate=evaluate,
        off_policy_degree=case.degree,
        runtime=case.runtime,  # type: ignore[arg-type]
        num_workers=NUM_WORKERS,
        segments_per_round=case.lengths.segments_per_round,
        settings=settings,
    ).run(case.rounds)
    return learner


# ---------------------------------------------------------------- the best that the rule allows


def ideal_s(learner: Learn, degree: int) -> float:
    """Time per round of these very segments and rounds if deciding and handing over took no time at all."""
    rounds, segments = len(learner.ended_s), learner.lengths.segments_per_round
    coordinator = Coordinator(PaceConfig(rounds, segments, NUM_WORKERS, off_policy_degree=degree))
    coming: list[tuple[float, int, Event]] = [(0.0, lane, CollectorUp(lane)) for lane in range(NUM_WORKERS)]
    free_s, ended_s, now_s = [0.0] * NUM_WORKERS, [], 0.0
    actions, order = coordinator.start(now_s), NUM_WORKERS
    while not coordinator.finished:
        for action in actions:
            order += 1
            match action:
                case Issue(ticket):
                    free_s[ticket.collector] = (
                        max(now_s, free_s[ticket.collector]) + learner.segment_s[ticket.number]
                    )
                    arrival = SegmentArrived(Segment(ticket, None, np.array([ticket.version])))
                    heappush(coming, (free_s[ticket.collector], order, arrival))
                case Train(version):
                    ended_s.append(now_s + learner.train_s[version])
                    heappush(coming, (ended_s[-1], order, RoundTrained(version + 1)))
                case Publish(version):
                    heappush(coming, (now_s, order, Published(version)))
        now_s, _, event = heappop(coming)
        actions = [*coordinator.apply(event, now_s), *coordinator.decide(now_s)]
    return mean_after_warm_up(ended_s)


# ---------------------------------------------------------------- part 1: the limit


def measure_all(cases: Sequence[Case], repeats: int) -> dict[Case, Ratio]:
    """Median ratios of each case, the repeats of all cases interleaved."""
    ratios: dict[Case, list[Ratio]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            ratios[case].append(case.measure())
    return {case: Ratio(*map(median, zip(*found, strict=True))) for case, found in ratios.items()}


def make_cases(options: Any, random: bool, ratios: Sequence[str], rounds: int) -> list[Case]:
    cases = []
    for ratio in ratios:
        collect, train = (part * options.base_ms / 1000 for part in RATIOS[ratio])
        for runtime in options.runtimes:
            for degree in DEGREES:
                lengths = Lengths(collect, train, options.segments, random)
                cases.append(Case(runtime, degree, ratio, lengths, options.work == "spin", rounds))
    return cases


def steady_part(options: Any) -> tuple[dict[str, Ratio], bool]:
    say("time per round / max(C, T), steady times; k = 0 takes turns; in brackets: with hand-overs for free")
    cases = make_cases(options, False, list(RATIOS), options.rounds)
    measured = measure_all([case for case in cases if case.degree == 0], 1)
    measured |= measure_all([case for case in cases if case.degree > 0], options.repeats)
    report(measured)
    say(f"bar: <= {BAR_ROUND} for k >= 1")
    holds = all(ratio.measured <= BAR_ROUND for case, ratio in measured.items() if case.degree > 0)
    return name_figures(measured), holds


def random_part(options: Any) -> dict[str, Ratio]:
    say("\nthe same, random times with stragglers (no bar)")
    measured = measure_all(make_cases(options, True, ["1:1"], 2 * options.rounds), 1)
    report(measured)
    return name_figures(measured)


def report(measured: dict[Case, Ratio]) -> None:
    rows: dict[tuple[str, str], list[str]] = {}
    for case, ratio in sorted(measured.items(), key=lambda item: item[0].degree):
        text = f"k={case.degree} {ratio.measured:.3f} ({ratio.ideal:.3f})"
        rows.setdefault((case.ratio, case.runtime), []).append(text)
    for (proportion, runtime), texts in rows.items():
        say(f"  C:T = {proportion}  {runtime:10} {'   '.join(texts)}")


def name_figures(measured: dict[Case, Ratio]) -> dict[str, Ratio]:
    return {f"{case.runtime} k={case.degree} {case.ratio}": ratio for case, ratio in measured.items()}


# ---------------------------------------------------------------- part 2: evaluation


@dataclass(frozen=True, slots=True)
class Judge:
    """An evaluation that lasts."""

    seconds: float
    spin: bool

    def __call__(self, weights: Any) -> float:
        return work(self.seconds, self.spin)


def eval_part(options: Any) -> tuple[dict[str, float], bool]:
    say("\ncost of an evaluation as long as a round after every second round, k = 1, C:T = 1:1")
    base_s = options.base_ms / 1000
    figures, holds = {}, True
    for runtime in options.runtimes:
        lengths = Lengths(base_s, base_s, options.segments)
        case = Case(runtime, 1, "1:1", lengths, options.work == "spin", 2 * options.rounds)
        seconds = {kind: median(times) for kind, times in time_evaluations(case, options.repeats).items()}
        for kind in ("async", "sync"):
            figures[f"{runtime} {kind} eval"] = seconds[kind] / seconds["none"]
        holds &= figures[f"{runtime} async eval"] < BAR_EVAL
        extra = {kind: 100 * (seconds[kind] / seconds["none"] - 1) for kind in ("async", "sync")}
        say(f"  {runtime:10} asynchronous {extra['async']:+6.1f} %     synchronous {extra['sync']:+6.1f} %")
    say(f"bar: < +{100 * (BAR_EVAL - 1):.0f} % asynchronous")
    return figures, holds


def time_evaluations(case: Case, repeats: int) -> dict[str, list[float]]:
    judge, every = Judge(case.lengths.train_s, case.spin), EvalConfig(interval_rounds=2, at_end=False)
    settings = {
        "none": (None, Settings(AT_ONCE)),
        "async": (judge, Settings(AsyncTrainingConfig(open_rounds=0, enable_async_eval=True), eval=every)),
        "sync": (judge, Settings(AT_ONCE, eval=every)),
    }
    times: dict[str, list[float]] = {kind: [] for kind in settings}
    for _ in range(repeats):
        for kind, (evaluate, chosen) in settings.items():
            learner = run_pipeline(case, evaluate, chosen)
            # From the first round on, so that starting the evaluator counts.
            times[kind].append(learner.ended_s[-1] - learner.ended_s[0])
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--work", choices=("sleep", "spin"), default="sleep", help="how roles last (sleep)")
    made.add_argument("--base-ms", type=float, default=50.0, help="the longer of C and T, in ms (50)")
    made.add_argument("--segments", type=int, default=2, help="segments of a round, for 2 workers (2)")
    made.add_argument("--rounds", type=int, default=25, help="rounds of a run (25)")
    made.add_argument("--repeats", type=int, default=3, help="runs of each kind, interleaved (3)")
    made.add_argument("--runtimes", nargs="+", default=["threads", "processes"], help="(threads processes)")
    options = made.parse_args(arguments)
    if options.quick:
        options.rounds, options.repeats = 10, 1
    began_s = time.perf_counter()
    steady, steady_holds = steady_part(options)
    random = random_part(options)
    evaluation, eval_holds = eval_part(options)
    figures = {"steady": steady, "random": random, "evaluation": evaluation}
    seconds = time.perf_counter() - began_s
    return conclude({**figures, "seconds": seconds}, steady_holds and eval_holds, options)


if __name__ == "__main__":
    sys.exit(main())
