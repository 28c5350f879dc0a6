"""Whole runs through the public API: digests, resume, replay, files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.errors import CheckpointError, ConfigError, ReplayError
from offbeat.observe.events import read_events, read_rounds, read_schedule
from tests.callbacks import EndAt
from tests.conftest import SMALL

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The inline run at k = 0 that others are compared with."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    settings = {**SMALL, "run.dir": str(directory), "runtime.kind": "inline"}
    return offbeat.train("cartpole-ppo", overrides=settings)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_every_runtime_reaches_the_same_weights(kind: str, small_run: Run, reference: Any) -> None:
    assert small_run({"runtime.kind": kind}).digest == reference.digest


def test_eval_only_gives_what_eval_gives_and_changes_nothing(
    small_run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    from offbeat.cli.main import main

    directory = small_run({"runtime.kind": "inline"}).run_dir

    def judged(*arguments: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--json"])
        assert ended.value.code == 0
        return json.loads(capfd.readouterr().out)

    before = {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}
    expected = judged("eval", str(directory), "--episodes", "3")
    assert expected["metrics"]["eval/episodes"] == 3
    small = [f"{key}={json.dumps(value)}" for key, value in SMALL.items()]
    more = ["eval.episodes=3", "--eval-only"]
    assert judged("resume", str(directory), *more) == expected
    assert judged("train", "cartpole-ppo", *small, f"run.dir={directory}", *more) == expected
    assert {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))} == before


def test_an_evaluation_refuses_settings_that_make_it_another_run(reference: Any) -> None:
    with pytest.raises(ConfigError, match=r"env\.id cannot change"):
        offbeat.evaluate(reference.run_dir, overrides={"env.id": "Acrobot-v1"})


def test_digest_depends_on_the_seed(small_run: Run, reference: Any) -> None:
    assert small_run({"runtime.kind": "inline"}, seed=7).digest != reference.digest


def test_digest_is_that_of_the_newest_checkpoint(reference: Any) -> None:
    assert offbeat.digest(reference.run_dir) == reference.digest


def test_stopped_and_resumed_run_ends_where_the_other_does(small_run: Run, reference: Any) -> None:
    stopped = small_run({"runtime.kind": "processes"}, name="stopped", callbacks=[EndAt(3)])
    assert stopped.rounds == 3
    assert offbeat.resume(stopped.run_dir).digest == reference.digest


@pytest.mark.parametrize("kind", ["inline", "threads"])
@pytest.mark.parametrize("how", ["stop", "finish"])
def test_nothing_is_left_of_a_run_that_ends_early(how: str, kind: str, small_run: Run) -> None:
    class Last(offbeat.Callback):
        def on_finish(self, info: Any) -> None:
            self.last = info.metrics

    last = Last()
    result = small_run({"runtime.kind": kind}, rounds=50, callbacks=[EndAt(3, how), last])
    assert result.rounds in (3, 4)  # the next round may have begun before the wish was heard
    assert result.metrics["time/eta_s"] == last.last["time/eta_s"] == 0.0
    rounds = read_rounds(result.run_dir / "events.jsonl")
    assert rounds[1]["metrics"]["time/eta_s"] > 0.0


def test_run_killed_before_its_first_checkpoint_starts_again(small_run: Run, reference: Any) -> None:
    done = small_run({"runtime.kind": "inline"})
    for path in (done.run_dir / "checkpoints").glob("step_*"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert offbeat.resume(done.run_dir).digest == reference.digest


def degrees_of(result: Any) -> list[int]:
    """Return k of each round, as recorded."""
    schedule = read_schedule(result.run_dir / "schedule.jsonl")
    return [record["degree"] for record in schedule if record["kind"] == "round"]


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("degree", [1, 4])
def test_asynchronous_run_can_be_repeated_bit_for_bit(kind: str, degree: int, small_run: Run) -> None:
    settings = {"runtime.kind": kind, "run.rounds": 15}
    result = small_run(settings, off_policy_degree=degree)
    rounds = read_rounds(result.run_dir / "events.jsonl")
    assert max(record["metrics"]["pace/max_sample_age"] for record in rounds) <= degree
    assert degrees_of(result) == [min(degree, version // 3) for version in range(15)]
    report = offbeat.replay_run(result.run_dir)
    assert report.identical
    assert report.digest == result.digest
    assert report.rounds == 15


def test_asynchronous_run_that_was_resumed_can_be_repeated(small_run: Run) -> None:
    settings = {"runtime.kind": "processes", "run.rounds": 15}
    stopped = small_run(settings, off_policy_degree=3, callbacks=[EndAt(7)])
    assert stopped.rounds < 15
    finished = offbeat.resume(stopped.run_dir)
    assert finished.rounds == 15
    assert degrees_of(finished) == [min(3, version // 3) for version in range(15)]
    assert offbeat.replay_run(finished.run_dir).identical


def test_a_dial_that_is_turned_while_it_opens_is_repeated_as_it_was(small_run: Run) -> None:
    class Turn(offbeat.Callback):
        def on_start(self, info: Any) -> None:
            info.turn(2)

    settings = {"runtime.kind": "threads", "run.rounds": 9, "async_training.open_rounds": 2}
    settings["algorithm.correction"] = "decoupled"
    result = small_run(settings, callbacks=[Turn()])
    assert degrees_of(result) == [0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert offbeat.replay_run(result.run_dir).identical


def test_samples_of_another_policy_are_told_in_the_console_and_the_events(
    small_run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"runtime.kind": "inline", "run.rounds": 14, "async_training.open_rounds": 0}
    settings |= {
        "algorithm.lr": 0.05,
        "algorithm.behaviour_clip": None,
        "observe.console": "plain",
        "algorithm.lr_schedule": "constant",
    }
    result = small_run(settings, off_policy_degree=2)
    texts = [
        event["text"] for event in read_events(result.run_dir / "events.jsonl") if event["kind"] == "notice"
    ]
    (advice,) = [text for text in texts if "Lower async_training.off_policy_degree" in text]
    assert capfd.readouterr().out.count(advice) == 1


def test_replay_notices_a_schedule_that_was_edited(small_run: Run) -> None:
    result = small_run({"runtime.kind": "threads", "run.rounds": 8}, off_policy_degree=2)
    path = result.run_dir / "schedule.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = [record for record in records if record["kind"] == "round"]
    rounds[2]["tickets"], rounds[3]["tickets"] = rounds[3]["tickets"], rounds[2]["tickets"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        identical = offbeat.replay_run(result.run_dir).identical
    except ReplayError:
        identical = False
    assert not identical


def test_resume_trains_further_when_asked(small_run: Run) -> None:
    result = small_run({"runtime.kind": "inline"})
    further = offbeat.resume(result.run_dir, overrides={"run.rounds": 9})
    assert further.rounds == 9
    counts = [record["version"] for record in read_rounds(result.run_dir / "events.jsonl")]
    assert counts == list(range(1, 10))
    steps = read_rounds(result.run_dir / "events.jsonl")[-1]["metrics"]["rollout/total_env_steps"]
    assert steps > 9 * 100


def test_resume_refuses_what_would_be_another_run(small_run: Run) -> None:
    result = small_run({"runtime.kind": "inline"}, rounds=1)
    with pytest.raises(ConfigError, match=r"env.num_envs cannot change.*offbeat train"):
        offbeat.resume(result.run_dir, overrides=["env.num_envs=16"])


def test_run_directory_that_is_taken_is_refused(small_run: Run) -> None:
    small_run({"runtime.kind": "inline"}, rounds=1)
    with pytest.raises(ConfigError, match="offbeat resume"):
        small_run({"runtime.kind": "inline"}, rounds=1)


def test_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for function in (offbeat.resume, offbeat.evaluate, offbeat.replay_run, offbeat.digest):
        with pytest.raises(CheckpointError, match=r"not a run directory"):
            function(tmp_path)


def test_torn_checkpoint_is_passed_over(small_run: Run, reference: Any) -> None:
    notices = []

    class Keep(offbeat.Callback):
        def on_notice(self, text: str) -> None:
            notices.append(text)

    result = small_run({"runtime.kind": "inline", "checkpoint.interval_rounds": 2})
    newest = result.run_dir / "checkpoints" / "step_00000006" / "learner.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    resumed = offbeat.resume(result.run_dir, callbacks=[Keep()])
    assert resumed.digest == reference.digest
    assert any("checkpoint 6" in text and "learner.safetensors" in text for text in notices), notices


def test_result_has_a_policy_that_acts(reference: Any) -> None:
    action = reference.policy.act(np.zeros(4, np.float32))
    assert int(action) in (0, 1)
    assert reference.policy.act(np.zeros((5, 4), np.float32)).shape == (5,)


def test_evaluate_judges_a_finished_run(reference: Any) -> None:
    metrics = offbeat.evaluate(reference.run_dir, episodes=3, seed=5)
    assert metrics["eval/episodes"] == 3
    assert metrics["eval/return_mean"] > 0
    assert metrics == offbeat.evaluate(reference.run_dir, episodes=3, seed=5)


def test_run_directory_holds_what_the_docs_say(reference: Any) -> None:
    names = {path.name for path in reference.run_dir.iterdir()}
    expected = {"config.yaml", "resolved.yaml", "manifest.json", "events.jsonl", "schedule.jsonl"}
    assert expected | {"checkpoints", "logs"} <= names
    kinds = [event["kind"] for event in read_events(reference.run_dir / "events.jsonl")]
    assert kinds[0] == "start" and kinds[-1] == "finish"
    assert {"round", "eval", "checkpoint"} <= set(kinds)
    assert "Component Statistics" in (reference.run_dir / "logs" / "run.log").read_text()


def test_debug_log_tells_each_tickets_life(small_run: Run) -> None:
    result = small_run({"runtime.kind": "threads", "async_training.enable_async_debug_log": True}, rounds=2)
    log = (result.run_dir / "logs" / "run.log").read_text()
    for word in ("issued", "arrived", "trained"):
        assert f"ticket 3 {word}" in log


def test_full_disk_costs_the_checkpoint_and_not_the_run(small_run: Run, monkeypatch: Any) -> None:
    from offbeat.checkpoint import files

    notices = []

    class Keep(offbeat.Callback):
        def on_notice(self, text: str) -> None:
            notices.append(text)

    write_bytes = files.write_bytes

    def full(path: Path, data: bytes, *listed: Any) -> None:
        if "checkpoints" in path.parts:
            raise OSError(28, "No space left on device")
        write_bytes(path, data, *listed)

    monkeypatch.setattr(files, "write_bytes", full)
    result = small_run({"runtime.kind": "inline"}, callbacks=[Keep()])
    assert result.rounds == 6
    assert any("No space left" in text for text in notices)


def test_refused_start_leaves_no_directory(small_run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*args: Any) -> None:
        raise ConfigError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("offbeat.runtime.inline.InlineRuntime.start", refuse)
        with pytest.raises(ConfigError, match="no room"):
            small_run({"runtime.kind": "inline"})
    assert not (tmp_path / "run").exists()
    assert small_run({"runtime.kind": "inline"}).rounds == 6


def test_a_run_ends_at_the_return_of_an_evaluation(small_run: Run) -> None:
    goal = {"run.stop_eval_return": 1.0, "eval.interval_rounds": 2}
    result = small_run({"runtime.kind": "inline", "run.rounds": 500, **goal})
    assert (result.rounds, result.reason) == (2, "the evaluation of version 2 returned 1 or more")
    again = offbeat.resume(result.run_dir)
    assert (again.rounds, again.reason) == (
        2,
        "run.stop_eval_return 1 was reached before; run.stop_eval_return=null goes on",
    )
    assert (
        offbeat.resume(result.run_dir, overrides={"run.stop_eval_return": None, "run.rounds": 3}).rounds == 3
    )
    with pytest.raises(ConfigError, match=r"set eval\.interval_rounds"):
        offbeat.load_config("cartpole-ppo", {"run.stop_eval_return": 1.0})


def test_goal_stops_the_run(small_run: Run) -> None:
    result = small_run({"runtime.kind": "inline", "run.stop_return": 1.0, "run.rounds": 500})
    assert result.rounds < 500
    assert "last 100 episodes" in result.reason
    assert result.eval_return is not None
    assert not result.interrupted


def test_callbacks_add_metrics(small_run: Run) -> None:
    class Extra(offbeat.Callback):
        def on_round(self, info: Any) -> dict[str, float]:
            return {"mine/version_squared": float(info.version**2)}

    result = small_run({"runtime.kind": "inline"}, callbacks=[Extra()])
    assert result.metrics["mine/version_squared"] == 36.0
    rounds = read_rounds(result.run_dir / "events.jsonl")
    assert rounds[1]["metrics"]["mine/version_squared"] == 4.0


def test_run_resumed_with_other_settings_can_be_repeated(small_run: Run) -> None:
    first = small_run({"runtime.kind": "inline", "algorithm.lr_schedule": "linear"})
    offbeat.resume(first.run_dir, overrides={"run.rounds": 9, "async_training.off_policy_degree": 2})
    again = offbeat.resume(first.run_dir, overrides=["run.rounds=12"])
    assert again.rounds == 12
    assert offbeat.replay_run(first.run_dir).identical
    assert offbeat.resume(first.run_dir).rounds == 12, "overrides stay with the run"


def test_run_that_is_being_written_cannot_be_resumed(small_run: Run) -> None:
    class ResumeMeanwhile(offbeat.Callback):
        def on_start(self, info: Any) -> None:
            self.directory = info.summary.directory

        def on_round(self, info: Any) -> None:
            if info.version == 2:
                with pytest.raises(CheckpointError, match=r"being written by another process \(pid \d+\)"):
                    offbeat.resume(self.directory)

    assert small_run({"runtime.kind": "inline"}, callbacks=[ResumeMeanwhile()]).rounds == 6


def test_run_that_reached_its_goal_trains_no_further_when_resumed(small_run: Run) -> None:
    done = small_run({"runtime.kind": "inline", "run.stop_return": 1.0, "run.rounds": 500})
    again = offbeat.resume(done.run_dir)
    assert again.digest == done.digest
    assert "was reached before" in again.reason
    assert again.env_steps == done.env_steps
    further = offbeat.resume(done.run_dir, overrides={"run.stop_return": None, "run.rounds": done.rounds + 2})
    assert further.rounds == done.rounds + 2


def test_mistake_that_only_a_try_can_find_leaves_no_trace(small_run: Run, tmp_path: Path) -> None:
    for settings in ({"env.id": "CartPol-v1"}, {"algorithm.network.kind": "cnn"}):
        with pytest.raises(ConfigError):
            small_run(settings)
        assert not (tmp_path / "run").exists()


def test_settings_that_trained_no_round_leave_the_earlier_ones_for_a_replay(
    small_run: Callable[..., Any],
) -> None:
    schedule = {"runtime.kind": "inline", "algorithm.lr_schedule": "linear"}
    directory = small_run(schedule).run_dir
    for rounds in (3, 9):  # the first trains nothing, the second goes on with another length
        offbeat.resume(directory, overrides={"run.rounds": rounds})
        assert offbeat.replay_run(directory).identical
    with pytest.raises(ConfigError, match="there is no runtime 'thread': choose one of inline, threads"):
        offbeat.replay_run(directory, runtime="thread")  # type: ignore[arg-type]


EARLY = """
import sys
import offbeat
from offbeat.observe.console import Display
from offbeat.run import observers

class Early(Display):
    def open(self, resumed_from=None, phase=None):
        print("opened", "torch" in sys.modules)

    def on_start(self, info):
        print("started", "torch" in sys.modules)

observers.make_console = lambda *args: Early()
small = {"env.num_envs": 2, "runtime.kind": "inline", "eval.at_end": False, "run.dir": sys.argv[1]}
offbeat.train("cartpole-ppo", rounds=1, overrides=small)
"""


def test_the_display_opens_before_torch_is_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EARLY, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["opened False", "started True"], done.stderr
