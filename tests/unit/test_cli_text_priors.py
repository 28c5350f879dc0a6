"""``offbeat text pretrain``, ``prior-table`` and a prior shown to a player."""

import io
import json

import pytest

from offbeat.cli.main import main


def offbeat(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return ended.value.code


@pytest.fixture(scope="module")
def prior(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "prior"
    assert offbeat("text", "pretrain", "tiny", folder, "--games", 1, "--checks", 1, "--steps", 1) == 0
    return folder


def test_a_model_is_made_and_described(prior, capsys):
    manifest = json.loads((prior / "pretraining.json").read_text())
    assert (manifest["family"], manifest["seeds"]["learned"]) == ("tiny", [0, 0])
    assert {"config.json", "model.safetensors", "words.json"} <= {path.name for path in prior.iterdir()}
    assert offbeat("text", "pretrain", "tiny", prior) == 2
    assert "exists: give a new folder" in capsys.readouterr().err


def test_an_unknown_family_or_prompt_is_refused(tmp_path, capsys):
    assert offbeat("text", "pretrain", "huge", tmp_path / "new") == 2
    assert "tiny" in capsys.readouterr().err
    assert offbeat("text", "pretrain", "tiny", tmp_path / "new", "--shows", "all") == 2
    assert "prompt.shows" in capsys.readouterr().err


def test_a_table_is_made_and_continued(prior, tmp_path, capsys):
    table = tmp_path / "scores.jsonl"
    assert offbeat("text", "prior-table", prior, "tiny:8000", table, "--views", 2, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["states"], told["entries"]) == (2, 4)  # with and without the state
    assert offbeat("text", "prior-table", prior, "tiny:8000", table, "--views", 3) == 0
    assert len(table.read_text().splitlines()) == 1 + 6


def test_a_player_is_shown_what_the_prior_holds(prior, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("1\nquit\n"))
    assert offbeat("text", "play", "tiny:8000", "--prior", prior) == 0
    shown = capsys.readouterr().out
    assert " %  go " in shown
