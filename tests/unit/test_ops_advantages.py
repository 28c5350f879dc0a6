"""Advantages against hand-computed numbers, slow reference loops, and each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.ops.advantages import discounted_returns, gae, gae_to_next, off_policy_gae, vtrace

GAMMA, LAMBDA = 0.9, 0.8
NEVER = np.zeros((3, 1), bool)
ALWAYS = np.ones((3, 1), bool)


def column(*numbers):
    return np.array(numbers, np.float32)[:, None]


def random_segment(seed, num_steps=9, num_envs=5):
    """A segment with ends of both kinds and reset steps after them, as collectors write it."""
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
    valid = np.ones(shape, bool)
    terminated, truncated = np.zeros(shape, bool), np.zeros(shape, bool)
    valid[0] = rng.random(num_envs) > 0.2
    for t in range(num_steps):
        kind = rng.integers(0, 5, num_envs)
        terminated[t] = valid[t] & (kind == 0)
        truncated[t] = valid[t] & (kind == 1)
        if t + 1 < num_steps:
            valid[t + 1] = ~(terminated[t] | truncated[t])
    rewards = rng.normal(size=shape).astype(np.float32) * valid
    values = rng.normal(size=(num_steps + 1, num_envs)).astype(np.float32)
    ratios = np.exp(rng.normal(size=shape)).astype(np.float32)
    return (rewards, values, terminated, truncated, valid), ratios


def deltas(rewards, values, terminated, truncated, valid):
    return (rewards + GAMMA * ~terminated * values[1:] - values[:-1]) * valid


def slow_trace(steps, weight):
    """sum over n >= t of gamma^(n-t) * weight(t, n, env) * delta_n, up to the end of the episode."""
    _, _, terminated, truncated, valid = steps
    delta = deltas(*steps)
    result = np.zeros_like(delta)
    for env in range(delta.shape[1]):
        for t in range(len(delta)):
            for n in range(t, len(delta)):
                result[t, env] += GAMMA ** (n - t) * weight(t, n, env) * delta[n, env]
                if terminated[n, env] or truncated[n, env] or not valid[n, env]:
                    break
    return result


def test_gae_by_hand():
    advantages, targets = gae(
        column(1, 2, 3), column(0.5, 1, 1.5, 2), NEVER, NEVER, ALWAYS, gamma=GAMMA, gae_lambda=LAMBDA
    )
    # deltas: 1 + .9 - .5 = 1.4;  2 + 1.35 - 1 = 2.35;  3 + 1.8 - 1.5 = 3.3;  decay .72
    last, middle = 3.3, 2.35 + 0.72 * 3.3
    np.testing.assert_allclose(advantages[:, 0], [1.4 + 0.72 * middle, middle, last], rtol=1e-6)
    np.testing.assert_allclose(targets[:, 0], advantages[:, 0] + [0.5, 1, 1.5], rtol=1e-6)


def test_truncation_bootstraps_and_termination_does_not():
    rewards, values = column(1, 1, 1), column(10, 20, 30, 40)
    middle = np.array([[False], [True], [False]])
    valid = np.array([[True], [True], [False]])
    cut, _ = gae(rewards, values, NEVER, middle, valid, gamma=GAMMA, gae_lambda=LAMBDA)
    ended, _ = gae(rewards, values, middle, NEVER, valid, gamma=GAMMA, gae_lambda=LAMBDA)
    assert cut[1, 0] == pytest.approx(1 + GAMMA * 30 - 20)
    assert ended[1, 0] == pytest.approx(1 - 20)
    assert cut[2, 0] == ended[2, 0] == 0


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_gae_equals_slow_sum(seed):
    steps, _ = random_segment(seed)
    advantages, _ = gae(*steps, gamma=GAMMA, gae_lambda=LAMBDA)
    np.testing.assert_allclose(advantages, slow_trace(steps, lambda t, n, _: LAMBDA ** (n - t)), atol=1e-5)


@given(st.integers(0, 2**32 - 1), st.floats(0.3, 2.0))
@settings(max_examples=50, deadline=None)
def test_off_policy_gae_equals_slow_sum(seed, c_bar):
    steps, ratios = random_segment(seed)

    def weight(t, n, env):
        return LAMBDA ** (n - t) * np.minimum(ratios[t + 1 : n + 1, env], c_bar).prod()

    advantages, targets = off_policy_gae(*steps, ratios, gamma=GAMMA, gae_lambda=LAMBDA, c_bar=c_bar)
    expected = slow_trace(steps, weight)
    np.testing.assert_allclose(advantages, expected, atol=2e-4)
    values, valid = steps[1][:-1], steps[4]
    np.testing.assert_allclose(targets, values + valid * np.minimum(ratios, c_bar) * expected, atol=2e-4)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_off_policy_gae_with_equal_policies_is_gae(seed):
    steps, ratios = random_segment(seed)
    plain = gae(*steps, gamma=GAMMA, gae_lambda=LAMBDA)
    off_policy = off_policy_gae(*steps, np.ones_like(ratios), gamma=GAMMA, gae_lambda=LAMBDA, c_bar=1.0)
    for left, right in zip(plain, off_policy, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_vtrace_equals_slow_sum(seed):
    rho_bar, c_bar = 1.5, 0.9
    steps, ratios = random_segment(seed)
    rewards, values, terminated, truncated, valid = steps

    def weight(t, n, env):
        trace = np.minimum(ratios[t:n, env], c_bar).prod()
        return LAMBDA ** (n - t) * trace * min(ratios[n, env], rho_bar)

    corrections = slow_trace(steps, weight)
    advantages, targets = vtrace(*steps, ratios, gamma=GAMMA, gae_lambda=LAMBDA, rho_bar=rho_bar, c_bar=c_bar)
    np.testing.assert_allclose(targets, values[:-1] + corrections, atol=2e-4)
    follows = np.vstack([corrections[1:], np.zeros((1, 5))]) * ~(terminated | truncated)
    expected = rewards + GAMMA * ~terminated * (values[1:] + follows) - values[:-1]
    np.testing.assert_allclose(advantages, np.where(valid, expected, 0), atol=2e-4)


def test_vtrace_with_equal_policies_gives_n_step_returns():
    rewards, values = column(1, 2, 3), column(9, 9, 9, 4)
    _, targets = vtrace(
        rewards, values, NEVER, NEVER, ALWAYS, np.ones((3, 1), np.float32),
        gamma=GAMMA, gae_lambda=1.0, rho_bar=1.0, c_bar=1.0,
    )  # fmt: skip
    last = 3 + GAMMA * 4
    np.testing.assert_allclose(
        targets[:, 0], [1 + GAMMA * (2 + GAMMA * last), 2 + GAMMA * last, last], rtol=1e-6
    )


def test_off_policy_targets_are_vtrace_targets():
    steps, ratios = random_segment(3)
    decay = {"gamma": GAMMA, "gae_lambda": LAMBDA}
    _, by_gae = off_policy_gae(*steps, ratios, **decay, c_bar=1.0)
    _, by_vtrace = vtrace(*steps, ratios, **decay, rho_bar=1.0, c_bar=1.0)
    np.testing.assert_allclose(by_gae, by_vtrace, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_reset_steps_do_not_leak(seed):
    (rewards, values, *flags), ratios = random_segment(seed)
    valid = flags[2]
    spoilt_rewards, spoilt_ratios = (np.where(valid, array, np.nan) for array in (rewards, ratios))
    decay = {"gamma": GAMMA, "gae_lambda": LAMBDA}
    bounds = {"rho_bar": 1.0, "c_bar": 1.0}
    pairs = [
        (gae(r, values, *flags, **decay), vtrace(r, values, *flags, w, **decay, **bounds),
         off_policy_gae(r, values, *flags, w, **decay, c_bar=1.0))
        for r, w in ((rewards, ratios), (spoilt_rewards, spoilt_ratios))
    ]  # fmt: skip
    np.testing.assert_array_equal(np.array(pairs[0])[..., valid], np.array(pairs[1])[..., valid])
    assert np.isfinite(np.array(pairs[1])).all()


def test_discounted_returns_start_anew_after_an_end():
    rewards = column(1, 1, 1)
    ended = np.array([[False], [True], [False]])
    stream = discounted_returns(rewards, ended, np.array([10], np.float32), gamma=0.5)
    np.testing.assert_allclose(stream[:, 0], [6, 4, 1])


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=50, deadline=None)
def test_gae_to_next_with_the_following_values_is_gae(seed, with_ratios):
    (rewards, values, terminated, truncated, valid), ratios = random_segment(seed)
    decay = {"gamma": GAMMA, "gae_lambda": LAMBDA}
    extra = {"ratios": ratios, "c_bar": 0.9} if with_ratios else {}
    advantages, targets = gae_to_next(
        rewards, values[:-1], values[1:], terminated, terminated | truncated, valid, **decay, **extra
    )
    flags = (terminated, truncated, valid)
    if with_ratios:
        expected = off_policy_gae(rewards, values, *flags, ratios, **decay, c_bar=0.9)
    else:
        expected = gae(rewards, values, *flags, **decay)
    np.testing.assert_array_equal(advantages, expected[0])
    np.testing.assert_array_equal(targets, np.where(valid, expected[1], 0))
    assert advantages.dtype == targets.dtype == np.float32


def test_gae_to_next_takes_the_values_it_is_given():
    rewards, values, after = column(1, 2, 3), column(0.5, 1, 1.5), column(10, 20, 30)
    ended = np.array([[False], [True], [True]])
    terminated = np.array([[False], [False], [True]])
    advantages, targets = gae_to_next(
        rewards, values, after, terminated, ended, ALWAYS, gamma=GAMMA, gae_lambda=LAMBDA
    )
    # deltas: 1 + 9 - .5 = 9.5;  2 + 18 - 1 = 19, where the trace ends;  3 - 1.5, where there is no future
    np.testing.assert_allclose(advantages[:, 0], [9.5 + 0.72 * 19, 19, 1.5], rtol=1e-6)
    np.testing.assert_allclose(targets[:, 0], [9.5 + 0.72 * 19 + 0.5, 20, 3], rtol=1e-6)


@pytest.mark.parametrize("with_ratios", [False, True])
def test_gae_to_next_serves_several_agents_with_one_value(with_ratios):
    (rewards, values, terminated, truncated, _), _ = random_segment(2)
    num_agents = 3
    rng = np.random.default_rng(0)
    shape = (*rewards.shape, num_agents)
    each = rng.normal(size=shape).astype(np.float32)
    alive = rng.random(shape) > 0.3
    ratios = np.exp(rng.normal(size=shape)).astype(np.float32) if with_ratios else None
    ended = terminated | truncated
    decay = {"gamma": GAMMA, "gae_lambda": LAMBDA}
    together = gae_to_next(
        each, *(part[..., None] for part in (values[:-1], values[1:], terminated, ended)), alive,
        **decay, ratios=ratios,
    )  # fmt: skip
    for agent in range(num_agents):
        own = None if ratios is None else ratios[..., agent]
        alone = gae_to_next(
            each[..., agent],
            values[:-1],
            values[1:],
            terminated,
            ended,
            alive[..., agent],
            **decay,
            ratios=own,
        )
        for left, right in zip(together, alone, strict=True):
            np.testing.assert_array_equal(left[..., agent], right)


def test_gae_to_next_with_one_reward_for_all_heads():
    rewards, values = column(1, 2, 3)[..., None], np.ones((3, 1, 4), np.float32)
    flags = [flag[..., None] for flag in (NEVER, NEVER, ALWAYS)]
    advantages, targets = gae_to_next(rewards, values, values, *flags, gamma=GAMMA, gae_lambda=LAMBDA)
    assert advantages.shape == targets.shape == (3, 1, 4)
    np.testing.assert_array_equal(advantages, np.broadcast_to(advantages[..., :1], advantages.shape))


@pytest.mark.parametrize("seed", range(5))
def test_gae_to_next_does_not_look_at_what_does_not_count(seed):
    (rewards, values, terminated, truncated, valid), ratios = random_segment(seed)
    decay = {"gamma": GAMMA, "gae_lambda": LAMBDA}
    arrays = (rewards, values[:-1], values[1:])
    spoilt = [np.where(valid, array, np.nan) for array in arrays]
    spoilt[2] = np.where(terminated, np.nan, spoilt[2])
    flags = (terminated, terminated | truncated, valid)
    for extra in ({}, {"ratios": ratios}):
        bad = {name: np.where(valid, array, np.nan) for name, array in extra.items()}
        for left, right in zip(
            gae_to_next(*arrays, *flags, **decay, **extra),
            gae_to_next(*spoilt, *flags, **decay, **bad),
            strict=True,
        ):
            np.testing.assert_array_equal(left, right)
            assert not left[~valid].any()
