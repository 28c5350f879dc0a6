"""Known valid actions: the first value wins, torn lines are ended, differences and cuts are counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from offbeat.envs.text import ActionTable, ValidActions
from offbeat.envs.text.finding import Found
from offbeat.envs.text.game import Scene
from offbeat.envs.text.table import ActionKey, Entry, SearchedGame
from offbeat.errors import ConfigError

KEY = ActionKey("md5", "frames-1", 3000, "view")


class Searched:
    """A game whose lists are given: each search takes the next one."""

    name, max_score, md5, finder, budget = "searched", 1.0, "md5", "frames-1", 3000

    def __init__(self, *lists: Sequence[str], num_left: int = 0) -> None:
        self.lists, self.num_left = list(lists), num_left

    def start(self) -> Scene:
        return scene("a")

    step = scene = restore = close = save = start  # not called

    def find(self) -> Found:
        return Found(tuple(self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]), 9, self.num_left)

    def actions(self) -> Sequence[str]:
        return self.find().labels


def scene(key: str, done: bool = False) -> Scene:
    return Scene("", "", "", "", 0.0, done, key)


def test_the_first_value_wins_and_a_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "actions.jsonl"
    table = ActionTable(path)
    assert table.add(Entry(KEY, ("north", "wait"), 3)) == ("north", "wait")
    assert table.add(Entry(KEY, ("south",))) == ("north", "wait")
    assert table.take_new() == [Entry(KEY, ("north", "wait"), 3)]
    assert table.take_new() == []
    table.close()
    assert json.loads(path.read_text()) == {**KEY._asdict(), "labels": ["north", "wait"], "left": 3}
    again = ActionTable(path)
    assert again.get(KEY) == ("north", "wait")
    assert again.add(Entry(KEY, ("south",))) == ("north", "wait")
    again.close()
    assert len(path.read_text().splitlines()) == 1


def test_files_of_other_runs_are_read_and_left_alone(tmp_path: Path) -> None:
    other = ActionTable(tmp_path / "other.jsonl")
    other.add(Entry(KEY, ("north",)))
    other.close()
    before = (tmp_path / "other.jsonl").read_bytes()
    mine = ActionTable(tmp_path / "mine.jsonl", reads=[tmp_path / "other.jsonl"])
    assert mine.get(KEY) == ("north",)
    mine.add(Entry(KEY._replace(view="b"), ("south",)))
    mine.close()
    assert (tmp_path / "other.jsonl").read_bytes() == before
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == 1
    with pytest.raises(ConfigError, match="cannot be read"):
        ActionTable(reads=[tmp_path / "none.jsonl"])


@pytest.mark.parametrize("part", ["story", "finder", "budget", "view"])
def test_each_part_of_a_key_counts(part: str) -> None:
    table = ActionTable()
    table.add(Entry(KEY, ("north",)))
    other = KEY._replace(**{part: 1 if part == "budget" else "other"})
    assert table.get(other) is None


def test_a_torn_line_costs_its_entry_only(tmp_path: Path) -> None:
    path = tmp_path / "actions.jsonl"
    table = ActionTable(path)
    for view in "abc":
        table.add(Entry(KEY._replace(view=view), (view,)))
    table.close()
    whole = path.read_bytes()
    for cut in range(2, 40):
        path.write_bytes(whole[:-cut])
        table = ActionTable(path)
        assert len(table) == 2
        table.add(Entry(KEY._replace(view="d"), ("d",)))
        table.close()
        again = ActionTable(path)
        assert again.get(KEY._replace(view="d")) == ("d",)
        assert len(again) == 3
        again.close()


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"story": 1}', json.dumps({**KEY._asdict(), "labels": [1], "left": 0})]
)
def test_what_is_no_table_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "actions.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1: no entry"):
        ActionTable(path)


def test_hits_are_counted_and_looked_for_again() -> None:
    game = Searched(["north", "wait"], ["north"], ["wait", "north"], num_left=7)
    assert isinstance(game, SearchedGame)
    valid = ValidActions(ActionTable(), check_every=2)
    lists = [valid.of(game, scene("a")) for _ in range(5)]
    assert set(map(tuple, lists)) == {("north", "wait")}
    counts = valid.counts
    assert (counts.num_asked, counts.num_hits, counts.num_checked, counts.num_different) == (5, 4, 2, 1)
    assert counts.hit_rate == 0.8
    assert counts.num_left == 7


def test_a_cut_is_counted_and_the_table_keeps_all() -> None:
    game = Searched(["a", "b", "c", "d"])
    valid = ValidActions(ActionTable(), max_actions=3)
    assert [tuple(valid.of(game, scene("x"))) for _ in range(2)] == [("a", "b", "c")] * 2
    assert valid.counts.num_cut == 2
    assert valid.table.get(KEY._replace(view="x")) == ("a", "b", "c", "d")
    assert valid.of(game, scene("x", done=True)) == ()
