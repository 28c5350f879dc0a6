"""The driver with a fake runtime and an injected clock: its deadlines, and the order of what it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from offbeat.checkpoint import CheckpointManager
from offbeat.config.models import AsyncTrainingConfig, EvalConfig, LearnerConfig, RunSection, RuntimeConfig
from offbeat.errors import (
    CheckpointError,
    CollectError,
    DivergedError,
    LearnerLost,
    OffbeatError,
    StallError,
    TrainError,
)
from offbeat.observe import Callback, FinishInfo, RoundInfo, ScheduleLog
from offbeat.observe.events import EventLog, read_events
from offbeat.pacing import Coordinator
from offbeat.pacing.events import (
    Broken,
    CollectorDown,
    CollectorUp,
    CollectorWorked,
    DialTurned,
    EvalDone,
    Event,
    Finished,
    GatesSet,
    HealthChanged,
    Issued,
    LearnerDown,
    Notice,
    Published,
    PublishFailed,
    Request,
    Restarting,
    RoundTrained,
    Saved,
    SaveFailed,
    SegmentArrived,
    SnapshotTaken,
    Stalled,
    Started,
    StopRequested,
    TrainStarted,
)
from offbeat.run.driver import Driver
from offbeat.run.parts import StartPoint
from offbeat.run.restarts import OpenRun, RestartPolicy
from offbeat.run.waits import Wait, Waits
from tests.unit.run_fakes import Clock, FakeRun

HOUR_S = 3600.0


# ---------------------------------------------------------------- asked to stop


def stopped_in_a_round(directory: Path, **settings: Any) -> FakeRun:
    """A run that trains its first round when it is asked to end within 8 seconds."""
    run = FakeRun(directory, silent=["train"], checkpoint_at_end=True, **settings)
    run.write_files()
    run.start()
    run.step_until(lambda: run.runtime.batch is not None)
    run.requests.append(StopRequested("interrupted by SIGTERM", within_s=8.0))
    run.driver.step()
    return run


def test_a_run_that_is_suspended_while_it_ends_still_ends_with_its_checkpoint(tmp_path: Path) -> None:
    run = stopped_in_a_round(tmp_path)
    run.runtime.suspended_s = HOUR_S
    run.driver.step()
    run.steps(4)
    run.runtime.finish_training()
    run.complete()
    run.driver.close(None)
    (saved,) = run.of(Saved)
    assert (saved.version, saved.path.is_dir()) == (1, True)
    assert CheckpointManager(tmp_path / "checkpoints").load().version == 1
    (finished,) = run.of(Finished)
    assert (finished.version, finished.reason, finished.error) == (1, "interrupted by SIGTERM", None)
    assert run.of(Stalled) == []


def test_a_run_that_does_not_end_in_time_stalls_without_a_checkpoint(tmp_path: Path) -> None:
    run = stopped_in_a_round(tmp_path)
    with pytest.raises(StallError, match="asked to stop, the run did not end in time") as stall:
        run.pass_time(9.0)
    assert "the end of the run waits for round 0 since 8.0 s (limit 8 s, run.stop_timeout_s)" in str(
        stall.value
    )
    assert run.of(Saved) == []
    assert len(run.of(Stalled)) == 1


def test_suspensions_do_not_add_up_to_the_time_that_a_stop_may_take(tmp_path: Path) -> None:
    run = stopped_in_a_round(tmp_path)
    for _ in range(5):
        run.runtime.suspended_s = HOUR_S
        run.steps(4)  # a second each
    with pytest.raises(StallError, match="asked to stop"):
        run.pass_time(4.0)


def test_a_second_request_to_stop_does_not_extend_the_first(tmp_path: Path) -> None:
    run = stopped_in_a_round(tmp_path)
    run.pass_time(6.0)
    run.requests.append(StopRequested("again", within_s=8.0))
    with pytest.raises(StallError, match="asked to stop"):
        run.pass_time(3.0)


def test_a_stricter_request_to_stop_holds(tmp_path: Path) -> None:
    run = stopped_in_a_round(tmp_path)
    run.requests.append(StopRequested("at once", within_s=1.0))
    with pytest.raises(StallError, match="asked to stop"):
        run.pass_time(3.0)


def test_a_run_that_was_asked_to_stop_says_so(tmp_path: Path) -> None:
    run = stopped_in_a_round(tmp_path)
    run.runtime.finish_training()
    run.complete()
    assert run.driver.is_stopped
    run.driver.close(None)
    (finished,) = run.of(Finished)
    assert (finished.reason, finished.error, finished.stopped) == ("interrupted by SIGTERM", None, True)
    assert read_events(tmp_path / "events.jsonl")[-1]["stopped"] is True


def test_a_run_that_is_ended_at_once_says_so_before_its_parts_end(tmp_path: Path) -> None:
    run = stopped_in_a_round(tmp_path)
    told: list[bool] = []
    run.runtime.close = lambda at_once=False: told.append(at_once and bool(run.of(Finished)))  # type: ignore[method-assign]
    run.driver.close(KeyboardInterrupt())
    assert told == [True]
    (finished,) = run.of(Finished)
    assert (finished.reason, finished.error, finished.stopped) == ("stopped at once, as asked", None, True)


def test_a_run_that_ends_by_itself_was_not_stopped(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, checkpoint_at_end=True)
    run.write_files()
    run.start()
    run.complete()
    run.driver.close(None)
    assert [event.stopped for event in run.of(Finished)] == [False]


def test_a_run_that_could_save_nothing_ends_as_failed(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, silent=["snapshot"], checkpoint_at_end=True)
    run.write_files()
    run.start()
    run.step_until(lambda: run.driver.saving.is_pending)
    run.runtime.events.append(SnapshotTaken({"bad": {1, 2}}, {}))
    run.complete()
    run.driver.close(None)
    (failed,) = run.of(SaveFailed)
    assert (failed.version, "learner['bad'] is a builtins.set" in failed.reason) == (3, True)
    (finished,) = run.of(Finished)
    assert isinstance(finished.error, CheckpointError)
    assert finished.reason.startswith("all rounds trained, but nothing could be saved: learner['bad']")
    kinds = [event["kind"] for event in read_events(tmp_path / "events.jsonl")]
    assert "checkpoint_failed" in kinds


def test_a_request_to_stop_without_a_limit_waits_as_long_as_the_round_takes(tmp_path: Path) -> None:
    run = FakeRun(silent=["train"]).start()
    run.step_until(lambda: run.runtime.batch is not None)
    run.requests.append(StopRequested("enough"))
    run.pass_time(100.0)
    run.runtime.finish_training()
    run.complete()
    assert run.notices() == []


def test_a_run_whose_last_snapshot_came_late_has_ended_all_the_same(tmp_path: Path) -> None:
    run = stopped_in_a_round(tmp_path)
    run.runtime.silent.add("snapshot")
    run.runtime.finish_training()
    run.pass_time(7.8)
    assert not run.driver.finished
    run.clock.now_s += 1.0  # this process was not woken in time, and in between the snapshots came
    run.runtime.silent.clear()
    for _ in run.runtime.named("snapshot"):
        run.runtime.snapshot()
    run.complete()
    assert len(run.of(Saved)) == 1
    assert run.of(Stalled) == []


def test_a_request_to_stop_limits_the_last_snapshot_too(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, silent=["snapshot"], checkpoint_at_end=True).start()
    run.step_until(lambda: run.driver.finish is not None)
    run.requests.append(StopRequested("interrupted by SIGTERM", within_s=8.0))
    with pytest.raises(StallError, match="asked to stop, the run did not end in time"):
        run.pass_time(10.0)
    assert run.notices()[0].startswith("interrupted by SIGTERM: ")


@pytest.mark.parametrize("when", [HealthChanged, RoundTrained])
def test_a_run_that_is_suspended_while_it_handles_an_event_still_ends_with_its_checkpoint(
    when: type, tmp_path: Path
) -> None:
    run = stopped_in_a_round(tmp_path)
    run.driver.observe({when: lambda event, now_s: jump()})

    def jump() -> None:
        run.clock.now_s += HOUR_S

    run.runtime.silent.add("snapshot")
    run.runtime.events.append(HealthChanged("evaluator", "up"))
    run.steps(4)
    run.runtime.finish_training()
    run.steps(4)
    run.runtime.silent.clear()
    for _ in run.runtime.named("snapshot"):
        run.runtime.snapshot()
    run.complete()
    assert len(run.of(Saved)) == 1
    assert run.of(Stalled) == []


def test_a_run_that_is_suspended_while_it_saves_still_ends_with_its_last_checkpoint(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path, silent=["snapshot"], checkpoint_interval=1, checkpoint_at_end=True, off_policy_degree=1
    )
    run.write_files()
    run.start()
    run.step_until(lambda: bool(run.runtime.named("snapshot")))
    run.runtime.silent = {"train"}
    run.runtime.batch = None
    run.step_until(lambda: run.runtime.batch is not None)
    run.requests.append(StopRequested("interrupted by SIGTERM", within_s=8.0))
    run.driver.step()

    def jump(event: Saved, now_s: float) -> None:
        run.clock.now_s += HOUR_S

    run.driver.observe({Saved: jump})
    run.runtime.snapshot()
    run.steps(4)
    run.runtime.finish_training()
    run.complete()
    assert run.of(Saved)[-1].version == run.pace.version
    assert run.of(Stalled) == []


def test_weights_that_were_published_at_the_end_are_not_waited_for(tmp_path: Path) -> None:
    limits = {"async_training": {"sync_timeout": 5.0}}
    run = FakeRun(tmp_path, silent=["snapshot"], limits=limits, checkpoint_at_end=True).start()
    run.step_until(lambda: bool(run.runtime.named("snapshot")))
    run.pass_time(60.0)
    assert "publish" not in run.driver.waits
    run.runtime.silent.clear()
    for _ in run.runtime.named("snapshot"):
        run.runtime.snapshot()
    run.complete()
    assert len(run.of(Saved)) == 1


# ---------------------------------------------------------------- all deadlines

WAITS = {
    "async_training.generation_timeout",
    "runtime.start_timeout_s",
    "runtime.restart_backoff_s",
    "runtime.train_timeout_s",
    "async_training.sync_timeout",
    "eval.timeout_s",
    "async_training.batch_timeout",
    "run.stop_timeout_s",
    "run.restart_delay_s",
}
"""Every deadline of a run."""
OF_RUNTIMES = {
    "runtime.start_timeout_s",  # Ray's learner, store and evaluator, and ranks; collectors: a row of Waits
    "runtime.heartbeat_timeout_s",  # signs of life of processes and actors
    "runtime.ray.start_timeout_s",  # resources of a cluster
    "learner.timeout_s",  # ranks, among themselves
}
"""Timeouts that a runtime keeps by itself: what came of them is an event."""


def timeouts_of(model: type[BaseModel], section: str) -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= timeouts_of(field.annotation, f"{section}.{name}")
        elif "timeout" in name:
            found.add(f"{section}.{name}")
    return found


def test_every_deadline_of_a_run_is_a_row_of_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    begin = Waits.begin

    def note(waits: Waits, wait: Wait, now_s: float) -> None:
        seen.add(wait.limit_key)
        begin(waits, wait, now_s)

    monkeypatch.setattr(Waits, "begin", note)
    runs = Restarted(tmp_path, eval_interval=1, checkpoint_interval=1, checkpoint_at_end=True, rounds=50)
    with runs.open() as opened:
        runs.runs[0].step_until(lambda: bool(runs.runs[0].of(Saved)))
        runs.runs[0].runtime.events.append(LearnerDown("killed"))
        while len(runs.runs) == 1:
            opened.step()
        run = runs.runs[1]
        run.step_until(lambda: run.pace.version == 2)
        run.runtime.silent.add("collect")
        for _ in range(2):
            run.runtime.kill_collector(0, "killed")
            run.driver.step()
        run.runtime.silent.clear()
        run.requests.append(StopRequested("enough", within_s=8.0))
        opened.complete()
    assert seen == WAITS


def test_every_timeout_of_the_settings_is_a_deadline_of_a_run_or_of_a_runtime() -> None:
    sections: dict[str, type[BaseModel]] = {
        "run": RunSection,
        "runtime": RuntimeConfig,
        "eval": EvalConfig,
        "learner": LearnerConfig,
        "async_training": AsyncTrainingConfig,
    }
    fields = set().union(*(timeouts_of(model, name) for name, model in sections.items()))
    assert {name for name in WAITS if "timeout" in name} <= fields
    assert fields <= WAITS | OF_RUNTIMES


def test_a_new_run_waits_for_its_collectors_its_weights_and_progress() -> None:
    run = FakeRun(silent=["start_collector", "publish"]).start()
    rows = sorted(str(row) for row in run.driver.waits.rows(run.clock.now_s))
    assert [row.split(" since ")[0] for row in rows] == [
        "collectors waits for learner (weights)",
        "round 0 waits for any event",
        "round 0 waits for collector_0 to start",
        "round 0 waits for collector_1 to start",
    ]
    assert run.driver.waits.phase() == "starting"


# ---------------------------------------------------------------- what each deadline does


def test_a_collector_that_hangs_is_killed_and_replaced() -> None:
    limits = {"async_training": {"generation_timeout": 10.0, "batch_timeout": 100.0}}
    run = FakeRun(silent=["collect"], limits=limits).start()
    run.pass_time(9.0)
    assert run.runtime.named("kill_collector") == []
    run.pass_time(1.5)
    text = "hung: ticket {} took more than 10 s (async_training.generation_timeout)"
    assert run.runtime.named("kill_collector") == [(0, text.format(0)), (1, text.format(1))]
    run.driver.step()
    assert [loss.component for loss in run.driver.collectors.losses] == ["collector_0", "collector_1"]
    assert len(run.runtime.named("start_collector")) == 4
    run.runtime.silent.clear()
    run.runtime.kill_collector(0, "the test goes on")
    run.runtime.kill_collector(1, "the test goes on")
    run.complete()
    assert run.pace.counts().trained == 6


def test_a_collector_that_does_not_start_is_killed_and_started_again() -> None:
    run = FakeRun(silent=["start_collector"], limits={"runtime": {"start_timeout_s": 5.0}}).start()
    run.pass_time(5.5)
    why = "did not start within 5 s (runtime.start_timeout_s)"
    assert run.runtime.named("kill_collector") == [(0, why), (1, why)]
    run.driver.step()
    assert len(run.runtime.named("start_collector")) == 4


def test_a_collector_that_no_other_could_replace_may_start_as_late_as_it_likes() -> None:
    run = FakeRun(num_workers=1, limits={"runtime": {"start_timeout_s": 5.0}}, replaces_collectors=False)
    run.runtime.silent.add("start_collector")
    run.start()
    run.pass_time(60.0)
    assert run.runtime.named("kill_collector") == []
    rows = [str(row) for row in run.driver.waits.rows(run.clock.now_s)]
    assert any(row.startswith("round 0 waits for collector_0 to start since 6") for row in rows)
    assert any(row.endswith("(no limit)") for row in rows)
    assert run.driver.waits.phase() == "starting"
    run.runtime.events.append(CollectorUp(0))
    run.complete()


def test_a_replacement_that_starts_does_not_hide_the_phase_of_the_run() -> None:
    run = FakeRun(silent=["train"], off_policy_degree=2).start()
    assert run.driver.waits.phase() == "starting"
    run.step_until(lambda: run.runtime.batch is not None)
    run.runtime.silent.add("start_collector")
    run.runtime.kill_collector(0, "killed")
    run.driver.step()
    assert run.driver.waits.phase() == "training round 0"


def test_a_replacement_that_is_lost_at_once_waits_before_the_next() -> None:
    run = FakeRun(silent=["collect"], limits={"runtime": {"restart_backoff_s": 2.0}}).start()
    run.driver.step()
    for _ in range(2):
        run.runtime.kill_collector(0, "killed")
        run.driver.step()
    assert len(run.runtime.named("start_collector")) == 3
    assert run.of(HealthChanged)[-1] == HealthChanged("collector_0", "waiting", "started again in 2 s")
    run.pass_time(1.7)
    assert len(run.runtime.named("start_collector")) == 3
    run.pass_time(0.5)
    assert len(run.runtime.named("start_collector")) == 4
    assert run.of(HealthChanged)[-1] == HealthChanged("collector_0", "starting")


def test_without_pauses_a_collector_is_started_once_for_each_loss() -> None:
    run = FakeRun(silent=["collect"], limits={"runtime": {"restart_backoff_s": 0.0}}).start()
    run.steps(4)
    starts = len(run.runtime.named("start_collector"))
    for number in range(1, 3):
        run.runtime.events.append(CollectorDown(0, "killed"))
        run.steps(4)
        assert len(run.runtime.named("start_collector")) == starts + number


def test_a_journal_that_cannot_be_opened_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(OffbeatError, match=r"run directory .* cannot be written: .* Free disk space"):
        FakeRun(tmp_path).write_files()


def test_a_pause_is_waited_for_no_longer_than_it_takes() -> None:
    run = FakeRun(silent=["collect"], limits={"runtime": {"restart_backoff_s": 0.1}}).start()
    run.driver.step()
    for _ in range(2):
        run.runtime.kill_collector(0, "killed")
        run.driver.step()
    before_s = run.clock.now_s
    run.step_until(lambda: len(run.runtime.named("start_collector")) == 4)
    assert run.clock.now_s - before_s == pytest.approx(0.1, abs=0.02)


def test_a_round_that_does_not_end_stalls_the_run() -> None:
    limits = {"runtime": {"train_timeout_s": 50.0}, "async_training": {"batch_timeout": 10.0}}
    run = FakeRun(silent=["train"], limits=limits).start()
    with pytest.raises(
        StallError, match=r"a round took more than 50 s \(train_timeout_s\): round 0"
    ) as stall:
        run.pass_time(60.0)
    text = str(stall.value)
    assert "round 0 waits for learner since 50.0 s (limit 50 s, runtime.train_timeout_s)" in text
    assert "round 0 waits for any event since" in text
    assert text.endswith("learner was here:\n  in train")
    (stalled,) = run.of(Stalled)
    assert stalled.stacks == {"learner": "in train"}
    assert "runtime.train_timeout_s" in [row["limit_key"] for row in stalled.waits]


@pytest.mark.parametrize(
    ("report", "stalls"),
    [
        (CollectorWorked(0, 0.0, {"tokens": 0}), True),
        (CollectorWorked(0, 0.0, {"tokens": 1}), False),
        (CollectorWorked(0, 0.5), False),
    ],
)
def test_a_collector_that_reports_work_is_progress_and_one_that_waits_is_none(
    report: CollectorWorked, stalls: bool
) -> None:
    run = FakeRun(silent=["collect"], limits={"async_training": {"batch_timeout": 10.0}}).start()

    def pass_time() -> None:
        for _ in range(12):
            run.runtime.events.append(report)
            run.pass_time(1.0)

    if stalls:
        with pytest.raises(StallError, match=r"nothing happened for 10 s \(batch_timeout\)"):
            pass_time()
    else:
        pass_time()


def test_a_publish_is_waited_for_though_an_older_one_came_meanwhile() -> None:
    limits = {"async_training": {"sync_timeout": 5.0, "off_policy_degree": 2, "batch_timeout": 60.0}}
    run = FakeRun(silent=["publish"], limits=limits, off_policy_degree=2, rounds=9).start()
    run.runtime.events.append(Published(0))
    run.step_until(lambda: run.driver.pace.version == 2)
    run.runtime.events.append(Published(1))
    run.steps(1)
    with pytest.raises(StallError, match=r"collectors waits for learner \(weights\)"):
        run.pass_time(10.0)


def test_a_snapshot_that_does_not_come_stalls_the_run(tmp_path: Path) -> None:
    limits = {"runtime": {"train_timeout_s": 50.0}, "async_training": {"batch_timeout": 10.0}}
    run = FakeRun(tmp_path, silent=["snapshot"], limits=limits, checkpoint_at_end=True).start()
    with pytest.raises(StallError, match=r"checkpoint 3 waits for learner since 50\.\d s \(limit 50 s"):
        run.pass_time(60.0)


def test_the_last_snapshot_has_a_deadline_however_many_came_before_it(tmp_path: Path) -> None:
    limits = {"runtime": {"train_timeout_s": 50.0}}
    run = FakeRun(tmp_path, silent=["snapshot"], limits=limits, checkpoint_at_end=True).start()
    run.step_until(lambda: bool(run.runtime.named("snapshot")))
    run.runtime.silent.clear()
    for _ in run.runtime.named("snapshot")[1:]:
        run.runtime.snapshot()
    run.driver.step()
    assert not run.driver.finished
    with pytest.raises(StallError, match=r"runtime\.train_timeout_s"):
        run.pass_time(60.0)


def test_weights_that_are_not_published_stall_the_run() -> None:
    run = FakeRun(silent=["publish"], limits={"async_training": {"sync_timeout": 5.0}}).start()
    with pytest.raises(StallError, match=r"did not publish its weights in 5 s \(sync_timeout\)") as stall:
        run.pass_time(6.0)
    row = "collectors waits for learner (weights) since 5.0 s (limit 5 s, async_training.sync_timeout)"
    assert row in str(stall.value)


def test_an_evaluation_that_does_not_end_is_given_up() -> None:
    run = FakeRun(silent=["evaluate"], limits={"eval": {"timeout_s": 5.0}}, eval_interval=1, rounds=1).start()
    run.complete()
    why = "the evaluation of version 1 took more than 5 s (eval.timeout_s)"
    assert run.runtime.named("give_up_evaluation") == [(1, why)]
    assert run.notices() == [f"the evaluation of version 1 failed: {why}"]
    assert run.driver.meter.eval_metrics == {}
    assert run.driver.finish is not None and not run.driver.finish.failed


def test_an_evaluation_that_was_given_up_is_not_heard_any_more() -> None:
    run = FakeRun(
        silent=["evaluate"], limits={"eval": {"timeout_s": 5.0}}, eval_interval=1, rounds=2, async_eval=True
    ).start()
    run.step_until(lambda: bool(run.runtime.named("give_up_evaluation")))
    run.runtime.events.append(EvalDone(1, {"eval/return_mean": 9.0}, 6.0))
    run.complete()
    assert [event.metrics for event in run.of(EvalDone) if event.version == 1] == [None]


def test_a_run_in_which_nothing_happens_stalls() -> None:
    limits = {"async_training": {"generation_timeout": 1000.0, "batch_timeout": 20.0}}
    run = FakeRun(silent=["collect"], limits=limits).start()
    headline = (
        r"nothing happened for 20 s \(batch_timeout\): round 0 waits for segments \(0 ready\), still out"
    )
    with pytest.raises(StallError, match=headline) as stall:
        run.pass_time(25.0)
    assert "waits for collector_1 (ticket 1) since" in str(stall.value)


@pytest.mark.parametrize("slow", ["train", "snapshot", "evaluate"])
def test_work_with_a_deadline_of_its_own_may_take_longer_than_the_run_waits_for_events(
    slow: str, tmp_path: Path
) -> None:
    limits = {"async_training": {"batch_timeout": 20.0}}
    run = FakeRun(tmp_path, silent=[slow], limits=limits, eval_interval=1, checkpoint_interval=1).start()
    run.pass_time(300.0)
    assert run.of(Stalled) == []
    assert run.of(TrainStarted)


def test_every_event_is_progress() -> None:
    limits = {"async_training": {"generation_timeout": 1000.0, "batch_timeout": 20.0}}
    run = FakeRun(silent=["collect"], limits=limits).start()
    for _ in range(10):
        run.pass_time(15.0)
        run.runtime.events.append(HealthChanged("evaluator", "up"))
        run.driver.step()
    with pytest.raises(StallError, match="nothing happened"):
        run.pass_time(25.0)


def test_closed_gates_are_no_stall() -> None:
    limits = {"async_training": {"batch_timeout": 20.0}}
    run = FakeRun(limits=limits, stepwise=True).start()
    run.pass_time(200.0)
    assert run.pace.is_paused
    run.requests.append(GatesSet(collect=True, until=0))
    run.pass_time(30.0)
    assert run.pace.counts().ready == 2
    run.requests.append(GatesSet(collect=False, until=3))
    run.complete()
    assert run.of(Stalled) == []


def test_a_run_in_which_nothing_happens_after_its_warm_up_stalls_as_soon_as_any_other() -> None:
    limits = {"async_training": {"generation_timeout": 1000.0, "batch_timeout": 20.0}}
    run = FakeRun(
        silent=["collect"], limits=limits, mode="replay", warmup_s=19.0, off_policy_degree=1
    ).start()
    with pytest.raises(StallError, match="nothing happened for 20 s"):
        run.pass_time(100.0)
    assert run.clock.now_s == pytest.approx(1039.0, abs=1.0)


def test_to_warm_up_is_no_stall() -> None:
    limits = {"async_training": {"batch_timeout": 20.0}}
    run = FakeRun(limits=limits, mode="replay", warmup_s=100.0, off_policy_degree=1).start()
    run.step_until(lambda: bool(run.of(TrainStarted)))
    assert run.clock.now_s == pytest.approx(1100.0, abs=1.0)
    assert run.of(Stalled) == []


@pytest.mark.parametrize(
    ("silent", "options"),
    [
        ("start_collector", {}),
        ("publish", {}),
        ("collect", {}),
        ("train", {}),
        ("evaluate", {"eval_interval": 1}),
        ("snapshot", {"checkpoint_interval": 1}),
    ],
)
def test_time_in_which_the_machine_was_suspended_counts_for_nobody(
    silent: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run = FakeRun(tmp_path, silent=[silent], **options).start()
    run.steps(20)
    for _ in range(3):
        run.runtime.suspended_s = 24 * HOUR_S
        run.steps(8)
    assert run.of(Stalled) == []
    assert run.runtime.named("kill_collector") == run.runtime.named("give_up_evaluation") == []


def test_a_process_that_is_a_little_late_was_not_suspended() -> None:
    run = FakeRun(silent=["train"], limits={"runtime": {"train_timeout_s": 50.0}}).start()
    run.step_until(lambda: run.runtime.batch is not None)
    for _ in range(20):
        run.runtime.suspended_s = 1.5
        run.driver.step()
    with pytest.raises(StallError, match="train_timeout_s"):
        run.pass_time(20.0)


def test_what_arrived_while_nobody_looked_is_not_late() -> None:
    """A driver that was busy itself takes what came in before it judges."""
    limits = {"async_training": {"generation_timeout": 10.0}}
    run = FakeRun(silent=["collect"], limits=limits, rounds=1)
    run.driver.observe({Notice: lambda event, _: busy(60.0)})

    def busy(seconds: float) -> None:
        run.clock.now_s += seconds
        run.runtime.silent.clear()
        for ticket in _tickets(run):
            run.runtime.collect(ticket)

    run.start()
    run.step_until(lambda: len(_tickets(run)) == 2)
    run.driver.faults.append("an observer takes a minute over this")
    run.complete()
    assert run.driver.collectors.losses == []
    assert run.runtime.named("kill_collector") == []


def _tickets(run: FakeRun) -> list[Any]:
    assert isinstance(run.pace, Coordinator)
    return list(run.pace.ledger.outstanding())


# ---------------------------------------------------------------- order


class Watcher:
    """Notes what the pace knew when an observer was told."""

    def __init__(self, run: FakeRun) -> None:
        self.notes: list[tuple[str, Any]] = []
        pace, note = run.pace, self._note
        run.driver.observe(
            {
                CollectorUp: lambda event, _: note(event, pace.num_up >= event.collector + 1),
                SegmentArrived: lambda event, _: note(event, pace.counts().ready >= 1),
                RoundTrained: lambda event, _: note(event, pace.version == event.version),
                Published: lambda event, _: note(event, pace.published == event.version),
                EvalDone: lambda event, _: note(event, True),
                DialTurned: lambda event, _: note(event, pace.degree == event.off_policy_degree),
                StopRequested: lambda event, _: note(event, pace.is_ending),
            }
        )

    def _note(self, event: Event, is_known: bool) -> None:
        self.notes.append((type(event).__name__, is_known))


def test_observers_see_an_event_after_the_pace_applied_it() -> None:
    run = FakeRun(eval_interval=1, rounds=50, off_policy_degree=0)
    watcher = Watcher(run)
    run.start()
    run.step_until(lambda: run.pace.version == 2)
    run.requests.extend([DialTurned(3), StopRequested("enough")])
    run.complete()
    assert len({name for name, _ in watcher.notes}) == 7
    assert all(is_known for _, is_known in watcher.notes), watcher.notes


def test_new_weights_are_on_their_way_before_observers_hear_of_the_round() -> None:
    run = FakeRun()
    published: list[int] = []
    run.driver.observe(
        {
            RoundTrained: lambda event, _: published.append(
                run.runtime.named("publish")[-1] == (event.version,)
            )
        }
    )
    run.start().complete()
    assert published == [True] * 3


def test_each_fact_is_told_once_and_in_order() -> None:
    run = FakeRun(rounds=2, num_workers=1, eval_at_end=True).start()
    run.complete()
    run.driver.close(None)
    assert run.kinds() == [
        *("Started", "HealthChanged", "CollectorUp", "Published"),
        *("Issued", "SegmentArrived", "TrainStarted", "RoundTrained", "Published"),
        *("Issued", "SegmentArrived", "TrainStarted", "RoundTrained", "Published"),
        *("EvalDone", "SnapshotTaken", "Finished"),
    ]


def test_a_ticket_is_told_before_its_collector_gets_it() -> None:
    run = FakeRun(rounds=1, num_workers=1)
    given: list[bool] = []
    run.driver.observe({Issued: lambda event, _: given.append((event.ticket.number,) in _given(run))})
    run.driver.observe({TrainStarted: lambda event, _: given.append(bool(run.runtime.named("train")))})
    run.start().complete()
    assert given == [False, False]


def _given(run: FakeRun) -> list[Any]:
    return run.runtime.named("collect")


def test_metrics_of_a_round_are_there_for_all_other_observers() -> None:
    run = FakeRun()
    versions: list[Any] = []
    run.driver.observe(
        {RoundTrained: lambda event, _: versions.append(run.driver.meter.metrics["pace/train_count"])}
    )
    run.start().complete()
    assert versions == [1, 2, 3]


def test_signals_reach_the_pace_with_the_round() -> None:
    class Listening(Coordinator):
        def apply(self, event: Event, now_s: float) -> Any:
            if isinstance(event, RoundTrained):
                signals.append(event.signals.round_s)
            return super().apply(event, now_s)

    signals: list[float] = []
    FakeRun(make_pace=Listening).start().complete()
    assert len(signals) == 3 and all(signal > 0 for signal in signals)


def test_the_pace_decides_once_for_all_events_of_a_step() -> None:
    class Counting(Coordinator):
        def decide(self, now_s: float) -> Any:
            log.append("decide")
            return super().decide(now_s)

        def apply(self, event: Event, now_s: float) -> Any:
            log.append("apply")
            return super().apply(event, now_s)

    log: list[str] = []
    run = FakeRun(make_pace=Counting).start()
    run.driver.step()
    assert log == ["apply"] * 3 + ["decide"], "two collectors are up, and weights are published"


def test_a_checkpoint_relies_on_the_line_of_its_own_round(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, checkpoint_interval=1, off_policy_degree=1)
    run.write_files()
    run.start().complete()
    run.driver.close(None)
    manager = CheckpointManager(tmp_path / "checkpoints", keep=10)
    text = (tmp_path / "schedule.jsonl").read_bytes()
    assert manager.versions()
    for version in manager.versions():
        parts = manager.load(version).parts
        lines = text[: parts["recorder"]["schedule_offset"]].decode().splitlines()
        rounds = [line for line in lines if '"kind":"round"' in line]
        assert len(rounds) == version
        assert f'"version":{version - 1},' in rounds[-1]
        assert parts["meter"]["totals"]["trained_samples"] == 2 * version, "observers had heard of it, too"


def test_a_checkpoint_is_of_the_time_it_was_asked_for(tmp_path: Path) -> None:
    """The learner's snapshot comes later; everything else is as it was when it was asked for."""
    run = FakeRun(tmp_path, silent=["snapshot"], checkpoint_interval=1, off_policy_degree=1, rounds=2)
    run.write_files()
    run.start()
    run.step_until(lambda: run.pace.version == 2)
    run.runtime.silent.clear()
    run.runtime.snapshot()
    run.driver.step()
    (saved,) = run.of(Saved)
    assert saved.version == 1
    assert CheckpointManager(tmp_path / "checkpoints").load(1).parts["coordinator"]["version"] == 1


# ---------------------------------------------------------------- faults, errors, ends


def test_faults_of_files_become_notices() -> None:
    run = FakeRun().start()
    run.driver.faults.append("the disk is full")
    run.driver.step()
    assert run.notices() == ["the disk is full"]
    run.complete()
    run.driver.faults.append("at the very end")
    run.driver.close(None)
    assert run.notices() == ["the disk is full", "at the very end"]
    assert run.kinds()[-1] == "Finished"


def test_faults_of_the_last_writes_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = FakeRun(tmp_path)
    run.write_files()
    run.start().complete()

    def full(journal: Any, lines: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventLog, "_write", full)
    run.driver.close(None)
    assert "No space left on device" in caplog.text
    assert not run.driver.faults


class Failing(Callback):
    """Raises in a round; ``ended`` is what it heard of the end."""

    def __init__(self) -> None:
        self.ended: list[FinishInfo] = []

    def on_round(self, info: RoundInfo) -> None:
        raise ZeroDivisionError("mine")

    def on_finish(self, info: FinishInfo) -> None:
        self.ended.append(info)


def test_an_observer_that_fails_ends_the_run_and_all_files_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(ScheduleLog, "close", lambda log: closed.append("schedule"))
    failing = Failing()
    run = FakeRun(tmp_path, callbacks=[failing])
    run.write_files()
    run.driver.observe({}, close=lambda: closed.append("last"))
    policy = RestartPolicy(run.settings.run, CheckpointManager(tmp_path / "checkpoints"), RealClock())
    with (
        pytest.raises(ZeroDivisionError, match="mine"),
        OpenRun(lambda _: run.driver, StartPoint(), policy, run.requests, tmp_path) as opened,
    ):
        opened.complete()
    assert sorted(closed) == ["last", "schedule"]
    assert run.runtime.num_closed == 1
    (ended,) = failing.ended
    assert isinstance(ended.error, ZeroDivisionError)
    events = read_events(tmp_path / "events.jsonl")
    assert (events[-1]["kind"], events[-1]["failed"]) == ("finish", True)


def test_an_observer_that_fails_at_the_end_keeps_no_file_open(tmp_path: Path) -> None:
    class AtTheEnd(Callback):
        def on_finish(self, info: FinishInfo) -> None:
            raise KeyError("too late")

    run = FakeRun(tmp_path, callbacks=[AtTheEnd()])
    closed: list[str] = []
    run.driver.observe({}, close=lambda: closed.append("first"))
    run.write_files()
    run.driver.observe({}, close=lambda: closed.append("last"))
    run.start().complete()
    with pytest.raises(KeyError, match="too late"):
        run.driver.close(None)
    assert closed == ["last", "first"]


def test_a_driver_that_never_started_tells_nobody_of_its_end() -> None:
    run = FakeRun()
    run.driver.close(None)
    assert run.seen == [] and run.runtime.num_closed == 1


def test_a_runtime_that_cannot_start_is_a_run_that_began_and_ended() -> None:
    run = FakeRun()

    def start(*args: Any) -> None:
        raise OffbeatError("no port is free")

    run.runtime.start = start  # type: ignore[method-assign]
    with pytest.raises(OffbeatError, match="no port"):
        run.start()
    run.driver.close(OffbeatError("no port is free"))
    assert [type(event) for event in run.seen] == [Started, Finished]


def test_an_error_of_the_runtime_ends_the_run() -> None:
    run = FakeRun().start()
    run.runtime.events.append(Broken(TrainError("the learner raised")))
    with pytest.raises(TrainError, match="the learner raised"):
        run.driver.step()


def test_a_learner_that_is_lost_ends_the_driver_after_observers_heard_of_it() -> None:
    run = FakeRun().start()
    run.runtime.events.append(LearnerDown("killed by SIGKILL"))
    with pytest.raises(LearnerLost, match="SIGKILL"):
        run.driver.step()
    assert run.of(LearnerDown)


def test_a_loss_that_is_no_number_ends_the_round_before_anybody_hears_of_it() -> None:
    run = FakeRun(silent=["train"]).start()
    run.step_until(lambda: run.runtime.batch is not None)
    run.runtime.finish_training(loss=float("nan"))
    with pytest.raises(DivergedError, match="round 0 diverged: learn/loss is nan"):
        run.driver.step()
    assert run.of(RoundTrained) == []


def test_a_collector_that_raises_before_its_first_segment_is_a_bug_to_be_seen() -> None:
    run = FakeRun().start()
    run.runtime.events.append(CollectorDown(0, "collector 0 raised: mine", raised=True))
    with pytest.raises(CollectError, match="mine"):
        run.driver.step()


def test_a_collector_that_raises_later_is_replaced() -> None:
    run = FakeRun(rounds=50).start()
    run.step_until(lambda: run.pace.version == 1)
    run.runtime.events.append(CollectorDown(0, "collector 0 raised: mine", raised=True))
    run.driver.step()
    (down,) = run.of(CollectorDown)
    assert down.restorable, "its environments continue from its last segment"


def test_publishing_that_fails_is_told_and_tried_again() -> None:
    run = FakeRun(silent=["publish"]).start()
    run.runtime.events.append(PublishFailed(0, "no room"))
    run.driver.step()
    assert run.notices() == ["publishing version 0 failed: no room"]
    run.runtime.silent.clear()
    run.complete()
    assert run.runtime.named("publish")[:2] == [(0,), (0,)]


# ---------------------------------------------------------------- restarts


class RealClock:
    """A clock for the pause before a restart, which takes no time.

    The first sleep takes ``suspended_s`` more; ``on_sleep`` is called in each.
    """

    def __init__(self, suspended_s: float = 0.0, on_sleep: Callable[[], None] = lambda: None) -> None:
        self._now_s = 0.0
        self._suspended_s, self._on_sleep = suspended_s, on_sleep

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._on_sleep()
        self._now_s += seconds + self._suspended_s
        self._suspended_s = 0.0

    def date(self, form: str) -> str:
        return form


class Restarted:
    """A run of several drivers, one for each start; each has the observers of a run directory."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._directory = directory
        self._options = options
        self.requests: deque[Request] = deque()
        self.runs: list[FakeRun] = []
        self.points: list[StartPoint] = []
        self.clock = RealClock()

    def make(self, point: StartPoint) -> Driver:
        run = FakeRun(self._directory, requests=self.requests, clock=Clock(), **self._options)
        run.write_files(point)
        self.runs.append(run)
        self.points.append(point)
        return run.driver

    def open(self) -> OpenRun:
        settings = RunSection(**self._options.get("limits", {}).get("run", {}))
        checkpoints = CheckpointManager(self._directory / "checkpoints")
        policy = RestartPolicy(settings, checkpoints, self.clock)
        return OpenRun(self.make, StartPoint(), policy, self.requests, self._directory)


def test_a_run_that_is_restarted_says_so_instead_of_that_it_finished(tmp_path: Path) -> None:
    runs = Restarted(tmp_path, checkpoint_interval=1, checkpoint_at_end=True, rounds=4)
    with runs.open() as opened:
        first = runs.runs[0]
        while not first.of(Saved):
            opened.step()
        first.runtime.events.append(LearnerDown("killed by SIGKILL"))
        report = opened.complete()
    first, second = runs.runs
    (restarting,) = first.of(Restarting)
    assert (restarting.kind, restarting.reason, restarting.attempt) == ("restart", "killed by SIGKILL", 1)
    assert isinstance(restarting.error, LearnerLost)
    assert first.of(Finished) == []
    assert first.runtime.num_closed == second.runtime.num_closed == 1
    assert runs.points[1].resumed and second.of(Started) == [Started(restarting.version, resumed=True)]
    assert [event.error for event in second.of(Finished)] == [None]
    assert (report.version, report.restarts) == (4, 1)
    assert [loss.component for loss in report.losses] == ["learner"]
    kinds = [event["kind"] for event in read_events(tmp_path / "events.jsonl")]
    assert kinds.count("finish") == 1 and "restart" in kinds
    rounds = [line for line in (tmp_path / "schedule.jsonl").read_text().splitlines() if "round" in line]
    assert len(rounds) == 4, "one story without repetition"


@pytest.mark.parametrize(("delay_s", "suspended_s"), [(0.0, 0.0), (8.0, 0.0), (8.0, HOUR_S)])
def test_the_pause_before_a_restart_is_extended_by_a_suspension(
    tmp_path: Path, delay_s: float, suspended_s: float
) -> None:
    limits = {"run": {"restart_delay_s": delay_s}}
    runs = Restarted(tmp_path, checkpoint_interval=1, rounds=3, limits=limits)
    runs.clock = RealClock(suspended_s)
    with runs.open() as opened:
        while not runs.runs[0].of(Saved):
            opened.step()
        runs.runs[0].runtime.events.append(LearnerDown("gone"))
        opened.complete()
    assert len(runs.runs) == 2
    assert runs.clock.now_s() == pytest.approx(delay_s + suspended_s, abs=0.2)


def test_the_pause_before_a_restart_is_a_row_and_ends_when_the_run_is_asked_to_stop(tmp_path: Path) -> None:
    rows: list[str] = []
    runs = Restarted(tmp_path, checkpoint_interval=1, rounds=3, limits={"run": {"restart_delay_s": 8.0}})

    def on_sleep() -> None:
        rows.extend(str(row) for row in opened._policy.waits.rows(runs.clock.now_s()))
        if len(rows) == 3:
            runs.requests.append(StopRequested("enough"))

    runs.clock = RealClock(on_sleep=on_sleep)
    with runs.open() as opened:
        while not runs.runs[0].of(Saved):
            opened.step()
        runs.runs[0].runtime.events.append(LearnerDown("gone"))
        report = opened.complete()
    assert report.stopped and len(rows) == 3
    assert rows[0] == "the run waits for restart 1 of 3 since 0.0 s (limit 8 s, run.restart_delay_s)"
    assert not opened._policy.waits.rows(0.0)


def test_requests_hold_across_restarts_and_of_gates_the_last(tmp_path: Path) -> None:
    runs = Restarted(tmp_path, checkpoint_interval=1, rounds=3, stepwise=True)
    with runs.open() as opened:
        opened.ask(GatesSet(collect=True, until=0))
        opened.ask(GatesSet(collect=True, until=2))
        first = runs.runs[0]
        while not first.of(Saved):
            opened.step()
        first.runtime.events.append(LearnerDown("gone"))
        while len(runs.runs) == 1:
            opened.step()
        assert list(runs.requests) == [GatesSet(collect=True, until=2)]
        opened.ask(GatesSet(collect=True, until=3))
        assert opened.complete().version == 3


def test_a_run_without_a_checkpoint_ends_with_its_learner(tmp_path: Path) -> None:
    runs = Restarted(tmp_path, silent=["collect"])

    def lose() -> None:
        with runs.open() as opened:
            runs.runs[0].runtime.events.append(LearnerDown("gone"))
            opened.complete()

    with pytest.raises(LearnerLost):
        lose()
    (run,) = runs.runs
    assert [type(event.error) for event in run.of(Finished)] == [LearnerLost]
    assert run.of(Restarting) == []


def test_what_a_start_has_to_say_is_told_after_it_started(tmp_path: Path) -> None:
    run = FakeRun()
    run.start(StartPoint(0, warnings=("a torn checkpoint was passed over",), resumed=True))
    assert run.kinds()[:2] == ["Started", "Notice"]
    assert run.of(Notice)[0].text == "a torn checkpoint was passed over"
