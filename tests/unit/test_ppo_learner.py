"""PPO's learner: exactness first, then that it learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from offbeat.algorithms.ppo.rounds import Round, compute_targets
from offbeat.errors import TrainError
from offbeat.roles import Learner
from offbeat.types import Batch
from tests.unit.ppo_fakes import (
    FLOATS,
    FakeWorld,
    collect_batch,
    make_collector,
    make_learner,
    settings,
    train_rounds,
)
from tests.unit.test_ppo_collector import CASES

LENGTHS = (3, 5, 100, 7)
METRICS = {
    "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm",
    "learning_rate", "ess", "behaviour_kl", "explained_variance", "first_ratio_max_dev", "num_epochs",
    "gradient_steps",
}  # fmt: skip


def start(case="mlp", seed=0, off_policy_degree=0, **options):
    defaults, observation_space, action_space = CASES[case]
    world = FakeWorld(LENGTHS, observation_space, action_space)
    config = settings(off_policy_degree, **(defaults | options))
    return make_collector(config, world), make_learner(config, world, seed)


def flat(learner):
    return np.concatenate([array.ravel() for array in learner.state_dict()["parameters"].values()])


@pytest.mark.parametrize("case", CASES)
def test_first_ratios_on_fresh_samples_are_one(case):
    collector, learner = start(case, lr=0.01)
    assert isinstance(learner, Learner)
    for version in range(3):
        metrics = train_rounds(collector, learner, 1, first=version)
        assert {f"learn/{name}" for name in METRICS} == set(metrics)
        assert metrics["learn/first_ratio_max_dev"] < 1e-5
        assert metrics["learn/ess"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["learn/behaviour_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_same_seed_same_weights(case):
    results = []
    for seed in (0, 0, 1):
        collector, learner = start(case, seed=seed)
        train_rounds(collector, learner, 2)
        results.append(flat(learner))
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_global_random_state_is_left_alone():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    collector, learner = start()
    train_rounds(collector, learner, 1)
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])


@pytest.mark.parametrize("case", CASES)
def test_a_saved_learner_goes_on_exactly(case):
    collector, learner = start(case)
    train_rounds(collector, learner, 2)
    state, batch = learner.state_dict(), collect_batch(collector, learner, 2, 9)
    _, other = start(case)
    other.train(batch)
    other.load_state_dict(state)
    assert other.state_dict()["version"] == 2
    for name, array in learner.weights().items():
        np.testing.assert_array_equal(other.weights()[name], array)
    learner.train(batch)
    other.train(batch)
    np.testing.assert_array_equal(flat(learner), flat(other))
    left, right = learner.state_dict(), other.state_dict()
    np.testing.assert_array_equal(left["adam"]["square"], right["adam"]["square"])
    np.testing.assert_array_equal(left["obs_moments"]["mean"], right["obs_moments"]["mean"])


def test_a_fresh_learner_can_be_saved_too():
    collector, learner = start()
    _, other = start()
    batch = collect_batch(collector, learner)
    other.train(batch)
    other.load_state_dict(learner.state_dict())
    assert other.state_dict()["adam"]["num_steps"] == 0
    for each in (learner, other):
        each.train(batch)
    np.testing.assert_array_equal(flat(learner), flat(other))


def test_weights_are_a_snapshot_without_the_critic():
    collector, learner = start("gaussian")
    weights = learner.weights()
    copy = {name: array.copy() for name, array in weights.items()}
    train_rounds(collector, learner, 1)
    for name, array in weights.items():
        np.testing.assert_array_equal(array, copy[name])
    assert not np.array_equal(weights["actor.0.weight"], learner.weights()["actor.0.weight"])
    assert {"log_std", "normalizer.mean", "normalizer.scale"} <= set(weights)
    assert not any(name.startswith("critic") for name in weights)


@pytest.mark.parametrize("case", ["mlp", "gru"])
def test_gradient_accumulation_changes_nothing(case):
    results = []
    for parts in (1, 3):
        collector, learner = start(case, grad_accumulation=parts, minibatch_size=24, ent_coef=0.05)
        train_rounds(collector, learner, 1)
        results.append(flat(learner))
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)


@pytest.mark.parametrize("case", ["mlp", "gru"])
@pytest.mark.parametrize("correction", ["gae", "decoupled", "vtrace"])
def test_reset_steps_are_not_trained_on(case, correction):
    results = []
    for spoil in (False, True):
        collector, learner = start(case, correction=correction)
        batch = collect_batch(collector, learner, num_segments=2)
        if spoil:
            for segment in batch.segments:
                for name, value in (("rewards", 1e6), ("logp", -50.0), ("actions", 1)):
                    segment.data[name][~segment.data["valid"]] = value
        learner.train(batch)
        results.append(flat(learner))
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("correction", ["decoupled", "vtrace"])
def test_corrections_change_nothing_on_fresh_samples(correction):
    """With equal policies all ratios are 1; V-trace then equals GAE at lambda 1."""
    results = []
    for chosen in ("gae", correction):
        collector, learner = start(correction=chosen, gae_lambda=1.0)
        train_rounds(collector, learner, 2)
        results.append(flat(learner))
    np.testing.assert_allclose(results[0], results[1], atol=1e-4)


@pytest.mark.parametrize("correction", ["gae", "decoupled", "vtrace"])
def test_stale_samples_are_noticed(correction):
    collector, learner = start(off_policy_degree=3, correction=correction, lr=0.03, num_epochs=4)
    old = learner.weights()
    fresh = train_rounds(collector, learner, 3)
    segment = collector.collect(replace(collect_batch(collector, learner).segments[0].ticket, number=50), old)
    stale = learner.train(Batch(3, (segment,), 3))
    assert stale["learn/ess"] < fresh["learn/ess"] - 0.01
    assert stale["learn/behaviour_kl"] > 0.01
    assert stale["learn/first_ratio_max_dev"] > 0.1


def bounds_of(ratio, is_stale=True, **options):
    """Bounds of samples whose actions have become ``ratio`` times as likely."""
    config = settings(3, **{"correction": "decoupled", **options})
    collector, learner = start(off_policy_degree=3)
    data = Round.of(collect_batch(collector, learner).segments)
    values = np.zeros((len(data.valid) + 1, data.valid.shape[1]), np.float32)
    prox_logp = data.logp + np.float32(np.log(ratio))
    targets = compute_targets(config, data, values, prox_logp, is_stale=is_stale)
    if targets.low is None:
        assert targets.high is None
        return None
    return targets.low.flat[0], targets.high.flat[0]


@pytest.mark.parametrize(
    ("ratio", "low", "high"),
    [(1, 0.8, 1.2), (1.4, 0.8, 1.0), (2, 0.8, 0.7), (0.75, 0.8, 1.2), (0.5, 1.2, 1.2)],
)
def test_stale_samples_are_bound_to_the_policy_that_acted(ratio, low, high):
    assert bounds_of(ratio, behaviour_clip=0.4) == pytest.approx((low, high))


def test_fresh_samples_and_other_corrections_have_no_bound_of_their_own():
    assert bounds_of(2, is_stale=False) is None
    assert bounds_of(2, behaviour_clip=None) is None
    assert bounds_of(2, correction="vtrace") is None
    assert bounds_of(2, correction="gae") is None


def test_an_action_that_became_much_likelier_is_not_pushed_further():
    """All actions are twice as likely as when they were taken: that they were good no longer counts."""
    moved = []
    for behaviour_clip in (None, 0.4):
        options = {"correction": "decoupled", "norm_adv": False, "ent_coef": 0.0}
        collector, learner = start(off_policy_degree=3, behaviour_clip=behaviour_clip, **options)
        batch = collect_batch(collector, learner, version=1, of_version=0)
        batch.segments[0].data["logp"][:] -= np.float32(np.log(2))
        batch.segments[0].data["rewards"][:] = 100
        before = {name: array.copy() for name, array in learner.weights().items()}
        learner.train(batch)
        moved.append(any((array != before[name]).any() for name, array in learner.weights().items()))
    assert moved == [True, False]


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("rewards", (2, 1)),
        ("logp", (4, 3)),
        ("obs", (1, 2, 0)),
        pytest.param("obs", (5, 1, 0), id="final observation of a truncated episode"),
        pytest.param("obs", (8, 2, 0), id="observation after the segment"),
    ],
)
def test_non_finite_samples_are_not_trained_on(field, place):
    collector, learner = start()
    before = flat(learner)
    batch = collect_batch(collector, learner)
    batch.segments[0].data[field][place] = np.nan
    with pytest.raises(TrainError, match=f"round 0 was not trained.* in {field}; check the env"):
        learner.train(batch)
    np.testing.assert_array_equal(flat(learner), before)


def test_a_diverging_step_is_not_applied():
    collector, learner = start()
    state = learner.state_dict()
    state["parameters"]["critic.0.weight"][0] = np.nan
    learner.load_state_dict(state)
    before = flat(learner)
    with pytest.raises(TrainError, match=r"round 0 diverged: loss nan.*Lower algorithm\.lr"):
        learner.train(collect_batch(collector, learner))
    np.testing.assert_array_equal(flat(learner), before)


def test_non_finite_reset_steps_do_not_matter():
    collector, learner = start()
    batch = collect_batch(collector, learner)
    data = batch.segments[0].data
    data["rewards"][~data["valid"]] = np.nan
    data["obs"][1:][data["terminated"]] = np.nan
    learner.train(batch)
    assert np.isfinite(flat(learner)).all()


def test_target_kl_ends_the_round_early():
    collector, learner = start(lr=0.1, num_epochs=10, target_kl=0.01)
    assert train_rounds(collector, learner, 1)["learn/num_epochs"] < 10
    collector, learner = start(lr=1e-6, num_epochs=10, target_kl=0.01)
    assert train_rounds(collector, learner, 1)["learn/num_epochs"] == 10


def test_learning_rate_follows_the_version():
    collector, learner = start(lr=0.01, lr_schedule="linear", schedule_rounds=4)
    assert train_rounds(collector, learner, 1)["learn/learning_rate"] == pytest.approx(0.01)
    assert train_rounds(collector, learner, 1, first=3)["learn/learning_rate"] == pytest.approx(0.0025)
    before = flat(learner)
    train_rounds(collector, learner, 1, first=4)
    np.testing.assert_array_equal(before, flat(learner))


def test_observations_are_normalised_with_the_statistics_of_the_version():
    collector, learner = start(normalize_obs=True)
    batch = collect_batch(collector, learner)
    assert learner.weights()["normalizer.mean"].tolist() == [0, 0, 0]
    learner.train(batch)
    data = batch.segments[0].data
    seen = data["obs"][:-1][data["valid"]]
    np.testing.assert_allclose(learner.weights()["normalizer.mean"], seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(learner.weights()["normalizer.scale"], 1 / seen.std(0), rtol=1e-5)


def test_reward_scale_does_not_matter_when_rewards_are_normalised():
    results = []
    for factor in (1.0, 100.0):
        collector, learner = start(normalize_reward=True)
        batch = collect_batch(collector, learner)
        for name in ("rewards", "discounted_returns"):
            batch.segments[0].data[name] *= factor
        learner.train(batch)
        results.append(flat(learner))
    np.testing.assert_allclose(results[0], results[1], atol=1e-4)


def test_value_clipping_is_optional_and_matters():
    results = []
    for clip in (False, True):
        collector, learner = start(clip_vloss=clip, clip_coef=0.01, lr=0.01, num_epochs=4)
        train_rounds(collector, learner, 1)
        results.append(flat(learner))
    assert np.isfinite(results).all()
    assert not np.array_equal(*results)


class TargetWorld(FakeWorld):
    """Rewards the action that the observation asks for."""

    def reset(self, seed):
        self._obs = super().reset(seed)
        return self._obs

    def step(self, actions):
        wanted = self._wanted(self._obs)
        result = super().step(actions)
        self._obs = result.obs
        return replace(result, rewards=self._score(actions, wanted))

    def _wanted(self, obs):
        return obs[:, 0] > 2

    def _score(self, actions, wanted):
        if self.single_action_space.dtype == np.float32:
            return 1 - np.abs(actions[:, 0] - np.where(wanted, 0.5, -0.5))
        chosen = actions if actions.ndim == 1 else actions[:, 1]
        return (chosen == wanted).astype(np.float64)


@pytest.mark.parametrize(
    "action_space", [Discrete(2), MultiDiscrete([3, 2]), Box(-1, 1, (1,), np.float32)], ids=["d", "m", "b"]
)
@pytest.mark.parametrize("correction", ["gae", "decoupled", "vtrace"])
def test_it_learns(action_space, correction):
    world = TargetWorld((20,) * 16, FLOATS, action_space)
    config = settings(
        num_steps=16, num_epochs=6, minibatch_size=64, lr=0.01, lr_schedule="constant", gamma=0.0,
        ent_coef=0.0, correction=correction, normalize_obs=True, network={"hidden": (16,)},
    )  # fmt: skip
    collector, learner = make_collector(config, world), make_learner(config, world)
    rewards = []
    for version in range(25):
        batch = collect_batch(collector, learner, version, version)
        rewards.append(batch.segments[0].data["rewards"].mean())
        learner.train(batch)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.2
    assert np.mean(rewards[-3:]) > 0.7


def test_a_gru_remembers():
    """The reward is for repeating the sign seen at the episode's first step, which is shown only then."""

    class Recall(FakeWorld):
        def reset(self, seed):
            self._sign = np.ones(self.num_envs)
            return self._mask(super().reset(seed))

        def step(self, actions):
            wanted = self._sign > 0
            result = super().step(actions)
            return replace(result, obs=self._mask(result.obs), rewards=(actions == wanted) * 1.0)

        def _mask(self, obs):
            starts = self._age == 0
            self._sign = np.where(starts, np.sign(obs[:, 0] - 2), self._sign)
            return np.where(starts[:, None], self._sign[:, None], np.zeros_like(obs)).astype(np.float32)

    world = Recall((4,) * 32)
    config = settings(
        num_steps=10, num_epochs=4, minibatch_size=160, lr=0.02, lr_schedule="constant", gamma=0.0,
        ent_coef=0.0, network={"kind": "gru", "hidden": (8, 16)},
    )  # fmt: skip
    collector, learner = make_collector(config, world), make_learner(config, world)
    for version in range(25):
        batch = collect_batch(collector, learner, version, version)
        learner.train(batch)
    data = batch.segments[0].data
    assert data["rewards"][data["valid"]].mean() > 0.9
