"""GRPO against trl's GRPOTrainer: the same tiny model, tasks and lengths, on one or two cores, both at k = 0.

trl lives in a virtual environment of its own, ``.venvs/trl``, made when it is needed, with the version of
torch that offbeat runs with. Both start from the same warmed-up model, take rounds of 16 prompts with 8
responses and one step of AdamW each, and have one and then two threads of torch; the better of the two
counts, on either side.

  equal       responses of exactly 64 tokens: trained tokens per CPU-second. Bar: 1.2 times trl's.
  heavy tail  `reverse-grpo`, lengths log-normal up to 480: the same. Bar: 3 times trl's. Most of that is
              continuous batching and packing, which ``generate`` and padding do without: a batch there takes
              as long as its longest response. It has nothing to do with the dial.
  accuracy    `arithmetic-grpo`: wall time until 9/10 of the held-out accuracy that trl ends with, at k = 0
              and at k = 2 (`processes`); evaluations count in our time and not in trl's. No bar.

CPU-seconds are those of the whole process from the end of the first rounds to that of the last, with all
threads. Runs take turns; medians over the repeats. ``--no-peer`` makes our runs only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ONE_THREAD, REPOSITORY, conclude, median, parser, peer_python, say

import offbeat
from offbeat.config.recipes import RecipeBook
from offbeat.llm.tasks import TASKS, Problem, make_task
from offbeat.llm.tokens import CharTokenizer
from offbeat.observe.callbacks import Callback, EvalInfo, RoundInfo

REQUIREMENTS = ("trl==1.16.0", "transformers", "datasets", "safetensors")
PROMPTS, GROUP, LR = 16, 8, 2e-4
NUM_PROBLEMS = 4_000
FIRST = 3
"""Rounds before the clock starts."""
THREADS = (1, 2)
LETTERS = "abcdefghijklmnopqrstuvwxyz="


class Endless(CharTokenizer):
    """A tokenizer whose texts end at their limit only."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return none."""
        return ()


class EqualLengths:
    """Prompts of 16 letters; every response has 64 tokens, and no reward."""

    def __init__(self, length: int = 64) -> None:
        self.tokenizer = Endless(LETTERS, add_bos=False)
        self.max_new_tokens, self.max_prompt_tokens = length, 16

    def num_problems(self, split: str) -> int:
        """Return how many prompts a split has."""
        return NUM_PROBLEMS

    def problem(self, split: str, index: int) -> Problem:
        """Return a prompt: its number, in letters."""
        text = "".join(LETTERS[(index // 26**place) % 26] for place in range(15))
        return Problem(f"{text}=", "")

    def reward(self, problem: Problem, response: str) -> float:
        """Return nothing."""
        return 0.0


TASKS["equal_lengths"] = EqualLengths  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Row:
    """A task, the settings of its runs here, and what trl has to be told.

    ``spare``: a response is cut off so many tokens behind the length of its prompt; ``least``: its least
    length.
    """

    name: str
    recipe: str
    bar: float | None
    overrides: tuple[str, ...] = ()
    rule: str = "equal"
    spare: int | None = None
    least: int = 0


EQUAL = ("env.id=equal_lengths", "env.kwargs=null", "algorithm.warmup.accuracy=null")
ROWS = (
    Row(
        "equal", "arithmetic-grpo", 1.2, ("env.id=equal_lengths", "algorithm.warmup.accuracy=null"), least=64
    ),
    Row("heavy tail", "reverse-grpo", 3.0, rule="prefix", spare=8),
)
ACCURACY = Row("accuracy", "arithmetic-grpo", None)


# ---------------------------------------------------------------- in the process of a run of ours


@dataclass(slots=True)
class Watch(Callback):
    """Notes after each round the time, processor time and trained tokens; and evaluations."""

    marks: list[tuple[float, float, float]] = field(default_factory=list)
    ended_s: dict[int, float] = field(default_factory=dict)
    points: list[tuple[int, float, float]] = field(default_factory=list)

    def on_round(self, info: RoundInfo) -> None:
        """Note a round."""
        mark = (time.perf_counter(), time.process_time(), info.metrics["learn/processed_samples"])
        self.marks.append(mark)
        self.ended_s[info.version] = mark[0]

    def on_eval(self, info: EvalInfo) -> None:
        """Note a score, at the time of its version."""
        if info.version in self.ended_s:
            seconds = self.ended_s[info.version] - self.marks[0][0]
            self.points.append((info.version, seconds, info.metrics["eval/return_mean"]))


def settings_of(row: Row) -> list[str]:
    """Return the settings of a row, but for its length and its model."""
    return [
        *row.overrides,
        f"algorithm.segments_per_round={PROMPTS}",
        f"algorithm.group_size={GROUP}",
        f"algorithm.lr={LR}",
        "async_training.open_rounds=0",
        "checkpoint.enabled=false",
        "observe.console=none",
        "observe.tensorboard.enabled=false",
    ]


def train_ours(row: Row, request: Mapping[str, Any]) -> dict[str, Any]:
    """Make a run; return what it took."""
    watch, degree = Watch(), request["degree"]
    kind = "inline" if degree == 0 else "processes"
    with tempfile.TemporaryDirectory() as directory:
        settings = [
            *settings_of(row),
            f"async_training.off_policy_degree={degree}",
            f"runtime.kind={kind}",
            "runtime.num_workers=1",
            f"runtime.torch_threads={request['threads']}",
            f"algorithm.model.folder={request['folder']}",
            "algorithm.warmup.accuracy=null",
            f"eval.interval_rounds={request['every'] or 'null'}",
            "eval.at_end=false",
            f"run.rounds={request['steps']}",
            f"run.seed={request['seed']}",
            f"run.dir={directory}/run",
        ]
        offbeat.train(row.recipe, overrides=settings, callbacks=[watch])
    (wall, cpu, tokens), (last_wall, last_cpu, last_tokens) = watch.marks[FIRST], watch.marks[-1]
    return {
        "wall_s": last_wall - wall,
        "cpu_s": last_cpu - cpu,
        "tokens": last_tokens - tokens,
        "steps": len(watch.marks) - 1 - FIRST,
        "points": watch.points,
    }


def write_model(row: Row, folder: Path) -> None:
    """Warm a model up as the recipe does, and write it."""
    import torch

    from offbeat.algorithms.grpo.build import build, shape_of, task_of
    from offbeat.algorithms.grpo.config import grpo_config
    from offbeat.llm.model import Decoder
    from offbeat.roles import SingleRank

    config = offbeat.load_config(row.recipe, settings_of(row))
    weights = build(config).learner(SingleRank()).weights()
    model = Decoder(shape_of(grpo_config(config).model, task_of(config)))
    model.set_weights({name: torch.as_tensor(value) for name, value in weights.items()})
    model.write(folder)


# ---------------------------------------------------------------- runs


def trl_request(row: Row, request: Mapping[str, Any], scratch: str) -> dict[str, Any]:
    """Say to trl what the recipe says to us."""
    config = offbeat.load_config(row.recipe, settings_of(row))
    task = make_task(config.env.id, dict(config.env.kwargs))
    tokenizer = task.tokenizer
    assert isinstance(tokenizer, CharTokenizer)
    count = min(NUM_PROBLEMS, task.num_problems("train"))
    train = [task.problem("train", index) for index in range(count)]
    held_out = [task.problem("held_out", index) for index in range(1_000)] if request["every"] else []
    return {
        **request,
        "characters": tokenizer.characters,
        "first_id": tokenizer.vocab_size - len(tokenizer.characters),
        "end_id": tokenizer.end_id,
        "train": [(one.prompt, one.answer) for one in train],
        "held_out": [(one.prompt, one.answer) for one in held_out],
        "longest": task.max_new_tokens,
        "rule": row.rule,
        "spare": row.spare,
        "least": row.least,
        "prompts": PROMPTS,
        "group": GROUP,
        "lr": LR,
        "first": FIRST,
        "scratch": scratch,
    }


def in_process(command: Sequence[str], given: str = "") -> dict[str, Any]:
    """Run a command; return the JSON object of its last line."""
    environment = {**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        timeout=3_600,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command[:2]}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@dataclass(slots=True)
class Contest:
    """Makes the runs of both sides."""

    scratch: Path
    repeats: int
    steps: int
    sides: Sequence[str] = ("offbeat", "trl")

    def model(self, row: Row) -> str:
        """Return the folder of the model that both start from."""
        folder = self.scratch / row.name.replace(" ", "_")
        if not folder.exists():
            write_model(row, folder)
        return str(folder)

    def run(self, who: str, row: Row, **request: Any) -> dict[str, Any]:
        """Make a run of one side."""
        asked = {"folder": self.model(row), "every": 0, "seed": 0, "degree": 0, "threads": 1, **request}
        if who == "offbeat":
            asked["row"] = row.name
            return in_process([sys.executable, __file__, "--child", json.dumps(asked)])
        script = REPOSITORY / "benchmarks" / "peers" / "trl_grpo.py"
        with tempfile.TemporaryDirectory() as scratch:
            whole = json.dumps(trl_request(row, asked, scratch))
            return in_process([peer_python("trl", REQUIREMENTS), str(script)], whole)

    def throughput(self, row: Row) -> dict[str, Any]:
        """Compare trained tokens per CPU-second."""
        rates: dict[str, dict[int, list[float]]] = {who: {n: [] for n in THREADS} for who in self.sides}
        lengths: dict[str, list[float]] = {who: [] for who in self.sides}
        for _ in range(self.repeats):
            for threads in THREADS:
                for who in self.sides:
                    found = self.run(who, row, steps=self.steps, threads=threads)
                    rates[who][threads].append(found["tokens"] / found["cpu_s"])
                    lengths[who].append(found["tokens"] / (found["steps"] * PROMPTS * GROUP))
        medians = {who: {n: median(values) for n, values in by.items()} for who, by in rates.items()}
        best = {who: max(by.values()) for who, by in medians.items()}
        say(f"\n{row.name}: trained tokens per CPU-second")
        for who in self.sides:
            told = ", ".join(f"{n} thread{'s' * (n > 1)} {rate:,.0f}" for n, rate in medians[who].items())
            say(f"  {who:8} {told}   (mean length {median(lengths[who]):.1f})")
        ratio = best["offbeat"] / best.get("trl", float("nan"))
        say(f"  ratio of the better ones: {ratio:.2f}, bar {row.bar}")
        return {"rates": medians, "lengths": lengths, "ratio": ratio}

    def accuracy(self, steps: int, every: int) -> dict[str, Any]:
        """Compare the time to the same held-out accuracy."""
        runs = {"trl": ("trl", 0), "offbeat, k = 0": ("offbeat", 0), "offbeat, k = 2": ("offbeat", 2)}
        curves = {
            name: self.run(who, ACCURACY, steps=steps, every=every, degree=degree)["points"]
            for name, (who, degree) in runs.items()
            if who in self.sides
        }
        last = [point[2] for point in next(iter(curves.values()))[-5:]]
        goal = 0.9 * sum(last) / len(last)
        times = {name: _time_to(curve, goal) for name, curve in curves.items()}
        say(f"\naccuracy: wall seconds to {goal:.3f} of the held-out problems, one thread each")
        for name, seconds in times.items():
            say(f"  {name:16} {seconds:8.1f}")
        return {"goal": goal, "seconds": times, "curves": curves}


def _time_to(curve: Sequence[Sequence[float]], goal: float) -> float:
    """Return the seconds until a score is reached; infinity if it never is."""
    return next((point[1] for point in curve if point[2] >= goal), float("inf"))


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=3, help="runs of each kind, taking turns (3)")
    made.add_argument("--steps", type=int, default=20, help="rounds of a run for its rate (20)")
    made.add_argument("--rounds", type=int, default=1_000, help="rounds of the runs for accuracy (1000)")
    made.add_argument("--no-peer", action="store_true", help="leave trl out: nothing is compared")
    made.add_argument("--child", help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    if options.child is not None:
        request = json.loads(options.child)
        row = next(one for one in (*ROWS, ACCURACY) if one.name == request["row"])
        print(json.dumps(train_ours(row, request)))
        return 0
    if options.quick:
        options.repeats, options.steps, options.rounds = 1, FIRST + 2, 8
    figures: dict[str, Any] = {}
    holds = True
    with tempfile.TemporaryDirectory() as scratch:
        contest = Contest(Path(scratch), options.repeats, options.steps)
        contest.sides = contest.sides[: 1 if options.no_peer else 2]
        for row in ROWS:
            if row.recipe not in RecipeBook().names():
                say(f"{row.name}: there is no recipe {row.recipe} here")
                continue
            figures[row.name] = found = contest.throughput(row)
            holds &= row.bar is None or found["ratio"] >= row.bar
        figures["accuracy"] = contest.accuracy(options.rounds, max(1, options.rounds // 40))
    say("the heavy tail is won mostly by continuous batching and packing, not by asynchrony")
    return conclude(figures, holds, options)


if __name__ == "__main__":
    sys.exit(main())
