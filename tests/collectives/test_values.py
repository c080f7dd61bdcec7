"""Collectives that move values: every kind of value, over every transport and group size."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.collectives import exchange
from aiodist.prepared import exchanged

pytestmark = pytest.mark.strength(2)

SIZES = [1, 2, 3, 5]
LARGE = 70_001  # elements of 8 bytes: over two frames

NUMPY_DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def tree(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "tuple": (None, True, -(2**80), 1.5, 2j),
        7: [b"raw", "text", []],
        "small": np.arange(rank, dtype=np.int16),
        "large": np.full(LARGE, rank, dtype=np.float64),
        "scalar": np.float32(rank),
    }


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
    else:
        assert got == expected


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(run, groups, everyone, size):
    async def main():
        async with groups(size) as ranks:
            for results in await everyone(ranks, lambda g: g.all_gather(tree(g.rank))):
                assert_same(results, [tree(rank) for rank in range(size)])
            # Shapes and kinds may differ.
            for results in await everyone(
                ranks, lambda g: g.all_gather(np.zeros((g.rank, 2)) if g.rank % 2 else g.rank)
            ):
                for rank, value in enumerate(results):
                    assert_same(value, np.zeros((rank, 2)) if rank % 2 else rank)

    run(main())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [3, LARGE])
def test_all_gather_into(run, groups, everyone, size, length):
    async def main():
        async with groups(size) as ranks:
            expected = [np.full(length, rank, np.float64) for rank in range(size)]
            outs = [np.empty((size, length)) for _ in range(size)]
            await everyone(ranks, lambda g: g.all_gather(expected[g.rank], out=outs[g.rank]))
            for out in outs:
                np.testing.assert_array_equal(out, np.stack(expected))
            flat = [np.empty(size * length) for _ in range(size)]
            await everyone(ranks, lambda g: g.all_gather(expected[g.rank], out=flat[g.rank]))
            for out in flat:
                np.testing.assert_array_equal(out, np.concatenate(expected))
            lists = [[np.empty(length) for _ in range(size)] for _ in range(size)]
            results = await everyone(
                ranks, lambda g: g.all_gather(expected[g.rank], out=lists[g.rank])
            )
            for out, result in zip(lists, results, strict=True):
                assert result is out
                assert_same(out, expected)

    run(main())


@pytest.mark.parametrize("op", ["all_gather", "gather", "all_to_all"])
@pytest.mark.parametrize("length", [3, LARGE])
@pytest.mark.parametrize("numbers", [False, True])
def test_a_slot_without_a_place_loses_no_value(run, groups, everyone, op, length, numbers):
    """Rank 0 has no place in `out`, and the number of rank 1 cannot be written there."""

    def value(rank):
        x = np.full(length, rank, np.float64)
        return {"x": x, "n": rank} if numbers else x

    async def main():
        async with groups(3) as ranks:
            expected = [value(rank) for rank in range(3)]
            places = [np.empty(length) for _ in ranks]
            slots = [{"x": place, "n": -1} for place in places] if numbers else places

            def start(group):
                x = value(group.rank)
                out = None if op == "gather" and group.rank else [None, slots[group.rank], x]
                return getattr(group, op)([x] * 3 if op == "all_to_all" else x, out=out)

            for _ in range(3):  # the later calls may be prepared
                for rank, result in enumerate(await everyone(ranks, start)):
                    if op == "gather" and rank:
                        assert result is None
                        continue
                    assert_same(result, expected)
                    got = result[1]["x"] if numbers else result[1]
                    assert got is places[rank]

    run(main())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [1, LARGE])
@pytest.mark.parametrize("row", [(), (3,)])
def test_values_of_many_sizes_into_one_array(run, groups, everyone, size, length, row):
    async def main():
        async with groups(size) as ranks:
            parts = [np.full((length * (rank % 3), *row), rank, np.float32) for rank in range(size)]
            wanted = np.concatenate(parts)
            outs = [np.full_like(wanted, -1) for _ in range(size)]
            await everyone(ranks, lambda g: g.all_gather(parts[g.rank], out=outs[g.rank]))
            for out in outs:
                np.testing.assert_array_equal(out, wanted)
            last = size - 1
            out = np.full_like(wanted, -1)
            await everyone(
                ranks,
                lambda g: g.gather(parts[g.rank], last, out=out if g.rank == last else None),
            )
            np.testing.assert_array_equal(out, wanted)
            outs = [
                np.empty((length * (rank % 3) * size, *row), np.float32) for rank in range(size)
            ]
            await everyone(ranks, lambda g: g.all_to_all(parts, out=outs[g.rank]))
            for rank, out in enumerate(outs):
                np.testing.assert_array_equal(out, np.concatenate([parts[rank]] * size))

    run(main())


@pytest.mark.parametrize(
    ("rows", "dtype", "text"),
    [
        (4, np.float32, "rank [01] sent what does not fit out"),
        (5, np.float32, r"one after the other, and have 4, 8 bytes"),
        (3, np.int32, "float32"),
    ],
)
def test_one_array_that_does_not_fit_all(run, groups, everyone, rows, dtype, text):
    async def main():
        async with groups(2) as ranks:
            works = [
                g.all_gather(np.ones(g.rank + 1, np.float32), out=np.empty(rows, dtype))
                for g in ranks
            ]
            for work in works:
                with pytest.raises((ValueError, TypeError, aiodist.AiodistError)):
                    await work
            assert any(re.search(text, str(work.exception())) for work in works)
            for group in ranks:
                with pytest.raises(ValueError, match="first dimension"):
                    group.all_gather(1.0, out=np.empty(()))
                with pytest.raises(ValueError, match="3 slots"):
                    group.all_gather(1.0, out=[None] * 3)
            assert await everyone(ranks, lambda g: g.all_gather(g.rank)) == [[0, 1]] * 2

    run(main())


@pytest.mark.parametrize("size", SIZES)
def test_gather(run, groups, everyone, size):
    async def main():
        async with groups(size) as ranks:
            for dst in range(size):
                results = await everyone(ranks, lambda g, dst=dst: g.gather(tree(g.rank), dst))
                for rank, result in enumerate(results):
                    if rank == dst:
                        assert_same(result, [tree(source) for source in range(size)])
                    else:
                        assert result is None

    run(main())


@pytest.mark.parametrize("size", SIZES)
def test_scatter(run, groups, everyone, size):
    async def main():
        async with groups(size) as ranks:
            for src in range(size):
                slots = [tree(rank) for rank in range(size)]
                results = await everyone(
                    ranks,
                    lambda g, src=src, slots=slots: g.scatter(
                        slots if g.rank == src else None, src
                    ),
                )
                assert_same(results, slots)
            outs = [np.empty(5) for _ in range(size)]
            await everyone(
                ranks,
                lambda g: g.scatter(
                    None if g.rank else [np.full(5, slot, float) for slot in range(size)],
                    out=outs[g.rank],
                ),
            )
            assert_same(outs, [np.full(5, slot, float) for slot in range(size)])

    run(main())


@pytest.mark.parametrize("size", SIZES)
def test_broadcast(run, groups, everyone, size):
    async def main():
        async with groups(size) as ranks:
            for src in range(size):
                results = await everyone(
                    ranks, lambda g, src=src: g.broadcast(tree(9) if g.rank == src else None, src)
                )
                assert_same(results, [tree(9)] * size)
            # In place, and None as a value.
            arrays = [np.full(LARGE, g.rank, np.float32) for g in ranks]
            results = await everyone(ranks, lambda g: g.broadcast(arrays[g.rank], size - 1))
            for array, result in zip(arrays, results, strict=True):
                assert result is array
                assert (array == size - 1).all()
            assert await everyone(ranks, lambda g: g.broadcast(None)) == [None] * size
            for _ in range(3):  # later calls may take a shorter way
                for number in (float, np.float64):
                    results = await everyone(
                        ranks, lambda g, number=number: g.broadcast([number(g.rank), g.rank])
                    )
                    assert_same(results, [[number(0), 0]] * size)

    run(main())


def test_a_broadcast_into_what_does_not_fit(run, groups):
    """The error names `x`, because `broadcast` has no `out`."""

    async def main():
        async with groups(2) as (one, two):
            for x, part in ((np.ones(3), "x"), ([np.ones(3), 5], r"x\[0\]")):
                into = np.ones(4) if part == "x" else [np.ones(4), 5]
                works = [one.broadcast(x), two.broadcast(into)]
                for error in await asyncio.gather(*works, return_exceptions=True):
                    assert isinstance(error, aiodist.MismatchError)
                    words = rf"not fit x of rank 1: {part}: is float64\[4\], the incoming array"
                    assert re.search(words, error.message)

    run(main())


@pytest.mark.strength(1)  # thousands of arrays take their time
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.sample(2)
def test_broadcast_of_many_arrays(run, groups, everyone, size):
    """The metadata alone is larger than a frame."""

    async def main():
        value = [np.full(3, index, np.int16) for index in range(8_000)]
        async with groups(size) as ranks:
            results = await everyone(ranks, lambda g: g.broadcast(None if g.rank else value))
            for result in results:
                assert_same(result, value)
            gathered = await everyone(ranks, lambda g: g.all_gather(value[: 4_000 * (g.rank % 3)]))
            for result in gathered:
                for rank, part in enumerate(result):
                    assert_same(part, value[: 4_000 * (rank % 3)])

    run(main())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 4, LARGE])
def test_all_to_all(run, groups, everyone, size, length):
    async def main():
        async with groups(size) as ranks:
            results = await everyone(
                ranks,
                lambda g: g.all_to_all(
                    [np.full(length + slot, g.rank * 100 + slot) for slot in range(size)]
                ),
            )
            for rank, result in enumerate(results):
                assert_same(
                    result, [np.full(length + rank, src * 100 + rank) for src in range(size)]
                )

    run(main())


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_of_many_ranks(run, groups, everyone, monkeypatch, size):
    """Where there are so many that offers travel apart."""
    monkeypatch.setattr(exchange, "MAX_RANKS_IN_SMALL_AREA", 0)
    monkeypatch.setattr(exchanged, "MANY", 0)  # these are prepared for fewer ranks only

    async def main():
        async with groups(size) as ranks:
            results = await everyone(
                ranks,
                lambda g: g.all_to_all([[np.full(i, g.rank), g.rank, i] for i in range(size)]),
            )
            for rank, result in enumerate(results):
                assert_same(result, [[np.full(rank, src), src, rank] for src in range(size)])

    run(main())


KINDS = {
    "one": lambda src, dst: np.full(500, 100 * src + dst),
    "none on any": lambda src, dst: np.full(500 + src + dst, 100 * src + dst),
    "another of one rank": lambda src, dst: np.full(500, 100 * src + dst, "if"[src == 1]),
    "some of one rank": lambda src, dst: np.full(500 + dst % 2 * (src == 1), 100 * src + dst),
    "no data": lambda src, dst: np.full(0, 100 * src + dst),
    "texts": lambda src, dst: f"{src} to {dst}",
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("apart", [False, True], ids=["few", "many"])
def test_all_to_all_of_kinds(run, groups, everyone, monkeypatch, kind, apart):
    """Where all messages are of one kind that is said once, for all."""
    if apart:
        monkeypatch.setattr(exchange, "MAX_RANKS_IN_SMALL_AREA", 0)
        monkeypatch.setattr(exchanged, "MANY", 0)  # these are prepared for fewer ranks only
    monkeypatch.setattr(exchange, "ROOM", 4096)

    async def main():
        async with groups(3) as ranks:
            for _ in range(2):
                results = await everyone(
                    ranks, lambda g: g.all_to_all([kind(g.rank, dst) for dst in range(3)])
                )
                for rank, result in enumerate(results):
                    assert_same(result, [kind(src, rank) for src in range(3)])

    run(main())


@pytest.mark.parametrize("apart", [False, True], ids=["few", "many"])
def test_all_to_all_of_one_kind_that_does_not_fit(run, groups, monkeypatch, apart):
    """One rank has no place for it: then no rank has a result."""
    if apart:
        monkeypatch.setattr(exchange, "MAX_RANKS_IN_SMALL_AREA", 0)
        monkeypatch.setattr(exchanged, "MANY", 0)  # these are prepared for fewer ranks only
    monkeypatch.setattr(exchange, "ROOM", 1024)

    async def main():
        async with groups(3) as ranks:
            works = []
            for group in ranks:
                out = [np.empty(500 + (group.rank == 1)) for _ in ranks]
                works.append(group.all_to_all([np.ones(500)] * 3, out=out))
            for outcome in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(outcome, aiodist.MismatchError)
                assert "float64[501]" in str(outcome)

    run(main())


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.sample(29)
def test_every_dtype_travels(run, groups, everyone, dtype):
    async def main():
        async with groups(2) as ranks:
            for shape in ((), (0,), (3,), (2, 3), (LARGE,)):
                results = await everyone(
                    ranks, lambda g, shape=shape: g.all_gather(np.full(shape, g.rank, dtype))
                )
                for result in results:
                    for rank, array in enumerate(result):
                        assert array.dtype == dtype
                        np.testing.assert_array_equal(array, np.full(shape, rank, dtype))

    run(main())


def test_torch_tensors(run, groups, everyone):
    torch = pytest.importorskip("torch")
    dtypes = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.complex64]

    async def main():
        async with groups(3) as ranks:
            for dtype in [*dtypes, torch.bool]:
                tensor = torch.arange(6).reshape(2, 3).T.to(dtype)
                results = await everyone(
                    ranks, lambda g, tensor=tensor: g.broadcast(tensor if g.rank == 1 else None, 1)
                )
                for result in results:
                    assert result.dtype == dtype
                    assert torch.equal(result.to(torch.complex64), tensor.to(torch.complex64))
            target = torch.zeros(LARGE)
            version = target._version
            await everyone(ranks, lambda g: g.broadcast(torch.ones(LARGE) if g.rank else target, 1))
            assert torch.equal(target, torch.ones(LARGE))
            assert target._version > version

    run(main())


def test_what_does_not_fit_is_a_mismatch(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:
            works = [
                group.broadcast(np.ones(4) if group.rank == 0 else np.ones(4 + group.rank % 2))
                for group in ranks
            ]
            # In its own words, or in those of a rank that came to the end of it sooner.
            with pytest.raises(aiodist.MismatchError, match=r"rank 0 (sent| )") as caught:
                await works[1]
            assert set(caught.value.calls) == {0, 1}
            for work in (works[0], works[2]):
                # Whoever was through before has its result; nobody hangs.
                try:
                    await work
                except aiodist.MismatchError as error:
                    assert 1 in error.calls
            # The group stays usable.
            assert await everyone(ranks, lambda g: g.all_gather(g.rank)) == [[0, 1, 2]] * 3

    run(main())


def test_bad_arguments_start_nothing(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            for group in ranks:
                with pytest.raises(
                    ValueError, match=r"src=2 is not a rank.*: its ranks are 0 to 1$"
                ):
                    group.broadcast(1, 2)
                with pytest.raises(TypeError, match=r"\['a'\]"):
                    group.broadcast({"a": {1, 2}}, group.rank)
                with pytest.raises(ValueError, match="takes 2 values"):
                    group.scatter([1, 2, 3], group.rank)
                with pytest.raises(TypeError, match=r"takes a list of 2 .*: pass list\(xs\)$"):
                    group.scatter(np.ones((2, 3)), group.rank)
                with pytest.raises(TypeError, match=r"takes a list of 2 .*: pass list\(xs\)$"):
                    group.all_to_all(np.ones((2, 3)))
                with pytest.raises(TypeError, match=r"not range: pass list\(xs\)$"):
                    group.scatter(range(2), group.rank)
                with pytest.raises(TypeError, match=r"^Group\.all_gather\(\) missing 1 .* 'x'$"):
                    group.all_gather()
                with pytest.raises(TypeError, match=r"^Group\.send\(\) missing 1 .* 'dst'$"):
                    group.send(1)
                with pytest.raises(ValueError, match="timeout"):
                    group.barrier(timeout=0)
                with pytest.raises(ValueError, match="pass None here"):
                    group.scatter([1, 2], 1 - group.rank)
            with pytest.raises(TypeError, match="tag"):
                ranks[0].barrier(tag=True)
            with pytest.raises(ValueError, match="tag"):
                ranks[0].barrier(tag="x" * 2000)
            await everyone(ranks, lambda g: g.barrier())

    run(main())


def test_too_large_is_refused(run, groups, everyone):
    async def main():
        async with groups(2, max_message_bytes=1000) as ranks:
            works = [g.all_gather(np.zeros(10 if g.rank else 1000)) for g in ranks]
            with pytest.raises(aiodist.MessageTooLargeError, match="max_message_bytes"):
                await works[1]
            # What rank 0 gets is small: it may be through before rank 1 gives up.
            await asyncio.wait([works[0]])
            assert works[0].exception() is None or works[0].exception().rank == 1
            assert await everyone(ranks, lambda g: g.all_gather(g.rank)) == [[0, 1]] * 2

    run(main())


@pytest.mark.parametrize("tag", [None, "a"])
@pytest.mark.parametrize("count", [32, 33, 65, 300])
def test_many_arrays_and_numbers(run, groups, everyone, count, tag):
    """In one value, around the most that the compiled part knows."""

    def arrays(rank):
        return [np.full(3, float(rank + at)) for at in range(count)]

    def numbers(rank):
        return {f"of {at}": rank + at / 7 for at in range(count)}

    async def main():
        async with groups(2) as ranks:
            for _ in range(8):  # the first ones are not prepared
                for results in await everyone(
                    ranks, lambda g: g.all_gather(numbers(g.rank), tag=tag)
                ):
                    assert results == [numbers(0), numbers(1)]
                for results in await everyone(
                    ranks, lambda g: g.all_gather(arrays(g.rank), tag=tag)
                ):
                    assert_same(results, [arrays(0), arrays(1)])
                x = {0: arrays(5)}
                for result in await everyone(
                    ranks, lambda g, x=x: g.broadcast(x.get(g.rank), tag=tag)
                ):
                    assert_same(result, arrays(5))
                places = [arrays(7), arrays(0)]
                await everyone(ranks, lambda g, to=places: g.broadcast(to[g.rank], tag=tag))
                assert_same(places, [arrays(7), arrays(7)])
                for result in await everyone(
                    ranks, lambda g: g.all_reduce(arrays(g.rank), tag=tag)
                ):
                    assert_same(result, [a + b for a, b in zip(arrays(0), arrays(1), strict=True)])

    run(main())
