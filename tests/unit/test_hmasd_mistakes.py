"""Fifteen mistakes that a hierarchy of skills invites, each pinned by what is right instead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import offbeat
from offbeat.algorithms import hmasd, mappo
from offbeat.algorithms.hmasd.store import RoundStore, choices_of
from offbeat.algorithms.mappo.rounds import TeamRound
from offbeat.errors import TrainError
from offbeat.observe.events import read_events, read_rounds
from offbeat.ops.skills import Reason
from offbeat.roles import SingleRank, WorkerContext
from tests.integration.test_teams import settings, train
from tests.unit.team_fakes import batch_of, hmasd_settings, make_pair, ticket
from tests.unit.test_observe_sinks import read_scalars


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


def test_03_stale_records_are_refused_and_counted():
    collector, learner, _ = make_pair()
    store = RoundStore()
    strict = collector.collect(ticket(0, version=3), learner.weights())
    assert store.add(strict, 4) is False
    assert store.refused == 12
    assert len(store) == 0
    assert store.add(strict, 3) is True
    assert store.add(collector.collect(ticket(1, version=3, degree=1), learner.weights()), 4) is True


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


def test_05_a_period_that_is_carried_on_keeps_what_it_began_with(monkeypatch):
    """Rounds of 3 steps, periods of 7, and the n-th step of an episode earns n."""
    collector, learner, team = make_pair((100, 5), sync_batch_size=6, skill_interval=7, straddle="carry")
    step = team.step

    def paying(actions, active=None):
        result = step(actions, active)
        return replace(result, rewards=result.next_state[:, 2].astype(np.float64))

    monkeypatch.setattr(team, "step", paying)
    rng = np.random.default_rng(0)
    segments = []
    for version in range(4):
        weights = {
            name: array + rng.normal(0, 0.5, array.shape).astype(np.float32)
            for name, array in learner.weights().items()
        }
        segments.append(collector.collect(ticket(version, degree=2), weights))
    found = [choices_of(TeamRound.of([segment])) for segment in segments]
    assert [len(one) for one in found] == [0, 1, 1, 1]

    # Environment 1 ends after 5 steps, in round 1; environment 0 after 7, in round 2; 1 again in round 3.
    expected = [
        # round, reward, chosen in round, at step, environment, led to
        (1, (1 + 2 + 3) + (4 + 5), 0, 0, 1, [1, 0, 5], Reason.TERMINATED),
        (2, (1 + 2 + 3) + (4 + 5 + 6) + 7, 0, 0, 0, [0, 0, 7], Reason.PERIOD_END),
        (3, 1 + (2 + 3 + 4) + 5, 1, 2, 1, [1, 1, 5], Reason.TERMINATED),
    ]
    for number, reward, chosen_in, at, env, led_to, reason in expected:
        one, origin = found[number], segments[chosen_in].data
        assert origin["selected"][at, env]
        assert one.rewards.tolist() == [reward]
        assert one.version.tolist() == [chosen_in]
        assert one.periods.reason.tolist() == [reason]
        assert one.next_state.tolist() == [led_to]
        assert (one.logp < 0).all()
        np.testing.assert_array_equal(one.logp[0], origin["skill_logp"][at, env])
        np.testing.assert_array_equal(one.skills[0], origin["skills"][at, env])
        np.testing.assert_array_equal(one.state[0], origin["state"][at, env])
        np.testing.assert_array_equal(one.obs[0], origin["obs"][at, env])


def test_05_a_carried_period_may_be_as_old_as_the_dial_allows():
    for degree, num_choices in ((1, 0), (2, 2)):
        collector, learner, _ = make_pair((50, 50), sync_batch_size=6, skill_interval=7, straddle="carry")
        store = RoundStore()
        for version in range(3):
            store.add(collector.collect(ticket(version, degree=degree), learner.weights()), version)
            choices = store.choices(store.take(), version)
        assert len(choices) == num_choices
        assert store.refused_choices == 2 - num_choices
        assert store.refused == 0


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


@pytest.mark.parametrize("algorithm", [mappo, hmasd])
def test_10_evaluation_leaves_the_training_alone(algorithm):
    """Both sides are built as a run builds them, with as many environments, amid periods of 5 steps."""
    name = algorithm.ALGORITHM.name
    carried = {"straddle": "carry", "async_training.off_policy_degree": 1} if name == "hmasd" else {}
    sizes = {"runtime.num_workers": 1, "sync_batch_size": 28, "eval.num_envs": 4}
    changes = {**sizes, "eval.deterministic": False, **carried}
    config = offbeat.load_config(f"alice-bob-{name}", settings(name, **changes))

    def collected(is_judged):
        roles = algorithm.build(config)
        weights = roles.learner(SingleRank()).weights()
        collector = roles.collect.make(WorkerContext(0, 1, 0))
        evaluator = roles.evaluate.make(WorkerContext(0, 1, 0))
        found = []
        for number in range(3):
            data = collector.collect(ticket(number, degree=1), weights).data
            before = collector.state_dict()
            if is_judged:
                assert evaluator.evaluate(weights, seed=number)["eval/episodes"] == 4
                np.testing.assert_equal(collector.state_dict(), before)
            found.append((data, before))
        return found

    alone, judged = collected(False), collected(True)
    np.testing.assert_equal(judged, alone)
    lane, skills = (alone[0][1][part] for part in ("lane", "skills"))
    assert np.abs(lane["memory"]).min(axis=(1, 2)).all()  # there was something to lose
    assert lane["lengths"].tolist() == [7] * 4
    if name == "hmasd":
        assert skills["timer"].tolist() == [2] * 4


def test_10_a_run_that_is_judged_reaches_the_same_weights(tmp_path):
    never = train("hmasd", tmp_path / "never", rounds=3, **{"eval.at_end": False})
    always = train("hmasd", tmp_path / "always", rounds=3, **{"eval.interval_rounds": 1})
    assert always.digest == never.digest


def test_11_evaluations_and_checkpoints_come_when_they_are_due(tmp_path):
    """A round has 3 x 13 samples: a test of the total against an interval of, say, 80 would rarely hit."""
    changes = {
        "env.num_envs": 3,
        "runtime.num_workers": 1,
        "sync_batch_size": 39,
        "eval.interval_rounds": 2,
        "eval.at_end": False,
        "async_training.enable_async_eval": False,
        "checkpoint.interval_rounds": 3,
        "checkpoint.interval_s": None,
        "checkpoint.keep": 20,
    }
    train("hmasd", tmp_path / "run", rounds=11, **changes)
    path = tmp_path / "run" / "events.jsonl"
    totals = [found["metrics"]["rollout/total_generated_samples"] for found in read_rounds(path)]
    assert totals == [39 * (1 + number) for number in range(11)]
    judged = [event["metrics"]["eval/version"] for event in read_events(path) if event["kind"] == "eval"]
    assert judged == [2, 4, 6, 8, 10]
    saved = sorted(found.name for found in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == [f"step_{version:08d}" for version in (3, 6, 9, 11)]  # the last one ends the run


NOISY = {"batch_rule": "noise_scale", "batch_size_end": 36, "num_minibatches": 2}
KEPT = {"discriminator": {"data": "kept", "capacity": 20}}


@pytest.mark.parametrize("changes", [{}, KEPT, NOISY, {"straddle": "carry"}], ids=str)
def test_12_a_checkpoint_holds_all_that_the_next_round_depends_on(changes):
    def go_on(collector, learner, versions):
        for version in versions:
            segment = collector.collect(ticket(version, degree=1), learner.weights())
            learner.train(batch_of(segment, version=version, degree=1))

    collector, learner, _ = make_pair(value_norm=True, **changes)
    go_on(collector, learner, range(2))
    states = collector.state_dict(), learner.state_dict()
    assert {"version", "value_norm", "high_norm", "noise", "lessons", "refused"} < set(states[1])
    assert {"actor", "critic", "coordinator", "discriminators"} < set(states[1])
    other_collector, other, _ = make_pair(value_norm=True, **changes)
    go_on(other_collector, other, [8])  # it has a past of its own, all of which must go
    other_collector.load_state_dict(states[0])
    other.load_state_dict(states[1])
    np.testing.assert_equal((other_collector.state_dict(), other.state_dict()), states)
    go_on(collector, learner, range(2, 4))
    go_on(other_collector, other, range(2, 4))
    np.testing.assert_equal(other.weights(), learner.weights())
    np.testing.assert_equal(other.state_dict(), learner.state_dict())
    np.testing.assert_equal(other_collector.state_dict(), collector.state_dict())


def test_12_what_is_kept_and_measured_makes_a_difference():
    """Samples have begun to replace each other, and rounds have grown, when the test above saves."""
    for changes in (KEPT, NOISY):
        collector, learner, _ = make_pair(value_norm=True, **changes)
        for version in range(2):
            segment = collector.collect(ticket(version), learner.weights())
            learner.train(batch_of(segment, version=version))
        state = learner.state_dict()
        if changes is KEPT:
            assert len(state["lessons"]["arrays"]["state"]) == 20
            assert state["lessons"]["next"] == 2 * 12 - 20
        else:
            assert state["noise"]["num_updates"] > 0
            assert learner.weights()["batch_size"] > 12


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


def test_14_a_strict_run_writes_the_scalars_that_are_documented(tmp_path):
    pytest.importorskip("tensorboard")
    train("hmasd", tmp_path / "run", rounds=3, **{"observe.tensorboard": True})
    found = read_scalars(tmp_path / "run" / "tensorboard")
    sync = {tag.removeprefix("Sync/"): found[tag] for tag in found if tag.startswith("Sync/")}
    names = {"FirstRatioMaxDev", "PolicyVersion", "SamplesCollected", "CollectionTime", "UpdateTime"}
    assert set(sync) == names
    for name, values in sync.items():
        assert [version for version, _ in values] == [1, 2, 3], name
    assert [value for _, value in sync["PolicyVersion"]] == [1, 2, 3]
    assert [value for _, value in sync["SamplesCollected"]] == [40, 40, 40]
    assert all(0 <= value <= 1e-5 for _, value in sync["FirstRatioMaxDev"])
    assert all(value > 0 for name in ("CollectionTime", "UpdateTime") for _, value in sync[name])


def test_15_any_number_of_environments_and_agents():
    for lengths, num_agents in (((5,), 1), ((5, 6, 7, 8, 9), 3)):
        collector, learner, _ = make_pair(lengths, num_agents=num_agents, sync_batch_size=6 * len(lengths))
        metrics = learner.train(batch_of(collector.collect(ticket(0), learner.weights()), version=0))
        assert np.isfinite(metrics["learn/loss"])
