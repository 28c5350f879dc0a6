"""Run directories as earlier code wrote them: what later code has to read, resume and repeat."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import offbeat
from offbeat.cli.main import main as offbeat_main
from tests.callbacks import EndAt
from tests.net.incidents import Kill
from tests.net.machine import fingerprint
from tests.net.small import overrides

RUNS = Path(__file__).parent / "runs"
EXPECTED = RUNS / "expected.json"
ROUNDS = 6
FURTHER = 8
"""Rounds of a run that is resumed with more of them."""
TINY = {
    "env.num_envs": 4,
    "algorithm.network.hidden": [8],
    "runtime.kind": "processes",
    "run.rounds": ROUNDS,
    "eval.interval_rounds": 4,
    "run.stop_return": None,
}
_NOT_KEPT = ("lock", "logs", "tensorboard")
_OF_THE_MACHINE = {"command": ["offbeat", "train"], "platform": "any", "git": None, "pid": 1}


def _train(recipe: str, directory: Path, *callbacks: offbeat.Callback, **changes: Any) -> None:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**overrides(recipe), **TINY, "run.dir": str(directory), **named}
    offbeat.train(recipe, overrides=settings, callbacks=callbacks)


def _finished(directory: Path) -> None:
    _train("cartpole-ppo", directory)


def _resumed(directory: Path) -> None:
    _train("cartpole-ppo", directory, EndAt(3))
    offbeat.resume(directory, overrides={"checkpoint.interval_rounds": 3})


def _losses(directory: Path) -> None:
    _train("cartpole-ppo", directory, Kill(3))


def _replay_mode(directory: Path) -> None:
    _train("cartpole-ppo-per", directory, EndAt(3), algorithm__buffer_capacity=16)


def _asynchronous(directory: Path) -> None:
    _train("cartpole-ppo", directory, async_training__off_policy_degree=2)


KEPT_RUNS: Mapping[str, Callable[[Path], None]] = {
    "finished": _finished,
    "resumed": _resumed,
    "losses": _losses,
    "replay-mode": _replay_mode,
    "asynchronous": _asynchronous,
}


def make_all() -> None:
    """Write all kept runs and what is expected of them."""
    for name, make in KEPT_RUNS.items():
        shutil.rmtree(RUNS / name, ignore_errors=True)
        with tempfile.TemporaryDirectory() as elsewhere, _working_in(Path(elsewhere)):
            relative = Path("runs") / name
            make(relative)
            _strip(relative)
            shutil.copytree(relative, RUNS / name)
        print(f"{name}: made", flush=True)
    write_expected()


def write_expected() -> None:
    """Look at copies of the kept runs and write down what comes out; twice, to be sure of it."""
    looked: list[dict[str, Any]] = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as elsewhere:
            looked.append({name: look(copied(name, Path(elsewhere))) for name in KEPT_RUNS})
    assert looked[0] == looked[1], "two looks differ"
    EXPECTED.write_text(json.dumps({"machine": fingerprint(), **looked[0]}, indent=1) + "\n")


def copied(name: str, to: Path) -> Path:
    """A copy of a kept run that can be written to."""
    return Path(shutil.copytree(RUNS / name, to / name))


def look(directory: Path) -> dict[str, Any]:
    """Use a kept run in every way there is: show, evaluate, repeat, resume and repeat again."""
    found: dict[str, Any] = {"status": status(directory), "digest": offbeat.digest(directory)}
    found["evaluation"] = dict(offbeat.evaluate(directory, episodes=2, seed=5))
    report = offbeat.replay_run(directory)
    found["replay"] = {"rounds": report.rounds, "identical": report.identical}
    further = offbeat.resume(directory, overrides={"run.rounds": FURTHER})
    found["rounds_further"] = further.rounds
    found["status_further"] = status(directory)
    if found["status"]["off_policy_degree"] == 0:  # else the order of arrival decides
        found["digest_further"] = further.digest
    else:
        found["status_further"].pop("worst_staleness")
    report = offbeat.replay_run(directory)
    found["replay_further"] = {"rounds": report.rounds, "identical": report.identical}
    return found


def status(directory: Path) -> dict[str, Any]:
    """The part of ``offbeat status --json`` that does not depend on when it is asked."""
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(io.StringIO()),  # the same as tables, for people
        contextlib.suppress(SystemExit),
    ):
        offbeat_main(["status", str(directory), "--json"])
    told = json.loads(output.getvalue())
    names = ("name", "state", "round", "rounds", "off_policy_degree", "worst_staleness", "tickets")
    counts = {name: told[name]["count"] for name in ("losses", "restarts")}
    return {**{name: told[name] for name in names}, **counts}


def _strip(directory: Path) -> None:
    """Drop what nobody needs, and what tells of the machine."""
    for name in _NOT_KEPT:
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    manifest = directory / "manifest.json"
    told = {**json.loads(manifest.read_text()), **_OF_THE_MACHINE}
    manifest.write_text(json.dumps(told, indent=2) + "\n")


@contextlib.contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
