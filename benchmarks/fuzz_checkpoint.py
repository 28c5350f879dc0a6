"""What damaged files do to a run: nothing is loaded wrongly in silence, and nothing ends in a traceback.

A small CartPole run is stopped before its end and leaves two checkpoints. Then, in copies of it, files are
damaged as disks and people damage them: a flipped bit, a cut, a missing file, a page of zeros, appended
bytes, two files swapped, the same file of the older checkpoint. Each copy is opened by every way users have:
``CheckpointManager.load``, ``offbeat digest``, ``offbeat eval``, ``offbeat eval --best`` and a resume to its
last round; every tenth copy also by ``offbeat digest`` and ``offbeat resume`` in processes of their own.

Part 1 (``--cases``): one file of the newest checkpoint, each file in turn.
Part 2: a file of every checkpoint at once: all ways have to refuse.
Part 3: ``events.jsonl``, ``schedule.jsonl``, ``manifest.json``, ``config.yaml`` and ``resolved.yaml`` of the
run, also opened by ``offbeat replay``. A changed schedule is believed, since its replay says whether the
weights are the same: only its outcome without a traceback is judged.

Outcomes: ``previous`` (the older checkpoint was used, and it was said), ``refused`` (an error in words),
``harmless`` (what was loaded is what was saved), ``crashed`` (a traceback), ``wrong`` (other content than was
saved, or an older checkpoint without a word). What a resume did is judged by the weights it ended with: at
k = 0 they are the same from whichever checkpoint it goes on.

Bars: 0 crashed, 0 wrong; in part 2 everything refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from common import conclude, offbeat_command, parser, say

import offbeat
from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint, digest, pack
from offbeat.cli.main import main as offbeat_main
from offbeat.errors import OffbeatError
from offbeat.observe.callbacks import RoundInfo, RunInfo

ROUNDS, STOP_AT, INTERVAL = 10, 8, 4
SETTINGS = {
    "runtime.kind": "inline",
    "runtime.num_workers": 2,
    "env.num_envs": 8,
    "algorithm.num_steps": 16,
    "algorithm.minibatch_size": 64,
    "run.rounds": ROUNDS,
    "run.stop_return": None,
    "run.max_restarts": 0,
    "checkpoint.interval_rounds": INTERVAL,
    "checkpoint.interval_s": None,
    "eval.interval_rounds": INTERVAL,
    "eval.episodes": 2,
    "eval.num_envs": 2,
    "observe.console": "none",
    "observe.tensorboard": False,
}
RUN_FILES = ("events.jsonl", "schedule.jsonl", "manifest.json", "config.yaml", "resolved.yaml")
PAGE_BYTES = 4096
SUBPROCESS_EVERY = 10
LIMIT_S = 120.0


# ---------------------------------------------------------------- faults


def flip(path: Path, rng: Random, _: Sequence[Path]) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: Random, _: Sequence[Path]) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def delete(path: Path, _: Random, __: Sequence[Path]) -> None:
    path.unlink()


def zero_page(path: Path, rng: Random, _: Sequence[Path]) -> None:
    data = bytearray(path.read_bytes())
    start = PAGE_BYTES * rng.randrange(-(-len(data) // PAGE_BYTES))
    length = len(data[start : start + PAGE_BYTES])
    data[start : start + length] = bytes(length)
    path.write_bytes(data)


def append(path: Path, rng: Random, _: Sequence[Path]) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 100)))


def swap(path: Path, rng: Random, others: Sequence[Path]) -> None:
    """Exchange two files of one directory."""
    other = rng.choice([other for other in others if other.parent == path.parent])
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


def mix_up(path: Path, rng: Random, others: Sequence[Path]) -> None:
    """Put a file of the same name from another checkpoint in its place."""
    twins = [other for other in others if other.name == path.name]
    path.write_bytes(rng.choice(twins or list(others)).read_bytes())


Fault = Callable[[Path, Random, Sequence[Path]], None]
FAULTS: tuple[Fault, ...] = (flip, truncate, delete, zero_page, append, swap, mix_up)


def damage(path: Path, rng: Random, others: Sequence[Path]) -> str:
    """Apply a random fault that changes something; say which."""
    before = path.read_bytes()
    for _ in range(100):
        fault = rng.choice([fault for fault in FAULTS if before or fault in (delete, append)])
        fault(path, rng, [other for other in others if other != path])
        if not path.exists() or path.read_bytes() != before:
            return f"{fault.__name__} {path.name}"
    raise SystemExit(f"no fault changed {path}")


# ---------------------------------------------------------------- what the run was


@dataclass(frozen=True, slots=True)
class Original:
    """The undamaged run, and what every way to open it gives."""

    directory: Path
    newest: int
    best: int
    contents: dict[int, str]
    digests: dict[int, str]
    returns: dict[int, dict[str, float]]
    resumed_digest: str

    def files(self, version: int, directory: Path) -> list[Path]:
        """The files of a checkpoint in a copy of the run."""
        return sorted(CheckpointManager(directory / "checkpoints").path(version).iterdir())


def content_of(saved: LoadedCheckpoint) -> str:
    """One digest over everything a checkpoint holds."""
    skeleton, arrays = pack(dict(saved.parts))
    named = {f"part {name}": array for name, array in arrays.items()}
    named |= {f"weights {name}": array for name, array in saved.weights.items()}
    return f"{digest(named)} {json.dumps(skeleton)} {saved.score}"


def make_original(directory: Path) -> Original:
    """Train the run and open it by every way."""
    settings = {**SETTINGS, "run.dir": str(directory)}
    offbeat.train("cartpole-ppo", overrides=settings, callbacks=[StopEarly()])
    manager = CheckpointManager(directory / "checkpoints")
    saved = {version: manager.load(version) for version in manager.versions()}
    if len(saved) < 2:
        raise SystemExit(f"the run left the checkpoints {list(saved)}; two are needed")
    digests, returns = {}, {}
    for version in saved:
        with copied(directory) as copy:
            for newer in [other for other in saved if other > version]:
                shutil.rmtree(CheckpointManager(copy / "checkpoints").path(newer))
            digests[version] = offbeat.digest(copy)
            returns[version] = offbeat.evaluate(copy)
    with copied(directory) as copy:
        resumed = offbeat.resume(copy).digest
    contents = {version: content_of(checkpoint) for version, checkpoint in saved.items()}
    best = manager.best()
    assert best is not None, "the run has no evaluation"
    return Original(directory, max(saved), best, contents, digests, returns, resumed)


class StopEarly(offbeat.Callback):
    """Stops the run after `STOP_AT` rounds."""

    def on_start(self, info: RunInfo) -> None:
        self._stop = info.stop

    def on_round(self, info: RoundInfo) -> None:
        if info.version == STOP_AT:
            self._stop("that is enough")


@contextlib.contextmanager
def copied(directory: Path) -> Iterator[Path]:
    """A copy of the run that may be damaged."""
    with tempfile.TemporaryDirectory(prefix="offbeat-fuzz-") as where:
        yield shutil.copytree(directory, Path(where) / "run")


# ---------------------------------------------------------------- ways to open a run


@dataclass(frozen=True, slots=True)
class Opened:
    """What came of opening a run: the version and content found, what was said, and how it ended."""

    outcome: str
    said: str

    @staticmethod
    def judge(version: int | None, wanted: int, said: str, warned: bool) -> Opened:
        """Of something that was loaded; ``version`` None: it is not what any checkpoint held."""
        if version is None:
            return Opened("wrong", f"other content than was saved\n{said}")
        if warned:
            return Opened("previous", said)
        return Opened("harmless" if version == wanted else "wrong", f"version {version}, no word\n{said}")


def load(original: Original, run: Path) -> Opened:
    try:
        saved = CheckpointManager(run / "checkpoints").load()
    except OffbeatError as error:
        return Opened("refused", str(error))
    version = saved.version if content_of(saved) == original.contents[saved.version] else None
    return Opened.judge(version, original.newest, "\n".join(saved.warnings), bool(saved.warnings))


class Listener(offbeat.Callback):
    """Hears what a run tells its user."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def on_notice(self, text: str) -> None:
        self.notices.append(text)


def resume(original: Original, run: Path) -> Opened:
    listener = Listener()
    try:
        result = offbeat.resume(run, callbacks=[listener])
    except OffbeatError as error:
        return Opened("refused", str(error))
    said = "\n".join(listener.notices)
    version = original.newest if result.digest == original.resumed_digest else None
    return Opened.judge(version, original.newest, said, "was not used" in said)


def call(arguments: Sequence[str]) -> tuple[int, dict[str, Any], str]:
    """Run a verb in this process: exit code, its JSON object, what it said."""
    out, said = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            offbeat_main([*arguments, "--json"])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return code, json.loads(out.getvalue().splitlines()[-1]), said.getvalue()


def call_apart(arguments: Sequence[str]) -> tuple[int, dict[str, Any], str]:
    """The same in a process of its own."""
    command = [*offbeat_command(), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


@dataclass(frozen=True, slots=True)
class Verb:
    """``offbeat VERB RUN`` and how to judge what it prints."""

    arguments: tuple[str, ...]
    version_of: Callable[[Original, dict[str, Any]], int | None]
    run: Callable[[Sequence[str]], tuple[int, dict[str, Any], str]] = call

    def __call__(self, original: Original, run: Path) -> Opened:
        verb, *options = self.arguments
        code, values, said = self.run([verb, str(run), *options])
        if "Traceback" in said:
            return Opened("crashed", said)
        if code:
            is_clear = code in (1, 2) and values.get("error")
            return Opened("refused" if is_clear else "crashed", said)
        version = self.version_of(original, values)
        warned = "was not used" in said or "is left out" in said
        wanted = original.best if "--best" in self.arguments else original.newest
        return Opened.judge(version, wanted, said, warned)


def by_digest(original: Original, values: dict[str, Any]) -> int | None:
    found = {text: version for version, text in original.digests.items()}
    return found.get(values["digest"])


def by_returns(original: Original, values: dict[str, Any]) -> int | None:
    metrics = values["metrics"]
    return next((version for version, good in original.returns.items() if good == metrics), None)


def by_resumed(original: Original, values: dict[str, Any]) -> int | None:
    """A resume that ended well went on from some checkpoint: from which one is in what it said."""
    return original.newest if values["digest"] == original.resumed_digest else None


def by_verdict(original: Original, values: dict[str, Any]) -> int | None:
    return original.newest if values["identical"] else None


Way = Callable[[Original, Path], Opened]
RESUME = ("resume", "observe.console=plain")
WAYS: dict[str, Way] = {
    "load": load,
    "digest": Verb(("digest",), by_digest),
    "eval": Verb(("eval",), by_returns),
    "eval --best": Verb(("eval", "--best"), by_returns),
    "resume": resume,
}
APART: dict[str, Way] = {
    "offbeat digest": Verb(("digest",), by_digest, call_apart),
    "offbeat resume": Verb(RESUME, by_resumed, call_apart),
}
REPLAY: dict[str, Way] = {"replay": Verb(("replay",), by_verdict)}


# ---------------------------------------------------------------- the cases


@dataclass(slots=True)
class Tally:
    """Outcomes by way, and what was wrong in words."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def open_all(self, original: Original, run: Path, ways: dict[str, Way], fault: str) -> None:
        """Open the run by each way, a resume last, since it changes the run."""
        for name, way in sorted(ways.items(), key=lambda item: "resume" in item[0]):
            opened = attempt(way, original, run, name)
            self.counts.setdefault(name, Counter())[opened.outcome] += 1
            if opened.outcome in ("crashed", "wrong"):
                self.bad.append(f"{fault}: {name} {opened.outcome}: {opened.said[-1500:]}")

    def total(self, outcome: str) -> int:
        """Over all ways."""
        return sum(count[outcome] for count in self.counts.values())


def attempt(way: Way, original: Original, run: Path, name: str) -> Opened:
    """Open the run; whatever escapes is a crash. A resume gets a copy of its own."""
    try:
        if "resume" not in name:
            return way(original, run)
        with copied(run) as copy:
            return way(original, copy)
    except Exception:
        return Opened("crashed", traceback.format_exc())


def newest_part(original: Original, rng: Random, cases: int) -> Tally:
    """One file of the newest checkpoint is damaged."""
    tally = Tally()
    for case in range(cases):
        with copied(original.directory) as run:
            files = original.files(original.newest, run)
            older = [path for version in original.contents for path in original.files(version, run)]
            fault = damage(files[case % len(files)], rng, older)
            ways = WAYS | (APART if case % SUBPROCESS_EVERY == 0 else {})
            tally.open_all(original, run, ways, fault)
    return tally


def every_part(original: Original, rng: Random, cases: int) -> Tally:
    """A file of each checkpoint is damaged."""
    tally = Tally()
    for case in range(cases):
        with copied(original.directory) as run:
            faults = []
            for version in original.contents:
                files = original.files(version, run)
                faults.append(damage(rng.choice(files), rng, files))
            ways = WAYS | (APART if case % SUBPROCESS_EVERY == 0 else {})
            tally.open_all(original, run, ways, " and ".join(faults))
    return tally


def run_part(original: Original, rng: Random, cases: int) -> Tally:
    """A file of the run directory is damaged."""
    tally = Tally()
    for case in range(cases):
        with copied(original.directory) as run:
            files = [run / name for name in RUN_FILES]
            path = files[case % len(files)]
            fault = damage(path, rng, files)
            tally.open_all(original, run, WAYS | REPLAY, fault)
    return tally


def believed(tally: Tally) -> Tally:
    """Leave out what is not damage but another schedule."""
    heads = {text: text.partition("\n")[0] for text in tally.bad}
    tally.bad = [text for text, head in heads.items() if "crashed" in head or "schedule.jsonl" not in head]
    return tally


def report(title: str, tally: Tally) -> None:
    say(f"\n{title}")
    for name, counts in tally.counts.items():
        say(f"  {name:16} {'   '.join(f'{outcome} {count}' for outcome, count in sorted(counts.items()))}")
    for text in tally.bad[:10]:
        say(f"  BAD: {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--cases", type=int, default=200, help="damaged newest checkpoints (200)")
    made.add_argument("--seed", type=int, default=0, help="of the faults (0)")
    options = made.parse_args(arguments)
    cases = 15 if options.quick else options.cases
    rng, began_s = Random(options.seed), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="offbeat-fuzz-") as where:
        original = make_original(Path(where) / "run")
        newest = newest_part(original, rng, cases)
        report(f"{cases} damaged newest checkpoints", newest)
        every = every_part(original, rng, max(5, cases // 10))
        report("every checkpoint damaged", every)
        rest = believed(run_part(original, rng, max(10, cases // 4)))
        report("files of the run directory damaged", rest)
    parts = {"newest": newest, "every": every, "run directory": rest}
    figures: dict[str, Any] = {name: part.counts for name, part in parts.items()}
    figures |= {"crashed": sum(part.total("crashed") for part in parts.values())}
    figures |= {"wrong": newest.total("wrong") + every.total("wrong")}
    figures |= {"bad": [text for part in parts.values() for text in part.bad][:10]}
    holds = not figures["bad"] and all(set(count) <= {"refused"} for count in every.counts.values())
    return conclude({**figures, "seconds": time.perf_counter() - began_s}, holds, options)


if __name__ == "__main__":
    sys.exit(main())
