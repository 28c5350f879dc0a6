"""The three runtimes: the same results at k = 0, the same promises above it."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat import Callback, PerWorker, Pipeline, Segment
from offbeat.config.models import AsyncTrainingConfig, CheckpointConfig, EvalConfig, RuntimeConfig
from offbeat.errors import CollectError, ConfigError, OffbeatError, ReplayError, StallError, TrainError
from offbeat.observe.console import Display
from offbeat.pipeline import Settings
from offbeat.roles import report_progress
from offbeat.types import ArraySpec, Batch
from tests.callbacks import EndAt

KINDS = ("inline", "threads", "processes")


def collect(ticket: Any, weights: Any) -> Any:
    rng = np.random.default_rng(ticket.seed)
    return {"x": weights["w"] + rng.normal(size=64), "version": ticket.version}


class Averager:
    """A learner whose weights depend on every bit of every segment and on their order."""

    def __init__(self) -> None:
        self.w = np.zeros(64)
        self.hash = hashlib.sha256()
        self.trained: list[list[int]] = []

    def train(self, segments: list[Any]) -> dict[str, float]:
        for segment in segments:
            self.w = 0.9 * self.w + 0.1 * segment["x"]
        self.hash.update(self.w.tobytes())
        self.trained.append([segment["version"] for segment in segments])
        return {"loss": float(self.w.sum())}

    def weights(self) -> dict[str, Any]:
        return {"w": self.w.copy()}


class Saved(Averager):
    """A learner role with a state, so that its runs can be resumed and repeated."""

    def train(self, batch: Batch) -> dict[str, float]:
        return super().train([segment.data for segment in batch.segments])

    def state_dict(self) -> Any:
        return {"w": self.w.copy()}

    def load_state_dict(self, state: Any) -> None:
        self.w = state["w"].copy()


def run(kind: str, rounds: int = 12, learner: Averager | None = None, **options: Any) -> tuple[Any, Averager]:
    learner = learner or Averager()
    options = {"collect": collect, "num_workers": 2, **options}
    pipeline = Pipeline(train=learner.train, weights=learner.weights, runtime=kind, **options)
    return pipeline.run(rounds=rounds), learner


def serial_loop(rounds: int, segments_per_round: int, seed: int = 0) -> Averager:
    """The plain loop that k = 0 has to equal."""
    from offbeat.seeding import derive_seed
    from offbeat.types import Ticket

    learner, number = Averager(), 0
    for version in range(rounds):
        weights, segments = learner.weights(), []
        for _ in range(segments_per_round):
            seed_of_ticket = derive_seed(seed, "collect", number)
            segments.append(collect(Ticket(number, 0, version, version, seed_of_ticket), weights))
            number += 1
        learner.train(segments)
    return learner


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segments_per_round", [1, 2, 5])
def test_zero_is_zero(kind: str, segments_per_round: int) -> None:
    _, learner = run(kind, off_policy_degree=0, segments_per_round=segments_per_round)
    assert learner.hash.digest() == serial_loop(12, segments_per_round).hash.digest()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", [1, 3])
def test_bound_holds_and_nothing_is_wasted(kind: str, degree: int) -> None:
    report, learner = run(kind, rounds=40, off_policy_degree=degree, num_workers=3)
    ages = [v - version for v, versions in enumerate(learner.trained) for version in versions]
    assert max(ages) <= degree
    assert report.counts.issued == report.counts.trained == 40 * 3
    assert report.counts.dropped == report.counts.lost == 0


@pytest.mark.parametrize("kind", KINDS)
def test_auto_dial_stays_within_its_bound(kind: str) -> None:
    settings = Settings(async_training=AsyncTrainingConfig(off_policy_degree=-1, auto_max=2))
    _, learner = run(kind, rounds=40, settings=settings)
    assert max(v - version for v, versions in enumerate(learner.trained) for version in versions) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_raising_collector_stops_the_run_with_its_own_traceback(kind: str) -> None:
    def raising(ticket: Any, weights: Any) -> Any:
        if ticket.number == 3:
            raise ValueError("the environment broke")
        return collect(ticket, weights)

    with pytest.raises(CollectError, match=r"(?s)ticket 3.*in raising.*ValueError: the environment broke"):
        run(kind, collect=raising, off_policy_degree=1)


@pytest.mark.parametrize("kind", KINDS)
def test_raising_learner_stops_the_run_with_its_own_traceback(kind: str) -> None:
    def train(segments: list[Any]) -> None:
        raise FloatingPointError("the loss is gone")

    with pytest.raises(TrainError, match=r"(?s)round 0.*FloatingPointError: the loss is gone"):
        Pipeline(collect=collect, train=train, weights=Averager().weights, runtime=kind).run(rounds=3)


@pytest.mark.parametrize("kind", KINDS)
def test_failing_evaluation_does_not_stop_training(kind: str) -> None:
    def evaluate(weights: Any) -> float:
        raise RuntimeError("no display")

    report, _ = run(kind, evaluate=evaluate)
    assert report.version == 12
    assert report.eval_metrics == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_evaluation_judges_the_version_it_is_keyed_by(kind: str, asynchronous: bool) -> None:
    results: dict[int, float] = {}

    class Keep(Callback):
        def on_eval(self, info: Any) -> None:
            results[info.version] = info.metrics["eval/return_mean"]

    class Counting(Averager):
        def train(self, segments: list[Any]) -> dict[str, float]:
            self.w = self.w + 1.0
            return {}

    settings = Settings(
        async_training=AsyncTrainingConfig(enable_async_eval=asynchronous),
        eval=EvalConfig(interval_rounds=4),
    )
    learner = Counting()
    options = {"evaluate": lambda weights: weights["w"][0], "settings": settings, "callbacks": [Keep()]}
    run(kind, rounds=12, learner=learner, **options)
    assert results == {version: float(version) for version in results}
    assert 12 in results
    if not asynchronous:
        assert set(results) == {4, 8, 12}


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_dial_can_be_turned_while_running(kind: str) -> None:
    degrees = []

    class Turn(Callback):
        def on_start(self, info: Any) -> None:
            self.turn = info.turn

        def on_round(self, info: Any) -> None:
            degrees.append(info.metrics["pace/off_policy_degree"])
            if info.version in (10, 20):
                self.turn(3 if info.version == 10 else 0)

    _, learner = run(kind, rounds=40, off_policy_degree=0, callbacks=[Turn()])
    assert degrees[8] == 0 and 3 in degrees and degrees[-1] == 0
    assert max(v - version for v, versions in enumerate(learner.trained) for version in versions) <= 3


def test_dial_refuses_what_the_run_cannot_keep() -> None:
    settings = Settings(async_training=AsyncTrainingConfig(off_policy_degree=2, weight_sync_interval=3))
    pipeline = Pipeline(collect=collect, train=lambda s: None, weights=lambda: None, settings=settings)
    with pytest.raises(ConfigError, match="weight_sync_interval"):
        pipeline.set_off_policy_degree(1)


@pytest.mark.parametrize("kind", KINDS)
def test_stop_ends_cleanly_after_the_round_at_hand(kind: str) -> None:
    report, _ = run(kind, rounds=1000, callbacks=[EndAt(5)], off_policy_degree=1)
    assert report.reason == "enough"
    assert 5 <= report.version < 1000


@pytest.mark.parametrize("kind", KINDS)
def test_publishing_is_tried_again_and_then_given_up(kind: str) -> None:
    calls = 0

    def fails_twice() -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            raise OSError("no room")
        return learner.weights()

    learner = Averager()
    dial = AsyncTrainingConfig(sync_retry_delay=0.01, max_sync_retries=3)
    options = {"collect": collect, "runtime": kind, "settings": Settings(async_training=dial)}
    report = Pipeline(train=learner.train, weights=fails_twice, **options).run(rounds=5)
    assert report.version == 5

    def always_fails() -> dict[str, Any]:
        raise OSError("no room")

    with pytest.raises(OffbeatError, match=r"(?s)publishing weights failed 4 times.*no room"):
        Pipeline(train=learner.train, weights=always_fails, **options).run(rounds=5)


def test_stall_names_who_waits_for_whom() -> None:
    released = threading.Event()

    def slow(ticket: Any, weights: Any) -> Any:
        released.wait(timeout=20)
        return collect(ticket, weights)

    settings = Settings(async_training=AsyncTrainingConfig(batch_timeout=0.3))
    try:
        with pytest.raises(StallError, match=r"round 0 waits for segments.*ticket 0 on collector 0"):
            run("threads", collect=slow, settings=settings)
    finally:
        released.set()


def test_hanging_thread_is_named_and_cannot_be_replaced() -> None:
    released = threading.Event()

    def hang(ticket: Any, weights: Any) -> Any:
        released.wait(timeout=20)

    settings = Settings(async_training=AsyncTrainingConfig(generation_timeout=0.3))
    try:
        with pytest.raises(StallError, match=r"collector 0 hung.*runtime.kind=processes"):
            run("threads", collect=hang, settings=settings)
    finally:
        released.set()


def test_round_that_does_not_end_is_named() -> None:
    released = threading.Event()
    runtime = RuntimeConfig(kind="threads", num_workers=1, train_timeout_s=0.3)
    pipeline = Pipeline(
        collect=collect,
        train=lambda segments: released.wait(timeout=20) and None,
        weights=Averager().weights,
        settings=Settings(runtime=runtime),
    )
    try:
        with pytest.raises(StallError, match=r"train_timeout_s\): round 0 is being trained"):
            pipeline.run(rounds=2)
    finally:
        released.set()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_evaluation_that_does_not_end_is_given_up(kind: str) -> None:
    def evaluate(weights: Any) -> float:
        time.sleep(20)
        return 1.0

    notices = []

    class Keep(Callback):
        def on_notice(self, text: str) -> None:
            notices.append(text)

    settings = Settings(
        async_training=AsyncTrainingConfig(enable_async_eval=True),
        eval=EvalConfig(interval_rounds=4, timeout_s=0.5),
    )
    report, _ = run(kind, evaluate=evaluate, settings=settings, callbacks=[Keep()])
    assert report.version == 12
    assert any("eval.timeout_s" in text for text in notices)
    notices.clear()
    settings = Settings(eval=EvalConfig(timeout_s=0.5))
    report, _ = run(kind, evaluate=evaluate, settings=settings, callbacks=[Keep()])
    assert report.version == 12, "training waits for an evaluation only as long as it may take"
    assert any("eval.timeout_s" in text for text in notices)


@pytest.mark.parametrize("kind", KINDS)
def test_the_phase_tells_how_far_learner_and_evaluator_are(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []

    class Listening(Display):
        def refresh(self, phase: Callable[[], str]) -> None:
            phases.append(phase())

    class Slow(Averager):
        def train(self, segments: list[Any]) -> dict[str, float]:
            report_progress("compiling")
            time.sleep(0.4)
            return super().train(segments)

    def evaluate(weights: Any) -> float:
        for episode in range(1, 4):
            time.sleep(0.4)
            report_progress(f"episode {episode} of 3")
        time.sleep(0.4)
        return 1.0

    monkeypatch.setattr("offbeat.run.observers.make_console", lambda *args: Listening())
    settings = Settings(eval=EvalConfig(interval_rounds=2, at_end=False))

    def slow(ticket: Any, weights: Any) -> Any:
        if ticket.number == 0:
            report_progress("compiling")
            time.sleep(0.6)
            report_progress("")
        return collect(ticket, weights)

    report, _ = run(kind, 2, Slow(), collect=slow, evaluate=evaluate, settings=settings)
    assert report.version == 2
    training = [f"training round {version}" for version in range(2)]
    evaluating = [f"evaluating version 2: episode {episode} of 3" for episode in (1, 2, 3)]
    if kind == "inline":  # it shows nothing while it works
        assert not any("compiling" in phase or "episode" in phase for phase in phases)
    else:
        assert {f"{phase}: compiling" for phase in training} & set(phases)
        assert "collecting: compiling" in phases
        assert [phase for phase in dict.fromkeys(phases) if "episode" in phase] == evaluating
        assert "episode" not in phases[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluator_that_cannot_be_made_costs_the_evaluation_only(kind: str) -> None:
    def make(context: Any) -> Any:
        raise RuntimeError("no licence")

    report, _ = run(kind, evaluate=PerWorker(make))
    assert report.version == 12
    assert report.eval_metrics == {}


def test_driver_that_was_busy_does_not_blame_its_collectors() -> None:
    class Busy(Callback):
        def on_round(self, info: Any) -> None:
            if info.version == 3:
                time.sleep(1.2)

    lost = []

    class Keep(Callback):
        def on_collector_lost(self, info: Any) -> None:
            lost.append(info)

    settings = Settings(async_training=AsyncTrainingConfig(generation_timeout=0.8))
    report, _ = run("processes", settings=settings, callbacks=[Busy(), Keep()], off_policy_degree=2)
    assert report.version == 12
    assert not lost


@pytest.mark.parametrize("kind", KINDS)
def test_many_tickets_per_lane_with_large_answers(kind: str) -> None:
    def large(ticket: Any, weights: Any) -> Any:
        return {**collect(ticket, weights), "ballast": np.ones(30_000)}

    report, learner = run(kind, collect=large, rounds=3, segments_per_round=300)
    assert report.counts.trained == 900
    assert learner.hash.digest() == serial_loop(3, 300).hash.digest()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_may_grow(kind: str) -> None:
    class Growing(Averager):
        def weights(self) -> dict[str, Any]:
            return {"w": self.w.copy(), "ballast": np.ones(4000 * (1 + len(self.trained)))}

    report, _ = run(kind, rounds=60, learner=Growing(), off_policy_degree=3)
    assert report.version == 60


class Counter:
    """A collector object with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def collect(self, ticket: Any, weights: Any) -> Any:
        self.calls += 1
        return {"x": np.full(64, float(self.calls)), "version": ticket.version}


def test_each_lane_has_its_own_copy_of_a_collector_object() -> None:
    digests = {kind: run(kind, collect=Counter())[1].hash.hexdigest() for kind in KINDS}
    assert len(set(digests.values())) == 1


def test_learner_is_never_called_from_two_threads_at_once(tmp_path: Path) -> None:
    class Jealous(Saved):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def weights(self) -> Any:
            with self._alone():
                time.sleep(0.002)
                return super().weights()

        def state_dict(self) -> Any:
            with self._alone():
                time.sleep(0.002)
                return super().state_dict()

        def _alone(self) -> Any:
            assert self.lock.acquire(blocking=False), "called from two threads at once"
            return contextlib.closing(Releasing(self.lock))

    settings = Settings(checkpoint=CheckpointConfig(interval_rounds=1))
    learn = PerWorker(lambda context: Jealous())
    for kind in ("threads", "processes"):
        pipeline = Pipeline(
            collect=collect, train=learn, runtime=kind, run_dir=tmp_path / kind, settings=settings
        )
        assert pipeline.run(rounds=10).version == 10


class Releasing:
    def __init__(self, lock: Any) -> None:
        self.close = lock.release


def test_replay_mode_gives_the_same_weights_everywhere_and_keeps_its_ratio() -> None:
    digests = set()
    for kind in KINDS:
        report, learner = run(kind, rounds=12, mode="replay", replay_ratio=0.5, segments_per_round=2)
        assert report.counts.issued == report.counts.trained == 24
        digests.add(learner.hash.hexdigest())
    assert len(digests) == 1


def test_state_that_cannot_be_saved_costs_no_result() -> None:
    class Odd(Saved):
        def state_dict(self) -> Any:
            return {"w": object()}

    options = {"collect": collect, "train": PerWorker(lambda context: Odd())}
    report = Pipeline(runtime="inline", **options).run(rounds=3)
    assert report.version == 3
    assert report.digest is None


def test_replay_of_a_learner_object_starts_from_what_it_was(tmp_path: Path) -> None:
    class Copyable(Saved):
        def __init__(self) -> None:
            super().__init__()
            del self.hash

        def train(self, batch: Batch) -> dict[str, float]:
            self.w = 0.5 * self.w + batch.segments[0].data["x"]
            return {}

    options = {"collect": collect, "runtime": "threads", "off_policy_degree": 1}
    pipeline = Pipeline(train=Copyable(), run_dir=tmp_path / "copyable", **options)
    pipeline.run(rounds=8)
    assert pipeline.replay().identical
    pipeline = Pipeline(train=Saved(), run_dir=tmp_path / "not", **options)
    pipeline.run(rounds=2)
    with pytest.raises(ReplayError, match="PerWorker"):
        pipeline.replay()


class GrowingCollector:
    """Returns more data every time, as foreign code may."""

    def collect(self, ticket: Any, weights: Any) -> Any:
        return {
            "x": np.full(64, 1.0),
            "version": ticket.version,
            "ballast": np.ones(5000 * (ticket.number + 1)),
        }


def test_processes_carry_segments_of_any_size() -> None:
    report, learner = run("processes", collect=GrowingCollector(), rounds=20)
    assert report.version == 20


class InPlace:
    """Writes a pattern that shows whether a slot was reused too early."""

    def segment_spec(self) -> dict[str, ArraySpec]:
        return {"x": ArraySpec((64,), "float64"), "number": ArraySpec((1,), "int64")}

    def collect_into(self, ticket: Any, weights: Any, out: Any) -> Segment:
        out["x"][:] = ticket.number
        out["number"][0] = ticket.number
        return Segment(ticket, out, np.array([ticket.version]), {"env_steps": 64})

    def collect(self, ticket: Any, weights: Any) -> Segment:
        return self.collect_into(ticket, weights, {n: s.empty() for n, s in self.segment_spec().items()})

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class ChecksSlots:
    """A learner role that looks at its segments late."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def train(self, batch: Batch) -> dict[str, float]:
        time.sleep(0.005)
        for segment in batch.segments:
            assert (segment.data["x"] == segment.ticket.number).all()
            assert int(segment.data["number"][0]) == segment.ticket.number
            self.seen.append(segment.ticket.number)
        return {}

    def weights(self) -> Any:
        return {"w": np.zeros(4)}

    def state_dict(self) -> Any:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_not_reused_before_their_segment_was_trained(kind: str) -> None:
    learner = ChecksSlots()
    pipeline = Pipeline(
        collect=PerWorker(lambda context: InPlace()),
        train=learner,
        runtime=kind,
        num_workers=2,
        off_policy_degree=4,
        segments_per_round=3,
    )
    pipeline.run(rounds=30)
    assert sorted(learner.seen) == list(range(90))


def test_weights_are_required_for_plain_functions() -> None:
    with pytest.raises(ConfigError, match="weights="):
        Pipeline(collect=collect, train=lambda segments: None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", [0, 2])
def test_pipeline_of_ones_own_can_be_resumed_and_repeated(kind: str, degree: int, tmp_path: Path) -> None:
    def pipeline(name: str) -> Pipeline:
        return Pipeline(
            collect=collect,
            train=PerWorker(lambda context: Saved()),
            runtime=kind,
            num_workers=2,
            off_policy_degree=degree,
            run_dir=tmp_path / name,
        )

    pipeline("halves").run(rounds=6)
    with pytest.raises(ConfigError, match="already holds a run"):
        pipeline("halves").run(rounds=12)
    resumed = pipeline("halves").resume(rounds=12)
    assert resumed.version == 12
    whole = pipeline("whole").run(rounds=12)
    assert pipeline("halves").replay().identical
    assert pipeline("whole").replay().identical
    if degree == 0:
        assert resumed.digest == whole.digest
