"""Overcooked as a team; needs overcooked-ai, which needs numpy 1, so a virtual environment of its own:

pip install overcooked-ai==1.1.0 "numpy<2" scipy gymnasium pydantic ruamel.yaml psutil pytest pytest-timeout
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from offbeat.config.models import EnvConfig
from offbeat.envs.teams import Team, TeamStep, make_team
from offbeat.errors import EnvError

HAS_OVERCOOKED = importlib.util.find_spec("overcooked_ai_py") is not None
needs_overcooked = pytest.mark.skipif(
    not HAS_OVERCOOKED or int(np.__version__.partition(".")[0]) > 1,
    reason='needs a virtual environment with overcooked-ai==1.1.0 "numpy<2" scipy',
)
ENV_ID = "offbeat.envs.teams.overcooked:make"
NORTH, SOUTH, EAST, WEST, STAY, INTERACT = range(6)
ONION = [EAST, INTERACT, WEST, NORTH, INTERACT]
"""Fetch an onion from the right of cramped_room's upper row and put it into the pot."""


def team(num_envs: int, **kwargs: object) -> Team:
    return make_team(EnvConfig(id=ENV_ID, kwargs=kwargs), num_envs)


def record(made: Team, actions: list[np.ndarray]) -> list[TeamStep]:
    return [made.step(row) for row in actions]


@pytest.mark.skipif(HAS_OVERCOOKED, reason="overcooked-ai is installed")
def test_without_the_package_the_fix_is_named() -> None:
    with pytest.raises(EnvError, match=r"pip install overcooked-ai==1\.1\.0"):
        team(1)


@needs_overcooked
def test_a_cook_who_works_alone_delivers_a_soup() -> None:
    made = team(2, layout="cramped_room", horizon=400)
    view = made.reset(1)
    assert view.obs.shape == (2, 2, 5 * 4 * 26)
    assert view.state.shape == (2, 5 * 4 * 26)
    assert np.array_equal(view.state, view.obs[:, 0])
    assert not np.array_equal(view.obs[:, 0], view.obs[:, 1])
    go = [*ONION, *ONION, *ONION, INTERACT, SOUTH, WEST, SOUTH, INTERACT, *[STAY] * 20]
    go += [EAST, NORTH, NORTH, INTERACT, SOUTH, EAST, SOUTH, INTERACT]
    # In the first kitchen the second cook works and the first stands aside, in the other nobody does a thing.
    steps = record(made, [np.array([[NORTH, move], [STAY, STAY]]) for move in go])
    assert np.array([step.rewards for step in steps]).sum(axis=0).tolist() == [20.0, 0.0]
    assert steps[-1].rewards[0] == 20.0


@needs_overcooked
def test_a_soup_cooks_on_in_a_restored_kitchen() -> None:
    made, other = team(1), team(1)
    made.reset(1)
    record(
        made, [np.array([[NORTH, move]]) for move in [*ONION, *ONION, *ONION, INTERACT, SOUTH, WEST, SOUTH]]
    )
    other.load_state_dict(made.state_dict())
    go = [INTERACT, *[STAY] * 20, EAST, NORTH, NORTH, INTERACT, SOUTH, EAST, SOUTH, INTERACT]
    assert record(other, [np.array([[STAY, move]]) for move in go])[-1].rewards.tolist() == [20.0]


@needs_overcooked
def test_episodes_are_cut_off_at_the_horizon_and_start_as_before() -> None:
    made = team(2, horizon=7)
    first = made.reset(1)
    steps = record(made, [np.array([[NORTH, WEST], [EAST, STAY]])] * 7)
    assert [step.truncated.tolist() for step in steps] == [[False, False]] * 6 + [[True, True]]
    assert not any(step.terminated.any() for step in steps)
    assert np.array_equal(steps[-1].view.obs, first.obs)
    assert not np.array_equal(steps[-1].next_obs, first.obs)
    assert steps[-1].success is None


@needs_overcooked
@pytest.mark.parametrize("layout", ["cramped_room", "asymmetric_advantages", "coordination_ring"])
def test_a_restored_kitchen_goes_on_as_the_original(layout: str) -> None:
    made, other = (team(2, layout=layout, horizon=60, shaping=0.5) for _ in range(2))
    rng = np.random.default_rng(0)
    actions = [rng.integers(6, size=(2, 2)) for _ in range(300)]
    made.reset(1)
    record(made, actions[:130])
    other.load_state_dict(made.state_dict())
    for step, again in zip(record(made, actions[130:]), record(other, actions[130:]), strict=True):
        assert np.array_equal(step.next_obs, again.next_obs)
        assert np.array_equal(step.view.state, again.view.state)
        assert np.array_equal(step.rewards, again.rewards)


@needs_overcooked
def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(EnvError, match="no layout 'nowhere'"):
        team(1, layout="nowhere")
