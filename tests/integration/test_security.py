"""Runs and configurations from strangers: nothing of them runs unasked, and all are refused in words."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import offbeat
from offbeat.checkpoint import CheckpointManager
from offbeat.cli.main import main
from offbeat.errors import CheckpointError, ConfigError, OffbeatError, ReplayError
from offbeat.observe.callbacks import RoundInfo
from offbeat.observe.events import read_events
from offbeat.run.directory import settings_of
from tests.conftest import ROOT, SMALL

SETTINGS = {
    **SMALL,
    "runtime.kind": "inline",
    "run.rounds": 4,
    "checkpoint.interval_rounds": 2,
    "env.vectorize": "loop",
    "env.num_envs": 2,
    "algorithm.minibatch_size": 16,
}
LOOKS = (("status",), ("digest",), ("check",), ("eval",))
GOES_ON = (("replay",), ("resume", "run.rounds=5"))
OWN_ENV = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    pass
"""


@pytest.fixture(scope="module")
def the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("security") / "run"
    return offbeat.train("cartpole-ppo", overrides={**SETTINGS, "run.dir": str(directory)}).run_dir


@pytest.fixture
def run(the_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(the_run, tmp_path / "copy")


def call(*arguments: str) -> int:
    """Run a command; anything but an exit is a traceback for its user."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code if isinstance(ended.value.code, int) else 0


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def seal(step: Path, **changes: Any) -> None:
    """Write the manifest of a checkpoint anew, with checksums of its files as they are and with changes."""
    body = json.loads((step / "manifest.json").read_text()) | changes
    body.pop("sha256", None)
    for name in body["files"] if isinstance(body["files"], dict) else ():
        data = (step / name).read_bytes()
        body["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sha = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (step / "manifest.json").write_text(json.dumps(body | {"sha256": sha}))


# ---------------------------------------------------------------- nothing runs


def test_a_configuration_calls_no_function(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran, file = tmp_path / "ran", tmp_path / "bad.yaml"
    file.write_text(
        "extends: cartpole-ppo\nenv:\n  id: os:system\n  vectorize: loop\n"
        f"  kwargs: {{command: touch {ran}}}\n"
    )
    assert call("check", str(file)) == 2
    assert "os is a module of Python itself" in capfd.readouterr().err
    assert call("train", str(file), "observe.console=none") == 2
    assert call("check", str(file), "--no-import") == 0
    assert not ran.exists()


def test_the_configuration_of_a_run_calls_no_function(run: Path, tmp_path: Path) -> None:
    ran, config = tmp_path / "ran", run / "config.yaml"
    text = config.read_text().replace("id: CartPole-v1", "id: os:system")
    config.write_text(text.replace("kwargs: {}", f"kwargs: {{command: touch {ran}}}", 1))
    (run / "manifest.json").write_text('{"name": "x"}')
    for command in (*LOOKS, *GOES_ON, ("play", "--no-video")):
        call(command[0], str(run), *command[1:])
    assert not ran.exists()


def environments(tree: Any) -> Iterator[dict[str, Any]]:
    """The states of environments within a part of a checkpoint."""
    if isinstance(tree, dict):
        if {"root", "nodes"} <= tree.keys():
            yield tree
        for value in tree.values():
            yield from environments(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from environments(value)


def test_a_forged_checkpoint_runs_nothing(run: Path, tmp_path: Path) -> None:
    registration, command = "gymnasium.envs.registration:importlib", f"touch {tmp_path / 'ran'}"
    manager = CheckpointManager(run / "checkpoints")
    saved = manager.load()
    found = list(environments(saved.parts["collectors"]))
    assert found
    for state in found:
        nodes, at = state["nodes"], len(state["nodes"])
        nodes += [
            {"kind": "partial", "func": [at + 1], "args": [at + 2], "keywords": [at + 3]},
            {"kind": "global", "name": f"{registration}._bootstrap_external._os.system"},
            {"kind": "tuple", "items": [command]},
            {"kind": "dict", "keys": [], "values": []},
            {
                "kind": "object",
                "class": f"{registration}.metadata.zipfile.ZipFile",
                "attrs": {"close": [at], "fp": None, "mode": "r"},
            },
            {"kind": "dict", "keys": ["k", "k"], "values": [[at + 4], 1]},
        ]
        next(node for node in nodes if node["kind"] == "object")["attrs"]["extra"] = [at + 5]
    manager.save(saved.version, saved.parts, saved.weights, saved.score)
    with pytest.raises(OffbeatError, match="the saved state needs"):
        offbeat.resume(run, overrides={"run.rounds": 5})
    assert not (tmp_path / "ran").exists()


def test_looking_imports_nothing_of_the_directory(run: Path) -> None:
    names = ["my_env", "rich", "typer", "ruamel", "pydantic", "numpy", "safetensors", "wandb", "gymnasium"]
    for name in names:
        (run / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n")
    config = (run / "config.yaml").read_text().replace("id: CartPole-v1", "id: my_env:Mine")
    (run / "config.yaml").write_text(config.replace("name: ppo\n", "name: my_env:ALGORITHM\n", 1))
    for arguments in (
        ["status", "."],
        ["digest", "."],
        ["check", "."],
        ["check", "config.yaml", "--no-import"],
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-c", "from offbeat.cli.main import main; main()", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=run,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert "Traceback" not in done.stderr
        assert (done.returncode == 0) == (arguments != ["check", "."]), done.stderr
    assert not list(run.glob("ran-*"))


def test_code_that_is_not_installed_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env_of_mine.py").write_text(OWN_ENV)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = {**SETTINGS, "env.id": "env_of_mine:Mine", "env.max_episode_steps": 50, "run.rounds": 1}
    offbeat.train("cartpole-ppo", overrides={**own, "run.dir": "mine"})
    note = f"note: this runs code of env_of_mine, from {tmp_path / 'env_of_mine.py'}"
    assert note not in capfd.readouterr().err
    assert call("eval", "mine", "--episodes", "1") == 0
    assert capfd.readouterr().err.splitlines().count(note) == 1
    assert call("check", "cartpole-ppo", "env.id=env_of_mine:Mine") == 0
    assert capfd.readouterr().err.splitlines().count(note) == 1
    assert call("resume", "mine", "run.rounds=2") == 0
    assert capfd.readouterr().err.splitlines().count(note) == 1
    assert call("check", "mine") == 0
    assert call("check", "cartpole-ppo") == 0
    assert "note: this runs code" not in capfd.readouterr().err


# ---------------------------------------------------------------- forged files


def of_each_step(forge: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda run: [forge(step) for step in steps(run)]


def with_part(name: str, text: str) -> Callable[[Path], object]:
    def forge(step: Path) -> None:
        (step / f"{name}.json").write_text(text)
        seal(step)

    return of_each_step(forge)


def with_replaced(name: str, pattern: str, text: str) -> Callable[[Path], object]:
    """Other text in a file of the run, or of each of its checkpoints."""

    def replace(path: Path) -> None:
        forged, count = re.subn(pattern, text, path.read_text(), count=1)
        assert count, path
        path.write_text(forged)

    def forge(step: Path) -> None:
        replace(step / f"{name}.json")
        seal(step)

    return (lambda run: replace(run / name)) if name.endswith(".jsonl") else of_each_step(forge)


def without_part(name: str) -> Callable[[Path], object]:
    def forge(step: Path) -> None:
        files = json.loads((step / "manifest.json").read_text())["files"]
        kept = {file: entry for file, entry in files.items() if file.partition(".")[0] != name}
        seal(step, files=kept)

    return of_each_step(forge)


def as_pipe(name: str) -> Callable[[Path], object]:
    return instead_of(name, os.mkfifo)


def as_file(name: str) -> Callable[[Path], object]:
    return instead_of(name, Path.touch)


def as_link(name: str) -> Callable[[Path], object]:
    return instead_of(name, lambda path: path.symlink_to("nowhere"))


def instead_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def forge(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return forge


def with_text(name: str, text: str) -> Callable[[Path], object]:
    def forge(run: Path) -> None:
        (run / "manifest.json").write_text('{"name": "x"}')
        (run / name).write_text(text)

    return forge


def with_lines(name: str, *lines: str) -> Callable[[Path], object]:
    def forge(run: Path) -> None:
        with (run / name).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    return forge


def with_weights(step: Path, weights: dict[str, np.ndarray]) -> None:
    save_file(weights, step / "weights.safetensors")
    seal(step)


NAMES = [f"actor.{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")]
NO_DIRECTORIES = ("checkpoints", "logs")
DEEP = "[" * 100_000
DEEP_YAML = "[" * 20_000  # of fewer bytes than a configuration may have
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 12))
ODD_EVENTS = (
    *('{"kind":"health","time":1}', '{"kind":"health","time":1,"component":[],"state":{}}', "[]", DEEP),
    *('{"kind":"eval","time":1,"metrics":3}', '{"kind":"eval","time":1e300}', '{"kind":[],"time":3}'),
    *('{"kind":"stall","time":3,"waits":[1]}', '{"kind":"finish","time":3,"reason":{}}'),
    *('{"kind":"resume","time":3,"version":"x"}', '{"kind":"worker_lost","time":5,"lane":{}}'),
    *(
        '{"kind":"round","time":1.2.3,"version":9,"m":5}',
        '{"kind":"round","time":1.2,"version":9,"metrics":5}',
    ),
    '{"kind":"round","time":1.5,"version":9,"metrics":{"pace/off_policy_degree":1' + "9" * 400 + "}}",
)
FORGERIES: dict[str, Callable[[Path], object]] = {
    "deep part": with_part("learner", DEEP + "]" * len(DEEP)),
    "deep manifest": of_each_step(lambda step: (step / "manifest.json").write_text(DEEP)),
    "version in quotes": of_each_step(lambda step: seal(step, version="4")),
    "version with a point": of_each_step(lambda step: seal(step, version=4.0)),
    "no format": of_each_step(lambda step: seal(step, format=None)),
    "no files": of_each_step(lambda step: seal(step, files={})),
    "files as a list": of_each_step(lambda step: seal(step, files=[])),
    "score as text": of_each_step(lambda step: seal(step, score="high")),
    "weights not listed": without_part("weights"),
    **{f"no {part}": without_part(part) for part in ("learner", "coordinator", "meter", "collectors")},
    **{f"odd {part}": with_part(part, '{"dict":[["x",1]]}') for part in ("learner", "coordinator", "meter")},
    "odd recorder": with_part("recorder", "[]"),
    "text among samples": with_replaced("meter", r'"samples_by_env", \[\[\d+', '"samples_by_env", [["x"'),
    "text as staleness": with_replaced("recorder", r'"max_staleness", \d+', '"max_staleness", "x"'),
    "text as incarnation": with_replaced("collectors", r'"incarnation", \d+', '"incarnation", "x"'),
    "number as a world": with_replaced("collectors", r'\["state", ', '["state", 5], ["was", '),
    "collector of nobody": with_replaced("schedule.jsonl", '"lane":0', '"lane":99'),
    "collector as text": with_replaced("schedule.jsonl", '"lane":0', '"lane":"x"'),
    "other weights": of_each_step(lambda step: with_weights(step, {"w": np.ones(3)})),
    "odd shapes": of_each_step(lambda step: with_weights(step, {name: np.ones((2, 2)) for name in NAMES})),
    **{f"{name} as a file": as_file(name) for name in NO_DIRECTORIES},
    **{f"{name} as a pipe": as_pipe(name) for name in NO_DIRECTORIES},
    "checkpoints as a link to nowhere": as_link("checkpoints"),
    "manifest as a pipe": of_each_step(as_pipe("manifest.json")),
    "part as a pipe": of_each_step(as_pipe("learner.json")),
    **{
        f"{name} as a pipe": as_pipe(name)
        for name in ("events.jsonl", "schedule.jsonl", "lock", "config.yaml")
    },
    "run's manifest as a pipe": as_pipe("manifest.json"),
    "resolved settings as a pipe": as_pipe("resolved.yaml"),
    "log as a pipe": as_pipe("logs/run.log"),
    "deep settings": with_text("config.yaml", DEEP_YAML),
    "deep resolved settings": with_text("resolved.yaml", DEEP_YAML),
    "aliases": with_text("config.yaml", BOMB),
    "resolved aliases": with_text("resolved.yaml", BOMB),
    "long settings": with_text("config.yaml", "#" * 5_000_000),
    "objects": with_text("config.yaml", "!!python/object/apply:os.system ['true']"),
    "resolved types": with_text("resolved.yaml", "run: {rounds: x, stop_return: [1], name: {a: b}}"),
    "deep run's manifest": with_text("manifest.json", DEEP),
    "odd events": with_lines("events.jsonl", *ODD_EVENTS),
    "deep schedule": with_lines("schedule.jsonl", DEEP),
    "odd schedule": with_lines("schedule.jsonl", '{"kind":"round","version":[],"tickets":5,"degree":{}}'),
    "endless line": lambda run: os.truncate(run / "events.jsonl", 1 << 32),
}


UNSEEN = ["odd shapes"]
UNSEEN += [name for name in FORGERIES if name.startswith("odd ") and name.endswith(("er", "or"))]
UNSEEN += [name for name in FORGERIES if name.startswith("text ")]
UNSEEN += ["number as a world", "collector of nobody"]
"""What has the form of a state is not taken apart before a run needs it."""


REASONS = {"deep settings": "nested deeper than 50 levels", "long settings": "has 5,000,000 bytes"}

LONGEST_CPU_S, LONGEST_S = 5.0, 20.0
"""Longest that a command may take for a forged run. A refusal is promised within 5 s: of processor time here,
which other work on the machine does not lengthen. A wait without end takes none; it shows in wall time."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", FORGERIES)
def test_forged_runs_are_refused_in_words(name: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    FORGERIES[name](run)
    codes: dict[str, int] = {}
    for command, *options in (*LOOKS, ("play", "--no-video"), *GOES_ON):
        begun_cpu_s, begun_s = time.process_time(), time.monotonic()
        codes[command] = call(command, str(run), *options)
        assert time.process_time() - begun_cpu_s < LONGEST_CPU_S, command
        assert time.monotonic() - begun_s < LONGEST_S, command
    assert set(codes.values()) <= {0, 1, 2}
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
    assert REASONS.get(name, "") in said.err
    assert codes["check"] == (name not in UNSEEN)


# ---------------------------------------------------------------- forged states that fail once they are used

ASYNC = {
    **SETTINGS,
    "async_training.off_policy_degree": 2,
    "async_training.open_rounds": 0,
    "checkpoint.interval_rounds": 1,
    "checkpoint.keep": 4,
}


@pytest.fixture(scope="module")
def waiting_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose only checkpoint, of version 3, holds segments that wait to be trained."""
    directory = tmp_path_factory.mktemp("waiting") / "run"
    offbeat.train("cartpole-ppo", overrides={**ASYNC, "run.dir": str(directory)})
    for step in steps(directory):
        if not step.name.endswith("3"):
            shutil.rmtree(step)
    assert CheckpointManager(directory / "checkpoints").load().parts["store"]["segments"]
    return directory


def first_segment(parts: Any) -> Any:
    return parts["store"]["segments"][0]


def time_limit(parts: Any) -> Any:
    nodes = next(environments(parts["collectors"]))["nodes"]
    return next(node["attrs"] for node in nodes if "_elapsed_steps" in node.get("attrs", ()))


USED_LATER: dict[str, Callable[[Any], object]] = {
    "segment without a name": lambda parts: first_segment(parts)["data"].pop("obs"),
    "segment of another form": lambda parts: first_segment(parts)["data"].update(rewards=np.ones(3)),
    "segment of no versions": lambda parts: first_segment(parts).update(versions=np.zeros(0, np.int64)),
    "attribute of an environment": lambda parts: time_limit(parts).update(_elapsed_steps="x"),
    "observation": lambda parts: parts["collectors"]["starts"][0]["state"]["lane"].update(obs=np.zeros(0)),
    "versions of other tickets": lambda parts: parts["coordinator"].update(versions=()),
    "skipped evaluations": lambda parts: parts["coordinator"].update(eval_skipped=()),
    "trained segments": lambda parts: parts["coordinator"]["ledger"].update(trained=99),
    "no collectors": lambda parts: parts["coordinator"]["members"].update(present={}),
    "strange collectors": lambda parts: parts["coordinator"]["members"].update(present=b"x"),
    "deadline in quotes": lambda parts: parts["coordinator"]["ledger"]["ready"][0].__setitem__(3, "7"),
    "returns": lambda parts: parts["meter"].update(recent_returns=1.5),
    "algorithm": lambda parts: parts["recorder"].update(algorithm=np.zeros(2)),
    "gap in the schedule": lambda parts: parts["recorder"].update(schedule_gap=np.zeros(2)),
}


@pytest.mark.parametrize("name", USED_LATER)
def test_forged_states_that_fail_once_they_are_used_are_refused_in_words(
    name: str, waiting_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(waiting_run, tmp_path / "run")
    manager = CheckpointManager(run / "checkpoints")
    saved = manager.load()
    USED_LATER[name](saved.parts)
    shutil.rmtree(saved.path)
    manager.save(saved.version, saved.parts, saved.weights)
    capfd.readouterr()
    assert call("resume", str(run), "run.rounds=6", "runtime.max_worker_restarts=0") == 1
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
    (line,) = [line for line in said.err.splitlines() if line.startswith("error: ")]
    if "cannot go on" in line:
        assert "the run cannot go on from checkpoint 3: " in line and f"{run / 'logs' / 'run.log'}" in line
        assert "Traceback (most recent call last)" in (run / "logs" / "run.log").read_text()


def test_errors_of_callbacks_of_a_resumed_run_stay_as_they_are(waiting_run: Path, tmp_path: Path) -> None:
    class Fails(offbeat.Callback):
        def on_round(self, info: RoundInfo) -> None:
            raise KeyError("mine")

    run = shutil.copytree(waiting_run, tmp_path / "run")
    with pytest.raises(KeyError, match="mine"):
        offbeat.resume(run, overrides={"run.rounds": 6}, callbacks=[Fails()])


@pytest.mark.parametrize("forge", [as_file, as_pipe])
@pytest.mark.parametrize("name", NO_DIRECTORIES)
def test_what_is_no_directory_is_named_before_anything_starts(
    name: str,
    forge: Callable[[str], Callable[[Path], object]],
    run: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    forge(name)(run)
    before = (run / "config.yaml").read_text()
    needs = {"checkpoints": ("digest", "eval", "replay", "resume"), "logs": ("resume",)}[name]
    for command in needs:
        capfd.readouterr()
        assert call(command, str(run), *(["run.rounds=7"] if command == "resume" else [])) == 2, command
        assert f"{run / name} is not a directory" in capfd.readouterr().err, command
    assert (run / "config.yaml").read_text() == before


def test_a_whole_run_is_found_whole(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("check", str(run)) == 0
    shown = capfd.readouterr().out
    assert f"check of {run}: whole" in shown and "whole: 2, 4" in shown and "4 rounds" in shown
    assert call("check", str(run), "lr=1") == 2


def test_logs_are_not_written_through_links(run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to(victim)
    with pytest.raises(OffbeatError, match="cannot be written"):
        offbeat.resume(run, overrides={"run.rounds": 5})
    assert victim.read_text() == "mine\n"


# ---------------------------------------------------------------- settings and their checksums


def test_no_flipped_bit_changes_the_settings_of_a_run(run: Path) -> None:
    config, rng = run / "config.yaml", Random(0)
    data = config.read_bytes()
    for _ in range(200):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        config.write_bytes(flipped)
        with pytest.raises(ConfigError, match=r"config\.yaml was changed since the run wrote it"):
            settings_of(run)
    config.write_bytes(data)
    assert settings_of(run) == config


def test_checksums_are_renewed_with_the_settings(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offbeat.resume(run, overrides={"run.rounds": 5})
    assert call("check", str(run)) == 0
    for step in range(4):  # killed after any of the files was replaced
        copy = shutil.copytree(run, run.with_name(f"killed-{step}"))
        written: list[Path] = []

        def write(path: Path, data: bytes, stop: int = step, written: list[Path] = written) -> None:
            if len(written) == stop:
                raise OSError("killed")
            written.append(path)
            path.write_bytes(data)

        with monkeypatch.context() as patch:
            patch.setattr("offbeat.run.directory.files.replace_bytes", write)
            with pytest.raises(OffbeatError, match="killed"):
                offbeat.resume(copy, overrides={"run.rounds": 6})
        assert len(written) == step
        assert offbeat.resume(copy).rounds in (5, 6)


def test_runs_of_older_versions_have_no_checksums(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["sha256"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert call("check", str(run)) == 0
    assert offbeat.evaluate(run)["eval/version"] == 4
    offbeat.resume(run, overrides={"run.rounds": 5})
    assert "sha256" in json.loads((run / "manifest.json").read_text())


# ---------------------------------------------------------------- mistakes with run directories


def test_checkpoints_of_another_algorithm_are_refused(run: Path) -> None:
    manager = CheckpointManager(run / "checkpoints")
    saved = manager.load()
    parts = {**saved.parts, "recorder": {**saved.parts["recorder"], "algorithm": "ppo_per"}}
    assert saved.parts["recorder"]["algorithm"] == "ppo"
    manager.save(saved.version, parts, saved.weights)
    for way in (offbeat.evaluate, offbeat.resume, offbeat.play):
        with pytest.raises(CheckpointError, match="checkpoint 4 is of ppo_per, this run is of ppo"):
            way(run)


def test_a_directory_that_is_not_there_is_named_with_the_nearest(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for verb in ("resume", "eval", "status", "digest", "replay", "play"):
        assert call(verb, f"{run}y") == 2
        assert f"there is no directory {run}y; did you mean {run}?" in capfd.readouterr().err


def test_a_run_without_its_schedule_cannot_be_repeated(run: Path) -> None:
    (run / "schedule.jsonl").unlink()
    with pytest.raises(ReplayError, match=r"is a run, but its schedule\.jsonl is missing"):
        offbeat.replay_run(run)


def test_a_resume_without_checkpoints_counts_what_is_lost(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    offbeat.resume(run)
    notices = [event["text"] for event in read_events(run / "events.jsonl") if event["kind"] == "notice"]
    assert (
        "the run has no checkpoint: 4 rounds trained before, by events.jsonl, are lost; it starts anew"
        in notices
    )
