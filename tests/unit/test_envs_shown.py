"""What is done about environments before networks see them: flattened, wrapped, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple

import offbeat
from offbeat.cli.main import main
from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
from offbeat.envs.loop import LoopWorld
from offbeat.envs.teams import make_team
from offbeat.envs.vector import VectorWorld
from offbeat.envs.wrappers import Flat
from offbeat.errors import CollectError, EnvError
from tests.unit.test_envs_world import ShiftVectorEnv

HERE = "tests.unit.test_envs_shown"
NESTED = Dict(
    {
        "eyes": Tuple((Box(0, 9, (2, 2), np.uint8), Discrete(3, start=1))),
        "task": Text(20),
        "bits": MultiBinary(2),
    }
)


class Showing(gymnasium.Env[Any, Any]):
    """Shows one observation for ever."""

    def __init__(self, space: gymnasium.Space[Any] = NESTED, obs: Any = None) -> None:
        self.observation_space, self.action_space = space, Discrete(2)
        self.obs = obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.obs, 1.0, False, False, {}


def shown(**changes: Any) -> dict[str, Any]:
    eyes = (np.array([[1, 2], [3, 4]], np.uint8), 2)
    return {"eyes": eyes, "task": "go", "bits": np.array([0, 1], np.int8)} | changes


# ---------------------------------------------------------------- flattened


def test_dict_and_tuple_parts_come_in_the_order_of_the_space() -> None:
    env = Flat(Showing(obs=shown()), "Nested")
    row = env.reset(seed=0)[0]
    assert row.dtype == np.float32
    assert list(NESTED.spaces) == ["bits", "eyes", "task"], "Gymnasium sorts the keys of a dict"
    assert row.tolist() == [0, 1, 1, 2, 3, 4, 0, 1, 0]
    assert env.observation_space.shape == row.shape
    assert env.observation_space.high.tolist() == [1, 1, 9, 9, 9, 9, 1, 1, 1]
    assert env.note == (
        "Nested: the Dict observations (bits, eyes.0, eyes.1) are flattened into vectors of 9 numbers; "
        "text is left out: task"
    )


def test_other_spaces_are_flattened_too() -> None:
    env = Flat(Showing(MultiDiscrete([2, 3]), np.array([1, 0])), "Words")
    assert env.reset(seed=0)[0].tolist() == [0, 1, 1, 0, 0]
    assert "the MultiDiscrete observations are flattened into vectors of 5 numbers" in env.note


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (Dict({"a": Sequence(Discrete(2))}), "part a of its observations is Sequence.* no fixed number"),
        (Sequence(Discrete(2)), "its observation_space is Sequence.* no fixed number"),
        (Dict({"task": Text(4)}), "holds only text"),
    ],
)
def test_what_cannot_be_flattened_is_named(space: gymnasium.Space[Any], words: str) -> None:
    with pytest.raises(EnvError, match=words):
        Flat(Showing(space), "Odd")


@pytest.mark.parametrize(
    "changes", [{"eyes": (np.zeros((2, 2), np.uint8), 0)}, {"eyes": (np.zeros((2, 2), np.uint8),)}]
)
def test_observations_that_are_not_in_the_space_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match="is not in its observation_space"):
        Flat(Showing(obs=shown(**changes)), "Nested").reset(seed=0)
    missing = {key: value for key, value in shown().items() if key != "bits"}
    with pytest.raises(EnvError, match="KeyError"):
        Flat(Showing(obs=missing), "Nested").reset(seed=0)


def test_blackjack_is_flattened_told_and_saved() -> None:
    world = make_world(EnvConfig(id="Blackjack-v1"), 3)
    assert world.single_observation_space.shape == (32 + 11 + 2,)
    assert world.notes == (
        "Blackjack-v1: the Tuple observations (0, 1, 2) are flattened into vectors of 45 numbers",
    )
    obs = world.reset(0)
    assert (obs.sum(axis=1) == 3).all(), "three parts, each with one bit"
    state = world.state_dict()
    first = [world.step(np.array([1, 0, 1])).obs for _ in range(5)]
    world.load_state_dict(state)
    assert np.array_equal(first, [world.step(np.array([1, 0, 1])).obs for _ in range(5)])
    assert make_world(EnvConfig(id="CartPole-v1"), 1).notes == ()


def test_minigrid_leaves_its_mission_out() -> None:
    pytest.importorskip("minigrid", reason="needs offbeat[minigrid]")
    world = make_world(EnvConfig(id="minigrid:MiniGrid-Empty-5x5-v0"), 2)
    assert world.single_observation_space.shape == (4 + 7 * 7 * 3,)
    assert world.notes[0].endswith("(direction, image) are flattened into vectors of 151 numbers; "
                                   "text is left out: mission")  # fmt: skip
    world.reset(0)
    world.step(np.array([0, 2]))
    assert world.state_dict() is not None


# ---------------------------------------------------------------- wrapped


class Add(gymnasium.RewardWrapper[Any, Any]):
    """Adds to rewards."""

    def __init__(self, env: Any, amount: float = 1.0) -> None:
        super().__init__(env)
        self.amount = amount

    def reward(self, reward: Any) -> float:
        return reward + self.amount


class Double(gymnasium.RewardWrapper[Any, Any]):
    """Doubles rewards."""

    def reward(self, reward: Any) -> float:
        return 2 * reward


class Blind(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Forgets its spaces."""

    observation_space = None


CALLED: list[object] = []


def called(env: Any) -> Any:
    """Would be called, were it not for the check of its type."""
    CALLED.append(env)
    return env


def reward_with(*wrappers: Any, env_id: str = "CartPole-v1") -> float:
    world = make_world(EnvConfig(id=env_id, wrappers=tuple(wrappers)), 2)
    assert type(world) is LoopWorld
    world.reset(0)
    return float(world.step(np.zeros(2, np.int64)).rewards[0])


def test_wrappers_come_in_order_the_first_one_innermost() -> None:
    add = {"wrapper": f"{HERE}:Add", "kwargs": {"amount": 3.0}}
    assert reward_with() == 1
    assert reward_with(add, f"{HERE}:Double") == (1 + 3) * 2
    assert reward_with(f"{HERE}:Double", add) == 1 * 2 + 3
    assert reward_with(f"{HERE}:Add", {"wrapper": f"{HERE}:Add", "kwargs": None}) == 3


def test_wrapped_environments_show_what_the_wrapper_shows_and_are_saved() -> None:
    stack = {"wrapper": "gymnasium.wrappers:FrameStackObservation", "kwargs": {"stack_size": 3}}
    world = make_world(EnvConfig(id="CartPole-v1", num_envs=32, wrappers=(stack,)), 32)
    assert world.single_observation_space.shape == (3, 4)
    world.reset(0)
    assert world.state_dict() is not None


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("os:system", "os is a module of Python itself"),
        (f"{HERE}:called", "is a function, not a subclass"),
        (f"{HERE}:Showing", "is the class Showing, not a subclass of gymnasium.Wrapper$"),
        ("gymnasium.wrappers.vector:ClipReward", "vector environments: take the one of gymnasium.wrappers"),
        (f"{HERE}:Nothing", "has no 'Nothing'; name a wrapper as module:Class"),
        ("no_such_package:Wrapper", "cannot import 'no_such_package'"),
        ({"wrapper": f"{HERE}:Add", "kwargs": {"amout": 1}}, "unexpected keyword.*'amout'; it takes the arg"),
        (f"{HERE}:Blind", "in .*Blind: observation_space must be a gymnasium.Space, it has none"),
    ],
)
def test_what_is_no_wrapper_is_refused_before_it_is_called(wrapper: Any, words: str) -> None:
    with pytest.raises(EnvError, match=words) as caught:
        reward_with(f"{HERE}:Double", wrapper)
    assert "env.wrappers[1]" in str(caught.value) or "observation_space" in words
    assert not CALLED


def test_vector_versions_are_not_wrapped() -> None:
    config = EnvConfig(id="CartPole-v1", vectorize="vector", wrappers=(f"{HERE}:Double",))
    with pytest.raises(EnvError, match=r"set env.vectorize=loop, or drop env.wrappers"):
        make_world(config, 8)


def test_teams_of_gymnasium_environments_are_wrapped() -> None:
    config = EnvConfig(id="tests.unit.test_teams_loop:Counting", wrappers=("no_such_package:Wrapper",))
    with pytest.raises(EnvError, match=r"env.wrappers\[0\]: cannot import"):
        make_team(config, 1)
    with pytest.raises(EnvError, match=r"env.wrappers are for Gymnasium environments"):
        make_team(config.model_copy(update={"id": "tests.unit.test_teams_loop:Leaving"}), 1)


# ---------------------------------------------------------------- old interfaces


class OldGym(gymnasium.Env[Any, Any]):
    """As Gym had it."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self) -> Any:
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, {}


class FourValues(OldGym):
    """Only its step is old."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}


class NoInfo(FourValues):
    """Its reset says nothing but the observation."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32)


class Raises(FourValues):
    """Fails by itself."""

    def step(self, action: Any) -> Any:
        raise ValueError("no such move")


class NoSpaces(gymnasium.Env[Any, Any]):
    """Does not say what it shows."""


def try_out(config: EnvConfig) -> None:
    world = make_world(config, 2)
    world.reset(0)
    world.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("OldGym", "reset() must take a seed and options; write def reset(self, *, seed=None, options=None)"),
        ("FourValues", "step() must return 5 values (observation, reward, terminated, truncated, info), it"),
        ("NoInfo", "reset() must return 2 values (observation, info), it returned an array of shape (2,)"),
        ("NoSpaces", "observation_space must be a gymnasium.Space, it has none"),
    ],
)
@pytest.mark.parametrize("limit", [None, 5])
def test_old_interfaces_are_named_in_a_sentence(kind: str, words: str, limit: int | None) -> None:
    # With a limit, Gymnasium's own wrapper is the one that cannot unpack what comes back.
    with pytest.raises(EnvError) as caught:
        try_out(EnvConfig(id=f"{HERE}:{kind}", max_episode_steps=limit))
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{HERE}:{kind}")


def test_an_error_of_the_environments_own_stays_what_it_is() -> None:
    world = LoopWorld("Raises", [Raises()])
    world.reset(0)
    with pytest.raises(ValueError, match="no such move"):
        world.step(np.zeros(1, np.int64))


@pytest.mark.parametrize("kind", ["OldGym", "FourValues", "NoInfo", "NoSpaces"])
def test_a_run_refuses_them_before_it_leaves_a_trace(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [f"env.id={HERE}:{kind}", f"run.dir={tmp_path / 'run'}", "run.rounds=1", "runtime.kind=inline"]
    told = []
    for command in ("check", "train"):
        with pytest.raises(SystemExit) as ended:
            main([command, "cartpole-ppo", *settings, "observe.console=none", "env.max_episode_steps=5"])
        told.append((ended.value.code, capfd.readouterr().err.rpartition(f"{HERE}:{kind}: ")[2]))
    assert told[0] == told[1] and told[0][0] == 2
    assert not (tmp_path / "run").exists()


def test_an_environment_that_raises_by_itself_is_left_to_the_run(tmp_path: Path) -> None:
    settings = {"env.id": f"{HERE}:Raises", "run.dir": str(tmp_path / "run"), "runtime.kind": "inline"}
    with pytest.raises(CollectError, match="no such move"):
        offbeat.train("cartpole-ppo", overrides={**settings, "observe.console": "none"})


def test_vector_environments_of_the_old_interface_are_named_too() -> None:
    class Four(ShiftVectorEnv):
        def step(self, actions: Any) -> Any:
            return super().step(actions)[:4]

    world = VectorWorld("Four", Four())
    world.reset(0)
    with pytest.raises(EnvError, match=r"Four: step\(\) must return 5 values .* it returned 4 values"):
        world.step(np.zeros(2, np.int64))


def test_check_and_doctor_say_it_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from offbeat.cli.main import main

    for verb in (
        ["check", "cartpole-ppo", f"env.id={HERE}:FourValues"],
        ["doctor", "--env", f"{HERE}:NoInfo"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(verb)
        assert ended.value.code != 0
        *notes, said = capfd.readouterr().err.splitlines()
        assert all(note.startswith("note: this runs code of") for note in notes)
        assert "must return" in said
