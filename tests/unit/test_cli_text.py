"""``offbeat text``: played by a person, measured, and a sentence for each mistake."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.cli.main import main
from offbeat.envs.text import find_family
from tests.unit.text_games import ZORK, needs_jericho, needs_stories


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["text", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_person_plays_to_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    game = find_family("tiny").make(8_000)
    scene, typed = game.start(), list[str]()
    while not scene.done:
        action = game.expert() or ""
        # By number and by words in turn.
        typed.append(str(list(game.actions()).index(action) + 1) if len(typed) % 2 else action)
        scene = game.step(action)
    type_in(monkeypatch, "\n\ndance\n" + "\n".join(typed) + "\n")
    assert run("play", "tiny:8000", "--json") == 0
    out, err = capfd.readouterr()
    shown = {"game": "tiny:8000", "score": 6.0, "max_score": 6.0, "done": True, "steps": len(typed) + 1}
    assert json.loads(out) == {"ok": True, **shown}
    assert "That is not possible here." in err
    assert "  1 go " in err
    assert "[score 6" in err or "score 6 of 6" in err


def test_quit_and_the_end_of_input_end_a_game(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for typed in ("quit\n", ""):
        type_in(monkeypatch, typed)
        assert run("play", "tiny", "--json") == 0
        assert json.loads(capfd.readouterr().out)["steps"] == 0


def test_actions_are_measured(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("actions", "tiny:8000", "--steps", "40", "--max-actions", "5", "--json") == 0
    out, err = capfd.readouterr()
    values = json.loads(out)
    assert values["steps"] == 40
    assert values["valid_max"] == 5
    assert values["num_cut"] > 0
    assert values["hit_rate"] is None
    assert "not offered" in err


@needs_jericho
@needs_stories
def test_actions_of_a_story_are_kept_in_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "actions.jsonl"
    arguments = ("actions", str(ZORK), "--steps", "12", "--table", str(table), "--budget", "200", "--json")
    assert run(*arguments) == 0
    first = json.loads(capfd.readouterr().out)
    kept = table.read_text().splitlines()
    assert first["views"] == len(kept)
    assert first["num_left"] > 0
    assert run(*arguments) == 0
    second = json.loads(capfd.readouterr().out)
    assert second["hit_rate"] == 1.0
    assert second["views"] == first["views"]
    assert table.read_text().splitlines() == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("play", "nothing.z3"), "does not exist"),
        (("play", "nothing"), "no file and no family"),
        (("play", "tiny:99999"), "seeds 0 to 9999"),
        (("actions", "tiny", "--seed", "99999"), "seeds 0 to 9999"),
        (("actions", "nothing:Game"), "No module named 'nothing'"),
    ],
)
def test_mistakes_get_a_sentence(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    err = capfd.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_game_of_the_working_directory_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "text-games.md").read_text()
    code = page.partition("<!-- file: lamp.py -->\n```python\n")[2].partition("```")[0]
    (tmp_path / "lamp.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    type_in(monkeypatch, "light lamp\ngo up\n")
    assert run("play", "lamp:Lamp", "--json") == 0
    values = json.loads(capfd.readouterr().out)
    assert (values["score"], values["done"], values["game"]) == (2.0, True, "lamp:Lamp:0")


@pytest.mark.parametrize("package", ["jericho", "textworld"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OFFBEAT_CACHE", str(tmp_path))
    story = tmp_path / "story.z3"
    story.write_bytes(bytes([3]) + bytes(2000))
    assert run("play", "cooking" if package == "textworld" else str(story)) == 2
    err = capfd.readouterr().err
    assert "pip install 'offbeat[text]'" in err
    assert package in err


def test_the_command_imports_neither_torch_nor_a_game_before_it_is_used() -> None:
    code = """
import sys
from offbeat.cli.main import main
try:
    main(["text", "--help"])
except SystemExit:
    pass
print([name for name in ("torch", "numpy", "gymnasium", "jericho", "textworld") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert "play" in done.stdout
