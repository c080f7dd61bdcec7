"""Collectives on an idle lane that have no recipe: their phases run within the call."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from sharing import everyone, sharing
from standin import StandinDevice

import aiodist
from aiodist import MismatchError, ReduceOp
from aiodist.phases.base import Call

pytestmark = pytest.mark.usefixtures("no_turn_is_due")


CALLS = {
    "number": lambda g: g.all_reduce(1.5),
    "numbers": lambda g: g.reduce_scatter([1] * g.size),
    "list": lambda g: g.all_reduce([np.ones(2), np.ones(3)]),
    "out": lambda g: g.all_gather(np.ones(2), out=np.empty((g.size, 2))),
    "tree": lambda g: g.broadcast({"a": np.ones(2), "b": "x"} if g.rank == 0 else None),
    "trees": lambda g: g.all_to_all([[g.rank, dst] for dst in range(g.size)]),
    "scan": lambda g: g.scan(np.ones(2)),
    "new shape": lambda g: g.all_reduce(np.ones(2), out=np.empty(2)),
}


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("name", CALLS)
def test_who_comes_last_is_done_within_the_call(run, name):
    start = CALLS[name]

    async def main():
        async with sharing(2) as ranks:
            first, last = start(ranks[0]), start(ranks[1])
            assert not first.done()
            assert last.done()
            found = [plain(await first), plain(await last)]
        async with aiodist.local(2, transports=("inproc",)) as ranks:
            assert found == [plain(each) for each in await everyone(ranks, start)]

    run(main())


NOTHING = {
    "all_reduce": lambda g, tag: g.all_reduce([], tag=tag),
    "average": lambda g, tag: g.all_reduce([], ReduceOp.AVG, tag=tag),
    "out": lambda g, tag: g.all_reduce([], out=[], tag=tag),
    "reduce": lambda g, tag: g.reduce([], 1, tag=tag),
}


@pytest.mark.parametrize("tag", [None, "t"])
@pytest.mark.parametrize("name", NOTHING)
def test_an_empty_list_is_reduced_over_links_and_holds_up_nobody(run, name, tag):
    """It publishes nothing, so it has to show its entry, or the next call would wait for ever."""

    async def main():
        async with sharing(2) as ranks:
            for _ in range(3):
                found = await everyone(ranks, lambda g: NOTHING[name](g, tag))
                assert found == ([None, []] if name == "reduce" else [[], []])
                assert await everyone(ranks, lambda g: g.all_reduce(1)) == [2, 2]

    run(main())


def test_what_fails_after_its_first_phase(run):
    async def main():
        async with sharing(2) as ranks:
            works = [g.all_gather(np.ones(2 + g.rank), out=np.empty((2, 2))) for g in ranks]
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, MismatchError)
            works = [g.all_reduce(2**62) for g in ranks]
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, OverflowError)
            assert await everyone(ranks, lambda g: g.all_reduce(1)) == [2, 2]

    run(main())


def test_what_waits_for_a_device_goes_on_after_its_first_phase(run):
    async def main():
        device = StandinDevice()
        try:
            async with sharing(2) as ranks:
                for _ in range(2):
                    xs = [device.put(np.full(3, 1.0 + g.rank)) for g in ranks]
                    results = await everyone(ranks, lambda g, xs=xs: g.all_gather(xs[g.rank]))
                    for result in results:
                        assert [device.get(x).tolist() for x in result] == [[1.0] * 3, [2.0] * 3]
        finally:
            device.close()

    run(main())


def test_what_may_call_back_goes_the_ordinary_way(run):
    """An operator of the user, or a pickle, might call the next collective."""

    async def main():
        async with sharing(2) as ranks:
            inner = []

            def add(a, b):
                return a + b

            for op in (add, ReduceOp.custom(add)):
                works = [g.all_reduce(np.ones(2), op) for g in ranks]
                inner += await asyncio.gather(*works)
            assert all((x == 2).all() for x in inner)
            seen = [g._context.express for g in ranks]
            call = object()
            assert all(express.begin(call_of(call), (add,), 1.0) is None for express in seen)
        async with sharing(2, allow_pickle=True) as ranks:
            for group in ranks:
                assert group._context.express.begin(call_of(call), (), 1.0) is None

    def call_of(start):
        return Call("barrier", "barrier()", start, 0)

    run(main())


def test_a_call_that_goes_over_links_though_there_is_a_lane(run):
    """An operator of the user must not see parts of a large array, so no plan in shared memory
    fits."""
    length = 100_000

    async def main():
        async with sharing(2) as ranks:
            op = ReduceOp.custom(lambda a, b: a + b)
            for _ in range(2):
                results = await everyone(ranks, lambda g: g.all_reduce(np.ones(length), op))
                assert all((x == 2).all() for x in results)
                assert await everyone(ranks, lambda g: g.all_reduce(1)) == [2, 2]

    run(main())


def test_what_comes_early_for_a_tag_holds_up_nothing_else(run):
    """Calls without a tag are done within the call, though another rank is ahead with a tag."""

    async def main():
        async with sharing(2) as ranks:
            await everyone(ranks, lambda g: g.all_reduce(np.ones(2)))
            ahead = ranks[0].all_reduce(np.ones(2), tag="a")
            ranks[1]._context.post_express.read()
            assert ranks[1]._context.calls.arrivals.early
            untagged = ranks[0].all_reduce(np.ones(2))
            assert ranks[1].all_reduce(np.ones(2)).done()
            await untagged
            await ranks[1].all_reduce(np.ones(2), tag="a")
            await ahead

    run(main())
