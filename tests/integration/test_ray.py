"""The Ray runtime: the same results as the others, clear refusals, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat import PerWorker, Pipeline
from offbeat.config.models import (
    EvalConfig,
    LearnerConfig,
    RayConfig,
    RolloutConfig,
    RuntimeConfig,
    TrainerConfig,
)
from offbeat.errors import CollectError, ConfigError, LearnerLost, OffbeatError, TrainError
from offbeat.observe.events import read_schedule
from offbeat.pacing.events import Published, RoundTrained, SegmentArrived
from offbeat.pipeline import Settings
from offbeat.roles import WorkerContext
from offbeat.runtime.ray_placement import Node, another_placement, cpus_of, place, requests_of
from offbeat.runtime.spec import Assignment, CollectorState, RunSpec
from offbeat.runtime.worker import SyncTimeout
from offbeat.types import Batch, RemoteData, Ticket
from tests.conftest import SMALL
from tests.integration.test_runtimes import ChecksSlots, InPlace, collect

ray = pytest.importorskip("ray")
from offbeat.runtime.ray import RayRuntime  # noqa: E402
from offbeat.runtime.ray_actors import (  # noqa: E402
    PackedWeights,
    ProcessEnv,
    SegmentStoreActor,
    WeightsReader,
)
from offbeat.runtime.ray_cluster import Cluster  # noqa: E402
from offbeat.runtime.ray_refs import RemoteSegmentData  # noqa: E402

Run = Callable[..., Any]


# ---------------------------------------------------------------- placement, without Ray


def spec_of(num_collectors: int = 2, evaluate: Any = None, mode: Any = "stream", **sections: Any) -> RunSpec:
    role = PerWorker(lambda context: None)
    runtime = sections.pop("runtime", RuntimeConfig()).model_copy(update={"num_workers": num_collectors})
    return RunSpec(role, role, evaluate, Settings(runtime=runtime, **sections), mode=mode)  # type: ignore[arg-type]


def nodes(*totals: dict[str, float]) -> list[Node]:
    return [Node(f"id{index}", f"10.0.0.{index}", total) for index, total in enumerate(totals)]


def placed(spec: RunSpec, where: list[Node]) -> dict[str, str]:
    return {name: found.node.id for name, found in place(requests_of(spec), where, spec).items()}


def test_collectors_are_spread_and_the_learner_is_with_the_driver() -> None:
    spec = spec_of(4, evaluate=PerWorker(print), mode="replay", rollout=RolloutConfig(nnodes=2))
    found = placed(spec, nodes({"CPU": 4.0}, {"CPU": 4.0}, {"CPU": 4.0}))
    assert found == {
        "learner": "id0",
        "store": "id0",
        "collector_0": "id0",
        "collector_1": "id1",
        "collector_2": "id0",
        "collector_3": "id1",
        "evaluator": "id0",
    }
    assert cpus_of(requests_of(spec)) == 6


def test_what_does_not_fit_on_one_node_goes_to_the_next() -> None:
    assert placed(spec_of(3), nodes({"CPU": 2.0}, {"CPU": 2.0})) == {
        "learner": "id0",
        "collector_0": "id0",
        "collector_1": "id1",
        "collector_2": "id1",
    }


def test_named_resources_decide_where_collectors_live() -> None:
    ray_config = RayConfig(collector_resources={"CPU": 1.0, "far": 1.0})
    spec = spec_of(2, runtime=RuntimeConfig(ray=ray_config))
    found = placed(spec, nodes({"CPU": 8.0}, {"CPU": 2.0, "far": 2.0}))
    assert found == {"learner": "id0", "collector_0": "id1", "collector_1": "id1"}


@pytest.mark.parametrize(
    ("num_gpus", "num_lanes", "each"), [(1, 4, 0.25), (2, 3, 0.5), (4, 2, 2.0), (3, 2, 1.0), (2, 2, 1.0)]
)
def test_collectors_of_a_node_share_its_gpus_so_that_they_pack(
    num_gpus: int, num_lanes: int, each: float
) -> None:
    spec = spec_of(num_lanes, rollout=RolloutConfig(n_gpus_per_node=num_gpus))
    shares = [found.resources["GPU"] for found in requests_of(spec) if found.role == "collector"]
    assert shares == [each] * num_lanes


def test_ranks_are_one_actor_on_one_node_and_an_actor_each_on_several() -> None:
    learner = LearnerConfig(num_ranks=4)
    one = spec_of(1, learner=learner, trainer=TrainerConfig(n_gpus_per_node=4))
    assert requests_of(one)[0].resources == {"CPU": 4.0, "GPU": 4.0}
    alone = spec_of(1, trainer=TrainerConfig(device="cuda"))
    assert requests_of(alone)[0].resources == {"CPU": 1.0, "GPU": 1.0}, "a learner on a GPU asks for one"
    two = spec_of(1, learner=learner, trainer=TrainerConfig(n_gpus_per_node=2, nnodes=2))
    found = placed(two, nodes({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}))
    assert [found[name] for name in found if "learner" in name] == ["id0", "id0", "id1", "id1"]


def test_lost_node_is_left_for_the_one_with_most_room() -> None:
    spec = spec_of(2, rollout=RolloutConfig(nnodes=2))
    first = nodes({"CPU": 2.0}, {"CPU": 2.0})
    places = place(requests_of(spec), first, spec)
    lost = places.pop("collector_1")
    survivors = [first[0], Node("id2", "10.0.0.2", {"CPU": 1.0})]
    assert another_placement(lost, places.values(), survivors).node.id == "id2"
    assert another_placement(lost, places.values(), first[:1]) == lost, "without room it stays as it was"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"trainer": TrainerConfig(n_gpus_per_node=4)},
            r"learner asks.*GPU: 4 asked, at most 0.*Lower trainer.n_",
        ),
        ({"rollout": RolloutConfig(n_gpus_per_node=2)}, r"collector_0 asks.*Lower rollout.n_gpus_per_node"),
        ({"rollout": RolloutConfig(nnodes=3)}, r"rollout.nnodes=3 asks for 3 nodes, but Ray has 1"),
        (
            {"learner": LearnerConfig(num_ranks=2), "trainer": TrainerConfig(nnodes=2)},
            r"trainer.nnodes=2 asks for 2 nodes, but Ray has 1",
        ),
        (
            {"runtime": RuntimeConfig(ray=RayConfig(collector_resources={"far": 1.0}))},
            r"far: 1 asked, at most 0.*Lower runtime.ray.collector_resources.*ray start --resources",
        ),
        (
            {"runtime": RuntimeConfig(ray=RayConfig(collector_resources={"CPU": 4.0}))},
            r"2 x collector with CPU 4 each do not fit.*none for collector_1.*Lower runtime.num_workers",
        ),
    ],
)
def test_what_ray_cannot_hold_is_refused_in_words(sections: dict[str, Any], said: str) -> None:
    spec = spec_of(2, **sections)
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        placed(spec, nodes({"CPU": 7.0, "memory": 1e9, "node:10.0.0.0": 1.0}))


# ---------------------------------------------------------------- the same as elsewhere


class Remembers:
    """A learner whose weights depend on every bit of every segment and on their order."""

    def __init__(self) -> None:
        self.w = np.zeros(64)
        self.trained: list[list[int]] = []

    def train(self, batch: Any) -> dict[str, float]:
        for segment in batch.segments:
            self.w = 0.9 * self.w + 0.1 * segment.data["x"]
        self.trained.append([segment.data["version"] for segment in batch.segments])
        return {"learn/loss": float(self.w.sum())}

    def weights(self) -> dict[str, Any]:
        return {"w": self.w.copy()}

    def state_dict(self) -> Any:
        return {"w": self.w.copy(), "trained": self.trained}

    def load_state_dict(self, state: Any) -> None:
        self.w, self.trained = state["w"].copy(), state["trained"]


def pipeline(kind: str, **options: Any) -> Pipeline:
    role = options.pop("train", PerWorker(lambda context: Remembers()))
    return Pipeline(**{"collect": collect, "train": role, "runtime": kind, "num_workers": 2, **options})


@pytest.mark.parametrize(("mode", "segments_per_round"), [("stream", 5), ("replay", 1)])
def test_zero_is_zero(mode: Any, segments_per_round: int, shared_ray: None) -> None:
    options = {"mode": mode, "replay_ratio": 0.5 if mode == "replay" else None}
    digests = {
        pipeline(kind, segments_per_round=segments_per_round, **options).run(rounds=8).digest
        for kind in ("inline", "ray")
    }
    assert len(digests) == 1


class Large(Remembers):
    """Weights too large to travel in a message."""

    def weights(self) -> dict[str, Any]:
        return {"w": self.w.copy(), "ballast": np.full(20_000, self.w[0])}


def collect_large(ticket: Any, weights: Any) -> Any:
    """A segment too large to travel in a message, which depends on every number of the weights."""
    data = collect(ticket, weights)
    return {**data, "x": data["x"] + weights["ballast"].mean(), "ballast": np.arange(20_000)}


@pytest.mark.parametrize(("mode", "segments_per_round"), [("stream", 3), ("replay", 1)])
def test_large_segments_and_weights_go_through_the_object_store(
    mode: Any, segments_per_round: int, shared_ray: None
) -> None:
    options = {"mode": mode, "replay_ratio": 0.5 if mode == "replay" else None}
    options |= {"collect": collect_large, "train": PerWorker(lambda context: Large())}
    digests = {
        pipeline(kind, segments_per_round=segments_per_round, **options).run(rounds=6).digest
        for kind in ("inline", "ray")
    }
    assert len(digests) == 1


def test_damaged_weights_are_tried_again_and_never_used(shared_ray: None) -> None:
    whole = PackedWeights.pack(3, {"w": np.arange(5)})
    damaged = PackedWeights(3, whole.checksum ^ 1, whole.data)
    role = PerWorker(lambda context: None)
    assignment = Assignment(role, WorkerContext(0, 1, 0), sync_retries=2, sync_retry_delay_s=0.0)
    reader = WeightsReader(assignment)
    with pytest.raises(SyncTimeout, match=r"in 3 tries: weights of version 3 arrived damaged"):
        reader.get(3, [ray.put(damaged)])
    with pytest.raises(SyncTimeout, match="damaged"):
        reader.get(3, [damaged])
    with pytest.raises(SyncTimeout, match="version 3 were not sent"):
        reader.get(3, [])
    version, weights = reader.get(3, [ray.put(whole)])
    assert version == 3 and (weights["w"] == np.arange(5)).all()
    assert reader.get(3, [])[0] == 3, "what is here is used again"


def test_recipe_gives_the_same_weights_and_its_files(small_run: Run, shared_ray: None) -> None:
    inline = small_run({"runtime.kind": "inline"}, name="inline")
    on_ray = small_run({"runtime.kind": "ray", "eval.interval_rounds": 3}, name="ray")
    assert on_ray.digest == inline.digest
    assert (on_ray.run_dir / "logs" / "worker_0.log").exists()
    checksums = [
        [record["weights"] for record in read_schedule(run.run_dir / "schedule.jsonl") if "weights" in record]
        for run in (inline, on_ray)
    ]
    assert len(checksums[0]) == inline.rounds and checksums[0] == checksums[1]


@pytest.mark.parametrize("degree", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_run_can_be_resumed_and_repeated(degree: int, tmp_path: Path, shared_ray: None) -> None:
    def named(kind: str) -> Pipeline:
        return pipeline(kind, off_policy_degree=degree, segments_per_round=3, run_dir=tmp_path / kind)

    named("ray").run(rounds=5)
    resumed = named("ray").resume(rounds=10)
    assert resumed.version == 10
    assert resumed.max_staleness <= degree
    assert named("ray").replay().identical
    if degree == 0:
        assert resumed.digest == named("inline").run(rounds=10).digest


def test_segments_arrive_whole_and_once(shared_ray: None) -> None:
    report = pipeline(
        "ray",
        collect=PerWorker(lambda context: InPlace()),
        train=PerWorker(lambda context: ChecksSlots()),
        off_policy_degree=4,
        segments_per_round=3,
        evaluate=lambda weights: 1.0,
        settings=Settings(eval=EvalConfig(interval_rounds=5)),
    ).run(rounds=30)
    assert report.counts.trained == 90
    assert report.max_staleness <= 4
    assert report.eval_metrics["eval/return_mean"] == 1.0
    assert report.eval_metrics["eval/version"] == 30


def events(runtime: RayRuntime, kind: type[Any]) -> list[Any]:
    """Wait for events of a kind; at most half a minute."""
    for _ in range(120):
        if found := [event for event in runtime.wait(0.25) if isinstance(event, kind)]:
            return found
    raise AssertionError(f"no {kind.__name__} came")


def test_data_of_a_segment_stays_beside_the_learner(shared_ray: None) -> None:
    def large(ticket: Any, weights: Any) -> Any:
        return {**collect(ticket, weights), "ballast": np.arange(200_000)}

    runtime, spec = RayRuntime(), pipeline("ray", collect=large, num_workers=1).spec()
    try:
        runtime.start(spec, {0: CollectorState()}, None)
        runtime.publish(0)
        events(runtime, Published)
        runtime.collect(Ticket(0, 0, 0, 0, seed=1))
        (ready,) = events(runtime, SegmentArrived)
        assert isinstance(ready.segment.data, RemoteData)
        assert ready.num_bytes > 200_000 * 8
        assert (ready.segment.data.fetch()["ballast"] == np.arange(200_000)).all()
        runtime.train(Batch(0, (ready.segment,), 0))
        (done,) = events(runtime, RoundTrained)
        assert done.started_s < done.ended_s
        assert set(runtime.pids()) == {"learner", "worker_0"}
        runtime.release([0])
        assert set(runtime.stacks()) == {"learner", "collector_0"}
        with pytest.raises(OffbeatError, match="cannot be fetched"):
            ready.segment.data.fetch()
    finally:
        runtime.close()
        runtime.close()


class Never:
    """Keeps segments and does not give them."""

    def get(self, keys: Any) -> None:
        time.sleep(3600)


def test_data_that_does_not_come_is_given_up(shared_ray: None) -> None:
    never = ray.remote(concurrency_groups={"store": 1})(Never).options(num_cpus=0).remote()
    keeper = SegmentStoreActor(ProcessEnv((), 1, 1, "", "", None), b"")
    reason = keeper.put(1, [never.get.remote([1])], 0.2)
    assert reason is not None and "did not arrive within 0.2 s (async_training.sync_timeout)" in reason
    with pytest.raises(KeyError):
        keeper.get([1])
    with pytest.raises(LearnerLost, match=r"cannot be fetched.*within 0.2 s \(async_training.sync_timeout\)"):
        RemoteSegmentData(never, 1, 0.2).fetch()
    ray.kill(never)


def test_asynchronous_run_with_evaluator_beside_it_replays(small_run: Run, shared_ray: None) -> None:
    settings = {"runtime.kind": "ray", "async_training.enable_async_eval": True, "eval.interval_rounds": 4}
    result = small_run(settings, rounds=12, off_policy_degree=2)
    assert result.max_staleness <= 2
    assert result.eval_return is not None
    report = offbeat.replay_run(result.run_dir)
    assert report.identical and report.digest == result.digest


@pytest.mark.slow
def test_learner_of_two_ranks_trains_as_elsewhere(small_run: Run, shared_ray: None) -> None:
    settings = {"learner.num_ranks": 2, "run.rounds": 3}
    digests = {small_run({**settings, "runtime.kind": kind}, name=kind).digest for kind in ("inline", "ray")}
    assert len(digests) == 1


class SleepsInRankOne(Remembers):
    """A learner whose second rank does not come up."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__()
        if context.ranks.rank == 1:
            time.sleep(3600)


def two_ranks(learner: Callable[[WorkerContext], Any], **runtime: Any) -> RunSpec:
    settings = Settings(
        runtime=RuntimeConfig(kind="ray", num_workers=1, **runtime), learner=LearnerConfig(num_ranks=2)
    )
    return Pipeline(collect=collect, train=PerWorker(learner), settings=settings).spec()


@pytest.mark.slow
def test_rank_that_does_not_start_is_named(shared_ray: None) -> None:
    runtime = RayRuntime()
    try:
        with pytest.raises(LearnerLost, match="learner_rank_1 did not start within 6 s"):
            runtime.start(two_ranks(SleepsInRankOne, start_timeout_s=6.0), {0: CollectorState()}, None)
    finally:
        runtime.close()


@pytest.mark.slow
def test_report_of_a_stall_has_the_ranks(shared_ray: None) -> None:
    runtime = RayRuntime()
    try:
        runtime.start(two_ranks(lambda context: Remembers()), {0: CollectorState()}, None)
        assert "learner_rank_1:\n" in runtime.stacks()["learner"]
    finally:
        runtime.close()


# ---------------------------------------------------------------- what goes wrong


def test_collector_that_raises_ends_the_run_with_its_traceback(shared_ray: None) -> None:
    def broken(ticket: Any, weights: Any) -> Any:
        raise ValueError("no such level")

    with pytest.raises(CollectError, match=r"(?s)in ticket .*ValueError: no such level"):
        pipeline("ray", collect=broken).run(rounds=2)


def test_data_that_cannot_travel_is_named(shared_ray: None) -> None:
    def odd(ticket: Any, weights: Any) -> Any:
        return {"lock": threading.Lock()}

    with pytest.raises(CollectError, match="pickle"):
        pipeline("ray", collect=odd).run(rounds=2)


class CannotTrain(Remembers):
    def train(self, batch: Any) -> dict[str, float]:
        raise ValueError("too hot")


class CannotStart(Remembers):
    def __init__(self) -> None:
        raise ValueError("no fuel")


@pytest.mark.parametrize(("learner", "said"), [(CannotTrain, "too hot"), (CannotStart, "no fuel")])
def test_learner_that_raises_ends_the_run_with_its_traceback(
    learner: type[Remembers], said: str, shared_ray: None
) -> None:
    with pytest.raises(TrainError, match=f"(?s)raised.*ValueError: {said}"):
        pipeline("ray", train=PerWorker(lambda context: learner())).run(rounds=2)


def test_role_that_cannot_travel_is_refused(shared_ray: None) -> None:
    lock = threading.Lock()

    def holds(ticket: Any, weights: Any) -> Any:
        return lock

    with pytest.raises(ConfigError, match="PerWorker"):
        pipeline("ray", collect=holds).run(rounds=1)


def test_wrong_asks_are_refused(small_run: Run, shared_ray: None) -> None:
    for number, settings in enumerate(
        (
            {"trainer.n_gpus_per_node": 1, "trainer.device": "cuda"},
            {"trainer.device": "cuda"},
            {"rollout.nnodes": 3},
            {"runtime.ray.collector_resources": {"CPU": 1.0, "far": 1.0}},
        )
    ):
        with pytest.raises(ConfigError, match="Ray has 1"):
            small_run({"runtime.kind": "ray", **settings}, name=f"run{number}")


def test_actor_that_finds_no_room_says_what_it_waited_for(shared_ray: None) -> None:
    @ray.remote(num_cpus=8)
    class Neighbour:
        def here(self) -> int:
            return os.getpid()

    neighbour = Neighbour.remote()
    ray.get(neighbour.here.remote())
    settings = Settings(runtime=RuntimeConfig(kind="ray", start_timeout_s=1.0, num_workers=1))
    with pytest.raises(ConfigError, match=r"did not start within 1 s.*asks for CPU 1; free in Ray: CPU 0"):
        Pipeline(collect=collect, train=PerWorker(lambda context: Remembers()), settings=settings).run(
            rounds=1
        )
    ray.kill(neighbour)


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_nobody_else_imports_ray() -> None:
    done = python("import sys, offbeat.pipeline; assert 'ray' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_missing_ray_is_told_with_the_fix() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\nfrom offbeat.runtime import make_runtime; make_runtime('ray')"
    )
    done = python(code)
    assert 'ConfigError: runtime.kind=ray needs Ray: pip install "offbeat[ray]"' in done.stderr


_OWN = """
import psutil, sys
import offbeat
import offbeat.runtime.ray as runtime

start, seen = runtime.RayRuntime.start, []

def watched(self, *args):
    start(self, *args)
    seen.extend(psutil.Process().children(recursive=True))

runtime.RayRuntime.start = watched
offbeat.train("cartpole-ppo", overrides=sys.argv[1:])
print(len(seen), [process for process in seen if process.is_running()])
"""


def test_ray_of_its_own_ends_with_the_run(small_run: Run, tmp_path: Path) -> None:
    settings = {**SMALL, "run.dir": str(tmp_path / "own"), "runtime.kind": "ray"}
    settings |= {"runtime.ray.object_store_mb": 100}
    done = python(_OWN, *(f"{key}={json.dumps(value)}" for key, value in settings.items()))
    assert done.returncode == 0, done.stderr
    started, left = done.stdout.splitlines()[-1].split(maxsplit=1)
    assert int(started) >= 5
    assert left == "[]", "every process of Ray is gone"
    assert offbeat.digest(tmp_path / "own") == small_run({"runtime.kind": "inline"}).digest


_JOINS = """
from offbeat.pacing.events import CollectorUp
from offbeat.runtime.spec import CollectorState
from tests.integration.test_collectors import Pair, running, wait_for
with running("ray", Pair, num_collectors=2) as runtime:
    for index in range(2, 5):
        runtime.start_collector(index, CollectorState())
    print([up.collector for up in wait_for(runtime, CollectorUp, 3)])
"""


@pytest.mark.slow
def test_ray_of_its_own_has_room_for_collectors_that_join() -> None:
    done = python(_JOINS)
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == [2, 3, 4], done.stderr


def test_address_without_ray_is_refused() -> None:
    code = (
        "from offbeat.runtime.ray_cluster import Cluster\nfrom offbeat.config.models import RayConfig\n"
        "Cluster().open(RayConfig(address='127.0.0.1:1'), 1)"
    )
    done = python(code)
    assert "ConfigError: runtime.ray.address=127.0.0.1:1: no Ray could be joined there" in done.stderr


def test_other_address_than_that_of_the_ray_in_use_is_refused(shared_ray: None) -> None:
    in_use = ray.get_runtime_context().gcs_address
    port = in_use.rpartition(":")[2]
    for address in (None, "auto", in_use, f"localhost:{port}"):
        Cluster().open(RayConfig(address=address), 1)
    with pytest.raises(
        ConfigError, match=f"address=10.0.0.4:6379, but this process uses the Ray at {in_use}"
    ):
        Cluster().open(RayConfig(address="10.0.0.4:6379"), 1)
