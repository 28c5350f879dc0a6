"""The prioritized buffer against a plain list of items, with and without numba."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.checkpoint.codec import pack, unpack
from offbeat.errors import CheckpointError, ConfigError
from offbeat.ops.compiled import uses_numba
from offbeat.replay import Handles, PrioritizedReplay
from offbeat.replay.rings import Rings
from offbeat.types import ArraySpec

SPEC = {"number": ArraySpec((), "int64"), "obs": ArraySpec((3, 2), "float32"), "done": ArraySpec((), "bool")}
BACKENDS = ("numba", "numpy")
EPS = 1e-6


def make_replay(capacity, backend="numba", **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBEAT_NUMBA", "1" if backend == "numba" else "0")
        if backend == "numba" and not uses_numba():
            pytest.skip("numba is not installed")
        return PrioritizedReplay(SPEC, capacity, **options)


def items(numbers):
    """Items that can be told apart, and whose arrays belong together."""
    numbers = np.asarray(numbers, np.int64)
    obs = np.broadcast_to(numbers[:, None, None], (len(numbers), 3, 2)).astype(np.float32)
    return {"number": numbers, "obs": obs, "done": numbers % 3 == 0}


def filled(capacity, backend="numba", count=None, **options):
    replay = make_replay(capacity, backend, **options)
    replay.add(items(range(capacity if count is None else count)), versions=0)
    return replay


def leaf(priority, alpha, eps=EPS):
    return ((np.array([priority], np.float32) + eps) ** alpha)[0]


# ---------------------------------------------------------------- against a plain list


@dataclass
class Slot:
    number: int
    version: int
    priority: float
    alive: bool = True


@dataclass
class Model:
    """What the buffer promises, item by item."""

    capacity: int
    alpha: float
    slots: list[Slot | None] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    next: int = 0
    largest: float = 1.0

    def __post_init__(self):
        self.slots, self.writes = [None] * self.capacity, [0] * self.capacity

    def add(self, numbers, versions, priorities):
        given = [self.largest] * len(numbers) if priorities is None else priorities
        names = []
        for number, version, priority in zip(numbers, versions, given, strict=True):
            self.slots[self.next] = Slot(number, version, priority)
            self.writes[self.next] += 1
            names.append((self.next, self.writes[self.next]))
            self.next = (self.next + 1) % self.capacity
        self.largest = max([self.largest, *given])
        return names

    def update(self, names, priorities):
        applied = 0
        for (index, generation), priority in zip(names, priorities, strict=True):
            slot = self.slots[index]
            if slot is not None and slot.alive and self.writes[index] == generation:
                slot.priority = priority
                self.largest = max(self.largest, priority)
                applied += 1
        return applied

    def expire(self, before):
        old = [slot for slot in self.live().values() if slot.version < before]
        for slot in old:
            slot.alive = False
        return len(old)

    def live(self):
        return {i: slot for i, slot in enumerate(self.slots) if slot is not None and slot.alive}

    def leaves(self):
        return {index: leaf(slot.priority, self.alpha) for index, slot in self.live().items()}


def check_sample(sample, model, beta, uniform):
    live, leaves = model.live(), dict.fromkeys(model.live(), 1.0) if uniform else model.leaves()
    total = sum(map(float, leaves.values()))
    slots = [live[index] for index in sample.handles.index.tolist()]  # a dead slot is a KeyError
    numbers = [slot.number for slot in slots]
    for name, expected in items(numbers).items():
        np.testing.assert_array_equal(sample.items[name], expected)
        assert sample.items[name].dtype == expected.dtype
    assert sample.versions.tolist() == [slot.version for slot in slots]
    assert sample.handles.generation.tolist() == [model.writes[i] for i in sample.handles.index]
    assert np.all(np.diff(sample.handles.index) >= 0)
    chances = np.array([float(leaves[i]) for i in sample.handles.index.tolist()]) / total
    np.testing.assert_allclose(sample.probabilities, chances, rtol=1e-12)
    weights = (len(live) * chances) ** -beta
    np.testing.assert_allclose(sample.weights, weights / weights.max(), rtol=1e-6)
    assert sample.weights.dtype == np.float32 and sample.weights.max() == 1


class Driver:
    """Random calls, the same ones to a buffer and to the model."""

    def __init__(self, replay, model, seed):
        self.replay, self.model = replay, model
        self.rng = np.random.default_rng(seed)
        self.names: list[tuple[int, int]] = []
        self.number, self.version = 0, 0

    def step(self):
        kinds = (self.add, self.add, self.update, self.update, self.expire, self.sample, self.sample)
        kinds[self.rng.integers(len(kinds))]()
        assert len(self.replay) == len(self.model.live())
        assert self.replay.largest_priority == self.model.largest
        versions = [slot.version for slot in self.model.live().values()]
        assert self.replay.oldest_version == min(versions, default=None)
        assert self.replay.newest_version == max(versions, default=None)

    def add(self):
        count = int(self.rng.integers(0, self.model.capacity + 1))
        numbers = list(range(self.number, self.number + count))
        self.number, self.version = self.number + count, self.version + 1
        versions = (self.version - self.rng.integers(0, 3, count)).tolist()
        given = self.rng.exponential(size=count).astype(np.float32).tolist()
        priorities = given if self.rng.random() < 0.5 else None
        expected = self.model.add(numbers, versions, priorities)
        handles = self.replay.add(items(numbers), np.array(versions, np.int64), priorities)
        assert list(zip(handles.index.tolist(), handles.generation.tolist(), strict=True)) == expected
        self.names += expected

    def update(self):
        """Among all names ever given, so that many are out of date and some come twice."""
        if not self.names:
            return
        recent = self.names[-3 * self.model.capacity :]
        chosen = [recent[i] for i in self.rng.integers(0, len(recent), 20)]
        priorities = self.rng.exponential(2.0, len(chosen)).astype(np.float32)
        priorities *= self.rng.integers(0, 2, len(chosen))
        index, generation = (np.array(column, np.int64) for column in zip(*chosen, strict=True))
        expected = self.model.update(chosen, priorities.tolist())
        assert self.replay.update(Handles(index, generation), priorities) == expected

    def expire(self):
        before = int(self.version - self.rng.integers(0, 4))
        assert self.replay.expire(before) == self.model.expire(before)

    def sample(self):
        if not self.model.live():
            return
        size, beta, uniform = int(self.rng.integers(1, 30)), float(self.rng.random()), self.rng.random() < 0.3
        if uniform:
            sample = self.replay.sample_uniform(self.rng, size)
        else:
            sample = self.replay.sample(self.rng, size, beta=beta)
        check_sample(sample, self.model, 0.0 if uniform else beta, uniform or not self.model.alpha)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(capacity=st.integers(1, 60), alpha=st.sampled_from([0.0, 0.3, 0.6, 1.0]), seed=st.integers(0, 2**32))
def test_keeps_what_a_plain_list_keeps(backend, capacity, alpha, seed):
    driver = Driver(make_replay(capacity, backend, alpha=alpha), Model(capacity, alpha), seed)
    for _ in range(40):
        driver.step()


@settings(max_examples=20, deadline=None)
@given(capacity=st.integers(1, 600), alpha=st.sampled_from([0.0, 0.6]), seed=st.integers(0, 2**32))
def test_numpy_and_numba_agree_in_every_bit(capacity, alpha, seed):
    one, other = (make_replay(capacity, backend, alpha=alpha) for backend in BACKENDS)
    assert trace(one, seed) == trace(other, seed)


def trace(replay, seed, steps=25):
    """Every array that a stream of calls gives back, and the state at its end, as bytes."""
    rng, seen = np.random.default_rng(seed), []
    for step in range(steps):
        numbers = np.arange(rng.integers(1, replay.capacity // 3 + 2))
        replay.add(items(numbers), versions=step)
        sample = replay.sample(rng, 50, beta=0.4)
        applied = replay.update(sample.handles, rng.exponential(size=50).astype(np.float32))
        expired = replay.expire(step - 4)
        arrays = [sample.weights, sample.probabilities, sample.versions, sample.handles.generation]
        seen += [array.tobytes() for array in [*arrays, *sample.items.values()]] + [applied, expired]
    return [*seen, flat(replay.state_dict())]


def flat(state):
    skeleton, arrays = pack(state)
    return skeleton, {name: array.tobytes() for name, array in arrays.items()}


# ---------------------------------------------------------------- how often items are drawn


def chi_square(observed, expected):
    return float(((observed - expected) ** 2 / expected).sum())


def most_by_chance(degrees):
    """Five deviations above the mean of chi-square: about one in a million."""
    return degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_items_are_drawn_in_proportion_to_priority(backend):
    """Small batches, so that the strata are wide and draws nearly independent."""
    replay, rng = filled(300, backend, alpha=0.6), np.random.default_rng(1)
    priorities = rng.exponential(size=300)
    every = replay.sample_uniform(rng, 300).handles
    replay.update(every, priorities)
    counts = np.zeros(300)
    for _ in range(20_000):
        np.add.at(counts, replay.sample(rng, 4, beta=0.4).handles.index, 1)
    chances = (priorities + EPS) ** 0.6
    expected = chances / chances.sum() * counts.sum()
    assert chi_square(counts, expected) < most_by_chance(299)
    assert chi_square(counts, np.full(300, counts.mean())) > most_by_chance(299)


@pytest.mark.parametrize("expired", [0, 100])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_uniform_draws_ignore_priorities(alpha, expired):
    replay, rng = make_replay(300, alpha=alpha), np.random.default_rng(2)
    replay.add(items(range(300)), versions=rng.permutation(300), priorities=rng.exponential(size=300))
    assert replay.expire(expired) == expired
    counts = np.zeros(300)
    for _ in range(10_000):
        np.add.at(counts, replay.sample_uniform(rng, 4).handles.index, 1)
    drawn = counts[counts > 0]
    assert drawn.size == 300 - expired
    assert chi_square(drawn, np.full(drawn.size, drawn.mean())) < most_by_chance(drawn.size - 1)


def test_each_draw_falls_into_its_own_share():
    """With equal priorities and as many draws as items every item comes once."""
    replay = filled(128)
    for seed in range(5):
        sample = replay.sample(np.random.default_rng(seed), 128, beta=0.4)
        assert sample.items["number"].tolist() == list(range(128))
        assert replay.sample_uniform(np.random.default_rng(seed), 64).items["number"].max() < 128


# ---------------------------------------------------------------- traps


def test_weights_do_not_see_slots_that_are_empty():
    """At 5 % filled and equal priorities every weight is 1."""
    replay = filled(10_000, count=500)
    sample = replay.sample(np.random.default_rng(0), 128, beta=1.0)
    assert np.all(sample.weights == 1)
    np.testing.assert_allclose(sample.probabilities, 1 / 500)


def test_alpha_is_applied_once_to_the_largest_priority():
    replay = filled(10, count=2, alpha=0.5)
    replay.update(replay.sample(np.random.default_rng(0), 2, beta=0.4).handles, [9.0, 4.0])
    replay.add(items([7]), versions=0)
    assert replay.largest_priority == 9
    assert replay.state_dict()["leaves"].tolist() == [leaf(9, 0.5), leaf(4, 0.5), leaf(9, 0.5)]
    replay.add(items([8]), versions=0)
    assert replay.state_dict()["leaves"][-1] == leaf(9, 0.5)


def test_an_overwritten_item_takes_no_update():
    replay = filled(4)
    old = replay.sample(np.random.default_rng(0), 4, beta=0.4).handles
    replay.add(items([10, 11]), versions=1)
    before = replay.state_dict()["leaves"]
    assert replay.update(old, [5.0] * 4) == 2
    after = replay.state_dict()["leaves"]
    np.testing.assert_array_equal(after[:2], before[:2])
    assert after[2:].tolist() == [leaf(5, 0.6)] * 2


def test_a_late_update_does_not_raise_the_largest_priority():
    replay = filled(4)
    old = replay.sample(np.random.default_rng(0), 4, beta=0.4).handles
    replay.add(items(range(4)), versions=1)
    assert replay.update(old, [100.0] * 4) == 0
    assert replay.largest_priority == 1


def test_an_expired_item_does_not_come_back():
    replay = make_replay(6)
    handles = replay.add(items(range(6)), versions=np.array([0, 5, 1, 5, 0, 5]))
    assert replay.expire(5) == 3 and replay.expire(5) == 0
    assert replay.update(handles, [9.0] * 6) == 3
    drawn = replay.sample(np.random.default_rng(0), 200, beta=0.4).items["number"]
    assert set(drawn.tolist()) == {1, 3, 5}
    assert (replay.oldest_version, replay.newest_version, len(replay)) == (5, 5, 3)


def test_everything_may_expire_and_the_buffer_goes_on():
    replay = filled(5)
    assert replay.expire(1) == 5 and len(replay) == 0
    with pytest.raises(ValueError, match="add some"):
        replay.sample(np.random.default_rng(0), 2, beta=0.4)
    replay.add(items([42]), versions=3)
    assert replay.sample(np.random.default_rng(0), 2, beta=0.4).items["number"].tolist() == [42, 42]


def test_items_wrap_around_the_end_of_the_ring():
    replay = filled(10, count=7)
    handles = replay.add(items(range(100, 106)), versions=1)
    assert handles.index.tolist() == [7, 8, 9, 0, 1, 2]
    assert handles.generation.tolist() == [1, 1, 1, 2, 2, 2]
    numbers = replay.sample_uniform(np.random.default_rng(0), 10).items["number"]
    assert numbers.tolist() == [103, 104, 105, 3, 4, 5, 6, 100, 101, 102]


def test_samples_are_copies():
    replay = filled(4)
    rng = np.random.default_rng(0)
    replay.sample(rng, 4, beta=0.4).items["obs"][:] = -1
    assert np.all(replay.sample(rng, 4, beta=0.4).items["obs"] >= 0)


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("capacity", "steps"), [(1000, 2), (40, 25)])
def test_goes_on_from_a_checkpoint_in_every_bit(backend, capacity, steps):
    """Once while it fills and once after many turns of the ring, with some items expired."""
    replay = make_replay(capacity, backend)
    trace(replay, 3, steps)
    saved = unpack(*pack(replay.state_dict()))
    other = filled(capacity, backend)
    other.load_state_dict(saved)
    assert flat(other.state_dict()) == flat(replay.state_dict())
    assert len(other) == len(replay)
    assert trace(other, 4) == trace(replay, 4)


def test_a_checkpoint_holds_only_what_was_written():
    replay = filled(10_000, count=10)
    state = replay.state_dict()
    assert len(state["items"]["obs"]) == len(state["leaves"]) == len(state["versions"]) == 10
    replay.add(items([5]), versions=9)
    assert len(state["versions"]) == 10 and state["versions"].max() == 0


@pytest.mark.parametrize("name", ["capacity", "alpha", "eps", "spec"])
def test_a_checkpoint_of_another_buffer_is_refused(name):
    options = {"capacity": {"capacity": 20}, "alpha": {"alpha": 0.5}, "eps": {"eps": 1e-3}, "spec": {}}[name]
    spec = {**SPEC, "more": ArraySpec((), "int8")} if name == "spec" else SPEC
    other = PrioritizedReplay(spec, **{"capacity": 10, **options})
    with pytest.raises(CheckpointError, match=f"saved with {name} .* set it back"):
        other.load_state_dict(filled(10).state_dict())


# ---------------------------------------------------------------- refusals


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-9, -3.0, 1e100])
def test_bad_priorities_are_refused_and_change_nothing(backend, bad):
    replay = filled(10, backend, alpha=1.0)
    before = flat(replay.state_dict())
    handles = replay.sample_uniform(np.random.default_rng(0), 2).handles
    with pytest.raises(ValueError, match="a priority is"):
        replay.update(handles, [2.0, bad])
    with pytest.raises(ValueError, match="a priority is"):
        replay.add(items([1, 2]), versions=1, priorities=[2.0, bad])
    assert flat(replay.state_dict()) == before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [-1, 10, 2**40])
def test_handles_of_another_buffer_are_refused(backend, index):
    with pytest.raises(IndexError, match="capacity 10"):
        filled(10, backend).update(Handles(np.array([index]), np.array([1])), [1.0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda given: given.pop("obs"), "give exactly"),
        (lambda given: given.update(more=given["obs"]), "give exactly"),
        (lambda given: given.update(obs=given["obs"][:1]), "same length"),
        (lambda given: given.update(obs=given["obs"][:, :2]), "was made for"),
        (lambda given: given.update(obs=given["obs"].astype(np.float64)), "was made for"),
        (lambda given: given.update(done=given["number"]), "was made for"),
    ],
)
def test_items_that_do_not_fit_are_refused_and_change_nothing(change, match):
    replay, given = filled(10), items([1, 2])
    before = flat(replay.state_dict())
    change(given)
    with pytest.raises(ValueError, match=match):
        replay.add(given, versions=1)
    assert flat(replay.state_dict()) == before


def test_impossible_calls_say_what_to_do():
    replay, rng = filled(10), np.random.default_rng(0)
    with pytest.raises(ValueError, match="raise its capacity"):
        replay.add(items(range(11)), versions=0)
    with pytest.raises(ValueError, match="whole numbers"):
        replay.add(items([1]), versions=0.5)
    with pytest.raises(ValueError, match="one for each of 1 items"):
        replay.add(items([1]), versions=0, priorities=[1.0, 2.0])
    with pytest.raises(ValueError, match="batch_size"):
        replay.sample(rng, 0, beta=0.4)
    with pytest.raises(ValueError, match="beta"):
        replay.sample(rng, 2, beta=1.5)
    with pytest.raises(ValueError, match="one for each"):
        replay.update(replay.sample(rng, 2, beta=0.4).handles, [1.0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capacity": 0}, "capacity"),
        ({"alpha": 1.1}, "alpha"),
        ({"eps": 0.0}, "eps"),
        ({"eps": 1e-40, "alpha": 1.0}, "eps"),
        ({"spec": {}}, "spec"),
        ({"spec": {"text": ArraySpec((), "U5")}}, "text has dtype"),
    ],
)
def test_bad_settings_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        PrioritizedReplay(**{"spec": SPEC, "capacity": 10, **options})


@pytest.mark.parametrize("obs_size", [1, 64])
def test_memory_is_told_beforehand(obs_size):
    """Also of a buffer with holes, which needs a list of its live slots."""
    spec, capacity = {**SPEC, "obs": ArraySpec((obs_size,), "float32")}, 20_000
    given = {**items(range(capacity)), "obs": np.zeros((capacity, obs_size), np.float32)}
    PrioritizedReplay(spec, 10)  # whatever is loaded on first use
    tracemalloc.start()
    replay = PrioritizedReplay(spec, capacity)
    replay.add(given, versions=np.arange(capacity))
    replay.expire(10)
    replay.sample_uniform(np.random.default_rng(0), 1)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.95 * used < PrioritizedReplay.num_bytes(spec, capacity) < 1.05 * used


def test_small_arrays_share_a_record_and_large_ones_do_not():
    """A record of 8 + 8 + 4 + 1 bytes takes 32; observations of 256 bytes stay out of it."""
    spec = {
        "done": ArraySpec((), "bool"),
        "obs": ArraySpec((64,), "float32"),
        "reward": ArraySpec((), "float32"),
        "action": ArraySpec((), "int64"),
    }
    one, two = (Rings.num_bytes(spec, capacity) for capacity in (1, 2))
    assert two - one == 256 + 32
    rings = Rings(spec, 4)
    for name, array in spec.items():
        assert rings.view(name).shape == (4, *array.shape) and rings.view(name).dtype == array.dtype
    rings.view("reward")[2], rings.view("obs")[2], rings.versions[2] = 7, 8, 9
    items, versions = rings.gather(np.array([2, 0]))
    assert list(items) == list(spec) and versions.tolist() == [9, 0]
    assert items["reward"].tolist() == [7, 0] and items["obs"][:, 5].tolist() == [8, 0]
    assert all(array.flags.c_contiguous and array.flags.owndata for array in items.values())
