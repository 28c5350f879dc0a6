"""Tables of scores: what a language model said of labels behind prompts, computed beforehand.

A model of hundreds of millions of parameters takes a second for a state; read from a table it is a frozen
prior at no cost. A line of the file is one prompt; the first line names the model.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.algorithms.priorzero.priors import LabelScores
from offbeat.errors import ConfigError
from offbeat.llm.scoring import Scores
from offbeat.progress import report_progress
from offbeat.reading import open_to_append, parse_json, read_lines

_Asked = tuple[str, tuple[str, ...]]


class TableScores:
    """Scores read from a file, and asked of a model where the file has none; these are added to it.

    Without ``beyond`` a prompt that is not there is an error. The labels of a prompt are kept with it: the
    same prompt with other valid actions is another entry.

    Example: ``ModelPrior(TableScores(Path("zork1.scores.jsonl")), "context_free")``.
    """

    def __init__(self, path: Path, beyond: LabelScores | None = None) -> None:
        self._path, self._beyond = Path(path), beyond
        self._known: dict[_Asked, Scores] = {}
        self.version = "" if beyond is None else beyond.version
        if self._path.exists():
            self._read()
        elif beyond is None:
            raise ConfigError(f"{path} does not exist: make it by offbeat text prior-table MODEL GAME {path}")
        self._file = None if beyond is None else open_to_append(self._path)
        if self._file is not None and self._path.stat().st_size == 0:
            self._write({"model": self.version})
        elif self._file is not None and not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def of(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[Scores]:
        """Return the scores of each prompt's actions."""
        asked = [(prompt, tuple(own)) for prompt, own in zip(prompts, actions, strict=True)]
        for one in dict.fromkeys(one for one in asked if one not in self._known):
            self._add(one)
        return [self._known[one] for one in asked]

    def _add(self, asked: _Asked) -> None:
        prompt, actions = asked
        if self._beyond is None:
            raise ConfigError(
                f"{self._path} has no scores for a prompt that ends in {prompt[-60:]!r}: give the model, "
                "too, or make the table of more views"
            )
        (found,) = self._beyond.of([prompt], [actions])
        self._known[asked] = found
        sums, counts = found.sums.tolist(), found.counts.tolist()
        self._write({"prompt": prompt, "actions": actions, "sums": sums, "counts": counts})

    def _write(self, entry: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(entry).encode() + b"\n")

    def _read(self) -> None:
        """Read what is there; lines that a crash has torn are left out."""
        lines = read_lines(self._path)
        header = _parsed(next(lines, b""))
        if header is None or not isinstance(header.get("model"), str):
            raise ConfigError(f"{self._path} is no table of scores: make it by offbeat text prior-table")
        model = str(header["model"])
        if self.version not in ("", model):
            raise ConfigError(
                f"{self._path} is of another model ({model[:12]}, not {self.version[:12]}): give a new file"
            )
        self.version = model
        for entry in filter(None, map(_parsed, lines)):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        sums, counts = np.array(entry["sums"], np.float64), np.array(entry["counts"], np.int64)
        actions = tuple(map(str, entry["actions"]))
        if len(actions) == len(sums) == len(counts):
            self._known[str(entry["prompt"]), actions] = Scores(sums, counts)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def fill(table: TableScores, prompts: Sequence[str], actions: Sequence[Sequence[str]], empty: str) -> None:
    """Ask for all states, and for their actions behind an empty prompt."""
    for number, (prompt, own) in enumerate(zip(prompts, actions, strict=True), 1):
        if number % 20 == 0:
            report_progress(f"state {number} of {len(prompts)}")
        table.of([prompt, empty], [own, own])
    report_progress("")
