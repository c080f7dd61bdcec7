"""Arrays that lie in parts on some ranks, brought to where other parts of them are wanted."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from aiodist import CollectiveAbortedError, MismatchError, Shard
from aiodist.schedules.cuts import even_bounds

pytestmark = pytest.mark.strength(2)

X = np.arange(7 * 10, dtype=np.float32).reshape(7, 10)
LARGE = np.arange(300 * 400, dtype=np.float64).reshape(300, 400)


def parts(x: Any, size: int, dim: int) -> list[Shard]:
    """`x` cut along a dimension, one part a rank."""
    whole = (slice(None),)
    found = []
    for start, stop in pairwise(even_bounds(x.shape[dim], size)):
        index = (*whole * dim, slice(start, stop))
        found.append(Shard(x[index], index, x.shape))
    return found


def emptied(part: Shard) -> Shard:
    like = part.array
    empty = torch.zeros_like(like) if isinstance(like, torch.Tensor) else np.zeros_like(like)
    return Shard(empty, part.index, part.shape)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("x", [X, LARGE, torch.arange(60).reshape(6, 10).to(torch.bfloat16)])
async def test_rows_become_columns(groups, everyone, size, x):
    rows, columns = parts(x, size, 0), [emptied(part) for part in parts(x, size, 1)]
    async with groups(size) as ranks:
        results = await everyone(ranks, lambda g: g.reshard(rows[g.rank], columns[g.rank]))
    for result, column, expected in zip(results, columns, parts(x, size, 1), strict=True):
        assert result is column
        assert bool((result.array == expected.array).all())


async def test_a_tree_of_some_ranks_goes_to_others(groups, everyone):
    """Two ranks hold a model, in parts and as replicas; the other two want it, whole."""
    rows, bias = parts(X, 2, 0), np.arange(3.0)
    wanted = [{"w": [np.zeros_like(X)], "b": np.zeros(3)} for _ in range(2)]

    def start(group: Any) -> Any:
        if group.rank < 2:
            return group.reshard({"w": [rows[group.rank]], "b": bias, "unasked": X}, None)
        return group.reshard(None, wanted[group.rank - 2])

    async with groups(4) as ranks:
        results = await everyone(ranks, start)
    assert results[:2] == [None, None]
    for result in results[2:]:
        np.testing.assert_array_equal(result["w"][0], X)
        np.testing.assert_array_equal(result["b"], bias)


async def test_what_crosses_is_what_is_lacking(groups, everyone):
    """A rank copies what it holds itself; of the rest, nothing comes twice."""
    x = LARGE[:, :300].copy()
    rows, columns = parts(x, 3, 0), [emptied(part) for part in parts(x, 3, 1)]
    async with groups(3) as ranks:
        await everyone(ranks, lambda g: g.barrier())
        before = [group.bytes_moved for group in ranks]
        await everyone(ranks, lambda g: g.reshard(rows[g.rank], columns[g.rank]))
        lane = ranks[0]._context.lane
        if lane is None:  # what goes through shared memory counts for no link
            for (sent, came), group in zip(before, ranks, strict=True):
                lacking = 2 * 100 * 100 * 8
                assert lacking <= group.bytes_moved[0] - sent < lacking + 8000
                assert lacking <= group.bytes_moved[1] - came < lacking + 8000
    for column, expected in zip(columns, parts(x, 3, 1), strict=True):
        np.testing.assert_array_equal(column.array, expected.array)


async def test_what_stays_may_be_the_same_memory(groups, everyone):
    rows = parts(X.copy(), 2, 0)
    async with groups(2) as ranks:
        results = await everyone(ranks, lambda g: g.reshard(rows[g.rank], rows[g.rank]))
    np.testing.assert_array_equal(np.concatenate([part.array for part in results]), X)


@pytest.mark.parametrize("dim", [0, 1])
async def test_parts_may_lie_between_each_other(groups, everyone, dim):
    """The parts that a rank holds and wants are halves of one matrix, and share no memory."""
    whole = X[:6].copy()
    held = parts(whole, 2, dim)
    matrices = [np.concatenate([part.array, np.zeros_like(part.array)], 1) for part in held]
    middle = held[0].array.shape[1]

    def start(group: Any) -> Any:
        matrix, (own, other) = matrices[group.rank], (held[group.rank], held[1 - group.rank])
        x = Shard(matrix[:, :middle], own.index, own.shape)
        return group.reshard(x, Shard(matrix[:, middle:], other.index, other.shape))

    async with groups(2) as ranks:
        results = await everyone(ranks, start)
    for result, other in zip(results, reversed(held), strict=True):
        np.testing.assert_array_equal(result.array, other.array)


async def test_one_array_may_be_wanted_twice(groups, everyone):
    """As tied weights are: the same values come for both."""
    outs = [np.zeros_like(X) for _ in range(2)]
    async with groups(2) as ranks:
        await everyone(
            ranks, lambda g: g.reshard({"a": X, "b": X}, dict.fromkeys("ab", outs[g.rank]))
        )
    np.testing.assert_array_equal(outs, [X, X])


async def test_memoryviews_and_scalars_are_moved(groups, everyone):
    held = {"view": memoryview(np.arange(4.0)), "scalar": np.float64(6.0)}

    def start(group: Any) -> Any:
        half = slice(2 * group.rank, 2 * group.rank + 2)
        wanted = {"view": Shard(memoryview(np.empty(2)), half, 4), "scalar": np.empty(())}
        return group.reshard(held if group.rank == 0 else None, wanted)

    async with groups(2) as ranks:
        results = await everyone(ranks, start)
    for result, expected in zip(results, ([0, 1], [2, 3]), strict=True):
        assert (result["view"].array.tolist(), result["scalar"]) == (expected, 6)


async def errors_of(everyone: Any, ranks: Any, start: Any, kind: type[Exception]) -> list[Any]:
    async def failing(group: Any) -> Exception:
        with pytest.raises(kind) as caught:
            await start(group)
        return caught.value

    found = await everyone(ranks, failing)
    # The next calls match each other.
    await everyone(ranks, lambda g: g.barrier())
    return list(found)


async def test_what_nobody_holds_is_a_mismatch_on_all_ranks(groups, everyone):
    rows, outs = parts(X, 4, 0), [np.zeros_like(X) for _ in range(3)]

    def start(group: Any) -> Any:
        return group.reshard({"w": rows[group.rank]}, {"w": outs[group.rank]})

    async with groups(3) as ranks:
        for error in await errors_of(everyone, ranks, start, MismatchError):
            assert "no rank holds out['w'][6:7, 0:10]" in str(error)
            for rank, held in enumerate(["0:2", "2:4", "4:6"]):
                assert error.calls[rank].endswith(
                    f"reshard(x['w']=[{held}, 0:10] of float32[7, 10], "
                    "out['w']=[0:7, 0:10] of float32[7, 10])"
                )
    assert not any(out.any() for out in outs)


@pytest.mark.parametrize("other", [X.astype(np.float64), X[:6]])
async def test_ranks_that_do_not_agree_are_told(groups, everyone, other):
    """Parts of ranks differ, but only what is wrong is marked."""
    held, outs = parts(X, 2, 0), [np.zeros_like(X), np.zeros_like(other)]
    async with groups(2) as ranks:
        found = await errors_of(
            everyone, ranks, lambda g: g.reshard(held[g.rank], outs[g.rank]), MismatchError
        )
    for error in found:
        assert error.calls[0] == "reshard(x=float32[7, 10], out=float32[7, 10])"
        assert error.calls[1] == f"reshard(x=float32[7, 10], out={other.dtype}{[*other.shape]})"
        assert str(error).count("^") == len("7" if other.dtype == X.dtype else "float32")
    assert not any(out.any() for out in outs)


async def test_arguments_that_make_no_sense_on_one_rank(groups, everyone):
    x = X.copy()
    column = Shard(x[:, :5], (slice(None), slice(0, 5)), x.shape)
    frozen = X.copy()
    frozen.flags.writeable = False
    memory = np.zeros(11)
    shifted = memory[:10], memory[1:]
    loop: list[Any] = []
    loop.append(loop)
    bad = [
        (TypeError, lambda g: g.reshard({"w": "text"}, None), r"x\['w'\]: an array"),
        (ValueError, lambda g: g.reshard(x, column), "out shares memory with x"),
        (ValueError, lambda g: g.reshard(*shifted), "out shares memory with x"),
        (ValueError, lambda g: g.reshard(x, x.view(">f4")), "out shares memory with x"),
        (
            ValueError,
            lambda g: g.reshard(None, {"a": [shifted[0]], "b": shifted[1]}),
            r"out\['a'\]\[0\] shares memory with out\['b'\]",
        ),
        (ValueError, lambda g: g.reshard(None, frozen), "out: .* is read-only"),
        (ValueError, lambda g: g.reshard(loop, None), "over 100 levels deep: does it contain"),
    ]
    async with groups(2) as (one, other):
        for kind, start, words in bad:
            work = other.reshard(x, np.zeros_like(X))
            with pytest.raises(kind, match=words):
                start(one)
            with pytest.raises(CollectiveAbortedError) as caught:
                await work
            assert caught.value.rank == 0
        await asyncio.gather(one.barrier(), other.barrier())
