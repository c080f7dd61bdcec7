"""Prepared reductions of several arrays, and into others, give what the ordinary way gives."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from sharing import everyone, sharing

from aiodist import MismatchError, ReduceOp
from aiodist.engine.executor import ALL
from aiodist.prepared import lane_reductions
from aiodist.prepared.lane_express import LaneExpress

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("no_turn_is_due")

LENGTHS = [1, 3, 2500, 5_000, 40_000]
"""Arrays that are reduced whole, in slices, elsewhere each time, and not in one go."""


@pytest.fixture
def inline(monkeypatch):
    """What each prepared call returned that was begun in one go."""
    seen, real = [], LaneExpress._fused

    def bound(express, recipe, area):
        run = real(express, recipe, area)

        def counted(given):
            seen.append(run(given))
            return seen[-1]

        recipe.tapes = (None, None)  # the compiled part would not call this function
        recipe.at_once[area] = counted
        return counted

    monkeypatch.setattr(LaneExpress, "_fused", bound)
    return seen


def as_numbers(values):
    return [np.array(value.tolist()) for value in values]


CALLS = {
    "all_reduce": lambda g, xs, outs, tag: g.all_reduce(xs[0], out=outs[0], tag=tag),
    "all_reduce of a list": lambda g, xs, outs, tag: g.all_reduce(xs, tag=tag),
    "all_reduce of a list to another": lambda g, xs, outs, tag: g.all_reduce(
        xs, ReduceOp.MAX, out=outs, tag=tag
    ),
    "reduce": lambda g, xs, outs, tag: g.reduce(
        xs[0], 1, out=outs[0] if g.rank == 1 else None, tag=tag
    ),
    "reduce of a list": lambda g, xs, outs, tag: g.reduce(xs, 1, ReduceOp.AVG, tag=tag),
    "reduce_scatter": lambda g, xs, outs, tag: g.reduce_scatter(
        np.concatenate([xs[0]] * g.size), out=outs[0], tag=tag
    ),
    "reduce_scatter of a list": lambda g, xs, outs, tag: g.reduce_scatter(
        [xs[0]] * g.size, out=outs[0], tag=tag
    ),
    "reduce_scatter to a new array": lambda g, xs, outs, tag: g.reduce_scatter(xs[0], tag=tag),
    "scan": lambda g, xs, outs, tag: g.scan(xs[0], ReduceOp.PRODUCT, out=outs[0], tag=tag),
    "scan of a list": lambda g, xs, outs, tag: g.scan(xs, tag=tag),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sample(30)
def test_the_same_as_the_ordinary_way(run, inline, name, size, length):
    start = CALLS[name]
    if name == "reduce_scatter to a new array" and length < size:
        length = size

    async def calls(ranks, number, tag):
        values = np.random.default_rng(number).uniform(-3, 3, (size, 2, length))
        xs = [[values[rank, 0].copy(), values[rank, 1].copy()] for rank in range(size)]
        outs = [[np.zeros(length), np.zeros(length)] for _ in range(size)]
        results = await everyone(ranks, lambda g: start(g, xs[g.rank], outs[g.rank], tag))
        for rank, result in enumerate(results):
            if name.startswith("all_reduce"):
                given = outs if name in ("all_reduce", "all_reduce of a list to another") else xs
                assert result is (given[rank] if isinstance(result, list) else given[rank][0])
        shown = [
            [each.tobytes() for each in (result if isinstance(result, list) else [result])]
            if result is not None
            else None
            for result in results
        ]
        return shown, [
            [each.tobytes() for each in (*x, *out)] for x, out in zip(xs, outs, strict=True)
        ]

    async def main():
        async with sharing(size) as ranks:
            for number in range(4):
                due = await calls(ranks, number, f"tag {number}")
                assert await calls(ranks, number, None) == due

    run(main())
    if length < 5_000:
        assert ALL in inline


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "reduce_scatter to a new array"])
def test_small_ones_to_another_array_are_done_at_once(run, monkeypatch, name):
    """The shortest plan is one function, so `in_steps` is not needed."""
    monkeypatch.setattr(lane_reductions, "in_steps", None)

    async def main():
        async with sharing(3) as ranks:
            for number in range(4):
                xs = [np.arange(6.0) + number + group.rank for group in ranks]
                outs = [np.zeros(6) for _ in ranks]
                results = await everyone(
                    ranks,
                    lambda g, xs=xs, outs=outs: CALLS[name](g, [xs[g.rank]], [outs[g.rank]], None),
                )
                total = sum(xs)
                for rank, result in enumerate(results):
                    is_part = name.endswith("new array")
                    assert (result == (total[2 * rank : 2 * rank + 2] if is_part else total)).all()

    run(main())


def test_tensors_are_marked(run, inline):
    async def main():
        async with sharing(2) as ranks:
            outs = [torch.zeros(2) for _ in ranks]
            lists = [[torch.ones(2), torch.ones(3)] for _ in ranks]
            for _ in range(4):
                versions = [x._version for x in (*outs, *lists[0])]
                await everyone(ranks, lambda g: g.all_reduce(torch.ones(2), out=outs[g.rank]))
                await everyone(ranks, lambda g: g.all_reduce(lists[g.rank], ReduceOp.MAX))
                now = [x._version for x in (*outs, *lists[0])]
                assert all(a > b for a, b in zip(now, versions, strict=True))
                assert outs[0].tolist() == [2, 2]

    run(main())
    assert ALL in inline


def test_arrays_that_share_memory(run, inline):
    """Input that would be overwritten is copied first, and two results in one place are refused."""

    async def main():
        async with sharing(2) as ranks:
            for apart in (True, False):
                for _ in range(4):
                    memory = [np.arange(6.0) for _ in ranks]
                    xs = [whole[:3] for whole in memory]
                    outs = [whole[3:] if apart else whole[1:4] for whole in memory]
                    works = [g.all_reduce(xs[g.rank], out=outs[g.rank]) for g in ranks]
                    await asyncio.gather(*works)
                    assert all((out == [0, 2, 4]).all() for out in outs)
            x = [np.ones(3) for _ in ranks]
            for _ in range(3):
                await everyone(ranks, lambda g: g.all_reduce([np.ones(3), x[g.rank]]))
            for g in ranks:
                with pytest.raises(ValueError, match="share memory"):
                    g.all_reduce([x[g.rank], x[g.rank]])

    run(main())
    assert ALL in inline


def test_another_dtype_on_one_rank(run, inline):
    async def main():
        async with sharing(2) as ranks:
            for call in (
                lambda g, x: g.all_reduce(x, out=x.copy()),
                lambda g, x: g.all_reduce([x, x.copy()]),
                lambda g, x: g.reduce_scatter(x, out=x[:1].copy()),
            ):
                for _ in range(3):
                    await everyone(ranks, lambda g, call=call: call(g, np.ones(2)))
                works = [call(g, np.ones(2, np.float32 if g.rank else float)) for g in ranks]
                for rank, result in enumerate(await asyncio.gather(*works, return_exceptions=True)):
                    assert isinstance(result, MismatchError)
                    assert "float32" in str(result) or "float32" in str(result.calls), rank

    run(main())
    assert ALL in inline
