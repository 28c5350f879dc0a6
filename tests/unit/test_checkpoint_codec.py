import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offbeat.checkpoint import digest, pack, unpack
from offbeat.checkpoint.files import read_arrays, write_arrays
from offbeat.errors import CheckpointError

DTYPES = ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
scalars = arrays.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0])
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**62, max_value=2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(),
    st.binary(),
    arrays,
    scalars,
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text() | st.integers(), inner, max_size=4),
        st.dictionaries(st.text() | st.integers(), inner, max_size=4).map(OrderedDict),
        st.dictionaries(st.text() | st.integers(), inner, max_size=4).map(Counter),
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Equal with the same types everywhere, floats and arrays by their bits."""
    if type(a) is not type(b):
        return False
    match a:
        case dict():  # and its subclasses, which are of one type here
            return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case float() if type(a) is float:
            return struct.pack("<d", a) == struct.pack("<d", b)
        case np.ndarray() | np.generic():
            return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


def through_disk(tree: object, path: Path) -> object:
    skeleton, packed = pack(tree)
    write_arrays(path / "x.safetensors", packed)
    text = json.dumps(skeleton, allow_nan=False)
    return unpack(json.loads(text), read_arrays(path / "x.safetensors"))


@given(tree=trees)
@settings(max_examples=100, deadline=None)
def test_every_tree_comes_back_bit_for_bit(tree: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert same(through_disk(tree, tmp_path_factory.getbasetemp()), tree)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_plain_dtype_in_every_layout(dtype: str, tmp_path: Path) -> None:
    base = np.arange(24).astype(dtype).reshape(4, 6)
    tree = {
        "fortran": np.asfortranarray(base),
        "transposed": base.T,
        "strided": base[::2, ::-3],
        "broadcast": np.broadcast_to(base[0], (3, 6)),
        "zero-d": np.array(1, dtype),
        "empty": np.zeros((0, 3), dtype),
        "scalar": base[1, 1],
    }
    assert same(through_disk(tree, tmp_path), tree)


def test_foreign_byte_order_keeps_its_values(tmp_path: Path) -> None:
    back = through_disk(np.array([1.5, -2.0], ">f4"), tmp_path)
    assert back.tolist() == [1.5, -2.0]
    assert back.dtype == np.dtype("float32")


def test_numbers_that_json_would_spoil(tmp_path: Path) -> None:
    odd_nan = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]
    tree = [10**6000, -(2**63), 2**63 - 1, odd_nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, True, 1, 1.0]
    assert same(through_disk(tree, tmp_path), tree)


def test_loaded_arrays_can_be_written_to(tmp_path: Path) -> None:
    back = through_disk([np.zeros(3)], tmp_path)
    back[0] += 1
    assert back[0].tolist() == [1, 1, 1]


def test_numpy_random_state_comes_back(tmp_path: Path) -> None:
    source = np.random.default_rng(3)
    source.random(7)
    copy = np.random.default_rng(0)
    copy.bit_generator.state = through_disk(source.bit_generator.state, tmp_path)
    assert copy.random(5).tolist() == source.random(5).tolist()


Pair = namedtuple("Pair", "a b")


class Knot(list):
    pass


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": [1, {2: {3}}]}, "learner['a'][1][2]"),
        ({"opt": (0, object())}, "learner['opt'][1]"),
        ({"p": Pair(1, 2)}, "learner['p']"),
        ({"o": defaultdict(int)}, "learner['o']"),
        ({"k": Knot()}, "learner['k']"),
        ({"c": np.zeros(2, "complex128")}, "learner['c']"),
        ({"u": np.array(["x"])}, "learner['u']"),
        ({"s": np.str_("x")}, "learner['s']"),
        ({"x": np.array([object()])}, "learner['x']"),
        ({"m": np.ma.zeros(2)}, "learner['m']"),
        ({"d": {1.5: 0}}, "learner['d']"),
        ({"d": {True: 0}}, "learner['d']"),
        ({"d": {np.int64(1): 0}}, "learner['d']"),
        (1j, "learner"),
    ],
)
def test_what_cannot_be_held_is_named_by_its_place(tree: object, place: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        pack(tree, root="learner")
    assert str(caught.value).startswith(f"{place} ")


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="contains itself"):
        pack(tree)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"array": "a7"},
        {"pickle": "x"},
        {},
        {"int": "zz"},
        {"int": 5},
        {"dict": [1]},
        {"float": "00"},
        {"tuple": 3},
    ],
)
def test_a_strange_skeleton_is_a_checkpoint_error(skeleton: object) -> None:
    with pytest.raises(CheckpointError, match="use another checkpoint"):
        unpack(skeleton, {"a0": np.zeros(1)})


def test_digest_sees_names_dtypes_shapes_and_bytes_and_nothing_else() -> None:
    base = {"a": np.arange(6, dtype=np.float32), "b": np.zeros((2, 2))}
    reordered = {"b": np.zeros((2, 2), order="F"), "a": np.arange(6, dtype=">f4")}
    assert digest(base) == digest(reordered)
    others = [
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"].astype(np.float64), "b": base["b"]},
        {"a": base["a"].reshape(2, 3), "b": base["b"]},
        {"a": np.nextafter(base["a"], np.float32(9)), "b": base["b"]},
        {"a": base["a"]},
        {"a": base["a"], "b": -base["b"]},
    ]
    assert len({digest(weights) for weights in [base, *others]}) == len(others) + 1
