"""Files that may come from a stranger: only regular ones of bounded size are opened, without waiting."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

CONFIG_BYTES = 1 << 16
"""A configuration; a resolved one has about 5 kB, and YAML is read at some 20 kB a second."""
DESCRIPTION_BYTES = 1 << 20
"""A manifest, of a run or of a checkpoint."""
STATE_BYTES = 1 << 30
"""The part of a checkpoint that is JSON; its arrays lie beside it."""
ARRAYS_BYTES = 1 << 40
"""The arrays of a checkpoint."""
JOURNAL_BYTES = 1 << 38
"""Events or a schedule, which are read line by line."""
LINE_BYTES = 1 << 24
"""One line of a journal."""
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)


def open_file(path: Path, limit: int) -> BufferedReader:
    """Open a regular file of at most ``limit`` bytes to read; OSError says what else it is."""
    descriptor = os.open(path, os.O_RDONLY | _NO_WAIT)
    try:
        _check_regular(descriptor, path)
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, at most {limit:,} are read", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def open_to_append(path: Path) -> FileIO:
    """Open a regular file to write at its end, unbuffered; a link to somewhere else is not followed."""
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_WAIT | getattr(os, "O_NOFOLLOW", 0), 0o666
    )
    try:
        _check_regular(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return FileIO(descriptor, "ab")


def _check_regular(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; OSError for any other."""
    with open_file(path, limit) as file:
        return file.read(limit)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a journal with their ends; OSError for one that is too long for any record."""
    with open_file(path, JOURNAL_BYTES) as file:
        while line := file.readline(LINE_BYTES):
            if len(line) == LINE_BYTES:
                raise OSError(errno.EFBIG, f"a line has more than {LINE_BYTES:,} bytes", str(path))
            yield line


def parse_json(data: bytes | str) -> Any:
    """Parse JSON; ValueError also when it is nested deeper than Python can follow."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def numbers(values: Iterable[Any]) -> list[Any]:
    """Return values of a saved state as a list; TypeError when one of them is no number."""
    found = list(values)
    if strange := [value for value in found if not isinstance(value, int | float)]:
        raise TypeError(f"{strange[0]!r:.40} in place of a number")
    return found
