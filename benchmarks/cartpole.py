"""What it costs to solve CartPole-v1, against peers with their own tuned settings, timed from outside.

Every contestant is a command in a fresh process. Its environment (`logged_cartpole`, the same for all)
writes down the return of each training episode; a watcher reads along, and the first time that the mean of
the last 100 episodes is 475 or more it notes the processor seconds of the whole tree of processes
(imports, workers, processes that have already ended) and the wall seconds since the start, and ends it.
Nothing that a contestant says about itself is used. Nobody evaluates. One thread per process, for all.
Seeds are interleaved: each seed is run by every contestant before the next one.

A peer lives in a virtual environment of its own, ``.venvs/PEER``, made when it is needed, with the
version of torch that offbeat runs with.

  offbeat         ``offbeat train cartpole-ppo``
  offbeat sync    the same recipe on two processes: one that collects, one that learns
  offbeat async   ``offbeat train cartpole-ppo-async`` on two processes

Bars: the median processor seconds of ``offbeat`` are at most 0.3 times each peer's; the median wall seconds
of ``offbeat async`` are less than those of ``offbeat sync``; everybody of ours solves it with every seed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ONE_THREAD, ProcessTree, conclude, median, offbeat_command, parser, peer_python, say

HERE = Path(__file__).resolve().parent
SOLVED_RETURN, EPISODES_AVERAGED = 475.0, 100
BAR_CPU, BAR_WALL = 0.3, 1.0
TURNS = 3
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library: what to install, and the script that trains with it."""

    requirements: tuple[str, ...]
    script: str


PEERS = {"stable-baselines3": Peer(("stable-baselines3==2.9.2", "gymnasium"), "stable_baselines3_ppo.py")}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run went. ``steps`` counts those of finished episodes."""

    solved: bool
    cpu_s: float
    wall_s: float
    episodes: int
    steps: int


# ---------------------------------------------------------------- contestants


def _python(name: str) -> str:
    return peer_python(name, PEERS[name].requirements)


def peer_command(name: str, seed: int) -> list[str]:
    return [_python(name), str(HERE / "peers" / PEERS[name].script), str(seed)]


def train_command(recipe: str, seed: int, run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """``offbeat train`` on the logged environment, left to the watcher to judge and to stop."""
    settings = (
        "env.id=logged_cartpole:LoggedCartPole-v1",
        f"run.seed={seed}",
        f"run.dir={run_dir}",
        "run.stop_return=null",
        "eval.interval_rounds=null",
        "eval.at_end=false",
    )
    return [*offbeat_command(), "train", recipe, *settings, *overrides]


@dataclass(slots=True)
class Contest:
    """All runs that are to be made, and how they went."""

    peers: Sequence[str]
    num_workers: int
    limit_s: float
    overrides: Sequence[str]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def run(self, seeds: Sequence[int]) -> None:
        """Make all runs."""
        for name in self.peers:
            _python(name)
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix="offbeat-cartpole-") as directory:
                for number, (name, command) in enumerate(self._commands(seed, Path(directory))):
                    outcome = watch(command, Path(directory) / f"episodes-{number}", self.limit_s)
                    self.outcomes.setdefault(name, []).append(outcome)
                    say(_line(f"{name}, seed {seed}", [outcome]))

    def _commands(self, seed: int, directory: Path) -> list[tuple[str, list[str]]]:
        """Runs with one seed; sync and async differ by little, so they take turns several times."""
        processes = ("runtime.kind=processes", f"runtime.num_workers={self.num_workers}")
        pair = [
            ("offbeat sync", "cartpole-ppo", processes),
            ("offbeat async", "cartpole-ppo-async", processes),
        ]
        commands = [(name, peer_command(name, seed)) for name in self.peers]
        for turn, (name, recipe, overrides) in enumerate([("offbeat", "cartpole-ppo", ()), *pair * TURNS]):
            run_dir = directory / f"run-{turn}"
            commands.append((name, train_command(recipe, seed, run_dir, (*overrides, *self.overrides))))
        return commands


# ---------------------------------------------------------------- watching


class EpisodeFile:
    """Reads along in a file of returns."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()
        self._last: deque[float] = deque(maxlen=EPISODES_AVERAGED)
        self._rest = ""
        self.episodes, self.steps = 0, 0

    def is_solved(self) -> bool:
        """Take in what is new, episode by episode, up to the one that solves it."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            self._last.append(float(line))
            self.episodes, self.steps = self.episodes + 1, self.steps + int(float(line))
            if len(self._last) == EPISODES_AVERAGED and sum(self._last) >= SOLVED_RETURN * EPISODES_AVERAGED:
                return True
        return False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def watch(command: Sequence[str], scratch: Path, limit_s: float) -> Outcome:
    """Run a contestant until it has solved the task, has ended, or has used up its time."""
    log, output = scratch.with_suffix(".episodes"), scratch.with_suffix(".log")
    episodes = EpisodeFile(log)
    environment = {**ONE_THREAD, "PYTHONPATH": str(HERE), "EPISODE_LOG": str(log)}
    tree = ProcessTree(command, environment, output)
    tree.start()
    try:
        solved, running = False, True
        give_up_s = time.perf_counter() + limit_s
        while not solved and running and time.perf_counter() < give_up_s:
            time.sleep(POLL_S)
            running, solved = tree.is_running, episodes.is_solved()
        cost = tree.cost()
        if episodes.episodes == 0:
            raise SystemExit(f"{' '.join(command)} finished no episode:\n{tree.log_tail()}")
    finally:
        tree.end()
        episodes.close()
    return Outcome(solved, cost.cpu_s, cost.wall_s, episodes.episodes, episodes.steps)


# ---------------------------------------------------------------- results


def _line(name: str, outcomes: Sequence[Outcome]) -> str:
    typical = {key: median([getattr(o, key) for o in outcomes]) for key in ("cpu_s", "wall_s", "steps")}
    solved = sum(outcome.solved for outcome in outcomes)
    return (
        f"{name:28} solved {solved}/{len(outcomes)}   {typical['cpu_s']:6.2f} CPU-s"
        f"   {typical['wall_s']:6.2f} s   {typical['steps']:7.0f} steps"
    )


def summarize(contest: Contest) -> tuple[dict[str, Any], bool]:
    """Medians, ratios, and whether the bars were met."""
    say("\nmedians")
    cpu_s, wall_s, figures = {}, {}, dict[str, Any]()
    for name, outcomes in contest.outcomes.items():
        say(_line(name, outcomes))
        cpu_s[name] = median([outcome.cpu_s for outcome in outcomes])
        wall_s[name] = median([outcome.wall_s for outcome in outcomes])
        figures[name] = {
            "cpu_s": cpu_s[name],
            "wall_s": wall_s[name],
            "steps": median([outcome.steps for outcome in outcomes]),
            "solved": sum(outcome.solved for outcome in outcomes),
            "runs": len(outcomes),
        }
    ours = [outcome for name, found in contest.outcomes.items() if name not in PEERS for outcome in found]
    cpu_ratios = {f"cpu_s of offbeat / {peer}": cpu_s["offbeat"] / cpu_s[peer] for peer in contest.peers}
    wall_ratio = wall_s["offbeat async"] / wall_s["offbeat sync"]
    for name, ratio in cpu_ratios.items():
        say(f"{name}: {ratio:.3f}   bar: <= {BAR_CPU}")
    say(f"wall_s of offbeat async / offbeat sync: {wall_ratio:.3f}   bar: < {BAR_WALL:g}")
    cheap = all(ratio <= BAR_CPU for ratio in cpu_ratios.values())
    holds = all(outcome.solved for outcome in ours) and cheap and wall_ratio < BAR_WALL
    return {"contestants": figures, **cpu_ratios, "wall_s of async / sync": wall_ratio}, holds


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=sorted(PEERS), help="(all)")
    made.add_argument("--seeds", type=int, default=3, help="how many seeds, 1, 2, ... (3)")
    made.add_argument("--workers", type=int, default=1, help="collectors of offbeat sync and async (1)")
    made.add_argument("--limit-s", type=float, default=300.0, help="longest run, in seconds (300)")
    made.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings for offbeat"
    )
    options = made.parse_args(arguments)
    if options.quick:
        options.seeds, options.limit_s = 1, 30.0
    contest = Contest(options.peers, options.workers, options.limit_s, options.set)
    contest.run(range(1, options.seeds + 1))
    figures, holds = summarize(contest)
    return conclude({**figures, "seeds": options.seeds}, holds, options)


if __name__ == "__main__":
    sys.exit(main())
