"""Worlds keep one contract, however their environments are stepped."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest

from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
from offbeat.envs.loop import LoopWorld
from offbeat.envs.vector import VectorWorld
from offbeat.errors import EnvError


class CountEnv(gymnasium.Env):
    """Shows [episode, step] and ends after `length` steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.episode = 0
        self.num_steps = 0
        self.actions: list[Any] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.num_steps = 0
        return self.row(), {}

    def step(self, action):
        self.num_steps += 1
        self.actions.append(action)
        return self.row(), float(self.num_steps), self.num_steps == self.length, False, {}

    def row(self):
        return np.array([self.episode, self.num_steps], np.float32)


class Returning(CountEnv):
    """Returns what it is told to from its first step."""

    def __init__(self, **replace: Any) -> None:
        super().__init__()
        self.replace = replace

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        values = {
            "obs": obs,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            **self.replace,
        }
        return values["obs"], values["reward"], values["terminated"], values["truncated"], info


def run(world, num_steps: int, seed: int = 1) -> list[Any]:
    rng = np.random.default_rng(seed)
    space = world.single_action_space
    steps = []
    for _ in range(num_steps):
        if isinstance(space, gymnasium.spaces.Box):
            actions = rng.uniform(space.low, space.high, (world.num_envs, *space.shape)).astype(space.dtype)
        else:
            actions = rng.integers(space.n, size=world.num_envs)
        steps.append(world.step(actions))
    return steps


def cartpole(vectorize: str, num_envs: int, **options: Any):
    return make_world(EnvConfig(id="CartPole-v1", vectorize=vectorize, **options), num_envs)


def test_an_ended_environment_starts_again_at_the_next_step() -> None:
    envs = [CountEnv(2), CountEnv(3)]
    world = LoopWorld("Count", envs)
    assert world.reset(0).tolist() == [[1, 0], [1, 0]]
    seen = [world.step(np.array([t % 2, 0])) for t in range(5)]
    assert [step.obs[0].tolist() for step in seen] == [[1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    assert [step.rewards[0] for step in seen] == [1, 2, 0, 1, 2]
    assert [bool(step.terminated[0]) for step in seen] == [False, True, False, False, True]
    assert envs[0].actions == [0, 1, 1, 0], "the action of the restarting step is not taken"
    assert [step.obs[1].tolist() for step in seen] == [[1, 1], [1, 2], [1, 3], [2, 0], [2, 1]]


@pytest.mark.parametrize("vectorize", ["loop", "vector"])
def test_rows_after_an_end_have_reward_zero_and_no_flags(vectorize: str) -> None:
    world = cartpole(vectorize, 8)
    world.reset(3)
    steps = run(world, 200)
    num_restarts = 0
    for before, after in itertools.pairwise(steps):
        ended = before.terminated | before.truncated
        num_restarts += int(ended.sum())
        assert not (after.terminated | after.truncated)[ended].any()
        assert (after.rewards[ended] == 0).all()
        assert (np.abs(after.obs[ended]) <= 0.05).all(), "a first observation"
        assert (after.rewards[~ended] == 1).all()
        failed = before.terminated
        assert ((np.abs(before.obs[failed, 0]) > 2.4) | (np.abs(before.obs[failed, 2]) > 0.2094)).all()
    assert num_restarts > 20


@pytest.mark.parametrize("vectorize", ["loop", "vector"])
def test_truncation_shows_the_true_final_observation(vectorize: str) -> None:
    short, free = cartpole(vectorize, 6, max_episode_steps=5), cartpole(vectorize, 6)
    assert np.array_equal(short.reset(5), free.reset(5))
    actions = np.array([0, 1, 0, 1, 0, 1])
    for number in range(1, 6):
        one, other = short.step(actions), free.step(actions)
        assert np.array_equal(one.obs, other.obs)
        assert one.truncated.tolist() == [number == 5] * 6
        assert not one.terminated.any()
        assert not other.truncated.any()
    assert (np.abs(short.step(actions).obs) <= 0.05).all()


@pytest.mark.parametrize("vectorize", ["loop", "vector"])
def test_cartpole_is_truncated_after_500_steps(vectorize: str) -> None:
    world = cartpole(vectorize, 6)
    balance = np.array([1.0, 1.6, 18.0, 3.0])
    obs = world.reset(1)
    for number in range(1, 501):
        step = world.step((obs @ balance > 0).astype(np.int64))
        obs = step.obs
        assert not step.terminated.any()
        assert step.truncated.all() == (number == 500)


def test_loop_and_vector_cartpole_follow_the_same_rules() -> None:
    loop, vector = cartpole("loop", 8), cartpole("vector", 8)
    loop.reset(1)
    vector.reset(2)
    vector._env.state = np.stack([np.array(env.unwrapped.state) for env in loop._envs], axis=1)
    running = np.ones(8, np.bool_)
    rng = np.random.default_rng(0)
    for _ in range(100):
        actions = rng.integers(2, size=8)
        one, other = loop.step(actions), vector.step(actions)
        np.testing.assert_allclose(one.obs[running], other.obs[running], rtol=1e-5, atol=1e-6)
        for part in ("rewards", "terminated", "truncated"):
            assert np.array_equal(getattr(one, part)[running], getattr(other, part)[running])
            assert getattr(one, part).dtype == getattr(other, part).dtype
        running &= ~(one.terminated | one.truncated)
    assert not running.any(), "every lane was compared up to its end"


@pytest.mark.parametrize(
    ("env_id", "vectorize"),
    [
        ("CartPole-v1", "loop"),
        ("CartPole-v1", "vector"),
        ("Pendulum-v1", "loop"),
        ("MinAtar/Breakout-v1", "loop"),
    ],
)
def test_seeds_decide_the_stream(env_id: str, vectorize: str) -> None:
    def stream(seed: int) -> tuple[Any, list[Any]]:
        world = make_world(EnvConfig(id=env_id, vectorize=vectorize), 4)
        return world.reset(seed), [step.obs for step in run(world, 60)]

    first, again, other = stream(2**62), stream(2**62), stream(1)
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])


@pytest.mark.parametrize("vectorize", ["loop", "vector"])
def test_lanes_differ(vectorize: str) -> None:
    obs = cartpole(vectorize, 16).reset(7)
    assert len({row.tobytes() for row in obs}) == 16


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MinAtar/Breakout-v1"])
def test_a_second_reset_with_the_same_seed_repeats_the_stream(env_id: str) -> None:
    world = make_world(EnvConfig(id=env_id, vectorize="loop"), 3)
    first = [world.reset(9), *(step.obs for step in run(world, 50))]
    run(world, 7, seed=4)
    second = [world.reset(9), *(step.obs for step in run(world, 50))]
    assert np.array_equal(first, second)


@pytest.mark.parametrize("vectorize", ["loop", "vector"])
def test_returned_arrays_belong_to_the_caller(vectorize: str) -> None:
    world = cartpole(vectorize, 6)
    first = world.reset(1)
    kept = first.copy()
    step = world.step(np.zeros(6, np.int64))
    obs = step.obs.copy()
    world.step(np.ones(6, np.int64))
    assert np.array_equal(first, kept)
    assert np.array_equal(step.obs, obs)
    step.obs[:] = 99
    assert np.abs(world.step(np.ones(6, np.int64)).obs).max() < 9


def test_box_actions_are_not_views_of_the_callers_array() -> None:
    class Keeping(CountEnv):
        action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    env = Keeping(9)
    world = LoopWorld("Keeping", [env])
    world.reset(0)
    actions = np.full((1, 2), 0.5)
    world.step(actions)
    actions[:] = -1
    assert env.actions[0].tolist() == [0.5, 0.5]
    assert env.actions[0].dtype == np.float32


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        ({"obs": np.zeros(3, np.float32)}, ["shape (3,)", "shape (2,)"]),
        ({"obs": np.zeros(2, np.float64)}, ["dtype float64", "dtype float32"]),
        ({"obs": [0.0, 0.0]}, ["type list", "array of shape (2,)"]),
        ({"obs": np.array([0, np.nan], np.float32)}, ["nan at index (1,)", "environment 0"]),
        ({"obs": np.array([np.inf, 0], np.float32)}, ["inf at index (0,)"]),
        ({"reward": None}, ["reward", "None of type NoneType", "return a float"]),
        ({"reward": np.zeros(2)}, ["reward", "shape (2,)"]),
        ({"reward": float("nan")}, ["reward nan", "finite"]),
        ({"terminated": 1}, ["terminated", "1 of type int", "bool"]),
        ({"truncated": "no"}, ["truncated", "'no' of type str", "bool"]),
    ],
)
def test_the_first_step_names_what_breaks_the_contract(replace: dict[str, Any], words: list[str]) -> None:
    world = LoopWorld("Broken", [Returning(**replace)])
    world.reset(0)
    with pytest.raises(EnvError) as caught:
        world.step(np.zeros(1, np.int64))
    assert "Broken" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_what_fits_into_the_space_without_loss_is_taken() -> None:
    world = LoopWorld("Small", [Returning(obs=np.array([1, 2], np.int8), reward=np.float32(0.5))])
    world.reset(0)
    step = world.step(np.zeros(1, np.int64))
    assert step.obs.dtype == np.float32
    assert step.obs.tolist() == [[1, 2]]
    assert step.rewards.tolist() == [0.5]


def test_an_error_says_which_environment_raised() -> None:
    class Raising(CountEnv):
        def step(self, action):
            raise KeyError("lost")

    world = LoopWorld("Mixed", [CountEnv(), Raising()])
    world.reset(0)
    with pytest.raises(KeyError) as caught:
        world.step(np.zeros(2, np.int64))
    assert caught.value.__notes__ == ["in environment 1 of 2 of Mixed"]


def test_global_randomness_is_noticed_and_makes_the_state_unknown() -> None:
    class Global(CountEnv):
        def step(self, action):
            np.random.rand()
            return super().step(action)

    world = LoopWorld("Global", [Global()])
    world.reset(0)
    assert world.state_dict() is not None
    with pytest.warns(RuntimeWarning, match=r"Global draws from .* self.np_random"):
        world.step(np.zeros(1, np.int64))
    assert world.state_dict() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.step(np.zeros(1, np.int64))


class ShiftVectorEnv(gymnasium.vector.VectorEnv):
    """Every lane ends at every third step; its restarting rows can break the rules."""

    def __init__(
        self, num_envs: int = 2, mode: Any = gymnasium.vector.AutoresetMode.NEXT_STEP, **broken: Any
    ) -> None:
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Discrete(4, start=1)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.broken = broken
        self.num_steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return np.full(self.num_envs, 1), {}

    def step(self, actions):
        self.num_steps = (self.num_steps + 1) % 4
        ended = np.full(self.num_envs, self.num_steps == 3)
        values = {
            "obs": np.full(self.num_envs, self.num_steps + 1),
            "rewards": np.ones(self.num_envs),
            "ended": ended,
        }
        values |= self.broken
        return values["obs"], values["rewards"], values["ended"], np.zeros(self.num_envs, np.bool_), {}


def test_a_vector_world_zeroes_the_reward_of_restarting_rows_and_encodes_classes() -> None:
    world = VectorWorld("Shift", ShiftVectorEnv())
    assert world.single_observation_space.shape == (4,)
    assert world.reset(0).tolist() == [[1, 0, 0, 0]] * 2
    steps = [world.step(np.zeros(2, np.int64)) for _ in range(5)]
    assert [step.rewards[0] for step in steps] == [1, 1, 1, 0, 1]
    assert [int(np.argmax(step.obs[0])) for step in steps] == [1, 2, 3, 0, 1]
    assert steps[0].obs.dtype == np.float32


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"obs": np.array([0, 1])}, "4 values"),
        ({"obs": np.array([1, 2, 3])}, "each of 2 environments"),
        ({"rewards": np.ones(3)}, "rewards that is an array of shape"),
        ({"rewards": np.array([0, np.inf])}, "environment 1 returned the reward inf"),
        ({"ended": np.zeros(2)}, "terminated that is an array of shape .* dtype float64"),
    ],
)
def test_a_vector_world_names_what_breaks_the_contract(broken: dict[str, Any], words: str) -> None:
    world = VectorWorld("Shift", ShiftVectorEnv(**broken))
    world.reset(0)
    with pytest.raises(EnvError, match=words):
        world.step(np.zeros(2, np.int64))


def test_a_vector_environment_that_only_claims_next_step_autoreset_is_found_out() -> None:
    world = VectorWorld("Shift", ShiftVectorEnv(ended=np.ones(2, np.bool_)))
    world.reset(0)
    world.step(np.zeros(2, np.int64))
    with pytest.raises(EnvError, match="two steps in a row"):
        world.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED", None])
def test_other_autoreset_modes_are_refused(mode: str | None) -> None:
    env = ShiftVectorEnv(mode=mode and gymnasium.vector.AutoresetMode[mode])
    with pytest.raises(EnvError, match=r"env.vectorize=loop.*NEXT_STEP"):
        VectorWorld("Shift", env)
