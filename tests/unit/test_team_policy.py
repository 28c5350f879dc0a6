"""Acting with a trained team: what it has to be given."""

import numpy as np
import pytest

from offbeat.algorithms.hmasd.choosing import SkillChooser
from offbeat.algorithms.mappo.policy import TeamPolicy
from offbeat.errors import OffbeatError
from tests.unit.team_fakes import skill_spec

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
