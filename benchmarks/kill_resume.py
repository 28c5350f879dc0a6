"""A run that is killed at any moment and resumed ends with the weights of one that was never disturbed.

One run of small CartPole at k = 0 with two worker processes goes through: its digest is the reference. Then
``--kills`` runs of the same settings are killed with SIGKILL, first the command itself, so that nothing of it
can react or start anything again, then whatever it had started. Their moments take turns:

- ``start``: between the start of the command and the first trained round, mostly early;
- ``save``: while a checkpoint is being written (its directory is there under its temporary name);
- ``run``: between the first round and the end of the run, drawn evenly by rounds;
- ``twice``: as ``run``, and the resume is killed again, at a moment drawn evenly over the time the run takes.

What is left is resumed with ``offbeat resume``, or started again where the command had not even written its
``manifest.json``. Every run writes a checkpoint each third round, so that saving is a large part of it.

Bars: every run ends with the reference digest, and no process outlives the kill by 5 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from common import ONE_THREAD, conclude, offbeat_command, parser, say

SETTINGS = (
    *("env.num_envs=8", "algorithm.num_steps=16", "algorithm.minibatch_size=64", "run.stop_return=null"),
    *("async_training.off_policy_degree=0", "runtime.kind=processes", "runtime.num_workers=2"),
    *("run.max_restarts=0", "checkpoint.interval_rounds=3", "eval.episodes=2", "eval.num_envs=2"),
    *("observe.console=none", "observe.tensorboard=false"),
)
MOMENTS = ("start", "save", "run", "twice")
LIMIT_S = 120.0
GONE_LIMIT_S = 5.0
POLL_S = 0.002


class Command:
    """An ``offbeat`` command in a process of its own, that can be killed with all its descendants."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.began_s = time.perf_counter()
        self._process = subprocess.Popen(
            [*offbeat_command(), *arguments],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.kill()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def age_s(self) -> float:
        return time.perf_counter() - self.began_s

    def wait(self) -> dict[str, object]:
        """The JSON object of a command that ended well."""
        output, errors = self._process.communicate(timeout=LIMIT_S)
        if code := self._process.returncode:
            raise SystemExit(f"offbeat {' '.join(self.arguments)}: exit code {code}\n{errors[-3000:]}")
        values: dict[str, object] = json.loads(output.splitlines()[-1])
        return values

    def kill(self) -> int:
        """Kill the command, then its descendants; how many of them were still there after `GONE_LIMIT_S`."""
        try:
            descendants = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            descendants = []
        self._process.kill()
        self._process.wait()
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        return len(psutil.wait_procs(descendants, GONE_LIMIT_S)[1])


# ---------------------------------------------------------------- moments


def rounds_in(run_dir: Path) -> int:
    """Rounds that a run has told of so far."""
    with contextlib.suppress(FileNotFoundError):
        return (run_dir / "events.jsonl").read_bytes().count(b'"kind":"round"')
    return 0


def is_saving(run_dir: Path) -> bool:
    """Whether a checkpoint is being written right now."""
    with contextlib.suppress(FileNotFoundError):
        return any(path.name.startswith(".writing") for path in (run_dir / "checkpoints").iterdir())
    return False


@dataclass(frozen=True, slots=True)
class Reference:
    """The undisturbed run: its weights, and how long its parts took."""

    digest: str
    rounds: int
    first_round_s: float
    total_s: float


def until(command: Command, is_time: Callable[[], bool]) -> None:
    """Wait for the moment, or for the end of the command."""
    while command.is_running and not is_time():
        if command.age_s > LIMIT_S:
            raise SystemExit(f"offbeat {' '.join(command.arguments)} takes more than {LIMIT_S:g} s")
        time.sleep(POLL_S)


def await_moment(moment: str, command: Command, run_dir: Path, reference: Reference, rng: Random) -> None:
    """Wait for the moment of the kill, or for the end of the command."""
    at_round = rng.randint(1, reference.rounds)
    at_s = reference.first_round_s * rng.random() ** 2
    if moment == "start":
        until(command, lambda: command.age_s >= at_s)
    elif moment == "save":
        until(command, lambda: rounds_in(run_dir) >= min(at_round, reference.rounds - 3))
        until(command, lambda: is_saving(run_dir))
    else:
        until(command, lambda: rounds_in(run_dir) >= at_round)


# ---------------------------------------------------------------- one case


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a kill left behind, and whether it could be told from the weights in the end."""

    left: str
    is_same: bool
    num_survivors: int
    was_saving: bool


def measure_reference(directory: Path, rounds: int) -> Reference:
    run_dir = directory / "reference"
    with Command(train_arguments(run_dir, rounds)) as command:
        until(command, lambda: rounds_in(run_dir) >= 1)
        first_round_s = command.age_s
        digest = str(command.wait()["digest"])
        return Reference(digest, rounds, first_round_s, command.age_s)


def train_arguments(run_dir: Path, rounds: int) -> list[str]:
    return ["train", "cartpole-ppo", *SETTINGS, f"run.rounds={rounds}", f"run.dir={run_dir}", "--json"]


def go_on(run_dir: Path, rounds: int) -> Command:
    """Resume what is there, or start the run again."""
    if (run_dir / "manifest.json").exists():
        return Command(["resume", str(run_dir), "--json"])
    return Command(train_arguments(run_dir, rounds))


def state_of(run_dir: Path, was_running: bool) -> str:
    if not (run_dir / "manifest.json").exists():
        return "nothing"
    if not was_running:
        return "a finished run"
    names = [path.name for path in (run_dir / "checkpoints").glob("*")]
    return "checkpoints" if any(name.startswith("step_") for name in names) else "no checkpoint"


def run_case(moment: str, run_dir: Path, reference: Reference, rng: Random) -> Outcome:
    with Command(train_arguments(run_dir, reference.rounds)) as command:
        await_moment(moment, command, run_dir, reference, rng)
        was_running = command.is_running
        survivors = command.kill()
    was_saving, left = is_saving(run_dir), state_of(run_dir, was_running)
    if moment == "twice":
        at_s = rng.uniform(0.0, reference.total_s)
        with go_on(run_dir, reference.rounds) as command:
            until(command, lambda: command.age_s >= at_s)
            survivors += command.kill()
    with go_on(run_dir, reference.rounds) as command:
        digest = command.wait()["digest"]
    return Outcome(left, digest == reference.digest, survivors, was_saving)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=20, help="runs that are killed (20)")
    made.add_argument("--rounds", type=int, default=60, help="rounds of a run (60)")
    made.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    options = made.parse_args(arguments)
    kills = len(MOMENTS) if options.quick else options.kills
    rng, began_s = Random(options.seed), time.perf_counter()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-kill-") as where:
        reference = measure_reference(Path(where), options.rounds)
        say(f"undisturbed: {reference.total_s:.1f} s, first round after {reference.first_round_s:.1f} s")
        for case in range(kills):
            moment = MOMENTS[case % len(MOMENTS)]
            outcomes.append(outcome := run_case(moment, Path(where) / f"{case}", reference, rng))
            verdict = "same weights" if outcome.is_same else "OTHER WEIGHTS"
            saving = ", half a checkpoint" if outcome.was_saving else ""
            say(f"  {case:3} killed in {moment:6} left {outcome.left}{saving}: {verdict}")
    same, survivors = sum(o.is_same for o in outcomes), sum(o.num_survivors for o in outcomes)
    say(f"{same} of {kills} ended with the same weights; {survivors} processes outlived a kill")
    figures = {
        "kills": kills,
        "same weights": same,
        "survivors": survivors,
        "left": Counter(outcome.left for outcome in outcomes),
        "killed while saving": sum(outcome.was_saving for outcome in outcomes),
        "seconds": time.perf_counter() - began_s,
    }
    return conclude(figures, same == kills and survivors == 0, options)


if __name__ == "__main__":
    sys.exit(main())
