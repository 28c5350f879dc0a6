"""Acting with a trained team: what it has to be given."""

import numpy as np
import pytest

from offbeat.algorithms.hmasd.choosing import SkillChooser
from offbeat.algorithms.mappo.evaluator import TeamEvaluator
from offbeat.algorithms.mappo.policy import TeamPolicy
from offbeat.config.models import EvalConfig
from offbeat.errors import OffbeatError
from tests.unit.team_fakes import make_pair, skill_spec
from tests.unit.team_fakes import spec_of as spec_of_team

OBS = np.zeros((2, 4), np.float32)


def spec_of(**fields):
    return skill_spec(2, 4, 3, hidden=8, **fields)


def test_legal_actions_are_asked_for_where_they_matter():
    with pytest.raises(OffbeatError, match=r"give act\(obs, legal=\.\.\.\)"):
        TeamPolicy(spec_of(has_legal=True)).act(OBS)


def test_the_state_is_asked_for_where_skills_are_chosen():
    spec = spec_of(num_team_skills=2, num_skills=3)
    with pytest.raises(OffbeatError, match=r"give act\(obs, state=\.\.\.\)"):
        TeamPolicy(spec, chooser=SkillChooser(spec, interval=5)).act(OBS)


def test_observations_of_another_shape_are_refused():
    with pytest.raises(OffbeatError, match=r"expected observations of shape \(2, 4\)"):
        TeamPolicy(spec_of()).act(np.zeros((3, 4), np.float32))


@pytest.mark.parametrize("num_sampled", [0, 3])
def test_a_team_is_judged_with_drawn_actions_too(num_sampled):
    _, learner, team = make_pair()
    policy = TeamPolicy(spec_of_team(team), chooser=SkillChooser(spec_of_team(team), interval=4))
    actions = []
    for config in (
        EvalConfig(episodes=3, sampled_episodes=num_sampled),
        EvalConfig(episodes=3, deterministic=False),
    ):
        team.seen_actions.clear()
        metrics = TeamEvaluator(config, team, policy).evaluate(learner.weights(), seed=1)
        actions.append(np.stack(team.seen_actions))
        assert metrics["eval/return_mean"] == 7
        assert ("eval/return_mean_sampled" in metrics) == (config.num_sampled > 0)
    likely, drawn = actions
    assert len(likely) == (18 if num_sampled else 9)
    if num_sampled:
        np.testing.assert_array_equal(likely[9:], drawn)
        assert not np.array_equal(likely[:9], drawn)
