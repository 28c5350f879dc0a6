"""Files that a disk or a person damaged: a run goes on from what is good and says so, or is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import offbeat
from offbeat.checkpoint import CheckpointManager
from offbeat.errors import CheckpointError, ConfigError, OffbeatError, ReplayError
from offbeat.observe.events import read_events
from tests.callbacks import EndAt
from tests.conftest import SMALL

ROOT = Path(__file__).parents[2]
ROUNDS, STOP_AT, INTERVAL = 10, 8, 4


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped with checkpoints 4 and 8."""
    directory = tmp_path_factory.mktemp("stopped") / "run"
    settings = {
        **SMALL,
        "run.dir": str(directory),
        "run.rounds": ROUNDS,
        "runtime.kind": "inline",
        "checkpoint.interval_rounds": INTERVAL,
    }
    offbeat.train("cartpole-ppo", overrides=settings, callbacks=[EndAt(STOP_AT)])
    assert CheckpointManager(directory / "checkpoints").versions() == (INTERVAL, STOP_AT)
    return directory


@pytest.fixture
def run(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return shutil.copytree(stopped_run, tmp_path / "run")


@pytest.fixture(scope="module")
def final_digest(stopped_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the undamaged run ends with."""
    return offbeat.resume(shutil.copytree(stopped_run, tmp_path_factory.mktemp("good") / "run")).digest


def flip_a_bit(path: Path, rng: Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def test_a_flipped_bit_in_any_file_costs_one_checkpoint_and_nothing_else(
    stopped_run: Path, final_digest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = Random(0)
    older = offbeat.digest(without_newest(stopped_run, tmp_path / "older"))
    names = sorted(path.name for path in (stopped_run / "checkpoints" / "step_00000008").iterdir())
    assert {"manifest.json", "weights.safetensors", "learner.safetensors", "coordinator.json"} < set(names)
    for name in names:
        damaged = shutil.copytree(stopped_run, tmp_path / name)
        flip_a_bit(damaged / "checkpoints" / "step_00000008" / name, rng)
        capsys.readouterr()
        assert offbeat.digest(damaged) == older, name
        said = capsys.readouterr().err
        assert "checkpoint 8 was not used" in said and name in said
        assert offbeat.resume(damaged).digest == final_digest, name
        notices = [e["text"] for e in read_events(damaged / "events.jsonl") if e["kind"] == "notice"]
        assert any("checkpoint 8 was not used" in text and name in text for text in notices)


def without_newest(stopped_run: Path, where: Path) -> Path:
    copy = shutil.copytree(stopped_run, where)
    shutil.rmtree(copy / "checkpoints" / "step_00000008")
    return copy


@pytest.mark.parametrize("way", [offbeat.digest, offbeat.evaluate, offbeat.resume, offbeat.replay_run])
def test_when_every_checkpoint_is_damaged_each_is_named(way: Callable[[Path], Any], run: Path) -> None:
    for version in (4, 8):
        flip_a_bit(run / "checkpoints" / f"step_{version:08d}" / "learner.safetensors", Random(version))
    with pytest.raises(CheckpointError, match=r"(?s)checkpoint 8.*checkpoint 4.*offbeat train"):
        way(run)
    assert len(list((run / "checkpoints").iterdir())) == 2, "nothing is thrown away"


@pytest.mark.parametrize("data", [b"", b"\0" * 300, b'{"seed": 1}', b"[]", b'{"name": "\xff"}'])
def test_a_run_outlives_its_description(data: bytes, run: Path, final_digest: str) -> None:
    (run / "manifest.json").write_bytes(data)
    assert offbeat.resume(run).digest == final_digest


@pytest.mark.parametrize("data", [b"", b"\0" * 300, b"\xff\xfe", b"algorithm: [", b"a: 1\n"])
def test_a_torn_configuration_is_refused_by_name(data: bytes, run: Path) -> None:
    (run / "config.yaml").write_bytes(data)
    for way in (offbeat.resume, offbeat.evaluate, offbeat.replay_run):
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            way(run)


@pytest.mark.parametrize(
    "line", [b"{", b"1", b'{"kind":"round","version":0}', b'{"kind":"segment","no":1}', b"{}"]
)
def test_a_damaged_schedule_is_not_replayed(line: bytes, run: Path) -> None:
    path = run / "schedule.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    with pytest.raises(OffbeatError, match=r"schedule\.jsonl"):
        offbeat.replay_run(run)


def test_a_schedule_cut_short_is_not_continued(run: Path) -> None:
    path = run / "schedule.jsonl"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="it was cut or replaced"):
        offbeat.resume(run)
    with pytest.raises(ReplayError):
        offbeat.replay_run(run)


def test_torn_events_are_cut_off_and_written_on(run: Path, final_digest: str) -> None:
    path = run / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert offbeat.resume(run).digest == final_digest
    assert read_events(path)[-1]["kind"] == "finish"


@pytest.mark.slow
def test_random_damage_is_never_loaded_and_never_ends_in_a_traceback() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "fuzz_checkpoint.py"),
        "--cases",
        "12",
        "--seed",
        "1",
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["crashed"], figures["wrong"]) == (0, 0)
    assert figures["newest"]["resume"] == {"previous": 12}
