"""Prepared collectives of groups that span hosts, beside ordinary ones. Hosts are names alone."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import mmap

import numpy as np
import pytest
import torch
from over_links import exchanging_lengths, nothing_is_left, until
from sharing import unmapping_all

from aiodist import (
    CollectiveAbortedError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    ReduceOp,
)
from aiodist.prepared import kinds
from aiodist.prepared.multihost_express import MultihostExpress
from aiodist.schedules.plan import TMP
from aiodist.shared_memory.board import LANE

pytestmark = [pytest.mark.strength(2), pytest.mark.usefixtures("no_turn_is_due")]

LAYOUTS = ["abab", "abbb", "aabbbc"]
layouts = pytest.mark.parametrize("layout", LAYOUTS)

WIDE = ["a word"] * (kinds.WIDE + 1)
"""Wider than the values that are prepared by what they are."""


def scattered(group, x):
    return group.scatter([x + r for r in range(group.size)] if group.rank == 1 else None, 1)


def gathered(group, x):
    return group.all_gather(x, out=np.zeros((group.size, *x.shape), x.dtype))


def taken(group, x, root):
    return group.broadcast(x if group.rank == root else np.zeros_like(x), root)


def in_place(group, x, root):
    return group.reduce(x.copy(), root)


OPERATIONS = {
    "all_reduce": lambda g, x, root: g.all_reduce(x.copy()),
    "reduce": in_place,
    "broadcast": lambda g, x, root: g.broadcast(x if g.rank == root else None, root),
    "broadcast in place": taken,
    "broadcast of words": lambda g, x, root: g.broadcast(WIDE if g.rank == root else None, root),
    "all_gather": lambda g, x, root: g.all_gather(x * g.rank),
    "all_gather with out": lambda g, x, root: gathered(g, x * g.rank),
    "gather": lambda g, x, root: g.gather(x * g.rank, root),
    "scatter": lambda g, x, root: scattered(g, x),
    "all_to_all": lambda g, x, root: g.all_to_all([x * g.rank + r for r in range(g.size)]),
    "reduce_scatter": lambda g, x, root: g.reduce_scatter([x * r for r in range(g.size)]),
    "scan": lambda g, x, root: g.scan(x.copy()),
    "barrier": lambda g, x, root: g.barrier(),
    "a number": lambda g, x, root: g.all_reduce(g.rank + 0.5),
}
operations = pytest.mark.parametrize("name", OPERATIONS)


def same(found, expected):
    assert type(found) is type(expected)
    if isinstance(found, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(found, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


async def called(ranks, start, order=None):
    works = {rank: start(ranks[rank]) for rank in order or range(len(ranks))}
    return [await works[rank] for rank in range(len(ranks))]


def express_of(group):
    express = group._context.express
    assert isinstance(express, MultihostExpress)
    return express


def orders(size):
    """Each rank is last once."""
    return [[*range(last + 1, size), *range(last + 1)] for last in range(size)]


@layouts
@operations
@pytest.mark.sample(14)
async def test_it_gives_what_the_ordinary_way_gives(on_hosts, layout, name):
    """Whoever is last, whoever goes the ordinary way, and whatever the root."""
    async with on_hosts(layout) as ranks:
        x = np.arange(5.0)
        kept = [express_of(group) for group in ranks]
        for root in range(len(ranks)):

            def start(group, root=root):
                return OPERATIONS[name](group, x, root)

            for group in ranks:
                group._context.express = None
            expected = await called(ranks, start)
            for turn, order in enumerate([range(len(ranks))] * 3 + orders(len(ranks))):
                for group, express in zip(ranks, kept, strict=True):
                    odd = turn > 3 and (group.rank + turn) % 4 == 0
                    group._context.express = None if odd else express
                same(await called(ranks, start, order), expected)
        for group, express in zip(ranks, kept, strict=True):
            group._context.express = express
        nothing_is_left(ranks)


@layouts
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.SUM, "f4"),
        (ReduceOp.AVG, "f2"),
        (ReduceOp.MAX, "i2"),
        (ReduceOp.premul_sum(0.5), "f8"),
        (ReduceOp.PRODUCT, "c8"),
        (ReduceOp.LAND, "u1"),
        (ReduceOp.SUM, torch.bfloat16),
    ],
    ids=str,
)
async def test_reductions_of_all_kinds(on_hosts, layout, op, dtype):
    random = np.random.default_rng(3)
    async with on_hosts(layout) as ranks:
        values = [random.normal(size=(3, 7)) * 10 for _ in ranks]

        def start(group):
            value = values[group.rank]
            if isinstance(dtype, torch.dtype):
                return group.all_reduce(torch.tensor(value, dtype=dtype), op)
            return group.all_reduce(value.astype(dtype), op)

        kept = [express_of(group) for group in ranks]
        for group in ranks:
            group._context.express = None
        expected = await called(ranks, start)
        for group, express in zip(ranks, kept, strict=True):
            group._context.express = express
        for order in orders(len(ranks)):
            for found, due in zip(await called(ranks, start, order), expected, strict=True):
                assert type(found) is type(due)
                assert (
                    bytes(memoryview(found)) == bytes(memoryview(due))
                    if (isinstance(found, np.ndarray))
                    else torch.equal(found, due)
                )
        nothing_is_left(ranks)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast in place", "all_gather", "barrier"])
async def test_whoever_waits_for_nobody_is_done_within_the_call(on_hosts, name):
    """The last rank to call has what its host and the other hosts have shown."""
    async with on_hosts("aab") as ranks:
        x = np.arange(4.0)
        for _ in range(3):
            await called(ranks, lambda g: OPERATIONS[name](g, x, 0))
        # Two hosts meet in both plans: the frame of the other leader is there.
        works = [OPERATIONS[name](ranks[rank], x, 0) for rank in (1, 2)]
        await until(lambda: ranks[0]._context.calls.arrivals.early)
        last = OPERATIONS[name](ranks[0], x, 0)
        assert last.done()
        assert not any(work.done() for work in works)
        await asyncio.gather(*works)
        nothing_is_left(ranks)


@pytest.mark.parametrize("layout", ["abab", "aabbbc"])
@pytest.mark.parametrize("length", [16_384, 120_000, 262_144, 300_000])
async def test_arrays_that_travel_with_the_words_or_behind_them(on_hosts, layout, length):
    """A broadcast of 64 KiB, 480 KB, 1 MiB, and more; an all_gather of a tenth of that."""
    async with on_hosts(layout) as ranks:
        size = len(ranks)
        for turn, root in enumerate([0, 0, 0, 0, size - 1, size - 1, size - 1, 1]):
            x = np.arange(length, dtype=np.float32) + turn
            part = x[: length // 10]

            def broadcast(group, x=x, root=root):
                return taken(group, x, root)

            def gather(group, part=part):
                return gathered(group, part + group.rank)

            for result in await called(ranks, broadcast, orders(size)[turn % 3]):
                same(result, x)
            for result in await called(ranks, gather):
                same(result, np.stack([part + rank for rank in range(size)]))
        nothing_is_left(ranks)


@pytest.mark.parametrize(
    "name", ["all_reduce", "reduce", "broadcast in place", "all_gather with out", "barrier"]
)
async def test_sixteen_ranks_on_four_hosts(on_hosts, name):
    async with on_hosts("aaaabbbbccccdddd") as ranks:
        x = np.arange(6.0)
        kept = [express_of(group) for group in ranks]
        for group in ranks:
            group._context.express = None
        expected = await called(ranks, lambda g: OPERATIONS[name](g, x, 5))
        for group, express in zip(ranks, kept, strict=True):
            group._context.express = express
        for order in [range(16)] * 3 + orders(16)[::5]:
            same(await called(ranks, lambda g: OPERATIONS[name](g, x, 5), order), expected)
        nothing_is_left(ranks)


async def test_values_are_not_made_again(on_hosts, monkeypatch):
    def refused(*_):
        raise AssertionError("it is known, and made nevertheless")

    async with on_hosts("aabbb") as ranks:
        x = np.arange(4.0)
        for name in ("broadcast in place", "all_gather with out", "gather", "barrier"):

            def start(group, name=name):
                return OPERATIONS[name](group, x, 3)

            for _ in range(3):
                expected = await called(ranks, start)
            for group in ranks:
                for recipe in express_of(group)._recipes.values():
                    monkeypatch.setattr(recipe, "_make", refused)
            for order in orders(5):
                same(await called(ranks, start, order), expected)


@pytest.mark.parametrize("layout", ["aabb", "abab", "aabbbc"])
async def test_values_of_other_lengths(on_hosts, layout):
    """Where one rank shows something else than was known, all blobs part; frames may be as long
    nevertheless."""
    async with on_hosts(layout) as ranks:
        size = len(ranks)
        kinds = [np.arange(4.0), np.arange(9, dtype="i2"), np.arange(8, dtype="f4"), "words"]
        for shown in itertools.product(range(4), repeat=2):
            for odd in (0, 1, size - 1):

                def value(rank, shown=shown, odd=odd):
                    return kinds[shown[rank == odd]]

                found = await called(ranks, lambda g: g.all_gather(value(g.rank)))
                for result in found:
                    same(result, [value(rank) for rank in range(size)])

                def start(group, value=value, odd=odd):
                    return group.broadcast(value(odd) if group.rank == odd else None, odd)

                same(await called(ranks, start), [value(odd)] * size)
        nothing_is_left(ranks)


async def test_two_that_swap_their_lengths(on_hosts):
    """The frame is as long as it was, and the blobs in it are not where they were."""
    async with on_hosts("aabb") as ranks:
        long, short = np.arange(8.0), np.arange(2.0)
        for first, second in [(long, short)] * 3 + [(short, long), (long, short)]:
            expected = [first, second, first, second]

            def start(group, expected=expected):
                return group.all_gather(expected[group.rank])

            for order in orders(4):
                found = await called(ranks, start, order)
                for result in found:
                    same(result, expected)
        nothing_is_left(ranks)


@layouts
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "broadcast", "all_gather", "barrier"])
@pytest.mark.sample(8)
async def test_a_wrong_call_on_one_rank(on_hosts, layout, name):
    async with on_hosts(layout) as ranks:
        x = np.ones(3)
        for _ in range(3):
            await called(ranks, lambda g: OPERATIONS[name](g, x, 0))
        for odd in range(len(ranks)):
            for wrong in (lambda g: g.all_reduce(np.ones(7)), lambda g: g.gather(x, 0)):
                works = [wrong(g) if g.rank == odd else OPERATIONS[name](g, x, 0) for g in ranks]
                await asyncio.wait(works)
                for work in works:
                    assert isinstance(work.exception(), MismatchError)
        await called(ranks, lambda g: OPERATIONS[name](g, x, 0))
        nothing_is_left(ranks)


@layouts
async def test_out_that_does_not_fit_on_one_rank(on_hosts, layout):
    """Is nobody's result, though the calls are known."""
    async with on_hosts(layout) as ranks:
        size, x = len(ranks), np.arange(3.0)

        def start(group, outs):
            return group.all_gather(x, out=outs[group.rank])

        for _ in range(3):
            await called(ranks, lambda g: start(g, [np.zeros((size, 3)) for _ in ranks]))
        for odd in range(size):
            outs = [np.zeros((size, 3 + (rank == odd))) for rank in range(size)]
            works = [start(group, outs) for group in ranks]
            await asyncio.wait(works)
            assert all(isinstance(work.exception(), MismatchError) for work in works)
            assert not any(out.any() for out in outs)
        outs = [np.zeros((size, 3)) for _ in ranks]
        await called(ranks, lambda g: start(g, outs))
        assert all((out == x).all() for out in outs)
        nothing_is_left(ranks)


@layouts
@pytest.mark.parametrize("name", ["all_reduce", "broadcast in place", "all_gather", "reduce"])
async def test_cancelled_at_every_turn(on_hosts, layout, name):
    """Nothing is written to what its caller has back, and the group goes on."""
    async with on_hosts(layout) as ranks:
        x = np.ones(3)
        for _ in range(3):
            await called(ranks, lambda g: OPERATIONS[name](g, x, 0))
        for victim, turns in itertools.product(range(len(ranks)), range(7)):
            works = [OPERATIONS[name](g, x, 0) for g in ranks]
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled = works[victim].cancel()
            await asyncio.wait(works)
            for rank, work in enumerate(works):
                if rank != victim and not work.cancelled() and work.exception() is not None:
                    assert cancelled
                    assert isinstance(work.exception(), CollectiveAbortedError)
            total = np.full(3, 1.0)
            await asyncio.gather(*[g.all_reduce(total if g.rank == 0 else x.copy()) for g in ranks])
            assert (total == len(ranks)).all()
        nothing_is_left(ranks)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast in place", "all_gather", "reduce"])
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.sample(5)
async def test_a_rank_is_lost_at_every_turn(on_hosts, name, victim):
    """Who lives has the result, or hears who is lost."""
    x = np.ones(3)
    for turns in range(5):
        async with on_hosts("aabb") as ranks:
            for _ in range(3):
                await called(ranks, lambda g: OPERATIONS[name](g, x, 0))
            works = [OPERATIONS[name](g, x, 0) for g in ranks]
            for _ in range(turns):
                await asyncio.sleep(0)
            ranks[victim].abort("enough")
            await asyncio.wait(works)
            for rank, work in enumerate(works):
                if rank != victim and (error := work.exception()) is not None:
                    if isinstance(error, CollectiveAbortedError):
                        assert error.rank == victim
                    else:
                        assert isinstance(error, PeerLostError)
                        assert victim in error.ranks


@layouts
async def test_a_rank_that_is_late(on_hosts, layout):
    """Who waits in vain says for whom, and the group goes on."""
    async with on_hosts(layout) as ranks:
        x = np.ones(3)
        for _ in range(3):
            await called(ranks, lambda g: g.all_gather(x))
        late = len(ranks) - 1
        works = [group.all_gather(x, timeout=0.05) for group in ranks[:late]]
        await asyncio.wait(works)
        errors = [work.exception() for work in works]
        assert any(isinstance(error, CollectiveTimeoutError) for error in errors)
        assert all(isinstance(e, (CollectiveTimeoutError, CollectiveAbortedError)) for e in errors)
        with pytest.raises((CollectiveTimeoutError, CollectiveAbortedError)):
            await ranks[late].all_gather(x)
        await called(ranks, lambda g: g.all_gather(x))
        nothing_is_left(ranks)


async def test_a_rank_that_is_alone_on_its_host_takes_few_pages(on_hosts):
    async with on_hosts("abbb") as ranks:
        await called(ranks, lambda g: g.all_reduce(np.ones(1000)))
        alone = ranks[0]._context.lane.board
        memory = np.frombuffer(alone.area(0, 0).obj, np.uint8)
        assert memory.nbytes == LANE
        start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        pages = (ctypes.c_ubyte * (LANE // mmap.PAGESIZE))()
        size = ctypes.c_size_t(LANE)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), size, pages) == 0
        assert 0 < sum(page & 1 for page in pages) < len(pages) / 2  # even if pages are huge


@layouts
async def test_recipes_share_the_memory_of_partial_results(on_hosts, layout):
    """One call at a time uses it, whatever it reduces."""
    async with on_hosts(layout) as ranks:
        size = len(ranks)
        for number in range(60):
            # Lengths and bytes of a number change up and down.
            x = np.ones(2000 + number * (-1) ** number, ("f4", "f2", "f8")[number % 3])
            for found in await called(ranks, lambda g, x=x: g.all_reduce(x * (g.rank + 1))):
                assert (found == size * (size + 1) / 2).all()
        for group in ranks:
            recipes = [*express_of(group)._recipes.values()]
            assert len(recipes) == 60
            partials = [recipe.phase.memory.vectors[TMP] for recipe in recipes]
            assert len({x.ctypes.data for one in partials for x in one.arrays}) <= 4


async def test_what_waits_keeps_no_array(on_hosts):
    async with on_hosts("aab") as ranks:
        for _ in range(4):
            await called(ranks, lambda g: g.all_gather(np.ones(3)))
            await called(ranks, lambda g: g.all_reduce(np.ones(3)))
            await called(ranks, lambda g: g.broadcast(WIDE if g.rank == 0 else None))
        for group in ranks:
            express = express_of(group)
            kept = [*express._recipes.values(), *express._known.values()]
            assert all(each.frames.memory is None for each in kept if each is not None)


@operations
async def test_a_group_that_ends_unmaps_its_memory_without_the_collector(on_hosts, name):
    async def use():
        async with on_hosts("abab") as ranks:
            for _ in range(6):
                await called(ranks, lambda group: OPERATIONS[name](group, np.arange(5.0), 0))

    with unmapping_all():
        await use()
        for _ in range(3):  # the loop lets go of what it has called last
            await asyncio.sleep(0)


@pytest.mark.parametrize("layout", ["aaabcdefg", "aabbccddeeffgg"])
@pytest.mark.parametrize("waits", [False, True])
async def test_two_values_that_exchange_their_lengths(on_hosts, layout, waits):
    async with on_hosts(layout) as ranks:
        await exchanging_lengths(ranks, waits)
        nothing_is_left(ranks)
