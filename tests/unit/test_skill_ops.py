"""Skill periods, their advantages, and what skills add to rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offbeat.ops.skills import Periods, Reason, find_periods, mixed_rewards, period_advantages


def arrays(num_steps, num_envs, selected, ends):
    chosen = np.zeros((num_steps, num_envs), np.bool_)
    reason = np.zeros((num_steps, num_envs), np.int8)
    for at in selected:
        chosen[at] = True
    for at, why in ends.items():
        reason[at] = why
    return chosen, reason


def test_periods_are_found_in_order_with_their_rewards():
    selected, reason = arrays(
        6,
        2,
        [(0, 0), (3, 0), (0, 1), (2, 1)],
        {(2, 0): Reason.PERIOD_END, (5, 0): Reason.FORCED, (1, 1): Reason.TERMINATED},
    )
    rewards = np.arange(12, dtype=np.float32).reshape(6, 2)
    found = find_periods(selected, reason, rewards)
    assert found.env.tolist() == [0, 0, 1]
    assert found.first.tolist() == [0, 3, 0]
    assert found.last.tolist() == [2, 5, 1]
    assert found.reason.tolist() == [Reason.PERIOD_END, Reason.FORCED, Reason.TERMINATED]
    assert found.rewards.tolist() == [0 + 2 + 4, 6 + 8 + 10, 1 + 3]
    assert not found.is_carried.any()


def test_a_period_that_began_before_the_round_is_carried():
    selected, reason = arrays(4, 1, [(2, 0)], {(1, 0): Reason.PERIOD_END, (3, 0): Reason.PERIOD_END})
    found = find_periods(selected, reason, np.ones((4, 1), np.float32))
    assert found.first.tolist() == [-1, 2]
    assert found.is_carried.tolist() == [True, False]
    assert found.rewards.tolist() == [2, 2]


def test_a_period_that_goes_on_is_not_there_yet():
    selected, reason = arrays(4, 1, [(0, 0)], {})
    assert len(find_periods(selected, reason, np.ones((4, 1), np.float32))) == 0


def plain_advantages(periods, rewards, values, next_values, gamma, lam):
    """Word for word: backwards over the periods, each with its own environment's next one."""
    advantages = np.zeros_like(values)
    for m in reversed(range(len(rewards))):
        future = 0.0 if periods.reason[m] == Reason.TERMINATED else next_values[m]
        advantages[m] = rewards[m] + gamma * future - values[m]
        follows = m + 1 < len(rewards) and periods.env[m + 1] == periods.env[m]
        if follows and periods.reason[m] == Reason.PERIOD_END:
            advantages[m] += gamma * lam * advantages[m + 1]
    return advantages


@pytest.mark.parametrize("seed", range(5))
def test_advantages_follow_each_environment_by_itself(seed):
    rng = np.random.default_rng(seed)
    env = np.sort(rng.integers(0, 4, 20))
    reason = rng.integers(1, 5, 20)
    rewards = rng.normal(size=20).astype(np.float32)
    values, next_values = rng.normal(size=(2, 20, 3)).astype(np.float32)
    periods = Periods(env, np.zeros(20, np.int64), np.arange(20), reason, rewards)
    found, targets = period_advantages(periods, rewards, values, next_values, gamma=0.9, gae_lambda=0.8)
    expected = plain_advantages(periods, rewards, values, next_values, 0.9, 0.8)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(targets, expected + values, atol=1e-5)


def test_no_periods_give_no_advantages():
    nothing = np.zeros(0, np.int64)
    periods = Periods(nothing, nothing, nothing, nothing, np.zeros(0, np.float32))
    values = np.zeros((0, 3), np.float32)
    found, targets = period_advantages(periods, periods.rewards, values, values, gamma=0.9, gae_lambda=0.8)
    assert found.shape == targets.shape == (0, 3)


def test_mixed_rewards_are_equation_4():
    rewards, team = np.array([1.0, 0.0], np.float32), np.array([-0.5, -1.0], np.float32)
    skill = np.array([[-0.1, -0.2], [-0.3, -0.4]], np.float32)
    settings = {
        "extrinsic_coef": 2.0,
        "team_coef": 0.5,
        "skill_coef": 3.0,
        "num_team_skills": 2,
        "num_skills": 4,
    }
    mixed = mixed_rewards(rewards, team, skill, **settings, with_baseline=False)
    expected = 2 * rewards[:, None] + 0.5 * team[:, None] + 3 * skill
    np.testing.assert_allclose(mixed, expected, rtol=1e-6)
    shifted = mixed_rewards(rewards, team, skill, **settings, with_baseline=True)
    np.testing.assert_allclose(shifted - mixed, 0.5 * math.log(2) + 3 * math.log(4), rtol=1e-5)


def test_a_discriminator_that_knows_nothing_rewards_nothing_with_the_baseline():
    even = np.full(3, -math.log(2), np.float32), np.full((3, 2), -math.log(4), np.float32)
    mixed = mixed_rewards(
        np.zeros(3, np.float32),
        *even,
        extrinsic_coef=1.0,
        team_coef=1.0,
        skill_coef=1.0,
        num_team_skills=2,
        num_skills=4,
        with_baseline=True,
    )
    np.testing.assert_allclose(mixed, 0, atol=1e-6)
