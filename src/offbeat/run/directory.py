"""Run directories: made, described, found again, and kept true when a run is resumed with other settings."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from offbeat.checkpoint import CheckpointManager, files
from offbeat.config.loader import dump_yaml
from offbeat.config.models import RunConfig
from offbeat.errors import ConfigError, OffbeatError, RunNotFound
from offbeat.observe.logs import make_logs_dir
from offbeat.reading import CONFIG_BYTES, DESCRIPTION_BYTES, parse_json, read_file
from offbeat.runtime.clock import Clock

Overrides = Mapping[str, object] | Sequence[str]
"""Settings by dotted key: a mapping, or ``key=value`` strings."""
_CONFIG, _RESOLVED, _CHECKSUMS = "config.yaml", "resolved.yaml", "sha256"
UNTIL = "config-until-{}.yaml"
_UNTIL_NAME = re.compile(r"config-until-\d{8,15}\.yaml")
"""Name of the file with the settings that a run had until a version."""


def make_run_dir(config: RunConfig, name: str, clock: Clock) -> Path:
    """Make the directory of a new run; ConfigError when it cannot be made or holds a run."""
    directory = Path(config.run.dir) if config.run.dir else _unused_dir(name, clock)
    if (directory / "manifest.json").exists():
        raise ConfigError(
            f"run.dir {directory} already holds a run: go on with `offbeat resume {directory}`, "
            "or choose another run.dir"
        )
    make_logs_dir(directory)
    return directory


def other_files(run_dir: str | None) -> list[str]:
    """Return a note about what lies already in the directory that a new run is to have."""
    if run_dir is None or not Path(run_dir).is_dir() or not (found := sorted(os.listdir(run_dir))):
        return []
    names = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
    return [f"run.dir {run_dir} holds other files ({names}): the run leaves them and writes beside them"]


def _unused_dir(name: str, clock: Clock) -> Path:
    """Return ``runs/<name>-<date>-<time>``, with a number behind it for runs of the same second."""
    stamp = clock.date("%Y%m%d-%H%M%S")
    names = (f"{name}-{stamp}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 10_000))))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())


def existing(run_dir: str | Path) -> Path:
    """Return the directory of a run that is there."""
    directory = Path(run_dir)
    if not (directory / "manifest.json").exists():
        raise not_found(directory, "it has no manifest.json")
    return directory


def not_found(directory: Path, lacks: str) -> RunNotFound:
    """Return the error for a directory that holds no run."""
    if directory.exists():
        return RunNotFound(f"{directory} is not a run directory: {lacks}")
    manifests = [path for place in (directory.parent, Path("runs")) for path in place.glob("*/manifest.json")]
    runs = sorted({path.parent for path in manifests}, key=lambda path: path.stat().st_mtime, reverse=True)
    names = {path.name: str(path) for path in reversed(runs)}
    if near := difflib.get_close_matches(directory.name, names, n=3, cutoff=0.5):
        hint = f"; did you mean {' or '.join(names[name] for name in near)}?"
    else:
        hint = f"; the newest runs: {', '.join(map(str, runs[:3]))}" if runs else ""
    return RunNotFound(f"there is no directory {directory}{hint}")


def settings_of(run_dir: str | Path) -> Path:
    """Return the file with a run's settings; ConfigError when it is not as the run wrote it."""
    path = existing(run_dir) / _CONFIG
    if problem := changed_settings(path.parent, _CONFIG):
        raise ConfigError(
            f"{problem}. Put it back; change settings with `offbeat resume {run_dir} KEY=VALUE`, or start a "
            f"new run with `offbeat train {path}`"
        )
    return path


def changed_settings(directory: Path, name: str) -> str:
    """Return what is wrong with a file of settings; empty for one as the run wrote it.

    Runs of older versions have no checksums, and of a damaged manifest none can be read.
    """
    path, known = directory / name, _manifest(directory).get(_CHECKSUMS)
    allowed = known.get(name) if isinstance(known, dict) else None
    if not isinstance(allowed, list):
        return ""
    try:
        found = hashlib.sha256(read_file(path, CONFIG_BYTES)).hexdigest()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return "" if found in allowed else f"{path} was changed since the run wrote it (manifest.json: sha256)"


def _manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a run; empty for a damaged one."""
    try:
        found = parse_json(read_file(directory / "manifest.json", DESCRIPTION_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------- description


def write_description(
    run_dir: Path, config: RunConfig, name: str, source: str, overrides: Overrides, clock: Clock
) -> None:
    """Write what was asked for, what it resolved to, and with which versions it runs."""
    given = [f"# from {source}", *(f"# with {line}" for line in as_lines(overrides))]
    texts = _texts(given, config)
    for file, text in texts.items():
        _write(run_dir / file, text)
    manifest = {
        "name": name,
        "seed": config.run.seed,
        "command": sys.argv,
        "created": clock.date("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(("offbeat", "torch", "numpy", "gymnasium")),
        "git": _git_commit(),
        "pid": os.getpid(),
        _CHECKSUMS: {file: [_sha256(text)] for file, text in texts.items()},
    }
    _write(run_dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def _texts(comments: Sequence[str], config: RunConfig) -> dict[str, str]:
    """The files of settings, by name."""
    return {_CONFIG: "\n".join([*comments, dump_yaml(config)]), _RESOLVED: dump_yaml(config.resolved())}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write_settings(directory: Path, texts: Mapping[str, str]) -> None:
    """Replace files of settings and their checksums; killed in between, a run knows the old and the new."""
    manifest = _manifest(directory)

    def allow(sums: Mapping[str, list[str]]) -> None:
        if manifest:  # of a damaged one, nothing but the name of the run was lost so far
            _write(directory / "manifest.json", json.dumps({**manifest, _CHECKSUMS: sums}, indent=2) + "\n")

    new = {name: [_sha256(text)] for name, text in texts.items()}
    old = {name: _text(directory / name) for name in texts if (directory / name).exists()}
    allow({name: [*sums, *(_sha256(old[name]) for _ in old.keys() & {name})] for name, sums in new.items()})
    for name, text in texts.items():
        _write(directory / name, text)
    allow(new)


def _write(path: Path, text: str) -> None:
    """Write a file in one step: a run killed meanwhile has the old one or the new, never half of one."""
    try:
        files.replace_bytes(path, text.encode())
    except OSError as error:
        raise OffbeatError(
            f"{path} cannot be written: {error}. Free disk space, make it writable or choose another run.dir"
        ) from error


def _text(path: Path) -> str:
    try:
        return read_file(path, DESCRIPTION_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise OffbeatError(f"{path} cannot be read: {error}") from error


def recorded_name(directory: Path, config: RunConfig) -> str:
    """Return the name of a run that is resumed; of a damaged manifest, the one its configuration gives."""
    try:
        return str(parse_json(read_file(directory / "manifest.json", DESCRIPTION_BYTES))["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{directory / 'manifest.json'} is damaged ({type(error).__name__}: {error})"
        print(f"note: {what}; nothing but the run's name is read from it, going on", file=sys.stderr)
        return config.run.name or config.algorithm.name


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _git_commit() -> str | None:
    """Return the commit of the directory the run was started in, if it is a git checkout."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None


# ---------------------------------------------------------------- overrides


def joined(overrides: Overrides | None, named: Mapping[str, object]) -> Overrides:
    """Return overrides with arguments of a call laid over them, those that are not None."""
    given = {key: value for key, value in named.items() if value is not None}
    if isinstance(overrides, Mapping):
        return {**overrides, **given}
    return [*(overrides or ()), *as_lines(given)]


def as_lines(overrides: Overrides) -> list[str]:
    """Return overrides as ``key=value``."""
    if isinstance(overrides, Mapping):
        return [f"{key}={value}" for key, value in overrides.items()]
    return list(overrides)


def change_config(directory: Path, config: RunConfig, overrides: Overrides) -> None:
    """Write the settings that hold from now on, and keep those that held until the newest checkpoint."""
    manager = CheckpointManager(directory / "checkpoints")
    version = manager.load().version if manager.versions() else 0
    until = cut_until(directory, version)
    if version > 0 and not until.exists():  # settings that trained no round leave no trace
        _write(until, _text(directory / _CONFIG))
    lines = [f"# resumed at version {version} with {line}" for line in as_lines(overrides)]
    _write_settings(directory, _texts(lines, config))


def cut_until(directory: Path, version: int) -> Path:
    """Go back to a version: the settings of the round before it now end there. Return their file.

    Files of rounds that are trained again are removed.
    """
    until = directory / UNTIL.format(f"{version:08d}")
    for path in [path for path in earlier_settings(directory) if until_version(path) > version]:
        if version == 0 or until.exists():
            path.unlink()
        else:
            path.replace(until)
    return until


def copy_description(directory: Path, target: Path, version: int) -> None:
    """Describe in another directory a run that ends at an earlier version of this one."""
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty: choose another directory")
    later = [path for path in earlier_settings(directory) if until_version(path) >= version]
    earlier = [path for path in earlier_settings(directory) if until_version(path) < version]
    make_logs_dir(target)
    for path in (*earlier, directory / "manifest.json"):
        _write(target / path.name, _text(path))
    config = _text([*later, directory / _CONFIG][0])
    _write_settings(target, {_CONFIG: f"# replayed to version {version} of {directory}\n{config}"})


@contextlib.contextmanager
def removed_on_error(directory: Path | None) -> Iterator[None]:
    """Remove a directory that was made for something that then failed."""
    try:
        yield
    except BaseException:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def earlier_settings(directory: Path) -> list[Path]:
    """Return the files with the settings that a run had before, the oldest first."""
    return sorted(path for path in directory.iterdir() if _UNTIL_NAME.fullmatch(path.name))


def until_version(path: Path) -> int:
    """Return the version that settings of a file called `UNTIL` held until."""
    return int(path.stem.rpartition("-")[2])
