"""Valid actions that were found, kept for next time: in memory, in a file, and from files of other runs.

A line of ``actions.jsonl`` has a key (MD5 of the story, finder and version, budget, key of the view) and
labels in order. The first value of a key wins: a replay, a resumed run and all arms of a comparison see the
same actions. One process writes a file; others hand it their new entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from offbeat.envs.text.finding import Found
from offbeat.envs.text.game import Game, Scene
from offbeat.errors import ConfigError
from offbeat.reading import open_to_append, parse_json, read_lines


class ActionKey(NamedTuple):
    """A state whose valid actions are known, as far as they depend on it."""

    story: str
    finder: str
    budget: int
    view: str


class Entry(NamedTuple):
    """Labels of a key in their order, and how many candidates the budget left untried."""

    key: ActionKey
    labels: tuple[str, ...]
    num_left: int = 0


@runtime_checkable
class SearchedGame(Game, Protocol):
    """A game whose valid actions have to be looked for; ``md5`` is that of its story."""

    md5: str
    finder: str
    budget: int

    def find(self) -> Found:
        """Return the valid actions of the present state with the finder's counts."""


class ActionTable:
    """Known valid actions. Without ``path`` they are kept in memory; ``reads`` are files of other runs.

    Example: ``ActionTable(run / "actions.jsonl", reads=[other_run / "actions.jsonl"])``.
    """

    def __init__(self, path: Path | None = None, reads: Iterable[Path] = ()) -> None:
        self._labels: dict[ActionKey, tuple[str, ...]] = {}
        self._new: list[Entry] = []
        self._file: FileIO | None = None
        for other in reads:
            self._read(other)
        if path is not None:
            if path.exists():
                self._read(path)
            self._file = open_to_append(path)
            self._end_line(path)

    def __len__(self) -> int:
        return len(self._labels)

    def get(self, key: ActionKey) -> tuple[str, ...] | None:
        """Return the labels of a key, if they are known."""
        return self._labels.get(key)

    def add(self, entry: Entry) -> tuple[str, ...]:
        """Add an entry unless its key is known, and return the labels that hold."""
        known = self._labels.get(entry.key)
        if known is not None:
            return known
        self._labels[entry.key] = entry.labels
        self._new.append(entry)
        if self._file is not None:
            self._file.write(_line(entry))
        return entry.labels

    def take_new(self) -> list[Entry]:
        """Return entries that were added since the last call, for whoever writes the file."""
        new, self._new = self._new, []
        return new

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _end_line(self, path: Path) -> None:
        """Begin a new line after one that a crash has torn."""
        assert self._file is not None
        size = path.stat().st_size
        if size:
            with path.open("rb") as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    self._file.write(b"\n")

    def _read(self, path: Path) -> None:
        try:
            for number, line in enumerate(read_lines(path), 1):
                if line.strip():
                    self._keep(path, number, line)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{path}: the valid actions cannot be read: {reason}") from None

    def _keep(self, path: Path, number: int, line: bytes) -> None:
        try:
            entry = _parse(parse_json(line))
        except ValueError:
            if line.startswith(b"{"):  # torn by a crash
                return
            entry = None
        if entry is None:
            raise ConfigError(f"{path}, line {number}: no entry of valid actions; remove the line")
        self._labels.setdefault(entry.key, entry.labels)


def _line(entry: Entry) -> bytes:
    record = {**entry.key._asdict(), "labels": entry.labels, "left": entry.num_left}
    return json.dumps(record).encode() + b"\n"


def _parse(record: Any) -> Entry | None:
    try:
        key = ActionKey(*(record[name] for name in ActionKey._fields))
        labels, left = record["labels"], record["left"]
    except (KeyError, TypeError):
        return None
    is_right = [type(value) for value in key] == [str, str, int, str] and isinstance(left, int)
    if not is_right or not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        return None
    return Entry(key, tuple(labels), left)


@dataclass(slots=True)
class ActionCounts:
    """Counts of requests for valid actions; ``num_cut`` and ``num_left`` count actions not offered."""

    num_asked: int = 0
    num_hits: int = 0
    num_checked: int = 0
    num_different: int = 0
    num_cut: int = 0
    num_left: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of requests that the table answered."""
        return self.num_hits / self.num_asked if self.num_asked else 0.0


@dataclass(slots=True)
class ValidActions:
    """Valid actions of games through a table.

    One hit in ``check_every`` is looked for again; where it differs, ``counts.num_different`` grows and what
    the table says holds. Of more than ``max_actions`` the rest is cut and counted.

    Example::

        valid = ValidActions(ActionTable())
        scene = game.step(random.choice(valid.of(game, scene)))
    """

    table: ActionTable
    max_actions: int | None = None
    check_every: int = 100
    counts: ActionCounts = field(default_factory=ActionCounts)

    def of(self, game: Game, scene: Scene) -> Sequence[str]:
        """Return the valid actions of the present state, which ``scene`` shows."""
        if scene.done:
            return ()
        labels = (
            self._look_up(game, scene) if isinstance(game, SearchedGame) and game.finder else game.actions()
        )
        if self.max_actions is not None and len(labels) > self.max_actions:
            self.counts.num_cut += len(labels) - self.max_actions
            labels = labels[: self.max_actions]
        return labels

    def _look_up(self, game: SearchedGame, scene: Scene) -> tuple[str, ...]:
        key = ActionKey(game.md5, game.finder, game.budget, scene.key)
        counts, labels = self.counts, self.table.get(key)
        counts.num_asked += 1
        if labels is None:
            found = game.find()
            counts.num_left += found.num_left
            return self.table.add(Entry(key, found.labels, found.num_left))
        counts.num_hits += 1
        if counts.num_hits % self.check_every == 0:
            counts.num_checked += 1
            counts.num_different += set(game.find().labels) != set(labels)
        return labels
