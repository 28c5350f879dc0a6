"""A replay in a Ray actor: the same draws and the same runs as with one in the learner's process."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import offbeat
from offbeat.errors import CheckpointError, ConfigError, LearnerLost
from offbeat.replay import PrioritizedReplay, SharedReplayBuffer
from tests.conftest import SMALL
from tests.unit.test_replay_shared import CAPACITY, SPEC, assert_same, items, some_rounds

ray = pytest.importorskip("ray")

WAIT_S = 30.0


def replay_processes() -> list[psutil.Process]:
    """Actors of shared replays on this machine, of this test's Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "_ReplayActor" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(holds: Callable[[], bool]) -> bool:
    give_up_s = time.monotonic() + WAIT_S
    while not holds() and time.monotonic() < give_up_s:
        time.sleep(0.1)
    return holds()


@pytest.fixture
def shared(shared_ray: None) -> Any:
    """A shared replay that ends with its test."""
    replay = SharedReplayBuffer.start(SPEC, CAPACITY, start_timeout_s=120.0)
    yield replay
    replay.close()


# ---------------------------------------------------------------- the actor


def test_draws_are_those_of_a_replay_in_this_process(shared: SharedReplayBuffer) -> None:
    local = PrioritizedReplay(SPEC, CAPACITY)
    assert_same(some_rounds(local), some_rounds(shared))
    for name in ("leaves", "versions"):
        np.testing.assert_array_equal(shared.state_dict()[name], local.state_dict()[name])
    sample = shared.sample(np.random.default_rng(0), 4, beta=1.0)
    sample.items["obs"][:] = 0.0  # arrays are the caller's own


def test_state_goes_there_and_back(shared: SharedReplayBuffer) -> None:
    saved = PrioritizedReplay(SPEC, CAPACITY)
    saved.add(items(20 - CAPACITY), 2)
    state = saved.state_dict()
    shared.add(items(CAPACITY, seed=5), 1)
    shared.load_state_dict(state)
    assert len(shared) == len(saved)
    assert_same(some_rounds(saved), some_rounds(shared))
    with pytest.raises(CheckpointError, match="saved with capacity 17"):
        shared.load_state_dict(PrioritizedReplay(SPEC, CAPACITY + 1).state_dict())


def test_errors_are_those_of_a_replay_in_this_process(shared: SharedReplayBuffer) -> None:
    with pytest.raises(ValueError, match="the buffer holds no item: add some before sampling"):
        shared.sample(np.random.default_rng(0), 2, beta=1.0)
    with pytest.raises(ValueError, match="give exactly"):
        shared.add({"obs": items(2)["obs"]}, 0)
    shared.add(items(2), 0)
    assert len(shared) == 2, "it goes on after a refusal"


def test_others_write_into_the_same_replay(shared: SharedReplayBuffer) -> None:
    @ray.remote(num_cpus=0)
    def write(replay: SharedReplayBuffer, version: int) -> int:
        return len(replay.add({"obs": np.zeros((3, 3), np.float32), "action": np.arange(3)}, version).index)

    assert ray.get([write.remote(shared, version) for version in (1, 2)], timeout=60.0) == [3, 3]
    assert len(shared) == 6
    assert sorted(set(shared.state_dict()["versions"])) == [1, 2]


def test_whoever_comes_second_with_a_name_joins(shared_ray: None) -> None:
    first = SharedReplayBuffer.start(SPEC, CAPACITY, name="test-join", start_timeout_s=120.0)
    first.add(items(5), 0)
    second = SharedReplayBuffer.start(SPEC, CAPACITY, name="test-join")
    assert len(second) == 5
    with pytest.raises(ConfigError, match=r"'capacity': 16.*give both the same"):
        SharedReplayBuffer.start(SPEC, CAPACITY + 1, name="test-join")
    first.close()


def test_actor_that_finds_no_room_says_what_it_asked_for(shared_ray: None) -> None:
    with pytest.raises(LearnerLost, match=r"'CPU': 99.*runtime\.ray\.store_resources"):
        SharedReplayBuffer.start(SPEC, CAPACITY, resources={"CPU": 99.0}, start_timeout_s=1.0)


def test_answer_that_does_not_come_and_actor_that_is_gone(shared_ray: None) -> None:
    replay = SharedReplayBuffer.start(SPEC, CAPACITY, timeout_s=1.0, start_timeout_s=120.0)
    (process,) = replay_processes()
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(LearnerLost, match=r"`count` within 1 s \(async_training\.sync_timeout\)"):
            len(replay)
    finally:
        process.kill()
    assert wait_until(lambda: not replay_processes())
    with pytest.raises(LearnerLost, match="the shared replay is gone"):
        SharedReplayBuffer(replay._actor, CAPACITY, WAIT_S).add(items(1), 0)


# ---------------------------------------------------------------- runs


def train(directory: Path, callbacks: Any = (), **changes: Any) -> Any:
    """A small replay run at k = 0, on Ray with a shared replay unless told otherwise."""
    settings = {
        **SMALL,
        "runtime.kind": "ray",
        "runtime.start_timeout_s": 120.0,
        "algorithm.shared_buffer": True,
        "algorithm.batch_size": 8,
        "algorithm.buffer_capacity": 20,
        "algorithm.updates_per_round": 2,
        "algorithm.max_age": 3,
        "async_training.off_policy_degree": 0,
        "async_training.enable_async_eval": False,
        "eval.at_end": False,
        "run.rounds": 4,
        "run.dir": str(directory),
        **changes,
    }
    return offbeat.train("cartpole-ppo-per", overrides=settings, callbacks=callbacks)


HERE = {"runtime.kind": "inline", "algorithm.shared_buffer": False}


class Watch(offbeat.Callback):
    """Looks for the replay's actor, and kills it once when told."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.seen: list[int] = []

    def on_round(self, info: Any) -> None:
        found = replay_processes()
        self.seen.append(len(found))
        if info.version == self.kill_at:
            self.kill_at = None
            for process in found:
                os.kill(process.pid, signal.SIGKILL)


def test_run_gives_the_same_weights_and_ends_with_its_replay(tmp_path: Path, shared_ray: None) -> None:
    watch = Watch()
    result = train(tmp_path / "ray", [watch])
    assert result.digest == train(tmp_path / "inline", **HERE).digest
    assert watch.seen == [1, 1, 1, 1]
    assert wait_until(lambda: not replay_processes())
    assert offbeat.replay_run(result.run_dir).identical, "repeated without Ray"


@pytest.mark.slow
def test_resumed_run_finds_the_replay_of_its_checkpoint(tmp_path: Path, shared_ray: None) -> None:
    every = {"checkpoint.interval_rounds": 1, "checkpoint.keep": 9}
    result = train(tmp_path / "run", **every)
    for path in sorted((result.run_dir / "checkpoints").glob("step_*"))[2:]:  # as if it had been killed then
        shutil.rmtree(path)
    assert offbeat.resume(result.run_dir).digest == result.digest


@pytest.mark.slow
def test_run_goes_on_when_its_replay_was_killed(tmp_path: Path, shared_ray: None) -> None:
    settings = {"checkpoint.interval_rounds": 1, "run.restart_delay_s": 0.0}
    result = train(tmp_path / "run", [Watch(kill_at=2)], **settings)
    assert result.restarts == 1
    assert result.digest == train(tmp_path / "inline", **HERE).digest


@pytest.mark.slow
def test_two_ranks_train_on_the_same_draws(tmp_path: Path, shared_ray: None) -> None:
    watch, two = Watch(), {"learner.num_ranks": 2}
    result = train(tmp_path / "ray", [watch], **two)
    assert watch.seen == [1, 1, 1, 1], "one replay for both"
    assert result.digest == train(tmp_path / "inline", **HERE, **two).digest
    assert offbeat.replay_run(result.run_dir).identical


@pytest.mark.slow
def test_two_ranks_go_on_when_their_replay_was_killed(tmp_path: Path, shared_ray: None) -> None:
    settings = {"learner.num_ranks": 2, "checkpoint.interval_rounds": 1, "run.restart_delay_s": 0.0}
    result = train(tmp_path / "ray", [Watch(kill_at=2)], **settings)
    assert result.restarts == 1
    assert result.digest == train(tmp_path / "inline", **HERE, **{"learner.num_ranks": 2}).digest


def test_shared_replay_needs_ray(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set runtime\.kind=ray"):
        train(tmp_path / "run", **{"runtime.kind": "threads"})
