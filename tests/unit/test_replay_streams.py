"""Replay by transition: no step is lost, windows are whole, and late news hit nobody else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.checkpoint.codec import pack, unpack
from offbeat.errors import CheckpointError, ConfigError
from offbeat.replay.streams import Places, StreamReplay
from offbeat.types import ArraySpec

SPEC = {"number": ArraySpec((), "int64"), "stream": ArraySpec((2,), "float32")}


def make(num_streams=3, length=20, after=4, **options):
    return StreamReplay(SPEC, num_streams, length, after=after, **options)


def extend(replay, streams, num_steps, version=0, **options):
    """Append steps that know their stream and their number in it."""
    streams = np.asarray(streams)
    numbers = replay._written[streams] + np.arange(num_steps)[:, None]
    steps = {
        "number": numbers,
        "stream": np.broadcast_to(streams[:, None], (*numbers.shape, 2)).astype(np.float32),
    }
    replay.extend(streams, steps, version, **options)


def drawable(replay):
    """All steps that can be drawn, as (stream, number)."""
    if not len(replay):
        return set()
    drawn = replay.sample(np.random.default_rng(0), 40 * len(replay))
    return set(zip(drawn.places.stream.tolist(), drawn.places.number.tolist(), strict=True))


def test_a_step_can_be_drawn_once_its_window_is_whole():
    replay = make()
    extend(replay, [0, 2], 4)
    assert not len(replay)
    with pytest.raises(ValueError, match="windows take 5 steps, and no stream has as many"):
        replay.sample(np.random.default_rng(0), 4)
    extend(replay, [0], 3)
    assert drawable(replay) == {(0, 0), (0, 1), (0, 2)}
    extend(replay, [2, 1], 1)
    assert drawable(replay) == {(0, 0), (0, 1), (0, 2), (2, 0)}
    assert replay.num_stored == 13


def test_windows_hold_the_steps_around_across_segments_and_the_end_of_the_ring():
    replay = make()
    for count in (7, 1, 9, 6, 11):
        extend(replay, [0, 1, 2], count)
    drawn = replay.sample(np.random.default_rng(1), 500)
    offsets = np.arange(5)
    assert np.array_equal(drawn.items["number"], drawn.places.number[:, None] + offsets)
    assert np.all(drawn.items["stream"] == drawn.places.stream[:, None, None])
    assert drawable(replay) == {(stream, number) for stream in range(3) for number in range(14, 30)}


@given(
    parts=st.lists(st.tuples(st.sampled_from([(0,), (1,), (0, 1)]), st.integers(1, 6)), max_size=14),
    after=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_exactly_the_whole_windows_of_what_is_kept_can_be_drawn(parts, after):
    replay = make(num_streams=2, length=12, after=after)
    written = [0, 0]
    for streams, count in parts:
        extend(replay, streams, count)
        for stream in streams:
            written[stream] += count
    expected = {
        (stream, number)
        for stream in range(2)
        for number in range(written[stream])
        if number >= max(0, written[stream] - 12) and number + after < written[stream]
    }
    assert len(replay) == len(expected)
    assert drawable(replay) == expected
    assert replay.num_stored == sum(min(count, 12) for count in written)


def test_steps_that_are_not_eligible_are_part_of_windows_only():
    replay = make(num_streams=1, after=1)
    eligible = np.ones((6, 1), np.bool_)
    eligible[2] = False
    extend(replay, [0], 6, eligible=eligible)
    assert drawable(replay) == {(0, 0), (0, 1), (0, 3), (0, 4)}
    drawn = replay.sample(np.random.default_rng(0), 100)
    assert 2 in drawn.items["number"][:, 1]


def test_priorities_count_and_weights_undo_them():
    replay = make(num_streams=1, after=0, alpha=1.0, eps=1e-9)
    extend(replay, [0], 4)
    replay.set_priorities(Places(np.zeros(4, np.int64), np.arange(4)), [1.0, 2.0, 3.0, 4.0])
    drawn = replay.sample(np.random.default_rng(0), 10_000, beta=1.0)
    shares = np.bincount(drawn.places.number) / 10_000
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.01)
    assert drawn.weights[drawn.places.number == 0] == pytest.approx(1.0)
    assert drawn.weights[drawn.places.number == 3] == pytest.approx(0.25)
    assert np.all(replay.sample(np.random.default_rng(0), 50, beta=0.0).weights == 1)


def test_priorities_given_before_a_window_is_whole_count_once_it_is():
    replay = make(num_streams=1, after=2, alpha=1.0)
    extend(replay, [0], 4)
    assert replay._tree.leaves[:4] == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=1e-5)
    assert replay.set_priorities(Places(np.array([0, 0]), np.array([1, 2])), [3.0, 9.0]) == 2
    assert replay._tree.leaves[:4] == pytest.approx([1.0, 3.0, 0.0, 0.0], abs=1e-5)
    extend(replay, [0], 3)  # the new ones count as much as the largest so far
    assert replay._tree.leaves[:7] == pytest.approx([1.0, 3.0, 9.0, 1.0, 9.0, 0.0, 0.0], abs=1e-5)


def test_late_news_do_not_hit_a_step_that_took_the_place():
    replay = make(num_streams=1, length=8, after=1, alpha=1.0)
    extend(replay, [0], 6)
    old = Places(np.array([0, 0]), np.array([1, 5]))
    extend(replay, [0], 4, version=3)  # number 9 lies where number 1 was
    before = replay._tree.leaves.copy()
    assert replay.set_priorities(old, [50.0, 60.0]) == 1
    assert replay._tree.leaves[1] == before[1] and replay._tree.leaves[5] == pytest.approx(60.0)
    assert replay.refresh(old, {"number": np.array([-1, -5])}, version=4) == 1
    window = replay.windows(Places(np.array([0]), np.array([9])), 0, 0)
    assert window["number"][0, 0] == 9


def test_what_was_refreshed_later_stays():
    replay = make(num_streams=1, after=0)
    extend(replay, [0], 3, version=1)
    places = Places(np.array([0, 0]), np.array([0, 1]))
    assert replay.refresh(places, {"number": np.array([10, 11])}, version=5) == 2
    assert replay.refresh(places, {"number": np.array([20, 21])}, version=4) == 0
    drawn = replay.sample(np.random.default_rng(0), 30)
    by_number = dict(zip(drawn.places.number.tolist(), drawn.refreshed.tolist(), strict=True))
    assert by_number == {0: 5, 1: 5, 2: 1}
    assert set(drawn.versions.tolist()) == {1}
    assert set(drawn.items["number"].ravel().tolist()) == {10, 11, 2}


@pytest.mark.parametrize("more", [3, 30])
def test_a_saved_replay_goes_on_as_it_would_have(more):
    replay, other = make(alpha=0.6), make(alpha=0.6)
    extend(replay, [0, 1], 9, version=2)
    extend(replay, [1, 2], 13, version=3)
    drawn = replay.sample(np.random.default_rng(2), 16)
    replay.set_priorities(drawn.places, np.linspace(0, 3, 16))
    other.load_state_dict(unpack(*pack(replay.state_dict())))
    for _ in range(more):
        for one in (replay, other):
            extend(one, [0, 2], 3, version=4)
    samples = [one.sample(np.random.default_rng(5), 64, beta=0.5) for one in (replay, other)]
    for name in ("weights", "versions", "refreshed"):
        assert np.array_equal(getattr(samples[0], name), getattr(samples[1], name))
    assert np.array_equal(samples[0].items["number"], samples[1].items["number"])
    assert len(replay) == len(other)


def test_a_replay_of_another_size_is_refused():
    state = make().state_dict()
    with pytest.raises(CheckpointError, match="saved with length 20 and now has 30"):
        make(length=30).load_state_dict(state)
    with pytest.raises(CheckpointError, match="saved with a capacity of 20 and now has 30"):
        make(length=30).load_state_dict(state, {"length": "a capacity of"})


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="cannot hold a window of 5"):
        make(length=4)
    replay = make()
    with pytest.raises(ValueError, match="do not fit into streams of 20"):
        extend(replay, [0], 17)
    with pytest.raises(ValueError, match="streams must differ"):
        extend(replay, [0, 0], 2)
    with pytest.raises(ValueError, match="finite"):
        replay.set_priorities(Places(np.array([0]), np.array([0])), [np.nan])


def test_memory_is_known_beforehand():
    replay = make(num_streams=5, length=100)
    held = sum(ring.nbytes for ring in replay._rings.values())
    held += replay._versions.nbytes + replay._refreshed.nbytes + replay._eligible.nbytes
    held += replay._begins.nbytes + replay._leaves.nbytes + replay._written.nbytes
    tree = replay._tree
    held += tree.leaves.nbytes + tree.inner.nbytes
    assert held <= StreamReplay.num_bytes(SPEC, 5, 100) <= 1.05 * held + 1000


def test_no_window_holds_what_came_before_and_after_a_break():
    replay, other = make(num_streams=2, after=2), make(num_streams=2, after=2)
    extend(replay, [0, 1], 6)
    extend(replay, [0, 1], 5, begins=np.array([True, False]))
    assert {number for stream, number in drawable(replay) if stream == 0} == {0, 1, 2, 3, 6, 7, 8}
    assert {number for stream, number in drawable(replay) if stream == 1} == set(range(9))
    other.load_state_dict(replay.state_dict())
    assert drawable(other) == drawable(replay)
    # Searched anew may be what came before the break, too; with two steps before it, not those just after.
    for before, expected in ((0, {0, 1, 2, 3, 6, 7, 8, 9, 10}), (2, {2, 3, 8, 9, 10})):
        for one in (replay, other):
            places = one.draw_oldest(np.random.default_rng(0), 500, 1.0, before=before)
            assert places is not None
            assert set(places.number[places.stream == 0].tolist()) == expected


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_oldest_steps_are_drawn_evenly(share):
    replay = make(num_streams=3, length=20, after=3)
    assert replay.draw_oldest(np.random.default_rng(0), 5, share, before=2) is None
    extend(replay, [0], 12)
    extend(replay, [2], 10)
    extend(replay, [2], 14)
    places = replay.draw_oldest(np.random.default_rng(0), 4000, share, before=2)
    assert places is not None
    counts = {stream: np.bincount(places.number[places.stream == stream]) for stream in (0, 2)}
    # Of stream 0 the steps 2 to 11 have two before them, of stream 2 the steps 6 to 23.
    last = {0: 2 + round(10 * share), 2: 6 + round(18 * share)}
    for stream, first in ((0, 2), (2, 6)):
        found = np.flatnonzero(counts[stream])
        assert found.tolist() == list(range(first, last[stream]))
    expected = 4000 / (14 if share == 0.5 else 28)
    assert all(abs(count - expected) < 6 * expected**0.5 for count in counts[0][2 : last[0]])
    windows = replay.windows(places, 2, 0)
    assert np.array_equal(windows["number"][:, -1], places.number)


def test_steps_that_may_not_be_drawn_are_not_among_the_oldest_either():
    replay = make(num_streams=1, length=20, after=3)
    eligible = np.arange(12)[:, None] % 3 > 0
    extend(replay, [0], 12, eligible=eligible)
    places = replay.draw_oldest(np.random.default_rng(0), 500, 1.0)
    assert set(places.number) == set(np.flatnonzero(eligible[:, 0]))
