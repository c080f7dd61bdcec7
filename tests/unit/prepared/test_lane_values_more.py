"""Prepared calls with large arrays: their description goes the prepared way, their data the
ordinary way."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from sharing import everyone, sharing

from aiodist import CollectiveAbortedError, MismatchError
from aiodist.collectives import exchange
from aiodist.prepared import lane_values

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("no_turn_is_due", "few_are_shown")

LARGE = 5000
"""Elements of an array whose data does not fit into a blob, with `few_are_shown`."""


@pytest.fixture
def few_are_shown(monkeypatch):
    monkeypatch.setattr(exchange, "ROOM_IN_MEMORY", 8192)


@pytest.fixture
def moved(monkeypatch):
    """The operations whose arrays moved without making the call again."""
    seen = []
    real = lane_values.ValueRecipe.moved
    monkeypatch.setattr(
        lane_values.ValueRecipe, "moved", lambda *args: seen.append(args[0].op) or real(*args)
    )
    return seen


def large_calls(make, listed, number, size):
    """For each operation, return what starts it on a rank, and the values that it should give."""
    plain = [np.arange(float(LARGE)) * (rank + 1) + number for rank in range(size)]
    src = size - 1

    def out():
        rows = make(np.zeros((size, LARGE)))
        return list(rows) if listed else rows

    def slots(rank):
        return [make(plain[rank] + 0.5 * dst) for dst in range(size)]

    return {
        "all_gather": (
            lambda g: g.all_gather(make(plain[g.rank]), out=out()),
            lambda rank: plain,
        ),
        "broadcast": (
            lambda g: g.broadcast(make(plain[g.rank]), src),
            lambda rank: plain[src],
        ),
        "all_to_all": (
            lambda g: g.all_to_all(slots(g.rank), out=out()),
            lambda rank: [x + 0.5 * rank for x in plain],
        ),
    }


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_large_arrays_are_known_as_well(run, moved, make, listed, size):
    """Once arrays are known, only their data is looked at, no matter which rank comes last."""

    async def calls(ranks, number, order):
        for start, due in large_calls(make, listed, number, size).values():
            await everyone(ranks, lambda g: g.barrier())
            works = {rank: start(ranks[rank]) for rank in order}
            for rank, work in works.items():
                result = await work
                rows = result if isinstance(result, list) else [result]
                found = np.stack([np.asarray(row) for row in rows]).reshape(-1)
                assert np.array_equal(found, np.ravel(due(rank)))

    async def main():
        async with sharing(size) as ranks:
            for number in range(3):
                await calls(ranks, number, range(size))
            moved.clear()
            for last in range(size):
                await calls(ranks, last, [*range(last + 1, size), *range(last + 1)])

    run(main())
    assert {op: moved.count(op) for op in set(moved)} == dict.fromkeys(
        ("all_gather", "broadcast", "all_to_all"), size * size
    )


def test_large_arrays_that_are_not_what_they_were(run, moved):
    """Arrays change on one rank or on both.

    They have other shapes, are small, have swapped bytes, lie in memory of the group, or have no
    place for the result. If they fit, they arrive. If they do not, no rank has a result.
    """

    async def main():
        async with sharing(2) as ranks:
            x, small, swapped = np.arange(2.0 * LARGE), np.arange(2.0), np.arange(2.0 * LARGE)
            swapped = swapped.astype(">f8")
            for _ in range(3):
                outs = [np.zeros_like(x) for _ in ranks]
                await everyone(
                    ranks, lambda g, o=outs: g.all_to_all([*x.reshape(2, -1)], out=o[g.rank])
                )
            here = [g.empty(x.shape, np.float64) for g in ranks]
            for each in here:
                each[:] = x
            for one, other in [
                (x, x), (small, small), (x, x), (x, small), (small, x), (x[2:], x[2:]),
                (x, x[2:]), (swapped, swapped), (swapped, x), (here[0], x), (here[0], here[1]),
                (x, x),
            ]:  # fmt: skip
                given = (one, other)
                fits = one.size == other.size
                outs = [np.zeros(v.shape) for v in given]
                places = [[outs[0], None], outs]
                for out in places if fits else places[1:]:
                    works = [
                        g.all_to_all([*given[g.rank].reshape(2, -1)], out=out[g.rank])
                        for g in ranks
                    ]
                    results = await asyncio.gather(*works, return_exceptions=True)
                    for rank, result in enumerate(results):
                        half = one.size // 2
                        if fits:
                            found = np.concatenate([*result]) if out[rank] is None else result
                            due = [v[half * rank :][:half] for v in given]
                            assert np.array_equal(found, np.concatenate(due))
                        else:
                            assert isinstance(result, MismatchError)
                            assert not out[rank].any()

    run(main())
    assert moved


@pytest.mark.parametrize("op", ["all_gather", "broadcast", "all_to_all"])
def test_a_large_array_that_one_rank_gives_up(run, moved, op):
    """No rank gets it, and all ranks get the next one."""

    async def main():
        async with sharing(2) as ranks:
            for number in range(4):
                start, due = large_calls(np.array, False, number, 2)[op]
                if number == 3:
                    early = start(ranks[0])
                    await asyncio.sleep(0)
                    early.cancel()
                    with pytest.raises(CollectiveAbortedError):
                        await start(ranks[1])
                found = await everyone(ranks, start)
                for rank, result in enumerate(found):
                    assert np.array_equal(np.ravel(result), np.ravel(due(rank)))

    run(main())
    assert op in moved


def test_an_unknown_form_of_one_rank_changes_nothing_that_is_known(run):
    """Else the next call would be done with what another rank showed in this one."""

    async def main():
        async with sharing(3) as ranks:

            async def gather(number, *, is_tensor=False, fits=True):
                def start(g):
                    length = LARGE if fits or g.rank else LARGE + 1
                    x = np.full(length, 10.0 * number + g.rank)
                    if is_tensor and g.rank == 2:
                        return g.all_gather(torch.from_numpy(x))
                    return g.all_gather(x, out=[np.zeros(LARGE) for _ in ranks])

                await everyone(ranks, lambda g: g.barrier())  # so these calls use the same area
                return await asyncio.gather(*map(start, ranks), return_exceptions=not fits)

            for number in range(6):
                await gather(number, is_tensor=number > 2)
            for error in await gather(6, fits=False):
                assert isinstance(error, MismatchError)
            for parts in await gather(7, is_tensor=True):
                assert [{*np.asarray(part)} for part in parts] == [{70.0}, {71.0}, {72.0}]

    run(main())
