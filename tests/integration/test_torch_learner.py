"""A learner in torch, as users write it: saved, resumed, repeated, evaluated; refused where it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from offbeat.checkpoint import CheckpointManager
from offbeat.cli.main import main
from offbeat.config.models import CheckpointConfig
from offbeat.errors import ConfigError, OffbeatError, TrainError
from offbeat.observe.events import read_events
from offbeat.pipeline import Settings
from tests.callbacks import EndAt

SETTINGS = {
    "algorithm.name": "tests.torch_a2c:ALGORITHM",
    "env.id": "CartPole-v1",
    "env.num_envs": 4,
    "eval.episodes": 2,
    "eval.num_envs": 2,
    "eval.at_end": False,
    "runtime.num_workers": 2,
    "runtime.kind": "inline",
    "checkpoint.interval_rounds": 2,
    "checkpoint.interval_s": None,
    "observe.tensorboard": False,
    "observe.console": "none",
    "run.rounds": 6,
}
Run = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "a2c.yaml"
    path.write_text('algorithm: {name: "tests.torch_a2c:ALGORITHM"}\nenv: {id: CartPole-v1}\n')
    return str(path)


@pytest.fixture
def train(recipe: str, tmp_path: Path) -> Run:
    def run(name: str = "run", *, callbacks: Any = (), **changes: Any) -> Any:
        named = {key.replace("__", "."): value for key, value in changes.items()}
        settings = {**SETTINGS, "run.dir": str(tmp_path / name), **named}
        return offbeat.train(recipe, overrides=settings, callbacks=callbacks)

    return run


def command(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out.splitlines()[-1])


# ---------------------------------------------------------------- what is saved


def test_state_of_a_torch_optimizer_is_saved_and_resumed_to_the_same_weights(
    train: Run, tmp_path: Path
) -> None:
    whole = train("whole")
    train("halves", callbacks=[EndAt(3)])
    saved = CheckpointManager(tmp_path / "halves" / "checkpoints").load(3)
    assert type(saved.parts["learner"]["opt"]["state"][0]["exp_avg"]) is torch.Tensor
    assert type(saved.weights["0.weight"]) is torch.Tensor
    resumed = offbeat.resume(tmp_path / "halves")
    assert resumed.rounds == 6
    assert resumed.digest == whole.digest


@pytest.mark.parametrize(
    ("kind", "degree"), [("threads", 2), pytest.param("processes", 2, marks=pytest.mark.slow)]
)
def test_what_was_saved_is_evaluated_and_repeated(kind: str, degree: int, train: Run, tmp_path: Path) -> None:
    run = train(runtime__kind=kind, async_training__off_policy_degree=degree, eval__interval_rounds=3)
    assert run.save_error == ""
    assert offbeat.evaluate(run.run_dir)["eval/version"] == 6
    assert offbeat.play(run.run_dir, video=False, max_steps=20).scores
    report = offbeat.replay_run(run.run_dir)
    assert report.identical and report.digest == run.digest == offbeat.digest(run.run_dir)


def test_a_snapshot_is_a_copy_that_training_does_not_change(train: Run, tmp_path: Path) -> None:
    """The state holds what torch returns, which are the live tensors."""

    class KeepState(offbeat.Callback):
        def on_checkpoint(self, info: Any) -> None:
            saved = CheckpointManager(tmp_path / "run" / "checkpoints").load(info.version)
            assert saved.parts["learner"]["rounds"] == info.version
            same = [torch.equal(saved.weights[name], value) for name, value in net_of(saved).items()]
            assert all(same), "weights and state are of one version"

    def net_of(saved: Any) -> dict[str, torch.Tensor]:
        return dict(saved.parts["learner"]["net"])

    train(
        runtime__kind="threads",
        async_training__off_policy_degree=3,
        checkpoint__interval_rounds=1,
        run__rounds=20,
        callbacks=[KeepState()],
    )


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
@pytest.mark.parametrize(
    ("keeps", "place"),
    [
        ("lambda", r"learner\.state_dict\(\)\['schedule'\]\[1\]\['lr'\] is a builtins\.function"),
        ("file", r"learner\.state_dict\(\)\['log'\] is a _io\.TextIOWrapper"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_before_round_1(
    keeps: str, place: str, kind: str, train: Run, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){place}.* Leave it out .*checkpoint\.enabled=false"):
        train(algorithm__keeps=keeps, runtime__kind=kind)
    assert not (tmp_path / "run").exists(), "it leaves no trace"


def test_what_cannot_be_saved_does_no_harm_where_nothing_is_saved(train: Run) -> None:
    run = train(algorithm__keeps="lambda", checkpoint__enabled=False)
    assert (run.rounds, run.save_error) == (6, "")


def test_run_that_could_not_save_anything_does_not_end_well(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is refused later than the first try: the state changes its form after the first round."""
    directory = tmp_path / "run"
    settings = {**SETTINGS, "run.dir": str(directory), "algorithm.fails_from": 1}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    code, told = command("train", recipe, *overrides, capsys=capsys)
    assert (code, told["ok"], told["state"]) == (1, False, "failed")
    assert "nothing could be saved: learner['history'] is a builtins.set" in told["error"]
    events = read_events(directory / "events.jsonl")
    assert [one["version"] for one in events if one["kind"] == "checkpoint_failed"] == [2, 4, 6]
    assert (events[-1]["kind"], events[-1]["failed"]) == ("finish", True)
    code, status = command("status", str(directory), capsys=capsys)
    assert (code, status["state"], status["failed_checkpoints"]["count"]) == (1, "failed", 3)


def test_run_that_lost_its_last_checkpoints_names_them(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    settings = {**SETTINGS, "run.dir": str(directory), "algorithm.fails_from": 3}
    with pytest.raises(SystemExit) as ended:
        main(["train", recipe, *(f"{key}={json.dumps(value)}" for key, value in settings.items())])
    assert ended.value.code == 0, "there is a checkpoint to go on from"
    shown = capsys.readouterr().out
    assert "failed checkpoints" in shown and "2, the last one of version 6: learner['history']" in shown


# ---------------------------------------------------------------- pipelines


class Counter:
    """A learner of one number; its state is what the test says."""

    def __init__(self, state: Callable[[], Any] = lambda: {"total": 0.0}) -> None:
        self._state = state

    def train(self, batch: Any) -> dict[str, float]:
        return {}

    def weights(self) -> Any:
        return {"total": torch.zeros(1)}

    def state_dict(self) -> Any:
        return self._state()

    def load_state_dict(self, state: Any) -> None:
        pass


def pipeline(run_dir: Path | None, train: Any, **options: Any) -> Any:
    collect = options.pop("collect", lambda ticket, weights: ticket.seed)
    return offbeat.Pipeline(collect=collect, train=train, run_dir=run_dir, runtime="inline", **options)


@pytest.mark.parametrize("is_object", [True, False])
def test_pipeline_without_a_directory_takes_any_state(is_object: bool) -> None:
    learner = Counter(lambda: {"log": Path(__file__).open()})  # noqa: SIM115
    train = learner if is_object else offbeat.PerWorker(lambda context: learner)
    assert pipeline(None, train).run(3).version == 3


@pytest.mark.parametrize("is_object", [True, False])
def test_pipeline_with_a_directory_refuses_what_it_could_not_save(is_object: bool, tmp_path: Path) -> None:
    learner = Counter(lambda: {"log": Path(__file__).open()})  # noqa: SIM115
    train = learner if is_object else offbeat.PerWorker(lambda context: learner)
    with pytest.raises(ConfigError, match=r"learner\.state_dict\(\)\['log'\]"):
        pipeline(tmp_path / "run", train).run(3)


def test_state_dict_that_raises_is_told_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"(?s)state_dict\(\) raised before round 1.*ZeroDivisionError"):
        pipeline(tmp_path / "run", offbeat.PerWorker(lambda context: Counter(lambda: 1 / 0))).run(3)


def test_learner_without_a_state_is_told_once(tmp_path: Path) -> None:
    class Stateless:
        def train(self, batch: Any) -> dict[str, float]:
            return {}

        def weights(self) -> int:
            return 0

    train = offbeat.PerWorker(lambda context: Stateless())
    settings = Settings(checkpoint=CheckpointConfig(interval_rounds=1))
    report = pipeline(tmp_path / "run", train, settings=settings).run(4)
    assert (report.version, report.save_error, report.digest) == (4, "", None)
    notices = [
        one["text"] for one in read_events(tmp_path / "run" / "events.jsonl") if one["kind"] == "notice"
    ]
    assert notices == ["no checkpoints: the learner has no state_dict() that could be saved"]


def test_collector_whose_state_cannot_be_saved_is_refused_before_round_1(tmp_path: Path) -> None:
    class Collector:
        def collect(self, ticket: Any, weights: Any) -> offbeat.Segment:
            return offbeat.Segment(ticket, 0, np.array([ticket.version]))

        def state_dict(self) -> Any:
            return {"env": [print]}

        def load_state_dict(self, state: Any) -> None:
            pass

    collect = offbeat.PerWorker(lambda context: Collector())
    with pytest.raises(ConfigError, match=r"collector_0\.state_dict\(\)\['env'\]\[0\] is a .*returns None"):
        pipeline(tmp_path / "run", Counter(), collect=collect).run(3)
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert not [one for one in events if one["kind"] == "round"]
    assert pipeline(None, Counter(), collect=collect).run(3).version == 3


def test_weights_that_cannot_be_saved_cost_evaluations_only(tmp_path: Path) -> None:
    class Odd(Counter):
        def weights(self) -> Any:
            return {"net": len}

    report = pipeline(tmp_path / "run", offbeat.PerWorker(lambda context: Odd())).run(3)
    assert report.save_error == ""
    (notice,) = [
        one["text"] for one in read_events(tmp_path / "run" / "events.jsonl") if one["kind"] == "notice"
    ]
    assert "not evaluated or played: weights()['net'] is a builtins.builtin_function" in notice


# ---------------------------------------------------------------- weights that are no copy


@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_weights_that_training_changes_end_an_asynchronous_run(kind: str, train: Run) -> None:
    with pytest.raises(
        OffbeatError, match=r"(?s)weights of version \d .*weights\(\) must return a copy: .*clone"
    ):
        train(
            algorithm__copies=False, runtime__kind=kind, async_training__off_policy_degree=2, run__rounds=20
        )


@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_weights_that_training_changes_do_no_harm_at_k_0(kind: str, train: Run) -> None:
    live = train("live", algorithm__copies=False, runtime__kind=kind)
    assert live.digest == train("copied", runtime__kind=kind).digest
    assert offbeat.replay_run(live.run_dir).identical


@pytest.mark.slow
def test_weights_that_training_changes_do_no_harm_between_processes(train: Run) -> None:
    run = train(algorithm__copies=False, runtime__kind="processes", async_training__off_policy_degree=2)
    assert run.rounds == 6
    with pytest.raises(OffbeatError, match="must return a copy"):
        offbeat.replay_run(run.run_dir)
