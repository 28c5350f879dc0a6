"""Files that are either whole or absent: writing, syncing, hashing, moving into place."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import safetensors.numpy
from safetensors import SafetensorError

from offbeat.errors import CheckpointError
from offbeat.reading import ARRAYS_BYTES, open_file
from offbeat.types import Array


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays (C-contiguous, little-endian) as safetensors and wait until the disk has them."""
    try:
        safetensors.numpy.save_file(dict(arrays), path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    sync(path)


def read_arrays(path: Path) -> dict[str, Array]:
    """Read a safetensors file into arrays that may be written to."""
    try:
        return safetensors.numpy.load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is not a safetensors file ({error})") from error


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new, never a mixture."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        write_bytes(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has this file, or the names in this directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """SHA-256 of a file's content (hex)."""
    with open_file(path, ARRAYS_BYTES) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_tree(path: Path) -> None:
    """Remove a directory as far as it lets itself be removed: leftovers are tried again next time."""
    shutil.rmtree(path, ignore_errors=True)


def process_alive(pid: int) -> bool:
    """Return True if a process of this number exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
