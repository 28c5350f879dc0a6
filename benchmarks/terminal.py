"""Record a command on a terminal, with the time of each piece of output, and list its longest silences.

    python benchmarks/terminal.py --cast session.cast -- offbeat train cartpole-ppo
    python benchmarks/terminal.py --plain -- offbeat train cartpole-unizero run.rounds=4

The command gets a pseudo-terminal of 120 columns, or with ``--plain`` a pipe. A silence is a time without any
output: before the first, between two pieces, and after the last until the command ends. ``--cast`` keeps the
session in the format of asciinema (version 2), which ``asciinema play`` shows.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

COLUMNS, ROWS = 120, 40
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\x00-\x09\x0b-\x1f]")


class Piece(NamedTuple):
    """Output, and the seconds since the command was started."""

    time_s: float
    text: str


class Silence(NamedTuple):
    """A time without output, and the last line that was there before."""

    begin_s: float
    seconds: float
    after: str


@dataclass(slots=True)
class Session:
    """A command that was recorded until it ended."""

    command: list[str]
    pieces: list[Piece] = field(default_factory=list)
    seconds: float = 0.0
    exit_code: int = 0

    def silences(self) -> list[Silence]:
        """Return all times without output, the longest first."""
        pieces = [Piece(0.0, ""), *self.pieces]
        ends_s = [piece.time_s for piece in pieces[1:]] + [self.seconds]
        found = [
            Silence(piece.time_s, end_s - piece.time_s, last_line(piece.text))
            for piece, end_s in zip(pieces, ends_s, strict=True)
        ]
        return sorted(found, key=lambda silence: -silence.seconds)

    def to_cast(self) -> str:
        """Return the session as a file of asciinema."""
        header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": " ".join(self.command)}
        events = [[round(piece.time_s, 3), "o", piece.text] for piece in self.pieces]
        return "\n".join(map(json.dumps, [header, *events])) + "\n"


def last_line(text: str) -> str:
    """Return the last line with something on it, without control characters."""
    lines = [line.strip() for line in _CONTROL.sub("", text).splitlines()]
    return next((line for line in reversed(lines) if line), "")


def record(
    command: Sequence[str],
    plain: bool = False,
    columns: int = COLUMNS,
    rows: int = ROWS,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Session:
    """Run a command to its end and record what it writes; ``environment`` is added to this process's."""
    session, begun_s = Session(list(command)), time.monotonic()
    ours, theirs = os.pipe() if plain else pty.openpty()
    if not plain:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    terminal = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    added = {**os.environ, **terminal, **(environment or {})}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=added, cwd=directory
    )
    os.close(theirs)
    with contextlib.suppress(OSError):  # a terminal whose last writer has gone
        while data := os.read(ours, 1 << 16):
            session.pieces.append(Piece(time.monotonic() - begun_s, data.decode(errors="replace")))
    session.exit_code = process.wait()
    session.seconds = time.monotonic() - begun_s
    os.close(ours)
    return session


def main() -> int:
    """Record the command and say where it was silent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="a pipe in place of a terminal")
    parser.add_argument("--cast", type=Path, metavar="FILE", help="keep the session here")
    parser.add_argument("--most", type=int, default=5, help="number of silences to list")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    session = record(arguments.command, arguments.plain)
    if arguments.cast is not None:
        arguments.cast.write_text(session.to_cast(), encoding="utf-8")
    first_s = session.pieces[0].time_s if session.pieces else session.seconds
    print(f"{session.seconds:.1f} s, exit code {session.exit_code}, first output after {first_s:.2f} s")
    for begin_s, seconds, after in session.silences()[: arguments.most]:
        print(f"  silent for {seconds:5.2f} s from {begin_s:6.2f} s, after: {after[:100]}")
    return session.exit_code


if __name__ == "__main__":
    sys.exit(main())
