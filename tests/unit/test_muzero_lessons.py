"""What a model is trained on: targets by hand, at ends of episodes above all."""

import numpy as np
import pytest

from offbeat.algorithms.muzero.config import MuZeroConfig
from offbeat.algorithms.muzero.lessons import first_in_context, make_lesson, td_steps
from offbeat.replay.streams import Places, Windows

H, N = 3, 2
"""Steps ahead, and rewards in a value target."""


def config(**changes):
    return MuZeroConfig(num_unroll=H, td_steps=N, discount=0.5, **changes)


def windows(terminated_at=None, truncated_at=None, versions=0):
    """One row of steps 0, 1, 2, ... with rewards 1, 2, 4, ... and values 100, 200, 300, ..."""
    width = H + 1 + N
    numbers = np.arange(width)
    ends = {name: numbers == at for name, at in (("terminated", terminated_at), ("truncated", truncated_at))}
    ended_before = np.zeros(width, np.bool_)
    ended_before[1:] = (ends["terminated"] | ends["truncated"])[:-1]
    items = {
        "obs": numbers[:, None].astype(np.float32),
        "actions": numbers,
        "rewards": 2.0**numbers,
        "policy": np.eye(width, 2, dtype=np.float32),
        "valid": ~ended_before,
        **ends,
    }
    rows = {name: array[None].astype(array.dtype) for name, array in items.items()}
    rows["rewards"] = rows["rewards"].astype(np.float32)
    place = Places(np.array([0]), np.array([0]))
    return Windows(rows, place, np.ones(1, np.float32), np.array([versions]), np.array([versions]))


def lesson(two_player=False, version=0, settings=None, **ends):
    values = 100 * np.arange(1, H + 2 + N, dtype=np.float32)[None]
    return make_lesson(windows(**ends), values, settings or config(), version=version, two_player=two_player)


def test_in_the_middle_of_an_episode():
    found = lesson()
    assert found.obs[0, :, 0].tolist() == [0, 1, 2, 3] and found.actions[0].tolist() == [0, 1, 2]
    assert found.rewards[0].tolist() == [1, 2, 4]
    assert found.values[0].tolist() == [1 + 1 + 75, 2 + 2 + 100, 4 + 4 + 125, 8 + 8 + 150]
    assert found.moved.all() and found.valued.all() and found.judged.all()


def test_after_a_terminated_episode_there_is_nothing_to_gain():
    found = lesson(terminated_at=1)
    assert found.values[0].tolist() == [1 + 1, 2, 0, 0]
    assert found.rewards[0].tolist() == [1, 2, 0]
    assert found.moved[0].tolist() == [True, True, False]
    assert found.valued.all() and found.paid.all()
    assert found.is_final[0].tolist() == [False, False, True, False]
    assert found.judged[0].tolist() == [True, True, False, False]


def test_after_a_truncated_episode_nothing_is_known():
    found = lesson(truncated_at=1)
    assert found.values[0, :2].tolist() == [1 + 1 + 75, 2 + 150]
    assert found.moved[0].tolist() == [True, True, False]
    assert found.valued[0].tolist() == [True, True, False, False]
    assert found.judged[0].tolist() == [True, True, False, False]


def test_the_other_players_gain_is_a_loss():
    assert lesson(two_player=True).values[0, 0] == 1 - 1 + 75
    assert lesson(two_player=True, terminated_at=1).values[0, :2].tolist() == [1 - 1, 2]


def test_older_steps_have_shorter_targets():
    settings = config(td_steps_min=1, td_age=10)
    assert td_steps(settings, np.array([0, 9, 10, 25])).tolist() == [2, 2, 1, 1]
    assert lesson(settings=settings, version=12).values[0, 0] == 1 + 100
    assert td_steps(config(), np.array([500])) == 2


@pytest.mark.parametrize(
    ("valid", "expected"), [([1, 1, 1], 0), ([0, 1, 1], 1), ([1, 0, 1], 2), ([0, 0, 1], 2), ([1, 1, 0], 0)]
)
def test_where_an_episode_begins(valid, expected):
    assert first_in_context(np.array([valid], np.bool_)).tolist() == [expected]


def test_only_the_first_end_counts():
    found = lesson(terminated_at=0, truncated_at=2)
    assert found.values[0].tolist() == [1, 0, 0, 0]
    assert found.valued.all() and found.paid.all()
    found = lesson(terminated_at=2, truncated_at=0)
    assert found.valued[0].tolist() == [True, False, False, False]
    assert found.paid[0].tolist() == [True, False, False]
    assert not found.is_final.any()
