"""Teams of ordinary environments: Tuple spaces, parallel environments, what they may and may not return."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

from offbeat.checkpoint.codec import pack, unpack
from offbeat.config.models import EnvConfig
from offbeat.envs.teams import Team, TeamStep, make_team
from offbeat.envs.world import env_seed
from offbeat.errors import EnvError

HERE = "tests.unit.test_teams_loop"
ENDS = ("terminated", "truncated")
ARRAYS = ("next_obs", "next_state", "rewards", "terminated", "truncated")


def team(what: str, num_envs: int = 2, max_episode_steps: int | None = None, **kwargs: Any) -> Team:
    where = what if ":" in what else f"{HERE}:{what}"
    config = EnvConfig(id=where, kwargs=kwargs, max_episode_steps=max_episode_steps, vectorize="loop")
    return make_team(config, num_envs)


def zeros(made: Team) -> np.ndarray:
    return np.zeros((made.num_envs, made.num_agents), np.int64)


def as_bytes(step: TeamStep) -> bytes:
    parts = [getattr(step, name) for name in ARRAYS]
    parts += [step.view.obs, step.view.state, step.view.alive]
    parts += [part for part in (step.view.legal, step.success) if part is not None]
    return b"".join(part.tobytes() for part in parts)


def legal_actions(made: Team, num_steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shape, space = (made.num_envs, made.num_agents), made.single_action_space
    if isinstance(space, Box):
        return [rng.uniform(space.low, space.high, (*shape, *space.shape)) for _ in range(num_steps)]
    legal = made.reset(0).legal
    counts = np.full(shape, space.n) if legal is None else legal.sum(axis=2)
    return [rng.integers(counts) for _ in range(num_steps)]


# ---------------------------------------------------------------- environments made for these tests


class Counting(gymnasium.Env):
    """Two agents who see 2 and 3 numbers and have 2 and 4 actions; ends after ``length`` steps."""

    def __init__(self, length: int = 5, fault: str = "", at_step: int = 3) -> None:
        self.observation_space = Tuple((Box(-9, 9, (2,)), Box(-9, 9, (3, 1))))
        self.action_space = Tuple((Discrete(2), Discrete(4, start=1)))
        self.length, self.fault, self.at_step = length, fault, at_step
        self.count = 0
        self.seeds: list[int | None] = []
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.count = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        self.count += 1
        bad = self.fault if self.count == self.at_step else ""
        if bad == "raise":
            raise RuntimeError("no more")
        if bad == "four":
            return self._seen(), [1.0, 0.5], False, {}
        if bad == "none":
            return None
        rewards = [1.0, float("nan") if bad == "reward" else 0.5]
        return self._seen(bad), rewards, self.count >= self.length, False, {}

    def _seen(self, bad: str = "") -> Any:
        first = np.array([self.count, np.inf if bad == "obs" else 1.0], np.float32)
        if bad == "agents":
            return (first,)
        return first, np.full((2, 1) if bad == "shape" else (3, 1), -self.count, np.float32)


class Masked(gymnasium.Env):
    """Two agents whose observations say which of three actions are legal; each has an end of its own."""

    def __init__(self, ends: Sequence[str] = ("terminated", "truncated"), actions: str = "discrete") -> None:
        part = Dict({"observation": Box(-9, 9, (1,)), "action_mask": Box(0, 1, (3,), np.int8)})
        self.observation_space = Tuple((part, part))
        space = Discrete(3) if actions == "discrete" else Box(-1, 1, (3,))
        self.action_space = Tuple((space, space))
        self.ends = ends

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        flags = {name: [self.count > 1 and end == name for end in self.ends] for name in ENDS}
        return self._seen(), np.array(1.5), flags["terminated"], flags["truncated"], {}

    def _seen(self) -> Any:
        first = {"observation": np.zeros(1, np.float32), "action_mask": np.array([1, 0, self.count % 2])}
        return first, {**first, "action_mask": np.array([0, 1, 1])}


class Stateful(Counting):
    """The same with a state of its own, and with success at the end."""

    def state(self) -> np.ndarray:
        bad = self.fault == "state" and self.count == self.at_step
        return np.array([[self.count, np.nan if bad else 7.0]])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], {"is_success": False}

    def step(self, action: Any) -> Any:
        seen, _, ended, late, _ = super().step(action)
        return seen, 2.5, ended, late, {"is_success": bool(action[0])}


class Hidden(Counting):
    """Holds something whose state cannot be seen."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.numbers = itertools.count()
        return super().reset(seed=seed)


class Leaving:
    """A parallel environment: agent i of three leaves after ``leaves[i]`` steps; one sees less."""

    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(
        self,
        leaves: Sequence[int] = (2, 4, 6),
        late: Sequence[bool] = (False, False, False),
        mask: str = "",
        has_state: bool = False,
    ) -> None:
        self.possible_agents = ["a", "b", "c"]
        self.agents: list[str] = []
        self._leaves, self._late = dict(zip("abc", leaves, strict=True)), dict(zip("abc", late, strict=True))
        self._mask, self._has_state = mask, has_state
        self.given: list[dict[str, Any]] = []

    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        plain = Box(-99, 99, (1 if agent == "a" else 2,), np.float32)
        if self._mask == "obs":
            return Dict({"observation": plain, "action_mask": Box(0, 1, (3,), np.int8)})
        return plain

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        return Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self._count = ["a", "b", "c"], 0
        return self._seen(self.agents), self._infos()

    def step(self, actions: dict[str, Any]) -> Any:
        self.given.append(actions)
        self._count += 1
        there = self.agents
        gone = {agent: self._count >= self._leaves[agent] for agent in there}
        self.agents = [agent for agent in there if not gone[agent]]
        ended = {agent: gone[agent] and not self._late[agent] for agent in there}
        late = {agent: gone[agent] and self._late[agent] for agent in there}
        return self._seen(there), dict.fromkeys(there, 1.0), ended, late, self._infos()

    def state(self) -> np.ndarray:
        if not self._has_state:
            raise NotImplementedError
        return np.array([self._count, 42])

    def _seen(self, agents: list[str]) -> dict[str, Any]:
        seen = {agent: np.full(1 if agent == "a" else 2, 10 + self._count, np.float32) for agent in agents}
        if self._mask != "obs":
            return seen
        return {agent: {"observation": seen[agent], "action_mask": self._allowed(agent)} for agent in agents}

    def _infos(self) -> dict[str, Any]:
        if self._mask != "info":
            return {}
        return {agent: {"action_mask": self._allowed(agent)} for agent in self.agents}

    def _allowed(self, agent: str) -> np.ndarray:
        return np.array([1, agent != "b", self._count % 2], np.int8)


class NothingAllowed(Leaving):
    def _allowed(self, agent: str) -> np.ndarray:
        return np.zeros(3, np.int8)


class Mixed(gymnasium.Env):
    """Agents with actions of different kinds."""

    observation_space = Tuple((Discrete(3), Discrete(3)))

    def __init__(self, same: bool = False) -> None:
        words = MultiDiscrete([2, 3])
        self.action_space = Tuple((words, words if same else Box(-1, 1, (2,))))
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return (0, 2), {}

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        return (1, 1), 0.0, False, False, {}


# ---------------------------------------------------------------- Tuple spaces


def test_shorter_observations_are_padded_and_missing_actions_are_never_legal() -> None:
    made = team("Counting")
    view = made.reset(1)
    assert made.obs_size == 3 and made.single_action_space == Discrete(4)
    assert view.obs[0].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert view.legal is not None
    assert view.legal[1].tolist() == [[True, True, False, False], [True] * 4]
    step = made.step(np.array([[1, 3], [0, 0]]))
    assert step.next_obs[0].tolist() == [[1, 1, 0], [-1, -1, -1]]
    assert [single.env.taken for single in made._singles] == [[(1, 4)], [(0, 1)]]
    with pytest.raises(
        EnvError, match=r"Counting: environment 1 of 2: agent 0 has the actions 0 to 1, not 2"
    ):
        made.step(np.array([[1, 3], [2, 0]]))


def test_rewards_are_summed_and_states_are_observations_side_by_side() -> None:
    made = team("Counting")
    view = made.reset(1)
    assert np.array_equal(view.state, view.obs.reshape(2, 6))
    step = made.step(zeros(made))
    assert step.rewards.tolist() == [1.5, 1.5]
    assert np.array_equal(step.next_state, step.next_obs.reshape(2, 6))
    assert step.success is None


def test_an_environment_may_have_a_state_and_a_notion_of_success() -> None:
    made = team("Stateful", length=2)
    assert made.reset(1).state.tolist() == [[0, 7], [0, 7]]
    first, last = (made.step(np.array([[1, 0], [0, 0]])) for _ in range(2))
    assert first.rewards.tolist() == [2.5, 2.5]
    assert first.success is not None and first.success.tolist() == [False, False]
    assert last.success is not None and last.success.tolist() == [True, False]
    assert last.next_state.tolist() == [[2, 7], [2, 7]]
    assert last.view.state.tolist() == [[0, 7], [0, 7]]


def test_an_episode_that_ends_is_followed_by_the_next_in_the_same_step() -> None:
    made = team("Counting", length=3)
    made.reset(1)
    steps = [made.step(zeros(made)) for _ in range(4)]
    assert [step.terminated.all() for step in steps] == [False, False, True, False]
    assert [step.next_obs[0, 0, 0] for step in steps] == [1, 2, 3, 1]
    assert [step.view.obs[0, 0, 0] for step in steps] == [1, 2, 0, 1]


def test_environments_that_are_not_active_stand_still() -> None:
    made = team("Counting", 3, length=2)
    made.reset(1)
    before = made.step(zeros(made)).view
    step = made.step(zeros(made), np.array([True, False, False]))
    assert step.terminated.tolist() == [True, False, False]
    assert step.rewards.tolist() == [1.5, 0, 0]
    assert np.array_equal(step.view.obs[1:], before.obs[1:])
    assert np.array_equal(step.next_obs[1:], before.obs[1:])
    assert step.view.obs[0, 0, 0] == 0


def test_each_environment_gets_a_seed_of_its_own() -> None:
    made = team("Counting", 3, length=1)
    made.reset(8)
    made.step(zeros(made))
    seeds = [single.env.seeds[-2:] for single in made._singles]
    assert seeds == [[env_seed(8, index), None] for index in range(3)]


def test_a_limit_cuts_episodes_off_and_goes_on_counting_when_restored() -> None:
    made, other = (team("Counting", max_episode_steps=3, length=100) for _ in range(2))
    made.reset(1)
    steps = [made.step(zeros(made)) for _ in range(4)]
    assert [step.truncated.all() for step in steps] == [False, False, True, False]
    assert not any(step.terminated.any() for step in steps)
    other.load_state_dict(unpack(*pack(made.state_dict())))
    assert [other.step(zeros(other)).truncated.all() for _ in range(3)] == [False, True, False]
    ends_there = team("Counting", max_episode_steps=3, length=3)
    ends_there.reset(1)
    last = [ends_there.step(zeros(ends_there)) for _ in range(3)][-1]
    assert last.terminated.all() and not last.truncated.any()


def test_what_is_returned_belongs_to_the_caller() -> None:
    one, other = team("Stateful"), team("Stateful")
    views = one.reset(1), other.reset(1)
    for _ in range(8):
        for array in (views[0].obs, views[0].state, views[0].alive, views[0].legal):
            array[...] = 0
        steps = one.step(zeros(one)), other.step(zeros(other))
        assert as_bytes(steps[0]) == as_bytes(steps[1])
        steps[0].next_obs[...] = steps[0].next_state[...] = 77
        assert not (steps[0].view.obs == 77).any()
        views = steps[0].view, steps[1].view


def test_actions_of_other_kinds_are_taken_when_all_agents_have_the_same() -> None:
    made = team("Mixed", 1, same=True)
    view = made.reset(1)
    assert view.obs.tolist() == [[[1, 0, 0], [0, 0, 1]]]
    made.step(np.array([[[1, 2], [0, 1]]]))
    first, second = made._singles[0].env.taken[0]
    assert first.tolist() == [1, 2] and second.tolist() == [0, 1]
    with pytest.raises(EnvError, match="Mixed: agents must have the same actions, or Discrete ones"):
        team("Mixed", 1)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("what", "fault", "message"),
    [
        ("Counting", "reward", r"Counting: step\(\) of environment 1 returned rewards with the sum nan"),
        (
            "Counting",
            "obs",
            r"step\(\) of environment 1 returned an observation of agent 0 with inf at feature 1",
        ),
        ("Stateful", "state", r"step\(\) of environment 1 returned a state with nan at feature 1"),
        ("Counting", "shape", r"environment 1 of 2: an observation of shape \(2, 1\) was returned"),
        ("Counting", "agents", "environment 1 of 2: observations of 1 agents were returned, it has 2"),
        ("Counting", "four", r"environment 1 of 2: step\(\) returned 4 values; it has to return five"),
        ("Counting", "none", r"environment 1 of 2: step\(\) returned a NoneType; it has to return five"),
    ],
)
def test_faults_name_the_environment(what: str, fault: str, message: str) -> None:
    made = team(what)
    made._singles[1].env.fault = fault
    made.reset(1)
    for _ in range(2):
        made.step(zeros(made))
    with pytest.raises(EnvError, match=message):
        made.step(zeros(made))


def test_errors_of_an_environment_carry_its_index() -> None:
    made = team("Counting")
    made._singles[1].env.fault = "raise"
    made.reset(1)
    for _ in range(2):
        made.step(zeros(made))
    with pytest.raises(RuntimeError, match="no more") as caught:
        made.step(zeros(made))
    assert caught.value.__notes__ == [f"in environment 1 of 2 of {HERE}:Counting"]


def test_actions_of_another_shape_are_refused() -> None:
    made = team("Counting")
    made.reset(1)
    with pytest.raises(EnvError, match=r"actions must be \(2, 2\), these are \(2, 3\)"):
        made.step(np.zeros((2, 3), np.int64))


def test_hidden_state_gives_no_state_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    made = team("Hidden")
    made.reset(1)
    assert made.state_dict() is None
    assert made.state_dict() is None
    (said,) = caplog.records
    assert "Hidden cannot be saved" in said.message


def test_a_state_of_another_team_is_refused() -> None:
    made = team("Counting")
    made.reset(1)
    for other in (team("Counting", 3), team("Stateful")):
        with pytest.raises(EnvError, match="the saved environments are"):
            other.load_state_dict(made.state_dict())


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (("terminated", "truncated"), (False, True)),
        (("truncated", "truncated"), (False, True)),
        (("terminated", "terminated"), (True, False)),
        (("terminated", "goes on"), (False, False)),
    ],
)
def test_an_episode_ends_when_it_does_for_every_agent(
    ends: tuple[str, str], expected: tuple[bool, bool]
) -> None:
    made = team("Masked", 1, ends=list(ends))
    made.reset(1)
    actions = np.array([[0, 1]])
    assert not made.step(actions).terminated[0]
    last = made.step(actions)
    assert (last.terminated[0], last.truncated[0]) == expected
    assert last.rewards.tolist() == [1.5]


def test_masks_beside_observations_in_tuples_are_kept_to() -> None:
    made = team("Masked", 1)
    view = made.reset(1)
    assert made.has_legal and view.legal is not None
    assert view.legal[0].tolist() == [[True, False, False], [False, True, True]]
    after = made.step(np.array([[0, 1]])).view.legal
    assert after is not None and after[0].tolist() == [[True, False, True], [False, True, True]]


def test_masks_of_actions_that_are_not_discrete_are_refused() -> None:
    with pytest.raises(EnvError, match="only Discrete ones have masks"):
        team("Masked", 1, actions="box")


# ---------------------------------------------------------------- parallel environments


def test_agents_that_leave_see_their_last_observation_and_then_zeros() -> None:
    made = team("Leaving", 1)
    view = made.reset(1)
    assert view.obs.tolist() == [[[10, 0], [10, 10], [10, 10]]]
    steps = [made.step(zeros(made)) for _ in range(6)]
    assert [step.view.alive[0].tolist() for step in steps[:5]] == [
        [True, True, True],
        [False, True, True],
        [False, True, True],
        [False, False, True],
        [False, False, True],
    ]
    assert steps[1].next_obs.tolist() == [[[12, 0], [12, 12], [12, 12]]]
    assert steps[2].next_obs.tolist() == [[[0, 0], [13, 13], [13, 13]]]
    assert np.array_equal(steps[1].next_obs, steps[1].view.obs)
    assert [step.rewards[0] for step in steps] == [3, 3, 2, 2, 1, 1]
    assert [sorted(given) for given in made._singles[0].env.given[1:4]] == [
        ["a", "b", "c"],
        ["b", "c"],
        ["b", "c"],
    ]
    assert [step.terminated[0] for step in steps] == [False] * 5 + [True]
    assert steps[5].next_obs.tolist() == [[[0, 0], [0, 0], [16, 16]]]
    assert steps[5].view.alive.all() and steps[5].view.obs[0, 1, 0] == 10
    assert steps[5].success is None


@pytest.mark.parametrize(
    ("late", "truncated"), [([False, False, True], True), ([True, True, False], False), ([False] * 3, False)]
)
def test_time_that_is_up_for_the_last_ones_cuts_the_episode_off(late: list[bool], truncated: bool) -> None:
    made = team("Leaving", 1, leaves=[2, 2, 3], late=late)
    made.reset(1)
    last = [made.step(zeros(made)) for _ in range(3)][-1]
    assert (last.terminated[0], last.truncated[0]) == (not truncated, truncated)


def test_a_state_is_used_where_it_works() -> None:
    assert team("Leaving", 1, has_state=True).reset(1).state.tolist() == [[0, 42]]
    assert team("Leaving", 1).reset(1).state.tolist() == [[10, 0, 10, 10, 10, 10]]


@pytest.mark.parametrize("mask", ["info", "obs"])
def test_masks_say_which_actions_are_legal(mask: str) -> None:
    made = team("Leaving", 1, mask=mask)
    view = made.reset(1)
    assert made.has_legal and view.legal is not None
    assert view.legal[0].tolist() == [[True, True, False], [True, False, False], [True, True, False]]
    step = made.step(zeros(made))
    assert step.view.legal is not None
    assert step.view.legal[0].tolist() == [[True, True, True], [True, False, True], [True, True, True]]
    gone = made.step(zeros(made)).view
    assert gone.legal is not None and gone.legal[0, 0].all() and not gone.alive[0, 0]
    with pytest.raises(EnvError, match="the action_mask of agent a allows nothing"):
        team("NothingAllowed", 1, mask=mask).reset(1)


def test_a_restored_parallel_environment_goes_on_with_those_that_are_left() -> None:
    made, other = (team("Leaving", 2, mask="info") for _ in range(2))
    made.reset(1)
    for _ in range(3):
        last = made.step(zeros(made))
    view = other.load_state_dict(unpack(*pack(made.state_dict())))
    assert np.array_equal(view.alive, last.view.alive) and np.array_equal(view.legal, last.view.legal)
    for _ in range(9):
        assert as_bytes(other.step(zeros(other))) == as_bytes(made.step(zeros(made)))


# ---------------------------------------------------------------- real ones


REAL = [
    ("lbforaging", "lbforaging:Foraging-8x8-2p-3f-coop-v3", {}),
    ("lbforaging", "lbforaging:Foraging-2s-8x8-3p-2f-v3", {}),
    ("mpe2", "mpe2.simple_spread_v3:parallel_env", {}),
    ("mpe2", "mpe2.simple_spread_v3:parallel_env", {"continuous_actions": True}),
    ("mpe2", "mpe2.simple_speaker_listener_v4:parallel_env", {}),
    ("gymnasium", "offbeat/AliceAndBob-v0", {"max_steps": 20}),
]


@pytest.mark.parametrize(("package", "env_id", "kwargs"), REAL, ids=lambda part: str(part))
def test_a_restored_team_goes_on_bit_by_bit(package: str, env_id: str, kwargs: dict[str, Any]) -> None:
    pytest.importorskip(package, reason="needs the extra marl")
    config = EnvConfig(id=env_id, kwargs=kwargs, vectorize="loop")
    made, other, fresh = (make_team(config, 2) for _ in range(3))
    actions = legal_actions(made, 190)
    made.reset(1)
    for row in actions[:70]:
        made.step(row)
    state = unpack(*pack(made.state_dict()))
    expected = [made.step(row) for row in actions[70:]]
    assert sum(step.truncated.sum() + step.terminated.sum() for step in expected) > 0
    other.reset(2)
    for row in actions[:17]:
        other.step(row)
    for restored in (other, fresh):
        restored.load_state_dict(state)
        assert [as_bytes(restored.step(row)) for row in actions[70:]] == [as_bytes(step) for step in expected]


def test_foraging_succeeds_when_all_food_is_gone_and_its_time_limit_only_cuts_off() -> None:
    pytest.importorskip("lbforaging", reason="needs the extra marl")
    made = team("lbforaging:Foraging-5x5-2p-1f-coop-v3", 8)
    made.reset(1)
    returns, found = np.zeros(8), []
    for row in legal_actions(made, 600):
        step = made.step(row)
        returns += step.rewards
        assert step.success is not None and np.array_equal(step.success, step.terminated)
        for index in np.flatnonzero(step.terminated | step.truncated):
            found.append((bool(step.success[index]), round(float(returns[index]), 6)))
            returns[index] = 0
    assert set(found) == {(True, 1.0), (False, 0.0)}


def test_particles_are_cut_off_after_their_cycles_with_their_last_observations() -> None:
    pytest.importorskip("mpe2", reason="needs the extra marl")
    made = team("mpe2.simple_spread_v3:parallel_env", 2, max_cycles=5)
    made.reset(1)
    steps = [made.step(row) for row in legal_actions(made, 5)]
    assert [step.truncated.all() for step in steps] == [False] * 4 + [True]
    assert steps[-1].next_obs.any(axis=2).all()
    assert not np.array_equal(steps[-1].next_obs, steps[-1].view.obs)
    assert np.array_equal(steps[-1].next_state, steps[-1].next_obs.reshape(2, -1))


def test_speakers_and_listeners_have_actions_of_their_own() -> None:
    pytest.importorskip("mpe2", reason="needs the extra marl")
    made = team("mpe2.simple_speaker_listener_v4:parallel_env", 2)
    view = made.reset(1)
    assert view.obs.shape == (2, 2, 11) and not view.obs[:, 0, 3:].any()
    assert view.state.shape == (2, 14)
    assert view.legal is not None and view.legal.sum(axis=2).tolist() == [[3, 5], [3, 5]]
