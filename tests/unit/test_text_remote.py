"""Games in children: killed and hung ones are replaced without losing a step, mistakes come back in words."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.envs.text import Game, RemoteGame, open_game
from offbeat.errors import ConfigError, EnvError
from tests.unit.text_games import ZORK, needs_jericho, needs_stories, needs_textworld

OWN = """
import os, time
from offbeat.envs.text import OwnGame

class Trap(OwnGame):
    max_score = 3

    def begin(self, seed):
        self.steps = 0
        return "Hello."

    def look(self):
        return f"Step {self.steps}."

    def actions(self):
        return ["walk", "die", "hang", "raise"]

    def command(self, text):
        if text == "die":
            os._exit(3)
        if text == "hang":
            time.sleep(600)
        if text == "raise":
            raise ValueError("boo")
        self.steps += 1
        self.score = float(self.steps)
        return "You walk."
"""
KINDS = [
    "tiny:8000",
    pytest.param(str(ZORK), marks=[needs_jericho, needs_stories]),
    pytest.param("cooking:8000", marks=needs_textworld),
]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "trapped.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "trapped:Trap"
    sys.modules.pop("trapped", None)


def kill(game: RemoteGame) -> None:
    assert game.pid is not None
    os.kill(game.pid, signal.SIGKILL)


@pytest.mark.parametrize("what", KINDS)
def test_a_killed_child_loses_nothing_and_states_outlive_it(what: str) -> None:
    whole, killed = open_game(what), RemoteGame(what)
    scenes = [(whole.start(), killed.start())]
    actions = list(whole.actions())[:2]
    for action in actions:
        kill(killed)
        scenes.append((whole.step(action), killed.step(action)))
    assert all(ours == theirs for ours, theirs in scenes)
    assert killed.num_deaths == 2
    kill(killed)
    assert killed.actions() == tuple(whole.actions())
    assert killed.save() == whole.save()
    kept, last = killed.save(), killed.scene()
    killed.close()
    fresh = RemoteGame(what)
    fresh.restore(kept)
    assert fresh.scene()._replace(answer="") == last._replace(answer="")
    assert fresh.step(actions[0]) == whole.step(actions[0])
    fresh.close()
    whole.close()


@pytest.mark.slow
def test_200_killed_children_in_a_row_lose_no_step() -> None:
    whole, killed = open_game("tiny:9000"), RemoteGame("tiny:9000")
    scenes = whole.start(), killed.start()
    for step in range(200):
        if scenes[0].done:
            scenes = whole.start(), killed.start()
        actions = whole.actions()
        kill(killed)
        scenes = whole.step(actions[step % len(actions)]), killed.step(actions[step % len(actions)])
        assert scenes[0] == scenes[1]
    assert killed.num_deaths == 200
    killed.close()


def test_it_is_a_game(own: str) -> None:
    game = RemoteGame(own)
    assert isinstance(game, Game)
    assert game.save() == open_game(own).save(), "it is started when it was not"
    assert game.step("walk").score == 1.0
    assert game.start().score == 0.0
    game.close()


def test_a_command_that_kills_every_child_is_named(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.envs.text.remote._MOST_DEATHS", 3)
    game = RemoteGame(own)
    game.start()
    assert game.step("walk").score == 1.0
    with pytest.raises(EnvError, match=r"3 children in a row ended in the request step 'die'.* code 3"):
        game.step("die")
    assert game.step("walk").score == 2.0, "the state before goes on"
    game.close()


def test_a_child_that_hangs_is_replaced(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    game = RemoteGame(own, timeout_s=60.0)
    game.start()
    assert game.step("walk").score == 1.0
    monkeypatch.setattr("offbeat.envs.text.remote._MOST_DEATHS", 2)
    game._timeout_s = 0.3
    with pytest.raises(EnvError, match=r"2 children in a row .* 'hang'.* did not answer within 0.3 s"):
        game.step("hang")
    game._timeout_s = 60.0
    assert game.num_deaths == 2
    assert game.step("walk").score == 2.0
    game.close()


def test_what_a_game_raises_comes_back_with_its_traceback(own: str) -> None:
    game = RemoteGame(own)
    game.start()
    with pytest.raises(EnvError, match=r"(?s)trapped:Trap raised.*ValueError: boo"):
        game.step("raise")
    assert game.num_deaths == 0
    assert game.step("walk").score == 1.0
    with pytest.raises(EnvError, match="restore what it saved"):
        game.restore(b"nonsense")
    assert game.step("walk").score == 2.0
    game.close()


def test_mistakes_are_found_at_once() -> None:
    with pytest.raises(ConfigError, match="no file and no family"):
        RemoteGame("nothing")
    with pytest.raises(ConfigError, match="No module named 'nothing'"):
        RemoteGame("nothing:Game")
    with pytest.raises(ConfigError, match="no class Nothing"):
        open_game("offbeat.envs.text:Nothing")
    with pytest.raises(ConfigError, match="no text game"):
        open_game("numpy:ndarray")
    with pytest.raises(ConfigError, match="module of Python itself"):
        open_game("os:system")
    with pytest.raises(ConfigError, match="0 to 9999"):
        open_game("tiny:10000")


def test_a_closed_game_leaves_no_process(own: str) -> None:
    game = RemoteGame(own)
    pid = game.pid
    assert pid is not None
    game.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
