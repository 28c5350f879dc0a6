"""Kept records, and references that stand in for them on machines with another fingerprint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.net.machine import fingerprint
from tests.net.recording import Record

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).parent / "kept"
CACHE = ROOT / ".net"
"""References made on this machine; git ignores it."""
_failures: list[str] = []
TIMEOUT_S = 1200.0
"""Longest recording of a reference, here or in another process."""


class NoReference(Exception):
    """There is nothing that a reference could be made from, and why."""


class RecordingFailed(Exception):
    """The recording of a reference failed or took too long."""


def write(folder: Path, name: str, record: Record) -> None:
    """Keep a record, with the fingerprint of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": fingerprint(), **record}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")


def reference(name: str) -> tuple[Record, bool]:
    """The record to compare with, and whether that is the kept one, which has to be met exactly."""
    kept = _read(KEPT, name)
    if kept.pop("machine") == fingerprint():
        return kept, True
    made = _read(made_reference(), name)
    made.pop("machine")
    return made, False


def made_reference() -> Path:
    """The folder of references made on this machine; makes them once, whoever else asks at the same time.

    One that failed is not tried again by the same process.
    """
    if _failures:
        raise RecordingFailed(_failures[0])
    try:
        return _made_once()
    except RecordingFailed as error:
        _failures.append(str(error))
        raise


def _made_once() -> Path:
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / "lock", timeout=TIMEOUT_S):
        made = _made()
        is_mine = made.get("machine") == fingerprint()
        if not (is_mine and (made.get("is_asked_for") or made.get("commit") == kept_commit())):
            make_reference(kept_commit(), is_asked_for=False)
    return CACHE / "records"


def kept_commit() -> str:
    """The newest commit that changed kept files: its code does what they say.

    The commit before would be wrong where this one changes what runs do, and the kept files with it.
    """
    return _git("log", "-1", "--format=%H", "--", str(KEPT)) or _fail("no commit has kept files")


def make_reference(ref: str, is_asked_for: bool = True) -> None:
    """Record with the code of another commit, in a worktree, by the recorder of this tree.

    Everything when asked for it; otherwise what has no kept record of this machine.
    """
    names = () if is_asked_for else _foreign()
    commit = _git("rev-parse", "--verify", f"{ref}^{{commit}}")
    worktree = CACHE / "worktree"
    _remove(worktree)
    try:
        _git("worktree", "add", "--detach", "--force", str(worktree), commit)
        _record(worktree / "src", names)
    finally:
        _remove(worktree)
    told = {"commit": commit, "machine": fingerprint(), "is_asked_for": is_asked_for}
    (CACHE / "made.json").write_text(json.dumps(told, indent=1) + "\n")


def _foreign() -> list[str]:
    names = sorted(path.stem for path in KEPT.glob("*.json"))
    return [name for name in names if _read(KEPT, name)["machine"] != fingerprint()]


def _record(source: Path, names: Sequence[str] = ()) -> None:
    (CACHE / "made.json").unlink(missing_ok=True)
    shutil.rmtree(CACHE / "records", ignore_errors=True)
    path = os.pathsep.join([str(source), str(ROOT)])
    # Kernels compiled for the worktree go with it.
    environment = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(source.parent / "numba")}
    command = [sys.executable, "-m", "tests.net.record", "--once"]
    command += ["--out", str(CACHE / "records"), "--source", str(source), *names]
    try:
        subprocess.run(
            command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise RecordingFailed(f"recording took more than {TIMEOUT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        raise RecordingFailed(f"recording failed: {error.stderr.strip()[-2000:]}") from error


def _remove(worktree: Path) -> None:
    shutil.rmtree(worktree, ignore_errors=True)
    _git("worktree", "prune")


def _made() -> dict[str, Any]:
    try:
        return dict(json.loads((CACHE / "made.json").read_text()))
    except (OSError, ValueError):
        return {}


def _read(folder: Path, name: str) -> Record:
    try:
        return dict(json.loads((folder / f"{name}.json").read_text()))
    except FileNotFoundError as error:
        if folder == KEPT:
            raise
        raise RecordingFailed(f"no record of {name} was made") from error


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, timeout=60, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise NoReference(f"git cannot be run: {error}") from error
    if done.returncode:
        raise NoReference(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def _fail(why: str) -> str:
    raise NoReference(why)
