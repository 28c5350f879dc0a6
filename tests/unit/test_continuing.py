"""Figures of runs that have ended, settings with which they train on, and notes before a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.cli import continuing
from offbeat.cli.continuing import Goals, refuse_if_done, resume_command
from offbeat.cli.evaluate import headline
from offbeat.cli.status import read_status
from offbeat.cli.summary import finish, summary_rows
from offbeat.config.loader import dump_yaml
from offbeat.errors import ConfigError
from offbeat.observe.events import EventLog
from tests.unit.test_cli import FakeResult, run

GOOD = {"rollout/total_episodes": 150.0, "rollout/return_mean_100": 480.0}
POOR = {"rollout/total_episodes": 150.0, "rollout/return_mean_100": 20.0}
EVALUATED = {**POOR, "eval/return_mean": 492.5}


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the directory of a run of cartpole-ppo that has ended."""
    monkeypatch.setattr(continuing, "_is_whole", lambda directory, version: True)

    def make(version: int, metrics: dict[str, float], last: str = "finish", failed: bool = False) -> Path:
        directory = tmp_path / "my run"
        directory.mkdir()
        settings = ["run.rounds=160", "run.stop_return=475", "run.stop_eval_return=490"]
        config = offbeat.load_config("cartpole-ppo", [*settings, "eval.interval_rounds=5"])
        for name in ("config.yaml", "resolved.yaml"):
            (directory / name).write_text(dump_yaml(config))
        (directory / "manifest.json").write_text(json.dumps({"name": "x"}))
        events = EventLog(directory / "events.jsonl")
        events.append("start", {"version": 0})
        events.append("eval", {"version": 1, "metrics": {"eval/return_mean": 500.0}})
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        events.append("round", {"version": version, "metrics": metrics})
        events.append("eval", {"version": version, "metrics": {"eval/return_mean": 30.0, **evaluated}})
        if last == "finish":
            events.append("finish", {"version": version, "reason": "done", "failed": failed})
        events.close()
        return directory

    return make


def refusal(directory: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_if_done(str(directory), overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("version", "metrics", "overrides", "why", "settings"),
    [
        (160, POOR, ["run.rounds=120"], "160 rounds already, and run.rounds is 120", ["run.rounds=320"]),
        (
            160,
            POOR,
            ["rounds=120", "eval.episodes=3"],
            "run.rounds is 120",
            ["eval.episodes=3", "run.rounds=320"],
        ),
        (160, POOR, ["total_timesteps=1000"], "160 rounds already", ["run.rounds=320"]),
        (57, GOOD, ["run.rounds=60"], "run.stop_return = 475", ["run.rounds=60", "run.stop_return=null"]),
        (57, EVALUATED, [], "has reached run.stop_eval_return = 490.", ["run.stop_eval_return=null"]),
        (
            57,
            EVALUATED | GOOD,
            ["stop_eval_return=491"],
            "has reached run.stop_return = 475 and has reached run.stop_eval_return = 491.",
            ["run.stop_return=null", "run.stop_eval_return=null"],
        ),
        (57, GOOD, ["run.stop_return=476"], "run.stop_return = 476", ["run.stop_return=null"]),
        (
            160,
            GOOD,
            [],
            "160 rounds already, and run.rounds is 160 and has reached",
            ["run.rounds=320", "run.stop_return=null"],
        ),
    ],
)
def test_a_resume_that_would_train_nothing_is_refused_with_one_that_does(
    ended: Any,
    version: int,
    metrics: dict[str, float],
    overrides: Sequence[str],
    why: str,
    settings: list[str],
) -> None:
    directory = ended(version, metrics)
    text = refusal(directory, *overrides)
    assert why in text
    assert text.endswith(f"To train on: offbeat resume '{directory}' {' '.join(settings)}")
    refuse_if_done(str(directory), settings)


@pytest.mark.parametrize(
    ("version", "metrics", "overrides", "last", "failed"),
    [
        (57, GOOD, ["run.stop_return=null"], "finish", False),
        (57, GOOD, ["run.stop_return=490"], "finish", False),
        (57, EVALUATED, ["run.stop_eval_return=495"], "finish", False),
        (57, EVALUATED, ["run.stop_eval_return=null"], "finish", False),
        (160, POOR, ["run.rounds=161"], "finish", False),
        (40, POOR, [], "finish", False),
        (160, POOR, [], "round", False),  # killed before its last evaluation
        (160, POOR, [], "finish", True),
    ],
)
def test_a_run_with_something_left_to_do_is_not_refused(
    ended: Any, version: int, metrics: dict[str, float], overrides: list[str], last: str, failed: bool
) -> None:
    refuse_if_done(str(ended(version, metrics, last, failed)), overrides)


def test_a_run_whose_last_checkpoint_is_damaged_trains_on(
    ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuing, "_is_whole", lambda directory, version: False)
    refuse_if_done(str(ended(160, POOR)), [])


def test_a_refused_resume_exits_with_2_and_starts_nothing(
    ended: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.api.resume", lambda *args, **kwargs: pytest.fail("it was started"))
    assert run("resume", str(ended(57, GOOD)), "run.rounds=60", "--json") == 2
    assert "run.stop_return=null" in json.loads(capfd.readouterr().out)["error"]


@pytest.mark.parametrize("verb", ["resume", "status", "eval", "digest", "replay"])
def test_a_run_that_is_not_there_is_a_mistake_of_the_user(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "pole").mkdir(parents=True)
    (tmp_path / "runs" / "pole" / "manifest.json").write_text("{}")
    assert run(verb, "nothere") == 2
    assert "; the newest runs: runs/pole" in capfd.readouterr().err
    (tmp_path / "nothere").mkdir()
    assert run(verb, "nothere") == 2
    assert "is not a run directory: it has n" in capfd.readouterr().err


def test_check_of_a_directory_without_a_run_is_a_mistake_of_the_user(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("check", str(tmp_path)) == 2
    assert "is not a run directory: it has n" in capfd.readouterr().err


# ---------------------------------------------------------------- what is shown at the end


def test_the_command_at_the_end_is_one_that_trains_on(ended: Any) -> None:
    directory = ended(57, GOOD)
    rows = summary_rows(FakeResult(run_dir=directory, rounds=57, metrics=dict(GOOD)))  # type: ignore[arg-type]
    assert rows["resume"] == f"offbeat resume '{directory}' run.stop_return=null"
    stopped = FakeResult(run_dir=directory, rounds=57, metrics=dict(GOOD), interrupted=True)
    assert summary_rows(stopped)["resume"] == f"offbeat resume '{directory}'"  # type: ignore[arg-type]
    assert rows["resume"] in read_status(directory, 0.0).next_commands
    assert resume_command("x", {}, 160, Goals(160)) == "offbeat resume x run.rounds=320"
    assert resume_command("x", {}, 40, Goals(160, 475.0, 490.0)) == "offbeat resume x"
    assert resume_command("x", {}, 40, Goals()) == "offbeat resume x"


def test_the_command_at_the_end_knows_the_goal_of_evaluations(ended: Any) -> None:
    directory, evaluated = ended(57, EVALUATED), {"eval/return_mean": 492.5}
    result: Any = FakeResult(run_dir=directory, rounds=57, metrics=dict(POOR), eval_metrics=evaluated)
    rows = summary_rows(result)
    assert rows["resume"] == f"offbeat resume '{directory}' run.stop_eval_return=null"
    assert rows["resume"] in read_status(directory, 0.0).next_commands
    result.eval_metrics = {"eval/return_mean": 400.0}
    assert summary_rows(result)["resume"] == f"offbeat resume '{directory}'"


def test_times_of_a_run_add_up_and_count_no_time_between_starts(tmp_path: Path) -> None:
    result: Any = FakeResult(run_dir=tmp_path, wall_s=7.8, startup_s=5.0, rounds_s=2.5)
    assert summary_rows(result)["wall time"] == "7.8 s: start-up 5.0 s, rounds 2.5 s, the rest 0.3 s"
    times_s = iter((0.0, 10.0, 5000.0, 5001.0))
    events = EventLog(tmp_path / "events.jsonl", clock=times_s.__next__)
    for kind in ("start", "finish", "resume", "finish"):
        events.append(kind, {"version": 0})
    events.close()
    result.metrics["time/elapsed_s"] = 11.25
    assert summary_rows(result)["wall time"].endswith("the rest 0.3 s; rounds of all 2 starts 11.2 s")


def test_the_summary_counts_collecting_and_training_in_segments(tmp_path: Path) -> None:
    metrics: dict[str, float | str] = {
        "queue/total_produced": 320.0,
        "queue/total_consumed": 318.0,
        "pace/lag": 0.5,
        "pace/train_count": 159.0,
        "time/elapsed_s": 20.0,
        "time/overlap_s": 7.4,
    }
    result: Any = FakeResult(run_dir=tmp_path, metrics=metrics)
    rows = summary_rows(result)
    assert rows["segments"] == "320 collected, 318 trained, lag 0.5 rounds"
    assert rows["overlap"] == "37% of the time collecting and training went on at once"
    report: Any = type("Report", (), {"values": {}, "exit_code": 0})()
    finish(result, report)
    told = ("segments_collected", "segments_trained", "lag", "overlap")
    assert {key: report.values[key] for key in told} == {
        "segments_collected": 320.0,
        "segments_trained": 318.0,
        "lag": 0.5,
        "overlap": 0.37,
    }
    counts = {key.rpartition("/")[2] for key in report.values}
    assert not counts & {"collect_count", "train_count"}, "as metrics, one counts segments and one rounds"
    assert "segments" not in summary_rows(FakeResult(run_dir=tmp_path))  # type: ignore[arg-type]


def test_an_evaluation_is_told_in_a_sentence() -> None:
    metrics = {"eval/return_mean": 500.0, "eval/return_std": 0.0, "eval/episodes": 10.0}
    assert headline(metrics) == "return 500.0 ± 0.0 over 10 episodes"
    assert headline({**metrics, "eval/episodes": 1.0}) == "return 500.0 ± 0.0 over 1 episode"
    assert headline({"eval/return_mean": -1234.5}) == "return -1,234.5"
    assert headline({}) == "return –"
    drawn = {**metrics, "eval/return_mean": -500.0, "eval/return_mean_sampled": -136.7}
    assert headline(drawn) == "return -500.0 ± 0.0 over 10 episodes (-136.7 with drawn actions)"


def test_the_summary_tells_all_of_the_last_evaluation(tmp_path: Path) -> None:
    names = ("return_mean", "return_std", "episodes", "return_mean_sampled", "success_rate")
    metrics = {f"eval/{name}": value for name, value in zip(names, (-500.0, 0.0, 10.0, -136.7, 0.25))}
    result: Any = FakeResult(run_dir=tmp_path, eval_return=-500.0, eval_metrics=metrics)
    rows = summary_rows(result)
    assert rows["evaluation return"] == "-500.0 ± 0.0 over 10 episodes (-136.7 with drawn actions)"
    assert rows["evaluation success"] == "25%"
    plain = summary_rows(FakeResult(run_dir=tmp_path))  # type: ignore[arg-type]
    assert plain["evaluation return"] == "487.5"


def test_a_result_has_the_metrics_of_its_evaluation(tmp_path: Path) -> None:
    settings = {**SMALL, "run.dir": str(tmp_path / "run"), "eval.at_end": True, "eval.episodes": 2}
    result = offbeat.train("cartpole-ppo", overrides=settings)
    assert result.eval_metrics["eval/return_mean"] == result.eval_return
    assert "eval/return_mean_sampled" in result.eval_metrics


# ---------------------------------------------------------------- what is said before a run


SMALL = {
    "run.rounds": 1,
    "env.num_envs": 2,
    "runtime.kind": "inline",
    "eval.at_end": False,
    "observe.tensorboard": False,
    "observe.console": "none",
}


class Notices(offbeat.Callback):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_notice(self, text: str) -> None:
        self.told.append(text)


def test_a_run_says_what_lies_in_its_directory_and_which_sizes_are_far_off(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear diary")
    notices, sizes = Notices(), {"run.dir": str(tmp_path), "async_training.off_policy_degree": 1000}
    offbeat.train("cartpole-ppo", overrides={**SMALL, **sizes}, callbacks=[notices])
    degree, directory = notices.told
    assert degree == "off_policy_degree 1,000 is above run.rounds 1: it bounds nothing"
    assert directory.startswith(f"run.dir {tmp_path} holds other files (letter.txt): ")
    assert (tmp_path / "letter.txt").read_text() == "dear diary"


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.device is cuda, but torch sees no GPU"):
        offbeat.train("cartpole-ppo", overrides={**SMALL, "trainer.device": "cuda"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["trainer.device", "rollout.device"])
def test_check_refuses_a_gpu_that_is_not_there(
    key: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = "cartpole-ppo" if key == "trainer.device" else "cartpole-muzero"
    assert run("check", recipe, f"{key}=cuda") == 2
    assert f"{key} is cuda, but torch sees no GPU" in capfd.readouterr().err
    assert run("check", recipe, f"{key}=cuda", "--no-import") == 0
