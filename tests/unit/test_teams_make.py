"""From a configuration to a team."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

import offbeat
from offbeat.config.models import EnvConfig
from offbeat.envs.teams import make_team
from offbeat.envs.teams.alice_and_bob import AliceAndBobTeam
from offbeat.envs.teams.loop import LoopTeam
from offbeat.errors import EnvError

HERE = "tests.unit.test_teams_make"
ALICE = "offbeat/AliceAndBob-v0"


@offbeat.env_factory
def own_team(num_envs: int, max_episode_steps: int = 50) -> AliceAndBobTeam:
    return AliceAndBobTeam(num_envs, max_steps=max_episode_steps)


@offbeat.env_factory
def endless_team(num_envs: int) -> AliceAndBobTeam:
    return AliceAndBobTeam(num_envs)


@offbeat.env_factory
def no_team(num_envs: int) -> list[int]:
    return [num_envs]


@offbeat.env_factory
def number() -> int:
    return 3


class LonelyVector(gymnasium.vector.VectorEnv):
    pass


class Turns:
    possible_agents = ("a",)

    def agent_iter(self) -> None:
        pass

    def observation_space(self, agent: str) -> None:
        pass

    action_space = observation_space
    reset = step = agent_iter


def make(env_id: str, num_envs: int = 2, **settings: Any) -> Any:
    return make_team(EnvConfig(id=env_id, **settings), num_envs)


def length_of(team: Any) -> int:
    team.reset(0)
    stay = np.zeros((team.num_envs, team.num_agents), np.int64)
    for length in range(1, 500):
        step = team.step(stay)
        if step.truncated.any():
            assert not step.terminated.any()
            return length
    raise AssertionError("it does not end")


@pytest.mark.parametrize(
    ("vectorize", "kind"), [("auto", AliceAndBobTeam), ("vector", AliceAndBobTeam), ("loop", LoopTeam)]
)
def test_alice_and_bob_come_in_both_versions(vectorize: str, kind: type) -> None:
    team = make(ALICE, 3, vectorize=vectorize, kwargs={"see_other": True, "size": 5})
    assert type(team) is kind
    assert (team.num_envs, team.num_agents, team.obs_size, team.state_size) == (3, 2, 22, 22)
    assert team.single_action_space == gymnasium.spaces.Discrete(5) and not team.has_legal
    view = team.reset(1)
    assert view.obs.shape == (3, 2, 22) and view.obs.dtype == np.float32
    assert np.array_equal(view.state, view.obs[:, 0])
    assert length_of(team) == 100


@pytest.mark.parametrize("vectorize", ["vector", "loop"])
@pytest.mark.parametrize("limit", [30, 120])
def test_the_length_of_episodes_can_be_set(vectorize: str, limit: int) -> None:
    assert length_of(make(ALICE, vectorize=vectorize, max_episode_steps=limit)) == limit


@pytest.mark.parametrize("limit", [30, 80])
def test_a_limit_reaches_environments_that_have_one_themselves(limit: int) -> None:
    pytest.importorskip("lbforaging", reason="needs the extra marl")
    env_id = "lbforaging:Foraging-8x8-2p-3f-coop-v3"
    assert length_of(make(env_id)) == 50
    assert length_of(make(env_id, max_episode_steps=limit)) == limit
    assert length_of(make(env_id, kwargs={"max_episode_steps": limit})) == limit


def test_a_limit_that_an_environment_does_not_reach_is_refused() -> None:
    pytest.importorskip("mpe2", reason="needs the extra marl")
    env_id = "mpe2.simple_spread_v3:parallel_env"
    assert length_of(make(env_id, max_episode_steps=7)) == 7
    with pytest.raises(EnvError, match=r"after 25 steps by itself.*set env\.kwargs\.max_cycles"):
        make(env_id, max_episode_steps=40)
    assert length_of(make(env_id, kwargs={"max_cycles": 40}, max_episode_steps=40)) == 40


def test_a_function_that_takes_num_envs_makes_a_team() -> None:
    assert length_of(make(f"{HERE}:own_team")) == 50
    team = make(f"{HERE}:own_team", 4, max_episode_steps=9)
    assert team.num_envs == 4 and length_of(team) == 9


@pytest.mark.parametrize(
    ("env_id", "settings", "message"),
    [
        ("CartPole-v1", {}, "CartPole-v1 has a single agent.*set algorithm.name=ppo"),
        (f"{HERE}:own_team", {"vectorize": "loop"}, "only a vector version; set env.vectorize=vector"),
        (f"{HERE}:endless_team", {"max_episode_steps": 9}, "takes no limit.*or drop env.max_episode_steps"),
        (f"{HERE}:no_team", {}, "must make a Team, but its list has no num_envs, num_agents"),
        (f"{HERE}:number", {}, "makes a int, not a Gymnasium environment with Tuple spaces"),
        (f"{HERE}:number", {"vectorize": "vector"}, "no vector version.*set env.vectorize=loop"),
        (
            f"{HERE}:number",
            {"kwargs": {"size": 3}},
            "could not be made: TypeError.*Check env.id and env.kwargs",
        ),
        (f"{HERE}:LonelyVector", {}, "only a vector version of one agent"),
        (f"{HERE}:Turns", {}, "AECEnv.*parallel_env"),
        (ALICE, {"kwargs": {"siez": 3}}, "could not be made: TypeError.*siez"),
        ("offbeat/AliceAndBo-v0", {}, "did you mean offbeat/AliceAndBob-v0"),
        ("Foraging-5x5-2p-1f-v9", {}, "as in lbforaging:Foraging-5x5-2p-1f-v9"),
        ("tests.unit.nowhere:Env", {}, "cannot import"),
    ],
)
def test_what_makes_no_team_is_refused_with_the_fix(env_id: str, settings: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make(env_id, **settings)


def test_no_environments_are_refused() -> None:
    with pytest.raises(EnvError, match=r"raise env\.num_envs"):
        make(ALICE, 0)


@pytest.mark.parametrize(
    ("package", "env_id"),
    [
        ("lbforaging", "lbforaging:Foraging-8x8-2p-3f-coop-v3"),
        ("rware", "rware:rware-tiny-2ag-v2"),
        ("mpe2", "mpe2.simple_spread_v3:parallel_env"),
    ],
)
def test_a_missing_package_is_named_with_the_extra(
    package: str, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvError, match=rf'{env_id} needs {package} .*pip install "offbeat\[marl\]"'):
        make(env_id)


def test_making_a_team_imports_neither_torch_nor_other_packages() -> None:
    code = (
        "import sys; from offbeat.envs.teams import make_team; from offbeat.config.models import EnvConfig;"
        f"make_team(EnvConfig(id={ALICE!r}), 2);"
        "print(sorted({'torch', 'pettingzoo', 'lbforaging', 'mpe2', 'pygame'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
