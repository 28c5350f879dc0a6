"""What discriminators train on: the newest samples, also after another capacity was set."""

import numpy as np
import pytest

from offbeat.algorithms.hmasd.store import Lessons


def samples(first, count):
    numbers = np.arange(first, first + count)
    return {"state": numbers, "skills": 10 * numbers}


def kept(lessons):
    found = lessons.pick(np.arange(len(lessons)))
    assert np.array_equal(found["skills"], 10 * found["state"])
    return found["state"].tolist()


def test_the_newest_are_kept():
    lessons = Lessons(5)
    for first, count in ((0, 3), (3, 4), (7, 1), (8, 12)):
        lessons.add(samples(first, count))
        newest = range(max(0, first + count - 5), first + count)
        assert sorted(kept(lessons)) == list(newest)


def test_all_are_kept_without_a_capacity():
    lessons = Lessons(None)
    for first in (0, 4, 8):
        lessons.add(samples(first, 4))
    assert kept(lessons) == list(range(12))


@pytest.mark.parametrize("capacity", [3, 5, 8])
def test_a_saved_state_goes_on_with_whatever_capacity(capacity):
    lessons, other = Lessons(5), Lessons(capacity)
    lessons.add(samples(0, 5))
    lessons.add(samples(5, 2))
    other.load_state_dict(lessons.state_dict())
    if capacity == 5:
        assert kept(other) == kept(lessons), "in the same places, so that the same ones are drawn"
    for first in (7, 8, 9, 10):
        other.add(samples(first, 1))
    assert sorted(kept(other)) == list(range(max(2, 11 - capacity), 11))
