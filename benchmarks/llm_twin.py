"""Simulated compute: the control plane at the size of real runs of language models; only waiting is real.

The real driver, coordinator, processes and Ray actors; tokens and gradients are replaced by waiting,
according to a declared timing model: a step of an engine takes 1.3 ms + 2.3 us for each live row, a trained
token 4.3 us. 4 engines with 512 slots each, rounds of 64 prompts with 8 responses, lengths log-normal (sigma
1, mean 250, limit 2,000). So no figure here says how fast any GPU is: they say what the dial gains if a
machine is that fast, and that what decides and hands over keeps up with it. Segments carry arrays as long as
their tokens, weights are a number.

Each run is made twice with the same lengths: for real, and by the model in llm_model.py, which is the same
coordinator in simulated time and at no cost. Time per round is that from the end of the warm-up (k + 3
rounds) to the last round before the run dries up.

Bar: speed-ups over k = 0 at k = 1, 2, 4, 8 within 10 % of the model's, on processes and on Ray; the driver's
process uses at most 30 % of a core. Beside it, on processes, the rules of verl and AReaL
(`async_training.preset`), with the oldest age in versions at which each really trained, and the share of
groups that were older than k: no bar.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from common import conclude, parser, rounded, say
from llm_model import Engine, Leg, Open, Response, RoundEnd, Shop, Timing, lognormal_lengths, simulate

from offbeat.config.models import AsyncTrainingConfig, PresetConfig
from offbeat.observe.callbacks import Callback, RoundInfo
from offbeat.pacing import PaceConfig
from offbeat.pipeline import Pipeline, Settings, preset_of
from offbeat.roles import PerWorker, WorkerContext
from offbeat.types import Batch, Metrics, Piece, Progress, Segment, Span, StateTree, Ticket

Kind = Literal["processes", "ray"]
KINDS: tuple[Kind, ...] = ("processes", "ray")
TIMING = Timing(step_s=1.3e-3, row_s=2.3e-6, token_s=4.3e-6)
PROMPTS, GROUP, MEAN, LIMIT = 64, 8, 250, 2_000
SHOP = Shop(engines=4, slots=512, capacity=128)
DEGREES = (0, 1, 2, 4, 8)
BAR_MODEL, BAR_DRIVER = 0.1, 0.3
LEAST_SLEEP_S = 0.003
PRESETS: Mapping[str, tuple[PresetConfig, int]] = {
    "one_step_off": (PresetConfig(name="one_step_off"), 1),
    "verl_fully_async, 0.1 of 4": (PresetConfig(name="verl_fully_async"), 4),
    "verl_fully_async, 0.5 of 4": (PresetConfig(name="verl_fully_async", staleness_threshold=0.5), 5),
    "areal, 2 ahead": (PresetConfig(name="areal", max_head_offpolicyness=2), 2),
    "areal, 4 ahead": (PresetConfig(name="areal", max_head_offpolicyness=4), 4),
}
"""Presets of the peers, each with the k that its rule amounts to."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a run does: prompts of a round, and lengths of responses as a share of the full ones."""

    prompts: int = PROMPTS
    share: float = 1.0

    def plan(self, seed: int) -> Sequence[Response]:
        """Return the responses of a ticket."""
        mean, limit = self.share * MEAN, round(self.share * LIMIT)
        return [(Leg(length),) for length in lognormal_lengths(seed, GROUP, 1.0, mean, limit)]


# ---------------------------------------------------------------- roles that wait


class Alarm:
    """Wakes its collector up at a time, from a thread of its own."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake, self._due_s, self._changed = wake, float("inf"), threading.Condition()
        threading.Thread(target=self._serve, name="alarm", daemon=True).start()

    def set(self, due_s: float) -> None:
        """Wake it up at this time instead of the last one that was set."""
        with self._changed:
            self._due_s = due_s
            self._changed.notify()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while (left_s := self._due_s - time.monotonic()) > 0:
                    self._changed.wait(min(left_s, 60.0))
                self._due_s = float("inf")
            self._wake()


class WaitingEngine:
    """A wide collector that waits as long as an engine would compute, in absolute times."""

    def __init__(self, context: WorkerContext, load: Load) -> None:
        self.capacity = SHOP.capacity
        self._load, self._engine, self._alarm = load, Engine(TIMING, SHOP.slots), Alarm(context.wake)
        self._engine.time_s = time.monotonic()
        self._finished: list[Open] = []
        self._told_s, self._version = 0.0, -1

    def accept(self, ticket: Ticket, begun: StateTree | None = None, script: Sequence[Piece] = ()) -> None:
        """Begin a group."""
        now_s = self._catch_up()
        self._engine.accept(ticket, self._load.plan(ticket.seed), now_s)

    def load(self, version: int, weights: Any) -> None:
        """Make the tokens of the next steps with this version."""
        self._catch_up()
        self._engine.load(version)

    def advance(self) -> Progress:
        """Hand over what is done by now, and sleep until the next response ends."""
        now_s = self._catch_up()
        segments = [_segment(done) for done in self._finished]
        self._finished.clear()
        self._alarm.set(max(self._engine.next_s(), now_s + LEAST_SLEEP_S))
        busy_s, self._told_s = self._engine.busy_s - self._told_s, self._engine.busy_s
        return Progress(segments, max(busy_s, 1e-9), idle=True)

    def _catch_up(self) -> float:
        now_s = time.monotonic()
        self._finished += self._engine.advance(now_s)
        return now_s

    def state_dict(self) -> StateTree:
        """Return nothing: a segment depends on its ticket."""
        return {}

    def load_state_dict(self, state: StateTree) -> None:
        """Nothing to restore."""


def _segment(done: Open) -> Segment:
    """Return a segment with arrays as long as its tokens."""
    versions = np.array(sorted(done.made))
    sizes = [done.made[version] for version in versions.tolist()]
    data = {"tokens": np.zeros(done.tokens, np.int32), "logprobs": np.zeros(done.tokens, np.float32)}
    pieces = (Piece(tuple(map(Span, versions.tolist(), sizes)), "eos"),)
    return Segment(done.ticket, data, np.repeat(versions, sizes), {"tokens": done.tokens}, pieces=pieces)


class WaitingLearner:
    """A learner that waits as long as training would take."""

    def __init__(self, context: WorkerContext) -> None:
        self._version = 0

    def train(self, batch: Batch) -> Metrics:
        """Wait until so many tokens would be trained."""
        due_s = time.monotonic() + TIMING.of_round(tokens := sum(one.num_steps for one in batch.segments))
        self._version += 1
        while (left_s := due_s - time.monotonic()) > 0:
            time.sleep(left_s)
        late = sum(age > batch.off_policy_degree for age in batch.staleness()) / len(batch.segments)
        return {"learn/tokens": float(tokens), "learn/late": late}

    def weights(self) -> int:
        """Return a number for weights."""
        return self._version

    def state_dict(self) -> int:
        """Return the version."""
        return self._version

    def load_state_dict(self, state: int) -> None:
        """Continue at a version."""
        self._version = state


@dataclass(slots=True)
class Clock(Callback):
    """Notes at the end of each round when it was, what the driver's process had used, and metrics."""

    ended_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def on_round(self, info: RoundInfo) -> None:
        """Note the end of a round."""
        self.ended_s.append(time.monotonic())
        self.cpu_s.append(time.process_time())
        self.metrics.append(dict(info.metrics))


# ---------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its name, its dial, and the k that says how long it takes to warm up and to dry up."""

    name: str
    dial: AsyncTrainingConfig
    degree: int

    @property
    def first(self) -> int:
        """The last round of the warm-up."""
        return self.degree + 3

    def rounds(self, window: int) -> int:
        """Rounds of the run for so many in the window."""
        return self.first + 1 + window + self.degree


def runs(has_presets: bool, degrees: Sequence[int]) -> list[Run]:
    """Return the runs of the dial, and those of the peers' rules."""
    found = [
        Run(f"k = {degree}", AsyncTrainingConfig(off_policy_degree=degree, open_rounds=0), degree)
        for degree in degrees
    ]
    if has_presets:
        found += [
            Run(name, AsyncTrainingConfig(preset=one), degree) for name, (one, degree) in PRESETS.items()
        ]
    return found


def run_model(run: Run, load: Load, window: int) -> dict[str, float]:
    """Make a run in simulated time."""
    dial = run.dial
    config = PaceConfig(
        run.rounds(window),
        load.prompts,
        SHOP.engines,
        dial.off_policy_degree,
        publish_interval=dial.weight_sync_interval,
        preset=None if dial.preset is None else preset_of(dial.preset),
    )
    ends = simulate(config, SHOP, TIMING, load.plan)
    return {
        "round_s": (ends[run.first + window].time_s - ends[run.first].time_s) / window,
        "oldest": max(end.oldest_age for end in ends),
        "late": sum(end.late for end in ends) / len(ends),
    } | _shares(ends[run.first], ends[run.first + window])


def _shares(first: RoundEnd, last: RoundEnd) -> dict[str, float]:
    """Live rows of an engine at work, and idle shares, between two ends of rounds."""
    wall_s = last.time_s - first.time_s
    return {
        "live_rows": (last.row_steps - first.row_steps) / (last.steps - first.steps),
        "engines_idle": 1 - (last.busy_s - first.busy_s) / (SHOP.engines * wall_s),
        "learner_idle": 1 - (last.train_s - first.train_s) / wall_s,
    }


def run_real(run: Run, load: Load, window: int, kind: Kind) -> dict[str, float]:
    """Make a run with real processes, or real actors."""
    clock = Clock()
    Pipeline(
        collect=PerWorker(partial(WaitingEngine, load=load)),
        train=PerWorker(WaitingLearner),
        runtime=kind,
        num_workers=SHOP.engines,
        segments_per_round=load.prompts,
        settings=Settings(run.dial),
        callbacks=[clock],
    ).run(run.rounds(window))
    first, last = run.first, run.first + window
    wall_s = clock.ended_s[last] - clock.ended_s[first]
    inside = clock.metrics[first + 1 : last + 1]
    return {
        "round_s": wall_s / window,
        "oldest": max(one["pace/max_sample_age"] for one in clock.metrics),
        "late": float(np.mean([one["learn/late"] for one in clock.metrics])),
        "driver": (clock.cpu_s[last] - clock.cpu_s[first]) / wall_s,
        "mean_age": float(np.mean([one["pace/avg_sample_age"] for one in inside])),
        "engines_idle": float(np.mean([one["pace/collect_idle_ratio"] for one in inside])),
        "dropped": clock.metrics[-1]["pace/dropped_samples"],
    }


# ---------------------------------------------------------------- the table


def compare(options: Any) -> tuple[dict[str, Any], bool]:
    """Make all runs, print a line for each, and judge those of the dial."""
    load = Load(prompts=16, share=0.1) if options.quick else Load()
    window = 4 if options.quick else options.window
    found: dict[str, Any] = {}
    holds = True
    say("simulated compute: waiting in the place of tokens and gradients\n")
    head = "s/round speed-up oldest  late"
    say(f"{'':26} {'model':>31}" + "".join(f"{kind:>40}" for kind in options.kinds))
    say(f"{'':26} {head:>31}" + "".join(f"{head + '   driver':>40}" for _ in options.kinds))
    base: dict[str, float] = {}
    for run in runs(not options.no_presets, (0, 2) if options.quick else DEGREES):
        row = {"model": run_model(run, load, window)}
        kinds = [kind for kind in options.kinds if run.dial.preset is None or kind == "processes"]
        row |= {kind: run_real(run, load, window, kind) for kind in kinds}
        for where, figures in row.items():
            figures["speed_up"] = base.setdefault(where, figures["round_s"]) / figures["round_s"]
        holds &= run.dial.preset is not None or _is_met(row, options.kinds)
        say(_line(run, row))
        found[run.name] = row
    return found, holds


def _is_met(row: Mapping[str, Mapping[str, float]], kinds: Sequence[str]) -> bool:
    def keeps_up(figures: Mapping[str, float]) -> bool:
        is_near = abs(figures["speed_up"] / row["model"]["speed_up"] - 1) <= BAR_MODEL
        return is_near and figures["driver"] <= BAR_DRIVER

    return all(keeps_up(row[kind]) for kind in kinds)


def _line(run: Run, row: Mapping[str, Mapping[str, float]]) -> str:
    text = f"{run.name:26}"
    for where, one in row.items():
        driver = "" if where == "model" else f"  {one['driver']:7.1%}"
        times = f"{one['round_s']:7.3f} {one['speed_up']:7.2f}x"
        text += f"   {times} {one['oldest']:6.0f} {one['late']:5.1%}{driver}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="runtimes (all)")
    made.add_argument("--window", type=int, default=10, help="rounds that are timed (10)")
    made.add_argument("--no-presets", action="store_true", help="leave the peers' rules out")
    options = made.parse_args(arguments)
    if options.quick:
        options.kinds = ["processes"]
    began_s = time.perf_counter()
    found, holds = compare(options)
    say(
        f"bar: speed-ups within {BAR_MODEL:.0%} of the model's, the driver at most {BAR_DRIVER:.0%} of a core"
    )
    declared = {"step_s": TIMING.step_s, "row_s": TIMING.row_s, "token_s": TIMING.token_s}
    figures = {"title": "simulated compute", "timing": {k: f"{v:g}" for k, v in declared.items()}}
    seconds = time.perf_counter() - began_s
    return conclude({**figures, "runs": rounded(found), "seconds": seconds}, holds, options)


if __name__ == "__main__":
    sys.exit(main())
