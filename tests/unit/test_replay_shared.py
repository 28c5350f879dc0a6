"""One replay for several processes, as far as that needs no Ray: what is refused, and how ranks share it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.algorithms.ppo_per.ranked import RankedReplay, agreed
from offbeat.errors import CheckpointError, ConfigError, LearnerLost, PromiseBroken
from offbeat.replay import PrioritizedReplay, SharedReplayBuffer
from offbeat.roles import SingleRank
from offbeat.types import ArraySpec

SPEC = {"obs": ArraySpec((3,), "float32"), "action": ArraySpec((), "int64")}
CAPACITY = 16
TIMEOUT_S = 20.0


class ThreadRanks:
    """Ranks in threads of this process; a wait ends with an error, as between processes."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size = rank, size
        self._shared = shared

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add up at a barrier."""
        barrier, parts = self._shared["barrier"], self._shared["parts"]
        try:
            parts[self.rank] = tensor.clone()
            barrier.wait(TIMEOUT_S)
            total = torch.stack(parts).sum(0, dtype=tensor.dtype)
            barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            raise LearnerLost("another rank is gone") from error
        tensor.copy_(total)


def together(*work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What each rank returned or raised."""
    shared = {"barrier": threading.Barrier(len(work)), "parts": [None] * len(work)}
    results: list[Any] = [None] * len(work)

    def run(rank: int) -> None:
        try:
            results[rank] = work[rank](ThreadRanks(rank, len(work), shared))
        except Exception as error:
            shared["barrier"].abort()
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    return results


def items(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"obs": rng.normal(size=(count, 3)).astype(np.float32), "action": rng.integers(0, 5, count)}


def of_rank(ranks: Any, replay: PrioritizedReplay | None = None) -> RankedReplay:
    """The replay as this rank sees it; only rank 0 has one."""
    own = PrioritizedReplay(SPEC, CAPACITY) if replay is None else replay
    return RankedReplay(own if ranks.rank == 0 else None, CAPACITY, ranks, torch.device("cpu"))


def some_rounds(replay: Any, seed: int = 3) -> list[np.ndarray]:
    """Everything that a few rounds with a replay say, and what the generator says after them."""
    rng, said = np.random.default_rng(seed), []
    for version in range(4):
        handles = replay.add(items(6, seed=version), np.full(6, version))
        said += [handles.index, handles.generation]
        for sample in (replay.sample(rng, 5, beta=0.5), replay.sample_uniform(rng, 3)):
            said += [*sample.items.values(), sample.handles.index, sample.weights, sample.versions]
            said += [np.array([replay.update(sample.handles, rng.random(len(sample.weights)))])]
        said += [np.array([replay.expire(version - 1), len(replay)])]
    return [*said, rng.random(4)]


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(one) == len(other)
    for expected, found in zip(one, other, strict=True):
        assert expected.dtype == found.dtype
        np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_hear_what_a_replay_of_their_own_would_have_said(size: int) -> None:
    expected = some_rounds(PrioritizedReplay(SPEC, CAPACITY))
    for said in together(*[lambda ranks: some_rounds(of_rank(ranks))] * size):
        assert_same(expected, said)


def test_ranks_go_on_from_a_saved_replay() -> None:
    saved = PrioritizedReplay(SPEC, CAPACITY)
    saved.add(items(10), 2, priorities=np.arange(10.0))
    state = saved.state_dict()

    def go_on(ranks: Any) -> Any:
        used = PrioritizedReplay(SPEC, CAPACITY)
        used.add(items(16, seed=9), 1)
        replay = of_rank(ranks, used)
        replay.load_state_dict(state)
        return len(replay), some_rounds(replay), replay.state_dict() if ranks.rank == 0 else None

    (first, said, after), (second, heard, _) = together(go_on, go_on)
    assert first == second == 10
    expected = some_rounds(saved)
    assert_same(expected, said)
    assert_same(expected, heard)
    np.testing.assert_array_equal(after["leaves"], saved.state_dict()["leaves"])


def test_what_rank_0_is_refused_all_are_refused_and_can_go_on() -> None:
    def ask(ranks: Any) -> Any:
        replay = of_rank(ranks)
        with pytest.raises(ValueError, match="the buffer holds no item"):
            replay.sample(np.random.default_rng(0), 2, beta=1.0)
        other = PrioritizedReplay(SPEC, CAPACITY + 1)
        with pytest.raises(CheckpointError, match="capacity 17 and now has 16"):
            replay.load_state_dict(other.state_dict())
        replay.add(items(4), 0)
        return len(replay)

    assert together(ask, ask) == [4, 4]


class Unsendable(Exception):
    """Cannot be made again from its text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Breaks(PrioritizedReplay):
    """A replay that fails in its own way."""

    def expire(self, before_version: int) -> int:
        """Fail."""
        raise Unsendable("this", "that")


def test_an_error_that_cannot_be_sent_goes_as_its_text() -> None:
    def ask(ranks: Any) -> Any:
        try:
            of_rank(ranks, Breaks(SPEC, CAPACITY)).expire(0)
        except Exception as error:
            return type(error).__name__, str(error)

    assert together(ask, ask) == [("Unsendable", "this and that"), ("TrainError", "this and that")]


def test_ranks_that_ask_different_things_are_noticed() -> None:
    def one_more(ranks: Any) -> Any:
        replay = of_rank(ranks)
        if ranks.rank == 1:
            replay._number += 1  # as if it had asked once more than the others
        return len(replay)

    kinds = {type(found) for found in together(one_more, one_more)}
    # Whoever notices first ends, and the other may then only see that it is gone.
    assert PromiseBroken in kinds
    assert kinds <= {PromiseBroken, LearnerLost}


def test_a_rank_that_is_lost_ends_the_wait_of_the_others() -> None:
    def lost(ranks: Any) -> Any:
        raise RuntimeError("killed")

    first, second = together(lambda ranks: len(of_rank(ranks)), lost)
    assert isinstance(first, LearnerLost)
    assert str(second) == "killed"


def test_rank_0_decides_for_all() -> None:
    def choose(mine: bool) -> Callable[[Any], bool]:
        return lambda ranks: agreed(ranks, mine, torch.device("cpu"))

    assert together(choose(True), choose(False)) == [True, True]
    assert together(choose(False), choose(True)) == [False, False]
    assert agreed(SingleRank(), True, torch.device("cpu")) is True


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capacity": 0}, "capacity must be 1 or more, not 0"),
        ({"alpha": 2.0}, "alpha must be from 0"),
        ({"spec": {}}, "needs at least one array per item"),
    ],
)
def test_settings_are_refused_before_ray_is_asked(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SharedReplayBuffer.start(**({"spec": SPEC, "capacity": CAPACITY} | changes))


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=True
    )
    return done.stdout


def test_ray_is_not_imported_until_it_is_needed() -> None:
    code = "import sys, offbeat.replay, offbeat.algorithms.ppo_per.make; print('ray' in sys.modules)"
    assert python(code).strip() == "False"


@pytest.mark.parametrize(
    ("setup", "said"),
    [("sys.modules['ray'] = None", "pip install"), ("import ray", "call ray.init() first")],
)
def test_what_is_missing_is_told_with_the_fix(setup: str, said: str) -> None:
    if "import" in setup:
        pytest.importorskip("ray")
    code = f"""
import sys
{setup}
from offbeat.errors import ConfigError
from offbeat.replay import SharedReplayBuffer
from offbeat.types import ArraySpec
try:
    SharedReplayBuffer.start({{"obs": ArraySpec((3,), "float32")}}, 8)
except ConfigError as error:
    print(error)
"""
    assert said in python(code)
