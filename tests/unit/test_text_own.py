"""Somebody's own game: that of the documentation, and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from offbeat.envs.text import Game, OwnGame
from offbeat.errors import EnvError

PAGE = Path(__file__).parents[2] / "docs" / "text-games.md"


def documented() -> type[OwnGame]:
    code = re.search(r"<!-- file: lamp.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 16
    found: dict[str, object] = {"__name__": "lamp"}
    exec(code[1], found)
    made = found["Lamp"]
    assert isinstance(made, type) and issubclass(made, OwnGame)
    return made


def test_the_game_of_the_documentation_is_won_and_saved() -> None:
    game, other = documented()(), documented()()
    assert isinstance(game, Game)
    scene = game.start()
    assert not scene.done and scene.goal
    keys = {scene.key}
    for action in ("light lamp", "go up"):
        assert action in game.actions()
        scene = game.step(action)
        keys.add(scene.key)
        other.restore(game.save())
        assert other.scene() == scene
        assert list(other.actions()) == list(game.actions())
    assert scene.done and scene.score == game.max_score
    assert len(keys) == 2, "what is over looks like what is lit"
    assert game.step("go up") == scene, "nothing happens after the end"
    assert game.start().score == 0.0


class Bad(OwnGame):
    """A game whose state no file can keep."""

    def begin(self, seed: int) -> str:
        self.seen = {1, 2}
        return ""

    def look(self) -> str:
        return ""

    def actions(self) -> list[str]:
        return []

    def command(self, text: str) -> str:
        return ""


class Numbered(Bad):
    def begin(self, seed: int) -> str:
        self.rooms = {1: "hall"}
        return ""


@pytest.mark.parametrize(("kind", "name"), [(Bad, "seen"), (Numbered, "rooms")])
def test_state_that_cannot_be_kept_is_refused_at_the_start(kind: type[OwnGame], name: str) -> None:
    with pytest.raises(EnvError, match=rf"{kind.__name__}\.{name} is .* use numbers, text, lists"):
        kind()


@pytest.mark.parametrize("state", [b"", b"[]", b'{"lit": true}', b"\xff"])
def test_a_foreign_state_is_refused(state: bytes) -> None:
    game = documented()()
    before = game.save()
    with pytest.raises(EnvError, match="restore what it saved"):
        game.restore(state)
    assert game.save() == before
    assert json.loads(before)
