"""HMASD's learner: what its settings change."""

import numpy as np
import pytest

from offbeat.algorithms.mappo.rounds import TeamRound
from offbeat.ops.skills import Reason
from tests.unit.team_fakes import make_pair, ticket


def judged_choices(lengths=(100, 100, 100), truncates=(), **options):
    """A learner, choices of a round without rewards, and what the coordinator says of them."""
    collector, learner, _ = make_pair(lengths, truncates=truncates, sync_batch_size=60, **options)
    segment = collector.collect(ticket(0), learner.weights())
    segment.data["rewards"][:] = 0
    learner._store.add(segment, 0)
    data = learner._store.take()
    assert isinstance(data, TeamRound)
    choices = learner._store.choices(data, 0)
    return learner, choices, learner._judge_choices(choices)


def high_advantages(**options):
    learner, choices, seen = judged_choices(**options)
    return learner._high_targets(choices, seen)[0].advantages


@pytest.mark.parametrize("floor", [1e-8, 5.0])
def test_noise_of_values_is_not_made_larger_than_the_floor_allows(floor):
    plain, normalised = high_advantages(norm_adv=False), high_advantages(high_adv_floor=floor)
    assert 0.1 < plain.std() < 5.0
    expected = (plain - plain.mean()) / max(plain.std(), floor)
    np.testing.assert_allclose(normalised, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_limit_an_end", [False, True])
def test_a_time_limit_ends_an_episode_for_skills_too_where_that_is_wanted(is_limit_an_end):
    options = {"norm_adv": False, "value_norm": False, "high_gae_lambda": 0.0}
    learner, choices, seen = judged_choices(
        (4, 4, 100), (0, 1), ends_at_time_limit=is_limit_an_end, **options
    )
    was_cut = choices.periods.reason == Reason.TRUNCATED
    assert was_cut.any() and not was_cut.all()
    found = learner._high_targets(choices, seen)[0].advantages
    counts = ~was_cut[:, None] | (not is_limit_an_end)
    np.testing.assert_allclose(found, 0.99 * seen.next_values * counts - seen.values, atol=1e-5)
