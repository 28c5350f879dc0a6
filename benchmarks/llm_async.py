"""What the dial is worth in RL of language models on two cores, against the best synchronous run.

Each arm is a whole run of a recipe in a process of its own, on `processes`, 16 prompts with 8 responses a
round. Synchronous twins (k = 0), with the same engine, kernels, continuous batching, and tools and rewards
side by side within the round: one engine, then a learner with one thread; one engine, then a learner with
two; two engines, then a learner with two. Asynchronous arms have one engine and a learner with one thread,
at k = 1, 2, 4. All arms of a task start from the same warmed-up model, which is made first. Timed are 20
rounds after the dial is open and its queues are full, and before the run dries up. Each twin is run once to
pick the best one; then the best twin and each k take turns, five times. A window in which something else
used more than 0.15 cores is thrown away, counted, and repeated. What is finished is kept in `--state`; a
second call goes on from there, and a call begins no new arm after `--minutes`. Nothing else may run
meanwhile.

Predicted beside measured: the model in llm_model.py, which is the real coordinator in simulated time, with
lengths, steps and training measured on this machine at the start. Where a ratio misses its prediction by
more than 20 %, the line below says where the time of a round went; all arms keep it in the state file.

Asserted in each arm: no trained token older than k versions, and nothing dropped. Printed with each: mean
lengths of trained and dispatched responses, live rows, idle shares, effective sample size and KL by age.

`--score` makes other runs, to be left in the background: three seeds at k = 0 and 2 with evaluations; held-
out score at equal rounds, and the time to a fixed score over that of k = 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import psutil
from common import ONE_THREAD, conclude, median, parser, say
from llm_model import Leg, Response, Shop, Timing, simulate

import offbeat
from offbeat.config.models import RunConfig
from offbeat.config.recipes import RecipeBook
from offbeat.observe.callbacks import Callback, EvalInfo, RoundInfo
from offbeat.pacing import PaceConfig

MOST_FOREIGN, MOST_TRIES = 0.15, 3
MISSED = 0.2
DEGREES = (1, 2, 4)
REPEATS, WINDOW = 5, 20
PROMPTS, GROUP = 16, 8
ARM_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Task:
    """A row of the table: a recipe, what is said of it beforehand, and what it has to reach.

    ``waits`` are those for a tool or a reward, log-normal: median, sigma, limit; ``turns`` the turns of a
    response, of which each but the last waits. ``bars`` map k to the least speed-up; k = -1 is the best one.
    """

    name: str
    recipe: str
    expected: tuple[float, float, float] | None = None
    bars: Mapping[int, float] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    instant: tuple[str, ...] = ()
    waits: tuple[float, float, float] | None = None
    turns: tuple[int, int] = (1, 1)

    def response(self, tokens: int, prompt: int, rng: Random) -> Response:
        """Return a response of so many tokens as the model plays it."""
        turns = min(tokens, rng.randint(*self.turns))
        sizes = [tokens // turns + (place < tokens % turns) for place in range(turns)]
        ends = [self._wait_s(rng) if place + 1 < turns or turns == 1 else 0.0 for place in range(turns)]
        given = [prompt] + [2] * (turns - 1)
        return tuple(map(Leg, sizes, ends, given))

    def _wait_s(self, rng: Random) -> float:
        if self.waits is None:
            return 0.0
        median_s, sigma, limit_s = self.waits
        return min(limit_s, median_s * rng.lognormvariate(0.0, sigma))


_NO_WAIT = ("env.kwargs.latency_s=0",)
TASKS = (
    Task("reverse-grpo", "reverse-grpo", (1.30, 1.60, 1.62), {-1: 1.3}),
    Task(
        "calculator-grpo",
        "calculator-grpo",
        (1.85, 2.6, 4.0),
        {2: 2.0, 4: 3.0},
        instant=_NO_WAIT,
        waits=(0.15, 1.0, 5.0),
        turns=(2, 5),
    ),
    Task(
        "slow-reward-grpo",
        "slow-reward-grpo",
        (1.7, 2.3, 3.7),
        {2: 1.8, 4: 2.7},
        instant=_NO_WAIT,
        waits=(0.3, 1.0, 8.0),
    ),
    Task("short tail (control)", "reverse-grpo", overrides=("env.kwargs.sigma=0.5",)),
    Task("arithmetic-grpo", "arithmetic-grpo"),
)
"""The last one is no claim: short responses of nearly one length, for smoke tests."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Engines, threads of the learner, and k."""

    engines: int
    threads: int
    degree: int

    @property
    def name(self) -> str:
        """The kind in a word, for the state file."""
        return f"{self.engines} engine, {self.threads} thread, k = {self.degree}"


TWINS = (Kind(1, 1, 0), Kind(1, 2, 0), Kind(2, 2, 0))


def dial(degree: int) -> Kind:
    """Return the asynchronous arm of a k."""
    return Kind(1, 1, degree)


# ---------------------------------------------------------------- in the process of an arm


def cpu_s_of_tree() -> dict[str, float]:
    """Return the processor seconds of this process and those below it that live."""
    me = psutil.Process()
    found = {"driver and learner": sum(me.cpu_times()[:2])}
    for child in me.children(recursive=True):
        times = child.cpu_times()
        found[f"process {child.pid}"] = times.user + times.system
    return found


def busy_s_of_machine() -> float:
    """Return the processor seconds of all cores since the start of the machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


@dataclass(slots=True)
class Window(Callback):
    """Times some rounds, and looks at what else the machine does meanwhile."""

    first: int
    last: int
    rounds: list[Mapping[str, float]] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    edges: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def on_round(self, info: RoundInfo) -> None:
        """Note a round."""
        self.rounds.append(dict(info.metrics))
        self.ended_s.append(time.monotonic())
        if len(self.ended_s) - 1 in (self.first, self.last):
            self.edges.append((busy_s_of_machine(), cpu_s_of_tree()))

    def figures(self) -> dict[str, Any]:
        """Return what an arm is kept as."""
        first, last = self.first, self.last
        wall_s = self.ended_s[last] - self.ended_s[first]
        (busy_before, own_before), (busy_after, own_after) = self.edges
        own = {name: used - own_before.get(name, 0.0) for name, used in own_after.items()}
        inside = self.rounds[first + 1 : last + 1]
        names = {name for one in inside for name in one}
        found = {name: [one[name] for one in inside if name in one] for name in sorted(names)}
        return {
            "round_s": wall_s / (last - first),
            "rounds_s": [b - a for a, b in pairwise(self.ended_s[first : last + 1])],
            "foreign": (busy_after - busy_before - sum(own.values())) / wall_s,
            "oldest": max(one["pace/max_sample_age"] for one in self.rounds),
            "dropped": self.rounds[-1]["pace/dropped_samples"],
            "cpu": {name: used / wall_s for name, used in own.items()},
            "means": {name: sum(values) / len(values) for name, values in found.items()},
        }


def overrides_of(task: Task, kind: Kind) -> list[str]:
    """Return the settings of an arm, but for its length."""
    return [
        *task.overrides,
        f"async_training.off_policy_degree={kind.degree}",
        "async_training.open_rounds=0",
        "runtime.kind=processes",
        f"runtime.num_workers={kind.engines}",
        f"runtime.torch_threads={kind.threads}",
        "runtime.worker_torch_threads=1",
        f"algorithm.segments_per_round={PROMPTS}",
        f"algorithm.group_size={GROUP}",
        "checkpoint.enabled=false",
        "observe.console=none",
        "observe.tensorboard.enabled=false",
    ]


def from_folder(folder: str) -> list[str]:
    """Return the settings of a run that starts from a warmed-up model, and is not evaluated."""
    return [
        f"algorithm.model.folder={folder}",
        "algorithm.warmup.accuracy=null",
        "eval.interval_rounds=null",
        "eval.at_end=false",
    ]


def time_arm(task: Task, kind: Kind, folder: str, window: int) -> dict[str, Any]:
    """Make the run of an arm; return its figures."""
    first = 2 * kind.degree + 4
    watch = Window(first, first + window)
    with tempfile.TemporaryDirectory() as directory:
        length = [f"run.rounds={first + 1 + window + kind.degree}", f"run.dir={directory}/run"]
        settings = [*overrides_of(task, kind), *from_folder(folder), *length]
        offbeat.train(task.recipe, overrides=settings, callbacks=[watch])
    return watch.figures()


@dataclass(slots=True)
class Scores(Callback):
    """Notes evaluations: version, seconds since the first round, score."""

    points: list[tuple[int, float, float]] = field(default_factory=list)
    ended_s: dict[int, float] = field(default_factory=dict)

    def on_round(self, info: RoundInfo) -> None:
        """Note when a version was made."""
        self.ended_s[info.version] = time.monotonic()

    def on_eval(self, info: EvalInfo) -> None:
        """Note a score, at the time of its version."""
        if info.version in self.ended_s:
            seconds = self.ended_s[info.version] - min(self.ended_s.values())
            self.points.append((info.version, seconds, info.metrics["eval/return_mean"]))


def score_arm(task: Task, kind: Kind, seed: int, rounds: int | None) -> dict[str, Any]:
    """Make a run with evaluations; return its curve."""
    watch = Scores()
    with tempfile.TemporaryDirectory() as directory:
        settings = [*overrides_of(task, kind), f"run.seed={seed}", f"run.dir={directory}/run"]
        settings += ["async_training.enable_async_eval=true"]
        settings += [] if rounds is None else [f"run.rounds={rounds}", f"eval.interval_rounds={rounds // 4}"]
        offbeat.train(task.recipe, overrides=settings, callbacks=[watch])
    return {"points": watch.points}


# ---------------------------------------------------------------- costs, measured at the start


def measure_costs(task: Task, folder: Path, num_rounds: int) -> dict[str, Any]:
    """Warm a model up, keep it in a folder, and measure what engine and learner cost with it."""
    import torch

    from offbeat.algorithms.grpo.build import build, shape_of, task_of
    from offbeat.algorithms.grpo.config import grpo_config
    from offbeat.llm.model import Decoder
    from offbeat.roles import SingleRank

    torch.set_num_threads(1)
    settings = [*overrides_of(task, TWINS[0]), *task.instant]
    config = offbeat.load_config(task.recipe, settings)
    warm = build(config).learner(SingleRank())
    model = Decoder(shape_of(grpo_config(config).model, task_of(config)))
    model.set_weights({name: torch.as_tensor(value) for name, value in warm.weights().items()})
    shutil.rmtree(folder, ignore_errors=True)
    model.write(folder)
    steps = fit_steps(config, model)
    return {"folder": str(folder), **steps, **rounds_by_hand(config, folder, num_rounds)}


def fit_steps(config: RunConfig, model: Any) -> dict[str, float]:
    """Time steps of the engine with some numbers of rows and lengths; fit what a row and a position cost."""
    import numpy as np

    from offbeat.algorithms.grpo.build import task_of
    from offbeat.llm.engine import Engine
    from offbeat.llm.requests import Request

    task, points, times = task_of(config), [], []
    prompts = [tuple(task.tokenizer.encode(task.problem("train", index).prompt)) for index in range(128)]
    length = task.max_new_tokens
    for rows in (4, 16, 64, 128):
        room = max(map(len, prompts[:rows])) + length
        engine = Engine(model, slots=rows, max_length=min(room, model.shape.max_positions))
        for key, prompt in enumerate(prompts[:rows]):
            engine.submit(Request(key, prompt, max_new_tokens=length, seed=key, stop_ids=()))
        places = sum(map(len, prompts[:rows]))
        for step in range(length):
            began_s = time.perf_counter()
            engine.step()
            if step > 0:  # the first one feeds the prompts
                points.append((1.0, rows, places + rows * step))
                times.append(time.perf_counter() - began_s)
    found, *_ = np.linalg.lstsq(np.array(points), np.array(times), rcond=None)
    return dict(zip(("step_s", "row_s", "place_s"), map(float, found.clip(0.0)), strict=True))


def rounds_by_hand(config: RunConfig, folder: Path, num_rounds: int) -> dict[str, Any]:
    """Generate and train some rounds, one after the other: times, lengths, tokens."""
    import torch

    from offbeat.algorithms.grpo.build import build
    from offbeat.roles import SingleRank, WorkerContext
    from offbeat.types import Batch, Ticket

    fresh = config.model_dump()
    fresh["algorithm"]["model"]["folder"] = str(folder)
    fresh["algorithm"]["warmup"]["accuracy"] = None
    roles = build(offbeat.load_config(fresh))
    collector, learner = roles.collect.make(WorkerContext(0, 1, 0)), roles.learner(SingleRank())
    collector.load(0, learner.weights())  # type: ignore[attr-defined]
    generate_s, train_s, groups, num_tokens = 0.0, {1: 0.0, 2: 0.0}, [], 0
    for index in range(num_rounds + 1):
        began_s, segments = time.perf_counter(), list[Any]()
        for number in range(index * PROMPTS, (index + 1) * PROMPTS):
            collector.accept(Ticket(number, 0, 0, 0, seed=number))  # type: ignore[attr-defined]
        while len(segments) < PROMPTS:
            progress = collector.advance()  # type: ignore[attr-defined]
            segments += progress.segments
            time.sleep(0.001 * progress.idle)
        made_s = time.perf_counter() - began_s
        segments = [one for one in segments if not one.drop]
        for threads in train_s:
            torch.set_num_threads(threads)
            began_s = time.perf_counter()
            learner.train(Batch(index, tuple(segments), 0))
            train_s[threads] += (time.perf_counter() - began_s) * (index > 0)
        torch.set_num_threads(1)
        if index > 0:  # the first one warms caches up
            generate_s += made_s
            num_tokens += sum(one.num_steps for one in segments)
            groups += [(len(one.data["prompt"]), one.data["sizes"].tolist()) for one in segments]
    return {
        "generate_s": generate_s / num_rounds,
        "train_s": {threads: seconds / num_rounds for threads, seconds in train_s.items()},
        "tokens": num_tokens / num_rounds,
        "groups": groups,
    }


# ---------------------------------------------------------------- predictions


def predict(task: Task, costs: Mapping[str, Any], kind: Kind, window: int) -> float:
    """Return the time of a round by the model."""
    groups, train_s = costs["groups"], costs["train_s"]
    scale = _scale(task, costs)

    def plan(seed: int) -> list[Response]:
        prompt, sizes = groups[seed % len(groups)]
        rng = Random(seed)
        return [task.response(size, prompt, rng) for size in sizes]

    timing = _timing(costs, scale, train_s.get(kind.threads, train_s.get(str(kind.threads))))
    capacity = (kind.degree + 1) * PROMPTS
    config = PaceConfig(2 * kind.degree + 5 + window + kind.degree, PROMPTS, kind.engines, kind.degree)
    ends = simulate(config, Shop(kind.engines, capacity * GROUP, capacity), timing, plan)
    first = 2 * kind.degree + 4
    return (ends[first + window].time_s - ends[first].time_s) / window


def _timing(costs: Mapping[str, Any], scale: float, train_s: float) -> Timing:
    return Timing(
        step_s=scale * costs["step_s"],
        row_s=scale * costs["row_s"],
        place_s=scale * costs["place_s"],
        token_s=train_s / costs["tokens"],
    )


def _scale(task: Task, costs: Mapping[str, Any]) -> float:
    """Return how much longer generating takes than its steps: prompts, rewards, Python."""
    groups = costs["groups"]
    dry = Task(task.name, task.recipe)

    def plan(seed: int) -> list[Response]:
        prompt, sizes = groups[next(order) % len(groups)]
        return [dry.response(size, prompt, Random(0)) for size in sizes]

    order: Iterator[int] = iter(range(10**6))
    count = len(groups) // PROMPTS
    config = PaceConfig(count, PROMPTS, 1, 0)
    ends = simulate(config, Shop(1, PROMPTS * GROUP, PROMPTS), _timing(costs, 1.0, 0.0), plan)
    return float(costs["generate_s"]) / (ends[-1].time_s / count)


# ---------------------------------------------------------------- the parent: arms and what is kept


@dataclass(slots=True)
class State:
    """What is finished, by arm, in a file that is written after each."""

    path: Path
    found: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> State:
        """Read what an earlier call has left."""
        return State(path, json.loads(path.read_text()) if path.exists() else {})

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what is kept under a name, or make and keep it."""
        if name not in self.found:
            self.found[name] = make()
            temporary = self.path.with_suffix(".part")
            temporary.write_text(json.dumps(self.found, indent=1))
            temporary.replace(self.path)
        return self.found[name]


def in_child(request: Mapping[str, Any]) -> dict[str, Any]:
    """Do a request in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(request)]
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=ARM_TIMEOUT_S, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{request}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Do a request in this process."""
    task = next(one for one in TASKS if one.name == request["task"])
    if request["do"] == "costs":
        return measure_costs(task, Path(request["folder"]), request["rounds"])
    kind = Kind(**request["kind"])
    if request["do"] == "score":
        return score_arm(task, kind, request["seed"], request["rounds"])
    return time_arm(task, kind, request["folder"], request["window"])


class OutOfTimeError(Exception):
    """No arm is begun any more; the next call goes on."""


@dataclass(slots=True)
class Bench:
    """Runs the arms that are not there yet."""

    state: State
    window: int
    repeats: int
    ends_s: float
    keeps_disturbed: bool = False
    rounds_by_hand: int = 4
    twins: Sequence[Kind] = TWINS
    thrown: int = 0

    def costs(self, task: Task) -> dict[str, Any]:
        """Measure a task's costs, once."""
        folder = self.state.path.parent / f"{self.state.path.stem}_{task.recipe}_{len(task.overrides)}"
        request = {"do": "costs", "task": task.name, "folder": str(folder), "rounds": self.rounds_by_hand}
        return dict(self.state.get(f"{task.name}/costs", lambda: self._in_time(request)))

    def arm(self, task: Task, kind: Kind, repeat: int) -> dict[str, Any]:
        """Time an arm until nothing disturbs it."""
        name = f"{task.name}/{kind.name}/{repeat}"
        found = self.state.get(name, lambda: self._undisturbed(task, kind))
        self.thrown += found["thrown"]
        assert found["oldest"] <= kind.degree, f"{name} trained a token {found['oldest']} versions old"
        assert not found["dropped"], f"{name} dropped {found['dropped']} groups"
        return dict(found)

    def _undisturbed(self, task: Task, kind: Kind) -> dict[str, Any]:
        folder = self.costs(task)["folder"]
        request = {"do": "time", "task": task.name, "kind": asdict(kind), "folder": folder}
        for thrown in range(MOST_TRIES + 1):
            found = self._in_time({**request, "window": self.window})
            if found["foreign"] <= MOST_FOREIGN or self.keeps_disturbed:
                return {**found, "thrown": thrown, "is_disturbed": found["foreign"] > MOST_FOREIGN}
            say(f"    thrown away: something else used {found['foreign']:.2f} cores")
        raise SystemExit(f"{MOST_TRIES + 1} windows in a row were disturbed: let nothing else run")

    def _in_time(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if time.monotonic() > self.ends_s:
            raise OutOfTimeError
        return in_child(request)

    def measure(self, task: Task, degrees: Sequence[int]) -> dict[str, Any]:
        """Pick the best twin, let it and each k take turns, and compare with predictions."""
        costs = self.costs(task)
        tried = {twin: self.arm(task, twin, 0)["round_s"] for twin in self.twins}
        best = min(tried, key=tried.__getitem__)
        arms: dict[Kind, list[dict[str, Any]]] = {kind: [] for kind in (best, *map(dial, degrees))}
        for repeat in range(1, self.repeats + 1):
            for kind, kept in arms.items():
                kept.append(self.arm(task, kind, repeat))
        predicted = {kind: predict(task, costs, kind, self.window) for kind in {*self.twins, *arms}}
        twin_s = median([one["round_s"] for one in arms[best]])
        predicted_s = min(predicted[twin] for twin in self.twins)
        rows = {kind.name: _row(kept, twin_s, predicted[kind], predicted_s) for kind, kept in arms.items()}
        twins = {twin.name: {"round_s": tried[twin], "predicted_s": predicted[twin]} for twin in self.twins}
        return {"best twin": best.name, "twins": twins, "arms": rows}


def _row(
    kept: Sequence[Mapping[str, Any]], twin_s: float, predicted_s: float, predicted_twin_s: float
) -> dict[str, Any]:
    times = [one["round_s"] for one in kept]
    return {
        "round_s": median(times),
        "range_s": [min(times), max(times)],
        "speed_up": twin_s / median(times),
        "predicted": predicted_twin_s / predicted_s,
        "predicted_s": predicted_s,
        "oldest": max(one["oldest"] for one in kept),
        "foreign": max(one["foreign"] for one in kept),
        "disturbed": sum(one["is_disturbed"] for one in kept),
        "profile": _profile(kept),
    }


_SHOWN = (
    *("pace/collect_idle_ratio", "pace/train_idle_ratio", "pace/avg_sample_age"),
    *("time/train_s", "time/publish_s", "time/wait_s"),
    *("rollout/live_rows_mean", "rollout/trained_length_mean", "rollout/dispatched_length_mean"),
    *("rollout/length_mean", "learn/ess", "learn/behaviour_kl"),
)


def _profile(kept: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return medians of what says where the time of a round went."""
    names = {name for one in kept for name in one["means"]}
    by_age = {name for name in names if name.startswith(("learn/ess_age_", "learn/behaviour_kl_age_"))}
    found = {
        name: median([one["means"][name] for one in kept if name in one["means"]])
        for name in (*_SHOWN, *sorted(by_age))
        if name in names
    }
    learner = [one["cpu"]["driver and learner"] for one in kept]
    workers = [sum(one["cpu"].values()) - own for one, own in zip(kept, learner, strict=True)]
    return {**found, "cores of driver and learner": median(learner), "cores of engines": median(workers)}


# ---------------------------------------------------------------- what is told


def tell(task: Task, found: Mapping[str, Any], degrees: Sequence[int]) -> bool:
    """Print a task's table; return True if it meets its bars."""
    say(f"\n{task.name}   (best twin: {found['best twin']})")
    for name, twin in found["twins"].items():
        say(f"  {name:30} {twin['round_s']:7.3f} s/round   predicted {twin['predicted_s']:7.3f}")
    for name, row in found["arms"].items():
        low, high = row["range_s"]
        times = f"{row['round_s']:7.3f} s/round ({low:.3f}-{high:.3f})"
        say(f"  {name:30} {times}   {row['speed_up']:.2f}x, predicted {row['predicted']:.2f}x"
            f"   oldest {row['oldest']:.0f}")  # fmt: skip
        say(f"      {_in_words(row['profile'])}")
        if abs(row["speed_up"] / row["predicted"] - 1) > MISSED:
            say(f"      misses its prediction: {_where(row)}")
    ups = {degree: found["arms"][dial(degree).name]["speed_up"] for degree in degrees}
    ups[-1] = max(ups.values())
    missed = {k: bar for k, bar in task.bars.items() if k in ups and ups[k] < bar}
    if task.expected is not None:
        say(
            f"  told beforehand for k = 1, 2, 4: {task.expected}; bars by k (-1: the best): {dict(task.bars)}"
        )
    return not missed


def _in_words(profile: Mapping[str, float]) -> str:
    return ", ".join(f"{name.rpartition('/')[2]} {value:.3g}" for name, value in profile.items())


def _where(row: Mapping[str, Any]) -> str:
    """Say where the time of a round went."""
    profile = row["profile"]
    parts = {name: profile.get(f"time/{name}") for name in ("train_s", "publish_s", "wait_s")}
    told = ", ".join(f"{name} {value:.3f}" for name, value in parts.items() if value is not None)
    return (
        f"a round takes {row['round_s']:.3f} s, predicted {row['predicted_s']:.3f}: {told}; engines idle"
        f" {profile['pace/collect_idle_ratio']:.0%}, learner idle {profile['pace/train_idle_ratio']:.0%}"
    )


def score(bench: Bench, task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """Make the runs that are judged by their scores."""
    curves: dict[int, list[list[tuple[int, float, float]]]] = {0: [], 2: []}
    for seed in range(1 if options.quick else 3):
        for degree, found in curves.items():
            request = {"do": "score", "task": task.name, "kind": asdict(dial(degree)), "seed": seed}
            request["rounds"] = 8 if options.quick else None
            name = f"{task.name}/score/k = {degree}/{seed}"
            kept = bench.state.get(name, lambda request=request: in_child(request))  # type: ignore[misc]
            found.append(kept["points"])
    last = {k: [_mean_of_last(curve) for curve in found] for k, found in curves.items()}
    goal = 0.9 * median(last[0])
    times = {k: median([_time_to(curve, goal) for curve in found]) for k, found in curves.items()}
    say(f"\n{task.name}: held-out score, mean of the last five evaluations of each seed")
    for degree in curves:
        say(f"  k = {degree}: {[round(one, 3) for one in last[degree]]}, {times[degree]:.0f} s to {goal:.3f}")
    say(f"  time to that score over that of k = 0: {times[2] / times[0]:.2f}" if times[0] else "")
    return {"last": last, "goal": goal, "seconds": times, "curves": curves}


def _mean_of_last(curve: Sequence[Sequence[float]]) -> float:
    last = [point[2] for point in curve[-5:]]
    return sum(last) / max(1, len(last))


def _time_to(curve: Sequence[Sequence[float]], goal: float) -> float:
    """Return the seconds until a score is reached; infinity if it never is."""
    return next((point[1] for point in curve if point[2] >= goal), float("inf"))


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument(
        "--tasks", nargs="+", choices=[one.name for one in TASKS], help="these rows (all claims)"
    )
    made.add_argument(
        "--state", type=Path, help="file of finished arms (benchmarks/results/llm_async_arms.json)"
    )
    made.add_argument("--minutes", type=float, default=75.0, help="begin no arm after that (75)")
    made.add_argument("--score", action="store_true", help="the runs that are judged by their scores")
    made.add_argument("--child", help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(answer(json.loads(options.child))))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) if options.quick else Path(__file__).parent / "results"
        return measure(options, options.state or place / "llm_async_arms.json")


def measure(options: argparse.Namespace, path: Path) -> int:
    """Measure the tasks that are there; tell what was found."""
    wanted = options.tasks or (["arithmetic-grpo"] if options.quick else [one.name for one in TASKS[:-1]])
    there = RecipeBook().names()
    tasks = [one for one in TASKS if one.name in wanted]
    for task in [one for one in tasks if one.recipe not in there]:
        say(f"{task.name}: there is no recipe {task.recipe} here")
    tasks = [one for one in tasks if one.recipe in there]
    began_s = time.monotonic()
    bench = Bench(State.read(path), WINDOW, REPEATS, began_s + 60 * options.minutes)
    degrees: Sequence[int] = DEGREES
    if options.quick:
        bench.window, bench.repeats, bench.keeps_disturbed, degrees = 4, 1, True, (2,)
        bench.rounds_by_hand, bench.twins = 1, TWINS[:1]
    found: dict[str, Any] = {}
    holds = True
    try:
        for task in tasks:
            if options.score:
                found[task.name] = score(bench, task, options)
                continue
            found[task.name] = bench.measure(task, degrees)
            holds &= tell(task, found[task.name], degrees)
    except OutOfTimeError:
        say(f"\n{options.minutes:g} minutes are over: call again to go on")
        holds = False
    say(f"\nwindows thrown away, since something else ran: {bench.thrown}")
    seconds = time.monotonic() - began_s
    return conclude({"tasks": found, "thrown": bench.thrown, "seconds": seconds}, holds, options)


if __name__ == "__main__":
    sys.exit(main())
