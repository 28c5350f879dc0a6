"""The sum tree against plain sums, with and without numba."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.ops.compiled import uses_numba
from offbeat.replay import SumTree

BACKENDS = ("numba", "numpy")
QUICK = settings(max_examples=60, deadline=None)


def make_tree(capacity, backend="numba"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBEAT_NUMBA", "1" if backend == "numba" else "0")
        if backend == "numba" and not uses_numba():
            pytest.skip("numba is not installed")
        return SumTree(capacity)


def fresh(tree):
    """A tree made at once from the leaves of another."""
    made = make_tree(tree.capacity, "numpy")
    made.set_range(0, tree.state)
    return made


def write(tree, model, seed, num_writes, priorities):
    """Random writes of both kinds to a tree and to a plain array."""
    rng = np.random.default_rng(seed)
    for _ in range(num_writes):
        if rng.random() < 0.5:
            index = rng.integers(0, tree.capacity, rng.integers(0, 40))
            values = priorities(rng, index.size)
            tree.set(index, values)
            for i, value in zip(index, values, strict=True):
                model[i] = value
        else:
            start = int(rng.integers(0, tree.capacity))
            values = priorities(rng, int(rng.integers(0, tree.capacity - start + 1)))
            tree.set_range(start, values)
            model[start : start + len(values)] = values


def small_integers(rng, count):
    return rng.integers(0, 8, count) * rng.integers(0, 2, count)


def any_size(rng, count):
    return (10.0 ** rng.uniform(-30, 30, count) * rng.integers(0, 2, count)).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@QUICK
@given(capacity=st.integers(1, 5000), seed=st.integers(0, 2**32))
@example(capacity=16, seed=0)
@example(capacity=17, seed=0)
@example(capacity=256, seed=0)
@example(capacity=257, seed=0)
def test_equals_plain_sums(backend, capacity, seed):
    """Sums of small integers are exact, so every answer has to be that of a plain running sum."""
    tree, model = make_tree(capacity, backend), np.zeros(capacity)
    write(tree, model, seed, 6, small_integers)
    np.testing.assert_array_equal(tree.state, model)
    assert tree.total == model.sum()
    if not model.sum():
        return
    ends = np.cumsum(model)
    masses = np.unique(np.concatenate([[0.0], ends[:-1], np.linspace(0, ends[-1], 200), ends - 0.5]))
    masses = masses[(masses >= 0) & (masses < ends[-1])]
    np.testing.assert_array_equal(tree.find(masses), np.searchsorted(ends, masses, side="right"))
    assert tree.find([ends[-1]]).tolist() == [int(np.flatnonzero(model)[-1])]


@QUICK
@given(capacity=st.integers(1, 5000), seed=st.integers(0, 2**32))
def test_numpy_and_numba_agree_in_every_bit(capacity, seed):
    trees = [make_tree(capacity, backend) for backend in BACKENDS]
    for tree in trees:
        write(tree, np.zeros(capacity), seed, 6, any_size)
    compiled, plain = trees
    np.testing.assert_array_equal(compiled.leaves, plain.leaves)
    np.testing.assert_array_equal(compiled.inner, plain.inner)
    if compiled.total > 0:
        masses = np.random.default_rng(seed).random(300) * compiled.total
        np.testing.assert_array_equal(compiled.find(masses), plain.find(masses))


@pytest.mark.parametrize("backend", BACKENDS)
@QUICK
@given(capacity=st.integers(1, 3000), seed=st.integers(0, 2**32), share=st.floats(0.0, 0.95))
def test_leaf_of_priority_zero_is_never_found(backend, capacity, seed, share):
    """Also at the edges and where rounding pushes a mass beyond the children of its node."""
    rng = np.random.default_rng(seed)
    leaves = (10.0 ** rng.uniform(-6, 6, capacity)).astype(np.float32)
    leaves[rng.random(capacity) < share] = 0
    leaves[rng.integers(capacity)] = 0.1
    tree = make_tree(capacity, backend)
    tree.set_range(0, leaves)
    ends = np.minimum(np.cumsum(leaves, dtype=np.float64), tree.total)
    below = np.nextafter(tree.total, 0)
    masses = np.concatenate([[0.0, below, tree.total], ends, np.nextafter(ends, 0)])
    found = tree.find(masses)
    assert np.all(tree.get(found) > 0)
    starts = np.concatenate([[0.0], ends[:-1]])
    slack = 1e-12 * tree.total
    assert np.all((masses >= starts[found] - slack) & (masses <= ends[found] + slack))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_beyond_the_children_of_a_node_stays_within_them(backend):
    """The sum by halves exceeds the running sum here: 1 + 15 halves of an ulp, against 1."""
    tree = make_tree(64, backend)
    leaves = np.zeros(64, np.float32)
    leaves[:16] = [2.0**30, *[2.0**-23] * 15]
    leaves[5] = 0
    tree.set_range(0, leaves)
    assert tree.total > 2.0**30
    assert tree.get(tree.find([tree.total]))[0] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_do_not_drift(backend):
    """After a million updates every sum is that of a tree made at once."""
    rng, tree = np.random.default_rng(5), make_tree(10_000, backend)
    for _ in range(1000):
        tree.set(rng.integers(0, 10_000, 1000), 10.0 ** rng.uniform(-6, 6, 1000))
    np.testing.assert_array_equal(tree.inner, fresh(tree).inner)
    assert tree.total == pytest.approx(float(tree.state.sum(dtype=np.longdouble)), rel=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_have_the_resolution_of_float64(backend):
    """Where the total exceeds 2^24, float32 cannot tell neighbours of priority 1 apart."""
    tree = make_tree(4096, backend)
    tree.set_range(0, [2.0**30, *[1.0] * 4095])
    masses = 2.0**30 + np.arange(4095) + 0.5
    np.testing.assert_array_equal(tree.find(masses), np.arange(1, 4096))


@pytest.mark.parametrize("backend", BACKENDS)
def test_last_of_equal_indices_counts(backend):
    tree = make_tree(100, backend)
    tree.set([7, 50, 7, 50, 7], [1, 2, 3, 4, 5])
    assert tree.get([7, 50]).tolist() == [5, 4]
    assert tree.total == 9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf"), 1e39, -1e-9])
def test_bad_priorities_are_refused_and_change_nothing(backend, bad):
    tree = make_tree(40, backend)
    tree.set_range(0, np.ones(40))
    with pytest.raises(ValueError, match="finite"):
        tree.set([1, 2], [5.0, bad])
    with pytest.raises(ValueError, match="finite"):
        tree.set_range(0, [5.0, bad])
    assert tree.total == 40 and np.all(tree.state == 1)


@pytest.mark.parametrize("index", [[-1], [40], [0, 45]])
def test_indices_out_of_range_are_refused(index):
    tree = make_tree(40)
    for call in (lambda: tree.set(index, np.ones(len(index))), lambda: tree.get(index)):
        with pytest.raises(IndexError, match="39"):
            call()
    with pytest.raises(IndexError, match="capacity 40"):
        tree.set_range(38, [1, 1, 1])


def test_impossible_calls_say_what_to_do():
    with pytest.raises(ValueError, match="1 or more"):
        SumTree(0)
    tree = make_tree(10)
    with pytest.raises(ValueError, match="set some first"):
        tree.find([0.0])
    tree.set([3], [2.0])
    for mass in (-0.1, 2.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and the total 2"):
            tree.find([mass])
    with pytest.raises(ValueError, match="one for each"):
        tree.set([1, 2], [1.0])


def test_memory_is_told_beforehand():
    tree = SumTree(100_000)
    assert tree.leaves.nbytes + tree.inner.nbytes <= SumTree.num_bytes(100_000) < 1.2 * 400_000


def test_import_does_not_load_numba():
    code = "import sys, offbeat.replay; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_loops_compile_where_nothing_can_be_cached(monkeypatch):
    pytest.importorskip("numba")
    from offbeat.ops import jit
    from offbeat.replay import kernels

    asked = []

    def njit(nogil, cache=False):
        asked.append((nogil, cache))
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(jit.numba, "njit", njit)
    assert kernels._compiled(len) is len
    assert asked == [(True, True), (True, False)]
