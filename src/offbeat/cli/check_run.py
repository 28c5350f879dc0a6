"""``offbeat check RUN``: whether a run directory is whole. Imports nothing that its files name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from offbeat.cli.history import read_history
from offbeat.cli.status import lock_owner
from offbeat.errors import OffbeatError
from offbeat.reading import DESCRIPTION_BYTES, parse_json, read_file

_PARTS = ("coordinator", "collectors", "store", "meter", "recorder")


class Problem(OffbeatError):
    """Something of a run directory that is not as a run leaves it."""


def examine(directory: Path) -> tuple[dict[str, str], list[str]]:
    """Return what was found by topic, and the topics with a problem."""
    rows: dict[str, str] = {}
    problems: list[str] = []
    looks: dict[str, Callable[[Path], str]] = {
        "files": _files,
        "manifest": _manifest,
        "config.yaml": _config,
        "resolved.yaml": _resolved,
        "checkpoints": _checkpoints,
        "schedule": _schedule,
        "events": _events,
    }
    for topic, look in looks.items():
        try:
            rows[topic] = look(directory)
        except OffbeatError as error:
            rows[topic] = f"PROBLEM: {error}"
            problems.append(topic)
    return rows, problems


def _files(directory: Path) -> str:
    for path in (directory / "checkpoints", directory / "logs"):
        if os.path.lexists(path) and not path.is_dir():
            raise Problem(f"{path} is not a directory")
    count = 0
    for place, _, names in os.walk(directory):
        for path in (Path(place, name) for name in names):
            count += 1
            if not path.is_file():
                raise Problem(f"{path} is not a regular file")
    return f"{count:,} regular files"


def _manifest(directory: Path) -> str:
    try:
        found = parse_json(read_file(directory / "manifest.json", DESCRIPTION_BYTES))
        name, packages = found["name"], dict(found["packages"])
    except FileNotFoundError as error:
        raise Problem("there is no manifest.json") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Problem(f"manifest.json is damaged ({type(error).__name__}: {error})") from error
    return f"run {name!r:.80} of offbeat {packages.get('offbeat', 'of an unknown version')!s:.20}"


def _config(directory: Path) -> str:
    from offbeat.cli.check import load_unimported
    from offbeat.run.directory import changed_settings

    if problem := changed_settings(directory, "config.yaml"):
        raise Problem(problem)
    config = load_unimported(directory / "config.yaml")
    return f"{config.algorithm.name} on {config.env.id}, neither of which was imported"


def _resolved(directory: Path) -> str:
    from offbeat.run.directory import changed_settings

    if problem := changed_settings(directory, "resolved.yaml"):
        raise Problem(problem)
    return "as the run wrote it" if (directory / "resolved.yaml").exists() else "none"


def _checkpoints(directory: Path) -> str:
    from offbeat.checkpoint import CheckpointManager
    from offbeat.errors import CheckpointError

    if lock_owner(directory / "lock") is not None:
        return "not examined: the run is writing"
    manager = CheckpointManager(directory / "checkpoints")
    damaged = []
    for version in manager.versions():
        try:
            parts = manager.load(version).parts
            if missing := {"learner", *_PARTS} - parts.keys():
                damaged.append(f"checkpoint {version} has no part {', '.join(sorted(missing))}")
        except CheckpointError as error:
            damaged.append(str(error).partition("; available versions")[0])
    if damaged:
        raise Problem("\n".join(damaged))
    versions = ", ".join(map(str, manager.versions()))
    return f"whole: {versions}" if versions else "none"


def _schedule(directory: Path) -> str:
    from offbeat.observe.events import read_answers, read_schedule
    from offbeat.pacing.answers import answers_of
    from offbeat.pacing.recorded import Schedule

    path = directory / "schedule.jsonl"
    if not path.exists():
        raise Problem("there is no schedule.jsonl, so that the run cannot be repeated")
    answers = answers_of(read_answers(directory))
    rounds = f"{len(Schedule.from_records(read_schedule(path), answers).rounds):,} rounds"
    return f"{rounds}, answers to {len(answers):,} tickets" if answers else rounds


def _events(directory: Path) -> str:
    history = read_history(directory / "events.jsonl")
    if history.num_unreadable:
        raise Problem(f"{history.num_unreadable} lines of events.jsonl cannot be read")
    return f"up to round {history.version:,}"
