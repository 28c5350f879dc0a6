"""From ids to worlds, and from mistakes to messages that say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
from offbeat.envs.loop import LoopWorld
from offbeat.envs.make import MIN_VECTOR_ENVS
from offbeat.envs.teams import make_team
from offbeat.envs.vector import VectorWorld
from offbeat.errors import EnvError

USER_MODULE = """
import gymnasium
import numpy as np
import offbeat
from gymnasium.vector import AutoresetMode, VectorEnv
from os import system
from subprocess import Popen

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])
    def __init__(self, value=0.0):
        self.value = value
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(1, self.value, np.float32), {}
    def step(self, action):
        return np.full(1, self.value, np.float32), float(action.sum()), False, False, {}

class MineVector(VectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    def __init__(self, num_envs=1):
        self.num_envs = num_envs
        self.single_observation_space = Mine.observation_space
        self.single_action_space = Mine.action_space

class OddActions(Mine):
    action_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)])

class Failing(Mine):
    def __init__(self):
        raise RuntimeError("no licence")

@offbeat.env_factory
def make_mine(value=0.5):
    return Mine(value)

def undeclared():
    return Mine()

@offbeat.env_factory
def make_vector(num_envs):
    return MineVector(num_envs)

gymnasium.register("Registered-v3", entry_point=Mine, vector_entry_point=MineVector)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_envs.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_envs", raising=False)
    gymnasium.registry.pop("Registered-v3", None)
    return "user_envs"


def world_of(env_id: str, num_envs: int = 2, **options: Any):
    return make_world(EnvConfig(id=env_id, **options), num_envs)


@pytest.mark.parametrize(
    ("options", "num_envs", "kind"),
    [
        ({}, MIN_VECTOR_ENVS, VectorWorld),
        ({}, MIN_VECTOR_ENVS - 1, LoopWorld),
        ({"vectorize": "vector"}, 1, VectorWorld),
        ({"vectorize": "loop"}, 32, LoopWorld),
        ({"max_episode_steps": 7}, 8, VectorWorld),
        ({"kwargs": {"sutton_barto_reward": True}}, 8, VectorWorld),
    ],
)
def test_how_cartpole_is_stepped(options: dict[str, Any], num_envs: int, kind: type) -> None:
    assert type(world_of("CartPole-v1", num_envs, **options)) is kind


def test_auto_loops_when_the_vector_version_does_not_take_the_arguments() -> None:
    assert type(world_of("offbeat/Memory-v0", 8)) is VectorWorld
    assert type(world_of("offbeat/Memory-v0", 8, max_episode_steps=3)) is LoopWorld
    with pytest.raises(EnvError, match=r"does not take \['max_episode_steps'\].*vectorize=loop"):
        world_of("offbeat/Memory-v0", 8, max_episode_steps=3, vectorize="vector")


def test_kwargs_reach_the_environment() -> None:
    for vectorize in ("loop", "vector"):
        world = world_of("CartPole-v1", 2, kwargs={"sutton_barto_reward": True}, vectorize=vectorize)
        world.reset(0)
        assert (world.step(np.zeros(2, np.int64)).rewards == 0).all()


def test_max_episode_steps_truncates_what_has_no_limit_of_its_own() -> None:
    world = world_of("MinAtar/Freeway-v1", 2, max_episode_steps=4)
    world.reset(0)
    assert [world.step(np.zeros(2, np.int64)).truncated.all() for _ in range(6)] == [0, 0, 0, 1, 0, 0]


def test_minatar_shows_images_with_channels_first() -> None:
    world = world_of("MinAtar/Breakout-v1", 3)
    assert world.single_observation_space == gymnasium.spaces.Box(0, 1, (4, 10, 10), np.uint8)
    assert world.single_action_space.n == 3
    obs = world.reset(0)
    assert obs.shape == (3, 4, 10, 10)
    assert (obs[:, 3].sum(axis=(1, 2)) == 30).all(), "three rows of bricks"
    assert world_of("MinAtar/Breakout-v0").single_action_space.n == 6


def test_discrete_observations_become_one_hot() -> None:
    world = world_of("FrozenLake-v1", 2, kwargs={"is_slippery": False})
    assert world.single_observation_space.shape == (16,)
    assert np.array_equal(world.reset(0), np.eye(16, dtype=np.float32)[[0, 0]])
    assert np.array_equal(world.step(np.array([1, 2])).obs, np.eye(16, dtype=np.float32)[[4, 1]])


def test_an_id_can_name_the_module_that_registers_it(user_module: str) -> None:
    assert type(world_of(f"{user_module}:Registered-v3", vectorize="loop")) is LoopWorld


def test_an_id_can_name_a_class_or_function(user_module: str) -> None:
    world = world_of(f"{user_module}:Mine", kwargs={"value": 0.25}, max_episode_steps=1)
    assert world.reset(0).tolist() == [[0.25], [0.25]]
    step = world.step(np.array([[0, 1], [1, 2]]))
    assert step.rewards.tolist() == [1, 3]
    assert step.truncated.all()
    assert world_of(f"{user_module}:make_mine").reset(0).tolist() == [[0.5], [0.5]]


def test_auto_loops_around_other_autoreset_modes_and_refuses_them_when_asked_for(user_module: str) -> None:
    assert type(world_of(f"{user_module}:Registered-v3", 8)) is LoopWorld
    for env_id, vectorize in (("Registered-v3", "vector"), ("MineVector", "auto"), ("make_vector", "vector")):
        with pytest.raises(EnvError, match=r"SAME_STEP.*NEXT_STEP"):
            world_of(f"{user_module}:{env_id}", 8, vectorize=vectorize)


@pytest.mark.parametrize(
    ("env_id", "options", "words"),
    [
        ("CartPol-v1", {}, "did you mean CartPole-v1"),
        ("CartPole", {}, "CartPole-v1"),
        ("LunarLander-v2", {}, r"LunarLander-v3.*offbeat\[box2d\]"),
        ("MinAtar/Brekout-v1", {}, r"MinAtar/Breakout-v1"),
        ("ALE/Pong-v5", {}, "pip install ale-py"),
        ("Nothing-at-all", {}, r"package.module:ClassName"),
        ("no_such_package:Env-v0", {}, "cannot import 'no_such_package'"),
        ("user_envs:Other", {}, "user_envs neither registers nor defines 'Other'"),
        ("MiniGrid-Emty-5x5-v0", {}, r"offbeat\[minigrid\]"),
        ("user_envs:OddActions", {}, "action_space is Tuple"),
        ("user_envs:Failing", {}, "RuntimeError: no licence"),
        ("user_envs:Mine", {"vectorize": "vector"}, "no vector version"),
        ("user_envs:MineVector", {"vectorize": "loop"}, "only a vector version"),
        ("CartPole-v1", {"kwargs": {"gravity": 1}}, "env.kwargs"),
        ("Pendulum-v1", {"vectorize": "vector"}, "no vector version"),
    ],
)
@pytest.mark.usefixtures("user_module")
def test_mistakes_are_named(env_id: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvError, match=words):
        world_of(env_id, **options)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "words"),
    [
        ("os:system", {"command": "touch {ran}"}, "os is a module of Python itself"),
        ("subprocess:Popen", {"args": ["touch", "{ran}"]}, "subprocess is a module of Python itself"),
        ("user_envs:system", {"command": "touch {ran}"}, "neither a class of environments nor"),
        ("user_envs:Popen", {"args": ["touch", "{ran}"]}, "neither a class of environments nor"),
        ("user_envs:undeclared", {}, "put @offbeat.env_factory above the function"),
        ("user_envs:gymnasium", {}, "neither registers nor defines"),
        ("user_envs.os:system", {}, "cannot import"),
        (".user_envs:Mine", {}, "no name of a module"),
    ],
)
@pytest.mark.usefixtures("user_module")
def test_an_id_calls_nothing_but_environments(
    env_id: str, kwargs: dict[str, Any], words: str, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    filled = {
        key: [part.format(ran=ran) for part in value] if isinstance(value, list) else value.format(ran=ran)
        for key, value in kwargs.items()
    }
    for vectorize in ("auto", "vector", "loop"):
        for make in (make_world, make_team):
            with pytest.raises(EnvError, match=words):
                make(EnvConfig(id=env_id, kwargs=filled, vectorize=vectorize), 1)
    assert not ran.exists()


def test_wrappers_are_not_looked_for_in_python_itself() -> None:
    with pytest.raises(EnvError, match=r"env\.wrappers\[0\].*antigravity is a module of Python itself"):
        world_of("CartPole-v1", wrappers=["antigravity:Wrapper"])


def test_a_world_needs_an_environment() -> None:
    with pytest.raises(EnvError, match=r"env.num_envs"):
        world_of("CartPole-v1", 0)


@pytest.mark.parametrize(
    ("missing", "env_id", "command"),
    [("minatar", "MinAtar/Breakout-v1", "offbeat[minatar]"), ("Box2D", "LunarLander-v3", "offbeat[box2d]")],
)
def test_a_missing_package_gives_its_install_command(missing: str, env_id: str, command: str) -> None:
    script = f"""
import sys
sys.modules[{missing!r}] = None
from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
try:
    make_world(EnvConfig(id={env_id!r}), 1)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("EnvError")
    assert f'pip install "{command}"' in done.stdout


def test_importing_environments_imports_no_torch() -> None:
    script = "import sys, offbeat.envs, offbeat.testing.envs; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minigrid", None)  # as if it were not there
    with pytest.raises(EnvError, match=r"cannot import 'minigrid' .*; pip install \"offbeat\[minigrid\]\""):
        world_of("minigrid:MiniGrid-Empty-5x5-v0")
