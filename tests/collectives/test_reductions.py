"""Collectives that reduce: all operators, dtypes and sizes, against plain Python references."""

from __future__ import annotations

import asyncio
import functools
import operator
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import ReduceOp
from aiodist.collectives import reductions

pytestmark = pytest.mark.strength(2)

SIZES = [1, 2, 3, 4, 5]
SMALL, LARGE = 7, 40_009  # the latter goes in slices, of several segments for 8-byte elements

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]

OPERATORS: dict[str, tuple[ReduceOp, Any, list[str]]] = {
    "SUM": (ReduceOp.SUM, operator.add, INTEGERS + FLOATS + COMPLEX),
    "PRODUCT": (ReduceOp.PRODUCT, operator.mul, INTEGERS + FLOATS + COMPLEX),
    "MIN": (ReduceOp.MIN, np.minimum, INTEGERS + FLOATS),
    "MAX": (ReduceOp.MAX, np.maximum, INTEGERS + FLOATS),
    "BAND": (ReduceOp.BAND, operator.and_, [*INTEGERS, "bool"]),
    "BOR": (ReduceOp.BOR, operator.or_, [*INTEGERS, "bool"]),
    "BXOR": (ReduceOp.BXOR, operator.xor, [*INTEGERS, "bool"]),
    "LAND": (ReduceOp.LAND, np.logical_and, [*INTEGERS, *FLOATS, "bool"]),
    "LOR": (ReduceOp.LOR, np.logical_or, [*INTEGERS, *FLOATS, "bool"]),
    "LXOR": (ReduceOp.LXOR, np.logical_xor, [*INTEGERS, *FLOATS, "bool"]),
}


def inputs(size: int, length: int, dtype: str) -> list[Any]:
    """Small whole numbers, so that every order of summation gives the same bits."""
    base = np.arange(length) % 3
    return [((base + rank) % 4).astype(dtype) for rank in range(size)]


@pytest.mark.parametrize("name", sorted(OPERATORS))
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_of_every_operator_and_dtype(run, groups, everyone, name, size):
    op, function, dtypes = OPERATORS[name]

    async def main():
        async with groups(size) as ranks:
            for dtype in dtypes:
                for length in (SMALL, LARGE):
                    arrays = inputs(size, length, dtype)
                    expected = functools.reduce(function, arrays).astype(dtype)
                    results = await everyone(
                        ranks, lambda g, arrays=arrays: g.all_reduce(arrays[g.rank], op)
                    )
                    for array, result in zip(arrays, results, strict=True):
                        assert result is array
                        np.testing.assert_array_equal(result, expected, err_msg=dtype)

    run(main())


@pytest.mark.strength(3)  # size, length and transport choose the algorithm
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 1, SMALL, LARGE, 200_003])
@pytest.mark.sample(63)
def test_all_reduce_of_every_size(run, groups, everyone, size, length):
    async def main():
        async with groups(size) as ranks:
            arrays = inputs(size, length, "float32")
            kept = [array.copy() for array in arrays]
            outs = [np.empty_like(array) for array in arrays]
            expected = sum(kept)
            await everyone(ranks, lambda g: g.all_reduce(arrays[g.rank], out=outs[g.rank]))
            for array, before, out in zip(arrays, kept, outs, strict=True):
                np.testing.assert_array_equal(array, before)
                np.testing.assert_array_equal(out, expected)
            await everyone(ranks, lambda g: g.all_reduce(arrays[g.rank], ReduceOp.AVG))
            for array in arrays:
                np.testing.assert_array_equal(array, expected / np.float32(size))

    run(main())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_results_are_bit_identical_and_deterministic(run, groups, everyone, size, length):
    async def main():
        generator = np.random.default_rng(size)
        values = [generator.standard_normal(length).astype(np.float32) for _ in range(size)]
        outcomes = set()
        for _ in range(3):
            async with groups(size) as ranks:
                results = await everyone(ranks, lambda g: g.all_reduce(values[g.rank].copy()))
                outcomes |= {result.tobytes() for result in results}
        assert len(outcomes) == 1

    run(main())


def nans(dtype: str, length: int, rank: int) -> Any:
    """NaNs of either sign, whose payloads say whose they are."""
    part = np.dtype(dtype).type(0).real.dtype
    count = length * np.dtype(dtype).itemsize // part.itemsize
    mantissa = np.finfo(part).nmant
    bits = np.full(count, np.nan, part).view(f"u{part.itemsize}")
    bits |= np.arange(count).astype(bits.dtype) % 64 * 8 + rank + 1
    bits |= np.array((rank + np.arange(count)) % 2, bits.dtype) << (8 * part.itemsize - 1)
    assert rank < 8 and mantissa >= 10
    return bits.view(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, SMALL, 1000, LARGE])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_nans_are_bit_identical(run, groups, size, length, dtype):
    """Whichever rank is first, in each of the ways that the operation may take.

    Ranks of one host share memory from some operation on. In another way arrays are cut in other
    places, and what does not fill a register at the end of a piece is where numpy keeps the other
    one of two NaNs.
    """
    ops = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.premul_sum(2.0)]
    if dtype in FLOATS:
        ops += [ReduceOp.MIN, ReduceOp.MAX]

    async def main():
        async with groups(size) as ranks:
            while any(not (g._context.lane or g._context.express) for g in ranks):
                await asyncio.gather(*[g.barrier() for g in ranks])
            for op in ops:
                outcomes: dict[str, set[bytes]] = {}
                for turn in range(size + 2):
                    for tag in (None, "t"):
                        order = ranks[turn % size :] + ranks[: turn % size]
                        arrays = [nans(dtype, length, rank) for rank in range(size)]
                        works = [g.all_reduce(arrays[g.rank], op, tag=tag) for g in order]
                        await asyncio.gather(*works)
                        found = outcomes.setdefault(str(tag), set())
                        found |= {array.tobytes() for array in arrays}
                assert [len(found) for found in outcomes.values()] == [1, 1], op

    run(main())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_float16_is_rounded_once(run, groups, everyone, size, length):
    async def main():
        generator = np.random.default_rng(size)
        values = [generator.standard_normal(length).astype(np.float16) for _ in range(size)]
        if length == SMALL:
            # Recursive doubling: neighbours first.
            wide = [value.astype(np.float32) for value in values]
            pairs = size - (1 << (size.bit_length() - 1))
            blocks = [wide[2 * i] + wide[2 * i + 1] for i in range(pairs)] + wide[2 * pairs :]
            while len(blocks) > 1:
                blocks = [a + b for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
            expected = blocks[0].astype(np.float16)
        else:
            expected = functools.reduce(operator.add, [v.astype(np.float32) for v in values])
            expected = expected.astype(np.float16)
        async with groups(size) as ranks:
            for result in await everyone(ranks, lambda g: g.all_reduce(values[g.rank].copy())):
                np.testing.assert_array_equal(result, expected)

    run(main())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_reduce(run, groups, everyone, size, length):
    async def main():
        async with groups(size) as ranks:
            for dst in range(size):
                arrays = inputs(size, length, "int64")
                kept = [array.copy() for array in arrays]
                results = await everyone(
                    ranks, lambda g, dst=dst, arrays=arrays: g.reduce(arrays[g.rank], dst)
                )
                for rank, (array, before) in enumerate(zip(arrays, kept, strict=True)):
                    if rank == dst:
                        assert results[rank] is array
                        np.testing.assert_array_equal(array, sum(kept))
                    else:
                        assert results[rank] is None
                        np.testing.assert_array_equal(array, before)

    run(main())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 4, 10_007])
def test_reduce_scatter(run, groups, everyone, size, rows):
    async def main():
        async with groups(size) as ranks:
            # One array, split as numpy.array_split does (some slots may be empty).
            arrays = [inputs(size, rows * 3, "float64")[r].reshape(rows, 3) for r in range(size)]
            expected = np.array_split(sum(arrays), size)
            kept = [array.copy() for array in arrays]
            results = await everyone(ranks, lambda g: g.reduce_scatter(arrays[g.rank]))
            for rank, result in enumerate(results):
                np.testing.assert_array_equal(result, expected[rank])
                np.testing.assert_array_equal(arrays[rank], kept[rank])
            # A list of slots of different shapes, and out.
            slots = [
                [np.full(rows + slot, rank + slot, np.int32) for slot in range(size)]
                for rank in range(size)
            ]
            outs = [np.empty(rows + rank, np.int32) for rank in range(size)]
            await everyone(
                ranks, lambda g: g.reduce_scatter(slots[g.rank], ReduceOp.MAX, out=outs[g.rank])
            )
            for rank, out in enumerate(outs):
                np.testing.assert_array_equal(out, np.full(rows + rank, size - 1 + rank))
            numbers = await everyone(
                ranks, lambda g: g.reduce_scatter([g.rank * slot for slot in range(size)])
            )
            assert numbers == [sum(range(size)) * slot for slot in range(size)]

    run(main())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, SMALL, LARGE])
@pytest.mark.parametrize("dtype", ["int64", "float16"])
def test_scan_and_exscan(run, groups, everyone, size, length, dtype):
    async def main():
        async with groups(size) as ranks:
            arrays = inputs(size, length, dtype)
            results = await everyone(ranks, lambda g: g.scan(arrays[g.rank].copy()))
            for rank, result in enumerate(results):
                np.testing.assert_array_equal(result, sum(arrays[: rank + 1]))
            outs = [np.empty_like(array) for array in arrays]
            await everyone(ranks, lambda g: g.exscan(arrays[g.rank], out=outs[g.rank]))
            for rank, out in enumerate(outs):
                expected = sum(arrays[:rank]) if rank else arrays[0]
                np.testing.assert_array_equal(out, expected)

    run(main())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [4, LARGE])
@pytest.mark.parametrize("elementwise", [False, True])
def test_custom_operators_keep_rank_order(run, groups, everyone, size, length, elementwise):
    """Composition of affine maps x → a x + b does not commute."""

    def compose(f, g):
        a = f.real * g.real
        return a + 1j * (g.real * f.imag + g.imag)

    kept: dict[Any, Any] = {}

    def into_one_array(f, g):
        result = kept.setdefault(f.shape, np.empty_like(f))
        result[...] = 0
        result += compose(f, g)
        return result

    async def main():
        op = ReduceOp.custom(into_one_array, elementwise=elementwise)
        values = [
            np.full(length, complex(1 + rank % 2, rank - 1), np.complex128) for rank in range(size)
        ]
        shaped = [value.reshape(-1, 1) for value in values]
        expected = functools.reduce(compose, shaped)
        async with groups(size) as ranks:
            results = await everyone(ranks, lambda g: g.all_reduce(shaped[g.rank].copy(), op))
            for result in results:
                np.testing.assert_array_equal(result, expected)
            results = await everyone(ranks, lambda g: g.reduce(shaped[g.rank].copy(), 0, op))
            np.testing.assert_array_equal(results[0], expected)
            results = await everyone(ranks, lambda g: g.scan(shaped[g.rank].copy(), op))
            for rank, result in enumerate(results):
                np.testing.assert_array_equal(result, functools.reduce(compose, shaped[: rank + 1]))
            slots = [[value] * size for value in shaped]
            results = await everyone(ranks, lambda g: g.reduce_scatter(slots[g.rank], op))
            for result in results:
                np.testing.assert_array_equal(result, expected)

    run(main())


def test_a_custom_operator_that_fails_ends_the_operation_for_all(run, groups, everyone):
    def fail(a, b):
        raise ZeroDivisionError("by hand")

    async def main():
        async with groups(3) as ranks:
            works = [g.all_reduce(np.ones(3), fail) for g in ranks]
            await asyncio.wait(works)
            kinds = {type(work.exception()) for work in works}
            assert kinds <= {ZeroDivisionError, aiodist.CollectiveAbortedError}
            assert ZeroDivisionError in kinds
            assert await everyone(ranks, lambda g: g.all_reduce(1)) == [3, 3, 3]

    run(main())


@pytest.mark.parametrize("size", SIZES)
def test_coalesced_lists(run, groups, everyone, size):
    async def main():
        async with groups(size) as ranks:
            shapes = [(3,), (), (0,), (50, 100), (1001,), (70_000,)]
            dtypes = [np.float32, np.float64, np.float32, np.float32, np.int64, np.float32]
            for count in (3, len(shapes)):
                lists = [
                    [np.full(shapes[i], rank + i, dtypes[i]) for i in range(count)]
                    for rank in range(size)
                ]
                results = await everyone(ranks, lambda g, lists=lists: g.all_reduce(lists[g.rank]))
                for arrays, result in zip(lists, results, strict=True):
                    for i, (array, same) in enumerate(zip(arrays, result, strict=True)):
                        assert array is same
                        expected = np.full(shapes[i], sum(range(size)) + i * size, dtypes[i])
                        np.testing.assert_array_equal(array, expected)

    run(main())


def test_views_are_reduced_in_place(run, groups, everyone):
    async def main():
        for side in (5, 300):
            async with groups(3) as ranks:
                bases = [np.zeros((side, side)) for _ in ranks]
                await everyone(ranks, lambda g, bases=bases: g.all_reduce(bases[g.rank][:, ::2]))
                views = [base[::2].T for base in bases]
                for view in views:
                    view += 1
                results = await everyone(ranks, lambda g, views=views: g.all_reduce(views[g.rank]))
                for base, view, result in zip(bases, views, results, strict=True):
                    assert result is view
                    assert (base[::2] == 3).all()
                    assert (base[1::2] == 0).all()

    run(main())


@pytest.mark.parametrize("size", SIZES)
def test_numbers(run, groups, everyone, size):
    async def main():
        async with groups(size) as ranks:
            total = size * (size - 1) // 2
            assert await everyone(ranks, lambda g: g.all_reduce(g.rank)) == [total] * size
            assert await everyone(ranks, lambda g: g.all_reduce(g.rank / 2)) == [total / 2] * size
            assert await everyone(ranks, lambda g: g.all_reduce(g.rank * 1j)) == [total * 1j] * size
            average = await everyone(ranks, lambda g: g.all_reduce(g.rank, ReduceOp.AVG))
            assert average == [total / size] * size
            both = await everyone(ranks, lambda g: g.all_reduce(g.rank == 0, ReduceOp.LOR))
            assert both == [True] * size
            prefix = await everyone(ranks, lambda g: g.scan(g.rank))
            assert prefix == [sum(range(rank + 1)) for rank in range(size)]
            before = await everyone(ranks, lambda g: g.exscan(g.rank + 5))
            assert before == [sum(range(5, 5 + rank)) if rank else 5 for rank in range(size)]
            scaled = await everyone(
                ranks, lambda g: g.all_reduce(float(g.rank), ReduceOp.premul_sum(0.5))
            )
            assert scaled == [total / 2] * size

    run(main())


def test_integer_overflow_of_numbers(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            works = [g.all_reduce(2**62) for g in ranks]
            for work in works:
                with pytest.raises(OverflowError, match="SUM over 2 ranks"):
                    await work
            # Who does not see what is too large goes on.
            works = [g.scan(2**62) for g in ranks]
            assert await works[0] == 2**62
            with pytest.raises(OverflowError):
                await works[1]
            with pytest.raises(OverflowError):
                ranks[0].all_reduce(2**64)

    run(main())


def test_torch_reductions(run, groups, everyone):
    torch = pytest.importorskip("torch")

    async def main():
        async with groups(3) as ranks:
            for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
                for length in (5, LARGE):
                    tensors = [torch.full((length,), rank + 1).to(dtype) for rank in range(3)]
                    versions = [tensor._version for tensor in tensors]
                    results = await everyone(
                        ranks, lambda g, tensors=tensors: g.all_reduce(tensors[g.rank])
                    )
                    for tensor, version, result in zip(tensors, versions, results, strict=True):
                        assert result is tensor
                        assert torch.equal(tensor, torch.full((length,), 6).to(dtype))
                        assert tensor._version > version

            def larger(a, b):
                assert isinstance(a, torch.Tensor)
                return torch.maximum(a, b)

            results = await everyone(
                ranks, lambda g: g.all_reduce(torch.tensor([g.rank, -g.rank]), larger)
            )
            for result in results:
                assert result.tolist() == [2, 0]

    run(main())


def test_what_makes_no_sense_is_refused_at_once(run, groups, everyone, monkeypatch):
    async def main():
        async with groups(2) as ranks:
            frozen = np.ones(3)
            frozen.flags.writeable = False
            monkeypatch.setattr(reductions, "MAX_RANKS_LISTING_NUMBERS", 1)
            for group in ranks:
                with pytest.raises(TypeError, match="AVG"):
                    group.all_reduce(np.ones(3, int), ReduceOp.AVG)
                with pytest.raises(TypeError, match="BAND"):
                    group.all_reduce(np.ones(3), ReduceOp.BAND)
                with pytest.raises(ValueError, match="read-only"):
                    group.all_reduce(frozen)
                with pytest.raises((TypeError, ValueError), match="out"):
                    group.all_reduce(np.ones(3), out=np.ones(4))
                with pytest.raises(TypeError, match=r"op is ReduceOp\.SUM"):
                    group.all_reduce(np.ones(3), "sum")
                with pytest.raises(ValueError, match=f"dst={1 - group.rank}"):
                    group.reduce(np.ones(3), 1 - group.rank, out=np.ones(3))
                with pytest.raises(ValueError, match="one array, it is split"):
                    group.reduce_scatter([1, 2])
                with pytest.raises(TypeError, match="AVG has no meaning"):
                    group.scan(np.ones(3), ReduceOp.AVG)
            out = [np.zeros(3) for _ in ranks]
            await everyone(ranks, lambda g: g.all_reduce(frozen, out=out[g.rank]))
            assert out[0].tolist() == [2, 2, 2]

    run(main())


CALLS = {
    "op": (lambda g: g.barrier(), lambda g: g.all_reduce(1)),
    "shape": (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(4))),
    "size": (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(LARGE))),
    "dtype": (lambda g: g.all_reduce(np.ones(LARGE)), lambda g: g.all_reduce(np.ones(LARGE, "f4"))),
    "operator": (lambda g: g.all_reduce(1), lambda g: g.all_reduce(1, ReduceOp.MAX)),
    "kind": (lambda g: g.all_reduce(1), lambda g: g.all_reduce(1.0)),
    "root": (lambda g: g.gather(1, 0), lambda g: g.gather(1, 1)),
    "factor": (
        lambda g: g.all_reduce(1.0, ReduceOp.premul_sum(0.5)),
        lambda g: g.all_reduce(1.0, ReduceOp.premul_sum(0.25)),
    ),
    "pieces of arrays": (
        lambda g: g.all_reduce(np.ones(LARGE), ReduceOp.custom(np.add)),
        lambda g: g.all_reduce(np.ones(LARGE), ReduceOp.custom(np.add, elementwise=True)),
    ),
    "order of ranks": (
        lambda g: g.reduce_scatter(np.ones(LARGE), ReduceOp.custom(np.add)),
        lambda g: g.reduce_scatter(np.ones(LARGE), ReduceOp.custom(np.add, commutative=True)),
    ),
    "slots": (
        lambda g: g.reduce_scatter([[np.ones(2), np.ones(2)], np.ones(2), np.ones(2)]),
        lambda g: g.reduce_scatter([np.ones(2), [np.ones(2), np.ones(2)], np.ones(2)]),
    ),
}


@pytest.mark.parametrize("what", sorted(CALLS))
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_mismatch_is_an_error_on_all(run, groups, everyone, what, odd):
    usual, other = CALLS[what]

    async def main():
        async with groups(3) as ranks:
            works = [other(g) if g.rank == odd else usual(g) for g in ranks]
            await asyncio.wait(works)
            for rank, work in enumerate(works):
                error = work.exception()
                assert isinstance(error, aiodist.MismatchError), (rank, error)
                assert odd in error.calls
                assert len(set(error.calls.values())) == 2
                assert f"\n  rank {odd} " in str(error)
            assert await everyone(ranks, lambda g: g.all_reduce(g.rank)) == [3, 3, 3]

    run(main())


@pytest.mark.parametrize("name", ["MINLOC", "MAXLOC"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [1, LARGE])
def test_where_the_least_and_the_greatest_are(run, groups, everyone, name, size, length):
    torch = pytest.importorskip("torch")
    op = getattr(ReduceOp, name)
    find, locate = (np.min, np.argmin) if name == "MINLOC" else (np.max, np.argmax)

    async def main():
        async with groups(size) as ranks:
            values = [(np.arange(length) * (rank + 2)) % 5 / 1.0 for rank in range(size)]
            expected = np.stack([find(values, axis=0), locate(values, axis=0)])
            pairs = [np.stack([own, np.full(length, float(r))]) for r, own in enumerate(values)]
            tensors = [torch.from_numpy(pair.copy()) for pair in pairs]
            for given in (pairs, tensors):
                results = await everyone(
                    ranks, lambda g, given=given: g.all_reduce(given[g.rank], op)
                )
                assert all(np.array_equal(result, expected) for result in results)
            one = np.array([1.0 * size, 7.0])
            own = [one + np.array([rank % 2, rank]) for rank in range(size)]
            best = await everyone(ranks, lambda g: g.all_reduce(own[g.rank], op))
            assert best[0][1] == (7.0 if name == "MINLOC" else 8.0)

    run(main())


def test_locations_of_what_is_no_number_and_of_what_has_none(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            nan = np.array([np.nan, 5.0])
            for first in (nan, np.array([1.0, 4.0])):
                second = np.array([2.0, 3.0]) if first is nan else nan
                for op in (ReduceOp.MINLOC, ReduceOp.MAXLOC):
                    given = [first.copy(), second.copy()]
                    got = await everyone(
                        ranks, lambda g, x=given, op=op: g.all_reduce(x[g.rank], op)
                    )
                    assert [result[1] for result in got] == [5.0, 5.0]

    run(main())


@pytest.mark.parametrize("op", [ReduceOp.MINLOC, ReduceOp.MAXLOC])
@pytest.mark.parametrize("x", [np.zeros(3), np.zeros(()), np.float64(0), 0.0, 0], ids=repr)
def test_what_has_no_locations(run, groups, op, x):
    async def main():
        async with groups(2) as ranks:
            works = [group.all_reduce(x, op) for group in ranks]
            errors = await asyncio.gather(*works, return_exceptions=True)
            text = f"values and their locations, not of shape {np.shape(x)}"
            assert any(isinstance(error, ValueError) for error in errors)
            assert all(text in str(error) for error in errors)

    run(main())


@pytest.mark.parametrize("length", [SMALL, LARGE])
@pytest.mark.parametrize(
    "op", [ReduceOp.SUM, ReduceOp.premul_sum(3), ReduceOp.LAND, ReduceOp.custom(np.add)]
)
def test_the_first_rank_of_an_exscan_keeps_its_elements(run, groups, everyone, op, length):
    """Whichever plan is taken: neither scaled nor made 0 or 1."""

    async def main():
        async with groups(2) as ranks:
            xs = [np.full(length, 2.0) for _ in ranks]
            outs = [np.zeros(length) for _ in ranks]
            first, _ = await everyone(ranks, lambda g: g.exscan(xs[g.rank], op, out=outs[g.rank]))
            assert first is outs[0]
            assert outs[0].tolist() == xs[0].tolist() == [2.0] * length
            first, _ = await everyone(ranks, lambda g: g.exscan(xs[g.rank], op))
            assert first is xs[0]
            assert xs[0].tolist() == [2.0] * length

    run(main())


def test_reduce_goes_to_rank_0(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:
            assert await everyone(ranks, lambda g: g.reduce(g.rank + 1)) == [6, None, None]

    run(main())
