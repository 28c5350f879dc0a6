"""Training recipes with several seeds: what the benchmarks of learning share.

Runs are kept in a folder, their figures beside them, so that a benchmark that was interrupted goes on where
it was. Processor time is that of a run with all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ONE_THREAD, offbeat_command

from offbeat.observe.events import read_events, read_rounds

Figures = dict[str, Any]
Measure = Callable[["Finished"], Figures]


@dataclass(frozen=True, slots=True)
class Running:
    """A run under way."""

    name: str
    seed: int
    directory: Path
    process: subprocess.Popen[bytes]
    started_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that came to its end, and what it took."""

    name: str
    seed: int
    directory: Path
    cpu_s: float
    wall_s: float

    def rounds(self) -> list[dict[str, float]]:
        """Metrics of every round."""
        return [event["metrics"] for event in read_rounds(self.directory / "events.jsonl")]

    def evaluations(self) -> list[dict[str, float]]:
        """Metrics of every evaluation, with the environment steps and the seconds until then."""
        at = {int(found["pace/train_count"]): found for found in self.rounds()}
        events = read_events(self.directory / "events.jsonl")
        metrics = [event["metrics"] for event in events if event["kind"] == "eval"]
        return [
            {
                **found,
                "env_steps": at[int(found["eval/version"])]["rollout/total_env_steps"],
                "elapsed_s": at[int(found["eval/version"])]["time/elapsed_s"],
            }
            for found in metrics
            if int(found["eval/version"]) in at
        ]


def add_options(options_of: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """What such a benchmark can be told."""
    options_of.add_argument("--seeds", type=int, default=5)
    options_of.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options_of.add_argument("--only", action="extend", nargs="+", choices=names, help="train these instead")
    options_of.add_argument("--set", action="append", metavar="KEY=VALUE", help="a setting of every run")
    options_of.add_argument("--keep", type=Path, help="keep runs here; those that are there are not repeated")


def measured(
    recipes: Mapping[str, Sequence[str]],
    options: argparse.Namespace,
    runs: Path,
    measure: Measure,
    first_seed: int = 1,
) -> dict[str, list[Figures]]:
    """Train each recipe (with its settings) with every seed; what ``measure`` says of the runs, by name."""
    seeds = range(first_seed, first_seed + options.seeds)
    runs.mkdir(parents=True, exist_ok=True)
    asked = {name: [*recipe, *(options.set or ())] for name, recipe in recipes.items()}
    for done in _trained(asked, seeds, options.jobs, runs):
        figures = {"seed": done.seed, "jobs": options.jobs, "settings": asked[done.name], **measure(done)}
        _figures_file(runs, done.name, done.seed).write_text(json.dumps(figures))
    return {name: [_kept(runs, name, seed, asked[name]) for seed in seeds] for name in asked}


def _kept(runs: Path, name: str, seed: int, asked: Sequence[str]) -> Figures:
    path = _figures_file(runs, name, seed)
    figures: Figures = json.loads(path.read_text())
    if figures["settings"] != list(asked):
        raise SystemExit(f"{path} is of other settings, {figures['settings']}: keep these runs elsewhere")
    return figures


def _figures_file(runs: Path, name: str, seed: int) -> Path:
    return runs / f"{name}-{seed}.json"


def _trained(
    recipes: Mapping[str, Sequence[str]], seeds: Sequence[int], jobs: int, runs: Path
) -> Iterator[Finished]:
    waiting = [
        (name, seed) for seed in seeds for name in recipes if not _figures_file(runs, name, seed).exists()
    ]
    running: list[Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, seed = waiting.pop(0)
                running.append(_start(name, seed, runs, recipes[name]))
            run, cpu_s = _first_to_end(running)
            running.remove(run)
            wall_s = time.perf_counter() - run.started_s
            yield Finished(run.name, run.seed, run.directory, cpu_s, wall_s)
    finally:
        for run in running:
            run.process.send_signal(signal.SIGINT)
            run.process.wait()


def _start(name: str, seed: int, runs: Path, arguments: Sequence[str]) -> Running:
    directory = runs / f"{name}-{seed}"
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was interrupted
    settings = (
        f"run.seed={seed}",
        f"run.dir={directory}",
        "observe.console=none",
        "observe.tensorboard=false",
    )
    with open(directory.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            [*offbeat_command(), "train", *arguments, *settings],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ONE_THREAD},
        )
    return Running(name, seed, directory, process, time.perf_counter())


def _first_to_end(running: Sequence[Running]) -> tuple[Running, float]:
    """Wait for the first of some runs to end; return it and its processor seconds."""
    pid, status, used = os.wait4(-1, 0)
    run = next(run for run in running if run.process.pid == pid)
    run.process.returncode = os.waitstatus_to_exitcode(status)
    if run.process.returncode != 0:
        raise SystemExit(f"{run.directory}: {run.directory.with_suffix('.log').read_text()[-2000:]}")
    return run, used.ru_utime + used.ru_stime
