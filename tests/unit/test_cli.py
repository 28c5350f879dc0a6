from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import offbeat
from offbeat.checkpoint import CheckpointManager
from offbeat.cli import doctor as doctor_module
from offbeat.cli.doctor import advice
from offbeat.cli.main import VERBS, main
from offbeat.cli.output import show_table
from offbeat.cli.settings import as_settings
from offbeat.cli.summary import summary_rows
from offbeat.cli.supervise import is_wanted
from offbeat.config.loader import dump_yaml
from offbeat.errors import ConfigError, EnvError, OffbeatError, RunNotFound, StallError
from offbeat.observe.events import EventLog
from offbeat.pacing.answers import ChangedAnswer
from offbeat.pacing.recorded import Difference
from offbeat.run.collectors import Loss
from offbeat.run.replay import ReplayReport
from offbeat.types import Answer

ROOT = Path(__file__).parents[2]


@dataclass
class FakeResult:
    """What a training run returns."""

    run_dir: Path = Path("runs/my pole")
    reason: str = "all rounds trained"
    rounds: int = 50
    digest: str = "abc123"
    metrics: dict[str, float | str] = field(
        default_factory=lambda: {
            "pace/max_sample_age": 1.0,
            "pace/dropped_samples": 0.0,
            "learn/loss": float("nan"),
        }
    )
    eval_return: float | None = 487.5
    eval_metrics: dict[str, float] = field(default_factory=dict)
    wall_s: float = 20.0
    env_steps: int = 102_400
    samples: tuple[int, str] = (102_400, "env_steps")
    steps_per_s: float = 5120.0
    max_staleness: int = 1
    interrupted: bool = False
    startup_s: float = 4.0
    rounds_s: float = 15.0
    losses: tuple[Loss, ...] = ()
    restarts: int = 0
    stopped: bool = False
    save_error: str = ""
    has_evaluator: bool = True
    has_envs: bool = True


class Calls:
    """A stand-in for ``offbeat.api`` that notes its calls and does as it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
        self.answers: dict[str, Callable[[], object]] = {}

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.seen.append((name, args, kwargs))
            return self.answers[name]()

        return call


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setitem(sys.modules, "offbeat.api", calls)
    monkeypatch.setattr(offbeat, "api", calls, raising=False)
    return calls


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def raises(error: BaseException) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


def offbeat_in_a_process(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "from offbeat.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


# ---------------------------------------------------------------- the surface


def test_help_shows_every_verb_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n  {verb} " in shown
    assert "..." not in shown.partition("Commands:")[2]


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_takes_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["fly"], ["train"], ["eval", "run", "--episodes", "0"], ["list", "--what"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "Usage: offbeat" in capsys.readouterr().err


def test_a_command_ends_without_collecting_what_it_imported() -> None:
    code = """
import atexit, gc, sys
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))
from offbeat.cli.main import main
sys.argv = ["offbeat", "--version"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "frozen True", done.stderr


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out.strip() == project["version"] == offbeat.__version__


# ---------------------------------------------------------------- train, resume


def test_train_hands_over_recipe_and_overrides(api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["train"] = FakeResult
    assert run("train", "cartpole-ppo", "run.seed=3", "async_training.off_policy_degree=-1") == 0
    overrides = ["run.seed=3", "async_training.off_policy_degree=-1"]
    assert api.seen == [("train", ("cartpole-ppo",), {"overrides": overrides, "callbacks": ()})]
    shown = capsys.readouterr().out
    wall = "20.0 s: start-up 4.0 s, rounds 15.0 s, the rest 1.0 s"
    for text in ("102,400", wall, "5,120", "487.5", "abc123", "offbeat resume 'runs/my pole'"):
        assert text in shown


def test_summary_names_what_was_lost_in_every_start_of_the_run(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl", clock=iter(range(100, 200)).__next__)
    events.append("start", {"version": 0})
    for _ in range(10):
        down = {"component": "collector_1", "state": "down", "detail": "killed by SIGKILL\nsecond line"}
        events.append("health", down)
        events.append("health", {"component": "collector_1", "state": "up"})
    events.append("restart", {"version": 5, "reason": "killed by SIGSEGV at round 7", "attempt": 1})
    events.append("resume", {"version": 5})
    events.close()
    rows = summary_rows(FakeResult(run_dir=tmp_path))  # type: ignore[arg-type]
    lines = rows["lost and replaced"].splitlines()
    assert lines[0] == "2 earlier ones: see `offbeat status`"
    assert lines[-1] == "collector_1, replaced after 1.0 s: killed by SIGKILL"
    assert rows["restarts"] == "1, from checkpoints; the last one: killed by SIGSEGV at round 7"
    assert "lost and replaced" not in summary_rows(FakeResult())  # type: ignore[arg-type]


def test_summary_of_a_run_without_an_evaluator_names_no_command_that_evaluates() -> None:
    rows = summary_rows(FakeResult(has_evaluator=False, eval_return=None))  # type: ignore[arg-type]
    assert {"eval", "play", "replay"} & rows.keys() == {"play", "replay"}
    assert summary_rows(FakeResult())["eval"] == "offbeat eval 'runs/my pole'"  # type: ignore[arg-type]
    assert "play" not in summary_rows(FakeResult(has_envs=False))  # type: ignore[arg-type]


def test_summary_of_a_run_that_measured_nothing() -> None:
    rows = summary_rows(FakeResult(metrics={}, eval_return=None, steps_per_s=0.0))  # type: ignore[arg-type]
    assert rows["evaluation return"] == "not evaluated"
    assert rows["steps per second"] == "no round trained"
    assert rows["dropped samples"] == "0"


def test_summary_of_a_language_model_counts_tokens() -> None:
    rows = summary_rows(FakeResult(samples=(7_000, "tokens"), steps_per_s=350.0))  # type: ignore[arg-type]
    assert rows["tokens"] == "7,000"
    assert rows["tokens per second"].startswith("350,")
    assert "environment steps" not in rows


def test_table_on_a_terminal_takes_text_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_table("run [bold]", {"directory": "runs/[red]x"})
    shown = capsys.readouterr().out
    assert "run [bold]" in shown
    assert "runs/[red]x" in shown
    assert "│" in shown


def test_json_is_the_only_thing_on_stdout(api: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    def noisy() -> FakeResult:
        print("half a line", end="")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        return FakeResult()

    api.answers["train"] = noisy
    assert run("train", "cartpole-ppo", "--json") == 0
    captured = capfd.readouterr()
    values = json.loads(captured.out)
    assert values["ok"] is True
    assert values["run_dir"] == "runs/my pole"
    assert values["digest"] == "abc123"
    assert values["metrics"]["learn/loss"] is None
    assert "from a child" in captured.err
    assert "half a line" in captured.err


def test_interrupted_run_shows_its_summary_and_exits_with_130(
    api: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["resume"] = lambda: FakeResult(interrupted=True)
    assert run("resume", "runs/x", "run.rounds=9") == 130
    assert api.seen == [("resume", ("runs/x",), {"overrides": ["run.rounds=9"], "callbacks": ()})]
    assert "offbeat resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("result", "state", "code"),
    [
        (FakeResult(), "finished", 0),
        (FakeResult(stopped=True), "stopped", 0),
        (FakeResult(stopped=True, interrupted=True), "stopped", 130),
        (FakeResult(save_error="learner['x'] is a set"), "failed", 1),
        (FakeResult(save_error="disk full", stopped=True, interrupted=True), "failed", 1),
    ],
)
def test_word_for_the_end_is_in_the_headline_and_in_json(
    result: FakeResult, state: str, code: int, api: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers["train"] = lambda: result
    assert run("train", "cartpole-ppo", "--json") == code
    shown = capsys.readouterr()
    told = json.loads(shown.out.splitlines()[-1])
    assert (told["state"], told["ok"]) == (state, code == 0)
    assert f"offbeat: {state}: all rounds trained" in shown.err
    assert ("offbeat eval" in shown.err) is not bool(result.save_error)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such thing; write another"), 2),
        (EnvError("no such environment; write another"), 2),
        (RunNotFound("no such run; write another"), 2),
        (StallError("the learner waited for collector 1"), 1),
        (OffbeatError("something else"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
@pytest.mark.parametrize("verb", ["train", "resume", "eval", "replay", "digest"])
def test_errors_become_a_message_and_an_exit_code(
    api: Calls, capfd: pytest.CaptureFixture[str], verb: str, error: BaseException, code: int
) -> None:
    api.answers[{"eval": "evaluate", "replay": "replay_run"}.get(verb, verb)] = raises(error)
    assert run(verb, "somewhere", "--json") == code
    captured = capfd.readouterr()
    assert str(error) in captured.err
    assert "Traceback" not in captured.err
    assert json.loads(captured.out) == {"ok": False, "error": str(error) or "interrupted"}


# ---------------------------------------------------------------- eval, replay, digest


def test_eval_passes_its_options_on(api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["evaluate"] = lambda: {"eval/return_mean": 99.5}
    assert run("eval", "runs/x", "--episodes", "3", "--seed", "4", "--best", "--json") == 0
    assert api.seen == [
        ("evaluate", ("runs/x",), {"episodes": 3, "seed": 4, "best": True, "overrides": None})
    ]
    assert json.loads(capsys.readouterr().out)["eval_return"] == 99.5


def test_resume_eval_only_is_eval(api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["evaluate"] = lambda: {"eval/return_mean": 99.5}
    assert run("resume", "runs/x", "eval.episodes=3", "--eval-only", "--json") == 0
    options = {"episodes": None, "seed": None, "best": False, "overrides": ["eval.episodes=3"]}
    assert api.seen == [("evaluate", ("runs/x",), options)]
    values = json.loads(capsys.readouterr().out)
    assert run("eval", "runs/x", "--json") == 0
    assert json.loads(capsys.readouterr().out) == values


def test_train_eval_only_judges_the_run_it_names_with_the_evaluation_it_is_given(
    api: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    config = offbeat.load_config("cartpole-ppo", ["eval.deterministic=false"])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    api.answers["evaluate"] = lambda: {"eval/return_mean": 99.5}
    settings = [f"run.dir={tmp_path}", "lr=1e-2", "eval.episodes=3"]
    assert run("train", "cartpole-ppo", *settings, "--eval-only") == 0
    ((verb, args, options),) = api.seen
    assert (verb, args) == ("evaluate", (str(tmp_path),))
    assert options["overrides"] == {"eval.episodes": 3, "eval.deterministic": True}
    assert f"evaluation of {tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ([], "name its directory with run.dir=RUN, or use `offbeat eval RUN`"),
        (["run.dir=nowhere"], "run.dir nowhere holds none: train it without --eval-only first"),
        (["run.dir={there}", "env.id=Acrobot-v1"], "a run of ppo on CartPole-v1, not of ppo on Acrobot-v1"),
    ],
)
def test_train_eval_only_needs_a_run_that_is_there(
    api: Calls, tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: list[str], fix: str
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(dump_yaml(offbeat.load_config("cartpole-ppo")))
    given = [setting.format(there=tmp_path) for setting in settings]
    assert run("train", "cartpole-ppo", *given, "--eval-only") == 2
    assert fix in capfd.readouterr().err
    assert api.seen == []


@pytest.mark.skipif(sys.platform != "linux", reason="runs have a guard on Linux only")
def test_a_run_that_is_only_judged_has_no_guard() -> None:
    assert is_wanted(["resume", "runs/x"])
    assert not is_wanted(["resume", "runs/x", "--eval-only"])


@pytest.mark.parametrize("score", [None, 3.0])
def test_eval_of_the_best_says_when_none_has_a_score(
    api: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path, score: float | None
) -> None:
    CheckpointManager(tmp_path / "checkpoints").save(1, {}, {}, score)
    api.answers["evaluate"] = lambda: {"eval/return_mean": 99.5}
    assert run("eval", str(tmp_path), "--best") == 0
    assert ("note: no checkpoint of this run has a score" in capsys.readouterr().out) == (score is None)


@pytest.mark.parametrize(("drawn", "is_told"), [(-136.7, True), (-490.0, False)])
def test_eval_says_when_the_return_depends_on_how_actions_are_chosen(
    api: Calls, capsys: pytest.CaptureFixture[str], drawn: float, is_told: bool
) -> None:
    metrics = {"eval/return_mean": -500.0, "eval/return_std": 0.0, "eval/episodes": 10.0}
    sampled = {"eval/return_mean_sampled": drawn, "eval/return_std_sampled": 20.0}
    api.answers["evaluate"] = lambda: metrics | sampled
    assert run("eval", "runs/x") == 0
    shown = capsys.readouterr().out
    assert ("note: return -500.0 with the most likely actions, but" in shown) == is_told
    assert f"return -500.0 ± 0.0 over 10 episodes ({drawn} with drawn actions)" in shown
    assert run("eval", "runs/x", "--json") == 0
    assert ("eval.deterministic=false" in json.loads(capsys.readouterr().out).get("note", "")) == is_told


@pytest.mark.parametrize(("identical", "code"), [(True, 0), (False, 1)])
def test_replay_fails_when_weights_differ(
    api: Calls, capsys: pytest.CaptureFixture[str], identical: bool, code: int
) -> None:
    difference = None if identical else Difference(3, (6, 7))
    report = ReplayReport(identical, "aa", "bb", 7, difference=difference)
    api.answers["replay_run"] = lambda: report
    assert run("replay", "runs/x") == code
    shown = capsys.readouterr().out
    assert ("DIFFERENT" in shown) is not identical
    assert ("round 3 (tickets 6, 7) gave other weights" in shown) is not identical
    assert "aa" in shown
    assert "bb" in shown


def test_replay_that_calls_names_the_first_other_answer(
    api: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ChangedAnswer(7, 2, 1, Answer(1, "46;"), Answer(1, "47;"))
    api.answers["replay_run"] = lambda: ReplayReport(False, "aa", "", 3, changed=changed)
    assert run("replay", "runs/x", "--call") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "ANOTHER answer" in shown
    assert "turn 1 of response 2 of ticket 7 was answered '46;', now '47;'" in shown


@pytest.mark.parametrize(
    ("options", "wanted", "left_in"),
    [
        ((), {"runtime": "inline", "until": None, "out": None, "call": False}, None),
        (("--to", "4"), {"runtime": "inline", "until": 4, "out": None, "call": False}, "runs/x-to-4"),
        (
            ("--to", "4", "--out", "runs/y", "--runtime", "processes", "--call"),
            {"runtime": "processes", "until": 4, "out": "runs/y", "call": True},
            "runs/y",
        ),
    ],
    ids=["whole", "to", "all options"],
)
def test_replay_takes_a_round_a_directory_and_a_runtime(
    options: tuple[str, ...],
    wanted: dict[str, object],
    left_in: str | None,
    api: Calls,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api.answers["replay_run"] = lambda: ReplayReport(True, "aa", "aa", 4)
    assert run("replay", "runs/x", *options) == 0
    ((_, (directory, *_), given),) = api.seen
    assert (directory, given) == ("runs/x", wanted)
    shown = capsys.readouterr().out
    assert ("left in" in shown) == (left_in is not None)
    assert left_in is None or left_in in shown


def test_replay_refuses_a_runtime_that_does_not_exist(api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", "runs/x", "--runtime", "process") == 2
    assert "--runtime must be one of inline, threads, processes, ray" in capsys.readouterr().err
    assert api.seen == []


def test_digest_prints_the_digest_alone(api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers["digest"] = lambda: "abc"
    assert run("digest", "runs/x") == 0
    assert capsys.readouterr().out == "abc\n"


# ---------------------------------------------------------------- list, check


def test_list_shows_recipes_and_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert "cartpole-ppo" in [recipe["name"] for recipe in values["recipes"]]
    assert "ppo" in values["algorithms"]


def test_check_names_both_mistakes_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("extends: cartpole-ppo\nenv:\n  num_env: 8\nalgorithm:\n  lr: fast\n")
    done = offbeat_in_a_process("check", "bad.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.yaml:3: env.num_env = 8\n    unknown key; did you mean num_envs?" in done.stderr
    assert "bad.yaml:5: algorithm.lr = 'fast'\n    must be a number" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_check_reports_problems_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("extends: cartpole-ppo\nenv:\n  num_env: 8\n")
    assert run("check", str(path), "--json") == 2
    values = json.loads(capfd.readouterr().out)
    assert values["problems"] == [
        {
            "where": f"{path}:3",
            "key": "env.num_env",
            "given": "8",
            "message": "unknown key; did you mean num_envs?",
        }
    ]


def test_check_shows_config_and_plan_of_a_recipe(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("check", "cartpole-ppo", "async_training.off_policy_degree=2") == 0
    shown = capfd.readouterr().out
    assert shown.startswith("plan:")
    assert "  off_policy_degree: 2  # default: 0\n" in shown
    assert "at most 2 versions" in shown
    assert " each: " in shown


def test_check_json_holds_the_resolved_config(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("check", "cartpole-ppo", "run.seed=5", "--json") == 0
    values = json.loads(capfd.readouterr().out)
    assert values["config"]["run"]["seed"] == 5
    assert "staleness" in values["plan"]


def test_check_refuses_an_environment_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("check", "cartpole-ppo", "env.id=CartPool-v1") == 2
    assert "env.id = 'CartPool-v1'" in capfd.readouterr().err


@pytest.mark.parametrize("recipe", ["alice-bob-mappo", "alice-bob-hmasd"])
def test_check_refuses_ranks_that_train_would_refuse(recipe: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("check", recipe, "learner.num_ranks=2") == 2
    said = capfd.readouterr().err
    assert "does not train in several processes" in said
    assert "set learner.num_ranks to 1" in said


def test_check_plans_ranks_where_there_can_be_some(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("check", "cartpole-ppo", "learner.num_ranks=2") == 0
    assert "2 ranks in this process and others" in capfd.readouterr().out


# ---------------------------------------------------------------- doctor


@pytest.fixture
def brief_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor ask a process about torch that does not import it, and measure for a moment."""
    monkeypatch.setattr(doctor_module, "_TORCH_PROBE", "print('2.13', 1, False)")
    monkeypatch.setattr(doctor_module, "_MEASURE_S", 0.02)


def test_doctor_looks_at_the_machine_and_an_environment(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--env", "CartPole-v1", "--json") == 0
    findings = {one["name"]: one for one in json.loads(capfd.readouterr().out)["findings"]}
    assert {"python", "torch", "gymnasium", "cores", "memory", "open files", "tensorboard"} <= set(findings)
    assert " us a step alone" in findings["CartPole-v1"]["text"]
    assert "runtime." in findings["advice"]["text"]


@pytest.mark.parametrize("env_id", ["offbeat/AliceAndBob-v0", "tests.unit.test_teams_loop:Leaving"])
@pytest.mark.usefixtures("brief_doctor")
def test_doctor_measures_teams(env_id: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--env", env_id, "--json") == 0
    findings = {row["name"]: row for row in json.loads(capfd.readouterr().out)["findings"]}
    assert "us a step alone" in findings[env_id]["text"]


@pytest.mark.parametrize("env_id", ["tests.unit.test_cli:Path", "CartPool-v1"])
@pytest.mark.usefixtures("brief_doctor")
def test_doctor_refuses_what_is_no_environment_as_train_does(
    env_id: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", "--env", env_id) == 2
    assert env_id in capfd.readouterr().err


@pytest.mark.usefixtures("brief_doctor")
def test_doctor_names_packages_and_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_module, "_version", {"gymnasium": "1.2", "lbforaging": "2.0"}.get)
    assert run("doctor", "--json") == 0
    findings = {one["name"]: one for one in json.loads(capfd.readouterr().out)["findings"]}
    assert findings["marl"] == {"name": "marl", "status": "ok", "text": "lbforaging 2.0"}
    assert findings["gymnasium"]["text"] == "1.2"
    missing = "imageio-ffmpeg not installed: pip install 'offbeat[video]'"
    assert findings["video"] == {"name": "video", "status": "missing", "text": missing}
    assert findings["wandb"]["text"].startswith("not installed: ")


def test_doctor_fails_when_torch_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_module, "_TORCH_PROBE", "raise ImportError('libtorch is missing')")
    assert run("doctor") == 1
    assert "FAILED: cannot be imported: ImportError: libtorch is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limit", "status"), [(256, "warning"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_doctor_warns_of_few_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    finding = doctor_module._open_files()
    assert finding.status == status
    assert ("ulimit -n" in finding.text) == (status == "warning")


def test_doctor_warns_of_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=2**29, total=2**33)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    finding = doctor_module._memory()
    assert finding.status == "warning"
    assert finding.text.startswith("0.5 GiB free of 8.0 GiB: ")


@pytest.mark.parametrize(
    ("step_us", "words"), [(2, "few wide"), (200, "num_workers=3"), (5000, "one per free core")]
)
def test_advice_follows_the_cost_of_a_step(step_us: float, words: str) -> None:
    assert words in advice(step_us, cores=4)


# ---------------------------------------------------------------- imports


def loaded_after(code: str, names: str) -> set[str]:
    """Those of the named modules that ``code`` imports, in a fresh interpreter."""
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('loaded', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    return set(done.stdout.splitlines()[-1].split()) & set(names.split())


def test_import_and_help_stay_light() -> None:
    heavy = "torch numpy gymnasium pydantic ruamel.yaml rich.console transformers tokenizers gguf"
    assert loaded_after("import offbeat, offbeat.llm", heavy + " typer") == set()
    assert loaded_after("from offbeat.cli.main import main; main(['--help'])", heavy) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["check", "cartpole-ppo"],
        ["digest", "nowhere"],
        ["status", "nowhere"],
        ["generate", "--help"],
        ["generate"],
    ],
)
def test_looking_at_things_needs_no_torch(arguments: list[str]) -> None:
    heavy = "torch transformers tokenizers"
    assert loaded_after(f"from offbeat.cli.main import main; main({arguments!r})", heavy) == set()


def test_public_names_are_fixed() -> None:
    assert sorted(offbeat.__all__) == [
        "Batch", "Callback", "PerWorker", "Pipeline", "PlayResult", "Result", "Segment", "SyncRun", "Ticket",
        "__version__", "digest", "env_factory", "evaluate", "load_config", "play", "register", "replay_run",
        "resume", "token_loss", "train",
    ]  # fmt: skip
    assert set(offbeat.__all__) <= set(dir(offbeat))


@pytest.mark.parametrize("name", offbeat.__all__)
def test_public_names_are_not_hidden_by_a_submodule(name: str) -> None:
    package = ROOT / "src" / "offbeat"
    assert not (package / f"{name}.py").exists()
    assert not (package / name / "__init__.py").exists()


@pytest.mark.parametrize("name", sorted(set(offbeat.__all__) - {"__version__"}))
def test_public_names_are_found_on_first_use(name: str) -> None:
    assert getattr(offbeat, name).__name__ == name


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        offbeat.trane


def test_what_is_asked_for_and_not_installed_is_refused_by_check(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run("check", "cartpole-ppo", "use_wandb=true") == 2
    assert "pip install 'offbeat[wandb]'" in capfd.readouterr().err


def test_a_wrong_argument_of_the_environment_is_answered_with_the_right_ones(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run("check", "colorlines-ppo", "env.kwargs.rulez=classic") == 2
    assert "it takes rules, reward, gamma, render_mode" in capfd.readouterr().err


def test_both_names_of_the_metric_that_only_replays_report_are_the_same() -> None:
    from offbeat.cli import history
    from offbeat.observe import text

    assert history.REPLAY_METRIC == text.REPLAY_METRIC


# ---------------------------------------------------------------- settings as options

OWN = {"--json": False, "--eval-only": False, "--episodes": True, "--help": False}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("recipe --num_workers 4 --lr 3e-4", "recipe num_workers=4 lr=3e-4"),
        ("recipe --num-workers=4 --json", "recipe --json num_workers=4"),
        ("recipe --off_policy_degree -1", "recipe off_policy_degree=-1"),
        ("recipe --use_wandb --run.seed 3", "recipe use_wandb=true run.seed=3"),
        ("recipe --use_wandb run.seed=3 --json", "recipe run.seed=3 --json use_wandb=true"),
        ("--num_workers 4 recipe", "recipe num_workers=4"),
        ("run --episodes 5 --best_of 2", "run --episodes 5 best_of=2"),
        ("run --episodes=5 -- --lr 3", "run --episodes=5 -- --lr 3"),
        ("--num_workers 4", ""),
    ],
)
def test_options_that_are_no_verbs_own_are_settings(given: str, taken: str) -> None:
    assert as_settings(given.split(), OWN) == taken.split()


@pytest.mark.parametrize("verb", ["train", "resume", "check", "eval"])
def test_verbs_with_settings_take_them_as_options(
    verb: str, api: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(verb, "cartpole-ppo", "--help") == 0
    assert "KEY=VALUE" in capsys.readouterr().out
    if verb == "check":
        assert run("check", "cartpole-ppo", "--num_worker", "4", "--json") == 2
        assert "did you mean runtime.num_workers?" in capsys.readouterr().err
        return
    name = "evaluate" if verb == "eval" else verb
    api.answers[name] = lambda: {} if verb == "eval" else FakeResult()
    assert run(verb, "runs/x", "--num_workers", "4", "--lr=3e-4") == 0
    (_, _, named) = api.seen[0]
    assert named["overrides"] == ["num_workers=4", "lr=3e-4"]


def test_a_verb_without_settings_refuses_options_that_are_not_its_own() -> None:
    assert run("digest", "runs/x", "--num_workers", "4") == 2
