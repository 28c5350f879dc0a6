"""Fifteen mistakes that a hierarchy of skills invites, each pinned by what is right instead."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.algorithms.hmasd.store import RoundStore, choices_of
from offbeat.algorithms.mappo.evaluator import TeamEvaluator
from offbeat.algorithms.mappo.rounds import TeamRound
from offbeat.config.models import EvalConfig
from offbeat.errors import TrainError
from offbeat.ops.skills import Reason
from tests.unit.team_fakes import CountingTeam, batch_of, hmasd_settings, make_pair, spec_of, ticket


def test_01_samples_are_counted_in_the_unit_that_is_named():
    by_env = hmasd_settings(sync_batch_size=32, sync_unit="env_steps")
    by_agent = hmasd_settings(sync_batch_size=32, sync_unit="agent_steps")
    assert by_env.steps_of(32, 4, 2) == 8
    assert by_agent.steps_of(32, 4, 2) == 4
    collector, learner, _ = make_pair((50, 50, 50), sync_batch_size=12)
    segment = collector.collect(ticket(0), learner.weights())
    assert segment.units == {"env_steps": 12, "agent_steps": 24}


def test_01_an_update_never_splits_a_period_with_align():
    collector, learner, _ = make_pair((50, 50, 50), sync_batch_size=18, skill_interval=4, straddle="align")
    segment = collector.collect(ticket(0), learner.weights())
    assert np.count_nonzero(segment.data["valid"]) == 8 * 3  # 6 steps were asked for, two periods have 8
    reasons = segment.data["reason"][segment.data["valid"]]
    assert set(reasons.tolist()) == {Reason.GOES_ON, Reason.PERIOD_END}


def test_02_skills_last_exactly_their_interval():
    collector, learner, _ = make_pair((100, 100), sync_batch_size=40, skill_interval=4)
    data = collector.collect(ticket(0), learner.weights()).data
    assert np.flatnonzero(data["selected"][:, 0]).tolist() == [0, 4, 8, 12, 16]
    assert np.flatnonzero(data["reason"][:, 0] == Reason.PERIOD_END).tolist() == [3, 7, 11, 15, 19]
    changed = (np.diff(data["skills"], axis=0) != 0).any(axis=2)
    assert not changed[~data["selected"][1:]].any()


def test_03_nothing_is_left_after_an_update():
    collector, learner, _ = make_pair()
    segment = collector.collect(ticket(0), learner.weights())
    learner.train(batch_of(segment, version=0))
    assert len(learner._store) == 0
    assert len(learner._lessons) == 0


def test_04_no_sample_is_dropped_however_many_there_are():
    collector, learner, _ = make_pair((6, 6, 6), sync_batch_size=12)
    segments = [collector.collect(ticket(number, 0), learner.weights()) for number in range(5)]
    store = RoundStore()
    assert all(store.add(segment, 0) for segment in segments)
    assert len(store) == 5 * 12
    whole = store.take()
    assert np.count_nonzero(whole.valid) == 5 * 12
    assert store.refused == 0


def test_05_a_choice_is_stored_with_what_was_seen_when_it_was_made():
    collector, learner, _ = make_pair((6, 9), sync_batch_size=20, skill_interval=4)
    data = TeamRound.of([collector.collect(ticket(0), learner.weights())])
    found = choices_of(data)
    periods = found.periods
    # Environment 0: steps 0-3, 4-5 (its episode has 6 steps), then again from step 6 on.
    assert periods.first[periods.env == 0].tolist() == [0, 4, 6]
    np.testing.assert_array_equal(found.state, data["state"][periods.first, periods.env])
    assert found.state[periods.env == 0].tolist() == [[0, 0, 0], [0, 0, 4], [0, 1, 0]]
    assert found.next_state[periods.env == 0].tolist() == [[0, 0, 4], [0, 0, 6], [0, 1, 4]]
    assert found.rewards[periods.env == 0].tolist() == [4, 2, 4]
    assert periods.reason[periods.env == 0].tolist() == [
        Reason.PERIOD_END,
        Reason.TERMINATED,
        Reason.PERIOD_END,
    ]


def test_06_both_levels_start_from_a_ratio_of_one():
    collector, learner, _ = make_pair((7, 5, 9), sync_batch_size=60)
    for version in range(3):
        segment = collector.collect(ticket(version), learner.weights())
        metrics = learner.train(batch_of(segment, version=version))
        assert metrics["learn/first_ratio_max_dev"] <= 1e-5
        assert metrics["learn/high_first_ratio_max_dev"] <= 1e-5


def test_06_mixed_up_log_probabilities_are_found_out():
    collector, learner, _ = make_pair((7, 5, 9), sync_batch_size=60)
    learner.train(batch_of(collector.collect(ticket(0), learner.weights()), version=0))
    segment = collector.collect(ticket(1), learner.weights())
    segment.data["logp"][:] = segment.data["logp"][::-1].copy()
    with pytest.raises(TrainError, match="not the learner's own"):
        learner.train(batch_of(segment, version=1))


def test_07_every_epoch_takes_its_steps():
    collector, learner, _ = make_pair(num_epochs=3, num_minibatches=2)
    metrics = learner.train(batch_of(collector.collect(ticket(0), learner.weights()), version=0))
    assert metrics["learn/gradient_steps"] == 6


def test_07_advantages_follow_time_not_the_order_of_training():
    collector, learner, _ = make_pair((100, 100, 100), sync_batch_size=30, norm_adv=False, value_norm=False)
    data = TeamRound.of([collector.collect(ticket(0), learner.weights())])
    judged = learner._judge(data)
    rewards = np.ones((*data.valid.shape, 2), np.float32)
    found = learner._targets(data, rewards, judged).advantages
    gamma, lam, expected = 0.99, 0.95, np.zeros((11, 3, 2), np.float32)
    for t in reversed(range(10)):
        delta = 1 + gamma * judged.next_values[t] - judged.values[t]
        expected[t] = delta[:, None] + (gamma * lam * expected[t + 1] if t < 9 else 0)
    np.testing.assert_allclose(found, expected[:10], atol=1e-4)
    np.testing.assert_allclose(judged.next_values[:-1], judged.values[1:], atol=1e-6)


def test_08_each_agent_has_a_memory_of_its_own_that_ends_with_the_episode():
    collector, learner, _ = make_pair((3, 100), sync_batch_size=12)
    weights = learner.weights()
    collector.collect(ticket(0), weights)
    lane = collector._lane
    assert lane.memory.shape == (2, 2, 8)
    assert not np.allclose(lane.memory[1, 0], lane.memory[1, 1])
    # Environment 0 has just ended an episode: its first step goes on from nothing, that of 1 does not.
    assert lane.is_first.tolist() == [True, False]
    data = collector.collect(ticket(1, 0), weights).data
    assert data["starts"][0].tolist() == [True, False]


def test_09_an_episode_that_ends_begins_anew_where_it_ended():
    collector, learner, _ = make_pair((3, 100, 100), sync_batch_size=30)
    data = collector.collect(ticket(0), learner.weights()).data
    assert data["starts"][:, 0].tolist() == [True, False, False] * 3 + [True]
    assert data["starts"][1:, 1:].any() == False  # noqa: E712
    assert data["state"][3, :, 1].tolist() == [1, 0, 0]
    assert data["selected"][3].tolist() == [True, False, False]


def test_10_evaluation_leaves_the_training_alone():
    from offbeat.algorithms.hmasd.choosing import SkillChooser
    from offbeat.algorithms.mappo.policy import TeamPolicy

    collector, learner, _ = make_pair()
    weights = learner.weights()
    collector.collect(ticket(0), weights)
    before = collector.state_dict()
    team = CountingTeam((4, 4, 4, 4))
    policy = TeamPolicy(spec_of(team), chooser=SkillChooser(spec_of(team), 4))
    metrics = TeamEvaluator(EvalConfig(episodes=6), team, policy).evaluate(weights, seed=1)
    assert metrics["eval/episodes"] == 6
    after = collector.state_dict()
    for part in ("lane", "skills"):
        for name, array in before[part].items():
            np.testing.assert_array_equal(array, after[part][name])


def test_12_a_checkpoint_holds_all_that_the_next_round_depends_on():
    collector, learner, _ = make_pair(value_norm=True)
    learner.train(batch_of(collector.collect(ticket(0), learner.weights()), version=0))
    states = collector.state_dict(), learner.state_dict()
    assert {"version", "value_norm", "high_norm", "actor", "critic", "coordinator", "discriminators"} <= set(
        states[1]
    )
    other_collector, other, _ = make_pair(value_norm=True, seed=7)
    other_collector.load_state_dict(states[0])
    other.load_state_dict(states[1])
    for version in (1, 2):
        for one, two in ((collector, learner), (other_collector, other)):
            two.train(batch_of(one.collect(ticket(version), two.weights()), version=version))
    for name, array in learner.weights().items():
        np.testing.assert_array_equal(array, other.weights()[name])


def test_13_one_network_call_a_step_for_all_agents_of_all_environments(monkeypatch):
    collector, learner, _ = make_pair((50, 50, 50), sync_batch_size=12)
    rows = []
    step = collector._actor.step

    def counted(inputs, memory):
        rows.append(len(inputs))
        return step(inputs, memory)

    monkeypatch.setattr(collector._actor, "step", counted)
    collector.collect(ticket(0), learner.weights())
    assert rows == [6] * 4


def test_14_stale_records_are_refused_and_counted():
    collector, learner, _ = make_pair()
    store = RoundStore()
    strict = collector.collect(ticket(0, version=3), learner.weights())
    assert store.add(strict, 4) is False
    assert store.refused == 12
    assert len(store) == 0
    assert store.add(strict, 3) is True
    assert store.add(collector.collect(ticket(1, version=3, degree=1), learner.weights()), 4) is True


def test_15_any_number_of_environments_and_agents():
    for lengths, num_agents in (((5,), 1), ((5, 6, 7, 8, 9), 3)):
        collector, learner, _ = make_pair(lengths, num_agents=num_agents, sync_batch_size=6 * len(lengths))
        metrics = learner.train(batch_of(collector.collect(ticket(0), learner.weights()), version=0))
        assert np.isfinite(metrics["learn/loss"])
