"""Operators of the user that raise, whatever it is, on one rank alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import ReduceOp

pytestmark = pytest.mark.strength(2)

SIZE = 3
LARGE = 40_009

Error = Callable[[], BaseException]

CALLS: dict[str, Any] = {
    "all_reduce": lambda g, x, op: g.all_reduce(x, op),
    "all_reduce out": lambda g, x, op: g.all_reduce(x, op, out=np.empty_like(x)),
    "all_reduce tag": lambda g, x, op: g.all_reduce(x, op, tag="t"),
    "all_reduce list": lambda g, x, op: g.all_reduce([x, x.astype("f4")], op),
    "reduce": lambda g, x, op: g.reduce(x, 1, op),
    "reduce_scatter": lambda g, x, op: g.reduce_scatter(np.tile(x, SIZE), op),
    "scan": lambda g, x, op: g.scan(x, op),
    "exscan": lambda g, x, op: g.exscan(x, op),
}
NUMBERS: dict[str, Any] = {
    "all_reduce": lambda g, op: g.all_reduce(1, op),
    "reduce": lambda g, op: g.reduce(1.0, 1, op),
    "reduce_scatter": lambda g, op: g.reduce_scatter([1] * SIZE, op),
    "scan": lambda g, op: g.scan(1, op),
    "exscan": lambda g, op: g.exscan(1j, op),
}


class Adds:
    """One rank's operator, which raises `error`, if that is any."""

    def __init__(self, error: Error | None, **options: Any) -> None:
        self.error = error
        self.raised = False
        self.op = ReduceOp.custom(self._add, name="adds", **options)

    def _add(self, a: Any, b: Any) -> Any:
        if self.error is not None:
            self.raised = True
            raise self.error()
        return a + b


async def failing(ranks: Any, start: Any, error: Error, **options: Any) -> int:
    """Each rank's operator raises in turn: how many of them were called at all."""
    called = 0
    for bad in range(SIZE):
        adds = [Adds(error if group.rank == bad else None, **options) for group in ranks]
        works = [start(group, adds[group.rank].op) for group in ranks]
        await asyncio.wait(works)
        for work in works:
            assert not work.cancelled()
        errors = [work.exception() for work in works]
        if not adds[bad].raised:
            assert errors == [None] * SIZE
            continue
        called += 1
        name = type(error()).__name__
        assert type(errors[bad]).__name__ == name
        for rank in {*range(SIZE)} - {bad}:
            other = errors[rank]
            assert isinstance(other, aiodist.CollectiveAbortedError)
            assert other.rank == bad
            assert other.reason.startswith(f"the operator raised {name}")
    assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [SIZE] * SIZE
    return called


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("length", [4, LARGE])
@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.sample(17)
def test_it_ends_the_operation_for_all(run, groups, name, length, elementwise):
    async def main():
        async with groups(SIZE) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])

            def start(group, op):
                return CALLS[name](group, np.ones(length), op)

            for commutative in (False, True):
                options = {"elementwise": elementwise, "commutative": commutative}
                assert await failing(ranks, start, ZeroDivisionError, **options)

    run(main())


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_of_numbers(run, groups, name):
    async def main():
        async with groups(SIZE) as ranks:
            assert await failing(ranks, NUMBERS[name], ZeroDivisionError)

    run(main())


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError,
        KeyboardInterrupt,
        SystemExit,
        GeneratorExit,
        partial(aiodist.PeerLostError, "by hand", ranks=[0]),
        partial(aiodist.CollectiveTimeoutError, "by hand", missing=[0]),
        partial(aiodist.ProtocolError, "by hand"),
    ],
    ids=lambda error: type(error()).__name__,
)
@pytest.mark.parametrize("length", [4, LARGE])
def test_whatever_it_raises(run, groups, error, length):
    """What would end the loop, or says something else where aiodist raises it."""

    async def main():
        async with groups(SIZE) as ranks:
            assert await failing(ranks, lambda g, op: g.all_reduce(np.ones(length), op), error)
            assert await failing(ranks, lambda g, op: g.all_reduce(2, op), error)

    run(main())


def test_what_futures_cannot_raise(run, groups):
    def stop(a, b):
        raise StopIteration(7)

    async def main():
        async with groups(2) as ranks:
            for x in (np.ones(3), 1):
                works = [g.all_reduce(x, stop) for g in ranks]
                await asyncio.wait(works)
                kinds = {type(work.exception()) for work in works}
                assert kinds <= {RuntimeError, aiodist.CollectiveAbortedError}
                assert RuntimeError in kinds

    run(main())


@pytest.mark.parametrize("length", [4, LARGE])
def test_a_result_of_another_shape_on_one_rank(run, groups, length):
    async def main():
        async with groups(2) as ranks:
            ops = [
                ReduceOp.custom(function, name="f")
                for function in (lambda a, b: (a + b)[:-1], lambda a, b: a + b)
            ]
            works = [g.all_reduce(np.ones(length), ops[g.rank]) for g in ranks]
            await asyncio.wait(works)
            assert isinstance(works[0].exception(), ValueError)
            other = works[1].exception()
            assert isinstance(other, aiodist.CollectiveAbortedError)
            assert other.rank == 0

    run(main())


def test_nobody_is_done_before_all_calls_are(run, groups):
    """An operator of one rank that looks whether others are done already."""

    async def main():
        async with groups(SIZE) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            for length in (1, LARGE):
                works: list[Any] = []
                done = []

                def add(a, b, works=works, done=done):
                    done.extend(work for work in works if work.done())
                    return a + b

                arrays = [np.ones(length) for _ in ranks]
                works.extend(g.all_reduce(arrays[g.rank], add) for g in ranks)
                await asyncio.gather(*works)
                assert not done

    run(main())


@pytest.mark.parametrize("function", [max, min])
async def test_builtins_for_numbers_say_what_is_for_arrays(function: Any) -> None:
    async with aiodist.local(2) as groups:
        works = [group.all_reduce(np.arange(2) + group.rank, function) for group in groups]
        await asyncio.wait(works)
        [error] = [e for work in works if isinstance(e := work.exception(), ValueError)]
        hint = f"for arrays, use aiodist.ReduceOp.{function.__name__.upper()}"
        assert error.__notes__ == [hint]
        works = [group.all_reduce(group.rank, function) for group in groups]
        assert await asyncio.gather(*works) == [function(0, 1)] * 2
