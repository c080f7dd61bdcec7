"""What users give to reductions, as vectors, and what they get back; without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist.buffers.reductions import Operand, split_slots
from aiodist.buffers.vector import align
from aiodist.types import ReduceOp

SUM = ReduceOp.SUM


def reduce_all(operands: list[Operand], size: int | None = None) -> list[Any]:
    """What all ranks get, by the simplest algorithm there is."""
    inputs = [
        [np.concatenate([np.empty(0, g.x.dtype), *g.x.pieces(0, g.x.length)]) for g in o.groups]
        for o in operands
    ]
    for rank, operand in enumerate(operands):
        for index, group in enumerate(operand.groups):
            start, stop = (0, group.x.length)
            if group.bounds[1:-1]:
                start, stop = group.bounds[rank : rank + 2]
            xs = [[row[index][start:stop]] if stop > start else [] for row in inputs]
            for into, *parts in align([group.out.pieces(0, group.out.length), *xs]):
                group.kernel.reduce(parts, into, len(operands))
    return [operand.finish() for operand in operands]


def all_reduce(xs: list[Any], op: ReduceOp = SUM, **options: Any) -> list[Any]:
    options.setdefault("in_place", True)
    return reduce_all([Operand.of(x, op, **options) for x in xs])


def test_one_array_is_reduced_in_place() -> None:
    a, b = np.arange(3.0), np.ones(3)
    got = all_reduce([a, b])
    assert got[0] is a
    assert got[1] is b
    assert a.tolist() == b.tolist() == [1, 2, 3]


def test_in_place_vectors_are_one() -> None:
    x = np.arange(6.0).reshape(2, 3)
    (group,) = Operand.of(x, SUM, in_place=True).groups
    assert group.x is group.out
    assert (group.name, group.x.length, group.bounds) == ("float64", 6, [0, 6])
    assert np.shares_memory(group.x.arrays[0], x)


def test_not_in_place_leaves_the_input() -> None:
    x = np.arange(3.0)
    got = all_reduce([x, x.copy()], in_place=False)
    assert got[0].tolist() == [0, 2, 4]
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,), (2, 3)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    a, b = np.ones(shape, "i4"), np.ones(shape, "i4")
    got = all_reduce([a, b])
    assert got[0] is a
    assert a.tolist() == (np.ones(shape, "i4") * 2).tolist()


@pytest.mark.parametrize(
    "x", [np.arange(12.0).reshape(3, 4).T, np.arange(12.0)[::2], np.arange(6, dtype=">f8")]
)
def test_other_layouts_are_staged(x: Any) -> None:
    expected = (x * 2).tolist()
    (got, _) = all_reduce([x, np.array(x)])
    assert got is x
    assert x.tolist() == expected


def test_a_list_is_grouped_by_dtype() -> None:
    def make() -> list[Any]:
        return [np.ones(2, "f4"), np.ones((2, 2), "i8"), np.ones((3, 2), "f4").T, np.ones((), "f4")]

    x = make()
    operand = Operand.of(x, SUM, in_place=True)
    assert [(g.name, g.x.length) for g in operand.groups] == [("float32", 9), ("int64", 4)]
    assert operand.signature == "[float32[2], int64[2,2], float32[2,3], float32[]]"
    got = reduce_all([operand, Operand.of(make(), SUM, in_place=True)])[0]
    assert got is x
    assert all((a == 2).all() for a in x)


def test_an_empty_list() -> None:
    operand = Operand.of([], SUM, in_place=True)
    assert (operand.signature, operand.groups, operand.finish()) == ("[]", [], [])


def test_many_arrays_have_a_digest() -> None:
    xs = [np.zeros(1000 * i, "f4") for i in range(10)]
    signature = Operand.of(xs, SUM, in_place=True).signature
    assert signature.startswith("[10 arrays, 45k elements, #")
    other = Operand.of([*xs[1:], xs[0]], SUM, in_place=True).signature
    assert other != signature
    few = Operand.of([np.zeros(1)] * 5, SUM, in_place=False).signature
    assert few.startswith("[5 arrays, 5 elements, #")


def test_numpy_scalars_give_new_scalars() -> None:
    got = all_reduce([np.float32(1.5), np.float32(2)])[0]
    assert (got, type(got)) == (3.5, np.float32)
    listed = all_reduce([[np.float64(1), np.ones(1)], [np.float64(2), np.ones(1)]])[0]
    assert type(listed[0]) is np.float64
    assert listed[1].tolist() == [2]


class Exporter:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_other_arrays_give_new_ones() -> None:
    x = Exporter(np.arange(3))
    got = all_reduce([x, Exporter(np.arange(3))])[0]
    assert type(got) is np.ndarray
    assert got.tolist() == [0, 2, 4]
    assert x.array.tolist() == [0, 1, 2]


def test_read_only_arrays() -> None:
    x = np.arange(3.0)
    x.flags.writeable = False
    with pytest.raises(ValueError, match=r"^x: float64\[3\] is read-only"):
        Operand.of(x, SUM, in_place=True)
    with pytest.raises(ValueError, match=r"^x\[1\]: float64\[3\] is read-only"):
        Operand.of([np.ones(1), x], SUM, in_place=True)
    assert all_reduce([x, x], in_place=False)[0].tolist() == [0, 2, 4]
    assert all_reduce([x, x], out=np.empty(3))[0].tolist() == [0, 2, 4]


def test_out() -> None:
    x = np.arange(4.0)
    for out in (np.empty(4), np.empty(8)[::2]):
        (got,) = all_reduce([x], out=out)
        assert got is out
        assert out.tolist() == x.tolist() == [0, 1, 2, 3]
    outs = [np.empty(4), np.empty(2, "i4")]
    assert all_reduce([[x, np.ones(2, "i4")]], out=outs)[0] is outs
    assert outs[1].tolist() == [1, 1]


def test_out_that_is_the_input() -> None:
    x = np.arange(4.0)
    operand = Operand.of(x, SUM, out=x, in_place=True)
    assert np.shares_memory(operand.groups[0].x.arrays[0], operand.groups[0].out.arrays[0])
    assert reduce_all([operand])[0] is x


def test_out_that_overlaps_the_input_elsewhere() -> None:
    memory = np.arange(6.0)
    operand = Operand.of(memory[:4], SUM, out=memory[2:], in_place=True)
    (group,) = operand.groups
    assert not np.shares_memory(group.x.arrays[0], group.out.arrays[0])
    reduce_all([operand])
    assert memory.tolist() == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("x", "out", "error", "words"),
    [
        (np.ones(3), np.ones(4), ValueError, r"out: is float64\[4\], x is float64\[3\]"),
        (np.ones(3), np.ones(3, "f4"), TypeError, r"out: is float32\[3\], x is float64\[3\]"),
        ([np.ones(3)], [np.ones((3, 1))], ValueError, r"out\[0\]: is float64\[3,1\], x\[0\] is"),
        (np.ones(3), [np.ones(3)], TypeError, "out: expected a numpy array or torch tensor"),
        ([np.ones(3)], np.ones(3), ValueError, "list of 1 arrays, as x is, got a ndarray"),
        ([np.ones(3)], [], ValueError, "expected a list of 1 arrays, as x is, got 0 items"),
        (np.ones(3), Exporter(np.ones(3)), TypeError, "neither a numpy array nor a torch tensor"),
        (1.5, np.ones(1), TypeError, "a number is returned, not written"),
    ],
)  # fmt: skip
def test_out_that_does_not_fit(x: Any, out: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        Operand.of(x, SUM, out=out, in_place=True)


def test_results_must_not_share_memory() -> None:
    x = np.ones(4)
    for xs in ([x, x], [x[:3], x[2:]], [x, x[:0], x]):
        with pytest.raises(ValueError, match="share memory"):
            Operand.of(xs, SUM, in_place=True)
    with pytest.raises(ValueError, match="share memory"):
        Operand.of([np.ones(2), np.ones(2)], SUM, out=[x[:2], x[1:3]], in_place=True)
    assert all_reduce([[x, x]], in_place=False)[0][1].tolist() == [1] * 4
    Operand.of([x[:2], x[2:]], SUM, in_place=True)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ({"a": 1}, "x: expected an array, a flat list of arrays or a number to reduce, got dict$"),
        ("text", "x: expected an array.* got str$"),
        (None, "got NoneType"),
        ([np.ones(1), 2.0], r"x\[1\]: expected an array to reduce, got float"),
        ([1.0, 2], r"got float: of a list of numbers, pass np\.array\(x\)$"),
        ([[np.ones(1)]], r"x\[0\]: expected an array to reduce, got list$"),
        ((x for x in [np.ones(1)]), r"got generator: pass list\(x\)$"),
        (range(3), r"got range: of a list of numbers, pass np\.array\(x\)$"),
        ({1, 2}, "got set$"),  # it has no order
        (np.array([object()]), r"dtype object .* Send x\.tolist\(\), or convert it to numbers$"),
        (np.array(["a"]), "SUM has no meaning for U1"),
        ([np.ones(1), np.ones(1, bool)], "SUM has no meaning for bool"),
    ],
)
def test_what_cannot_be_reduced(x: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Operand.of(x, SUM, in_place=True)


@pytest.mark.parametrize(("x", "name"), [(1, "int"), (1.5, "float"), (1j, "complex")])
def test_numbers(x: Any, name: str) -> None:
    operand = Operand.of(x, SUM, in_place=True)
    assert (operand.kind, operand.signature, operand.value) == ("scalar", name, x)
    assert operand.groups == []


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 2, 3, 7, 9])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_array_is_split_as_numpy_does(length: int, size: int) -> None:
    x = np.arange(2 * length).reshape(length, 2)
    slots = split_slots(x, size)
    expected = np.array_split(x, size)
    assert [slot.tolist() for slot in slots] == [slot.tolist() for slot in expected]
    assert all(np.shares_memory(slot, x) for slot in slots if slot.size)


@pytest.mark.parametrize(
    ("xs", "error", "words"),
    [
        ([1, 2], ValueError, "expected 3 slots, one a rank, got 2"),
        (np.ones(()), ValueError, r"float64\[\] has no dimension to split into 3 slots"),
        (5, TypeError, "expected a list of 3 slots, one a rank, or an array to split, got int$"),
        ({1: 2}.values(), TypeError, r"an array to split, got dict_values: pass list\(xs\)$"),
    ],
)
def test_slots_that_do_not_fit(xs: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        split_slots(xs, 3)


def scatter(xs: list[Any], outs: Any = None, op: ReduceOp = SUM) -> list[Any]:
    size = len(xs)
    outs = outs or [None] * size
    return reduce_all(
        [Operand.of_slots(x, op, rank=r, size=size, out=outs[r]) for r, x in enumerate(xs)]
    )


def test_reduce_scatter_of_one_array() -> None:
    xs = [np.arange(10.0).reshape(5, 2) * (r + 1) for r in range(3)]
    kept = [x.copy() for x in xs]
    got = scatter(xs)
    for part, expected in zip(got, np.array_split(sum(kept), 3), strict=True):
        assert np.array_equal(part, expected)
    assert all(np.array_equal(x, k) for x, k in zip(xs, kept, strict=True))


def test_reduce_scatter_of_slots() -> None:
    xs = [[np.ones(2), np.ones((2, 2)), np.ones(0)] for _ in range(3)]
    got = scatter(xs)
    assert [g.tolist() for g in got] == [[3, 3], [[3, 3], [3, 3]], []]
    array, listed = np.ones((4, 1)), [np.ones((2, 1)), np.ones((2, 1))]
    operands = [Operand.of_slots(x, SUM, rank=0, size=2) for x in (array, listed)]
    assert operands[0].signature == operands[1].signature == "slots [float64[2,1], float64[2,1]]"


def test_reduce_scatter_of_lists_of_arrays() -> None:
    def make() -> list[Any]:
        return [[np.ones(2), np.ones(3, "i4")], [np.ones(4)]]

    outs = [[np.zeros(2), np.zeros(3, "i4")], None]
    operands = [Operand.of_slots(make(), SUM, rank=r, size=2, out=outs[r]) for r in range(2)]
    assert [(g.name, g.bounds) for g in operands[1].groups] == [
        ("float64", [0, 2, 6]),
        ("int32", [0, 3, 3]),
    ]
    assert operands[1].groups[1].out.length == 0
    got = reduce_all(operands)
    assert got[0] is outs[0]
    assert got[0][1].tolist() == [2, 2, 2]
    assert [a.tolist() for a in got[1]] == [[2, 2, 2, 2]]


def test_where_slots_end_is_agreed_on() -> None:
    """Each rank cuts by its own slots, so other slots of the same arrays are another call."""

    def signature(*slots: Any) -> str:
        return Operand.of_slots([*slots], SUM, rank=0, size=len(slots)).signature

    a = np.ones(2)
    assert signature([a, a], [a]) == "slots [[float64[2], float64[2]], float64[2]]"
    assert signature([a], [a, a]) == "slots [float64[2], [float64[2], float64[2]]]"
    many = [[a, a], *[a] * 8], [*[a] * 8, [a, a]]
    assert signature(*many[0]).startswith("slots [9 slots, 20 elements, #")
    assert signature(*many[0]) != signature(*many[1])


def test_out_inside_the_input_of_a_reduce_scatter() -> None:
    xs = [np.arange(4.0), np.arange(4.0)]
    got = scatter(xs, [xs[0][2:], xs[1][:2]])
    assert got[0].tolist() == [0, 2]
    assert got[1].tolist() == [4, 6]
    assert xs[0].tolist() == [0, 1, 0, 2]


def test_reduce_scatter_checks_out() -> None:
    with pytest.raises(ValueError, match=r"out: is float64\[3\], slot 1 of xs is float64\[2\]"):
        Operand.of_slots(np.ones(4), SUM, rank=1, size=2, out=np.ones(3))


def test_slots_of_numbers() -> None:
    operand = Operand.of_slots([1, 2.5], SUM, rank=0, size=2)
    assert (operand.kind, operand.value) == ("scalars", [1, 2.5])
    assert operand.signature == "slots [int, float]"
    with pytest.raises(TypeError, match="a number is returned"):
        Operand.of_slots([1, 2], SUM, rank=0, size=2, out=np.ones(1))
    with pytest.raises(TypeError, match=r"^xs\[1\] is a number and xs\[0\] is not: give"):
        Operand.of_slots([np.ones(1), 2], SUM, rank=0, size=2)


# --- operators of users ---------------------------------------------------------------------------


def first_digits(a: Any, b: Any) -> Any:
    """Neither commutative nor elementwise in what it sees: the shape must be the caller's."""
    assert a.shape == b.shape
    return a * 10 + b[..., ::-1]


def test_custom_operators_get_whole_arrays_in_rank_order() -> None:
    op = ReduceOp.of(first_digits)
    xs = [np.array([[1, 2], [3, 4]]) + 4 * r for r in range(2)]
    expected = first_digits(*xs).tolist()
    got = all_reduce([[x, np.array([r])] for r, x in enumerate(xs)], op)
    assert got[0][0].tolist() == got[1][0].tolist() == expected
    assert got[0][1].tolist() == [1]


def test_whole_arrays_are_joined_for_custom_operators() -> None:
    x = [np.arange(4.0).reshape(2, 2), np.empty(0), np.arange(3.0)]
    operand = Operand.of(x, ReduceOp.of(np.add), in_place=True)
    (group,) = operand.groups
    assert not group.kernel.sliceable
    assert len(group.x.arrays) == len(group.out.arrays) == 1
    assert reduce_all([operand, Operand.of(x, ReduceOp.of(np.add), in_place=False)])[0] is x
    assert x[2].tolist() == [0, 2, 4]
    single = Operand.of(x[0], ReduceOp.of(np.add), in_place=True)
    assert np.shares_memory(single.groups[0].out.arrays[0], x[0])


def test_elementwise_operators_on_slots() -> None:
    op = ReduceOp.custom(np.maximum, elementwise=True)
    operand = Operand.of_slots([[np.ones(2)], [np.ones(3, "i4")]], op, rank=0, size=2)
    floats, ints = operand.groups
    assert (floats.bounds, ints.bounds, ints.out.length) == ([0, 2, 2], [0, 0, 3], 0)
    into = np.empty(3, "i4")
    ints.kernel.combine(into, np.arange(3, dtype="i4"), np.ones(3, "i4"))  # of another's slot
    assert into.tolist() == [1, 1, 2]


def test_custom_operators_on_slots() -> None:
    shapes = []

    def f(a: Any, b: Any) -> Any:
        shapes.append(a.shape)
        return a + b

    xs = [[np.ones((2, 2)), [np.ones(3), np.ones((1, 3))]] for _ in range(2)]
    got = scatter(xs, op=ReduceOp.of(f))
    assert shapes == [(2, 2), (3,), (1, 3)]
    assert got[0].tolist() == [[2, 2], [2, 2]]
    assert [a.tolist() for a in got[1]] == [[2, 2, 2], [[2, 2, 2]]]
