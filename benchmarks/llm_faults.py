"""RL of a language model whose processes are killed, and whose tools and rewards fail, keeps its promises.

GRPO on `processes` at k = 2, of a tiny network and a task (`Faulty`, below) whose tools hang or raise, and
whose rewards hang, raise, or are NaN: at random, but always the same for the same response. Runs of
``--rounds`` rounds follow each other for ``--minutes``; the last one is left to end. Meanwhile one of three
processes is killed with SIGKILL at random moments, ``--kills-per-minute`` times a minute:

- ``engine``: the process that generates; the run starts another one;
- ``learner``: the process that trains and drives the run; the command starts it again by itself;
- ``run``: the command, with which everything ends; the script goes on with ``offbeat resume``, as it does
  when the command gives up, or with the same command where nothing had been written yet.

Before and after these, a run goes through undisturbed but for its tools and rewards. Throughput is in trained
tokens per second from the start of a run to its end, with all starts. Tokens of begun responses are those in
the checkpoints from which runs went on; kept are those that a resumed run does not make again.

Bars, for each run: exit code 0 at the end; no round, also of those trained again, has tokens older than k
versions; every round is in the schedule, no ticket is trained twice, and each ticket issued is trained,
dropped or open; every response has in ``answers.jsonl`` the answers that the schedule counts, and in the end
a reward or an error; ``offbeat replay`` reaches identical weights. Besides: nothing outlives a killed run by
5 s, and every fault has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
from chaos import workers_of
from common import ONE_THREAD, conclude, offbeat_command, parser, say

from offbeat.checkpoint import CheckpointManager
from offbeat.errors import CheckpointError
from offbeat.llm.conversation import from_tree
from offbeat.llm.tasks import Dialogue, Problem, Turn
from offbeat.llm.tasks.latency import Latency
from offbeat.llm.tokens import CharTokenizer
from offbeat.observe.events import read_answers, read_events, read_rounds, read_schedule
from offbeat.pacing.ledger import Ledger
from offbeat.seeding import derive_seed
from offbeat.types import TIMEOUT

DEGREE, PROMPTS, GROUP = 2, 8, 4
VICTIMS = ("engine", "learner", "run")
GONE_LIMIT_S, LIMIT_S = 5.0, 3600.0
LATE_S = 0.5
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a command that was killed, and of one that gave up over its killed child."""
SETTINGS = (
    *("env.id=llm_faults:Faulty", "run.stop_return=null", f"async_training.off_policy_degree={DEGREE}"),
    *(f"algorithm.segments_per_round={PROMPTS}", f"algorithm.group_size={GROUP}", "algorithm.lr=3e-4"),
    *("algorithm.model.width=32", "algorithm.model.num_layers=2", "algorithm.model.num_heads=4"),
    *("algorithm.model.ff_width=48", "algorithm.warmup.accuracy=null", "algorithm.engine.slots=64"),
    *(f"algorithm.tool.timeout_s={LATE_S}", f"algorithm.reward.timeout_s={LATE_S}"),
    *("runtime.kind=processes", "runtime.num_workers=1", "runtime.max_worker_restarts=100000"),
    *("run.max_restarts=100000", "run.restart_delay_s=0", "checkpoint.interval_s=2"),
    *("checkpoint.interval_rounds=null", "eval.interval_rounds=null", "eval.at_end=false"),
    *("observe.console=none", "observe.tensorboard=false"),
)
FAULTS = ("tool raised", "tool late", "reward raised", "reward late", "reward not finite")


# ---------------------------------------------------------------- the task


class Faulty:
    """The model asks with ``?``, is told a letter, and is rewarded for ending its next turn with it.

    What becomes of a call depends on the seed of the response and the turn.
    """

    max_prompt_tokens, max_new_tokens, max_given_tokens = 8, 24, 24

    def __init__(self, hang: float = 0.003, fail: float = 0.02, latency_s: float = 0.02) -> None:
        self.tokenizer = CharTokenizer("abcd?;", add_bos=False)
        self.stop_ids = (*self.tokenizer.eos_ids, *self.tokenizer.encode("?"))
        self._hang, self._fail = hang, fail
        self._latency = Latency(latency_s, 1.0, LATE_S / 5)

    def num_problems(self, split: str) -> int:
        return 64 if split == "held_out" else 1024

    def problem(self, split: str, index: int) -> Problem:
        letters = "".join("ab"[index >> bit & 1] for bit in range(6))
        return Problem(("c" if split == "held_out" else "d") + letters, "a")

    def _draw(self, dialogue: Dialogue, kind: str) -> float:
        return Random(derive_seed(dialogue.seed, kind, len(dialogue.turns))).random()

    async def step(self, dialogue: Dialogue) -> Turn:
        draw = self._draw(dialogue, "tool")
        if draw < self._hang:
            await asyncio.sleep(1e6)
        await self._latency.wait(dialogue.seed, len(dialogue.turns))
        if draw > 1.0 - self._fail:
            raise RuntimeError("the tool is broken")
        is_call = dialogue.turns[-1].endswith("?") and len(dialogue.answers) < 3
        return Turn(f"{self._letter(dialogue)};") if is_call else Turn()

    def reward(self, problem: Problem, response: str, dialogue: Dialogue) -> float:
        """Return 1 for the letter and something random besides, so that no group is without a gradient."""
        draw = self._draw(dialogue, "reward")
        if draw < self._hang:
            time.sleep(6 * LATE_S)  # a thread cannot be cancelled: it ends some time
        if draw > 1.0 - self._fail:
            raise RuntimeError("the reward is broken")
        if draw > 1.0 - 2 * self._fail:
            return math.nan
        is_right = bool(dialogue.answers) and response.endswith(self._letter(dialogue))
        return is_right + 0.5 * self._draw(dialogue, "noise")

    def _letter(self, dialogue: Dialogue) -> str:
        return "abcd"[dialogue.seed % 4]


# ---------------------------------------------------------------- killing


@dataclass(slots=True)
class Gun:
    """Kills processes of runs at random moments, and keeps what it did."""

    per_minute: float
    rng: Random
    kills: Counter[str] = field(default_factory=Counter)
    num_resumes: int = 0
    survivors: int = 0
    begun_tokens: int = 0
    kept_tokens: int = 0
    _next_s: float = 0.0

    def load(self, after_s: float) -> None:
        """Choose the next moment."""
        gap_s = 60.0 / self.per_minute if self.per_minute else math.inf
        self._next_s = after_s + gap_s * self.rng.uniform(0.5, 1.5)

    def fire_if_due(self, command: psutil.Process, run_dir: Path) -> None:
        """Kill a process of a run when it is time."""
        if time.monotonic() < self._next_s:
            return
        found = processes_of(command, run_dir)
        victim = self.rng.choice([name for name in VICTIMS if name in found])
        family = command.children(recursive=True)
        with contextlib.suppress(psutil.Error):
            found[victim].kill()
            self.kills[victim] += 1
            if victim == "run":
                self.survivors += len(psutil.wait_procs(family, GONE_LIMIT_S)[1])
            if victim != "engine":
                self._count_begun(run_dir)
        self.load(self._next_s)

    def _count_begun(self, run_dir: Path) -> None:
        """Count the tokens in the checkpoint from which a run goes on."""
        try:
            saved = CheckpointManager(run_dir / "checkpoints").load()
        except CheckpointError:
            return  # none yet
        for ticket, group in saved.parts.get("work", {}).items():
            for sample, tree in group.items():
                self.begun_tokens += sum(size for _, size, _ in tree["spans"])
                kept, _ = from_tree(ticket, int(sample), tree, saved.version)
                self.kept_tokens += sum(span.size for span in kept.spans)


def processes_of(command: psutil.Process, run_dir: Path) -> dict[str, psutil.Process]:
    """The processes of a run that are there."""
    found = {"run": command}
    with contextlib.suppress(psutil.Error):
        for child in command.children():
            found["learner"] = child
            for worker in workers_of(child, run_dir).values():
                found["engine"] = worker
    return found


# ---------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True)
class Done:
    """A run that has ended: where it is, how long it took, and with what exit code."""

    directory: Path
    seconds: float
    exit_code: int


def environment() -> dict[str, str]:
    """That of all commands: the task is found in this folder."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)}


def start(run_dir: Path, rounds: int, changes: Sequence[str]) -> subprocess.Popen[bytes]:
    """Begin a run, or go on with what is there of it."""
    arguments = ["train", "calculator-grpo", "env.kwargs={}", *SETTINGS]
    arguments += [*changes, f"run.rounds={rounds}", f"run.dir={run_dir}"]
    if (run_dir / "manifest.json").exists():
        arguments = ["resume", str(run_dir)]
    with open(run_dir.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(
            [*offbeat_command(), *arguments],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run_to_its_end(run_dir: Path, rounds: int, changes: Sequence[str], gun: Gun, until_s: float) -> Done:
    """Start a run again and again until it ends by itself; kill its processes until some moment."""
    began_s = time.monotonic()
    while True:
        process = start(run_dir, rounds, changes)
        command = psutil.Process(process.pid)
        try:
            while (code := process.poll()) is None:
                if time.monotonic() < until_s:
                    gun.fire_if_due(command, run_dir)
                elif time.monotonic() > max(until_s, began_s) + LIMIT_S:
                    raise SystemExit(f"{run_dir.name} does not end:\n{log_tail(run_dir)}")
                time.sleep(0.02)
        finally:
            end(process, command)
        if code not in KILLED:
            break
        gun.num_resumes += 1
    return Done(run_dir, time.monotonic() - began_s, code)


def end(process: subprocess.Popen[bytes], command: psutil.Process) -> None:
    """Leave nothing behind, however the script ends."""
    if process.poll() is None:
        left = command.children(recursive=True)
        process.kill()
        process.wait()
        for child in left:
            with contextlib.suppress(psutil.Error):
                child.kill()


def log_tail(run_dir: Path) -> str:
    return run_dir.with_suffix(".log").read_text(errors="replace")[-3000:]


# ---------------------------------------------------------------- what is left of it


def is_replayed(run_dir: Path, limit_s: float) -> bool:
    """Repeat a run; False when it ends with other weights."""
    command = [*offbeat_command(), "replay", str(run_dir)]
    try:
        with open(run_dir.with_suffix(".log"), "ab") as log:
            subprocess.run(command, stdout=log, stderr=log, env=environment(), timeout=limit_s, check=True)
    except subprocess.SubprocessError:
        return False
    return True


def look_at(done: Done) -> dict[str, Any]:
    """What the files of a run say, and how its promises fared."""
    schedule = read_schedule(done.directory / "schedule.jsonl")
    events = read_events(done.directory / "events.jsonl")
    rounds = [line for line in schedule if line["kind"] == "round"]
    segments = {line["ticket"]: line for line in schedule if line["kind"] == "segment"}
    trained = [ticket for line in rounds for ticket in line["tickets"]]
    pieces = [piece for ticket in trained for piece in segments[ticket]["pieces"]]
    last = read_rounds(done.directory / "events.jsonl")[-1]["metrics"]
    ages = [event["metrics"]["pace/max_sample_age"] for event in events if event["kind"] == "round"]
    ends = {
        (line["ticket"], response): end
        for line in segments.values()
        for response, (_, end) in enumerate(line["pieces"])
    }
    failed = [record for record in read_answers(done.directory) if "error" in record]
    faults = Counter(fault_of(record, ends[record["ticket"], record["response"]]) for record in failed)
    return {
        "exit_code": done.exit_code,
        "seconds": done.seconds,
        "rounds": len(rounds),
        "rounds_trained_again": len(ages) - len(rounds),
        "tokens": sum(span[1] for spans, _ in pieces for span in spans),
        "max_sample_age": max(ages),
        "mixed_responses": sum(len({span[0] for span in spans}) > 1 for spans, _ in pieces),
        "faults": {name: faults[name] for name in (*FAULTS, "other")},
        "answers": sum(sum(line["answers"]) for line in segments.values()),
        "dropped": sum(line["kind"] == "drop" for line in schedule),
        "begun_tickets_kept": int(last.get("rollout/begun_tickets_kept", 0)),
        "begun_tickets_cut_back": int(last.get("rollout/begun_tickets_cut_back", 0)),
        "conserved": is_conserved(done.directory, schedule, trained),
        "answers_complete": has_all_answers(done.directory, schedule),
    }


def fault_of(record: Mapping[str, Any], end: str) -> str:
    """Say what went wrong in a line of ``answers.jsonl`` for a response that ended so."""
    error = str(record["error"])
    if error == TIMEOUT:
        return "tool late" if end == TIMEOUT else "reward late"
    known = {"the tool is": "tool raised", "the reward is": "reward raised", "not fin": "reward not finite"}
    return next((name for text, name in known.items() if text in error), "other")


def is_conserved(run_dir: Path, schedule: Sequence[Mapping[str, Any]], trained: Sequence[int]) -> bool:
    """Tell whether every round is there once, and every ticket is trained once, dropped or open."""
    versions = [line["version"] for line in schedule if line["kind"] == "round"]
    sizes = {len(line["tickets"]) for line in schedule if line["kind"] == "round"}
    saved, ledger = CheckpointManager(run_dir / "checkpoints").load(), Ledger()
    ledger.load_state_dict(saved.parts["coordinator"]["ledger"])
    counts = ledger.check()
    fates = Counter(trained)
    fates.update(line["ticket"] for line in schedule if line["kind"] == "drop")
    fates.update(ticket.number for ticket in ledger.outstanding())
    return (
        versions == list(range(saved.version))
        and sizes == {PROMPTS}
        and counts.trained == len(trained)
        and fates == Counter(range(counts.issued))
    )


def has_all_answers(run_dir: Path, schedule: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether each response has its answers, once and in order, the last one a reward or an error."""
    found: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for record in read_answers(run_dir):
        found.setdefault((record["ticket"], record["response"]), []).append(record)
    wanted = {
        (line["ticket"], response): count
        for line in schedule
        if line["kind"] == "segment"
        for response, count in enumerate(line["answers"])
    }
    return {name: len(records) for name, records in found.items()} == wanted and all(
        [record["turn"] for record in records] == list(range(len(records))) and "text" not in records[-1]
        for records in found.values()
    )


# ---------------------------------------------------------------- the verdict


def meets_bars(runs: Sequence[Mapping[str, Any]], gun: Gun, faults: Mapping[str, int]) -> dict[str, bool]:
    """Each bar, and whether it holds."""
    return {
        "exit code 0": all(run["exit_code"] == 0 for run in runs),
        f"staleness <= {DEGREE}": all(run["max_sample_age"] <= DEGREE for run in runs),
        "no ticket lost or trained twice": all(run["conserved"] for run in runs),
        "answers complete": all(run["answers_complete"] for run in runs),
        "replay identical": all(run["replay_identical"] for run in runs),
        f"nothing outlives a run by {GONE_LIMIT_S:g} s": gun.survivors == 0,
        "every fault has happened": all(faults[name] for name in faults if name != "other"),
        "every process was killed": all(gun.kills[name] for name in VICTIMS),
    }


def rate_of(runs: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per second that runs trained, from their starts to their ends."""
    return float(sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs))


def report(figures: Mapping[str, Any], bars: Mapping[str, bool]) -> None:
    quiet, fire = figures["tokens_per_s"]["quiet"], figures["tokens_per_s"]["fire"]
    kills = ", ".join(f"{name} {count}" for name, count in figures["kills"].items())
    say(f"\nkills: {kills} in {figures['fire_s']:.0f} s; started again by the script {figures['resumes']} ×")
    say(f"  trained {quiet:,.0f} tokens/s undisturbed, {fire:,.0f} with kills: {figures['ratio']:.2f} ×")
    again = figures["rounds_trained_again"]
    count = sum(run["rounds"] for run in figures["runs"] if run["kind"] == "fire")
    say(f"  {again} rounds were trained again from a checkpoint, beside {count:,} that count")
    say(
        f"  of {figures['begun_tokens']:,} tokens begun in the checkpoints that were gone back to,"
        f" {figures['kept_tokens']:,} were kept"
    )
    say(f"  faults: {', '.join(f'{name} {count}' for name, count in figures['faults'].items())}")
    for name, holds in bars.items():
        say(f"  {'ok ' if holds else 'NO '} {name}")


def carry_out(where: Path, options: Namespace, rng: Random) -> tuple[dict[str, Any], dict[str, bool]]:
    """Make all runs, and look at what they left."""
    quiet, fire = Gun(0.0, rng), Gun(options.kills_per_minute, rng)
    runs: list[tuple[str, dict[str, Any]]] = []

    def make(name: str, gun: Gun, until_s: float) -> None:
        done = run_to_its_end(where / name, options.rounds, options.set, gun, until_s)
        if done.exit_code:
            say(log_tail(done.directory))
        found = look_at(done)
        runs.append((name.partition("-")[0], found))
        say(f"{name}: {found['rounds']} rounds in {done.seconds:.0f} s, exit code {done.exit_code}")

    make("quiet-0", quiet, 0.0)
    began_s = time.monotonic()
    fire.load(began_s)
    while time.monotonic() < began_s + 60.0 * options.minutes:
        make(f"fire-{len(runs)}", fire, began_s + 60.0 * options.minutes)
    fire_s = time.monotonic() - began_s
    make(f"quiet-{len(runs)}", quiet, 0.0)
    for number, (kind, found) in enumerate(runs):
        found["replay_identical"] = is_replayed(where / f"{kind}-{number}", 60.0 + 3 * found["seconds"])
    found_all = [found for _, found in runs]
    rates = {name: rate_of([one for kind, one in runs if kind == name]) for name in ("quiet", "fire")}
    faults = Counter[str]()
    for found in found_all:
        faults.update(found["faults"])
    figures = {
        "runs": [{"kind": kind, **found} for kind, found in runs],
        "kills": dict(fire.kills),
        "fire_s": fire_s,
        "resumes": fire.num_resumes,
        "tokens_per_s": rates,
        "ratio": rates["fire"] / rates["quiet"],
        "rounds_trained_again": sum(one["rounds_trained_again"] for one in found_all),
        "begun_tokens": fire.begun_tokens,
        "kept_tokens": fire.kept_tokens,
        "faults": dict(faults),
    }
    return figures, meets_bars(found_all, fire, faults)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=10.0, help="in which processes are killed (10)")
    made.add_argument("--kills-per-minute", type=float, default=6.0, help="(6)")
    made.add_argument("--rounds", type=int, default=400, help="of each run (400)")
    made.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the runs"
    )
    made.add_argument("--seed", type=int, default=0, help="of the kills (0)")
    made.add_argument("--keep", type=Path, help="keep the runs in this directory")
    options = made.parse_args(arguments)
    if options.quick:
        options.minutes, options.kills_per_minute, options.rounds = 0.5, 12.0, 100
    began_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        where = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-faults-"))
        )
        where.mkdir(parents=True, exist_ok=True)
        figures, bars = carry_out(where.resolve(), options, Random(options.seed))
    report(figures, bars)
    told = {**figures, "bars": bars, "seconds": time.perf_counter() - began_s}
    return conclude(told, all(bars.values()), options)


if __name__ == "__main__":
    sys.exit(main())
