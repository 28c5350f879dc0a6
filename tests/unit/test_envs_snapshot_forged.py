"""No state of an environment, however it was forged, runs code that is not the environment's own."""

from __future__ import annotations

import enum
import functools
import gc
import os
import pickle
import random
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import gymnasium.vector
import numpy as np
import pytest

from offbeat.envs import snapshot
from offbeat.errors import EnvError


@pytest.fixture(scope="module", autouse=True)
def only_what_is_new_is_collected() -> None:
    """Each test collects garbage, which takes half a second where everything has been imported."""
    gc.collect()
    gc.freeze()


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Place(NamedTuple):
    row: int
    column: int


class Thing:
    def __init__(self, size: int = 0) -> None:
        self.size = size

    def grow(self) -> None:
        self.size += 1


class Closing:
    """Calls what it holds when it is dropped."""

    def close(self) -> None:
        pass

    def __del__(self) -> None:
        self.close()


class Held(gymnasium.Env):
    """Holds a value of every kind, with room for others."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.spec = gymnasium.spec("CartPole-v1")
        self.module = os.path
        self.hook = functools.partial(self.reset, seed=1)
        self.act = hold
        self.grow = Thing(3).grow
        self.things = [Thing(1), {"a": Place(1, 2)}, Colour.RED, {1, 2}]
        self.rng = np.random.default_rng(0)
        self.python = random.Random(0)
        self.grid = np.zeros((2, 3))
        self.row = self.grid[0]
        self.names = np.array(["a", None], object)
        self.space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(3))

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


def hold() -> None:
    pass


def made() -> Any:
    """As environments are made for a run: within a wrapper of gymnasium."""
    return gymnasium.wrappers.TimeLimit(Held(), 10)


HERE = __name__
SYSTEM = "gymnasium.envs.registration:importlib._bootstrap_external._os.system"


def forged(more: list[dict[str, Any]], **attrs: Any) -> dict[str, Any]:
    """The state of `Held` with more nodes: ``"+i"`` is node i of ``more``; ``attrs`` are the env's."""
    tree: Any = snapshot.capture(made())
    assert tree is not None, snapshot.why_not(made())
    start = len(tree["nodes"])

    def place(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("+"):
            return [start + int(value[1:])]
        if isinstance(value, dict):
            return {key: place(item) for key, item in value.items()}
        return [place(item) for item in value] if isinstance(value, list) else value

    tree["nodes"] += [place(node) for node in more]
    tree["nodes"][inner(tree)]["attrs"] |= place(attrs)
    return tree


def inner(tree: Any) -> int:
    """The number of the node of `Held`."""
    return [node.get("class") for node in tree["nodes"]].index(f"{HERE}:Held")


def call(name: str, *args: Any) -> list[dict[str, Any]]:
    """Nodes of a partial, which is the first of them: a call of a global name with values."""
    return [
        {"kind": "partial", "func": "+1", "args": "+2", "keywords": "+3"},
        {"kind": "global", "name": name},
        {"kind": "tuple", "items": list(args)},
        {"kind": "dict", "keys": [], "values": []},
    ]


def dropped(class_name: str, command: str) -> dict[str, Any]:
    """The second of two values of one key: the first is dropped, and its ``__del__`` calls ``close``."""
    thing = {"kind": "object", "class": class_name, "attrs": {"close": "+0", "fp": None, "mode": "r"}}
    twice = {"kind": "dict", "keys": ["k", "k"], "values": ["+4", 1]}
    return forged([*call(SYSTEM, command), thing, twice], extra="+5")


def restored(tree: Any) -> Held | None:
    """A fresh environment with the state, as a run uses it; None when the state was refused."""
    env = made()
    try:
        snapshot.restore(env, tree)
    except EnvError:
        env = None
    gc.collect()
    return None if env is None else env.unwrapped


ZIP = "gymnasium.envs.registration:importlib.metadata.zipfile.ZipFile"


@pytest.mark.parametrize("class_name", [ZIP, f"{HERE}:Closing"])
def test_nothing_is_run_by_dropping_what_a_state_made(class_name: str, tmp_path: Path) -> None:
    assert restored(dropped(class_name, f"touch {tmp_path}/ran")) is None
    assert not any(tmp_path.iterdir())


def loads(command: str) -> list[dict[str, Any]]:
    """Nodes of a call of ``pickle.loads`` by way of a class of gymnasium that has it for a method."""

    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (command,)

    body = {"kind": "bytes", "hex": pickle.dumps(Attack()).hex()}
    owner = {"kind": "object", "class": "gymnasium.vector.utils.misc:CloudpickleWrapper", "attrs": {}}
    bound = {"kind": "method", "self": "+4", "name": "__setstate__"}
    nodes = call("", "+6")
    return [nodes[0], bound, nodes[2], nodes[3], owner, {"kind": "none"}, body]


@pytest.mark.parametrize("place", ["step", "hook"])
@pytest.mark.parametrize(
    "nodes",
    [
        lambda command: call(SYSTEM, command),
        lambda command: call("os:system", command),
        lambda command: call("posix:system", command),
        lambda command: call("builtins:exec", f"import os; os.system({command!r})"),
        lambda command: call("gymnasium.envs.registration:load_env_creator", "os:system"),
        lambda command: call(f"{HERE}:os.system", command),
        loads,
    ],
    ids=["through modules", "by name", "posix", "exec", "load_env_creator", "through here", "unpickling"],
)
def test_a_state_brings_no_code_along(nodes: Any, place: str, tmp_path: Path) -> None:
    env = restored(forged(nodes(f"touch {tmp_path}/ran"), **{place: "+0"}))
    if env is not None:
        getattr(env, place)()
    assert env is None
    assert not any(tmp_path.iterdir())


def test_a_state_does_not_take_the_place_of_a_method() -> None:
    nodes = [{"kind": "function", "name": f"{HERE}:hold", "cells": [], "attrs": {}}]
    assert restored(forged(nodes, act="+0")).act is hold
    assert restored(forged(nodes, other="+0")).other is hold
    with pytest.raises(EnvError, match=r"would replace .*Held\.step"):
        snapshot.restore(made(), forged(nodes, step="+0"))


@pytest.mark.parametrize(
    "node",
    [
        {"kind": "object", "class": "gymnasium.envs.registration:EnvSpec", "attrs": {"id": "x"}},
        {"kind": "object", "class": "builtins:module", "attrs": {"id": "x"}},
        {"kind": "object", "class": "posixpath:", "attrs": {}},
        {"kind": "global", "name": "posixpath:"},
        {"kind": "method", "self": "+1", "name": "tofile"},
        {"kind": "view", "base": "+2", "dtype": "<f8", "offset": 0, "shape": [1], "strides": [8]},
        {"kind": "view", "base": "+1", "dtype": "<f8", "offset": 800, "shape": [9], "strides": [8]},
        {"kind": "item array", "dtype": "|O", "shape": [10**9, 10**9], "items": []},
        {"kind": "item array", "dtype": "<U999999999", "shape": [1], "items": ["x"]},
        {"kind": "scalar", "dtype": "|O", "item": "+1"},
        {"kind": "dtype", "dtype": [["a", "O"]]},
        {"kind": "generator", "bits": "+1"},
        {"kind": "tuple", "class": f"{HERE}:Place", "items": [1]},
        {"kind": "tuple", "items": ["+0"]},
        {
            "kind": "bit generator",
            "class": "PCG64",
            "state": None,
            "entropy": 1,
            "spawn": [None, 2**40, 0],
        },
    ],
    ids=lambda node: f"{node['kind']} {node.get('class', '')}",
)
def test_nodes_that_no_capture_writes_are_refused(node: dict[str, Any]) -> None:
    nodes = [node, {"kind": "array", "data": np.zeros(3)}, {"kind": "object", "class": "?", "attrs": {}}]
    assert restored(forged(nodes, new="+0")) is None
    assert restored(forged(nodes, spec="+0", module="+0")) is None


# ---------------------------------------------------------------- random trees

KINDS = ("object", "custom", "space", "enum", "list", "tuple", "set", "frozenset", "deque", "float", "bytes")
KINDS += ("range", "dtype", "scalar", "array", "view", "item array", "generator", "bit generator", "dict")
KINDS += ("random state", "random", "function", "method", "global", "partial", "defaultdict", "OrderedDict")
METHODS = ("close", "step", "__del__", "__setstate__", "__call__", "grow", "append", "tofile", "run", "start")
OWN = {HERE, "offbeat.envs.snapshot", "offbeat.errors", "numpy", "gymnasium.core", "gymnasium.spaces"}
HELPERS = {"inspect", "functools", "enum", "random", "abc", "types", "typing", "collections", "weakref"}
HARMLESS = OWN | HELPERS | {"math", "_collections_abc", "contextlib", "secrets", "gymnasium.utils.seeding"}
HARMLESS |= {"threading"}  # the lock of a random generator
DANGEROUS = {"eval", "exec", "compile", "__import__", "open", "input", "breakpoint"}
BUILT_IN = {"builtins", "math", "_functools", "itertools", "_operator", "_collections", "collections", "_abc"}
BUILT_IN |= {"sys", "_random", "random", "numpy", "_contextvars"}


def all_names(rng: random.Random) -> list[str]:
    """Global names of all kinds: of what is loaded, of what is reached through modules, and of ours."""
    names = [SYSTEM, ZIP, "os:system", "builtins:exec", "builtins:list", f"{HERE}:os.system", "posixpath:"]
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
            if issubclass(type(value), types.ModuleType):
                inner = rng.choice(list(vars(value)) or ["x"])  # dir() loads a lazy module
                names.append(f"{module.__name__}:{name}.{inner}")
            elif callable(value):
                names.append(f"{module.__name__}:{name}")
    rng.shuffle(names)
    ours = [f"{HERE}:{name}" for name in ("Thing", "Held", "Place", "Colour", "hold", "Closing", "Held.step")]
    return names[:3000] + ours * 60


class Trees:
    """Draws states: those of `Held`, with values, names and whole nodes put in place of others."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._names = all_names(self._rng)
        self._base: Any = snapshot.capture(made())
        self._inner = inner(self._base)

    def draw(self) -> dict[str, Any]:
        nodes = [dict(node) for node in self._base["nodes"]]
        for _ in range(self._rng.randint(1, 6)):
            nodes.append(self._node(len(nodes)))
        for _ in range(self._rng.randint(1, 5)):
            self._spoil(nodes)
        return {"root": [0], "nodes": nodes}

    def _spoil(self, nodes: list[dict[str, Any]]) -> None:
        rng = self._rng
        choice = rng.random()
        if choice < 0.4:
            attrs = dict(nodes[self._inner]["attrs"])
            attrs[rng.choice([*attrs, *METHODS, "new"])] = [len(nodes) - rng.randint(1, 3)]
            nodes[self._inner] = nodes[self._inner] | {"attrs": attrs}
        elif choice < 0.7:
            node = rng.randrange(self._inner + 1, len(nodes))
            key = rng.choice(list(nodes[node]))
            nodes[node] = nodes[node] | {key: self._value(len(nodes))}
        else:
            nodes[rng.randrange(self._inner + 1, len(nodes))] = self._node(len(nodes))

    def _node(self, size: int) -> dict[str, Any]:
        rng = self._rng
        keys = ("func", "args", "keywords", "self", "cells", "state", "rng", "gauss", "entropy", "bits")
        node = {key: self._value(size) for key in (*keys, "base", "item", "factory", "value")}
        node |= {"kind": rng.choice(KINDS), "class": rng.choice(self._names), "name": rng.choice(self._names)}
        node |= {"attrs": {rng.choice([*METHODS, "size", "new"]): self._value(size) for _ in range(3)}}
        node |= {"items": [self._value(size) for _ in range(2)], "keys": ["k", "k"], "values": [[size], [1]]}
        node |= {"dtype": rng.choice(["<f8", "|O", "<U3", "x"]), "data": np.zeros(2), "text": "1"}
        node |= {"shape": [2], "strides": [8], "offset": 0, "maxlen": None, "bounds": [0, 2, 1], "hex": "00"}
        if rng.random() < 0.3:
            node["name"] = rng.choice(METHODS)
        return node

    def _value(self, size: int) -> Any:
        rng = self._rng
        kinds = (rng.choice(self._names), rng.choice(METHODS), [], None, 1, 0.5, {"size": [1]}, [[1], [2]])
        return [rng.randrange(size)] if rng.random() < 0.6 else rng.choice(kinds)


class Calls:
    """Counts calls while it is on, and notes those outside of the allow-list."""

    def __init__(self) -> None:
        self.count = 0
        self.strange: set[str] = set()

    def __enter__(self) -> Calls:
        self._of_tests = gc.callbacks[:]  # pytest's plugins hear of collections, whoever causes them
        gc.callbacks.clear()
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.callbacks.extend(self._of_tests)

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.count += 1
            module = str(frame.f_globals.get("__name__"))
            if not any(module == own or module.startswith(f"{own}.") for own in HARMLESS):
                self.strange.add(f"{module}:{frame.f_code.co_qualname}")
        elif event == "c_call":
            self.count += 1
            module = str(argument.__module__ or type(argument.__self__).__module__)
            is_known = module.partition(".")[0] in BUILT_IN or argument is os.urandom
            if not is_known or (module == "builtins" and argument.__name__ in DANGEROUS):
                self.strange.add(f"{module}:{argument.__qualname__}")


@pytest.mark.parametrize("num_trees", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_states_call_nothing_outside_the_allow_list(num_trees: int, record_property: Any) -> None:
    trees, num_restored = Trees(0), 0
    warm = made()
    snapshot.restore(warm, snapshot.capture(warm))
    seen = Calls()
    for _ in range(num_trees):
        env, tree = made(), trees.draw()
        with seen:
            try:
                snapshot.restore(env, tree)
            except EnvError:
                continue
            finally:
                del tree
                env.unwrapped.__dict__.clear()
        num_restored += 1
    assert not seen.strange, sorted(seen.strange)
    is_restored = num_restored > num_trees // 50
    assert is_restored, "some trees are harmless, so the others are not refused for their form alone"
    record_property("trees", num_trees)
    record_property("calls", seen.count)
    print(f"{num_trees} states, {num_restored} of them restored, {seen.count} calls, none outside the list")
