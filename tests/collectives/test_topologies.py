"""Neighbourhood collectives on every transport, and what becomes of them when something fails."""

from __future__ import annotations

import asyncio
import gc
import math

import numpy as np
import pytest

import aiodist
from aiodist import Graph, Grid

pytestmark = pytest.mark.strength(2)


@pytest.mark.parametrize("dims", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("periodic", [False, True])
def test_along_a_grid(run, groups, everyone, dims, periodic):
    async def main():
        async with groups(math.prod(dims)) as ranks:
            grids = [Grid(group, dims, periodic=periodic) for group in ranks]

            async def check(group):
                grid = grids[group.rank]
                work = grid.neighbor_all_gather(np.full(3, group.rank))
                assert work.op == "neighbor_all_gather"
                got = await work
                assert [None if x is None else x[0] for x in got] == list(grid.sources)
                # Each value says where it came from, and by which place it left.
                xs = [(group.rank, place) for place in range(2 * len(dims))]
                came = await grid.neighbor_all_to_all(xs)
                assert came == [
                    None if rank is None else (rank, place ^ 1)
                    for place, rank in enumerate(grid.sources)
                ]

            await everyone(ranks, check)

    run(main())


def test_along_a_graph(run, groups, everyone):
    sources = {0: [1, 1, 2], 1: [], 2: [2, 0]}
    destinations = {0: [2], 1: [0, 0], 2: [0, 2]}

    async def main():
        async with groups(3) as ranks:

            async def check(group):
                graph = Graph(group, sources[group.rank], destinations[group.rank])
                xs = [[group.rank, place] for place in range(len(graph.destinations))]
                return await graph.neighbor_all_to_all(xs, tag="g")

            assert await everyone(ranks, check) == [
                [[1, 0], [1, 1], [2, 0]],
                [],
                [[2, 1], [0, 0]],
            ]

    run(main())


def test_into_arrays(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:

            async def check(group):
                out = [np.zeros(2), np.zeros(2)]
                grid = Grid(group, (2,), periodic=True)
                got = await grid.neighbor_all_to_all([np.ones(2), np.full(2, 2.0)], out=out)
                assert [into.tolist() for into in out] == [[2.0, 2.0], [1.0, 1.0]]
                assert all(a is b for a, b in zip(got, out, strict=True))

            await everyone(ranks, check)

    run(main())


def test_the_border_needs_no_if(run, groups, everyone):
    """Where there is no neighbour, what is in `out` stays, as by MPI_PROC_NULL."""

    async def main():
        async with groups(3) as ranks:

            async def check(group):
                grid = Grid(group, (3,))
                halo = [np.full(1, -1.0), np.full(1, 9.0)]  # the values at the border
                mine = np.full(1, float(group.rank))
                got = await grid.neighbor_all_gather(mine, out=halo)
                assert all(a is b for a, b in zip(got, halo, strict=True))
                first = [float(one[0]) for one in halo]
                await grid.neighbor_all_to_all([mine, mine], out=halo)
                return first, [float(one[0]) for one in halo]

            found = await everyone(ranks, check)
            assert [first for first, _ in found] == [[-1.0, 1.0], [0.0, 2.0], [1.0, 9.0]]
            assert [second for _, second in found] == [first for first, _ in found]

    run(main())


def test_two_values_of_one_rank_need_two_places(run, groups):
    """They are one slot of an all_to_all, which may have an array twice (tied weights)."""

    async def main():
        async with groups(2) as ranks:
            pairs = [Graph(ranks[0], [], [1, 1]), Graph(ranks[1], [0, 0], [])]
            x = np.zeros(2)
            with pytest.raises(ValueError, match=r"out\[0\] and out\[1\] share memory"):
                pairs[1].neighbor_all_to_all([], out=[x, x])
            with pytest.raises(aiodist.CollectiveAbortedError, match="share memory"):
                await pairs[0].neighbor_all_to_all([np.ones(2), np.full(2, 2.0)])
            # Nothing is written to a place without a neighbour, so it may be any array.
            halves = [Grid(group, (2,)) for group in ranks]
            works = [grid.neighbor_all_gather(np.ones(2), out=[x, x]) for grid in halves]
            for values in await asyncio.gather(*works):
                assert [value.tolist() for value in values] == [[1.0, 1.0]] * 2

    run(main())


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda grid: grid.neighbor_all_to_all([1]), ValueError),
        (lambda grid: grid.neighbor_all_to_all(1), TypeError),
        (lambda grid: grid.neighbor_all_gather({1, 2}), TypeError),
        (lambda grid: grid.neighbor_all_gather(1, out=[None]), ValueError),
    ],
)
def test_a_wrong_call_on_one_rank_alone(run, groups, call, error):
    async def main():
        async with groups(3) as ranks:
            grids = [Grid(group, (3,)) for group in ranks]
            with pytest.raises(error):
                call(grids[0])
            works = [grid.neighbor_all_gather(0) for grid in grids[1:]]
            for outcome in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(outcome, aiodist.CollectiveAbortedError)
                assert outcome.rank == 0
                assert outcome.op == "neighbor_all_gather"
            got = await asyncio.gather(*[grid.neighbor_all_gather(7) for grid in grids])
            assert got == [[None, 7], [7, 7], [7, None]]

    run(main())


def test_the_tag_of_a_wrong_call(run, groups):
    async def main():
        async with groups(3) as ranks:
            grids = [Grid(group, (3,)) for group in ranks]
            with pytest.raises(ValueError, match="places"):
                grids[0].neighbor_all_to_all([1], tag=np.int64(3))
            works = [grid.neighbor_all_gather(0, tag=3) for grid in grids[1:]]
            for outcome in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(outcome, aiodist.CollectiveAbortedError)
            # A bad tag says of no call that it was refused, so the others hear nothing of it.
            with pytest.raises(TypeError, match=r"a tag is a str or an int, not 1\.5"):
                grids[0].neighbor_all_to_all([1], tag=1.5)
            got = await asyncio.gather(*[grid.neighbor_all_gather(7) for grid in grids])
            assert got == [[None, 7], [7, 7], [7, None]]

    run(main())


def test_a_cancelled_call_and_a_lost_rank(run, groups):
    async def main():
        async with groups(3) as ranks:
            grids = [Grid(group, (3,)) for group in ranks]
            works = [grid.neighbor_all_gather(0) for grid in grids[1:]]
            works[0].cancel()
            with pytest.raises(aiodist.CollectiveAbortedError):
                await works[1]
            with pytest.raises(aiodist.CollectiveAbortedError):
                await grids[0].neighbor_all_gather(0)
            pending = grids[0].neighbor_all_gather(0)
            ranks[2].abort("enough")
            with pytest.raises(aiodist.PeerLostError):
                await pending

    run(main())


def test_a_forgotten_await_is_told(run, groups):
    async def main():
        async with groups(2) as ranks:
            grids = [Grid(group, (2,)) for group in ranks]
            with pytest.warns(RuntimeWarning, match="the Work of neighbor_all_gather was dropped"):
                grids[0].neighbor_all_gather(1)
                await grids[1].neighbor_all_gather(2)
                await asyncio.gather(*[group.barrier() for group in ranks])
                gc.collect()

    run(main())


@pytest.mark.parametrize("out", [None, []])
def test_ranks_that_disagree_about_neighbours(run, groups, out):
    async def main():
        async with groups(2) as ranks:
            graphs = [Graph(ranks[0], [1]), Graph(ranks[1], [], [])]
            one, two = await asyncio.gather(
                graphs[0].neighbor_all_gather(5),
                graphs[1].neighbor_all_gather(5, out=out),
                return_exceptions=True,
            )
            assert "sent 0 values to rank 0, which has it as a source 1 times" in str(one)
            assert "sent 1 values to rank 1" in str(two)

    run(main())


def test_a_rank_that_calls_all_to_all_instead(run, groups):
    async def main():
        async with groups(2) as ranks:
            for given in (5, "two", np.zeros(1), {0: 1}, None):
                work = Graph(ranks[0], [1]).neighbor_all_gather(1)
                await ranks[1].all_to_all([given, given])
                with pytest.raises(aiodist.MismatchError, match=r"rank 1 .* to rank 0, which has"):
                    await work

    run(main())


def test_blocking_ranks(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:

            def body(group):
                grid = Grid(group.blocking(), (0,))
                if group.rank == 0:
                    with pytest.raises(ValueError, match="places"):
                        grid.neighbor_all_to_all([])
                else:
                    with pytest.raises(aiodist.CollectiveAbortedError) as caught:
                        grid.neighbor_all_to_all([1, 2])
                    assert caught.value.op == "neighbor_all_to_all"
                return grid.neighbor_all_gather(group.rank)

            got = await asyncio.gather(*[asyncio.to_thread(body, group) for group in ranks])
            assert got == [[None, 1], [0, None]]

    run(main())
