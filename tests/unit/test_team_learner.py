"""Actor and critic of a team: what they train on, in parts, without memory, with masks."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.algorithms.mappo.collector import TeamCollector
from offbeat.algorithms.mappo.config import MAPPOConfig
from offbeat.algorithms.mappo.learner import TeamLearner
from offbeat.algorithms.mappo.rounds import Chunks, TeamRound
from offbeat.errors import TrainError
from tests.unit.team_fakes import CountingTeam, batch_of, spec_of, ticket


def make(lengths=(7, 5, 9), *, team=None, recurrent=True, **options):
    small = {"sync_batch_size": 30, "hidden": 8, "num_epochs": 2, "chunk_length": 4, "schedule_rounds": 10}
    config = MAPPOConfig(**{**small, "recurrent": recurrent, **options})
    team = team or CountingTeam(lengths)
    spec = spec_of(team, num_team_skills=0, num_skills=0, recurrent=recurrent)
    collector = TeamCollector(config, team, spec, total_envs=team.num_envs)
    return collector, TeamLearner(config, spec, seed=1, num_envs=team.num_envs)


def after_rounds(collector, learner, count=2):
    for version in range(count):
        metrics = learner.train(
            batch_of(collector.collect(ticket(version), learner.weights()), version=version)
        )
    return metrics


def test_parts_of_a_minibatch_add_up_to_the_whole():
    whole, parts = (make(grad_accumulation=count) for count in (1, 3))
    after_rounds(*whole)
    after_rounds(*parts)
    for name, array in whole[1].weights().items():
        np.testing.assert_allclose(array, parts[1].weights()[name], atol=1e-5)


@pytest.mark.parametrize("recurrent", [True, False])
def test_fresh_samples_have_a_ratio_of_one(recurrent):
    metrics = after_rounds(*make(recurrent=recurrent), count=3)
    assert metrics["learn/first_ratio_max_dev"] <= 1e-5
    assert metrics["learn/ess"] == pytest.approx(1)


def test_without_memory_nothing_of_it_is_collected():
    collector, learner = make(recurrent=False)
    data = collector.collect(ticket(0), learner.weights()).data
    assert "memory" not in data
    assert not any(name.startswith("critic") for name in learner.weights())


def test_illegal_actions_are_never_taken():
    team = CountingTeam((7, 5, 9), legal=[[True, False, True], [False, True, False]])
    collector, learner = make(team=team)
    for version in range(3):
        segment = collector.collect(ticket(version), learner.weights())
        actions = segment.data["actions"]
        assert set(actions[:, :, 0].ravel().tolist()) <= {0, 2}
        assert set(actions[:, :, 1].ravel().tolist()) == {1}
        metrics = learner.train(batch_of(segment, version=version))
        assert metrics["learn/first_ratio_max_dev"] <= 1e-5


def test_agents_that_are_not_there_teach_nothing():
    learned = []
    for wrong in (0, 1):
        collector, learner = make(team=CountingTeam((7, 5, 9), absent=(1,)))
        segment = collector.collect(ticket(0), learner.weights())
        assert segment.units == {"env_steps": 30, "agent_steps": 30}
        segment.data["actions"][:, :, 1] = wrong
        segment.data["logp"][:, :, 1] = -wrong
        learner.train(batch_of(segment, version=0))
        learned.append(learner.weights())
    for name, array in learned[0].items():
        np.testing.assert_array_equal(array, learned[1][name])


def test_what_cannot_be_trained_is_refused():
    collector, learner = make()
    segment = collector.collect(ticket(0), learner.weights())
    segment.data["rewards"][2, 1] = np.nan
    with pytest.raises(TrainError, match="NaN or infinity in rewards"):
        learner.train(batch_of(segment, version=0))
    nobody, learner = make(team=CountingTeam((7, 5, 9), absent=(0, 1)))
    with pytest.raises(TrainError, match="nobody acted"):
        learner.train(batch_of(nobody.collect(ticket(0), learner.weights()), version=0))


def test_a_round_of_stale_samples_is_corrected():
    collector, learner = make()
    segments = [
        collector.collect(ticket(number, version=0, degree=1), learner.weights()) for number in range(2)
    ]
    learner.train(batch_of(segments[0], version=0, degree=1))
    metrics = learner.train(batch_of(segments[1], version=1, degree=1))
    assert metrics["learn/first_ratio_max_dev"] > 1e-5
    assert metrics["learn/ess"] < 1


def test_values_go_on_beyond_a_truncation_and_end_with_a_termination():
    ends, cut = CountingTeam((4, 4)), CountingTeam((4, 4), truncates=(0, 1))
    plain = {"sync_batch_size": 16, "value_norm": False, "norm_adv": False, "gae_lambda": 0.0}
    for team, is_limit_an_end, goes_on in ((ends, False, False), (cut, False, True), (cut, True, False)):
        collector, learner = make(team=team, ends_at_time_limit=is_limit_an_end, **plain)
        data = TeamRound.of([collector.collect(ticket(0), learner.weights())])
        judged = learner._judge(data)
        found = learner._targets(data, np.ones((8, 2, 2), np.float32), judged).advantages
        future = 0.99 * judged.next_values[3] if goes_on else 0
        np.testing.assert_allclose(found[3, :, 0], 1 + future - judged.values[3], atol=1e-5)
        # What a step led to is judged with the memory of its own episode, not with the next one's.
        assert not np.allclose(judged.next_values[3], judged.values[4])


@pytest.mark.parametrize(("num_steps", "length"), [(10, 4), (8, 4), (3, 3), (5, 1)])
def test_chunks_hold_every_step_once_and_know_what_was_before(num_steps, length):
    chunks = Chunks(num_steps, 2, length)
    steps = np.arange(num_steps * 2).reshape(num_steps, 2) + 1
    cut = chunks.cut(steps)
    assert cut.shape == (length, chunks.num_columns)
    assert sorted(cut[cut > 0].tolist()) == sorted(steps.ravel().tolist())
    before = chunks.beginnings(np.array([-1, -2]), steps)
    for column in range(chunks.num_columns):
        chunk, env = divmod(column, 2)
        expected = [-1, -2][env] if chunk == 0 else steps[chunk * length - 1, env]
        assert before[column] == expected
        assert cut[0, column] == steps[chunk * length, env]
