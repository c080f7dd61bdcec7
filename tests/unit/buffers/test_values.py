"""Values → bytes → values, without torch."""

from __future__ import annotations

import enum
import math
import pickle
from array import array
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from alike import same
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from travel import into

from aiodist.buffers import arrays, tensors
from aiodist.buffers.dtypes import MAX_NDIM
from aiodist.buffers.encoding import encode
from aiodist.buffers.reductions import Operand, split_slots
from aiodist.buffers.values import describe, fill, parse
from aiodist.errors import MessageTooLargeError, ProtocolError
from aiodist.types import ReduceOp


def send(value: Any, out: Any = None, **options: Any) -> Any:
    """Over the wire, as the engine does it."""
    encoded = encode(value, **options)
    data = b"".join(encoded.buffers)
    assert len(data) == encoded.nbytes == sum(spec.nbytes for spec in encoded.specs)
    incoming = parse(memoryview(encoded.meta), max_bytes=max(len(encoded.meta), len(data)))
    assert incoming.nbytes == len(data)
    incoming.allocate(out)
    fill(incoming.buffers, data)
    return incoming.finish()


DTYPES = [
    *"?bhilqBHILQefdgFDG",
    *(">h", ">f", ">D", ">U3", "S5", "U2", "M8[ns]", ">M8[25s]", "m8", "m8[D]", "longlong"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_every_dtype_round_trips(dtype: str, shape: tuple[int, ...]) -> None:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    kind = np.dtype(dtype).kind
    if kind in "SU":
        array = np.full(shape, "ab", dtype)
    else:
        array = np.arange(1, size + 1, dtype="u1").view(dtype).reshape(shape)
        if kind in "fcgG?b":
            array = np.ones(shape, dtype)
    got = send(array)
    assert got.dtype == array.dtype.newbyteorder("=")
    assert got.dtype.isnative
    assert got.dtype.byteorder in "=|"  # numpy has a "<" beside them, which others do not take
    if kind not in "SUmM":
        assert memoryview(got).format == memoryview(np.empty(0, got.dtype.type)).format
    assert got.shape == array.shape
    assert np.array_equal(got, array)
    assert not np.shares_memory(got, array)


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(6.0).reshape(2, 3)
    (view,) = encode(array).buffers
    array[1, 2] = 7.0
    assert np.frombuffer(view, float)[5] == 7.0


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4).T,
        np.arange(12).reshape(3, 4)[::-1, ::2],
        np.broadcast_to(np.arange(3.0), (4, 3)),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
    ],
)
def test_other_strides_are_copied(array: Any) -> None:
    got = send(array)
    assert np.array_equal(got, array)
    assert got.flags.c_contiguous


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**64), 2**65),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=[])),
    st.binary(),
    st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True), np.datetime64("NaT", "s")]),
    hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=3)),
)
keys = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def native(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(native, tree))
    if isinstance(tree, dict):
        return {key: native(item) for key, item in tree.items()}
    if isinstance(tree, np.ndarray):
        return np.ascontiguousarray(tree, tree.dtype.newbyteorder("=")).reshape(tree.shape)
    return tree


@given(trees)
def test_any_tree_round_trips(tree: Any) -> None:
    expected = native(tree)
    assert same(send(tree), expected)
    assert same(into(tree, None), expected)


class Color(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


Point = namedtuple("Point", "x y")


def test_subclasses_become_their_base() -> None:
    value = OrderedDict(
        color=Color.RED,
        level=Level.HIGH,
        text=np.str_("t"),
        data=np.bytes_(b"b"),
        number=type("F", (float,), {})(2.5),
        items=type("L", (list,), {})([1]),
    )
    expected = {
        "color": "red",
        "level": 3,
        "text": "t",
        "data": b"b",
        "number": 2.5,
        "items": [1],
    }
    assert same(send(value), expected)
    assert same(send({Color.RED: 1, (Level.HIGH, 2.0): 2}), {"red": 1, (3, 2.0): 2})
    assert type(send(np.float64(2.5))) is np.float64


def test_named_tuples_arrive_as_they_are_where_they_may() -> None:
    got = into([Point(1, np.ones(2))], None, allow_pickle=True)[0]
    assert type(got) is Point
    assert got.y.tolist() == [1, 1]


@pytest.mark.parametrize("make", [bytearray, memoryview, lambda data: array("B", data)])
def test_buffers_are_arrays_of_their_own_memory(make: Any) -> None:
    buffer = make(bytearray(b"abc"))
    assert same(send(buffer), np.frombuffer(b"abc", np.uint8))
    assert send(b"xyz") == b"xyz"
    found = arrays.writable(buffer, "x")
    found.base[:] = 7
    assert bytes(buffer) == b"\7\7\7"
    assert send(np.zeros(3, np.uint8), buffer) is buffer
    assert bytes(buffer) == bytes(3)


def test_buffers_that_are_none() -> None:
    with pytest.raises(ValueError, match="x: uint8\\[1\\] is read-only"):
        arrays.writable(memoryview(b"a"), "x")
    released = memoryview(b"a")
    released.release()
    with pytest.raises(TypeError, match="x: numpy cannot read this memoryview"):
        arrays.view(released, "x")


def test_arrays_are_seen_as_they_lie_or_not_at_all() -> None:
    x = np.arange(6, dtype="f4").reshape(2, 3)
    for flat in (arrays.plain(x), arrays.flat(x, x.dtype, 6)):
        assert flat is not None
        assert flat.shape == (6,)
        assert np.shares_memory(flat, x)
    window = arrays.window(x, 24)
    assert window is not None
    assert np.shares_memory(np.frombuffer(window, np.uint8), x)
    assert window.tobytes() == x.tobytes()
    for odd in (x[:0], np.array(["2026-11-23"], "M8[D]")):  # buffers of Python know no such
        window = arrays.window(odd, odd.nbytes)
        assert window is not None and window.tobytes() == odd.tobytes()
    frozen = x.copy()
    frozen.flags.writeable = False
    for other in (x.T, frozen):
        assert arrays.plain(other) is None
        assert arrays.flat(other, other.dtype, 6) is None
        assert arrays.window(other, 24) is None
    assert arrays.plain([1.0]) is None


class Signal(np.ndarray[Any, Any]):
    """An array with a mind of its own."""

    def reshape(self, *shape: Any, **options: Any) -> Any:
        raise AssertionError("only the memory counts")

    def __array_finalize__(self, other: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("make", [np.matrix, lambda x: np.asarray(x).view(Signal)])
def test_subclasses_of_arrays_are_arrays(make: Any, strided: bool) -> None:
    """np.matrix is never flat, and what is sent of an array has to be."""

    def made(rows: Any) -> Any:
        array = make(np.array(rows, "f4"))
        return array.T if strided else array

    x = made([[1, 2, 3], [4, 5, 6]])
    expected = np.asarray(x).copy()
    assert same(send(x), expected)
    assert same(send([x])[0], expected)
    out = made(np.zeros((2, 3)))
    assert send(x, out) is out
    assert np.array_equal(np.asarray(out), expected)
    operand = Operand.of(x, ReduceOp.SUM, in_place=True)
    (group,) = operand.groups
    assert group.out.length == 6
    group.out.arrays[0][:] *= 2
    assert operand.finish() is x
    assert np.array_equal(np.asarray(x), 2 * expected)
    assert [type(slot) for slot in split_slots(x, 2)] == [np.ndarray, np.ndarray]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, 2, 3, {4}]}, r"value\['a'\]\[3\]: a value of type set does not travel"),
        ((Point(1, 2),), r"value\[0\]: a Point, a named tuple, does not travel"),
        ([memoryview(np.array([None]))], "dtype object does not travel"),
        (object(), "value: a value of type object does not travel"),
        ([np.array([object()])], r"value\[0\]: a numpy array of dtype object does not travel"),
        (
            np.zeros(2, "f4,i4"),
            r"does not travel.* Send {name: x\[name\] for name in x.dtype.names}$",
        ),
        (np.zeros(2, "V3"), "does not travel"),
        (np.zeros(2, "S0").view("V1"), "does not travel"),
        (np.ma.masked_array([1, 2], [True, False]), "a masked array does not travel"),
        ([np.ma.masked], r"value\[0\]: a masked array does not travel: send data and mask apart"),
        ({"k": {frozenset(): 1}}, r"value\['k'\]: a key of type frozenset does not travel"),
        ({(1, frozenset()): 1}, "a key of type frozenset does not travel"),
    ],
)
def test_what_does_not_travel_is_named(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        encode(value)


def test_depth_is_limited_and_cycles_end() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    assert same(send(deep), deep)
    with pytest.raises(ValueError, match="over 100 levels"):
        encode((deep,))
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(ValueError, match="contain itself"):
        encode(loop)
    key: Any = 1
    for _ in range(101):
        key = (key,)
    with pytest.raises(ValueError, match="keys of a dict are nested"):
        encode({key: 1})


def test_anything_else_is_pickled_only_if_both_sides_allow_it() -> None:
    encoded = encode([{1, 2}, 3], allow_pickle=True)
    refused = parse(encoded.meta, max_bytes=1000)
    assert refused.describe() == "list[2]"
    with pytest.raises(TypeError, match=r"value\[0\] came pickled: .*allow_pickle=True"):
        refused.allocate()
    assert into([{1, 2}, 3], None, allow_pickle=True) == [{1, 2}, 3]
    assert describe_meta({1}) == "a pickled object"
    with pytest.raises(TypeError, match=r"value\[0\]: this function cannot be pickled"):
        encode([lambda: None], allow_pickle=True)


def test_a_value_says_whether_it_holds_pickles() -> None:
    """What is made again and again from a template must not be: each time it is another object."""
    for value, pickled in (([1, {1}], True), ({"a": [{2}]}, True), ([1, "a", np.ones(2)], False)):
        meta = encode(value, allow_pickle=True).meta
        assert parse(meta, max_bytes=1000, allow_pickle=True).has_pickles is pickled


def describe_meta(value: Any) -> str:
    return parse(encode(value, allow_pickle=True).meta, max_bytes=1000).describe()


def test_nothing_is_unpickled_by_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = encode({1}, allow_pickle=True).meta
    monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("unpickled"))
    parse(meta, max_bytes=1000, allow_pickle=True)


class Exporter:
    """An array of another library."""

    def __init__(self, array: Any, fail: str | None = None) -> None:
        self.array = array
        self.fail = fail

    def __dlpack__(self, **options: Any) -> Any:
        if self.fail:
            raise BufferError(self.fail)
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_dlpack_exporters_travel_as_numpy() -> None:
    assert np.array_equal(send(Exporter(np.arange(4)))[1:], [1, 2, 3])
    with pytest.raises(TypeError, match=r"value\[0\]: numpy cannot read this Exporter .*no way"):
        encode([Exporter(np.arange(4), "no way")])
    with pytest.raises(TypeError, match="a value of type type does not travel"):
        encode(Exporter)
    with pytest.raises(TypeError, match="Exporter, neither a numpy array nor a torch tensor"):
        into(np.arange(4), Exporter(np.arange(4)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((3, 4), "f4"), "float32[3,4]"),
        (np.array(1, ">i2"), "int16[]"),
        (np.zeros(2, "M8[ns]"), "datetime64[ns][2]"),
        (np.zeros(1, "G"), f"clongdouble{np.finfo(np.longdouble).nmant + 1}[1]"),
        ([1, 2], "list[2]"),
        ((1, 2), "tuple[2]"),
        ({1: 2}, "dict[1]"),
        (None, "None"),
        (3, "int"),
        ("x", "str"),
        (np.float32(1), "float32"),
        (np.array([object()]), "ndarray"),
    ],
)
def test_describe(value: Any, text: str) -> None:
    assert describe(value) == text
    if text != "ndarray":
        assert parse(encode(value).meta, max_bytes=1000).describe() == text


# --- out= -------------------------------------------------------------------------------------


def test_out_array_is_written_and_returned() -> None:
    out = np.zeros((2, 3))
    assert send(np.arange(6.0).reshape(2, 3), out) is out
    assert out[1, 2] == 5


@pytest.mark.parametrize(
    "out", [np.zeros((3, 2)).T, np.zeros((2, 3), ">f8"), np.zeros((2, 6))[:, ::2]]
)
def test_out_that_is_not_flat_is_staged(out: Any) -> None:
    assert send(np.arange(6.0).reshape(2, 3), out) is out
    assert np.array_equal(out, np.arange(6.0).reshape(2, 3))


def test_out_tree_of_arrays_is_returned() -> None:
    out = OrderedDict(a=np.zeros(3), b=(np.zeros(2, "i4"), [np.zeros(())]))
    value = {"a": np.ones(3), "b": [np.arange(2, dtype="i4"), (np.array(5.0),)]}
    assert send(value, out) is out
    assert out["a"][2] == 1
    assert out["b"][0][1] == 1
    assert out["b"][1][0] == 5


def test_out_with_other_leaves_gives_the_incoming_ones() -> None:
    weights = np.zeros(3)
    got = send({"w": np.ones(3), "step": 7, "n": None}, {"w": weights, "step": 0, "n": "old"})
    assert got == {"w": got["w"], "step": 7, "n": None}
    assert got["w"] is weights
    assert weights[0] == 1
    # Numbers of numpy are replaced as Python's are.
    assert same(send([7, np.int64(8)], [np.int64(0), np.float32(0)]), [7, np.int64(8)])


READ_ONLY = np.zeros(3)
READ_ONLY.flags.writeable = False


THREE = np.zeros(3)
SPREAD = np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,))


@pytest.mark.parametrize(
    ("value", "out", "error", "words"),
    [
        (
            THREE,
            np.zeros(4),
            ValueError,
            r"out: is float64\[4\], the incoming array is float64\[3\]",
        ),
        (THREE, np.zeros(3, "f4"), TypeError, r"out: is float32\[3\].* float64\[3\]"),
        ([THREE], [np.zeros((3, 1))], ValueError, r"out\[0\]: is float64\[3,1\]"),
        (THREE, READ_ONLY, ValueError, "is read-only: nothing can be written"),
        (THREE, SPREAD, ValueError, "share one place"),
        (np.zeros(()), np.float64(1), TypeError, "is a numpy scalar, not an array"),
        (THREE, [1, 2, 3], TypeError, "out: expected a numpy array or torch tensor .* got list"),
        ({"a": THREE}, {"b": THREE}, ValueError, "keys differ .*: 'a', 'b' on one side"),
        ({i: i for i in range(9)}, {0: 0}, ValueError, "1, 2, 3, 4, 5, …"),
        ({"a": THREE}, [THREE], TypeError, r"is list\[1\], the incoming value is dict\[1\]"),
        ([THREE], [THREE] * 2, TypeError, r"is list\[2\], the incoming value is list\[1\]"),
        (
            [5],
            [THREE],
            TypeError,
            r"is float64\[3\], the incoming value is int: send np.array\(x\)$",
        ),
        ([5], [[THREE]], TypeError, r"out\[0\]: is list\[1\], the incoming value is int$"),
        ([None], [(THREE,)], TypeError, r"out\[0\]: is tuple\[1\], the incoming value is None"),
        ("no", {"a": THREE}, TypeError, r"out: is dict\[1\], the incoming value is str"),
    ],
)
def test_out_that_does_not_fit(value: Any, out: Any, error: Any, words: str) -> None:
    incoming = parse(encode(value).meta, max_bytes=1000)
    with pytest.raises(error, match=words):
        incoming.allocate(out)
    incoming.allocate()  # it can still be received elsewhere
    fill(incoming.buffers, b"".join(encode(value).buffers))
    assert same(incoming.finish(), value)


def test_into_names_its_argument() -> None:
    with pytest.raises(ValueError, match=r"^x: is float64\[2\]"):
        into(np.zeros(3), np.zeros(2), name="x")
    x = np.arange(3)
    assert into(x, x) is x


# --- limits, and torch tensors where there is no torch --------------------------------------------


def test_too_large_messages_are_refused() -> None:
    meta = encode(np.zeros(1000)).meta
    parse(meta, max_bytes=8000)
    with pytest.raises(
        MessageTooLargeError, match=r"8000 bytes of arrays .*max_message_bytes=7999"
    ):
        parse(meta, max_bytes=7999)
    with pytest.raises(MessageTooLargeError, match="bytes of metadata"):
        parse(encode("x" * 100).meta, max_bytes=50)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "require", lambda: None)


def torch_meta(name: str) -> bytes:
    from aiodist.buffers import tokens

    return tokens.pack([tokens.array("torch", name, (2,))])


@pytest.mark.usefixtures("no_torch")
def test_tensors_arrive_as_numpy_without_torch() -> None:
    incoming = parse(torch_meta("float32"), max_bytes=100)
    incoming.allocate()
    fill(incoming.buffers, np.array([1, 2], "f4").tobytes())
    got = incoming.finish()
    assert same(got, np.array([1, 2], "f4"))
    with pytest.raises(TypeError, match=r"value: bfloat16\[2\] needs torch"):
        parse(torch_meta("bfloat16"), max_bytes=100).allocate()


def test_require_survives_a_missing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert tensors.loaded() is None
    assert tensors.require() is None


def test_arrays_of_many_dimensions() -> None:
    array = np.zeros((1,) * MAX_NDIM)
    assert same(send(array), array)


def test_check_writable_passes_strided_memory() -> None:
    array = arrays.writable(np.zeros((4, 4))[::2, ::2], "out")
    assert (array.shape, str(array)) == ((2, 2), "float64[2,2]")


def test_scalars_of_unknown_dtype_are_refused() -> None:
    with pytest.raises(TypeError, match="does not travel"):
        encode(np.void(b"abc"))


def test_protocol_error_is_not_a_value_error() -> None:
    assert not issubclass(ProtocolError, (ValueError, TypeError))


def test_the_one_array_that_a_value_is() -> None:
    array = parse(encode(np.ones((2, 3), "f4")).meta).array
    assert array is not None
    assert str(array) == "float32[2,3]"
    for value in ([np.ones(3)], 7, {"a": np.ones(3)}, np.float32(1)):
        assert parse(encode(value).meta).array is None
