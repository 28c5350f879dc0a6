"""Strictly synchronous runs, step by step: the same runs as ever, in somebody else's hands."""

from __future__ import annotations

import json
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.config.models import AsyncTrainingConfig, CheckpointConfig, RuntimeConfig
from offbeat.errors import ConfigError, OffbeatError, StallError
from offbeat.observe.events import read_events, read_rounds
from offbeat.pacing import Coordinator
from offbeat.pacing.events import GatesSet
from offbeat.pipeline import Pipeline, Settings
from offbeat.runtime.clock import SystemClock
from tests.chaos.test_faults import faulty
from tests.conftest import SMALL

ROUNDS = 5
Make = Callable[..., offbeat.SyncRun]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run by ``offbeat.train`` that others are compared with."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    settings = {**SMALL, "run.dir": str(directory), "runtime.kind": "inline", "eval.interval_rounds": 2}
    return offbeat.train("cartpole-ppo", rounds=ROUNDS, overrides=settings)


@pytest.fixture
def sync_run(tmp_path: Path) -> Make:
    """Make a small CartPole run; keywords are those of `SyncRun`, the rest are overrides."""

    def make(
        overrides: dict[str, Any] | None = None, name: str = "run", rounds: int = ROUNDS, **options: Any
    ) -> offbeat.SyncRun:
        settings = {**SMALL, "run.dir": str(tmp_path / name), "runtime.kind": "inline"}
        settings |= {"eval.interval_rounds": 2, **(overrides or {})}
        return offbeat.SyncRun("cartpole-ppo", rounds=rounds, overrides=settings, **options)

    return make


def one_round(run: offbeat.SyncRun) -> Any:
    run.enable_data_collection()
    while not run.should_sync_update():
        run.wait()
    run.disable_data_collection()
    return run.sync_update()


def to_the_end(run: offbeat.SyncRun) -> offbeat.Result:
    with run:
        while not run.finished:
            one_round(run)
    return run.result


# ---------------------------------------------------------------- the same run


class OwnClock(SystemClock):
    """The machine's clock on a day of its own; ``reads`` counts how often it was asked for the time."""

    reads = 0

    def now_s(self) -> float:  # type: ignore[override]
        self.reads += 1
        return time.perf_counter()

    def date(self, form: str) -> str:  # type: ignore[override]
        return "20010203-040506"


def test_a_run_is_driven_by_the_clock_it_is_given(sync_run: Make) -> None:
    clock = OwnClock()
    with sync_run(clock=clock) as run:
        before = clock.reads
        one_round(run)
        assert clock.reads > before
    assert json.loads((run.result.run_dir / "manifest.json").read_text())["created"] == clock.date("")


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_a_run_step_by_step_ends_with_the_weights_of_any_other(
    kind: str, sync_run: Make, reference: Any
) -> None:
    result = to_the_end(sync_run({"runtime.kind": kind}))
    assert result.digest == reference.digest
    same = ("reason", "rounds", "eval_return", "env_steps", "max_staleness", "interrupted")
    assert {name: getattr(result, name) for name in same} == {name: getattr(reference, name) for name in same}
    evals = [
        [event["version"] for event in read_events(run / "events.jsonl") if event["kind"] == "eval"]
        for run in (result.run_dir, reference.run_dir)
    ]
    assert evals == [[2, 4, 5]] * 2
    assert offbeat.digest(result.run_dir) == reference.digest
    assert offbeat.replay_run(result.run_dir).identical


def test_a_replay_goes_step_by_step_too(tmp_path: Path) -> None:
    quiet = {"observe.console": "none", "observe.tensorboard": False, "eval.at_end": False}
    small = {"algorithm.num_epochs": 1, "runtime.kind": "inline", "async_training.off_policy_degree": 0}
    settings = [{**quiet, **small, "run.dir": str(tmp_path / name)} for name in ("train", "steps")]
    expected = offbeat.train("cartpole-ppo-per", rounds=3, overrides=settings[0])
    result = to_the_end(offbeat.SyncRun("cartpole-ppo-per", rounds=3, overrides=settings[1]))
    assert result.digest == expected.digest


def test_collecting_may_stay_enabled_all_along(sync_run: Make, reference: Any) -> None:
    with sync_run() as run:
        run.enable_data_collection()
        while not run.finished:
            assert run.wait()
            run.sync_update()
    assert run.result.digest == reference.digest


@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_the_loop_of_synchronous_trainers_runs_as_it_stands(
    kind: str, sync_run: Make, reference: Any
) -> None:
    with sync_run({"runtime.kind": kind}) as agent:
        while not agent.finished:
            while not agent.should_sync_update():
                if not agent.collection_enabled:
                    break
            if agent.should_sync_update():
                agent.sync_update()
    assert agent.result.digest == reference.digest


def test_a_loop_that_asks_for_what_nobody_collects_ends_with_the_line_that_is_missing(sync_run: Make) -> None:
    with sync_run() as run:
        run.disable_data_collection()
        error = refused(lambda: [None for _ in iter(run.should_sync_update, True)])
        assert "round 0 waits for enable_data_collection()" in str(error)
    with sync_run(name="again", rounds=1) as run:
        for _ in range(2):
            assert not run.should_sync_update(), "asking once is no loop"
            run.disable_data_collection()


def test_a_loop_that_only_asks_ends_when_the_run_is_asked_to_end(sync_run: Make) -> None:
    with sync_run({"algorithm.segments_per_round": 3, "async_training.batch_generation_interval": 60}) as run:
        run.enable_data_collection()
        signal.raise_signal(signal.SIGINT)
        while not run.should_sync_update():
            pass
    assert run.result.interrupted


def test_sync_update_returns_the_metrics_of_its_round_with_weights_published(sync_run: Make) -> None:
    with sync_run() as run:
        rounds = [one_round(run) for _ in range(ROUNDS)]
        assert run.finished
    assert [metrics["pace/train_count"] for metrics in rounds] == [1, 2, 3, 4, 5]
    assert [metrics["weights/param_sync_count"] for metrics in rounds] == [1, 2, 3, 4, 5]
    written = read_rounds(run.result.run_dir / "events.jsonl")
    assert [record["metrics"]["learn/loss"] for record in written] == [one["learn/loss"] for one in rounds]


# ---------------------------------------------------------------- one operation at a time


def test_nothing_is_collected_before_it_is_enabled(sync_run: Make) -> None:
    with sync_run() as run:
        assert not run.should_sync_update()
        assert coordinator_of(run).counts().issued == 0
        run.enable_data_collection()
        assert run.wait()
        assert num_arrived(run) == 2
        assert run.should_sync_update()
        assert run.version == 0, "training waits for its word"
        run.sync_update()
        assert run.version == 1


def coordinator_of(run: offbeat.SyncRun) -> Coordinator:
    return run._current().pace


def settle(run: offbeat.SyncRun) -> None:
    """Let everything start."""
    while not coordinator_of(run).is_paused or coordinator_of(run).num_up < 2:
        run._current().step()


def num_arrived(run: offbeat.SyncRun) -> int:
    counts = coordinator_of(run).counts()
    return counts.ready + counts.trained


def test_what_is_under_way_comes_in_after_collecting_is_disabled(sync_run: Make, reference: Any) -> None:
    with sync_run({"runtime.kind": "threads"}) as run:
        while not run.finished:
            run.enable_data_collection()
            while coordinator_of(run).counts().issued < 2 * (run.version + 1):
                run.wait(timeout_s=0)
            run.disable_data_collection()
            assert run.wait()
            run.sync_update()
    assert run.result.digest == reference.digest


def test_without_collecting_no_segment_comes_after_a_round(sync_run: Make) -> None:
    with sync_run() as run:
        one_round(run)
        run.disable_data_collection()
        assert coordinator_of(run).counts().issued == num_arrived(run) == 2
        assert not run.should_sync_update()


def test_wait_gives_up_after_its_time(sync_run: Make) -> None:
    with sync_run({"algorithm.segments_per_round": 3, "async_training.batch_generation_interval": 60}) as run:
        run.enable_data_collection()
        assert not run.wait(timeout_s=0.01)
        assert "cannot be trained yet" in str(refused(run.sync_update))


def refused(do: Callable[[], Any]) -> OffbeatError:
    with pytest.raises(OffbeatError) as caught:
        do()
    return caught.value


def test_waiting_for_what_nobody_collects_is_an_error_that_says_so(sync_run: Make) -> None:
    with sync_run() as run:
        settle(run)
        error = refused(run.wait)
        assert "round 0 waits for enable_data_collection() (segments: 0 ready" in str(error)


def test_sync_update_too_early_says_what_is_missing(sync_run: Make) -> None:
    slow = faulty("Slow", sleep_s=0.01, sleep_sigma=0.0)
    with sync_run({**slow, "runtime.kind": "threads"}) as run:
        settle(run)
        assert "waits for enable_data_collection()" in str(refused(run.sync_update))
        run.enable_data_collection()
        text = str(refused(run.sync_update))
        assert "round 0 cannot be trained yet: round 0 waits for segments (" in text
        assert "still out: ticket 0 on collector 0" in text
        assert "Call wait() first" in text


# ---------------------------------------------------------------- misuse


@pytest.mark.parametrize("degree", [-1, 2])
def test_an_asynchronous_run_is_refused_before_anything_is_written(
    degree: int, sync_run: Make, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"set async_training\.off_policy_degree to 0, or use offbeat\.train"
    ):
        sync_run({"async_training.off_policy_degree": degree})
    assert list(tmp_path.iterdir()) == []


def test_the_dial_stays_at_zero(sync_run: Make) -> None:
    class Turn(offbeat.Callback):
        def on_start(self, info: Any) -> None:
            with pytest.raises(ConfigError, match="strictly synchronous"):
                info.turn(1)

    assert to_the_end(sync_run(callbacks=[Turn()], rounds=1)).rounds == 1


def test_outside_its_block_a_run_does_nothing(sync_run: Make) -> None:
    run = sync_run(rounds=1)
    operations: list[Callable[[], Any]] = [
        *(run.enable_data_collection, run.disable_data_collection, run.wait),
        *(run.should_sync_update, run.sync_update, lambda: run.finished, lambda: run.version),
    ]
    for operation in operations:
        assert "goes in a with-block" in str(refused(operation))
    assert "has no result" in str(refused(lambda: run.result))
    to_the_end(run)
    assert run.finished
    for operation in [one for one in operations if one is not operations[5]]:
        assert "the run has ended: go on with SyncRun.resume('" in str(refused(operation))
    assert "used once" in str(refused(run.__enter__))


def test_after_the_last_round_there_is_nothing_to_do(sync_run: Make) -> None:
    with sync_run(rounds=1) as run:
        one_round(run)
        assert run.finished
        assert not run.should_sync_update()
        run.disable_data_collection()
        for operation in (run.enable_data_collection, run.wait, run.sync_update):
            assert "all 1 rounds are trained: go on while not run.finished" in str(refused(operation))
        assert "has no result" in str(refused(lambda: run.result))
    assert run.result.reason == "all rounds trained"


def test_a_run_that_cannot_be_made_leaves_no_trace(
    sync_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offbeat.observe import wandb

    def refuse(*_: Any) -> None:
        raise ConfigError("no such project")

    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    monkeypatch.setattr(wandb.WandbSink, "__init__", refuse)
    with pytest.raises(ConfigError, match="no such project"), sync_run({"observe.use_wandb": True}):
        pass
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_an_error_in_the_block_ends_the_run_and_goes_up(kind: str, sync_run: Make, tmp_path: Path) -> None:
    run = sync_run({"runtime.kind": kind, "checkpoint.interval_rounds": 1})

    def fail() -> None:
        with run:
            one_round(run)
            run.enable_data_collection()
            raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        fail()
    assert run.finished
    last = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert (last["kind"], last["failed"], last["reason"]) == ("finish", True, "division by zero")
    assert "has no result" in str(refused(lambda: run.result))
    assert offbeat.resume(tmp_path / "run").rounds == ROUNDS


def test_leaving_early_saves_the_run_which_can_be_resumed_at_once_or_step_by_step(
    sync_run: Make, reference: Any
) -> None:
    for name in ("first", "second"):
        with sync_run(name=name) as run:
            one_round(run)
            run.enable_data_collection()
        assert run.result.rounds == 1
        assert run.result.reason == f"its with-block was left after 1 of {ROUNDS} rounds"
        directory = run.result.run_dir
        again = (
            to_the_end(offbeat.SyncRun.resume(directory)) if name == "first" else offbeat.resume(directory)
        )
        assert again.digest == reference.digest
        assert offbeat.replay_run(directory).identical


def test_a_resumed_run_keeps_its_overrides_and_refuses_others(sync_run: Make) -> None:
    with sync_run(rounds=2) as run:
        pass
    directory = run.result.run_dir
    longer = to_the_end(offbeat.SyncRun.resume(directory, overrides={"run.rounds": 3}))
    assert longer.rounds == 3
    assert offbeat.load_config(directory / "config.yaml").run.rounds == 3
    with pytest.raises(ConfigError, match=r"env\.num_envs cannot change"):
        offbeat.SyncRun.resume(directory, overrides={"env.num_envs": 2})
    with pytest.raises(ConfigError, match="strictly synchronous"):
        offbeat.SyncRun.resume(directory, overrides={"async_training.off_policy_degree": 1})


def test_ctrl_c_in_the_middle_of_a_step_leaves_the_block_with_a_checkpoint(
    sync_run: Make, reference: Any
) -> None:
    reached = []
    with sync_run() as run:
        while not run.finished:
            one_round(run)
            if run.version == 2:
                signal.raise_signal(signal.SIGINT)
        reached.append("the end of the block")  # the signal was heard in the next step
    assert run.result.interrupted
    assert run.result.rounds == 2
    assert run.result.reason == "interrupted by SIGINT"
    assert reached == []
    assert to_the_end(offbeat.SyncRun.resume(run.result.run_dir)).digest == reference.digest


class Stop(offbeat.Callback):
    """Asks for the end of a run in ``when``, by the means ``how``."""

    def __init__(self, when: str, how: str) -> None:
        self._when, self._how = when, how

    def on_start(self, info: Any) -> None:
        self._ask = getattr(info, self._how)

    def on_round(self, info: Any) -> None:
        if self._when == "round" and info.version == 2:
            self._ask("enough")

    def on_eval(self, info: Any) -> None:
        if self._when == "eval" and info.version == 2:
            self._ask("enough")


@pytest.mark.parametrize("how", ["stop", "finish"])
@pytest.mark.parametrize("when", ["round", "eval"])
@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_what_a_callback_asks_for_ends_the_loop(when: str, how: str, kind: str, sync_run: Make) -> None:
    result = to_the_end(sync_run({"runtime.kind": kind}, callbacks=[Stop(when, how)]))
    assert (result.rounds, result.reason) == (2, "enough")
    assert not result.interrupted


def test_a_goal_that_was_reached_before_is_known_at_once(sync_run: Make) -> None:
    with sync_run({"algorithm.num_steps": 192}, rounds=3) as run:
        while not run.finished:
            one_round(run)
    assert run.result.metrics["rollout/total_episodes"] >= 100
    again = offbeat.SyncRun.resume(run.result.run_dir, overrides={"run.rounds": 9, "run.stop_return": 1.0})
    with again:
        assert again.finished
    assert again.result.rounds == 3


# ---------------------------------------------------------------- what happens to runs


def test_a_learner_that_crashes_in_a_step_is_made_good_within_it(
    sync_run: Make, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offbeat.algorithms.ppo.learner import PPOLearner

    train, crashes = PPOLearner.train, []

    def crash_once(self: PPOLearner, batch: Any) -> Any:
        if batch.version == 3 and not crashes:
            crashes.append(batch.version)
            raise RuntimeError("the learner's driver reset itself")
        return train(self, batch)

    monkeypatch.setattr(PPOLearner, "train", crash_once)
    versions = []
    with sync_run({"checkpoint.interval_rounds": 2, "run.restart_delay_s": 0}) as run:
        while not run.finished:
            versions.append(one_round(run)["pace/train_count"])
    assert versions == [1, 2, 3, 4, 5]
    assert run.result.restarts == 1
    assert run.result.digest == reference.digest


def test_a_user_who_takes_time_is_no_stall(sync_run: Make, reference: Any) -> None:
    with sync_run({"async_training.batch_timeout": 0.1, "async_training.generation_timeout": 0.05}) as run:
        while not run.finished:
            run.enable_data_collection()
            time.sleep(0.15)
            run.wait()
            run.disable_data_collection()
            time.sleep(0.15)
            run.sync_update()
    assert run.result.digest == reference.digest


def held_pipeline(batch_timeout: float) -> Pipeline:
    settings = Settings(
        async_training=AsyncTrainingConfig(batch_timeout=batch_timeout),
        runtime=RuntimeConfig(kind="inline", num_workers=1),
        checkpoint=CheckpointConfig(enabled=False),
    )
    nothing = {"train": lambda segments: None, "weights": lambda: None}
    return Pipeline(collect=lambda ticket, weights: 1, **nothing, settings=settings)


def test_a_pipeline_can_be_opened_and_its_closed_gates_are_no_stall() -> None:
    with held_pipeline(batch_timeout=0.05).open(2, stepwise=True) as run:
        for _ in range(3):
            run.step(at_most_s=0.04)
        assert "enable_data_collection" in run.pace.waiting_for()
        run.ask(GatesSet(collect=True, until=2))
        while not run.finished:
            run.step()
        assert run.report().version == 2


def test_a_run_that_waits_for_more_than_its_user_stalls_as_ever() -> None:
    def stand_still() -> None:
        with held_pipeline(batch_timeout=0.05).open(2) as run:
            for _ in range(20):
                run.pace.members.up.clear()
                run.step(at_most_s=0.02)

    with pytest.raises(StallError, match="batch_timeout"):
        stand_still()
