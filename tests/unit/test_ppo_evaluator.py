"""PPO's evaluator and policy."""

import numpy as np
import pytest
from gymnasium.spaces import Box

from offbeat.algorithms import judging
from offbeat.algorithms.ppo import ALGORITHM, PPOConfig
from offbeat.algorithms.ppo.evaluator import PPOEvaluator
from offbeat.algorithms.ppo.policy import PPOPolicy
from offbeat.config.models import EnvConfig, EvalConfig, RunConfig
from offbeat.errors import EvalError, OffbeatError
from offbeat.models.actor import make_actor
from offbeat.models.spec import network_spec
from offbeat.roles import SingleRank
from tests.unit.ppo_fakes import FLOATS, FakeWorld, make_learner, settings


def start(lengths, deterministic=True, sampled_episodes=0, **options):
    config, world = settings(**options), FakeWorld(lengths)
    spec = network_spec(config.network, world.single_observation_space, world.single_action_space)
    judged = EvalConfig(
        episodes=7, num_envs=len(lengths), deterministic=deterministic, sampled_episodes=sampled_episodes
    )
    evaluator = PPOEvaluator(judged, world, spec, make_actor(spec))
    return evaluator, make_learner(config, world).weights(), world


def test_each_environment_plays_its_share():
    """7 episodes of 3 environments are 3 + 2 + 2, however long each takes."""
    evaluator, weights, _ = start((2, 4, 9))
    metrics = evaluator.evaluate(weights, seed=1)
    assert metrics["eval/episodes"] == 7
    assert metrics["eval/length_mean"] == pytest.approx((3 * 2 + 2 * 4 + 2 * 9) / 7)
    returns = [3] * 3 + [10] * 2 + [45] * 2
    assert metrics["eval/return_mean"] == pytest.approx(np.mean(returns))
    assert metrics["eval/return_std"] == pytest.approx(np.std(returns))
    assert (metrics["eval/return_min"], metrics["eval/return_max"]) == (3, 45)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("network", [{"hidden": (8,)}, {"kind": "gru", "hidden": (8,)}])
def test_equal_seeds_give_equal_actions(deterministic, network):
    actions = []
    for seed in (1, 1, 2):
        evaluator, weights, world = start((3, 4), deterministic, network=network)
        evaluator.evaluate(weights, seed)
        actions.append(np.stack(world.seen))
    np.testing.assert_array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[0], actions[2])


def test_evaluating_again_begins_anew():
    evaluator, weights, world = start((3, 4), deterministic=False)
    evaluator.evaluate(weights, seed=1)
    first = list(world.seen)
    world.seen.clear()
    evaluator.evaluate(weights, seed=1)
    np.testing.assert_array_equal(np.stack(first), np.stack(world.seen))


SAMPLED = {"eval/return_mean_sampled", "eval/return_std_sampled"}


@pytest.mark.parametrize("network", [{"hidden": (8,)}, {"kind": "gru", "hidden": (8,)}])
def test_drawn_actions_are_judged_beside_the_most_likely_ones(network):
    worlds = []
    for deterministic, sampled_episodes in ((True, 0), (False, 0), (True, None)):
        evaluator, weights, world = start((3, 4), deterministic, sampled_episodes, network=network)
        metrics = evaluator.evaluate(weights, seed=1)
        assert set(metrics) >= SAMPLED if sampled_episodes is None else not SAMPLED & set(metrics)
        worlds.append(np.stack(world.seen))
    likely, drawn, both = worlds
    assert not np.array_equal(likely, drawn)
    np.testing.assert_array_equal(both, np.concatenate([likely, drawn]))
    assert metrics["eval/episodes"] == 7
    assert metrics["eval/return_mean_sampled"] == pytest.approx((4 * 6 + 3 * 10) / 7)
    assert metrics["eval/return_std_sampled"] == pytest.approx(np.std([6] * 4 + [10] * 3))


def test_fewer_episodes_may_be_played_with_drawn_actions():
    evaluator, weights, world = start((3, 4), sampled_episodes=1)
    metrics = evaluator.evaluate(weights, seed=1)
    assert (metrics["eval/episodes"], metrics["eval/return_mean_sampled"]) == (7, 6)


def test_an_endless_episode_is_an_error(monkeypatch):
    monkeypatch.setattr(judging, "MAX_EPISODE_STEPS", 50)
    evaluator, weights, _ = start((3, 10**9))
    with pytest.raises(EvalError, match=r"env\.max_episode_steps"):
        evaluator.evaluate(weights, seed=1)


def test_fewer_episodes_than_environments():
    config = RunConfig(
        algorithm=PPOConfig(network={"hidden": (8,)}),
        env=EnvConfig(id="CartPole-v1", max_episode_steps=5),
        eval=EvalConfig(episodes=3, num_envs=10),
    )
    roles = ALGORITHM.build(config)
    metrics = roles.evaluate.make(None).evaluate(roles.learner(SingleRank()).weights(), seed=0)
    assert metrics["eval/episodes"] == 3


def policy(action_space=None, **options):
    config = settings(**options)
    world = FakeWorld((3,), FLOATS, action_space or Box(-1, 1, (2,), np.float32))
    spec = network_spec(config.network, world.single_observation_space, world.single_action_space)
    return PPOPolicy(spec, make_learner(config, world).weights())


def test_policies_take_one_observation_or_a_batch():
    acting = policy()
    batch = np.random.default_rng(0).normal(size=(5, 3))
    actions = acting.act(batch)
    assert actions.shape == (5, 2)
    np.testing.assert_allclose(acting.act(batch[3]), actions[3], atol=1e-6)
    assert not np.array_equal(acting.act(batch, deterministic=False), acting.act(batch, deterministic=False))
    with pytest.raises(OffbeatError, match=r"shape \(3,\)"):
        acting.act(np.zeros(4))


def test_recurrent_policies_remember_until_reset():
    acting = policy(network={"kind": "gru", "hidden": (8,)})
    obs = np.ones(3)
    first, second = acting.act(obs), acting.act(obs)
    assert not np.array_equal(first, second)
    acting.reset()
    np.testing.assert_array_equal(acting.act(obs), first)


def test_the_policy_of_a_run():
    config = RunConfig(algorithm=PPOConfig(network={"hidden": (8,)}), env=EnvConfig(id="CartPole-v1"))
    roles = ALGORITHM.build(config)
    acting = roles.policy(roles.learner(SingleRank()).weights())
    assert acting.act(np.zeros(4)) in (0, 1)
    assert acting.act(np.zeros((6, 4))).shape == (6,)
