"""Eleven mistakes that PPO with prioritized replay invites, each pinned by what is right instead."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from offbeat.algorithms.ppo.rounds import Shares
from offbeat.config.models import EnvConfig
from offbeat.envs import make_world
from offbeat.envs.colorlines import ENV_ID
from offbeat.envs.colorlines.moves import Moves
from offbeat.ops.priorities import segment_priority
from offbeat.pacing.actions import Train
from offbeat.pacing.schedules import steady_schedule
from offbeat.replay import Handles, PrioritizedReplay
from offbeat.testing.simulation import Simulation
from offbeat.types import ArraySpec
from tests.unit.pacing_steps import arrive, begin, end_round, make, of_type, tickets
from tests.unit.ppo_fakes import FLOATS, FakeWorld, collect_batch, ticket
from tests.unit.ppo_per_fakes import (
    LENGTHS,
    Watched,
    leaves,
    make_collector,
    make_learner,
    settings,
    spread_priorities,
)

ONE_STEP = {"num_epochs": 1, "minibatch_size": 10_000, "norm_adv": False, "max_grad_norm": 1e9}


def start(lengths=LENGTHS, **options):
    """Collector and learner of a fake world of three actions."""
    config, world = settings(**options), FakeWorld(lengths, FLOATS, Discrete(3))
    return make_collector(config, world), make_learner(config, world)


def train(collector, learner, rounds, first=0):
    for version in range(first, first + rounds):
        metrics = learner.train(collect_batch(collector, learner, version, version))
    return metrics


# ---------------------------------------------------------------- 1. importance weights


def gradient(learner, draw, state, shares):
    """Gradient of the first step on a draw when segments count like this."""
    learner.load_state_dict(state)
    learner._learn(draw.data, 9, np.random.default_rng(0), is_stale=True, shares=shares)
    return learner._parameters.grad.numpy().copy()


def test_1_importance_weights_are_inside_the_mean():
    """The gradient is the weighted sum over segments, not the mean weight times the plain gradient."""
    collector, learner = start(per_for="both", fresh_fraction=0.0, per_beta_start=1.0, **ONE_STEP)
    train(collector, learner, 5)
    spread_priorities(learner)
    watched, state = Watched(learner), learner.state_dict()
    learner.train(collect_batch(collector, learner, 5, 5))
    found, (draw,) = learner._parameters.grad.numpy().copy(), watched.draws
    weights = draw.shares.critic
    assert weights.max() > 2 * weights.min() and weights.mean() == pytest.approx(1.0)
    np.testing.assert_array_equal(draw.shares.policy, weights)
    parts = [gradient(learner, draw, state, Shares(one, one)) for one in np.eye(6, dtype=np.float32)]
    np.testing.assert_allclose(found, weights @ np.array(parts), rtol=1e-3, atol=1e-5 * np.abs(found).max())
    outside = weights.mean() * np.sum(parts, axis=0)
    assert np.abs(found - outside).max() > 0.05 * np.abs(found).max()


# ---------------------------------------------------------------- 2. advantages


def slow_gae(rewards, values, terminated, truncated, valid, gamma, gae_lambda):
    """Generalised advantages of one environment, from their definition."""
    advantages = np.zeros(len(rewards))
    for start_step in np.flatnonzero(valid):
        factor = 1.0
        for t in range(start_step, len(rewards)):
            after = 0.0 if terminated[t] else gamma * values[t + 1]
            advantages[start_step] += factor * (rewards[t] + after - values[t])
            if terminated[t] or truncated[t]:
                break
            factor *= gamma * gae_lambda
    return advantages


def test_2_advantages_look_ahead_and_bootstrap():
    collector, learner = start(fresh_fraction=1.0, batch_size=4, gamma=0.9, gae_lambda=0.8, norm_adv=False)
    train(collector, learner, 2)
    watched = Watched(learner)
    train(collector, learner, 1, first=2)
    (lesson,) = watched.lessons
    data = lesson.data
    for env in range(4):
        steps = [getattr(data, name)[:, env] for name in ("rewards", "terminated", "truncated", "valid")]
        expected = slow_gae(steps[0], lesson.values[:, env], *steps[1:], 0.9, 0.8)
        valid = data.valid[:, env]
        np.testing.assert_allclose(lesson.targets.advantages[valid, env], expected[valid], rtol=1e-4)
        np.testing.assert_allclose(
            lesson.targets.values[valid, env], (expected + lesson.values[:-1, env])[valid], rtol=1e-4
        )
        assert np.abs(expected - (steps[0] - lesson.values[:-1, env]))[valid].max() > 1.0


# ---------------------------------------------------------------- 3. behaviour probabilities


def mixture(logits, actions, temperature, epsilon):
    """Probability of actions ``[M]`` by the definition: a tempered softmax, and some evenly drawn ones."""
    tempered = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    chosen = np.take_along_axis(tempered / tempered.sum(-1, keepdims=True), actions[:, None], -1)[:, 0]
    return (1 - epsilon) * chosen + epsilon / logits.shape[1]


def policy_logits(learner, obs):
    """What the learner's own network says of observations ``[M, ...]``."""
    return learner._network.outputs(torch.from_numpy(np.ascontiguousarray(obs))).numpy().astype(np.float64)


@pytest.mark.parametrize("updates", [1, 3])
def test_3_first_ratios_on_fresh_samples_are_one(updates):
    collector, learner = start(lr=0.02, updates_per_round=updates)
    for version in range(4):
        metrics = train(collector, learner, 1, first=version)
        assert metrics["learn/first_ratio_max_dev"] < 1e-5


@pytest.mark.parametrize(("temperature", "epsilon"), [(2.0, 0.0), (1.0, 0.3), (0.5, 0.25)])
def test_3_stored_probabilities_are_those_acted_with(temperature, epsilon):
    options = {"explore_temperature": temperature, "explore_epsilon": epsilon, "explore_schedule": "constant"}
    collector, learner = start(lr=0.05, num_epochs=6, **options)
    train(collector, learner, 3)
    batch = collect_batch(collector, learner, 3, 3)
    data = batch.segments[0].data
    logits = policy_logits(learner, data["obs"][:-1].reshape(-1, 3))
    expected = mixture(logits, data["actions"].reshape(-1), temperature, epsilon).reshape(8, 4)
    np.testing.assert_allclose(data["logp"], np.log(expected), atol=1e-5)
    watched = Watched(learner)
    learner.train(batch)
    chosen = watched.draws[0].chosen
    fresh = slice(0, len(chosen))
    assert len(chosen) == 3
    policy = mixture(logits, data["actions"].reshape(-1), 1.0, 0.0).reshape(8, 4)
    np.testing.assert_allclose(
        watched.lessons[0].behaviour_log_ratios[:, fresh], np.log(policy / expected)[:, chosen], atol=1e-5
    )
    assert np.abs(np.log(policy / expected)).max() > 0.01


def test_3_stored_probabilities_of_moves_are_spread_over_the_legal_ones():
    config = settings(explore_temperature=2.0, explore_epsilon=0.3, network={}, batch_size=4)
    world = make_world(EnvConfig(id=ENV_ID, num_envs=4), 4)
    collector, learner = make_collector(config, world), make_learner(config, world)
    rng = np.random.default_rng(0)
    state = learner.state_dict()
    for array in state["parameters"].values():
        array[:] = rng.normal(size=array.shape)
    learner.load_state_dict(state)
    data = collector.collect(ticket(), learner.weights()).data
    obs = data["obs"][:-1].reshape(-1, 84)
    scores = policy_logits(learner, obs)
    for board, score, action, logp in zip(
        obs, scores, data["actions"].reshape(-1), data["logp"].reshape(-1), strict=True
    ):
        legal = np.flatnonzero(score > -1e8)
        assert len(legal) == np.count_nonzero(Moves().legal(board[None]))
        chosen = np.flatnonzero(legal == action)
        expected = mixture(score[None, legal], chosen, 2.0, 0.3)[0]
        assert logp == pytest.approx(np.log(expected), abs=1e-4)
    world.close()


# ---------------------------------------------------------------- 4. weights of a buffer that is not full


def test_4_weights_do_not_see_slots_that_are_empty():
    replay = PrioritizedReplay({"x": ArraySpec((), "float32")}, 100_000)
    replay.add({"x": np.zeros(5_000, np.float32)}, versions=0)
    sample = replay.sample(np.random.default_rng(0), 256, beta=0.4)
    assert (sample.weights == 1).all()
    drawn = []
    for capacity in (8, 80):
        collector, learner = start(
            buffer_capacity=capacity, fresh_fraction=0.0, per_for="both", per_beta_start=1.0
        )
        train(collector, learner, 2)
        watched = Watched(learner)
        train(collector, learner, 1, first=2)
        drawn.append(watched.draws[0].shares.critic)
    np.testing.assert_array_equal(drawn[0], drawn[1], "a full one and one that is not")
    assert np.ptp(drawn[0]) > 0.1


# ---------------------------------------------------------------- 5. priorities


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_5_new_segments_have_the_largest_priority_and_trained_ones_their_error(share):
    options = {"per_alpha": 0.7, "per_eta": 0.8, "gamma": 0.9, "fresh_fraction": share, "per_for": "both"}
    collector, learner = start(batch_size=2, **options)
    watched, largest = Watched(learner), 1.0
    for version in range(4):
        train(collector, learner, 1, first=version)
        draw, lesson = watched.draws[-1], watched.lessons[-1]
        data, values = lesson.data, lesson.values
        after = np.where(data.terminated, 0, 0.9 * values[1:])
        errors = np.abs(data.rewards + after - values[:-1])
        expected = [
            0.8 * errors[data.valid[:, i], i].max() + 0.2 * errors[data.valid[:, i], i].mean()
            for i in range(2)
        ]
        largest = max(largest, *expected)
        first_untrained = 4 * version + len(draw.chosen)
        slots = np.arange(4 * version, first_untrained)
        if draw.handles is not None:
            slots = np.concatenate([slots, draw.handles.index])
        found = leaves(learner)
        np.testing.assert_allclose(found[slots], np.array(expected) ** 0.7, rtol=1e-4)
        untrained = found[first_untrained : 4 * version + 4]
        assert len(untrained) >= 2
        np.testing.assert_allclose(untrained, (largest + 1e-6) ** 0.7, rtol=1e-4)
    assert largest > 3, "rewards of this world make errors larger than the first priority"


def test_5_of_several_updates_the_last_one_gives_the_priority():
    collector, learner = start(
        batch_size=4, fresh_fraction=1.0, updates_per_round=2, per_alpha=1.0, num_epochs=6, lr=0.05
    )
    watched = Watched(learner)
    train(collector, learner, 1)
    found = leaves(learner)
    for lesson, is_last in zip(watched.lessons, (False, True), strict=True):
        data, values = lesson.data, lesson.values
        errors = data.rewards + np.where(data.terminated, 0, 0.99 * values[1:]) - values[:-1]
        assert np.allclose(found, segment_priority(errors, data.valid), rtol=1e-4) == is_last


def test_5_the_error_is_that_of_rewards_as_they_are_trained():
    collector, learner = start(batch_size=4, fresh_fraction=1.0, normalize_reward=True, per_alpha=1.0)
    watched = Watched(learner)
    train(collector, learner, 2)
    data, values = watched.lessons[-1].data, watched.lessons[-1].values
    errors = data.rewards + np.where(data.terminated, 0, 0.99 * values[1:]) - values[:-1]
    expected = segment_priority(errors, data.valid)
    assert watched.draws[-1].chosen.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(leaves(learner)[4:], expected, rtol=1e-3)


# ---------------------------------------------------------------- 6. the largest priority


def test_6_alpha_is_not_in_the_largest_priority():
    replay = PrioritizedReplay({"x": ArraySpec((), "float32")}, 8, alpha=0.5)
    handles = replay.add({"x": np.zeros(2, np.float32)}, versions=0)
    replay.update(handles, [16.0, 2.0])
    assert replay.largest_priority == 16.0
    replay.add({"x": np.zeros(1, np.float32)}, versions=1)
    np.testing.assert_allclose(replay.state_dict()["leaves"], [4.0, 2**0.5, 4.0], rtol=1e-5)


# ---------------------------------------------------------------- 7. handles


def test_7_a_late_update_misses_what_was_overwritten():
    collector, learner = start(buffer_capacity=6)
    watched = Watched(learner)
    train(collector, learner, 2)
    old = watched.draws[1].handles
    train(collector, learner, 3, first=2)
    before = leaves(learner).copy()
    assert learner._replay.update(old, np.full(len(old.index), 50.0)) == 0
    np.testing.assert_array_equal(leaves(learner), before)
    assert learner._replay.largest_priority < 50
    now = learner._replay.sample_uniform(np.random.default_rng(0), 6).handles
    assert now.index.tolist() == [0, 1, 2, 3, 4, 5]
    new = Handles(old.index, now.generation[old.index])
    assert learner._replay.update(new, np.full(len(old.index), 50.0)) == len(old.index), "as they are now"


# ---------------------------------------------------------------- 8. beta


@pytest.mark.parametrize("rounds", [2, 10, 1000])
def test_8_beta_goes_from_its_start_to_one_over_the_planned_rounds(rounds):
    config = settings(rounds=rounds, per_beta_start=0.4)
    assert config.beta_at(0) == pytest.approx(0.4)
    assert config.beta_at(rounds - 1) == pytest.approx(1.0), "the last round is trained from this version"
    assert config.beta_at(rounds + 5) == 1.0
    steps = np.diff([config.beta_at(version) for version in range(rounds)])
    np.testing.assert_allclose(steps, 0.6 / (rounds - 1), atol=1e-9)


def test_8_the_draw_uses_the_beta_of_its_round():
    collector, learner = start(rounds=4, per_for="both", fresh_fraction=0.0, lr=1e-9)
    seen = []
    sample = learner._replay.sample
    learner._replay.sample = lambda *args, beta: (seen.append(beta), sample(*args, beta=beta))[1]
    metrics = [train(collector, learner, 1, first=version)["learn/per_beta"] for version in range(4)]
    np.testing.assert_allclose(metrics, [0.4, 0.6, 0.8, 1.0])
    assert seen == metrics[1:], "the first round has nothing to draw from"


# ---------------------------------------------------------------- 9. truncation


def test_9_a_truncation_bootstraps_from_the_final_observation_and_a_termination_does_not():
    """Environment 0 terminates after three steps, environment 1 is cut off after five."""
    targets = {}
    for spoilt in (None, "terminated", "truncated"):
        collector, learner = start(batch_size=4, fresh_fraction=1.0, norm_adv=False, gamma=0.9)
        batch = collect_batch(collector, learner)
        data = batch.segments[0].data
        if spoilt is not None:
            data["obs"][1:][data[spoilt]] += 5.0
        watched = Watched(learner)
        learner.train(batch)
        (lesson,) = watched.lessons
        targets[spoilt] = lesson.targets.values
        step, env = (2, 0) if spoilt == "terminated" else (4, 1)
        after = 0.0 if spoilt == "terminated" else 0.9 * lesson.values[step + 1, env]
        assert lesson.targets.values[step, env] == pytest.approx(data["rewards"][step, env] + after, rel=1e-5)
    valid = data["valid"]
    np.testing.assert_array_equal(targets["terminated"][valid], targets[None][valid])
    assert abs(targets["truncated"][4, 1] - targets[None][4, 1]) > 1e-3
    np.testing.assert_array_equal(targets["truncated"][valid[:, 2], 2], targets[None][valid[:, 2], 2])


# ---------------------------------------------------------------- 10. exploration


def test_10_epsilon_follows_the_version_of_the_ticket():
    """One collector for the whole run: what it was born with does not matter."""
    collector, learner = start(rounds=10, explore_epsilon=0.8)
    weights = learner.weights()
    for number, (version, epsilon) in enumerate([(0, 0.8), (5, 0.4), (9, 0.08), (2, 0.64)]):
        data = collector.collect(ticket(number, version), weights).data
        logits = policy_logits(learner, data["obs"][:-1].reshape(-1, 3))
        expected = mixture(logits, data["actions"].reshape(-1), 1.0, epsilon)
        np.testing.assert_allclose(data["logp"].reshape(-1), np.log(expected), atol=1e-5)
        other = mixture(logits, data["actions"].reshape(-1), 1.0, epsilon / 2)
        assert np.abs(np.log(other / expected)).max() > 1e-4


# ---------------------------------------------------------------- 11. overlap


REPLAY = {"mode": "replay", "replay_ratio": 0.5, "segments_per_round": 2, "num_collectors": 2}


def test_11_tickets_are_issued_while_a_round_is_trained():
    coordinator = make(off_policy_degree=1, **REPLAY)
    assert len(tickets(begin(coordinator))) == 2
    arrive(coordinator, 0)
    actions = arrive(coordinator, 1)
    assert of_type(actions, Train) == [Train(0, (0, 1), 1)]
    assert [t.number for t in tickets(actions)] == [3], "the other lane got its next ticket before"
    assert coordinator.waiting_for() == "round 0 is being trained by the learner"
    assert coordinator.counts().running == 2
    arrive(coordinator, 2, 3)
    assert coordinator.counts().ready == 4, "two in training, and a whole round that arrived meanwhile"
    assert of_type(end_round(coordinator), Train) == [Train(1, (2, 3), 1)]


def test_11_strict_mode_takes_turns():
    coordinator = make(off_policy_degree=0, **REPLAY)
    begin(coordinator)
    actions = arrive(coordinator, 0, 1)
    assert of_type(actions, Train) and not tickets(actions)
    assert len(tickets(end_round(coordinator))) == 2


def test_11_collection_and_training_overlap_from_one_on():
    """Time of a round over that of its longer part, for equal parts: 2 is one after the other."""
    figures = []
    for degree in (0, 1, 2):
        plain = steady_schedule(collect_s=1.0, train_s=1.0, degree=degree)
        simulation = Simulation(
            replace(plain, config=replace(plain.config, mode="replay", replay_ratio=1 / 4))
        )
        simulation.run()
        figures.append(simulation.now_s / plain.config.rounds)
    assert figures == pytest.approx([2.0, 1.0, 1.0], rel=0.02)
