"""What killing workers at random costs a run, and whether it keeps its promises meanwhile.

The same PPO run (k = 2, asynchronous evaluation) goes eight times for a quarter of ``--minutes`` each: quiet,
under fire, under fire, quiet, and so again, so that a machine that gets slower or faster meanwhile favours
neither. Under fire a random collector, one time in ten the evaluator, is killed with SIGKILL at random
moments, ``--kills-per-minute`` times a minute. A share of them (``--stop-share``) is stopped with SIGSTOP
instead: such a worker keeps its ticket, and no more than k rounds later training has to wait for it, until
its missing heartbeat gives it away. That makes it the dearest of all faults.

The environment is LunarLander-v3: its physics keep processors busy (some 18,000 steps per processor second,
training included), so collecting takes most of the time, as in real runs, and a lost collector is missed. In
CartPole a segment takes milliseconds and the learner would hide the loss of any collector.

Throughput is in environment steps that were trained, from a few seconds after the first round to the request
to stop, means of the runs of a kind. Beside it, without a bar, steps per processor second of all processes,
which depend little on what else the machine does: what starting and losing workers wastes. Times to detect
(kill to the event ``worker_lost``) and to replace (kill to the event that the collector is up again) come
from the run's own journal.

Bars, under fire: the run ends well; staleness at most k, by the schedule; no sample dropped; tickets are
conserved (every ticket issued is running, ready, trained, dropped or lost, none is trained twice, and each
round trained as many as it should); each loss detected within 10 s and replaced within 30 s; ``offbeat
replay`` reaches identical weights; between a third of the window, when all buffers are made, and its end, the
driver has at most 4 further open files, at most 25 % more memory, and no zombie; throughput at least 0.9 of
the quiet runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
from common import ONE_THREAD, conclude, median, offbeat_command, parser, say

from offbeat.checkpoint import CheckpointManager
from offbeat.errors import OffbeatError
from offbeat.observe.events import read_events, read_rounds, read_schedule
from offbeat.pacing.ledger import Ledger

DEGREE, NUM_WORKERS = 2, 2
BAR_RATIO, BAR_DETECT_S, BAR_REPLACE_S, BAR_FILES, BAR_MEMORY = 0.9, 10.0, 30.0, 4, 1.25
WARM_UP_S, LIMIT_S, END_LIMIT_S = 5.0, 120.0, 60.0
EVALUATOR_SHARE = 0.1
SETTINGS = (
    *("run.rounds=1000000", "run.stop_return=null", "run.max_restarts=0"),
    *(f"async_training.off_policy_degree={DEGREE}", "async_training.open_rounds=0"),
    "async_training.enable_async_eval=true",
    *(f"runtime.num_workers={NUM_WORKERS}", "runtime.max_worker_restarts=100000"),
    *("eval.interval_rounds=20", "eval.episodes=2", "eval.num_envs=2", "checkpoint.interval_s=15"),
    *("observe.console=none", "observe.tensorboard=false"),
)


# ---------------------------------------------------------------- workers, seen from outside


def workers_of(driver: psutil.Process, run_dir: Path) -> dict[str, psutil.Process]:
    """The workers of a run by name (``collector_0`` and so on, ``evaluator``), known by the logs they write.

    That holds for processes and for Ray actors, which are descendants of the driver too.
    """
    named = {}
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            name = log.stem.replace("worker_", "collector_")
            if log.parent == run_dir / "logs" and (name == "evaluator" or name.startswith("collector_")):
                named[name] = process
    return named


@dataclass(frozen=True, slots=True)
class Shot:
    """A worker that was killed or stopped: which, when (seconds since 1970), how."""

    name: str
    pid: int
    at_s: float
    number: int


@dataclass(slots=True)
class Gun:
    """Kills and stops workers of a run at random moments."""

    driver: psutil.Process
    run_dir: Path
    per_minute: float
    stop_share: float
    rng: Random
    shots: list[Shot] = field(default_factory=list)
    _next_s: float | None = None

    def fire_if_due(self, now_s: float) -> None:
        """Hit one worker when it is time."""
        if self.per_minute <= 0:
            return
        gap_s = 60.0 / self.per_minute
        if self._next_s is None:
            self._next_s = now_s + self.rng.uniform(0.0, 1.0) * gap_s
        if now_s < self._next_s:
            return
        targets = workers_of(self.driver, self.run_dir)
        collectors = sorted(name for name in targets if name != "evaluator")
        if not collectors:
            return
        victim = self.rng.choice(collectors)
        if "evaluator" in targets and self.rng.random() < EVALUATOR_SHARE:
            victim = "evaluator"
        # One that is still starting is judged by the patience with starts, not by its heartbeat.
        is_stop = self.rng.random() < self.stop_share and victim in parts_up(self.run_dir)
        number = signal.SIGSTOP if is_stop else signal.SIGKILL
        shot = Shot(victim, targets[victim].pid, time.time(), number)
        with contextlib.suppress(psutil.Error):
            targets[victim].send_signal(number)
            self.shots.append(shot)
        self._next_s += self.rng.uniform(0.5, 1.5) * gap_s


def cpu_s_of(driver: psutil.Process) -> float:
    """Processor seconds of a run so far: of its processes and of those they have cleared away."""
    total_s = 0.0
    for process in (driver, *driver.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a driver holds at some moment."""

    rss_bytes: int
    num_files: int
    num_threads: int
    num_zombies: int

    @staticmethod
    def of(driver: psutil.Process) -> Footprint:
        children = driver.children(recursive=True)
        return Footprint(
            driver.memory_info().rss, driver.num_fds(), driver.num_threads(), sum(map(_is_zombie, children))
        )


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False


# ---------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True)
class Watched:
    """A run from outside: where it is, when its window began and ended, what it used, what was done to it."""

    directory: Path
    began_s: float
    ended_s: float
    cpu_s: float
    shots: tuple[Shot, ...]
    before: Footprint
    after: Footprint
    exit_code: int


def start(directory: Path, options: Any) -> subprocess.Popen[bytes]:
    settings = (*SETTINGS, *options.set, f"runtime.kind={options.runtime}", f"run.dir={directory}")
    with open(directory.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(
            [*offbeat_command(), "train", options.recipe, *settings],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def watch(directory: Path, seconds: float, options: Any, per_minute: float, rng: Random) -> Watched:
    """Run for so long, shoot at it if asked to, and stop it as Ctrl-C would."""
    process = start(directory, options)
    driver = psutil.Process(process.pid)
    try:
        await_first_round(process, directory)
        time.sleep(WARM_UP_S)
        gun = Gun(driver, directory, per_minute, options.stop_share, rng)
        began_s, began_cpu_s, before = time.time(), cpu_s_of(driver), None
        while (now_s := time.time()) < began_s + seconds:
            if before is None and now_s > began_s + seconds / 3:
                before = Footprint.of(driver)
            if process.poll() is not None:
                raise SystemExit(f"the run ended by itself:\n{log_tail(directory)}")
            gun.fire_if_due(now_s)
            time.sleep(0.05)
        ended_s, cpu_s = time.time(), cpu_s_of(driver) - began_cpu_s
        if per_minute > 0:
            time.sleep(BAR_DETECT_S)  # the last losses shall be seen to be made good
        after = Footprint.of(driver)
        assert before is not None, "the loop passes a third of its time"
        process.send_signal(signal.SIGINT)
        code = process.wait(END_LIMIT_S)
        return Watched(directory, began_s, ended_s, cpu_s, tuple(gun.shots), before, after, code)
    finally:
        end_all(process, driver)


def await_first_round(process: subprocess.Popen[bytes], directory: Path) -> None:
    events, give_up_s = directory / "events.jsonl", time.monotonic() + LIMIT_S
    while not (events.exists() and b'"kind":"round"' in events.read_bytes()):
        if process.poll() is not None or time.monotonic() > give_up_s:
            raise SystemExit(f"the run trained no round:\n{log_tail(directory)}")
        time.sleep(0.05)


def parts_up(directory: Path) -> set[str]:
    """Parts of the run that are up, as its journal says."""
    states = {event["component"]: event["state"] for event in journal(directory) if event["kind"] == "health"}
    return {name for name, state in states.items() if state == "up"}


def journal(directory: Path) -> list[dict[str, Any]]:
    """The events that a run has written so far."""
    return read_events(directory / "events.jsonl")


def log_tail(directory: Path) -> str:
    return directory.with_suffix(".log").read_text(errors="replace")[-3000:]


def end_all(process: subprocess.Popen[bytes], driver: psutil.Process) -> None:
    """Leave nothing behind, however the run ended."""
    left = driver.children(recursive=True) if process.poll() is None else []
    if process.poll() is None:
        process.kill()
        process.wait()
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()


# ---------------------------------------------------------------- what the run says of itself


def steps_per_s(watched: Watched) -> float:
    """Environment steps trained per second of the window."""
    return num_steps(watched) / (watched.ended_s - watched.began_s)


def num_steps(watched: Watched) -> float:
    """Environment steps trained in the window."""
    rounds = [r for r in journal(watched.directory) if r["kind"] == "round"]
    inside = [r for r in rounds if watched.began_s <= r["time"] <= watched.ended_s]
    steps = [float(r["metrics"]["rollout/total_env_steps"]) for r in (inside[0], inside[-1])]
    return steps[1] - steps[0]


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a loss was made good; None: never."""

    shot: Shot
    detected_s: float | None
    replaced_s: float | None


def recoveries(watched: Watched) -> list[Recovery]:
    """Find each hit collector's loss and replacement in the journal, by its process number or its lane."""
    events = journal(watched.directory)
    losses = [event for event in events if event["kind"] == "worker_lost"]
    ups = [event for event in events if event["kind"] == "health" and event["state"] == "up"]
    found = []
    for shot in watched.shots:
        if shot.name == "evaluator":
            continue
        lane = int(shot.name.removeprefix("collector_"))
        mine = [loss for loss in losses if loss["lane"] == lane and loss["time"] >= shot.at_s - 0.01]
        named = [loss for loss in mine if f"pid {shot.pid}" in loss["reason"]]
        lost_at_s = next((loss["time"] for loss in named or mine), None)
        again = [up["time"] for up in ups if up["component"] == shot.name and up["time"] >= (lost_at_s or 0)]
        detected_s = None if lost_at_s is None else lost_at_s - shot.at_s
        found.append(Recovery(shot, detected_s, again[0] - shot.at_s if lost_at_s and again else None))
    return found


def promises(watched: Watched) -> dict[str, bool | int]:
    """Staleness, waste and conservation, from the schedule and the last checkpoint."""
    records = read_schedule(watched.directory / "schedule.jsonl")
    made_by = {r["ticket"]: r["version"] for r in records if r["kind"] == "segment"}
    rounds = [record for record in records if record["kind"] == "round"]
    trained = [ticket for record in rounds for ticket in record["tickets"]]
    oldest = max(r["version"] - min(made_by[ticket] for ticket in r["tickets"]) for r in rounds)
    last = read_rounds(watched.directory / "events.jsonl")[-1]["metrics"]
    saved = CheckpointManager(watched.directory / "checkpoints").load()
    ledger = Ledger()
    ledger.load_state_dict(saved.parts["coordinator"]["ledger"])
    counts = ledger.check()
    per_round = {len(record["tickets"]) for record in rounds}
    is_conserved = len(set(trained)) == len(trained) and len(per_round) == 1
    is_conserved &= counts.trained == saved.version * max(per_round)
    return {
        "rounds": len(rounds),
        "max_staleness": oldest,
        "dropped": int(last["pace/dropped_samples"]) + counts.dropped,
        "conserved": is_conserved,
    }


def start_replay(directory: Path) -> subprocess.Popen[bytes]:
    command = [*offbeat_command(), "replay", str(directory)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **ONE_THREAD})


def replay_all(directories: Sequence[Path], limit_s: float) -> list[bool]:
    """Whether each run's serial repetition ends with its weights; they go side by side."""
    replays = [start_replay(directory) for directory in directories]
    try:
        return [replay.wait(limit_s) == 0 for replay in replays]
    finally:
        for replay in replays:
            replay.kill()
            replay.wait()


# ---------------------------------------------------------------- the verdict


def summary(quiet: Sequence[Watched], fire: Sequence[Watched]) -> dict[str, Any]:
    """All figures but the replay."""
    rates = {kind: [steps_per_s(run) for run in runs] for kind, runs in (("quiet", quiet), ("fire", fire))}
    found = [recovery for run in fire for recovery in recoveries(run)]
    kept = [promises(run) for run in fire]
    shots = [shot for run in fire for shot in run.shots]
    return {
        "shots": len(shots),
        "stopped": sum(shot.number == signal.SIGSTOP for shot in shots),
        "evaluators": sum(shot.name == "evaluator" for shot in shots),
        "steps_per_s": rates,
        "ratio": sum(rates["fire"]) / sum(rates["quiet"]),
        "ratio_per_cpu_s": steps_per_cpu_s(fire) / steps_per_cpu_s(quiet),
        "completed": all(run.exit_code == 130 for run in fire),  # what a run stopped by Ctrl-C returns
        "max_staleness": max(one["max_staleness"] for one in kept),
        "dropped": sum(one["dropped"] for one in kept),
        "conserved": all(one["conserved"] for one in kept),
        "rounds": sum(one["rounds"] for one in kept),
        "detect_s": spread([r.detected_s for r in found if r.shot.number == signal.SIGKILL]),
        "detect_stopped_s": spread([r.detected_s for r in found if r.shot.number == signal.SIGSTOP]),
        "replace_s": spread([r.replaced_s for r in found]),
        "driver": {"before": [run.before for run in fire], "after": [run.after for run in fire]},
    }


def steps_per_cpu_s(runs: Sequence[Watched]) -> float:
    """Environment steps trained per processor second: hardly depends on what else the machine does."""
    return sum(map(num_steps, runs)) / sum(run.cpu_s for run in runs)


def spread(values: Sequence[float | None]) -> dict[str, float]:
    """Median and maximum; what never happened counts as infinite."""
    numbers = [float("inf") if value is None else value for value in values]
    return {"median": median(numbers), "max": max(numbers, default=0.0)}


def meets_bars(figures: Mapping[str, Any]) -> dict[str, bool]:
    """Each bar, and whether it holds."""
    pairs = list(zip(figures["driver"]["before"], figures["driver"]["after"], strict=True))
    detect_s = max(figures["detect_s"]["max"], figures["detect_stopped_s"]["max"])
    return {
        "completed": figures["completed"],
        f"staleness <= {DEGREE}": figures["max_staleness"] <= DEGREE,
        "nothing dropped": figures["dropped"] == 0,
        "conserved": figures["conserved"],
        f"detected <= {BAR_DETECT_S:g} s": detect_s <= BAR_DETECT_S,
        f"replaced <= {BAR_REPLACE_S:g} s": figures["replace_s"]["max"] <= BAR_REPLACE_S,
        "no zombies": all(after.num_zombies == 0 for _, after in pairs),
        "no more open files": all(after.num_files <= before.num_files + BAR_FILES for before, after in pairs),
        "no more memory": all(after.rss_bytes <= BAR_MEMORY * before.rss_bytes for before, after in pairs),
        "replay identical": all(figures["replay_identical"]),
        f"throughput >= {BAR_RATIO}": figures["ratio"] >= BAR_RATIO,
    }


def report(figures: Mapping[str, Any], bars: Mapping[str, bool]) -> None:
    shots, stopped, evaluators = (figures[name] for name in ("shots", "stopped", "evaluators"))
    say(
        f"{shots} hits ({stopped} stopped, {evaluators} on evaluators), {figures['rounds']} rounds under fire"
    )
    for kind, rates in figures["steps_per_s"].items():
        say(f"  {kind:6} {'  '.join(f'{rate:,.0f}' for rate in rates)} steps/s")
    say(f"  ratio {figures['ratio']:.3f}; of steps per processor second {figures['ratio_per_cpu_s']:.3f}")
    for name in ("detect_s", "detect_stopped_s", "replace_s"):
        say(f"  {name:17} median {figures[name]['median']:.2f}  max {figures[name]['max']:.2f}")
    for before, after in zip(figures["driver"]["before"], figures["driver"]["after"], strict=True):
        megabytes = f"{before.rss_bytes / 1e6:.0f} -> {after.rss_bytes / 1e6:.0f} MB"
        threads = f"threads {before.num_threads} -> {after.num_threads}"
        say(f"  driver {megabytes}, files {before.num_files} -> {after.num_files}, {threads}")
    for name, holds in bars.items():
        say(f"  {'ok ' if holds else 'NO '} {name}")


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=5.0, help="of runs under fire, and of quiet ones (5)")
    made.add_argument("--kills-per-minute", type=float, default=6.0, help="workers hit (6)")
    made.add_argument("--stop-share", type=float, default=1 / 6, help="of them stopped, not killed (1/6)")
    made.add_argument("--runtime", choices=("processes", "ray"), default="processes", help="(processes)")
    made.add_argument("--recipe", default="lunarlander-ppo", help="(lunarlander-ppo)")
    made.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the run")
    made.add_argument("--seed", type=int, default=0, help="of the hits (0)")
    made.add_argument("--keep", type=Path, help="keep the runs in this directory")
    options = made.parse_args(arguments)
    order = ("quiet", "fire", "fire", "quiet") * (1 if options.quick else 2)
    seconds = 15.0 if options.quick else 60.0 * options.minutes / order.count("fire")
    per_minute = 30.0 if options.quick else options.kills_per_minute
    rng, began_s = Random(options.seed), time.perf_counter()
    with contextlib.ExitStack() as stack:
        where = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-chaos-"))
        )
        where.mkdir(parents=True, exist_ok=True)
        where = where.resolve()
        runs: dict[str, list[Watched]] = {"quiet": [], "fire": []}
        for number, kind in enumerate(order):
            rate = per_minute if kind == "fire" else 0.0
            runs[kind].append(watch(where / f"{number}-{kind}", seconds, options, rate, rng))
            last = runs[kind][-1]
            share = last.cpu_s / (last.ended_s - last.began_s)
            say(f"{kind:6} {steps_per_s(last):8,.0f} steps/s on {share:.2f} processors")
        figures = summary(runs["quiet"], runs["fire"])
        figures["replay_identical"] = replay_all([run.directory for run in runs["fire"]], 20 * seconds)
    bars = meets_bars(figures)
    report(figures, bars)
    footprints = {k: [vars_of(one) for one in v] for k, v in figures["driver"].items()}
    told = {**figures, "driver": footprints, "bars": bars, "seconds": time.perf_counter() - began_s}
    return conclude(told, all(bars.values()), options)


def vars_of(footprint: Footprint) -> dict[str, int]:
    return {name: getattr(footprint, name) for name in footprint.__slots__}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OffbeatError as error:
        sys.exit(f"error: {error}")
