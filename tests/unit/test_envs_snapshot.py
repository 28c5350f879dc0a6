"""A restored environment goes on to the last bit like the one whose state was taken, or gives no state."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import json
import random
import re
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest

from offbeat.config.models import EnvConfig
from offbeat.envs import make_world, snapshot
from offbeat.envs.loop import LoopWorld
from offbeat.errors import EnvError


def through_json(tree: Any) -> Any:
    """Send everything but the arrays through JSON, as a checkpoint does."""
    arrays: list[np.ndarray] = []

    def split(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value.copy(order="C"))
            return {"array": len(arrays) - 1}
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            return {"dict": {key: split(item) for key, item in value.items()}}
        assert type(value) in (list, int, float, str, bool, type(None)), value
        return [split(item) for item in value] if isinstance(value, list) else value

    def join(value: Any) -> Any:
        if isinstance(value, dict):
            ((tag, body),) = value.items()
            return arrays[body] if tag == "array" else {key: join(item) for key, item in body.items()}
        return [join(item) for item in value] if isinstance(value, list) else value

    return join(json.loads(json.dumps(split(tree), allow_nan=False)))


def as_text(tree: Any) -> str:
    return json.dumps(tree, default=lambda array: array.tolist())


def random_actions(world: Any, num_steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    space = world.single_action_space
    if isinstance(space, gymnasium.spaces.Box):
        shape = (world.num_envs, *space.shape)
        return [rng.uniform(space.low, space.high, shape).astype(space.dtype) for _ in range(num_steps)]
    return [rng.integers(space.n, size=world.num_envs) for _ in range(num_steps)]


def record(world: Any, actions: list[np.ndarray]) -> list[np.ndarray]:
    steps = [world.step(row) for row in actions]
    return [
        np.array([getattr(step, part) for step in steps])
        for part in ("obs", "rewards", "terminated", "truncated")
    ]


@pytest.mark.parametrize(
    ("env_id", "vectorize", "num_envs"),
    [
        ("CartPole-v1", "loop", 4),
        ("CartPole-v1", "vector", 32),
        ("Pendulum-v1", "loop", 3),
        ("MountainCar-v0", "loop", 2),
        ("MountainCarContinuous-v0", "loop", 2),
        ("Acrobot-v1", "loop", 2),
        ("FrozenLake-v1", "loop", 2),
        ("MinAtar/Breakout-v1", "loop", 3),
        ("MinAtar/Breakout-v0", "loop", 3),
        ("MinAtar/Asterix-v1", "loop", 2),
        ("MinAtar/Freeway-v1", "loop", 2),
        ("MinAtar/Seaquest-v1", "loop", 2),
        ("MinAtar/SpaceInvaders-v1", "loop", 2),
        ("offbeat/Memory-v0", "loop", 3),
        ("offbeat/Memory-v0", "vector", 8),
        ("offbeat.testing.envs:offbeat-test/Healthy-v0", "loop", 2),
    ],
)
def test_a_restored_world_goes_on_bit_by_bit(env_id: str, vectorize: str, num_envs: int) -> None:
    config = EnvConfig(id=env_id, vectorize=vectorize)
    world = make_world(config, num_envs)
    actions = random_actions(world, 600)
    world.reset(1)
    record(world, actions[:300])
    state = through_json(world.state_dict())
    expected = record(world, actions[300:])

    other = make_world(config, num_envs)
    other.reset(2)
    record(other, actions[:17])
    other.load_state_dict(state)
    fresh = make_world(config, num_envs)
    fresh.load_state_dict(state)
    for restored in (other, fresh):
        for part, same in zip(expected, record(restored, actions[300:]), strict=True):
            assert part.tobytes() == same.tobytes()
        assert as_text(restored.state_dict()) == as_text(world.state_dict())


def test_a_state_between_an_end_and_the_restart_is_complete() -> None:
    config = EnvConfig(id="CartPole-v1", vectorize="loop")
    world = make_world(config, 3)
    actions = np.ones(3, np.int64)
    world.reset(1)
    while not world.step(actions).terminated[0]:
        pass
    state = through_json(world.state_dict())
    expected = record(world, [actions] * 20)
    other = make_world(config, 3)
    other.load_state_dict(state)
    again = record(other, [actions] * 20)
    assert expected[1][0][0] == 0
    assert np.array_equal(expected[0], again[0])


def test_a_state_shares_no_memory_with_the_world() -> None:
    world = make_world(EnvConfig(id="CartPole-v1", vectorize="vector"), 8)
    world.reset(1)
    state = world.state_dict()
    before = as_text(state)
    record(world, random_actions(world, 50))
    assert as_text(state) == before
    world.load_state_dict(state)
    record(world, random_actions(world, 50))
    assert as_text(state) == before


def test_physics_engines_give_no_state_and_say_why_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("Box2D", reason="needs the extra box2d")
    world = make_world(EnvConfig(id="LunarLander-v3"), 2)
    world.reset(0)
    assert world.state_dict() is None
    assert world.state_dict() is None
    (record,) = caplog.records
    assert "LunarLander-v3 cannot be saved" in record.message and "SwigPyObject" in record.message


@pytest.mark.parametrize(
    ("env_id", "vectorize", "num_envs"),
    [("CartPole-v0", "loop", 3), ("CartPole-v1", "vector", 3), ("CartPole-v1", "loop", 2)],
)
def test_a_state_of_other_environments_is_refused(env_id: str, vectorize: str, num_envs: int) -> None:
    world = make_world(EnvConfig(id="CartPole-v1", vectorize="loop"), 3)
    world.reset(0)
    other = make_world(EnvConfig(id=env_id, vectorize=vectorize), num_envs)
    with pytest.raises(EnvError, match="the saved environments are"):
        other.load_state_dict(world.state_dict())


# ---------------------------------------------------------------- what environments may hold


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Place(NamedTuple):
    row: int
    column: int


@dataclass
class Enemy:
    place: Place
    health: float = 1.0
    target: Any = None


@dataclass(slots=True)
class Slotted:
    a: int
    b: list[int] = field(default_factory=list)


class Partly:
    __slots__ = ("here", "not_here")


BELONGING = (len, np)
"""Outside the environment's packages: only found again where the environment has them already."""
LEVELS = [Enemy(Place(0, 0)), Enemy(Place(9, 9), health=5.0)]


class Bag(gymnasium.Env):
    """Holds whatever it is given, under names."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **things: Any) -> None:
        self.__dict__.update(things)


def carry(env: Any, onto: Any) -> Any:
    """Restore the state of one environment onto another and return that."""
    tree = snapshot.capture(env)
    assert tree is not None, snapshot.why_not(env)
    snapshot.restore(onto, through_json(tree))
    return onto


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**130,
        -0.0,
        float("inf"),
        "text",
        b"\x00\xff",
        (1, (2.5, "x")),
        [1, [2, None]],
        {1: "a", "b": (2,), (3, 4): [5], None: 0.5},
        {3, 1, 2},
        frozenset({"a"}),
        range(2, 9, 3),
        collections.deque([1, 2, 3], maxlen=3),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.Counter("aab"),
        Colour.BLUE,
        Place(3, 4),
        Enemy(Place(1, 2), 0.5),
        Slotted(1, [2]),
        types.SimpleNamespace(a=[1]),
        np.float32(0.1),
        np.int8(-3),
        np.bool_(True),
        np.str_("word"),
        np.dtype("float32"),
        int,
        len,
        random_actions,
        np,
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_values_come_back_as_they_were(value: Any) -> None:
    got = carry(Bag(thing=value), Bag(thing=value if value in BELONGING else 0))
    assert type(got.thing) is type(value)
    assert repr(got.thing) == repr(value)
    assert got.thing == value


def test_nan_comes_back() -> None:
    assert np.isnan(carry(Bag(thing=float("nan")), Bag()).thing)
    got = carry(Bag(thing=np.float32("nan")), Bag()).thing
    assert np.isnan(got)
    assert got.dtype == np.float32


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.empty_like(np.zeros((2, 3, 4)).transpose(1, 2, 0)),
        np.zeros((0, 3), np.int16),
        np.array(5, np.uint8),
        np.array([True, False]),
        np.array(["a", "bcd"]),
        np.array([[b"x", b"yz"]]),
        np.array([1, "a", None, (2, 3)], object),
        np.frombuffer(b"\x01\x02", np.uint8),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays_keep_dtype_shape_and_layout(array: np.ndarray) -> None:
    if array.size and array.dtype.kind == "f":
        array[...] = np.random.default_rng(0).random(array.shape)
    got = carry(Bag(thing=array), Bag()).thing
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert got.strides == array.strides
    assert np.array_equal(got, array)
    got_again = carry(carry(Bag(thing=array), Bag()), Bag()).thing
    assert np.array_equal(got_again, array)
    assert got_again.strides == array.strides


@pytest.mark.parametrize("order", ["C", "F"])
def test_views_stay_views(order: str) -> None:
    grid = np.arange(20.0).reshape(4, 5).copy(order=order)
    bag = Bag(row=grid[1], grid=grid, block=grid[::-2, 1:3].T, fixed=np.broadcast_to(grid[0, :1], (3, 1)))
    got = carry(bag, Bag())
    for name in ("row", "grid", "block", "fixed"):
        assert np.array_equal(getattr(got, name), getattr(bag, name))
    got.grid += 100
    bag.grid += 100
    for name in ("row", "block", "fixed"):
        assert np.array_equal(getattr(got, name), getattr(bag, name))


def test_shared_things_stay_shared_and_equal_ones_stay_apart() -> None:
    one, rng = [1], np.random.default_rng(3)
    bag = Bag(a=one, b={"deep": (one, rng)}, c=[1], rng=rng, draw=rng.random, add=one.append)
    got = carry(bag, Bag(a=[], c=[], rng=np.random.default_rng(0)))
    assert got.b["deep"][0] is got.a
    assert got.c == got.a
    assert got.c is not got.a
    got.add(2)
    assert got.a == [1, 2]
    assert [got.draw(), got.rng.random(), got.b["deep"][1].random()] == [
        bag.draw(),
        rng.random(),
        rng.random(),
    ]


def test_things_that_are_shared_only_in_the_new_environment_come_apart() -> None:
    both = Enemy(Place(0, 0))
    bag = Bag(a=Enemy(Place(1, 1)), b=Enemy(Place(2, 2)))
    got = carry(bag, Bag(a=both, b=both))
    assert (got.a, got.b) == (bag.a, bag.b)
    assert got.a is not got.b


def test_cycles() -> None:
    enemy = Enemy(Place(0, 0))
    enemy.target = {"me": [enemy]}
    bag = Bag(enemy=enemy, loop=[])
    bag.loop.append(bag.loop)
    bag.me = bag
    got = carry(bag, Bag())
    assert got.me is got
    assert got.enemy.target["me"][0] is got.enemy
    assert got.loop[0] is got.loop


def test_objects_are_changed_in_place_made_or_dropped() -> None:
    kept = Enemy(Place(0, 0))
    old = Bag(enemies=[kept], extra=1, slots=Slotted(0))
    bag = Bag(enemies=[Enemy(Place(i, i), i) for i in range(1, 4)], slots=Slotted(7, [8]))
    got = carry(bag, old)
    assert got.enemies == bag.enemies
    assert got.enemies[0] is kept
    assert got.slots == bag.slots
    assert not hasattr(got, "extra")


def test_slots_that_are_not_set_stay_so() -> None:
    partly, full = Partly(), Partly()
    partly.here, full.here, full.not_here = 1, 2, 3
    got = carry(Bag(thing=partly), Bag(thing=full)).thing
    assert got is full
    assert got.here == 1
    assert not hasattr(got, "not_here")


def test_what_modules_hold_is_never_written_to() -> None:
    before = [Enemy(level.place, level.health) for level in LEVELS]
    got = carry(Bag(level=LEVELS[1]), Bag(level=LEVELS[0]))
    assert got.level == before[1]
    assert before == LEVELS


def test_attributes_deleted_and_added_since_the_reset() -> None:
    got = carry(Bag(new=[1], same=2), Bag(same=1, gone=3))
    assert vars(got) == {"new": [1], "same": 2}


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_generators_go_on_and_spawn_alike(name: str) -> None:
    rng = np.random.Generator(getattr(np.random, name)(5))
    rng.random(3, np.float32)
    rng.spawn(1)
    got = carry(Bag(rng=rng), Bag(rng=np.random.default_rng(1))).rng
    assert got.standard_normal(7).tobytes() == rng.standard_normal(7).tobytes()
    assert got.random(5, np.float32).tobytes() == rng.random(5, np.float32).tobytes()
    assert got.spawn(1)[0].random() == rng.spawn(1)[0].random()


def test_legacy_and_python_generators_go_on() -> None:
    bag = Bag(legacy=np.random.RandomState(4), python=random.Random(4))
    bag.legacy.standard_normal()
    bag.python.gauss(0, 1)
    got = carry(bag, Bag(legacy=np.random.RandomState(5), python=random.Random(5)))
    assert got.legacy.standard_normal(9).tobytes() == bag.legacy.standard_normal(9).tobytes()
    assert [got.python.gauss(0, 1) for _ in range(5)] == [bag.python.gauss(0, 1) for _ in range(5)]


def counter(start: int, box: list[int]) -> Any:
    count = start

    def tick() -> int:
        nonlocal count
        count += 1
        box.append(count)
        return count

    return tick


def test_functions_keep_what_they_closed_over() -> None:
    old, new = Bag(box=[0]), Bag(box=[])
    old.tick, new.tick = counter(10, old.box), counter(0, new.box)
    old.tick()
    got = carry(old, new)
    assert got.tick() == 12
    assert got.box == [0, 11, 12]


class Moody(gymnasium.Env):
    """Its state is which of its methods comes next."""

    observation_space, action_space = Bag.observation_space, Bag.action_space

    def __init__(self) -> None:
        self.next = self.calm
        self.twice = functools.partial(pow, 2, mod=None)
        self.log: list[str] = []

    def calm(self) -> None:
        self.log.append("calm")
        self.next = self.angry

    def angry(self) -> None:
        self.log.append("angry")
        self.next = self.calm


def test_methods_and_partials_as_state() -> None:
    env = Moody()
    env.next()
    got = carry(env, Moody())
    got.next()
    assert got.log == ["calm", "angry"]
    assert got.twice(5) == 32


def test_defaultdicts_keep_their_factory() -> None:
    table = collections.defaultdict(list, {"a": [1]})
    got = carry(Bag(table=table), Bag()).table
    assert got["missing"] == []
    assert got["a"] == [1]


def test_a_space_that_was_sampled_goes_on() -> None:
    class Sampling(Bag):
        def __init__(self, seed: int) -> None:
            self.action_space = gymnasium.spaces.Dict(
                a=gymnasium.spaces.Discrete(9), b=gymnasium.spaces.Box(0, 1, (2,))
            )
            self.action_space.seed(seed)

    env = Sampling(1)
    env.action_space.sample()
    space = (other := Sampling(2)).action_space
    got = carry(env, other)
    assert got.action_space is space
    for _ in range(3):
        assert repr(got.action_space.sample()) == repr(env.action_space.sample())


def test_specs_loggers_and_locks_stay_with_the_environment() -> None:
    spec, lock = gymnasium.spec("CartPole-v1"), threading.Lock()
    got = carry(
        Bag(spec=gymnasium.spec("Pendulum-v1"), lock=threading.Lock(), n=1), Bag(spec=spec, lock=lock, n=0)
    )
    assert (got.spec, got.lock, got.n) == (spec, lock, 1)


# ---------------------------------------------------------------- what gives no state


class Local:
    pass


class OwnInt(int):
    pass


class Words(list):
    pass


@pytest.mark.parametrize(
    "thing",
    [
        iter([1, 2]),
        itertools.count(),
        (x for x in range(3)),
        threading.Thread(),
        threading.Event(),
        memoryview(b"abc"),
        random.SystemRandom(),
        random,
        np.random,
        random.random,
        np.random.rand,
        OwnInt(3),
        Words([1]),
        np.ma.masked_array([1, 2]),
        np.array([1j]),
        np.longdouble(1),
        np.datetime64("2020-01-01"),
        np.array([1, 2], ">i4"),
        np.frombuffer(bytearray(4), np.uint8),
        functools.lru_cache(len),
        types.MappingProxyType({}),
        re.match("a", "a"),
        ValueError("x"),
        [gymnasium.spec("CartPole-v1")],
    ],
    ids=lambda thing: type(thing).__name__,
)
@pytest.mark.parametrize(
    "wrap", [lambda thing: thing, lambda thing: Enemy(Place(0, 0), target=({"deep": [thing]},))]
)
def test_hidden_state_makes_the_whole_capture_none(thing: Any, wrap: Any) -> None:
    bag = Bag(fine=1, thing=wrap(thing))
    assert snapshot.capture(bag) is None
    assert snapshot.why_not(bag)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_come_back_in_the_same_order_or_not_at_all(kind: type) -> None:
    grown = set(range(100))
    grown -= set(range(100)) - {3, 8, 64}
    assert list(grown) != list(set(grown)), "its table is that of the larger set it once was"
    assert snapshot.capture(Bag(things=grown)) is None
    assert "another order" in str(snapshot.why_not(Bag(things=grown)))
    for items in ([3, 8, 64], [64, 3, 8], [8, 64, 3], ["b", "a"]):
        env = Bag(things=kind(items))
        if snapshot.capture(env) is not None:
            assert list(carry(env, Bag(things=kind())).things) == list(env.things)


def test_open_files_give_no_state(tmp_path: Any) -> None:
    with open(tmp_path / "log", "w") as file:
        assert snapshot.capture(Bag(file=file)) is None


def test_objects_of_local_classes_give_no_state() -> None:
    class Here:
        pass

    assert snapshot.capture(Bag(thing=Local())) is not None
    assert snapshot.capture(Bag(thing=Here())) is None


def test_a_bit_generator_shared_by_two_kinds_gives_no_state() -> None:
    bits = np.random.MT19937(1)
    both = Bag(legacy=np.random.RandomState(bits), rng=np.random.Generator(bits))
    assert snapshot.capture(both) is None
    assert snapshot.capture(Bag(a=np.random.Generator(bits), b=np.random.Generator(bits))) is not None


def test_environments_around_an_outside_engine_give_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("bullet_user")
    module.p = types.ModuleType("pybullet")
    monkeypatch.setitem(sys.modules, "bullet_user", module)
    env_class = type("BulletEnv", (Bag,), {"__module__": "bullet_user"})
    assert snapshot.capture(env_class(client=0)) is None


# ---------------------------------------------------------------- states that do not fit


def test_a_state_that_does_not_fit_is_refused() -> None:
    good = snapshot.capture(Bag(a=1))
    bad = [
        snapshot.capture(Moody()),
        snapshot.capture([Bag(a=1), Bag(a=1)]),
        good | {"root": [99]},
        good | {"root": 5},
        good | {"nodes": [{"kind": "unheard of"}]},
        good | {"nodes": [{"kind": "object"}]},
        {},
    ]
    for tree in bad:
        with pytest.raises(EnvError, match="made the checkpoint"):
            snapshot.restore(Bag(a=0), tree)


def test_a_state_reaches_no_packages_but_the_environments() -> None:
    def tree_with(node: dict[str, Any]) -> Any:
        tree = snapshot.capture(Bag(thing=[]))
        tree["nodes"][tree["nodes"][0]["attrs"]["thing"][0]] = node
        return tree

    nodes = [
        {"kind": "object", "class": "subprocess:Popen", "attrs": {}},
        {"kind": "global", "name": "os:system"},
        {"kind": "global", "name": "builtins:eval"},
        {"kind": "function", "name": "os:path.join", "cells": [], "attrs": {}},
        {"kind": "enum", "class": "signal:Signals", "value": 9},
        {"kind": "enum", "class": "gymnasium:Env", "value": 9},
        {"kind": "tuple", "class": "gymnasium:make", "items": ["CartPole-v1"]},
    ]
    for node in nodes:
        with pytest.raises(EnvError):
            snapshot.restore(Bag(thing=[]), tree_with(node))


# ---------------------------------------------------------------- states by request


class Custom(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.native = iter(range(1000))
        self.total = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.total += next(self.native)
        return np.full(1, self.total + self.np_random.random(), np.float32), 1.0, False, False, {}

    def get_state(self) -> dict[str, Any]:
        return {"at": self.native.__length_hint__(), "total": self.total}

    def set_state(self, state: dict[str, Any]) -> None:
        self.native = iter(range(1000 - state["at"], 1000))
        self.total = state["total"]


class NoSetter(Custom):
    set_state = None


class OtherSetter(Custom):
    def set_state(self, position, velocity):  # type: ignore[override]
        raise AssertionError


class NotReady(Custom):
    def get_state(self):
        raise NotImplementedError


def test_an_environment_can_give_its_own_state_beside_its_wrappers() -> None:
    def world() -> LoopWorld:
        return LoopWorld("Custom", [gymnasium.wrappers.TimeLimit(Custom(), 10) for _ in range(2)])

    first, second = world(), world()
    actions = [np.zeros(2, np.int64)] * 30
    first.reset(1)
    record(first, actions[:17])
    state = through_json(first.state_dict())
    second.reset(2)
    second.load_state_dict(state)
    for part, same in zip(record(first, actions), record(second, actions), strict=True):
        assert np.array_equal(part, same)


@pytest.mark.parametrize("cls", [NoSetter, OtherSetter, NotReady])
def test_half_of_get_state_and_set_state_is_none(cls: type) -> None:
    assert snapshot.capture(cls()) is None


def test_wrappers_of_gymnasium_are_captured() -> None:
    def world() -> LoopWorld:
        def env() -> Any:
            inner = gymnasium.make("Pendulum-v1", disable_env_checker=True)
            scaled = gymnasium.wrappers.TransformReward(inner, lambda reward: reward * 0.1)
            smooth = gymnasium.wrappers.NormalizeObservation(scaled)
            return gymnasium.wrappers.FlattenObservation(gymnasium.wrappers.FrameStackObservation(smooth, 3))

        return LoopWorld("Wrapped", [env(), env()])

    first, second = world(), world()
    actions = random_actions(first, 320)
    first.reset(1)
    record(first, actions[:150])
    assert first.state_dict() is not None, snapshot.why_not(first._envs)
    state = through_json(first.state_dict())
    second.reset(2)
    second.load_state_dict(state)
    for part, same in zip(record(first, actions[150:]), record(second, actions[150:]), strict=True):
        assert part.tobytes() == same.tobytes()
