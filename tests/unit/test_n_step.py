"""Value targets over n steps, by hand and against a plain loop."""

import numpy as np
import pytest

from offbeat.ops.n_step import n_step_targets, within_episode


def plain(rewards, values, terminated, truncated, start, num_steps, discount, two_player):
    total, scale = 0.0, 1.0
    factor = -discount if two_player else discount
    for step in range(start, start + num_steps):
        total += scale * rewards[step]
        scale *= factor
        if terminated[step]:
            return total
        if truncated[step]:
            break
    return total + scale * values[step + 1]


def test_a_target_by_hand():
    rewards = np.array([[1, 2, 4, 8]], np.float32)
    values = np.array([[0, 0, 100, 1000, 10_000]], np.float32)
    never = np.zeros((1, 4), np.bool_)
    found = n_step_targets(rewards, values, never, never, num_targets=3, num_steps=2, discount=0.5)
    assert found.tolist() == [[1 + 1 + 25, 2 + 2 + 250, 4 + 4 + 2500]]


@pytest.mark.parametrize("two_player", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_targets_are_those_of_a_plain_loop(two_player, mixed):
    rng = np.random.default_rng(0)
    num_rows, width, num_targets = 200, 9, 5
    rewards = rng.normal(size=(num_rows, width)).astype(np.float32)
    values = rng.normal(size=(num_rows, width + 1)).astype(np.float32)
    terminated = rng.random((num_rows, width)) < 0.1
    truncated = (rng.random((num_rows, width)) < 0.1) & ~terminated
    steps = rng.integers(1, 6, num_rows) if mixed else 5
    found = n_step_targets(
        rewards,
        values,
        terminated,
        truncated,
        num_targets=num_targets,
        num_steps=steps,
        discount=0.9,
        two_player=two_player,
    )
    for row in range(num_rows):
        for start in range(num_targets):
            n = int(steps[row]) if mixed else steps
            parts = (rewards[row], values[row], terminated[row], truncated[row])
            assert found[row, start] == pytest.approx(plain(*parts, start, n, 0.9, two_player), abs=1e-5)


def test_a_terminated_episode_has_no_value_after_its_end_and_a_truncated_one_has():
    rewards, values = np.ones((2, 3), np.float32), np.full((2, 4), 10, np.float32)
    ends = np.array([[False, True, False]])
    no = np.zeros_like(ends)
    found = n_step_targets(
        rewards,
        values,
        np.concatenate([ends, no]),
        np.concatenate([no, ends]),
        num_targets=1,
        num_steps=3,
        discount=1.0,
    )
    assert found.ravel().tolist() == [2.0, 12.0]


def test_too_few_rewards_are_refused():
    short = np.zeros((1, 3), np.float32)
    flags = short.astype(bool)
    with pytest.raises(ValueError, match="need 5 rewards a row, not 3"):
        n_step_targets(
            short, np.zeros((1, 4), np.float32), flags, flags, num_targets=3, num_steps=3, discount=1.0
        )


def test_which_steps_belong_to_the_first_episode():
    terminated = np.array([[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]], bool)
    truncated = np.array([[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    assert within_episode(terminated, truncated).tolist() == [
        [True, True, False, False],
        [True, True, True, False],
        [True, False, False, False],
    ]
