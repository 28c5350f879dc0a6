"""How much memory a replay takes is told before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

import offbeat
from offbeat.algorithms.ppo_per.build import replay_bytes, startup_notes
from offbeat.cli.main import main
from offbeat.errors import ConfigError
from offbeat.observe.events import read_events
from tests.conftest import SMALL

TEXT = "1,024 segments of 32 steps, 1.2 MB"


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_check_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", "cartpole-ppo-per") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  replay ")]
    assert line.split(maxsplit=1)[1] == TEXT
    assert command("check", "cartpole-ppo", "--json") == 0
    assert "replay" not in json.loads(capsys.readouterr().out)["plan"]


def test_check_refuses_what_a_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", "cartpole-ppo", "algorithm.augment=both") == 2
    assert "set algorithm.augment to none" in capsys.readouterr().err


class Notices(offbeat.Callback):
    """Keeps what a run says, and by when."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.said_before_training: list[str] = []

    def on_notice(self, text: str) -> None:
        self.said.append(text)

    def on_round(self, info: Any) -> None:
        if info.version == 1:
            self.said_before_training = list(self.said)


def test_a_run_tells_it_once_before_it_trains(tmp_path: Path) -> None:
    settings = {
        **SMALL,
        "runtime.kind": "inline",
        "algorithm.num_steps": 32,
        "algorithm.batch_size": 8,
        "run.rounds": 2,
        "run.dir": str(tmp_path / "run"),
    }
    notices, again = Notices(), Notices()
    offbeat.train("cartpole-ppo-per", overrides=settings, callbacks=[notices])
    assert notices.said_before_training == [f"replay: {TEXT}"] == notices.said
    offbeat.resume(tmp_path / "run", overrides={"run.rounds": 3}, callbacks=[again])
    assert again.said == []
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "notice"]
    assert [event["text"] for event in events] == [f"replay: {TEXT}"]


def test_ranks_each_have_one_unless_they_share_it() -> None:
    two = {"learner.num_ranks": 2}
    own = offbeat.load_config("cartpole-ppo-per", two)
    assert startup_notes(own)["replay"] == f"{TEXT} in each of 2 ranks"
    shared = offbeat.load_config(
        "cartpole-ppo-per", {**two, "runtime.kind": "ray", "algorithm.shared_buffer": True}
    )
    assert startup_notes(shared)["replay"] == f"{TEXT} in a Ray actor of its own"


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = offbeat.load_config("cartpole-ppo-per", {"run.dir": str(tmp_path / "run")})

    class Memory:
        available = replay_bytes(config) - 1

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with pytest.raises(ConfigError, match=r"1\.2 MB are free: lower algorithm\.buffer_capacity"):
        offbeat.train(config)
    assert not (tmp_path / "run").exists()
