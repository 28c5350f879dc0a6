"""Story files: walkthroughs reach their scores, the finder reaches their steps, states come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.envs.text import open_game
from offbeat.envs.text.measuring import Walk, follow
from offbeat.envs.text.memory import Memory, read_story
from offbeat.envs.text.story import StoryGame, walkthrough
from offbeat.errors import ConfigError, EnvError
from tests.unit.text_games import GAMES, LIBRARY, YOMOMMA, ZORK, needs_jericho, needs_stories

pytestmark = [needs_jericho, needs_stories]


@pytest.fixture(scope="module")
def zork() -> StoryGame:
    return StoryGame(ZORK, seed=12)


@pytest.mark.parametrize(
    ("path", "name", "seed", "score"),
    [(ZORK, "zork1", 12, 350), (LIBRARY, "library", 1, 30), (YOMOMMA, "yomomma", 1, 34)],
)
def test_the_walkthrough_reaches_its_score(path: Path, name: str, seed: int, score: int) -> None:
    game = StoryGame(path, seed)
    assert game.max_score in (score, score + 1)
    scene = game.start()
    for command in walkthrough(name):
        assert not scene.done
        scene = game.step(command)
        if scene.done:
            break
    assert scene.score == score
    assert scene.done
    assert game.step("look") == scene


def test_the_finder_reaches_the_first_steps_of_the_walkthrough(zork: StoryGame) -> None:
    assert follow(zork, walkthrough("zork1"), 12).num_reached == 12


@pytest.mark.slow
def test_the_finder_reaches_the_steps_of_the_walkthrough(zork: StoryGame) -> None:
    walk = follow(zork, walkthrough("zork1"), 80)
    assert walk.num_steps == 80
    assert walk.num_reached >= 75
    assert walk.num_conflicts == 0
    assert follow(StoryGame(LIBRARY), walkthrough("library")).num_reached >= 48


def test_a_key_that_leaves_everything_out_is_caught(zork: StoryGame) -> None:
    poisoned: Walk = follow(zork, walkthrough("zork1"), 12, key_of=lambda scene: "constant")
    assert poisoned.num_conflicts >= 3
    assert follow(zork, walkthrough("zork1"), 12).num_conflicts == 0


def test_a_saved_state_goes_on_as_the_game_would(zork: StoryGame) -> None:
    commands = walkthrough("zork1")
    zork.start()
    for command in commands[:30]:
        zork.step(command)
    state, scene = zork.save(), zork.scene()
    ahead = [zork.step(command) for command in commands[30:60]]
    other = StoryGame(ZORK, seed=12)
    other.restore(state)
    assert other.scene() == scene
    assert [other.step(command) for command in commands[30:60]] == ahead
    assert other.save() == zork.save()


def test_looking_and_finding_leave_no_trace(zork: StoryGame) -> None:
    zork.start()
    state = zork.save()
    first = zork.actions()
    zork.scene()
    assert zork.actions() == first
    assert zork.save() == state
    assert {"open mailbox", "north", "wait"} <= set(first)


@pytest.mark.parametrize("cut", [0, 3, 100, -1])
def test_a_torn_state_is_refused(zork: StoryGame, cut: int) -> None:
    with pytest.raises(EnvError, match="restore what it saved"):
        zork.restore(zork.save()[:cut])


def test_no_command_writes_a_file(zork: StoryGame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = zork.start()
    for command in ("save", "Save game", "restore", "script", "#record"):
        assert zork.step(command) == start._replace(
            answer="That would read or write a file, and is not done here."
        )
    zork.find()
    assert not list(tmp_path.iterdir())


def test_keys_are_of_what_is_in_view(zork: StoryGame) -> None:
    """The thief walks every turn, out of view; a window that two rooms share is in view of both."""
    start = zork.start()
    waited = [zork.step("wait") for _ in range(3)]
    assert {scene.key for scene in waited} == {start.key}
    assert zork.step("open mailbox").key != start.key
    for command in ("close mailbox", "north", "east"):
        scene = zork.step(command)
    behind = scene.key
    assert zork.step("open window").key != behind
    texts = [zork.step(command).room for command in ("north", "east")]
    assert not any("Score:" in text for text in texts), "a status line would make every text new"


def test_a_budget_is_kept_and_what_it_leaves_out_is_counted(zork: StoryGame) -> None:
    full = zork.find()
    small = StoryGame(ZORK, seed=12, budget=40)
    found = small.find()
    assert found.num_tried == 40
    assert found.num_left > 100
    assert full.num_left == 0
    assert set(found.labels) < set(small_start(zork))


def small_start(game: StoryGame) -> tuple[str, ...]:
    game.start()
    return game.find().labels


def test_seeds_begin_at_1_and_differ() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        StoryGame(ZORK, seed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        open_game(str(ZORK), seed=0)
    assert StoryGame(ZORK, seed=1).save() != StoryGame(ZORK, seed=2).save()


def test_bad_files_get_a_sentence(tmp_path: Path) -> None:
    data = bytearray(ZORK.read_bytes())

    def written(**changes: int) -> Path:
        found = bytearray(data)
        for at, value in changes.items():
            found[int(at[1:])] = value
        (tmp_path / "x.z3").write_bytes(found)
        return tmp_path / "x.z3"

    (tmp_path / "text.z5").write_text("It was a dark and stormy night, and nothing was compiled. " * 9)
    with pytest.raises(EnvError, match="no story file"):
        StoryGame(tmp_path / "text.z5")
    with pytest.raises(EnvError, match="cannot be read"):
        StoryGame(tmp_path / "none.z5")
    with pytest.raises(EnvError, match="version 6"):
        StoryGame(written(a0=6))
    with pytest.raises(EnvError, match="time instead of a score"):
        StoryGame(written(a1=data[1] | 2))
    (tmp_path / "cut.z3").write_bytes(data[:5000])
    with pytest.raises(EnvError, match="cut off"):
        StoryGame(tmp_path / "cut.z3")
    library = bytearray(LIBRARY.read_bytes())
    library[0x12] += 1
    (tmp_path / "unknown.z5").write_bytes(library)
    with pytest.raises(EnvError, match="Jericho does not know"):
        StoryGame(tmp_path / "unknown.z5")


@pytest.mark.parametrize("path", sorted(GAMES.glob("*.z?")), ids=lambda path: path.name)
def test_all_objects_can_be_read(path: Path) -> None:
    story = read_story(path)
    ram = StoryGame(path)._env.get_state()[0]
    memory = Memory(story, ram)
    numbers = range(1, story.layout.num_objects + 1)
    assert all(memory.holder(number) <= story.layout.num_objects for number in numbers)
    words = {address: str(address) for address in story.words}
    assert sum(bool(memory.names(number, words)) for number in numbers) > 20
    assert sum(map(len, map(memory.short_name, numbers))) >= 100
