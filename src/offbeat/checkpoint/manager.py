"""Checkpoints on disk: whole or absent, verified before they are used, old ones retired.

::

    checkpoints/step_00000050/
      manifest.json           written last: version, score, size and SHA-256 of every other file
      weights.safetensors     the policy's weights alone; weights.json unless they are named numpy arrays
      learner.json + learner.safetensors, coordinator.json + …    one pair per part

Arrays of the learner that are in ``weights.safetensors`` too lie only there, and ``learner.json`` says which:
``{"shared": [{"a3": "actor.0.weight"}, …]}``. Format 1 held them twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.checkpoint import files
from offbeat.checkpoint.codec import Digest, digest, fitting, pack, plain_array, unpack
from offbeat.errors import CheckpointError, RunNotFound
from offbeat.reading import DESCRIPTION_BYTES, STATE_BYTES, parse_json, read_file
from offbeat.types import Array, StateTree

FORMAT = 2
_READABLE = (1, 2)
_SHARED, _SHARING = "shared", "learner"
_MANIFEST, _WEIGHTS = "manifest.json", "weights.safetensors"
_STEP = re.compile(r"step_(\d{8,})")
_TEMPORARY = re.compile(r"\.(writing|aside|retired)-(\d+)-(step_\d{8,})")
_PART = re.compile(r"[a-z][a-z0-9_]*")
_FILE = re.compile(r"[a-z][a-z0-9_]*\.(json|safetensors)")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A verified checkpoint. ``warnings`` name the newer ones that were passed over, and why.

    Example: ``LoadedCheckpoint(50, {"learner": {...}}, {"actor.0.weight": w}, path, 212.0, ())``.
    """

    version: int
    parts: dict[str, StateTree]
    weights: StateTree
    path: Path
    score: float | None
    warnings: tuple[str, ...] = ()


class _Parts(dict[str, StateTree]):
    """Parts of a checkpoint by name; asking for one that it does not have is a CheckpointError."""

    def __missing__(self, name: str) -> StateTree:
        raise CheckpointError(f"the checkpoint has no part {name!r}: use one that this run wrote")


@dataclass(frozen=True, slots=True)
class _Manifest:
    version: int
    score: float | None
    weights_digest: str
    files: dict[str, tuple[int, str]]

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "score": self.score,
            "weights_digest": self.weights_digest,
            "files": {name: {"bytes": size, "sha256": sha} for name, (size, sha) in self.files.items()},
        }
        return json.dumps({**body, "sha256": _seal(body)}, indent=1).encode()


class CheckpointManager:
    """Saves and loads checkpoints in one directory (a run's ``checkpoints/``), for one writer at a time.

    Keeps the newest ``keep`` and, with ``keep_best``, the one with the highest score. The directory is made
    by the first save, so that looking into a run changes nothing but leftovers of killed writers. RunNotFound
    when something else than a directory has its name.
    """

    def __init__(self, directory: str | Path, keep: int = 2, keep_best: bool = True) -> None:
        if keep < 1:
            raise CheckpointError(f"keep must be at least 1, not {keep}: the newest checkpoint has to stay")
        self.directory = Path(directory)
        if os.path.lexists(self.directory) and not self.directory.is_dir():
            raise RunNotFound(
                f"{self.directory} is not a directory, so it holds no checkpoints: put the run's back, or "
                "start anew with `offbeat train`"
            )
        self._keep = keep
        self._keep_best = keep_best
        self._is_abandoned = False
        self._clear_leftovers(mine=False)

    # ------------------------------------------------------------ looking

    def versions(self) -> tuple[int, ...]:
        """Versions that have a checkpoint, oldest first; not verified."""
        if not self.directory.is_dir():
            return ()
        names = (_STEP.fullmatch(path.name) for path in self.directory.iterdir())
        return tuple(sorted(int(match[1]) for match in names if match))

    def best(self) -> int | None:
        """The version with the highest score (the newest of equals); None when none has a score."""
        return _best_of(self._manifests())

    def path(self, version: int) -> Path:
        """Return the directory of this version's checkpoint, which need not exist."""
        return self.directory / f"step_{version:08d}"

    # ------------------------------------------------------------ saving

    def save(
        self,
        version: int,
        parts: Mapping[str, StateTree],
        weights: StateTree,
        score: float | None = None,
    ) -> Path:
        """Write a checkpoint and retire old ones; returns its directory.

        It appears under its name only when every byte is on the disk. When it cannot be written, raises
        CheckpointError, leaves nothing behind and the older ones as they were. Checkpoints of higher
        versions belong to a future that was given up by continuing from an older one: they are removed.
        """
        temporary = self._beside("writing", version)
        try:
            self._make_directory()
            self._clear_leftovers(mine=True)
            temporary.mkdir()
            self._write(temporary, version, parts, weights, score)
            self._go_on()
            self._move_into_place(temporary, version)
        except OSError as error:
            files.remove_tree(temporary)
            raise self._cannot_save(version, error) from error
        except BaseException:
            files.remove_tree(temporary)
            raise
        self._retire(version)
        return self.path(version)

    def abandon(self) -> None:
        """Have a write under way end without a checkpoint, from another thread; none can follow."""
        self._is_abandoned = True

    def _go_on(self) -> None:
        if self._is_abandoned:
            raise CheckpointError("it was given up because the run ended")

    def set_score(self, version: int, score: float | None) -> bool:
        """Give a checkpoint the score that its evaluation found; False when it is not (any more) there."""
        manifest = self._manifests().get(version)
        if manifest is None:
            return False
        scored = _Manifest(version, _finite(score), manifest.weights_digest, manifest.files)
        try:
            files.replace_bytes(self.path(version) / _MANIFEST, scored.to_bytes())
        except OSError as error:
            raise self._cannot_save(version, error) from error
        return True

    def _beside(self, purpose: str, version: int) -> Path:
        return self.directory / f".{purpose}-{os.getpid()}-{self.path(version).name}"

    def _make_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            files.sync(self.directory.parent)

    def _write(
        self,
        directory: Path,
        version: int,
        parts: Mapping[str, StateTree],
        weights: StateTree,
        score: float | None,
    ) -> None:
        listed: files.Listed = {}
        shared, fingerprint = self._write_weights(directory, weights, listed)
        for name, tree in parts.items():
            if not _PART.fullmatch(name) or name in ("weights", "manifest"):
                raise CheckpointError(f"{name!r} cannot name a part of a checkpoint; use lower-case letters")
            skeleton, arrays = pack(tree, root=name)
            if name == _SHARING and (found := dict(_in_both(arrays, shared))):
                skeleton = {_SHARED: [found, skeleton]}
                arrays = {key: array for key, array in arrays.items() if key not in found}
            _write_skeleton(directory, name, skeleton, listed)
            files.write_arrays(directory / f"{name}.safetensors", arrays, listed, None, self._go_on)
        kept_score = self._score_of(version, fingerprint) if score is None else score
        manifest = _Manifest(version, _finite(kept_score), fingerprint, dict(sorted(listed.items())))
        files.write_bytes(directory / _MANIFEST, manifest.to_bytes())
        files.sync(directory)

    def _write_weights(
        self, directory: Path, weights: StateTree, listed: files.Listed
    ) -> tuple[dict[str, Array], str]:
        """Write the weights; return them as arrays by name, and their digest."""
        if _are_named_arrays(weights):
            packed = _plain_weights(weights)
        else:
            skeleton, packed = pack(weights, root="weights")
            _write_skeleton(directory, "weights", skeleton, listed)
        are_in_order = files.order(packed) == sorted(packed)
        total = Digest() if are_in_order else None
        files.write_arrays(directory / _WEIGHTS, packed, listed, total, self._go_on)
        return packed, digest(packed) if total is None else total.hexdigest()

    def _score_of(self, version: int, fingerprint: str) -> float | None:
        """The score already found for these very weights, when the version is saved a second time."""
        saved = self._manifests().get(version)
        return saved.score if saved is not None and saved.weights_digest == fingerprint else None

    def _move_into_place(self, temporary: Path, version: int) -> None:
        final, aside = self.path(version), self._beside("aside", version)
        if final.exists():
            # A directory that is not empty cannot be replaced in one step. Should we die between the two
            # renames, the next open moves the old one back.
            final.rename(aside)
        try:
            temporary.rename(final)
        except OSError:
            _restore(aside, final)
            raise
        files.sync(self.directory)
        files.remove_tree(aside)

    def _cannot_save(self, version: int, error: OSError) -> CheckpointError:
        intact = ", ".join(str(other) for other in self.versions()) or "none"
        return CheckpointError(
            f"checkpoint {version} could not be written to {self.directory}: {error}. Older checkpoints are "
            f"intact (versions: {intact}). Free disk space, make the directory writable or choose another "
            "run.dir, then resume the run"
        )

    # ------------------------------------------------------------ retention

    def _retire(self, newest: int) -> None:
        good = {version: manifest for version, manifest in self._manifests().items() if version <= newest}
        kept = set(sorted(good)[-self._keep :])
        best = _best_of(good)
        if self._keep_best and best is not None:
            kept.add(best)
        for version in self.versions():
            if version not in kept:
                self._remove(version)

    def _remove(self, version: int) -> None:
        # Renamed first: a checkpoint under its own name is never half removed.
        retired = self._beside("retired", version)
        try:
            self.path(version).rename(retired)
        except OSError as error:
            _log.warning("checkpoint %d could not be retired: %s", version, error)
            return
        files.remove_tree(retired)

    def _clear_leftovers(self, mine: bool) -> None:
        """Remove what killed writers left; a writer that is alive keeps what it is working on.

        ``mine``: also half-written ones that bear this process's own number, which only the writer may
        judge. A restarted container often gets the same number again.
        """
        if not self.directory.is_dir():
            return
        for path in list(self.directory.iterdir()):
            match = _TEMPORARY.fullmatch(path.name)
            if match is None or not _abandoned(int(match[2]), mine or match[1] == "aside"):
                continue
            final = self.directory / match[3]
            if match[1] == "aside" and not final.exists():
                _restore(path, final)
            else:
                files.remove_tree(path)

    def forget_after(self, version: int) -> None:
        """Retire every checkpoint newer than this version: the run goes back behind them."""
        for later in self.versions():
            if later > version:
                self._remove(later)

    # ------------------------------------------------------------ loading

    def load(self, version: int | None = None) -> LoadedCheckpoint:
        """Load and verify a version; without one, the newest that is whole.

        A checkpoint that is torn, truncated or altered is passed over, and ``warnings`` says which and why.
        CheckpointError when the version asked for is not whole, or when no checkpoint is.
        """
        if version is not None:
            return self._load_exactly(version)
        warnings: list[str] = []
        for candidate in reversed(self.versions()):
            try:
                return self._read(candidate, tuple(warnings))
            except CheckpointError as error:
                warnings.append(f"checkpoint {candidate} was not used: {error}")
        raise CheckpointError(self._nothing_to_load(warnings))

    def _load_exactly(self, version: int) -> LoadedCheckpoint:
        others = ", ".join(str(other) for other in self.versions() if other != version) or "none"
        if version not in self.versions():
            raise CheckpointError(
                f"{self.directory} has no checkpoint {version}; available versions: {others}"
            )
        try:
            return self._read(version)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {version} cannot be used: {error}; available versions besides it: {others}"
            ) from error

    def _read(self, version: int, warnings: tuple[str, ...] = ()) -> LoadedCheckpoint:
        directory = self.path(version)
        manifest = _read_manifest(directory)
        try:
            for name, (size, sha) in manifest.files.items():
                _verify(directory / name, size, sha)
            named = files.read_arrays(directory / _WEIGHTS)
            names = [name.removesuffix(".json") for name in manifest.files if name.endswith(".json")]
            parts = _Parts({name: _read_part(directory, name, named) for name in names})
            weights = parts.pop("weights", named)
        except OSError as error:
            raise CheckpointError(f"it cannot be read ({error})") from error
        return LoadedCheckpoint(version, parts, weights, directory, manifest.score, warnings)

    def _nothing_to_load(self, warnings: list[str]) -> str:
        if not warnings:
            return (
                f"there is no checkpoint in {self.directory}: the run ended before its first one. "
                "Start it anew with `offbeat train`; a smaller checkpoint.interval_s saves sooner"
            )
        reasons = "\n  ".join(warnings)
        return (
            f"no checkpoint in {self.directory} is whole:\n  {reasons}\n"
            "Put a good copy of one of them back, or start anew with `offbeat train`"
        )

    def _manifests(self) -> dict[int, _Manifest]:
        found: dict[int, _Manifest] = {}
        for version in self.versions():
            try:
                found[version] = _read_manifest(self.path(version))
            except CheckpointError as error:
                _log.warning("checkpoint %d is left out: %s", version, error)
        return found


def _abandoned(owner: int, mine: bool) -> bool:
    return mine if owner == os.getpid() else not files.process_alive(owner)


def _restore(aside: Path, final: Path) -> None:
    """Move a checkpoint that was set aside back, unless its successor made it into place."""
    if aside.exists() and not final.exists():
        with contextlib.suppress(OSError):
            aside.rename(final)


def _best_of(manifests: Mapping[int, _Manifest]) -> int | None:
    scored = [
        (manifest.score, version) for version, manifest in manifests.items() if manifest.score is not None
    ]
    return max(scored)[1] if scored else None


def _finite(score: float | None) -> float | None:
    return float(score) if score is not None and math.isfinite(score) else None


def _are_named_arrays(weights: StateTree) -> bool:
    return isinstance(weights, Mapping) and all(isinstance(array, np.ndarray) for array in weights.values())


def _plain_weights(weights: Mapping[str, Array]) -> dict[str, Array]:
    if not all(type(name) is str for name in weights):
        raise CheckpointError("weights need names: give them as a dict from str to numpy arrays")
    if "__metadata__" in weights:
        raise CheckpointError("weights cannot be named '__metadata__', which safetensors keeps for itself")
    return {name: plain_array(array, f"weights[{name!r}]") for name, array in weights.items()}


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(directory: Path) -> _Manifest:
    try:
        body = parse_json(read_file(directory / _MANIFEST, DESCRIPTION_BYTES))
        seal = body.pop("sha256")
        if seal != _seal(body):
            raise CheckpointError(f"{_MANIFEST} was altered after it was written")
        if body["format"] not in _READABLE:
            text = f"it has format {body['format']!r:.20}, this offbeat reads formats up to {FORMAT}"
            raise CheckpointError(f"{text}: use the one that wrote it")
        manifest = _manifest_of(body)
    except FileNotFoundError as error:
        raise CheckpointError(f"{_MANIFEST} is missing, so it was never finished") from error
    except OSError as error:
        raise CheckpointError(f"{_MANIFEST} cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # Not repr: that of a decoding error holds the whole file.
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{_MANIFEST} is torn or not one of ours ({what})") from error
    if directory.name != f"step_{manifest.version:08d}":
        raise CheckpointError(f"{_MANIFEST} belongs to version {manifest.version}")
    return manifest


def _manifest_of(body: Mapping[str, Any]) -> _Manifest:
    version, score, listed = body["version"], body["score"], {}
    if type(version) is not int or not isinstance(score, float | int | None):
        raise TypeError("version or score is of another type")
    for name, entry in body["files"].items():
        if not _FILE.fullmatch(name) or type(entry["bytes"]) is not int:
            raise ValueError(f"{name!r:.60} is no file of a checkpoint")
        listed[name] = (entry["bytes"], str(entry["sha256"]))
    expected = {_WEIGHTS, *(name.replace(".json", ".safetensors") for name in listed)}
    if missing := expected - set(listed):
        raise ValueError(f"it does not list {', '.join(sorted(missing))}")
    return _Manifest(version, score, str(body["weights_digest"]), listed)


def _verify(path: Path, size: int, sha: str) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is {'not a file' if path.exists() else 'missing'}")
    found = path.stat().st_size
    if found != size:
        raise CheckpointError(f"{path.name} has {found} bytes instead of {size}")
    if files.sha256(path) != sha:
        raise CheckpointError(f"{path.name} has the right size but other content than was written")


def _write_skeleton(directory: Path, name: str, skeleton: Any, listed: files.Listed) -> None:
    files.write_bytes(directory / f"{name}.json", json.dumps(skeleton, allow_nan=False).encode(), listed)


def _in_both(arrays: Mapping[str, Array], shared: Mapping[str, Array]) -> Iterator[tuple[str, str]]:
    """Yield the names of arrays that are the same in both, bit by bit."""
    alike: dict[Any, list[str]] = {}
    for name, array in shared.items():
        alike.setdefault((array.dtype, array.shape), []).append(name)
    for name, array in arrays.items():
        for other in alike.get((array.dtype, array.shape), ()) if array.size else ():
            if files.are_equal(array, shared[other]):
                yield name, other
                break


def _read_part(directory: Path, name: str, weights: Mapping[str, Array]) -> StateTree:
    try:
        skeleton = parse_json(read_file(directory / f"{name}.json", STATE_BYTES))
    except ValueError as error:  # right when it was verified a moment ago: the disk itself is failing
        raise CheckpointError(f"{name}.json is not JSON ({type(error).__name__}: {error})") from error
    if name == "weights":
        return unpack(skeleton, weights)
    arrays = files.read_arrays(directory / f"{name}.safetensors")
    if name == _SHARING and isinstance(skeleton, dict) and _SHARED in skeleton:
        with fitting("what it shares with the weights"):
            shared, skeleton = skeleton[_SHARED]
            # Copies: whoever loads the learner may write to them.
            arrays |= {key: weights[other].copy() for key, other in shared.items()}
    return unpack(skeleton, arrays)
